"""What a replica reports to a router (`minisgl_gateway.router`), its load and its prefixes."""

from __future__ import annotations

from typing import Final

import msgspec

RELAYED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate")
"""The endpoints whose streams can go on at another server (`minisgl_gateway.watch.relayed`). Those
of others have names or numbers in each event, or no place for a comment."""


class KeyUse(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, its limits, and its use of one server since the server's start.

    digest: SHA-256 of the key's text, hexadecimal. num_tokens: of prompts and answers.
    """

    name: str
    digest: str
    requests_per_minute: int | None
    tokens_per_minute: int | None
    num_requests: int
    num_tokens: int


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a replica's scheduler, the JSON of GET /replica.

    page_size: tokens per page. num_pages, num_free_pages: of the KV pool; pages that only the
    prefix cache holds are free. num_waiting, num_running, max_running: requests.
    queued_tokens: prompt tokens that are accepted and not yet computed.
    prefill_tokens_per_s: prompt tokens computed per second of the loop's time, last measured while
    prompts waited; before that, measured at the start. 0: not measured.
    finished_per_s: requests that ended per second of the loop's time, last measured.
    row_s: by how much one more running request lengthens a step.
    num_finished, num_output_tokens: requests that ended, and all output tokens, since the start.
    hashes: of prefixes in the cache (`minisgl_gateway.router.prefix_hashes`), little-endian uint64.
    model, max_model_len: of the server. keys: the API keys that were used, those without limits,
    too, because they may have had some; None if the server has no keys. open: of the request ids
    that the router asked about (`?open=ID,ID`), those that the server has and has not answered
    whole. The API server sets these four. digest: of the weights, the version and the settings:
    servers with the same one give the same answers.
    """

    page_size: int
    num_pages: int
    num_free_pages: int
    num_waiting: int
    num_running: int
    max_running: int
    queued_tokens: int
    prefill_tokens_per_s: float = 0.0
    finished_per_s: float = 0.0
    row_s: float = 0.0
    num_finished: int = 0
    num_output_tokens: int = 0
    hashes: bytes = b""
    model: str = ""
    max_model_len: int | None = None
    keys: list[KeyUse] | None = None
    open: list[str] = []
    digest: str = ""


class PromptHashes(msgspec.Struct, frozen=True, kw_only=True):
    """The hashes by which a router looks up a prompt, the JSON of an answer to a request with the
    header `X-Minisgl-Prefix`.

    num_tokens: of all prompts of the request. hashes: of the first prompt's prefixes of 1, 2, 3,
    ... whole pages, little-endian uint64. key: the client's API key, if it has one.
    """

    num_tokens: int
    page_size: int
    hashes: bytes
    key: KeyUse | None = None
