"""What happens to requests with pictures: sharing, leaving, retraction, several ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from helpers.engine_ranks import engines, together
from helpers.engine_replies import ending
from helpers.pictures import PICTURES, Sample, chat, text_part
from helpers.seen import NUM_TOP, Eyes, check, start
from minisgl.core import Accepted, Event, Failed, Finished, SamplingParams, Token
from minisgl.core.image import LOWEST, Image, places_of
from minisgl.core.step_times import StepTimes
from minisgl.engine.startup.measure import measure_image_ns
from minisgl.errors import InvalidRequest
from minisgl.message import (
    AbortMsg,
    ChatPrompt,
    TokenizeMsg,
    TokenPrompt,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.message.frontend import EncodeMsg
from minisgl.scheduler.step_broadcast import Leader
from minisgl.tokenizer.worker import user_msg
from minisgl_gateway.codec_answers import answer_codec
from minisgl_gateway.router.prefix_hashes import TreeHashes, prompt_hashes
from minisgl_gateway.watch.recorder import Recorder
from minisgl_zoo.vision import probe, tower
from minisgl_zoo.vision.times import _Outbox


def turn(answer: str, words: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [text_part(words)]},
    ]


def test_the_second_turn_runs_no_tower(eyes: Eyes) -> None:
    first = chat(*PICTURES[:3])
    eyes.ask([first])
    assert eyes.engine.vision.num_runs == 3
    [answer] = eyes.ask([first + turn("a cat", "Are you sure?")])
    assert eyes.engine.vision.num_runs == 3
    check(eyes.sample, answer, PICTURES[:3])
    assert answer.end.num_cached_tokens > 60


def test_a_picture_in_another_place_runs_no_tower(eyes: Eyes) -> None:
    eyes.ask([chat(*PICTURES[:3])])
    [answer] = eyes.ask([chat(*PICTURES[2::-1])], prompt_logprobs=NUM_TOP)
    assert eyes.engine.vision.num_runs == 3
    check(eyes.sample, answer, PICTURES[2::-1])


def test_two_requests_with_one_picture_run_it_once(eyes: Eyes) -> None:
    answers = eyes.ask([chat(PICTURES[0], words=words) for words in ("look", "see")])
    assert eyes.engine.vision.num_runs == 1
    for answer in answers:
        check(eyes.sample, answer, PICTURES[:1])


def test_a_start_measures_the_tower(eyes: Eyes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With images up to the largest that the processor makes, here of 112 pixels."""
    assert measure_image_ns(eyes.engine) > 0
    small, large = (eyes.engine.vision.probe(side) for side in (64, 500))
    assert (small.num_bytes, large.num_bytes) == (3 * 64 * 64, 3 * 112 * 112)
    assert (small.run(), large.run()) == (1, 1)
    monkeypatch.setattr(probe, "PROBE_S", 0)
    assert small.run() == 0.5, "one of two blocks"
    assert not eyes.engine.vision._cache
    assert eyes.engine.vision.num_runs == 0


def test_the_cache_is_bounded(mistral3: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower, "CACHED_IMAGES", 0)
    engine = start(mistral3, max_prefill_length=16)
    eyes = Eyes(mistral3, engine)
    [answer] = eyes.ask([chat(*PICTURES)], prompt_logprobs=NUM_TOP)
    check(mistral3, answer, PICTURES)
    assert not engine.vision._cache
    assert engine.vision.num_runs > len(PICTURES)  # once for each chunk with a part of it
    engine.close()


def test_retracted_requests_see_the_same(mistral3: Sample) -> None:
    engine = start(mistral3, max_prefill_length=64, num_pages=92, cache="naive")
    eyes = Eyes(mistral3, engine, num_pages=92, groups=(), cache="naive")
    eyes.count_images()
    shown = [PICTURES[:3], PICTURES[1:4]]
    answers = eyes.ask([chat(*each) for each in shown], max_tokens=60, ignore_eos=True)
    assert sum(answer.end.num_retractions for answer in answers)
    counted = [answer.end.images or (0, 0, 0) for answer in answers]
    assert [num_images for num_images, *_ in counted] == [3, 3]
    assert sum(num_runs for _, num_runs, _ in counted) == engine.vision.num_runs > 3
    for answer, each in zip(answers, shown, strict=True):
        check(mistral3, answer, each)
    engine.close()


