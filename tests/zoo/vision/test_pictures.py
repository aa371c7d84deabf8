"""Bad pictures: a refusal that says why, soon and without memory."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
import zlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import transformers
from PIL import Image

from helpers.pictures import PICTURES, Sample, data_url, image_part, picture, png, text_part
from minisgl.core.image import LOWEST, Media
from minisgl.errors import ConfigError, InvalidRequest, PromptTooLong
from minisgl.llm.prompts import chat_records
from minisgl.message import ChatPrompt, ids_from_bytes
from minisgl.message.frontend import EncodeMsg
from minisgl.tokenizer import load_tokenizer
from minisgl.tokenizer.template import Part
from minisgl.tokenizer.tokenize import PromptEncoder
from minisgl_gateway.codec_answers import answer_codec
from minisgl_zoo.calls.tool_text import _before
from minisgl_zoo.vision import family, sources
from minisgl_zoo.vision.family import family_of
from minisgl_zoo.vision.lately import Lately
from minisgl_zoo.vision.prompt import MAX_IMAGES
from minisgl_zoo.vision.reader import decoded
from minisgl_zoo.vision.tower import most_whole


@pytest.fixture(scope="module")
def encoder(mistral3: Sample) -> PromptEncoder:
    encoder = PromptEncoder(tokenizer=load_tokenizer(mistral3.folder), folder=mistral3.folder)
    assert encoder.images
    encoder.images.load()
    return encoder


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def animated(kind: str) -> bytes:
    frames = [picture(20, 20, seed) for seed in range(3)]
    file = io.BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=100)
    return file.getvalue()


def cut(kind: str) -> bytes:
    file = io.BytesIO()
    picture(200, 200).save(file, kind)
    return file.getvalue()[: len(file.getvalue()) // 2]


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9"/></svg>'
BAD = {
    "a bomb": (png(30_000, 30_000, zlib.compress(bytes(10_000_000))), "900,000,000|30,000 x"),
    "wide": (png(100_000, 3), "100,000 x 3"),
    "thin": (png(4_000, 4), "200 times"),
    "cut png": (cut("PNG"), "is it whole"),
    "cut jpeg": (cut("JPEG"), "is it whole"),
    "cut webp": (cut("WEBP"), "is it whole|first bytes"),
    "svg": (SVG, "none of PNG, JPEG, WEBP, GIF"),
    "gif": (animated("GIF"), "animated"),
    "webp": (animated("WEBP"), "animated"),
    "apng": (animated("PNG"), "animated"),
    "text": (b"hello", "none of PNG"),
    "nothing": (b"", "none of PNG"),
    "tiff": (b"II*\0" + bytes(60), "none of PNG"),
    "no data": (png(20, 20), "is it whole"),
    "false data": (png(20, 20, b"12345678"), "cannot be decoded"),
}


def test_the_first_picture_of_a_phones_file_is_read() -> None:
    """Such a JPEG has a second picture behind it, for HDR or depth. It is no animation."""
    file, first = io.BytesIO(), Image.new("RGB", (64, 48), (200, 10, 12))
    first.save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 24))])
    shown = decoded(file.getvalue())
    assert (shown.size, shown.getpixel((9, 9))) == ((64, 48), (200, 10, 12))


def test_grey_values_of_16_bits_keep_their_shades() -> None:
    grey = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    part: Any = {"type": "image", "image": Image.fromarray(grey)}
    [chat], _ = chat_records([{"role": "user", "content": [part]}], {}, None, "auto")
    assert isinstance(chat, ChatPrompt)
    sent = chat.messages[0]["content"][0]["image_url"]["url"].partition(",")[2]
    shown = np.asarray(decoded(base64.b64decode(sent)))
    assert (shown == (grey >> 8)[..., None]).all()


def test_a_picture_with_damaged_exif_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow raises a TypeError for some. It ended the process that reads pictures."""

    def fail(image: Image.Image) -> None:
        raise TypeError("the fill character must be a text")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fail)
    with pytest.raises(family.Refusal, match="cannot be decoded"):
        decoded(png_of(picture(20, 20)))


def png_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def chat_of(*parts: Any, role: str = "user") -> ChatPrompt:
    return ChatPrompt(messages=[{"role": role, "content": list(parts)}])


