"""What a page of another site can do to a server without keys, in Chromium: nothing."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.scripted_server import MODEL, ScriptedServer

ATTACKS = """async ([target, model]) => {
  const body = JSON.stringify({ model, prompt: "from a foreign page" });
  const post = (path, body) => fetch(target + path, { method: "POST", mode: "no-cors", body });
  const read = (path) => fetch(target + path).then((answer) => answer.text(), () => "");
  await post("/api/generate", body);  // text/plain
  await post("/api/generate", new Blob([body]));  // no type
  await post("/api/chat", new URLSearchParams({ [body]: "" }));  // a form
  await post("/start_profile");
  const frame = document.createElement("iframe");
  frame.name = "hidden";
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: target + "/api/generate", target: "hidden" });
  form.enctype = "text/plain";
  document.body.append(form);
  await new Promise((done) => { frame.onload = done; form.submit(); });
  const image = new Image();
  await new Promise((done) => { image.onerror = done; image.src = target + "/metrics"; });
  return [await read("/metrics"), await read("/xray/events"), await read("/v1/models")];
}"""
NUM_ATTACKS = 9


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>evil</title><a href='/'>a link</a>")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of another site."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        yield f"http://evil.example:{site.server_port}/"
        site.shutdown()


def test_a_foreign_page_drives_nothing_and_reads_nothing(tab: Any, elsewhere: str) -> None:
    with ScriptedServer() as server:
        tab.goto(elsewhere)
        assert tab.evaluate(ATTACKS, [server.url, MODEL]) == [""] * 3
        assert server.received == []
        page = httpx.get(f"{server.url}/metrics").text
        assert f'minisgl_errors_total{{code="foreign_page"}} {NUM_ATTACKS}.0' in page
        rebound = server.url.replace("127.0.0.1", "evil.example")
        answer = tab.goto(rebound)
        assert answer.status == 403
        assert "--allowed-host" in answer.text()
        assert tab.evaluate("fetch('/metrics').then((answer) => answer.status)") == 403


def test_a_link_on_a_foreign_page_opens_the_chat(tab: Any, elsewhere: str) -> None:
    with ScriptedServer() as server:
        tab.goto(elsewhere)
        tab.evaluate("url => { document.links[0].href = url }", server.url)
        tab.click("a")
        tab.wait_for_selector("#model:has-text('scripted')")
        assert tab.evaluate("fetch('v1/models').then((answer) => answer.status)") == 200