def test_requests_that_leave_free_their_pixels(eyes: Eyes) -> None:
    encoded = eyes.encode(chat(*PICTURES[:2]))
    waiting, running, kept = (eyes.message(encoded, max_tokens=30) for _ in range(3))
    turns = [
        [waiting, AbortMsg(uid=waiting.uid), running, kept],
        *([] for _ in range(3)),
        [AbortMsg(uid=running.uid)],
    ]
    ends = [event for event in eyes.run(turns) if isinstance(event, Finished)]
    assert {end.uid: end.reason for end in ends} == {
        waiting.uid: "abort",
        running.uid: "abort",
        kept.uid: "length",
    }
    assert not eyes.scheduler.requests.by_uid


@pytest.mark.parametrize("bound", [40_000, 20_000])
def test_pixels_of_waiting_requests_are_bounded(
    bound: int, eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, a request may have more: it would be told to try again for ever."""
    monkeypatch.setattr("minisgl.scheduler.admission.MAX_PIXEL_BYTES", bound)
    encoded = eyes.encode(chat(PICTURES[3]))  # 29,568 bytes
    first, second, third = (eyes.message(encoded) for _ in range(3))
    events = eyes.run([[first, second], *([] for _ in range(12)), [third]])
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.uid, failed.status) == (second.uid, 429)
    assert "images of other requests" in failed.message
    assert sum(isinstance(event, Finished) for event in events) == 2


def test_without_overlap_the_ids_are_equal(eyes: Eyes) -> None:
    encoded = eyes.encode(chat(*PICTURES[:2]))
    outputs = []
    for overlap in (True, False):
        events = eyes.run([[eyes.message(encoded, max_tokens=12)]], overlap=overlap)
        outputs.append([event.id for event in events if hasattr(event, "id")])
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 12


def test_ids_above_the_vocabulary_stay_inside(eyes: Eyes) -> None:
    """The cache has them. Echo, penalties and log-probabilities have the model's own."""
    encoded = eyes.encode(chat(PICTURES[0]))
    options = {"echo": True, "prompt_logprobs": 2, "repetition_penalty": 1.3}
    message = eyes.message(encoded, **options)
    keys = ids_from_bytes(message.ids)
    assert (keys >= LOWEST).sum() == 35
    assert len(set(keys[keys >= LOWEST].tolist())) == 35
    events = eyes.run([[message]])
    [accepted] = [event for event in events if isinstance(event, Accepted)]
    assert accepted.prompt_ids == encoded.ids
    assert max(ids_from_bytes(accepted.prompt_ids)) < LOWEST
    assert [event for event in events if isinstance(event, Finished)]


def test_a_client_cannot_send_ids_of_images(eyes: Eyes) -> None:
    message = eyes.message(eyes.encode(chat(PICTURES[0])))
    stolen = eyes.encoder.encode(TokenPrompt(ids=message.ids))
    [event] = eyes.run([[eyes.message(stolen)]])
    assert isinstance(event, Failed)
    assert "prompt token ids must be between" in event.message


def test_small_images_have_a_namespace_of_their_own(eyes: Eyes) -> None:
    tiny = eyes.message(eyes.encode(chat(PICTURES[0].resize((9, 9)))))
    assert len(places_of(tiny.images[0])) == 4
    assert len(tiny.namespace) == 64
    names = [eyes.encoder.images.namespace_of(key, tiny.images) for key in ("a", "b")]
    assert len({tiny.namespace, *names}) == 3, "that of an API key stays apart"
    assert eyes.message(eyes.encode(chat(PICTURES[0]))).namespace == ""


def test_images_go_through_the_tower_together_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tower, "BATCH_PATCHES", 10)
    small, large = (
        Image(digest=b"", places=b"", token=0, shape=(), sizes=sizes) for sizes in ((2, 2), (4, 4))
    )
    batches = tower._batches([small, small, large, small, small, small])
    assert [len(batch) for batch in batches] == [2, 1, 2, 1]


