"""Stop strings: the text is cut at the first one, in every stream."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from helpers.text_checkpoints import CORPUS, STREAMED
from helpers.token_events import acceptance, ending, ids_of, text_of, tokens_of
from minisgl.core import Accepted, Event, Failed, Finished, Token
from minisgl.message import StopMsg, TextReply, ids_to_bytes
from minisgl.message.frontend import UserReply
from minisgl.tokenizer import Detokenizer, Tokenizer


class TestStopStrings:
    def _ids(self, tokenizer: Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def test_the_scheduler_finishes_a_request_after_the_cut(self, tokenizer: Tokenizer) -> None:
        """The usual way: the scheduler answers the StopMsg, tokens in flight come before that."""
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world, hello")
        detokenizer.handle([acceptance(1, stop=("world", "wor", "xyz"))])
        replies: list[UserReply] = []
        stops: list[StopMsg] = []
        for token in ids:
            more, new_stops = detokenizer.handle(tokens_of(1, [token]))
            replies += more
            stops += new_stops
        assert text_of(replies) == "Hello "
        [stop] = stops
        assert not any(isinstance(reply, Finished) for reply in replies)
        more, new_stops = detokenizer.handle([ending(1, stop.num_tokens, "stop")])
        assert new_stops == []
        *rest, end = more
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_match, text_of(rest)) == ("stop", "wor", "")
        assert (end.num_output_tokens, end.num_cached_tokens) == (stop.num_tokens, 2)
        assert "wor" in tokenizer.decode(ids[: stop.num_tokens])
        assert "wor" not in tokenizer.decode(ids[: stop.num_tokens - 1])
        assert ids_of([*replies, *rest]) == ids[: stop.num_tokens]
        assert detokenizer.num_running == 0

    @pytest.mark.parametrize("reason", ["length", "stop", "abort"])
    def test_a_stop_string_and_the_end_in_one_turn(self, tokenizer: Tokenizer, reason: Any) -> None:
        """Two ends at once: the stop string is what the client sees, with its own counts."""
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world, hello")
        last = replace(ending(1, len(ids), reason), num_drafted=9, num_accepted=len(ids))
        events = [acceptance(1, stop=("Hello",)), *tokens_of(1, ids), last]
        replies, stops = detokenizer.handle(events)
        assert [type(reply) for reply in replies] == [Accepted, TextReply, Finished]
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (text_of(replies), end.reason, end.stop_match) == ("", "stop", "Hello")
        assert end.num_output_tokens == len(ids_of(replies)) == stops[0].num_tokens
        assert end.num_accepted <= end.num_output_tokens < len(ids)  # drafts behind the cut
        # The scheduler does not know the request any more: nothing answers this StopMsg.
        assert detokenizer.num_running == 0

    def test_held_text_is_released_at_the_end(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello wor")
        detokenizer.handle([acceptance(1, stop=("world",))])
        replies, _ = detokenizer.handle(tokens_of(1, ids))
        assert text_of(replies) == "Hello "
        end, _ = detokenizer.handle([ending(1, len(ids))])
        assert text_of(end) == "wor"
        assert isinstance(end[-1], Finished)
        assert end[-1].reason == "length"

    @pytest.mark.needs("minisgl_zoo")
    def test_held_bytes_complete_a_stop_string_at_the_end(
        self, by_kind: dict[str, Tokenizer]
    ) -> None:
        """Runs of byte tokens are text only when they end, which may be the end of it all."""
        tokenizer = by_kind["sentencepiece"]
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "a🦜")
        events = [acceptance(1, stop=("🦜",)), *tokens_of(1, ids), ending(1, len(ids))]
        replies, stops = detokenizer.handle(events)
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (text_of(replies), end.reason, end.stop_match) == ("a", "stop", "🦜")
        assert stops == []

    def test_failure_after_the_cut(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = self._ids(tokenizer, "Hello world")
        detokenizer.handle([acceptance(1, stop=("Hello",)), *tokens_of(1, ids)])
        replies, _ = detokenizer.handle([Failed(uid=1, message="m", code="c", status=500)])
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (text_of(replies), end.reason, end.stop_match) == ("", "stop", "Hello")
        assert end.num_prompt_tokens == 4
        assert detokenizer.num_running == 0

    def test_special_tokens_that_are_skipped_do_not_match(self, tokenizer: Tokenizer) -> None:
        ids = self._ids(tokenizer, "a<|im_end|>b")
        for skip, text in ((True, "ab"), (False, "a")):
            detokenizer = Detokenizer(tokenizer)
            accepted = acceptance(1, skip_special_tokens=skip, stop=("<|im_end|>",))
            replies, _ = detokenizer.handle([accepted, *tokens_of(1, ids), ending(1, len(ids))])
            assert text_of(replies) == text


def _cut(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


STOPS = ["the", " ", "o", "\n", "é", "你好", "\ufffd", "q", "wor", "ll", "😀", "own fox", "\u200d"]


@pytest.mark.parametrize("kind", STREAMED)
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
        queues[uid] = [acceptance(uid, stop=stops, skip_special_tokens=skip), *tokens_of(uid, ids)]
        if silent:
            queues[uid].append(Token(uid=uid, id=2, silent=True))
        queues[uid].append(ending(uid, len(ids) + silent))
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
        assert text_of(own) == text, label
        assert [type(reply) for reply in own].count(Finished) == 1, label
        assert isinstance(own[-1], Finished), label
        assert own[-1].num_output_tokens == len(ids_of(own)), label
        assert all(reply.text for reply in own[:-2] if isinstance(reply, TextReply)), label
        assert sum(message.uid == uid for message in stop_msgs) <= 1, label


@pytest.mark.parametrize("kind", STREAMED)
def test_another_detokenizer_goes_on_at_each_token(
    kind: str, by_kind: dict[str, Tokenizer]
) -> None:
    """The client's text is the same, wherever the first one ended; nothing is sent twice."""
    tokenizer = by_kind[kind]
    for seed in range(40):
        rng = random.Random(seed)
        ids = tokenizer.encode(rng.choice(CORPUS))[:12] + [rng.randrange(99) for _ in range(4)]
        stops = tuple(rng.sample(STOPS, rng.randint(0, 2)))
        expected = _cut(tokenizer.decode(ids, skip_special_tokens=True), stops)
        for num_read in range(len(ids) + 1):
            had, _ = Detokenizer(tokenizer).handle(
                [acceptance(0, stop=stops), *tokens_of(0, ids[:num_read])]
            )
            seen = ids_of(had)
            assert seen == ids[: len(seen)]
            again = replace(acceptance(0, stop=stops), output=ids_to_bytes(seen))
            second = Detokenizer(tokenizer)
            first_turn, stopped = second.handle([again])
            assert first_turn == [again]
            if stopped:
                assert stopped == [StopMsg(uid=0, num_tokens=len(seen))]
                assert text_of(had) == expected
            rest, more = second.handle([*tokens_of(0, ids[len(seen) :]), ending(0, len(ids))])
            assert text_of(had) + text_of(rest) == expected, (seed, num_read)
            assert isinstance(rest[-1], Finished)
            assert rest[-1].num_output_tokens == len(seen) + len(ids_of(rest))
            assert len(stopped + more) <= 1
