"""How the byte-level tokenizers of GGUF files split text into words.

The key `pre` of a file names the split. The names are llama.cpp's. The patterns are those of the
tokenizers from which the files were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Regex, normalizers, pre_tokenizers


def _words(digits: str, letters: str = r"\p{L}", ends: str = r"[\r\n]*", others: str = "") -> str:
    """Return the pattern of cl100k, or one derived from it.

    digits: the digits that stay together. letters: the characters of words; marks may be among
    them. ends: the line ends that stay with the other characters before them. others: excluded from
    a run of other characters.
    """
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{letters}\p{{N}}{others}]+{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(endings: str, digits: str) -> str:
    """Return the pattern of o200k or Tekken, which splits words between a lower-case and an
    upper-case letter.

    endings: of words, such as 's. digits: see `_words`.
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a tokenizer splits text.

    patterns: applied one after another; () means GPT-2's pattern. single_digits: first, each digit
    is split off. whole: a word that is a token becomes this token, whatever the merges are. nfc:
    texts are normalised first. bos: texts begin with a BOS token if no key says otherwise.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    whole: bool = False
    nfc: bool = False
    bos: bool = False

    def pre_tokenizer(self) -> Any:
        steps: list[Any] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        is_gpt2 = not self.patterns
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=is_gpt2))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


_THREE: Final = _words(r"\p{N}{1,3}")
_LLAMA3: Final = Split(patterns=(_THREE,), whole=True, bos=True)
_DBRX: Final = Split(patterns=(_THREE,))
_QWEN2: Final = Split(patterns=(_words(r"\p{N}"),), nfc=True)
_O200K: Final = _cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")
_DEEPSEEK3: Final = Split(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_GPT2: Final = Split()
_DIGITS: Final = Split(single_digits=True)
SPLITS: Final[Mapping[str, Split]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _DBRX),
    "glm4": Split(patterns=(_THREE,), whole=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": Split(patterns=(_words(r"\p{N}", letters=r"\p{L}\p{M}"),), nfc=True),
    "hunyuan": Split(patterns=(_words(r"\p{N}"),)),
    "hunyuan-dense": _DEEPSEEK3,
    "seed-coder": Split(patterns=(_words(r"\p{N}", ends="", others=r"\r\n"),)),
    "tekken": Split(patterns=(_cased("", r"\p{N}"),), whole=True, bos=True),
    "gpt-4o": Split(patterns=(_O200K,), whole=True),
    "minimax-m2": Split(patterns=(_O200K,)),
    "command-r": Split(single_digits=True, nfc=True),
    **dict.fromkeys(("refact", "starcoder", "smollm", "exaone"), _DIGITS),
    **dict.fromkeys(("gpt-2", "exaone4", "olmo"), _GPT2),
}
"""The value of `pre` -> the split."""
