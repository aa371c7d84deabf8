"""API keys: they say which clients may use the server, and how much a minute.

Keys come from `--api-key` and from `--api-key-file`, a TOML file with a table for each key::

    [alice]                     # the name, which logs and metrics show
    key = "a long random text"
    requests_per_minute = 60    # left out: no limit
    tokens_per_minute = 100000  # of prompts and answers together
    weight = 2                  # when the server is full, twice the tokens; left out: 1
    admin = true                # may use the paths of `key_guard.ADMIN`
    group = "team"              # shares cached prefixes with the keys of this group
    share_cache = true          # shares them with all keys that say so; left out: with no other key

The file is read again when it changes. If the new file has an error, the keys stay as they were.
Keys are compared as digests in constant time, and no log shows them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Final

import msgspec

from minisgl.core import Accepted, Finished, SamplingParams
from minisgl.errors import ConfigError
from minisgl.message import KeyShare, Prompt, RequestReply, TextReply
from minisgl.server.errors import refusal
from minisgl.utils.logger import get_logger
from minisgl_gateway.keys.limits import Limits, RateLimited
from minisgl_gateway.keys.shares import Share, Shares
from minisgl_gateway.router.replica_state import KeyUse

logger = get_logger(__name__)

REREAD_S: Final = 1.0
"""The least time between two checks of the file. A check at each request would cost each a system
call."""

MAX_NAME: Final = 64

BYTES_PER_TOKEN: Final = 4
"""The estimate for a prompt: it fits text in most languages, and token ids."""

USUAL_OUTPUT: Final = 256
"""The expected tokens of an answer without max_tokens."""

PerMinute = Annotated[int, msgspec.Meta(ge=1, le=10**12)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the key file."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    admin: bool = False
    group: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)] | None = None
    share_cache: bool = False

    def sharers(self, name: str) -> tuple[str, str]:
        """Return what the keys that share cached prefixes with this one, `name`, have in common."""
        if self.share_cache:
            return ("all", "")
        return ("group", self.group) if self.group is not None else ("key", name)


class Key:
    """A key that may use the server, and what it has used. Mutable."""

    def __init__(
        self, name: str, entry: KeyEntry, clock: Callable[[], float], shares: Shares
    ) -> None:
        self.name = name
        self._share = Share(shares)
        self.num_requests = self.num_refused = 0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self._clock = clock
        self._limits = Limits()
        self.change(entry)

    def change(self, entry: KeyEntry) -> None:
        """Apply a changed entry of the file. An unchanged limit keeps its count."""
        self.digest = digest_of(entry.key)
        self.is_admin = entry.admin
        self._sharers = entry.sharers(self.name)
        self._share.weight = entry.weight
        self._limits.change(entry.requests_per_minute, entry.tokens_per_minute, self._clock())

    def namespace(self, salt: str) -> str:
        """Return the namespace of the prefix cache for requests of this key with this `cache_salt`.

        It is a digest of who shares it and of the salt, so no salt names another key's namespace.
        """
        return hashlib.sha256(msgspec.json.encode([*self._sharers, salt])).hexdigest()

    @property
    def number(self) -> int:
        """From 1; by it keys take turns in the workers."""
        return self._share.number

    def check(self, priority: int) -> None:
        """Raise InvalidRequest (403) for a priority that the key may not ask for."""
        if priority < 0 and not self.is_admin:
            raise refusal(
                f"a priority below 0 goes before the requests of all keys, so it needs a key with "
                f"admin rights, and {self.name!r} has none: ask for 0 or more",
                status=403,
                code="not_permitted",
            )

    def use(self) -> KeyUse:
        """Return the key's limits, perhaps none, and its use, for a router."""
        requests, tokens = self._limits.per_minute
        return KeyUse(
            name=self.name,
            digest=self.digest.hex(),
            requests_per_minute=requests,
            tokens_per_minute=tokens,
            num_requests=self.num_requests,
            num_tokens=self.num_prompt_tokens + self.num_output_tokens,
        )

    def admit(self, *, counts: bool = True) -> None:
        """Count a request; with counts=False only check the limits. Raises RateLimited."""
        now = self._clock()
        try:
            self._limits.check(self.name, now)
        except RateLimited:
            self.num_refused += 1
            raise
        self.num_requests += counts
        self._limits.take(now, requests=int(counts))

    def begin(self, prompt: Prompt, params: SamplingParams, *, counts_prompt: bool = True) -> Job:
        """Return a request of this key that will be sent. Its `end` must be called.

        counts_prompt: whether its prompt counts. Of several choices of a prompt, one counts it.
        """
        num_bytes = len(msgspec.msgpack.encode(prompt)) if counts_prompt else 0
        cost = num_bytes // BYTES_PER_TOKEN + (
            USUAL_OUTPUT if params.max_tokens is None else params.max_tokens
        )
        return Job(self, self._share, cost, counts_prompt)

    def charge(self, *, prompt: int = 0, output: int = 0) -> None:
        """Count tokens that were used."""
        self.num_prompt_tokens += prompt
        self.num_output_tokens += output
        self._limits.take(self._clock(), tokens=prompt + output)