def test_what_images_cost_is_told_once_and_forgotten() -> None:
    sent: list[Event] = []
    counts = {uid: tower.Count(2, []) for uid in range(3)}
    inner: Any = SimpleNamespace(send=sent.extend)
    unused: Any = None
    outbox = _Outbox(inner, counts, unused)
    outbox.send([ending(0, 1), Failed(uid=1, message="", code="", status=500), ending(7, 1)])
    assert [getattr(event, "images", None) for event in sent] == [(2, 0, 0), None, None]
    assert list(counts) == [2]


def test_the_hash_has_content_and_size_and_fills_the_ids(eyes: Eyes) -> None:
    shown = [PICTURES[0], PICTURES[0].rotate(180), PICTURES[0].resize((49, 37))]
    messages = [eyes.message(eyes.encode(chat(each))) for each in shown]
    assert len({message.images[0].digest for message in messages}) == 3
    ids = [ids_from_bytes(message.ids) for message in messages]
    firsts = [each[each >= LOWEST] - LOWEST for each in ids]
    assert not set(firsts[0].tolist()) & set(firsts[1].tolist())
    assert np.bitwise_or.reduce(firsts[0]) == LOWEST - 1  # all 30 bits are used


def test_other_ranks_get_no_pixels(eyes: Eyes) -> None:
    message = eyes.message(eyes.encode(chat(*PICTURES[:2])))
    sent: list[Any] = []

    class Queue:
        def get(self, timeout_s: float | None) -> list[Any]:
            return [message]

        def put(self, messages: list[Any]) -> None:
            sent.extend(messages)

    leader = Leader(Queue(), eyes.engine, [Queue()])  # type: ignore[list-item, arg-type] (a fake)
    assert leader.get(0) == [message]
    [broadcast] = sent
    assert [each.pixels for each in broadcast.messages[0].images] == [b"", b""]
    assert len(msgspec.msgpack.encode(broadcast)) < 2000
    assert broadcast.messages[0].images[0].num_bytes == message.images[0].num_bytes


