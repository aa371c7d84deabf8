"""Pictures on the page at `/`: dropped, pasted and chosen, made small, sent, kept."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from helpers.page import ask, until, wait_answers
from helpers.scripted_server import ScriptedServer

pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image

TRANSFER = """([event, name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
  const given = new DataTransfer();
  if (name) given.items.add(new File([bytes], name, { type }));
  else given.setData(type, "https://elsewhere.example/");
  const options = { bubbles: true, cancelable: true };
  const made = event === "drop"
    ? new DragEvent("drop", { dataTransfer: given, ...options })
    : new ClipboardEvent("paste", { clipboardData: given, ...options });
  return !document.body.dispatchEvent(made);
}"""
MARKUP = "<img src=x onerror='window.hit = 1'>.png"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>window.hit = 1</script></svg>'


def give(tab: Any, event: str, name: str, kind: str, data: bytes) -> bool:
    """Drop or paste a file. Returns whether the page kept the browser from acting on it."""
    taken: bool = tab.evaluate(TRANSFER, [event, name, kind, base64.b64encode(data).decode()])
    return taken


def picture(width: int, height: int, kind: str = "PNG", *, is_noise: bool = False) -> bytes:
    file = io.BytesIO()
    image = Image.effect_noise((width, height), 90) if is_noise else Image.new("L", (width, height))
    image.convert("RGB").save(file, kind)
    return file.getvalue()


def shown(tab: Any, place: str) -> list[str]:
    return [image.get_attribute("alt") for image in tab.locator(f"{place} img").all()]


def sent_images(request: Any) -> list[Image.Image]:
    """Return the pictures of the last message of a request."""
    content = request.value.post_data_json["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert all(len(url) <= 2**20 for url in urls)
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


@pytest.fixture
def seeing(tab: Any, scripted: ScriptedServer, answered: Callable[..., None]) -> str:
    """The address of a server whose model reads images, and answers "A cat."."""
    model = {"id": "eyes", "capabilities": ["completion", "vision"], "context_length": 4096}
    body = json.dumps({"data": [model]})
    tab.route("**/v1/models", lambda route: route.fulfill(body=body))
    answered("A cat.")
    return scripted.url


def test_pictures_are_sent_kept_and_asked_about_again(tab: Any, seeing: str) -> None:
    tab.goto(seeing)
    assert give(tab, "drop", MARKUP, "image/png", picture(40, 30))
    until(tab, "document.querySelectorAll('#composer .pictures img').length === 1")
    assert give(tab, "paste", "second.jpg", "image/jpeg", picture(50, 20, "JPEG"))
    until(tab, "document.querySelectorAll('#composer .pictures img').length === 2")
    tab.set_input_files(
        "#picture-files",
        [{"name": "third.gif", "mimeType": "image/gif", "buffer": picture(9, 9, "GIF")}],
    )
    tab.wait_for_selector("#composer [alt='third.gif']")
    assert shown(tab, "#composer") == [MARKUP, "second.jpg", "third.gif"]
    tab.click("[aria-label='Remove second.jpg']")
    with tab.expect_request("**/v1/chat/completions") as request:
        ask(tab, "What is this?")
    assert [image.size for image in sent_images(request)] == [(40, 30), (9, 9)]
    content = request.value.post_data_json["messages"][0]["content"]
    assert content[-1] == {"type": "text", "text": "What is this?"}
    wait_answers(tab, 1)
    assert shown(tab, "#composer") == []
    assert shown(tab, ".question") == [MARKUP, "third.gif"]

    tab.reload()
    wait_answers(tab, 1)
    assert shown(tab, ".question") == [MARKUP, "third.gif"]
    with tab.expect_request("**/v1/chat/completions") as request:
        tab.click("[aria-label='Answer again']")
    assert len(sent_images(request)) == 2
    tab.wait_for_selector(".answer .nav:has-text('2/2')")
    wait_answers(tab, 1)

    tab.click("[aria-label='Edit this message']")
    tab.click(".editor [aria-label='Remove third.gif']")
    with tab.expect_request("**/v1/chat/completions") as request:
        tab.click(".editor >> text=Send")
    assert [image.size for image in sent_images(request)] == [(40, 30)]
    wait_answers(tab, 1)
    assert shown(tab, ".question") == [MARKUP]
    assert tab.evaluate("window.hit") is None


def test_large_pictures_are_made_small_and_others_refused(tab: Any, seeing: str) -> None:
    tab.goto(seeing)
    bomb = bytearray(picture(40, 30))
    bomb[16:24] = struct.pack(">II", 9_000, 9_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    for name, kind, data, why in (
        ("a.svg", "image/svg+xml", SVG, "a.svg is no picture of pixels."),
        ("b.png", "image/png", SVG, "This browser cannot read b.png."),
        ("c.txt", "text/plain", b"words", "c.txt is no picture of pixels."),
        ("d.png", "image/png", picture(40, 30)[:30], "This browser cannot read d.png."),
        ("e.png", "image/png", bytes(bomb), "e.png has 9,000 × 9,000 pixels, which is too large."),
    ):
        assert give(tab, "drop", name, kind, data)
        tab.wait_for_selector(f".toast:has-text('{why}')")
    assert shown(tab, "#composer") == []
    assert tab.is_disabled("#send")
    give(tab, "drop", "noise.jpg", "image/jpeg", picture(2600, 1700, "JPEG", is_noise=True))
    tab.wait_for_selector("#composer [alt='noise.jpg']")
    with tab.expect_request("**/v1/chat/completions") as request:
        tab.click("#send")  # without words
    [image] = sent_images(request)
    assert image.width * image.height <= 2**22
    assert image.width / image.height == pytest.approx(2600 / 1700, rel=0.01)
    wait_answers(tab, 1)
    assert tab.text_content("#list a") == "noise.jpg"
    assert tab.evaluate("window.hit") is None


def test_a_model_of_text_says_so(tab: Any, scripted: ScriptedServer) -> None:
    """And the browser leaves the page for no drop."""
    tab.goto(scripted.url)
    tab.wait_for_selector("#model:has-text('scripted')")
    assert tab.is_hidden("#add-pictures")
    assert give(tab, "drop", "cat.png", "image/png", picture(4, 4))
    tab.wait_for_selector(".toast:has-text('scripted reads text only.')")
    assert give(tab, "drop", "", "text/uri-list", b"")
    assert not give(tab, "paste", "", "text/plain", b"")
    assert shown(tab, "#composer") == []


def test_an_imported_picture_is_one_that_this_page_makes(tab: Any, seeing: str) -> None:
    tab.goto(seeing)
    tab.click("#open-settings")
    for url, said in (
        ("data:image/png;base64,iVBORw0=", "One conversation is imported."),
        ("/start_profile", "A conversation in this file is damaged."),
        ("data:image/svg+xml;base64,iVBORw0=", "A conversation in this file is damaged."),
    ):
        node = {"id": "1", "parent": None, "role": "user", "content": ""}
        nodes = [{**node, "pictures": [{"name": "a", "url": url}]}]
        text = json.dumps({"format": "minisgl-conversations", "conversations": [{"nodes": nodes}]})
        file = {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
        tab.set_input_files("#import-file", [file])
        tab.wait_for_selector(f".toast:has-text('{said}')")