class Job:
    """One request of a key. Mutable. share: its tag and the key's number, by which the scheduler
    orders requests (`minisgl_gateway.keys.shares`)."""

    __slots__ = ("_counts_prompt", "_key", "_left", "_num_prompt", "_share", "share")

    def __init__(self, key: Key, share: Share, cost: int, counts_prompt: bool) -> None:
        self._key = key
        self._share = share
        self._left = cost  # expected tokens that are not served yet
        self._counts_prompt = counts_prompt
        self._num_prompt = 0  # the accepted prompt's tokens, until the first piece of the answer
        self.share = KeyShare(share.begin(cost), share.number)

    def count(self, reply: RequestReply) -> None:
        """Charge the key for an accepted prompt, or for a piece of an answer.

        The share counts the prompt as served when the first piece of its answer comes, or its end.
        """
        if isinstance(reply, Accepted):
            self._num_prompt = reply.num_prompt_tokens if self._counts_prompt else 0
            self._key.charge(prompt=self._num_prompt)
        elif isinstance(reply, TextReply | Finished):
            num_output = len(reply.token_ids) if isinstance(reply, TextReply) else 0
            self._key.charge(output=num_output)
            served, self._num_prompt = self._num_prompt + num_output, 0
            expected = min(served, self._left)
            self._left -= expected
            self._share.serve(served, expected)

    def end(self) -> None:
        self._share.end(self.share.tag, self._left)


class KeyRing:
    """All keys. Mutable: the file may change.

    given: `--api-key`, keys with commas between them. path: `--api-key-file`. Raises ConfigError.
    """

    def __init__(
        self,
        given: str | None,
        path: str | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._path = Path(path).expanduser() if path else None
        self._given = _given_keys(given) if given is not None else []
        self._keys: dict[str, Key] = {}
        self._shares = Shares()
        self._signature = self._stat()
        self._looked_at = clock()
        self._take(self._read())

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def find(self, given: str) -> Key | None:
        """Return the key whose text is `given`, or None. The time depends only on its length."""
        self._reread()
        digest, found = digest_of(given), None
        for key in self._keys.values():
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def _reread(self) -> None:
        now = self._clock()
        if self._path is None or now - self._looked_at < REREAD_S:
            return
        self._looked_at = now
        signature = self._stat()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._take(self._read())
            logger.info("%s has changed: there are %d keys now", self._path, len(self._keys))
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error)

    def _take(self, entries: dict[str, KeyEntry]) -> None:
        keys = {}
        for name, entry in entries.items():
            if key := self._keys.get(name):
                key.change(entry)
            keys[name] = key or Key(name, entry, self._clock, self._shares)
        self._keys = keys

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path) if self._path else None
        except OSError:
            return None
        if found is None or not stat.S_ISREG(found.st_mode):
            return None  # to read a pipe again would wait for another writer
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> dict[str, KeyEntry]:
        if self._path is None:
            return _named(self._given, ())
        where = f"--api-key-file {self._path}"
        try:
            data = self._path.read_bytes()
            if self._path.stat().st_mode & 0o004:
                logger.warning("%s can be read by every user of this machine", where)
            entries = msgspec.toml.decode(data, type=dict[str, KeyEntry])
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}") from None
        entries = _named(self._given, entries) | entries
        if not entries:
            raise ConfigError(f"{where} has no keys: add a table with a key, or leave the flag out")
        for name, entry in entries.items():
            if not name.isprintable() or not 0 < len(name) <= MAX_NAME:
                raise ConfigError(f"{where}: a name has 1 to {MAX_NAME} printable characters")
            if not _can_be_sent(entry.key):
                raise ConfigError(f"{where}: the key of {name!r} {_CHARACTERS}")
            if entry.group is not None and entry.share_cache:
                raise ConfigError(
                    f"{where}: {name!r} has a group and share_cache; leave one of them out"
                )
        if len({entry.key for entry in entries.values()}) < len(entries):
            raise ConfigError(f"{where}: two names have the same key")
        return entries


_CHARACTERS: Final = "must be visible ASCII characters without spaces"


def _given_keys(given: str) -> list[str]:
    """Return the keys of `--api-key`. Raises ConfigError."""
    keys = list(dict.fromkeys(given.split(",")))
    if not all(map(_can_be_sent, keys)):
        raise ConfigError(f"each key of --api-key {_CHARACTERS}")
    return keys


def _named(keys: list[str], taken: Collection[str]) -> dict[str, KeyEntry]:
    """Return entries without limits and with admin rights for `keys`, by name: `default`,
    `default-2`, ..., except the names in `taken`."""
    numbers = (f"default-{number}" for number in count(2))
    names = (name for name in chain(["default"], numbers) if name not in taken)
    return {name: KeyEntry(key=key, admin=True) for key, name in zip(keys, names, strict=False)}


def _can_be_sent(key: str) -> bool:
    return bool(key) and key.isascii() and key.isprintable() and " " not in key


def digest_of(key: str) -> bytes:
    """Return the SHA-256 of a key's text, which is stored and compared instead of the text."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
