"""The X-ray: the frames of a real engine, and the page that shows them."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.key_files import FILE, OTHER, SECRET, key_file
from helpers.router_thread import RouterThread
from helpers.running_server import RunningServer
from helpers.scripted_server import ScriptedServer
from minisgl.cli import run_command
from minisgl_gateway.keys.ring import KeyRing
from minisgl_gateway.watch.xray import Frame

STEP_NAMES = 13


@pytest.fixture
def load(builtin: RunningServer) -> Iterator[threading.Event]:
    """Requests with a common prefix, one after the other in four threads, until the event."""
    ended = threading.Event()

    def work(number: int) -> None:
        prefix = "You know engines and speak about them at length. " * 4
        with httpx.Client(base_url=builtin.url, timeout=60) as http:
            while not ended.is_set():
                messages = [
                    {"role": "system", "content": prefix},
                    {"role": "user", "content": f"What is {number} + 10?"},
                ]
                body = {"messages": messages, "max_tokens": 150 + 40 * number, "ignore_eos": True}
                http.post("/v1/chat/completions", json=body).raise_for_status()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    yield ended
    ended.set()
    for thread in threads:
        thread.join()


def frames_of(url: str) -> Iterator[dict[str, Any]]:
    """Yield the frames that have steps."""
    with httpx.stream("GET", f"{url}/xray/events", timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                frame = json.loads(line[6:])
                if frame["steps"]:
                    yield frame


def test_frames_have_what_the_engine_does(builtin: RunningServer, load: threading.Event) -> None:
    frames: list[dict[str, Any]] = []
    is_shared = False
    with closing(frames_of(builtin.url)) as more:
        for frame in islice(more, 200):
            frames.append(frame)
            if frame["tree"] is not None:  # pages and tree are not in each
                assert sum(frame["page_map"][1::2]) * frame["pages_per_cell"] >= frame["num_pages"]
                is_shared |= any(locks > 1 for _, _, locks in frame["tree"])
            is_busy = any(each["num_running"] > 1 for each in frames)
            if len(frames) >= 4 and is_busy and is_shared:
                break
    assert is_busy
    assert is_shared, "no prefix is shared"
    assert all(set(frame) == set(Frame.__struct_fields__) for frame in frames)
    assert not any(frame["texts"] for frame in frames), "no client asked for them"
    steps = [step for frame in frames for step in frame["steps"]]
    assert all(len(step) == STEP_NAMES for step in steps)
    due = steps[0][0] - frames[0]["num_skipped"]
    for frame in frames:  # every step, once
        numbers = [step[0] for step in frame["steps"]]
        due += frame["num_skipped"]
        assert numbers == list(range(due, due + len(numbers)))
        due += len(numbers)
    named = [step for step in steps if step[12] is not None]
    assert all(sum(step[12][1::2]) == step[9] + step[10] for step in named)
    assert all(step[10] == 0 for step in steps if step[12] is None), "only decodes repeat"


def test_the_page_shows_it_and_goes_back(
    tab: Any, builtin: RunningServer, load: threading.Event, images: Path
) -> None:
    tab.goto(f"{builtin.url}/#xray")
    tab.wait_for_selector(".numbers dd:not(:text-is('–')) >> nth=0")
    deadline = time.monotonic() + 60
    while not int(tab.text_content(".numbers dd >> nth=0").replace(",", "")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tab.click(".bars canvas", position={"x": 200, "y": 8})
    tab.wait_for_selector(".sentence:has-text('took')")
    tab.press(".bars canvas", "ArrowDown")
    assert "tokens" in tab.text_content("section.panel:has-text('KV pages') .quiet")
    if os.environ.get("MINISGL_SCREENSHOTS"):
        tab.set_viewport_size({"width": 1240, "height": 1160})
        time.sleep(9)
        tab.click(".bars canvas", position={"x": 700, "y": 150})
        time.sleep(0.2)
        tab.screenshot(path=images / "xray.png")
    tab.click("text=Pause")
    load.set()
    shown = tab.text_content(".numbers")
    time.sleep(0.6)
    assert tab.text_content(".numbers") == shown
    tab.press("#xray input[type=range]", "ArrowLeft")
    tab.wait_for_selector(".ago:has-text('s ago')")
    tab.click("text=Go on")
    tab.wait_for_selector(".ago:text-is('live')")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    found = axe.Axe().run(tab).response["violations"]
    assert [fault["id"] for fault in found if fault["impact"] in ("serious", "critical")] == []
    tab.goto(f"{builtin.url}/#")
    tab.wait_for_selector("#xray", state="hidden")


def test_the_page_sends_requests_to_watch(tab: Any, builtin: RunningServer) -> None:
    bodies: list[Any] = []
    tab.on("request", lambda sent: bodies.append(sent.post_data_json) if sent.post_data else None)
    tab.goto(f"{builtin.url}/#xray")
    tab.click("text=Send 8 requests")
    deadline = time.monotonic() + 60
    while len(bodies) < 8:  # on a busy machine they may end before a frame is drawn
        assert time.monotonic() < deadline
        tab.wait_for_timeout(20)
    tab.wait_for_selector(".panel button:enabled")
    assert len(bodies) == 8
    assert len({body["messages"][0]["content"] for body in bodies}) == 1
    while not tab.locator(".sentence:has-text('took')").is_visible():  # no step is drawn yet
        assert time.monotonic() < deadline
        tab.press(".bars canvas", "ArrowDown")
        tab.wait_for_timeout(20)
    assert tab.locator("#xray .note").is_hidden()


SYNTHETIC = """async () => {
  const { XRay } = await import("/page/xray.js");
  const root = document.getElementById("xray");
  const xray = new XRay(root, () => "");
  root.hidden = false;
  document.body.classList.add("xray-open");
  const rowsOf = (count) => Array.from({ length: count }, (_, i) => [i, 1]).flat();
  for (let frame = 0; frame < 100; frame++) {
    const now = frame / 10;
    const steps = [0, 1].map((i) => [frame * 2 + i, now + i * 0.05, now + i * 0.05 + 0.02, 100, 200,
      300, 20000, 200, 100, 50, 0, 50, rowsOf(50)]);
    const requests = Array.from({ length: 50 }, (_, uid) => [uid, "decode", 0, 100, 64,
      100 + frame, frame, 500, 1, 0, 10, now + 0.1, now + 0.09, now + 0.08]);
    const map = Array.from({ length: 2048 }, (_, i) => [3 + (i % 50), 2]).flat();
    const nodes = Array.from({ length: 250 }, (_, i) => [i % 10 ? 1 : 0, 3, i % 2]);
    const tree = [[-1, 4, 50], ...nodes];
    xray.model.add({ now_s: now + 0.1, steps, num_skipped: 0, requests, num_requests: 50,
      num_waiting: 0,
      num_running: 50, page_size: 16, num_pages: 4096, num_used_pages: 4096, num_cached_pages: 0,
      pages_per_cell: 1, page_map: map, tree, num_nodes: 251, num_retractions: 0,
      num_prompt_tokens: 5000, num_cached_tokens: 3200 });
  }
  const work = [];
  for (let i = 0; i < 30; i++) {
    const began = performance.now();
    xray.draw();
    work.push(performance.now() - began);
  }
  work.sort((a, b) => a - b);
  return work[15];
}"""


def test_ten_thousand_rows_are_drawn_in_a_frame(tab: Any, builtin: RunningServer) -> None:
    tab.goto(builtin.url)
    assert tab.evaluate(SYNTHETIC) <= 33, "ms, the median; 2.6 on a busy machine"


def test_another_engine_begins_a_new_picture(tab: Any, scripted: ScriptedServer) -> None:
    """Its clock begins anew, so the frames of the one before would seem to come later."""
    tab.goto(scripted.url)
    found = tab.evaluate(
        """async () => {
          const { Model } = await import("/page/xray-model.js");
          const model = new Model();
          for (const now_s of [90, 91, 2, 3])
            model.add({ now_s, steps: [], requests: [], num_requests: 0, tree: [] });
          return [model.now, model.frames.length];
        }"""
    )
    assert found == [3, 2]


def test_a_recording_opens_and_is_replayed(
    tab: Any,
    tmp_path: Path,
    launch: Callable[..., RunningServer],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--record`, the X-ray of the file, and `minisgl replay`."""
    file = tmp_path / "flight"
    server = launch("--record", str(file))
    messages = [{"role": "user", "content": "What is a radix cache?"}]
    for _ in range(3):
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json={"messages": messages}, timeout=60
        )
        answer.raise_for_status()
    deadline = time.monotonic() + 60
    while file.read_text().count('{"end"') < 3:  # an end is written after its answer
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for flags, says in (
        (["--plans"], "of 3 requests, all as recorded"),
        (["--url", server.url, "--speed", "3"], "recorded: 3 requests"),
    ):
        with ThreadPoolExecutor(1) as pool:  # this thread runs Playwright's event loop
            replayed = pool.submit(run_command, ["replay", str(file), *flags], time.monotonic())
            assert replayed.result(120) == 0
        assert says in capsys.readouterr().out
    tab.goto(f"{server.url}/#xray")
    tab.set_input_files("#xray input[type=file]", file)
    tab.wait_for_selector(".ago:has-text('s ago')")
    tab.wait_for_selector(".numbers dd:not(:text-is('–')) >> nth=0")
    server.close()
    recorded = [line for line in file.read_text().splitlines() if line.startswith('{"end"')]
    assert len(recorded) == 6
    assert not any(word in file.read_text() for word in ("What is", "token prefixes"))


