"""Decides which values training never sees.

The decision is a hash of the value itself, not a draw, so that every generator, process and later
version of the corpus agrees on it, and a test can check it without generating anything.
"""

from __future__ import annotations

import hashlib

SPLIT_SEED = 20261120
HELD_SHARE = 10  # percent of operand pairs, words, names and codes


def is_held(kind: str, *key: object) -> bool:
    """True if the value is reserved for measuring. kind separates, say, words from names."""
    text = f"{SPLIT_SEED}/{kind}/" + "/".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) % 100 < HELD_SHARE


def is_held_pair(a: int, b: int) -> bool:
    """Operands are held out as an unordered pair, for every operation: 30 + 12 leaks 12 + 30."""
    return is_held("pair", min(a, b), max(a, b))


def is_held_word(word: str) -> bool:
    """Case does not matter: PLANET would leak planet."""
    return is_held("word", word.lower())
