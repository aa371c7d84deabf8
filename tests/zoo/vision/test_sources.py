"""Pictures from files and from the web: what a server that was asked nicely must not do."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.pictures import image_part
from minisgl.core.image import Media
from minisgl.errors import ConfigError, InvalidRequest
from minisgl_gateway.args import GatewayArgs
from minisgl_zoo.vision import sources
from minisgl_zoo.vision.sources import Web, is_public, source_of

DATA = b"the file of a picture"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/good":
                self._send(200, DATA)
            case "/there":
                self._send(302, location="/good")
            case "/around":
                self._send(302, location="/around")
            case "/inside":
                self._send(302, location="http://10.0.0.1/secret")
            case "/local":
                self._send(302, location="file:///etc/passwd")
            case "/large":
                self._send(200, bytes(sources.MAX_BYTES + 1))
            case "/slow":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                for _ in range(1000):
                    self.wfile.write(b"a")
                    time.sleep(0.05)
            case _:
                self._send(404)

    def _send(self, status: int, data: bytes = b"", location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on loopback, which counts as public here."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setattr(
        sources, "is_public", lambda address: address == "127.0.0.1" or is_public(address)
    )
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def read(url: str, media: Media) -> bytes:
    fetch = partial(Web().file, end=time.monotonic() + sources.FETCHES_S)
    found = source_of(image_part(url), "here", media, fetch)
    assert found is not None
    return base64.b64decode(found)


@pytest.mark.parametrize("path", ["/good", "/good?a=b", "/there"])
def test_the_web(web: str, path: str) -> None:
    assert read(web + path, Media(fetches=True)) == DATA


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/missing", "HTTP 404"),
        ("/around", "more than 3 redirects"),
        ("/inside", "private address"),
        ("/local", "so must redirects"),
        ("/large", "more than 16,777,216 bytes"),
    ],
)
def test_what_the_web_may_not_do(web: str, path: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as found:
        read(web + path, Media(fetches=True))
    assert found.value.param == "here.image_url.url"


def test_a_file_that_drips_ends(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FETCH_S", 0.3)
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        read(web + "/slow", Media(fetches=True))


def test_the_pictures_of_a_request_share_a_time(web: str) -> None:
    """Else a hundred slow ones would hold a thread for many minutes."""
    fetch = partial(Web().file, end=time.monotonic())
    with pytest.raises(InvalidRequest, match="cannot be fetched"):
        source_of(image_part(web + "/good"), "here", Media(fetches=True), fetch)


def test_a_name_that_nobody_resolves_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(sources, "FETCH_S", 0.1)
    monkeypatch.setattr(sources.socket, "getaddrinfo", lambda *_, **__: answered.wait(60) and [])
    with pytest.raises(InvalidRequest, match="its name is not resolved; one picture may take"):
        read("http://slow.example/a.png", Media(fetches=True))
    answered.set()


def test_a_name_with_one_private_address_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of its addresses is connected to is the resolver's choice."""
    found = [(2, 1, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(sources.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(InvalidRequest, match="private address"):
        read("http://two.example/a.png", Media(fetches=True))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:1/", "private"),
        ("http://localhost:1/", "private"),
        ("http://[::1]:1/", "private"),
        ("http://0x7f.1/", "private|cannot be fetched"),
        ("http://169.254.169.254/latest/meta-data", "private"),
        ("http://user:word@example.com/", "without a user"),
        ("http://user@example.com/", "without a user"),
        ("http://@example.com/", "without a user"),
        ("http://example.com\\@127.0.0.1/", "without a user"),
        ("http://127.0.0.1#@example.com/", "private"),
        ("http://127.1:8080/", "private"),
        ("http://2130706433/", "private"),
        ("http://①②⑦.⓪.⓪.①/", "private"),
        ("http://[::ffff:127.0.0.1]/", "private"),
        ("http://[::ffff:7f00:1]:80/", "private"),
        ("http://[::127.0.0.1]/", "private"),
        ("http://[64:ff9b::a9fe:a9fe]/", "private"),
        ("http://[fe80::1%25lo]/", "private|cannot be fetched"),
        ("http://0.0.0.0/", "private"),
        ("http://0/", "private"),
        ("http://100.64.0.1/", "private"),
        ("http:///a", "http"),
        ("http://a:b/", "cannot be fetched"),
        ("http://8.8.8.8:65536/", "cannot be fetched"),
        ("http://8.8.8.8:-1/", "cannot be fetched"),
        ("http://" + 70 * "a" + ".example/", "cannot be fetched"),
    ],
)
def test_private_addresses_are_not_asked(url: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read(url, Media(fetches=True))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *((each, False) for each in ("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1")),
        *((each, False) for each in ("127.0.0.1", "0.0.0.0", "169.254.1.1", "224.0.0.1")),
        *((each, False) for each in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1")),
        *((each, False) for each in ("255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1")),
        *((each, False) for each in ("::ffff:8.8.8.8", "2002:7f00:1::", "64:ff9b::7f00:1")),
        *((each, False) for each in ("64:ff9b:1::7f00:1", "::8.8.8.8", "2001:0:1::1")),
        *((each, False) for each in ("fec0::1", "5f00::1", "2001:db8::1", "100::1")),
    ],
)
def test_what_is_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_urls_need_their_options(tmp_path: Path) -> None:
    for url, media in (
        ("http://example.com/a.png", Media(folder=str(tmp_path))),
        (f"file://{tmp_path}/a.png", Media(fetches=True)),
    ):
        with pytest.raises(InvalidRequest, match="--allowed-media-folder"):
            read(url, media)


def test_files_below_the_folder_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "ring.png").symlink_to(folder / "ring.png")
    media = Media(folder=str(folder))
    assert read((folder / "a.png").as_uri(), media) == DATA
    for wrong in (
        f"file://{folder}/../secret.png",
        f"file://{folder}/link.png",
        f"file://{folder}/missing.png",
        f"file://{folder}/ring.png",
        f"file://{folder}",
        "file:///etc/passwd",
        "file:///dev/zero",
        "file://\0",
    ):
        with pytest.raises(InvalidRequest, match="is no file of at most"):
            read(wrong, media)


def test_the_options_reach_the_encoder(tmp_path: Path) -> None:
    args = GatewayArgs(allowed_media_folder=str(tmp_path), allow_image_urls=True)
    assert args.media == Media(str(tmp_path), True)
    assert GatewayArgs().media == Media()
    with pytest.raises(ConfigError, match="is no folder"):
        _ = GatewayArgs(allowed_media_folder=str(tmp_path / "missing")).media


def test_a_picture_is_fetched_once_for_a_router_and_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def fetched(url: str, end: float) -> bytes:
        asked.append(url)
        if len(asked) == 2:
            raise sources.Unusable("is gone")
        return DATA

    monkeypatch.setattr(sources, "fetched", fetched)
    web, end = Web(), time.monotonic() + 1000
    assert [web.file("https://a/b.png", end) for _ in range(3)] == [
        web.file("https://a/b.png", end)
    ] * 3
    assert len(asked) == 1
    for _ in range(2):
        with contextlib.suppress(sources.Unusable):
            web.file("https://a/c.png", end)
    assert len(asked) == 3, "a failure is not kept"
    monkeypatch.setattr(sources, "FETCH_S", -1.0)
    web.file("https://a/c.png", end)
    assert len(asked) == 4, "it may have changed meanwhile"
