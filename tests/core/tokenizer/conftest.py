"""A tokenizer of each kind."""

from helpers.tokenizer_fixtures import by_kind, tokenizer

__all__ = ["by_kind", "tokenizer"]
