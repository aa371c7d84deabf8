"""What each drafter guesses, beside a plain search."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from helpers.scheduling import add, make, settle
from minisgl.core.image import LOWEST
from minisgl.core.req import Req
from minisgl.kvcache import RadixPrefixCache
from minisgl.scheduler import Scheduler
from minisgl_zoo.drafts import history as history_module
from minisgl_zoo.drafts.forced import Forced
from minisgl_zoo.drafts.history import GRAM, History
from minisgl_zoo.drafts.tree import Continuation, following


def running(prompt: list[int], prediction: Sequence[int] = ()) -> tuple[Scheduler, Req]:
    scheduler = make()
    add(scheduler, 0, prompt)
    req = scheduler.requests.by_uid[0]
    req.prediction = np.array(prediction, np.int32)
    return scheduler, req


def history(prompt: list[int], prediction: Sequence[int] = ()) -> History:
    scheduler, req = running(prompt, prediction)
    return History(req, scheduler.requests)


def test_a_history_guesses_what_followed_the_last_three_tokens() -> None:
    drafter = history([1, 2, 3, 4, 5, 9, 1, 2, 3])
    assert list(drafter.next(4)) == [4, 5, 9, 1]
    drafter.add(4)
    assert list(drafter.next(2)) == [5, 9]
    drafter.add(7)
    assert list(drafter.next(2)) == [], "3, 4, 7 is new"
    for token in (1, 2, 3):
        drafter.add(token)
    assert list(drafter.next(2)) == [4, 7], "where it stood last"


def test_a_prediction_is_text_before_the_prompt() -> None:
    drafter = history([50, 51], [1, 2, 3, 4, 5])
    for token in (1, 2, 3):
        drafter.add(token)
    assert list(drafter.next(9))[:2] == [4, 5]


def test_of_a_long_prompt_the_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MOST_TOKENS", 7)
    assert list(history([*range(20, 40), 1, 2, 3, 4, 1, 2, 3]).next(2)) == [4, 1]


@pytest.mark.parametrize("length", range(6))
def test_short_prompts_have_no_gram(length: int) -> None:
    drafter = history([7] * max(length, 1))
    for _ in range(5):
        drafter.add(7)
    assert list(drafter.next(1)) == [7]


def test_a_history_finds_grams_as_a_plain_search_does() -> None:
    rng = random.Random(1)
    for _ in range(40):
        ids = [rng.randrange(4) for _ in range(rng.randint(1, 40))]
        drafter, at = history(ids[:]), plain_search(ids)
        for _ in range(60):
            expected = [] if at is None else ids[at : at + 3]
            assert list(drafter.next(3)) == expected
            token = rng.randrange(4)
            is_right = at is not None and ids[at] == token
            ids.append(token)
            drafter.add(token)
            at = at + 1 if at is not None and is_right else plain_search(ids)


def plain_search(ids: list[int]) -> int | None:
    """Return the token after the last place before the end where the last `GRAM` ids stand."""
    for end in range(len(ids) - 1, GRAM - 1, -1):
        if ids[end - GRAM : end] == ids[-GRAM:]:
            return end
    return None


def finished(scheduler: Scheduler, uid: int, prompt: list[int], output: list[int]) -> None:
    """Run a request that gets this output."""
    add(scheduler, uid, prompt, max_tokens=len(output))
    for token in output:
        settle(scheduler, scheduler.plan(), token)
    assert uid not in scheduler.requests.by_uid


def test_a_tree_guesses_what_followed_in_an_earlier_request() -> None:
    scheduler = make(page_size=2)
    prompt, output = [1, 2, 3], [10, 11, 12, 13, 14, 15, 16]
    finished(scheduler, 0, prompt, output)
    add(scheduler, 1, prompt)
    settle(scheduler, scheduler.plan(), 10)
    req = scheduler.requests.by_uid[1]
    drafter = Continuation(req, scheduler.requests)
    assert list(drafter.next(3)) == [10, 11, 12]
    drafter.add(10)
    assert list(drafter.next(3)) == [11, 12, 13]
    req.output.append(99)
    drafter.add(99)
    assert drafter.is_over
    assert list(drafter.next(3)) == []


def test_a_tree_guesses_no_id_of_an_image() -> None:
    """A prompt may go on with one. The model has no such tokens."""
    scheduler = make(page_size=2)
    tree = scheduler.requests.cache.prefix_cache
    ids = np.array([1, 2, 3, 7, 8, LOWEST, LOWEST + 1, 9], np.int32)
    tree.insert(tree.match(ids[:0]), ids, scheduler.requests.cache._allocator.allocate(4), 0)
    add(scheduler, 0, [1, 2, 3])
    scheduler.plan()
    drafter = Continuation(scheduler.requests.by_uid[0], scheduler.requests)
    assert list(drafter.next(9)) == [7, 8]


def test_a_tree_guesses_within_a_namespace() -> None:
    scheduler = make(page_size=2)
    finished(scheduler, 0, [1, 2, 3], [10, 11, 12, 13, 14, 15])
    add(scheduler, 1, [1, 2, 3], namespace="another tenant")
    settle(scheduler, scheduler.plan(), 10)
    drafter = Continuation(scheduler.requests.by_uid[1], scheduler.requests)
    assert drafter.is_over


def test_ids_that_follow_are_found_as_a_plain_search_does() -> None:
    """`minisgl_zoo.drafts.tree.following`: any branch that has the ids may answer."""
    rng = random.Random(2)
    for _ in range(60):
        page = rng.choice([1, 2, 4])
        scheduler = make(page_size=page)
        tree = scheduler.requests.cache.prefix_cache
        assert isinstance(tree, RadixPrefixCache)
        root = tree.match(np.zeros(0, np.int32))
        sequences = []
        for step in range(8):
            ids = [rng.randrange(2) for _ in range(page * rng.randint(1, 8))]
            sequences.append(ids)
            tree.insert(root, np.array(ids, np.int32), list(range(len(ids) // page)), step)
        for _ in range(30):
            before = page * rng.randint(0, 3)
            base = rng.choice(sequences)[:before]
            position = tree.match(np.array(base, np.int32))
            tail = [rng.randrange(2) for _ in range(rng.randint(0, 5))]
            found = following(tree, position, np.array(tail, np.int32)).tolist()
            whole = base[: position.num_tokens] + tail
            longer = [ids for ids in sequences if ids[: len(whole)] == whole != ids]
            assert bool(found) == bool(longer)
            if found:
                assert any(ids[len(whole) :][: len(found)] == found for ids in longer)


class _Masker:
    def forced(self, output: Sequence[int]) -> Sequence[int]:
        return [1, 2, 3][len(output) :] or [5, 6][len(output) - 3 :]


def test_a_grammar_is_asked_again_where_its_guess_was_wrong_or_ends() -> None:
    scheduler, req = running([1])
    assert Forced(req, scheduler.requests).is_over, "no grammar"
    req.masker = _Masker()  # type: ignore[assignment]  # it makes no masks
    drafter = Forced(req, scheduler.requests)
    assert list(drafter.next(9)) == [1, 2, 3]
    drafter.add(1)
    assert list(drafter.next(1)) == [2]
    drafter.add(7)
    assert list(drafter.next(9)) == [3], "asked again"
    drafter.add(3)
    assert list(drafter.next(9)) == [5, 6], "its guess has ended"