@pytest.mark.parametrize("family", ["gemma4", "qwen3_vl", "lfm2_vl"])
def test_two_ranks_see_the_same(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sample = request.getfixturevalue(family)
    with engines(
        sample.folder, tmp_path / "store", 2, num_pages=256, max_prefill_length=80
    ) as both:
        eyes = [Eyes(sample, engine) for engine in both]
        found = together(lambda each: each.ask([chat(*PICTURES), chat(PICTURES[1])]), eyes)
    assert both[0].memory.vision_bytes > 0 == both[1].memory.vision_bytes
    for answer, shown in zip(found[0], [PICTURES, PICTURES[1:2]], strict=True):
        check(sample, answer, shown)


def test_a_request_goes_on_in_another_engine(eyes: Eyes) -> None:
    """As after a restart: the same prompt with its picture, and the output that the client has."""
    encoded = eyes.encode(chat(*PICTURES[:2]))
    whole = eyes.message(encoded, max_tokens=12)
    ids = [event.id for event in eyes.run([[whole]]) if isinstance(event, Token)]
    other = start(eyes.sample, max_prefill_length=64)
    again = Eyes(eyes.sample, other)
    message = again.message(encoded, max_tokens=12)
    message = msgspec.structs.replace(message, output=ids_to_bytes(ids[:5]))
    events = again.run([[message]])
    assert [event.id for event in events if isinstance(event, Token)] == ids[5:]
    other.close()


def test_a_chat_goes_on_with_the_ids_that_were_accepted(eyes: Eyes) -> None:
    """Its template may write another day after a restart, so its images have other places."""
    accepted, now = (eyes.encode(chat(*PICTURES[:2], words=words)) for words in ("one day", "2"))
    assert accepted.images[1].places != now.images[1].places
    message = TokenizeMsg(
        uid=1,
        prompt=ChatPrompt(messages=[]),
        sampling=SamplingParams(),
        output=b"",
        ids=accepted.ids,
    )
    expected = eyes.encoder.request(accepted, SamplingParams(), "", 1)
    again = user_msg(eyes.encoder, now, message)
    assert (again.ids, again.images) == (expected.ids, expected.images)
    assert again.namespace == expected.namespace
    fewer = eyes.encode(chat(PICTURES[0]))
    with pytest.raises(InvalidRequest, match="take 35 tokens, and took"):
        user_msg(eyes.encoder, fewer, message)


def test_pictures_are_counted_for_a_request_that_begins_without_a_token(eyes: Eyes) -> None:
    """Beside a stream the tower runs for one of two pictures, and the other's request has begun."""
    text = next(
        text
        for text in ("", "a", "ab", "abc")
        if places_of(eyes.encode(after(text, PICTURES[0])).images[0])[0] % 4 == 0
    )
    times = StepTimes(prompt_us=((8, 1), (512, 2)), decode_us=1, row_us=0, image_ns=1e6)
    eyes = Eyes(eyes.sample, eyes.engine, max_stall_s=1e-3, step_times=times)
    eyes.ask([after(text, PICTURES[2])])  # the prefix is cached up to the picture
    scheduler = eyes.scheduler
    eyes.count_images()
    chats = [chat(), after(text, PICTURES[0]), after(text, PICTURES[1])]
    stream, first, second = (eyes.message(eyes.encode(each), max_tokens=9) for each in chats)
    without: list[int] = []
    plan = scheduler.plan

    def planned() -> Any:
        found = plan()
        if found:
            rows = [row for row, _ in found.image_begins]
            without.extend(row for row in rows if row not in found.table_idxs)
        return found

    scheduler.plan = planned  # type: ignore[method-assign] (it notes the plan)
    events = eyes.run([[stream], [], [], [first, second]])
    assert len(without) == 1
    ends = [event for event in events if isinstance(event, Finished)]
    assert [end.images and end.images[:2] for end in ends] == [None, (1, 1), (1, 1)]


def test_a_request_may_leave_before_its_step_begins_on_the_device(eyes: Eyes) -> None:
    """The device computes other steps meanwhile."""
    eyes.count_images()
    may_begin, plan = threading.Event(), eyes.scheduler.plan
    eyes.engine.device.enqueue(lambda: torch.ones(may_begin.wait(10)))
    plans: list[Any] = []

    def planned() -> Any:
        if plans:
            may_begin.set()
        plans.append(plan())
        return plans[-1]

    eyes.scheduler.plan = planned  # type: ignore[method-assign] (it lets the device go on)
    message = eyes.message(eyes.encode(chat(*PICTURES[:2])))
    ends = [
        event
        for event in eyes.run([[message], [AbortMsg(uid=message.uid)]])
        if isinstance(event, Finished)
    ]
    assert [(end.reason, end.images) for end in ends] == [("abort", (2, 0, 0))]
    assert eyes.engine.vision.num_runs == 2
    assert not eyes.engine.vision.counts


def after(text: str, picture: Any) -> list[dict[str, Any]]:
    [message] = chat(picture)
    message["content"][0] = text_part("What is this? " + text)
    return [message]


def test_a_router_finds_the_pages_of_pictures(eyes: Eyes) -> None:
    """The replica reports hashes of its tree, and answers a question with those of a prompt."""
    messages = chat(*PICTURES[:2])
    eyes.ask([messages])
    question = EncodeMsg(seq=1, prompt=ChatPrompt(messages=messages), for_cache=True)
    known = set(TreeHashes(eyes.scheduler.requests.cache.prefix_cache)().tolist())

    def num_found(for_cache: bool) -> int:
        asked = msgspec.structs.replace(question, for_cache=for_cache)
        ids = ids_from_bytes(answer_codec(eyes.encoder, asked).ids)
        hashes = prompt_hashes(ids, eyes.engine.page_size).tolist()
        return max((at for at, each in enumerate(hashes) if each in known), default=0)

    assert num_found(for_cache=True) > 15  # pages of 4 tokens
    assert num_found(for_cache=False) < 3


def test_the_recorder_keeps_hashes_and_no_pixels(eyes: Eyes, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recording")
    for shown in (PICTURES[:1], PICTURES[:1], PICTURES[1:2]):
        recorder.arrived(0, eyes.message(eyes.encode(chat(*shown))))
    recorder.close()
    text = (tmp_path / "recording").read_text()
    first, second, third = (json.loads(line)["arrival"] for line in text.splitlines())
    assert len(text) < 2_000
    assert first["hash_ids"] == second["hash_ids"] != third["hash_ids"]
