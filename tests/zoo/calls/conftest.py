"""Fixtures of servers and tokenizers."""

from helpers.server_fixtures import certificate, client, http, pool, server
from helpers.tokenizer_fixtures import by_kind, tokenizer

__all__ = ["by_kind", "certificate", "client", "http", "pool", "server", "tokenizer"]