def encode(encoder: PromptEncoder, *parts: Any, role: str = "user") -> Any:
    return encoder.encode(chat_of(*parts, role=role), 1024)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_picture_is_refused_soon(encoder: PromptEncoder, kind: str) -> None:
    data, why = BAD[kind]
    helper: Any = encoder.images._helper  # type: ignore[union-attr] (it is set)
    before = helper.process.pid, psutil.Process(helper.process.pid).memory_info().rss
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=why) as found:
        encode(encoder, image_part(url(data)))
    assert found.value.param == "messages[0].content[0]"
    assert time.process_time() - start < 1
    process = psutil.Process(helper.process.pid)
    assert (process.pid, True) == (before[0], process.memory_info().rss < before[1] + 2**25)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (image_part("http://127.0.0.1/a.png"), "data: URL"),
        (image_part("file:///etc/passwd"), "data: URL"),
        (image_part("data:image/png,abc"), "base64"),
        (image_part("data:image/png;base64,@@@"), "base64"),
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "image_url"),
        ({"type": "image"}, "text only|text"),
        (image_part("ftp://a/b.png"), "data: URL"),
    ],
)
def test_a_part_of_another_form_is_refused(
    encoder: PromptEncoder, part: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        encode(encoder, part)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_pictures_in_other_roles_are_refused(encoder: PromptEncoder, role: str) -> None:
    with pytest.raises(InvalidRequest, match="roles user and tool"):
        encode(encoder, image_part(data_url(PICTURES[0])), role=role)


def test_many_pictures_are_refused_by_their_tokens_and_number(encoder: PromptEncoder) -> None:
    parts = [image_part(data_url(PICTURES[3]))] * 9
    with pytest.raises(PromptTooLong, match="images up to messages"):
        encode(encoder, *parts)
    tiny = image_part(data_url(picture(8, 8)))
    with pytest.raises(InvalidRequest, match="100 images"):
        encode(encoder, *[tiny] * (MAX_IMAGES + 1))


def test_text_of_a_client_is_no_picture(encoder: PromptEncoder) -> None:
    encoded = encode(encoder, {"type": "text", "text": "[IMG] "}, image_part(data_url(PICTURES[0])))
    assert len(encoded.images) == 1


def test_a_picture_stands_upright(encoder: PromptEncoder) -> None:
    """A camera writes how it was held beside the pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    turned = picture(40, 80).transpose(Image.Transpose.ROTATE_90)
    parts = [
        image_part(data_url(each, exif=more) if more else data_url(each))
        for each, more in ((picture(40, 80), None), (turned, exif))
    ]
    first, second = (encode(encoder, part).images[0] for part in parts)
    assert (first.pixels, first.sizes) == (second.pixels, second.sizes)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_each_format_is_read(encoder: PromptEncoder, kind: str) -> None:
    [image] = encode(encoder, image_part(data_url(picture(40, 30), kind))).images
    assert image.shape == (3, 32, 40)


def test_palettes_greys_and_transparency_are_read(encoder: PromptEncoder) -> None:
    for mode in ("P", "L", "1", "RGBA", "LA", "I;16"):
        [image] = encode(encoder, image_part(data_url(picture(40, 30).convert(mode)))).images
        assert image.shape == (3, 32, 40)


def test_a_model_without_a_tower_reads_text_only(mistral3: Sample, tmp_path: Path) -> None:
    """As when the extra is not installed, or the files have the text model alone."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((mistral3.folder / name).read_bytes())
    encoder = PromptEncoder(tokenizer=load_tokenizer(tmp_path), folder=tmp_path)
    with pytest.raises(InvalidRequest, match="reads text only, got 'image_url'"):
        encode(encoder, image_part(data_url(PICTURES[0])))


def test_a_torchvision_of_another_torch_is_named(
    gemma4: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a one, which pip installs beside a torch for CPUs, takes transformers' models away."""

    def missing(self: Any, name: str) -> Any:
        cause = RuntimeError("operator torchvision::nms does not exist")
        raise ModuleNotFoundError("Could not import module") from cause

    monkeypatch.delattr(transformers, "AutoImageProcessor")  # a test before this one may have it
    monkeypatch.setattr(type(transformers), "__getattr__", missing)
    with pytest.raises(ConfigError, match=r"nms does not exist.*pip uninstall torchvision"):
        most_whole(gemma4.folder)


def test_a_checkpoint_of_an_old_form_reads_text_only(
    lfm2_vl: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert family_of(lfm2_vl.folder)
    config = json.loads((lfm2_vl.folder / "config.json").read_text()) | {"model_type": "lfm2-vl"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert family_of(tmp_path) is None
    assert "images are not read" in caplog.text
    assert "first ones" in caplog.text


@pytest.mark.parametrize("found", ["4.57.1", "5.23.0", "5", "", None])
def test_old_transformers_leave_a_model_of_text(
    mistral3: Sample, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lack towers and processors, and the text model was served without them."""

    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    assert family_of(mistral3.folder)
    monkeypatch.setattr(family, "version", version)
    assert family_of(mistral3.folder) is None


def test_a_picture_of_the_web_is_fetched_and_decoded_once(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with each turn of a conversation, and twice through a router."""
    fetched: list[str] = []
    file = base64.b64decode(data_url(picture(60, 40, 7)).partition(",")[2])
    monkeypatch.setattr(sources, "fetched", lambda url, end: fetched.append(url) or file)
    monkeypatch.setitem(vars(encoder), "media", Media(fetches=True))
    helper: Any = encoder.images._helper  # type: ignore[union-attr] (it is set)
    asked: list[bytes] = []
    ask = helper.ask
    monkeypatch.setattr(helper, "ask", lambda what, s: asked.append(what) or ask(what, s))
    shown = image_part("https://example.com/a.png")
    question = EncodeMsg(seq=1, prompt=chat_of(shown), for_cache=True)
    assert ids_from_bytes(answer_codec(encoder, question).ids).max() >= LOWEST
    [first] = encode(encoder, shown).images
    [again] = encode(encoder, text_part("Once more"), shown).images
    assert (len(fetched), len(asked)) == (1, 1)
    assert (again.pixels, again.digest) == (first.pixels, first.digest)
    assert again.places != first.places


def test_what_is_kept_is_bounded() -> None:
    lately: Lately[int] = Lately(100)
    for name, size in (("a", 60), ("b", 30), ("a", 60), ("c", 60), ("c", 50), ("b", 50)):
        if lately.get(name) != size:
            lately.put(name, size, size)
    assert [lately.get(each) for each in ("a", "b", "c")] == [None, 50, 50]
    lately.put("d", 500, 500)
    assert not len(lately)
    assert lately._size == 0


def test_the_reader_has_not_loaded_torch(encoder: PromptEncoder) -> None:
    helper: Any = encoder.images._helper  # type: ignore[union-attr] (it is set)
    files = Path(f"/proc/{helper.process.pid}/maps").read_text()
    assert "/PIL/" in files
    assert "libtorch" not in files


def test_after_its_end_the_reader_starts_again(encoder: PromptEncoder) -> None:
    helper: Any = encoder.images._helper  # type: ignore[union-attr] (it is set)
    helper.process.kill()
    helper.process.wait()
    assert encode(encoder, image_part(data_url(picture(40, 30, 8)))).images


WITHOUT_TORCH = """
import json, os, pathlib, sys
from minisgl_zoo.vision import reader

sys.modules["torch"] = None
os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
question = json.load(sys.stdin)
for folder in sys.argv[1:]:
    here = reader.Reader(pathlib.Path(folder), 2**30)
    assert here.answer(["load"]) == ("loaded",)
    print(json.dumps(here.answer(question)))
"""


def test_processors_need_no_torch(request: pytest.FixtureRequest) -> None:
    """The process that reads pictures hides it, because its import takes seconds."""
    names = ("mistral3", "qwen3_vl", "gemma3", "gemma4", "gemma4_unified", "lfm2_vl")
    samples: list[Sample] = [request.getfixturevalue(name) for name in names]
    question = ["read", data_url(PICTURES[3]).partition(",")[2]]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *(str(sample.folder) for sample in samples)],
        input=json.dumps(question), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for sample, line in zip(samples, done.stdout.splitlines(), strict=True):
        images: Any = sample.encoder.images
        images.load()
        here = images._helper.ask(json.dumps(question).encode(), 9)
        assert json.loads(line) == json.loads(json.dumps(here))


def test_a_malformed_part_beside_a_picture_is_refused(encoder: PromptEncoder) -> None:
    parts = [image_part(data_url(PICTURES[0])), {"type": "video"}]
    with pytest.raises(InvalidRequest, match="got 'video'"):
        encode(encoder, *parts, role="tool")


def test_tools_are_told_beside_pictures() -> None:
    """Where a template takes neither tools nor a system message, the first message has the text."""
    content = [Part(type="image"), {"type": "text", "text": "look"}]
    told = _before({"role": "user", "content": content}, "tools")["content"]
    assert [part.get("text") for part in told] == ["tools\n\n", None, "look"]
