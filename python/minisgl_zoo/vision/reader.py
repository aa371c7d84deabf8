"""The process that decodes pictures. It trusts the process that asks it, and no picture.

::

    python -m minisgl_zoo.vision.reader FOLDER BYTES     the memory that pictures may take

    ["load"]          -> ["loaded"], or ["problem", why]
    ["read", base64]  -> ["tiles", [[base64, shape, sizes, hex digest], ...]]
                      -> ["unknown"]: load first
                      -> ["problem", why]

A picture's header says its size, so one that is too large is refused before it is decoded.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl.utils.helper import limit_memory, serve
from minisgl_zoo.vision.family import PROCESSOR_FILES, Refusal, family_of

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
"""Those of OpenAI's and Anthropic's APIs. Pillow's other decoders are never asked."""

MAX_PIXELS: Final = 2**25
"""Of a picture: 8K video has 33.2 million. Decoded, it takes 100 MB."""

MAX_SIDE: Final = 2**14
MAX_RATIO: Final = 200
"""The longer side to the shorter one: the bound of Qwen's processors."""


class Reader:
    """Answers the questions for the checkpoint in `folder`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._is_limited = False

    def answer(self, question: Any) -> tuple[Any, ...]:
        match question:
            case ["load"]:
                try:
                    assert self._processor
                except ConfigError as error:
                    return "problem", str(error)
                return ("loaded",)
            case ["read", text]:
                return self._read(base64.b64decode(text))
        raise AssertionError(f"no question: {question[:1]}")

    @cached_property
    def _processor(self) -> Any:
        family = family_of(self._folder)
        assert family, "the asker has found the family"
        self._family = family
        return family.processor(self._folder)

    @cached_property
    def _fingerprint(self) -> bytes:
        """What decides how a picture is processed."""
        import PIL
        import transformers

        files = [self._folder / name for name in ("config.json", *PROCESSOR_FILES)]
        texts = [path.read_text() if path.is_file() else "" for path in files]
        return json.dumps([transformers.__version__, PIL.__version__, *texts]).encode()

    def _read(self, data: bytes) -> tuple[Any, ...]:
        if "_processor" not in vars(self):
            return ("unknown",)
        processor = self._processor
        if not self._is_limited:
            limit_memory(self._max_bytes)
            self._is_limited = True
        try:
            tiles = self._family.process(processor, decoded(data))
        except Refusal as error:
            return "problem", str(error)
        except MemoryError:
            return "problem", f"it takes more than {self._max_bytes:,} bytes of memory"
        content = hashlib.sha256(data).digest() + hashlib.sha256(self._fingerprint).digest()
        answer = []
        for index, (array, sizes) in enumerate(tiles):
            digest = hashlib.sha256(content + repr((index, array.shape, sizes)).encode())
            pixels = base64.b64encode(array.tobytes()).decode()
            answer.append((pixels, array.shape, sizes, digest.hexdigest()))
        return "tiles", answer


def decoded(data: bytes) -> Any:
    """Return the picture upright, in RGB. Raises Refusal."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # ours is checked below, for each format
    try:
        with warnings.catch_warnings(action="ignore"):
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            check_size(*image.size)
            # A phone's JPEG may have further pictures behind it (MPO), such as one for HDR.
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise Refusal("it is animated; send one of its frames")
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # grey values of 16 bits, which RGB would cut at 255
                upright = upright.convert("I").point(lambda value: value / 256).convert("L")
            return upright.convert("RGB")
    except UnidentifiedImageError:
        names = ", ".join(FORMATS)
        raise Refusal(f"it is none of {names}, or its first bytes are damaged") from None
    except (Refusal, MemoryError):
        raise
    except Exception as error:  # Pillow raises any kind, a TypeError for damaged EXIF data
        raise Refusal(f"it cannot be decoded ({error}); is it whole?") from None


def check_size(width: int, height: int) -> None:
    """Raise Refusal if a picture is too large to decode."""
    shape = f"it has {width:,} x {height:,} pixels"
    if width * height > MAX_PIXELS:
        raise Refusal(f"{shape}; at most {MAX_PIXELS:,} in all are read")
    if max(width, height) > MAX_SIDE:
        raise Refusal(f"{shape}; a side may have {MAX_SIDE:,}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise Refusal(f"{shape}; the longer side may be {MAX_RATIO} times the shorter one")


if __name__ == "__main__":
    # transformers takes torch for missing: with it the import takes 6 s and 350 MB instead of 1.2 s
    # and 75 MB, and the processors of PIL do not use it.
    sys.modules["torch"] = None  # type: ignore[assignment]  # the import then fails
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say what is missing
    serve(Reader(Path(sys.argv[1]), int(sys.argv[2])).answer)