FRAME = {
    "now_s": 0.1, "steps": [[0, 0.0, 0.02, 100, 200, 300, 20000, 200, 100, 50, 0, 1, [0, 1]]],
    "num_skipped": 0, "requests": [], "num_requests": 0, "num_waiting": 0, "num_running": 0,
    "page_size": 16, "num_pages": 64, "num_used_pages": 15, "num_cached_pages": 15,
    "pages_per_cell": 1, "page_map": [0, 64], "tree": [[-1, 12, 0], [0, 3, 1]], "num_nodes": 2,
    "texts": ["What is a radix cache, and what", " a radix tree keeps"], "num_retractions": 0,
    "num_prompt_tokens": 50, "num_cached_tokens": 32,
}  # fmt: skip


def test_texts_of_the_tree_are_shown_where_frames_have_them(
    tab: Any, scripted: ScriptedServer
) -> None:
    body = f"data: {json.dumps(FRAME)}\n\n"
    tab.route(
        "**/xray/events*",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    tab.goto(f"{scripted.url}/#xray")
    tab.wait_for_selector(".panel:has-text('Prefix tree') .quiet:has-text('prefix')")
    tree = tab.locator("[aria-label^='The prefix tree']")
    tree.hover(position={"x": 20, "y": 5})
    tab.wait_for_selector(".node-text:has-text('What is a radix cache, and what')")
    assert re.match(r"12 pages, no request holds it: ", tab.text_content(".node-text"))
    tab.mouse.move(1, 1)
    tab.wait_for_selector(".node-text", state="hidden")
    tree.press("ArrowRight")
    tab.wait_for_selector(".node-text:has-text('radix')")


def test_through_a_router_a_server_is_chosen(tab: Any) -> None:
    with (
        ScriptedServer() as one,
        ScriptedServer() as two,
        RouterThread([one.url, two.url]) as router,
    ):
        tab.goto(f"{router.url}/#xray")
        server = tab.locator("select[aria-label='Server']")
        server.wait_for()
        names = [replica.name for replica in router.fleet.replicas]
        assert server.locator("option").all_text_contents() == names
        with tab.expect_request(f"**/xray/events?replica={names[1].replace(':', '%3A')}"):
            server.select_option(names[1])


def test_through_a_router_with_keys_an_admin_chooses(tab: Any, tmp_path: Path) -> None:
    file = str(key_file(tmp_path, FILE))
    with (
        ScriptedServer(keys=KeyRing(None, file)) as one,
        ScriptedServer(keys=KeyRing(None, file)) as two,
        RouterThread([one.url, two.url], key=OTHER) as router,
    ):
        tab.goto(f"{router.url}/#xray")
        tab.wait_for_selector("text=The X-ray needs a valid API key")
        tab.fill("#set-key", SECRET)
        tab.press("#set-key", "Enter")
        tab.wait_for_selector("text=needs a key with admin rights")
        tab.fill("#set-key", OTHER)
        tab.press("#set-key", "Enter")
        tab.locator("select[aria-label='Server'] option").nth(1).wait_for(state="attached")
