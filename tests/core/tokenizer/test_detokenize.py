"""Events in, replies out: the text, its cut, and one end for each request."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from helpers.token_events import acceptance, ending, ids_of, text_of, tokens_of
from minisgl.core import Accepted, Event, Failed, Finished, SamplingParams, Token
from minisgl.core.event import PromptLogprobs
from minisgl.message import StopMsg, TextReply, ids_to_bytes
from minisgl.tokenizer import Detokenizer, Tokenizer


class TestLife:
    def test_each_turn_sends_its_text(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello world", add_special_tokens=False)
        replies, stops = detokenizer.handle([acceptance(1)])
        assert replies == [acceptance(1)]
        for token in ids:
            replies, more = detokenizer.handle(tokens_of(1, [token]))
            assert replies == [TextReply(uid=1, text=tokenizer.decode([token]), token_ids=[token])]
            stops += more
        replies, more = detokenizer.handle([ending(1, len(ids))])
        assert stops + more == []
        assert replies == [ending(1, len(ids))]
        assert detokenizer.num_running == 0

    def test_tokens_of_one_turn_are_one_reply(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([acceptance(1), acceptance(2)])
        one = tokenizer.encode("Hello world", add_special_tokens=False)
        two = tokenizer.encode("naïve café", add_special_tokens=False)
        both = [e for pair in zip(tokens_of(1, one), tokens_of(2, two), strict=False) for e in pair]
        num = len(both) // 2
        replies, _ = detokenizer.handle(both)
        assert replies == [
            TextReply(uid=1, text=tokenizer.decode(one[:num]), token_ids=one[:num]),
            TextReply(uid=2, text=tokenizer.decode(two[:num]), token_ids=two[:num]),
        ]

    def test_all_events_of_a_request_may_come_in_one_turn(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        replies, _ = detokenizer.handle([acceptance(1), *tokens_of(1, ids), ending(1, len(ids))])
        assert [type(reply) for reply in replies] == [Accepted, TextReply, Finished]
        assert text_of(replies) == "Hello"
        assert ids_of(replies) == ids
        assert detokenizer.num_running == 0

    def test_ids_without_text_come_with_the_next_reply(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([acceptance(1)])
        ids = tokenizer.encode("🦜", add_special_tokens=False)
        assert len(ids) > 1
        for token in ids[:-1]:
            assert detokenizer.handle(tokens_of(1, [token]))[0] == []
        replies, _ = detokenizer.handle(tokens_of(1, ids[-1:]))
        assert replies == [TextReply(uid=1, text="🦜", token_ids=ids)]

    def test_logprobs_stay_with_their_tokens(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([acceptance(1, logprobs=True), acceptance(2)])
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
        replies, _ = detokenizer.handle([acceptance(1, logprobs=True), *events])
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
        replies, _ = Detokenizer(tokenizer).handle([accepted, scored, ending(1, 1)])
        prompt = [token for r in replies if isinstance(r, TextReply) for token in r.prompt]
        assert [token.id for token in prompt] == ids
        before = [b"".join(token.data for token in prompt[:i]) for i in range(len(ids))]
        offsets = [len(data.decode(errors="ignore")) for data in before]
        assert [token.offset for token in prompt] == offsets

    def test_offsets_behind_bytes(self, tokenizer: Tokenizer) -> None:
        """Their text, which may be invalid, is known with the token behind them."""
        bird, b = (tokenizer.encode(text, add_special_tokens=False) for text in ("a🦜", "b"))
        for ids in (bird + b, bird[:-1] + b, bird + bird[-1:] + b):
            params = SamplingParams(max_tokens=9, prompt_logprobs=0, echo=True)
            asked = replace(acceptance(1), sampling=params, prompt_ids=ids_to_bytes(ids))
            scores = PromptLogprobs(uid=1, logprobs=[-1.0] * len(ids[1:]), tops=[[]] * len(ids[1:]))
            tokens = [Token(uid=2, id=token, logprob=-1.0) for token in ids]
            events = [asked, scores, acceptance(2, logprobs=True), *tokens]
            for reply in Detokenizer(tokenizer).handle(events)[0]:
                if isinstance(reply, TextReply):
                    last = [*reply.tokens, *reply.prompt][-1]
                    assert reply.text[last.offset :] == last.data.decode()

    def test_offsets_behind_what_an_earlier_engine_made(self, tokenizer: Tokenizer) -> None:
        """With `echo` they count the prompt too; neither its text nor its tokens come again."""
        ids = tokenizer.encode("é a é b", add_special_tokens=False)
        params = SamplingParams(max_tokens=9, prompt_logprobs=0, echo=True, logprobs=True)
        accepted = Accepted(
            uid=1,
            num_prompt_tokens=len(ids),
            sampling=params,
            prompt_ids=ids_to_bytes(ids),
            output=ids_to_bytes(ids[:3]),
        )
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.handle([accepted]) == ([accepted], [])
        (reply,), _ = detokenizer.handle([Token(uid=1, id=ids[3], logprob=-1.0)])
        assert isinstance(reply, TextReply)
        assert reply.token_ids == ids[3:4]
        assert reply.prompt == []
        assert reply.tokens[0].offset == len("é a é b" + tokenizer.decode(ids[:3]))

    def test_what_an_earlier_engine_made_is_a_reply_of_its_own(self, tokenizer: Tokenizer) -> None:
        """Also if it has no text yet, and if a new token comes in the same turn."""
        ids = tokenizer.encode("a🦜b", add_special_tokens=False)
        for num in range(1, len(ids)):
            again = replace(acceptance(1), output=ids_to_bytes(ids[:num]), repeats=True)
            replies, _ = Detokenizer(tokenizer).handle([again, *tokens_of(1, ids[num:])])
            assert [ids_of([reply]) for reply in replies] == [[], ids[:num], ids[num:]]
            assert text_of(replies) == "a🦜b"

    def test_unfinished_character_at_the_end(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
        replies, _ = detokenizer.handle([acceptance(1), *tokens_of(1, ids), ending(1, len(ids))])
        assert text_of(replies) == "a\ufffd" == tokenizer.decode(ids)

    def test_silent_tokens_have_ids_but_no_text(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("Hello", add_special_tokens=False)
        eos = tokenizer.eos_token_id
        assert eos is not None
        events = [acceptance(1, skip_special_tokens=False), *tokens_of(1, ids)]
        events += [Token(uid=1, id=eos, silent=True), ending(1, len(ids) + 1, "stop")]
        replies, _ = detokenizer.handle(events)
        assert text_of(replies) == "Hello"
        assert ids_of(replies) == [*ids, eos]
        end = replies[-1]
        assert isinstance(end, Finished)
        assert (end.reason, end.stop_match) == ("stop", None)
        assert end.num_output_tokens == len(ids) + 1

    def test_special_tokens_are_kept_if_asked(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a<|im_end|>b", add_special_tokens=False)
        for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
            detokenizer = Detokenizer(tokenizer)
            accepted = acceptance(1, skip_special_tokens=skip)
            replies, _ = detokenizer.handle([accepted, *tokens_of(1, ids), ending(1, len(ids))])
            assert text_of(replies) == text

    def test_stop_token_id(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        events = [acceptance(1, stop_token_ids=(9, 10)), *tokens_of(1, [50])]
        events += [Token(uid=1, id=10, silent=True), ending(1, 2, "stop", stop_match=10)]
        replies, _ = detokenizer.handle(events)
        assert replies[-1] == events[-1]
        assert ids_of(replies) == [50, 10]

    def test_abort(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        replies, _ = detokenizer.handle([acceptance(1, stop=("xyz",)), ending(1, 0, "abort")])
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
        replies, stops = detokenizer.handle([acceptance(1), *tokens_of(1, ids), failure])
        assert replies == [
            acceptance(1),
            TextReply(uid=1, text="Hello", token_ids=ids),
            failure,
        ]
        assert stops == []

    def test_late_events_are_ignored(self, tokenizer: Tokenizer) -> None:
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.handle([*tokens_of(3, [60]), ending(3, 1)]) == ([], [])
        assert detokenizer.num_running == 0

    def test_a_bug_of_ours_fails_one_request(self, tokenizer: Tokenizer, monkeypatch: Any) -> None:
        detokenizer = Detokenizer(tokenizer)
        detokenizer.handle([acceptance(1), acceptance(2)])

        def fail(token: int) -> str:
            raise KeyError("a bug")

        monkeypatch.setattr(detokenizer._outputs[1].stream, "feed", fail, raising=False)
        replies, stops = detokenizer.handle([*tokens_of(1, [60]), *tokens_of(2, [60])])
        assert [type(reply) for reply in replies] == [Failed, TextReply]
        assert stops == [StopMsg(uid=1, num_tokens=1)]
        assert detokenizer.num_running == 1
