"""LFM2-VL's layout and prompts, against transformers' own."""

from __future__ import annotations

import random
from typing import Any

import pytest
from PIL import Image
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from helpers.pictures import PICTURES, Sample, chat
from helpers.scheduling import add, make, spans
from helpers.without_torchvision import Processor
from minisgl.core import Accepted, SamplingParams
from minisgl.core.image import places_of
from minisgl.core.step_times import StepTimes
from minisgl.message import ChatPrompt, ids_from_bytes
from minisgl_zoo.vision.lfm2 import SETTINGS, Layout


@pytest.mark.parametrize("given", [{}, {"max_tiles": 7, "min_tiles": 3, "tile_size": 256}])
def test_layouts_are_those_of_transformers(given: dict[str, Any]) -> None:
    made, rng, ours = (
        Processor("Lfm2VlImageProcessor", given).made,
        random.Random(0),
        Layout(**SETTINGS | given),
    )
    if not given:
        names = [name for name in SETTINGS if getattr(made, name) != SETTINGS[name]]
        assert not names
    grids = set()
    for _ in range(400):
        width, height = (round(2 ** rng.uniform(3, 12)) for _ in range(2))
        tokens = made.max_image_tokens, made.encoder_patch_size, made.downsample_factor
        fitted = made.smart_resize(height, width, tokens[2], made.min_image_tokens, *tokens[:2])
        assert ours.fitted(width, height) == fitted, (width, height)
        expected = (1, 1)
        if made._is_image_too_large(height, width, *tokens, made.max_pixels_tolerance):
            bounds = made.min_tiles, made.max_tiles, made.tile_size
            expected = made._get_grid_layout(height, width, *bounds)[:2]
        assert ours.grid(width, height) == expected, (width, height)
        grids.add(expected)
    assert len(grids) > 12


@pytest.mark.parametrize("picture", PICTURES[2:])
def test_prompts_are_those_of_transformers(lfm2_vl: Sample, picture: Image.Image) -> None:
    sample, tokenizer = lfm2_vl, lfm2_vl.encoder.tokenizer.backend
    eyes: Any = Lfm2VlProcessor.__new__(Lfm2VlProcessor)
    names = ("image", "image_start", "image_end")
    texts = ("<image>", "<|image_start|>", "<|image_end|>")
    vars(eyes).update({f"{name}_token": text for name, text in zip(names, texts, strict=True)})
    eyes.image_thumbnail_token = "<|img_thumbnail|>"
    eyes.image_processor = sample.processor.made
    found = sample.processor(images=[picture], return_row_col_info=True)
    text = eyes.replace_image_token(found, 0, use_image_special_tokens=True)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    prompt = ids_from_bytes(sample.encoder.encode(ChatPrompt(messages=chat(picture))).ids).tolist()
    assert expected == prompt[prompt.index(expected[0]) :][: len(expected)]


def test_tiles_beside_streams_are_read_one_after_the_other(lfm2_vl: Sample) -> None:
    """Each is an image of its own, so the bound on what a step adds to streams holds for it."""
    encoder = lfm2_vl.encoder
    encoded = encoder.encode(ChatPrompt(messages=chat(PICTURES[3])))
    assert len(encoded.images) == 5
    assert len({tile.digest for tile in encoded.images}) == 5
    times = StepTimes(prompt_us=((8, 1), (1024, 2)), decode_us=1, row_us=0, image_ns=1e3)
    bound_s = encoded.images[0].num_bytes * 1e-6
    scheduler = make(
        max_stall_s=bound_s,
        step_times=times,
        num_pages=256,
        vocab_size=10_000,
        max_seq_len=1024,
        max_prefill_tokens=512,
    )
    add(scheduler, 0, [0] * 4)
    scheduler.plan()
    assert isinstance(scheduler.add(encoder.request(encoded, SamplingParams(), "", 1)), Accepted)
    firsts = [places_of(tile)[0] for tile in encoded.images]
    begun, end = [], 0
    while end < len(encoded.ids) // 4:
        for uid, start, end in spans(scheduler.plan()):
            if uid == 1:
                begun.append(sum(start <= first < end for first in firsts))
    assert begun == [1] * 5
