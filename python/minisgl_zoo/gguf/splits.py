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


def _cased(endings: str, digits: str, without: str = "", ends: str = r"[\r\n/]*") -> str:
    """Return the pattern of o200k, Tekken or Kimi, which splits words between a lower-case and an
    upper-case letter.

    endings: of words, such as 's. digits: see `_words`. without: an intersection that excludes
    letters from words. ends: see `_words`.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{endings}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _characters(ranges: str) -> str:
    """Return the characters of these ranges of code points in hex, for a class of a pattern."""
    return "".join(
        "-".join(chr(int(end, 16)) for end in each.split("-")) for each in ranges.split()
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


def _deepseek(letters: str, punctuation: str, *others: str) -> Split:
    """Return the split of DeepSeek's first tokenizers: `letters` and `punctuation` are classes, and
    `others` patterns behind them."""
    words = rf"\s?{letters}+", rf"\s?{punctuation}+"
    return Split(patterns=(r"[\r\n]", *words, *others, "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))


_THREE: Final = _words(r"\p{N}{1,3}")
_LLAMA3: Final = Split(patterns=(_THREE,), whole=True, bos=True)
_DBRX: Final = Split(patterns=(_THREE,))
_QWEN2: Final = Split(patterns=(_words(r"\p{N}"),), nfc=True)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K: Final = _cased(_ENDINGS, r"\p{N}{1,3}")
_KIMI: Final = _cased(_ENDINGS, r"\p{N}{1,3}", without=r"&&[^\p{Han}]", ends=r"[\r\n]*")
_DEEPSEEK3: Final = Split(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
CASED: Final = _characters(
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 "
    "388-38a 38c 38e-3a1 3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba "
    "1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 "
    "1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb "
    "1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 212a-212d "
    "212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a "
    "ff41-ff5a 10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
"""Most letters that have a case, as the tokenizers of DeepSeek LLM and V2 list them."""
_ASIAN: Final = _characters(
    "4e00-9fff 3400-4dbf 8c48-faff 3040-309f 30a0-30ff ff65-ff9f 2f00-2fdf e40-e7f e80-eff "
    "1780-17ff 1000-109f aa60-aa7f a9e0-a9ff ac00-d7af 1100-11ff"
)
"""The scripts that Trinity's tokenizer lists, with llama.cpp's ends of ranges."""
_AFMOE: Final = Split(
    patterns=(
        # Groups of three digits from the right: the rest comes first.
        r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))",
        r"\p{N}{3}",
        f"[{_ASIAN}]+",
        _DEEPSEEK3.patterns[-1],
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
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "deepseek-llm": _deepseek(f"[{CASED}]", "[!-/:-~！-／：-～‘-‟　-。]", r"\s+$"),
    "deepseek-coder": _deepseek(r"\p{L}", r"\p{P}"),
    "afmoe": _AFMOE,
    "kimi-k2": Split(patterns=(rf"\p{{Han}}+|{_KIMI}",)),
    "seed-coder": Split(patterns=(_words(r"\p{N}", ends="", others=r"\r\n"),)),
    "tekken": Split(patterns=(_cased("", r"\p{N}"),), whole=True, bos=True),
    "gpt-4o": Split(patterns=(_O200K,), whole=True),
    "minimax-m2": Split(patterns=(_O200K,)),
    "command-r": Split(single_digits=True, nfc=True),
    **dict.fromkeys(("refact", "starcoder", "smollm", "exaone"), _DIGITS),
    **dict.fromkeys(("gpt-2", "exaone4", "olmo", "roberta-bpe"), _GPT2),
}
"""Maps the value of `pre` to the split."""
