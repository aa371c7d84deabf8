"""Gemma's images, whose tokens attend to each other both ways: no step computes a part of one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer, Gemma3Processor

from helpers.drafters import ScriptedDrafts
from helpers.pictures import GEMMA3, PICTURES, Sample, chat
from helpers.seen import Eyes, check, scheduler_of, start
from minisgl.attention.cpu_backend import CpuAttnBackend
from minisgl.core import Failed, Token
from minisgl.core.image import places_of
from minisgl.engine.cpu import CpuDevice
from minisgl.errors import ConfigError
from minisgl.message import ids_from_bytes
from minisgl.scheduler import Scheduler


@pytest.fixture(scope="module")
def gemma(gemma3: Sample) -> Iterator[Eyes]:
    engine = start(gemma3, max_prefill_length=40, page_size=16, num_pages=64)
    yield Eyes(gemma3, engine)
    engine.close()


def test_a_cached_prefix_may_end_inside_of_an_image(gemma: Eyes) -> None:
    """The KV of its first tokens is from a step that had all of them."""
    gemma.ask([chat(PICTURES[0], words="look")])
    runs = gemma.engine.vision.num_runs
    encoded = gemma.encode(chat(PICTURES[0], words="see"))
    [answer] = gemma.ask([chat(PICTURES[0], words="see")])
    places = places_of(encoded.images[0])
    assert places[0] < answer.end.num_cached_tokens <= places[-1]
    check(gemma.sample, answer, PICTURES[:1])
    assert gemma.engine.vision.num_runs == runs


def test_prompts_are_those_of_the_processor(gemma: Eyes) -> None:
    """It writes lines around an image, which join those of the template."""
    sample = gemma.sample
    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    extra = {f"{name}_token": token for name, token in names.items()}
    tokenizer = AutoTokenizer.from_pretrained(sample.folder, extra_special_tokens=extra)
    processor = Gemma3Processor(sample.processor, tokenizer, GEMMA3, image_seq_length=25)
    content = [{"type": "text", "text": "\n What is"}, *[{"type": "image"}] * 2]
    text = processor.apply_chat_template([{"role": "user", "content": content}])
    expected = processor(images=[PICTURES[:2]], text=[text], add_special_tokens=False)
    parts = [part for part in chat(*PICTURES[:2])[0]["content"] if part["type"] != "text"]
    encoded = gemma.encode([{"role": "user", "content": [content[0], *parts]}])
    assert ids_from_bytes(encoded.ids).tolist() == expected["input_ids"][0]


def test_retracted_requests_see_the_same(gemma3: Sample) -> None:
    engine = start(gemma3, max_prefill_length=32, num_pages=80)
    eyes = Eyes(gemma3, engine)
    shown = [PICTURES[:2], PICTURES[1:4]]
    answers = eyes.ask([chat(*each) for each in shown], max_tokens=60, ignore_eos=True)
    assert sum(answer.end.num_retractions for answer in answers)
    for answer, each in zip(answers, shown, strict=True):
        check(gemma3, answer, each)
    engine.close()


def test_a_step_takes_the_largest_image_by_default(
    gemma4: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "best_chunk", 64)
    engine = start(gemma4)
    assert engine.max_prefill_tokens == engine.memory.chunk == 70
    engine.close()


def test_an_image_above_a_step_is_refused(gemma: Eyes) -> None:
    scheduler = scheduler_of(gemma.engine, max_prefill_tokens=24)
    refused = scheduler.add(gemma.message(gemma.encode(chat(PICTURES[0]))))
    assert isinstance(refused, Failed)
    assert refused.status == 400
    with pytest.raises(Exception, match=r"25 tokens.*--max-prefill-length"):
        raise refused.to_error()


def test_a_backend_that_attends_one_way_is_refused(
    gemma3: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuAttnBackend, "takes_two_way", False)
    with pytest.raises(ConfigError, match="attend both ways, --attn cpu only one; leave it out"):
        start(gemma3, attn="cpu")


def test_drafts_beside_an_image(gemma: Eyes) -> None:
    """Its chunk is in a step with rows of drafts, which are computed before it."""
    early, late = (gemma.encode(chat(*shown)) for shown in (PICTURES[:1], PICTURES[2:4]))

    def run() -> dict[int, list[int]]:
        """Return the outputs by the lengths of the prompts."""
        messages = [gemma.message(each, max_tokens=12) for each in (early, late)]
        events = gemma.run([[messages[0]], [], [], [], [messages[1]]])
        return {
            len(message.ids) // 4: [
                event.id
                for event in events
                if isinstance(event, Token) and event.uid == message.uid
            ]
            for message in messages
        }

    expected = run()
    plain = gemma.scheduler
    drafts = ScriptedDrafts(
        random.Random(0), (), 0, tokens=lambda req: expected[req.num_prompt][len(req.output) :][:3]
    )
    gemma.scheduler = Scheduler(plain.config, create_drafts=lambda *_: drafts)
    assert run() == expected
    assert gemma.scheduler.stats.num_accepted > 8
    gemma.scheduler = plain
