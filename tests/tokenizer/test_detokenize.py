"""Events in, replies out: the text, its cut, and one end for each request."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.text_checkpoints import CORPUS, KINDS, make
from minisgl.core import Accepted, Event, Failed, Finished, SamplingParams, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import StopMsg, TextReply, ids_to_bytes
from minisgl.message.frontend import UserReply
from minisgl.tokenizer import Detokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: Any) -> dict[str, Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(make(root / kind, kind)) for kind in KINDS}


@pytest.fixture
def tokenizer(by_kind: dict[str, Tokenizer]) -> Tokenizer:
    return by_kind["byte_level"]


def _accepted(uid: int, **sampling: Any) -> Accepted:
    params = SamplingParams(max_tokens=1000, **sampling)
    return Accepted(uid=uid, num_prompt_tokens=4, sampling=params)


def _finished(
    uid: int, num: int, reason: Any = "length", stop_match: int | None = None
) -> Finished:
    return Finished(
        uid=uid,
        reason=reason,
        stop_match=stop_match,
        num_prompt_tokens=4,
        num_output_tokens=num,
        num_cached_tokens=2,
        num_chunks=3,
        queued_s=0.5,
    )


def _tokens(uid: int, ids: Iterable[int]) -> list[Event]:
    return [Token(uid=uid, id=token) for token in ids]


def _text(replies: Iterable[UserReply]) -> str:
    return "".join(r.text for r in replies if isinstance(r, TextReply))


def _all_ids(replies: Iterable[UserReply]) -> list[int]:
    return [i for r in replies if isinstance(r, TextReply) for i in r.token_ids]


class TestLife:
    def test_each_turn_sends_its_text(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello world", add_special_tokens=False)
        replies, stops = detokenizer.handle([_accepted(1)])
        assert replies == [_accepted(1)]
        for token in ids:
            replies, more = detokenizer.handle(_tokens(1, [token]))
            assert replies == [TextReply(uid=1, text=tokenizer.decode([token]), token_ids=[token])]
            stops += more
        replies, more = detokenizer.handle([_finished(1, len(ids))])
        assert stops + more == []
        assert replies == [_finished(1, len(ids))]
        assert detokenizer.num_running == 0

    def test_tokens_of_one_turn_are_one_reply(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([_accepted(1), _accepted(2)])
        one = tokenizer.encode("Hello world", add_special_tokens=False)
        two = tokenizer.encode("naïve café", add_special_tokens=False)
        both = [e for pair in zip(_tokens(1, one), _tokens(2, two), strict=False) for e in pair]
        num = len(both) // 2
        replies, _ = detokenizer.handle(both)
        assert replies == [
            TextReply(uid=1, text=tokenizer.decode(one[:num]), token_ids=one[:num]),
            TextReply(uid=2, text=tokenizer.decode(two[:num]), token_ids=two[:num]),
        ]

    def test_all_events_of_a_request_may_come_in_one_turn(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        replies, _ = detokenizer.handle([_accepted(1), *_tokens(1, ids), _finished(1, len(ids))])
        assert [type(reply) for reply in replies] == [Accepted, TextReply, Finished]
        assert _text(replies) == "Hello"
        assert _all_ids(replies) == ids
        assert detokenizer.num_running == 0

    def test_ids_without_text_come_with_the_next_reply(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([_accepted(1)])
        ids = tokenizer.encode("🦜", add_special_tokens=False)
        assert len(ids) > 1
        for token in ids[:-1]:
            assert detokenizer.handle(_tokens(1, [token]))[0] == []
        replies, _ = detokenizer.handle(_tokens(1, ids[-1:]))
        assert replies == [TextReply(uid=1, text="🦜", token_ids=ids)]

    def test_logprobs_stay_with_their_tokens(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([_accepted(1, logprobs=True), _accepted(2)])
        ids = tokenizer.encode("a🦜", add_special_tokens=False)
        expected = [-0.5 * n for n in range(len(ids))]
        got: list[float] = []
        for token, logprob in zip(ids, expected, strict=True):
            turn: list[Event] = [Token(uid=1, id=token, logprob=logprob), Token(uid=2, id=token)]
            for reply in detokenizer.handle(turn)[0]:
                assert isinstance(reply, TextReply)
                if reply.uid == 1:
                    assert reply.logprobs is not None
                    assert len(reply.logprobs) == len(reply.token_ids)
                    got += reply.logprobs
                else:
                    assert reply.logprobs is None
        assert got == expected

    def test_bytes_and_offsets_of_tokens_with_logprobs(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("a🦜 b", add_special_tokens=False)
        top = [(ids[0], -0.5)]
        events = [Token(uid=1, id=token, logprob=-1.0, top=top) for token in ids]
        replies, _ = detokenizer.handle([_accepted(1, logprobs=True), *events])
        tokens = [t for reply in replies if isinstance(reply, TextReply) for t in reply.tokens]
        assert b"".join(token.data for token in tokens) == "a🦜 b".encode()
        assert tokens[0].offset == 0
        assert (tokens[-1].offset, tokens[-1].data.decode()) in ((2, " b"), (3, "b"))
        assert all(token.top == [(ids[0], tokens[0].data, -0.5)] for token in tokens)

    def test_offsets_of_a_prompt_count_characters(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("é a é b", add_special_tokens=False)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        data = bytes(ids_to_bytes(ids))
        accepted = Accepted(uid=1, num_prompt_tokens=len(ids), sampling=params, prompt_ids=data)
        scored = PromptLogprobs(uid=1, logprobs=[-1.0] * (len(ids) - 1), tops=[[]] * (len(ids) - 1))
        replies, _ = Detokenizer(tokenizer).handle([accepted, scored, _finished(1, 1)])
        prompt = [token for r in replies if isinstance(r, TextReply) for token in r.prompt]
        assert [token.id for token in prompt] == ids
        before = [b"".join(token.data for token in prompt[:i]) for i in range(len(ids))]
        offsets = [len(data.decode(errors="ignore")) for data in before]
        assert [token.offset for token in prompt] == offsets

    def test_unfinished_character_at_the_end(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
        replies, _ = detokenizer.handle([_accepted(1), *_tokens(1, ids), _finished(1, len(ids))])
        assert _text(replies) == "a\ufffd" == tokenizer.decode(ids)

    def test_silent_tokens_have_ids_but_no_text(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        eos = tokenizer.eos_token_id
        assert eos is not None
        events = [_accepted(1, skip_special_tokens=False), *_tokens(1, ids)]
        events += [Token(uid=1, id=eos, silent=True), _finished(1, len(ids) + 1, "stop")]
        replies, _ = detokenizer.handle(events)
        assert _text(replies) == "Hello"
        assert _all_ids(replies) == [*ids, eos]
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_match) == ("stop", None)
        assert end.num_output_tokens == len(ids) + 1

    def test_special_tokens_are_kept_if_asked(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
        for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
            detokenizer = Detokenizer(tokenizer)
            accepted = _accepted(1, skip_special_tokens=skip)
            replies, _ = detokenizer.handle([accepted, *_tokens(1, ids), _finished(1, len(ids))])
            assert _text(replies) == text

    def test_stop_token_id(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        events = [_accepted(1, stop_token_ids=(9, 10)), *_tokens(1, [50])]
        events += [Token(uid=1, id=10, silent=True), _finished(1, 2, "stop", stop_match=10)]
        replies, _ = detokenizer.handle(events)
        assert replies[-1] == events[-1]
        assert _all_ids(replies) == [50, 10]

    def test_abort(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        replies, _ = detokenizer.handle([_accepted(1, stop=("xyz",)), _finished(1, 0, "abort")])
        end = replies[-1]
        assert isinstance(end, Finished)
        assert end.reason == "abort"
        assert detokenizer.num_running == 0

    def test_refused_and_failed(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        refusal = Failed(uid=1, message="too long", code="c", status=400, param="prompt")
        replies, _ = detokenizer.handle([refusal])
        assert replies == [refusal]
        assert detokenizer.num_running == 0

    def test_text_of_the_same_turn_goes_before_the_failure(self, tokenizer: Tokenizer) -> None:
        """What a client gets must not depend on how many events the detokenizer took at once."""
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        failure = Failed(uid=1, message="m", code="engine_error", status=500)
        replies, stops = detokenizer.handle([_accepted(1), *_tokens(1, ids), failure])
        assert replies == [
            _accepted(1),
            TextReply(uid=1, text="Hello", token_ids=ids),
            failure,
        ]
        assert stops == []

    def test_late_events_are_ignored(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.handle([*_tokens(3, [60]), _finished(3, 1)]) == ([], [])
        assert detokenizer.num_running == 0

    def test_a_bug_of_ours_fails_one_request(self, tokenizer: Tokenizer, monkeypatch: Any) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([_accepted(1), _accepted(2)])

        def fail(token: int) -> str:
            raise KeyError("a bug")

        monkeypatch.setattr(detokenizer._outputs[1].stream, "feed", fail, raising=False)
        replies, stops = detokenizer.handle([*_tokens(1, [60]), *_tokens(2, [60])])
        assert [type(reply) for reply in replies] == [Failed, TextReply]
        assert stops == [StopMsg(uid=1, num_tokens=1)]
        assert detokenizer.num_running == 1


class TestStopStrings:
    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def test_the_scheduler_finishes_a_request_after_the_cut(self, tokenizer: Tokenizer) -> None:
        """The usual way: the scheduler answers the StopMsg, tokens in flight come before that."""
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world, hello")
        detokenizer.handle([_accepted(1, stop=("world", "wor", "xyz"))])
        replies: list[UserReply] = []
        stops: list[StopMsg] = []
        for token in ids:
            more, new_stops = detokenizer.handle(_tokens(1, [token]))
            replies += more
            stops += new_stops
        assert _text(replies) == "Hello "
        [stop] = stops
        assert not any(isinstance(reply, Finished) for reply in replies)
        more, new_stops = detokenizer.handle([_finished(1, stop.num_tokens, "stop")])
        assert new_stops == []
        *rest, end = more
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_match, _text(rest)) == ("stop", "wor", "")
        assert (end.num_output_tokens, end.num_cached_tokens) == (stop.num_tokens, 2)
        assert "wor" in tokenizer.decode(ids[: stop.num_tokens])
        assert "wor" not in tokenizer.decode(ids[: stop.num_tokens - 1])
        assert _all_ids([*replies, *rest]) == ids[: stop.num_tokens]
        assert detokenizer.num_running == 0

    @pytest.mark.parametrize("reason", ["length", "stop", "abort"])
    def test_a_stop_string_and_the_end_in_one_turn(self, tokenizer: Tokenizer, reason: Any) -> None:
        """Two ends at once: the stop string is what the client sees, with its own counts."""
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world, hello")
        events = [_accepted(1, stop=("Hello",)), *_tokens(1, ids), _finished(1, len(ids), reason)]
        replies, stops = detokenizer.handle(events)
        assert [type(reply) for reply in replies] == [Accepted, TextReply, Finished]
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (_text(replies), end.reason, end.stop_match) == ("", "stop", "Hello")
        assert end.num_output_tokens == len(_all_ids(replies)) == stops[0].num_tokens
        # The scheduler does not know the request any more: nothing answers this StopMsg.
        assert detokenizer.num_running == 0

    def test_held_text_is_released_at_the_end(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello wor")
        detokenizer.handle([_accepted(1, stop=("world",))])
        replies, _ = detokenizer.handle(_tokens(1, ids))
        assert _text(replies) == "Hello "
        end, _ = detokenizer.handle([_finished(1, len(ids))])
        assert _text(end) == "wor"
        assert isinstance(end[-1], Finished)
        assert end[-1].reason == "length"

    def test_held_bytes_complete_a_stop_string_at_the_end(
        self, by_kind: dict[str, Tokenizer]
    ) -> None:
        """Runs of byte tokens are text only when they end, which may be the end of it all."""
        tokenizer = by_kind["sentencepiece"]
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "a🦜")
        events = [_accepted(1, stop=("🦜",)), *_tokens(1, ids), _finished(1, len(ids))]
        replies, stops = detokenizer.handle(events)
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (_text(replies), end.reason, end.stop_match) == ("a", "stop", "🦜")
        assert stops == []

    def test_failure_after_the_cut(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world")
        detokenizer.handle([_accepted(1, stop=("Hello",)), *_tokens(1, ids)])
        replies, _ = detokenizer.handle([Failed(uid=1, message="m", code="c", status=500)])
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (_text(replies), end.reason, end.stop_match) == ("", "stop", "Hello")
        assert end.num_prompt_tokens == 4
        assert detokenizer.num_running == 0

    def test_special_tokens_that_are_skipped_do_not_match(self, tokenizer: Tokenizer) -> None:
        ids = self._ids(tokenizer, "a<|im_end|>b")
        for skip, text in ((True, "ab"), (False, "a")):
            detokenizer = Detokenizer(tokenizer)
            accepted = _accepted(1, skip_special_tokens=skip, stop=("<|im_end|>",))
            replies, _ = detokenizer.handle([accepted, *_tokens(1, ids), _finished(1, len(ids))])
            assert _text(replies) == text


def _cut(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


STOPS = ["the", " ", "o", "\n", "é", "你好", "\ufffd", "q", "wor", "ll", "😀", "own fox", "\u200d"]


@pytest.mark.parametrize("kind", KINDS)
def test_replies_join_to_the_decoded_text_up_to_the_stop_string(
    kind: str, by_kind: dict[str, Tokenizer]
) -> None:
    """What the client joins is the decoded text up to the first stop string, for every stream."""
    for seed in range(200):
        _run_streams(by_kind[kind], random.Random(seed), f"seed {seed}")


def _run_streams(tokenizer: Tokenizer, rng: random.Random, label: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    queues: dict[int, list[Event]] = {}
    expected: dict[int, str] = {}
    for uid in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            ids = tokenizer.encode(rng.choice(CORPUS))[: rng.randint(0, 30)]
        else:
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 20))]
        stops = tuple(rng.sample(STOPS, rng.randint(0, 3)))
        skip, silent = rng.random() < 0.5, rng.random() < 0.5
        queues[uid] = [_accepted(uid, stop=stops, skip_special_tokens=skip), *_tokens(uid, ids)]
        if silent:
            queues[uid].append(Token(uid=uid, id=2, silent=True))
        queues[uid].append(_finished(uid, len(ids) + silent))
        expected[uid] = _cut(tokenizer.decode(ids, skip_special_tokens=skip), stops)

    replies: list[Any] = []
    stop_msgs: list[StopMsg] = []
    while any(queues.values()):
        turn: list[Event] = []
        for queue in queues.values():
            num = rng.randint(0, 4)
            turn += queue[:num]
            del queue[:num]
        more, stops_now = detokenizer.handle(turn)
        replies += more
        stop_msgs += stops_now
    assert detokenizer.num_running == 0, label
    for uid, text in expected.items():
        own = [reply for reply in replies if reply.uid == uid]
        assert _text(own) == text, label
        assert [type(reply) for reply in own].count(Finished) == 1, label
        assert isinstance(own[-1], Finished), label
        assert own[-1].num_output_tokens == len(_all_ids(own)), label
        assert all(reply.text for reply in own[:-2] if isinstance(reply, TextReply)), label
        assert sum(message.uid == uid for message in stop_msgs) <= 1, label
