"""The vision tower of an engine: pixels in, rows of embeddings out.

Rank 0 has it. A rank's embeddings are partial sums, so the other ranks have zeros at the places of
images. The tower runs for the images of which a step computes a token and that are not in a bounded
cache; it runs before the step, in stream order.

Axes: N places of images in a step, D hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from minisgl.core import Plan
from minisgl.core.args import EngineConfig
from minisgl.core.batch import ImageRows
from minisgl.core.image import Image, places_of
from minisgl.engine.extras import Probe
from minisgl.errors import CheckpointError
from minisgl.models import BaseLLMModel
from minisgl.utils.hf import weight_files
from minisgl_zoo.vision.family import VisionFamily, family_of, of_transformers
from minisgl_zoo.vision.lately import Lately
from minisgl_zoo.vision.probe import part_run
from minisgl_zoo.vision.turns import Turns

CACHED_IMAGES = 4
"""The cache has room for so many of the largest images, and for more that are smaller: those of a
few conversations. Prompts that begin with the same images mostly need none, since their keys and
values are cached."""

BATCH_PATCHES = 4096
"""Images go through the tower together up to so many patches, or else one by one. More do not make
a GPU faster, and the mask of all pairs takes the square."""

TINY = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 1),
    **dict.fromkeys(("vocab_size", "intermediate_size", "head_dim"), 8),
    **dict.fromkeys(("num_kv_shared_layers", "hidden_size_per_layer_input", "pad_token_id"), 0),
    "shared_expert_intermediate_size": 1,
    "layer_types": ["full_attention"],
}
"""The text model that is built beside a tower, and not used: fields of one family or another."""


class _Part(NamedTuple):
    """Places of an image that a step computes. tokens: their indices in the step, int64. first,
    last: the range of the image's places."""

    image: Image
    tokens: Any
    first: int
    last: int


class Sight:
    """What every rank has: the places of images in a step, and the positions around them."""

    def __init__(self, device: torch.device, turns: Turns | None) -> None:
        self._device, self._turns = device, turns

    def begin(self, plan: Plan, forward: dict[str, Any]) -> None:
        if self._turns:
            self._turns.write(plan, forward["rows"], forward["positions"])
        for part in _parts(plan):
            if part.image.whole:  # positions are places in these models
                ends = forward.setdefault("key_ends", forward["positions"] + np.int32(1))
                ends[part.tokens] = places_of(part.image)[-1] + 1

    def rows(self, plan: Plan) -> ImageRows | None:
        parts = list(_parts(plan))
        return ImageRows(tokens=_tokens(parts, self._device), rows=None) if parts else None

    def probe(self, side: int) -> Probe | None:
        return None


class Run(NamedTuple):
    """An image that went through the tower for a request. start, end: around `size` images, events
    of a GPU or else seconds."""

    size: int
    start: Any
    end: Any

    @property
    def seconds(self) -> float | None:
        """The image's share; None while a GPU computes it."""
        if isinstance(self.start, float):
            return float(self.end - self.start) / self.size
        return self.start.elapsed_time(self.end) / 1e3 / self.size if self.end.query() else None


class Count(NamedTuple):
    """The images of a request, and those of them that went through the tower for it."""

    images: int
    runs: list[Run]


class Tower(Sight):
    """Rank 0's part. Mutable: it caches what it computed. num_runs: images that went through the
    tower. counts: by request, if somebody takes them (`minisgl_zoo.vision.times`)."""

    def __init__(
        self,
        family: VisionFamily,
        model: Any,
        processor: Any,
        device: torch.device,
        turns: Turns | None,
    ) -> None:
        super().__init__(device, turns)
        self.num_runs = 0
        self.counts: dict[int, Count] | None = None
        self._processor = processor
        self._family, self._model = family, model
        self._cache: Lately[Tensor] = Lately(CACHED_IMAGES * family.limits(processor).places)
        is_scaled, is_normal = processor.do_rescale, processor.do_normalize
        self._scale = float(processor.rescale_factor) if is_scaled else 1.0
        mean, std = (processor.image_mean, processor.image_std) if is_normal else ([0.0], [1.0])
        self._mean, self._std = (torch.tensor(each, device=device) for each in (mean, std))

    def count(self) -> dict[int, Count]:
        """From now on add runs to the counts that are returned; the caller adds requests."""
        self.counts = {}
        return self.counts

    def rows(self, plan: Plan) -> ImageRows | None:
        if not (parts := list(_parts(plan))):
            return None
        found = self._features({part.image.digest: part.image for part in parts}, plan)
        rows = torch.cat([found[each.image.digest][each.first : each.last] for each in parts])
        first, *deep = rows.chunk(1 + self._family.num_deep, dim=-1)
        return ImageRows(tokens=_tokens(parts, self._device), rows=first, deep=tuple(deep))

    def probe(self, side: int) -> Probe:
        import PIL.Image

        picture = PIL.Image.new("RGB", (side, side))
        array, sizes = self._family.process(self._processor, picture)[0]
        raw = array.tobytes()
        image = Image(digest=b"", places=b"", token=0, shape=array.shape, sizes=sizes, pixels=raw)

        def run() -> object:
            return self._family.features(self._model, [self._normalised(image)], [sizes])

        return Probe(image.num_bytes, lambda: part_run(self._model, run))

    def _features(self, images: dict[bytes, Image], plan: Plan) -> dict[bytes, Tensor]:
        """Return the rows of each image, by digest, from the cache or from the tower."""
        known = {digest: self._cache.get(digest) for digest in images}
        found = {digest: rows for digest, rows in known.items() if rows is not None}
        missing = [image for digest, image in images.items() if digest not in found]
        for batch in _batches(missing):
            for image, rows in zip(batch, self._run(batch, plan), strict=True):
                found[image.digest] = rows
                self._cache.put(image.digest, rows, len(rows))
        return found

    def _run(self, batch: list[Image], plan: Plan) -> list[Tensor]:
        self.num_runs += len(batch)
        start = self._mark()
        pixels = [self._normalised(image) for image in batch]
        rows = self._family.features(self._model, pixels, [image.sizes for image in batch])
        for image, each in zip(batch, rows, strict=True):
            assert len(each) == len(places_of(image)), f"{len(each)} rows for {image.sizes}"
        # Of copies, since a view would keep the rows of the whole batch in the cache.
        copies = [each.clone() for each in rows]
        if self.counts is not None:
            run = Run(len(batch), start, self._mark())
            for image in batch:
                if count := self.counts.get(_first_with(image.digest, plan)):
                    count.runs.append(run)
        return copies

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        create: Any = torch.cuda.Event
        event = create(enable_timing=True)
        event.record()
        return event

    def _normalised(self, image: Image) -> Tensor:
        """Return the pixels [C, ...] as the processor would, in the tower's dtype."""
        assert image.pixels, "rank 0 has the pixels"
        raw = torch.from_numpy(np.frombuffer(image.pixels, np.uint8).copy()).to(self._device)
        shape = [1] * len(image.shape)
        shape[self._family.channel_axis()] = -1
        pixels = raw.view(image.shape).float() * self._scale
        normal = (pixels - self._mean.view(shape)) / self._std.view(shape)
        return normal.to(self._model.dtype)


def _batches(images: list[Image]) -> Iterator[list[Image]]:
    batch: list[Image] = []
    num_patches = 0
    for image in images:
        size = math.prod(image.sizes[:2])
        if batch and num_patches + size > BATCH_PATCHES:
            yield batch
            batch, num_patches = [], 0
        batch.append(image)
        num_patches += size
    if batch:
        yield batch


def _first_with(digest: bytes, plan: Plan) -> int:
    """Return the uid of the first request of a step that has an image."""
    shown = ((plan.uids[row], images) for row, images in plan.images)
    return next(uid for uid, images in shown if any(each.digest == digest for each in images))


def _parts(plan: Plan) -> Iterator[_Part]:
    if not plan.images:
        return
    lengths = np.array(plan.ends) - np.array(plan.starts)
    firsts = np.cumsum(lengths) - lengths
    for row, images in plan.images:
        start = plan.starts[row]
        for image in images:
            places = places_of(image)
            first, last = np.searchsorted(places, (start, plan.ends[row])).tolist()
            if first < last:
                tokens = places[first:last].astype(np.int64) + (firsts[row] - start)
                yield _Part(image, tokens, first, last)


def _tokens(parts: list[_Part], device: torch.device) -> Tensor:
    """Return the indices in the step of all places, int64 [N]."""
    return torch.from_numpy(np.concatenate([part.tokens for part in parts])).to(device)


def create_tower(
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    model: BaseLLMModel,
    *,
    table_rows: int,
    most_tokens: int,
    leads: bool,
) -> Sight | None:
    """Return this rank's part of the vision of a checkpoint; None if it has none.

    leads: whether this is rank 0. table_rows, most_tokens: rows of the request tables, and prompt
    tokens of a step. Raises CheckpointError if tensors are missing.
    """
    family = family_of(config.folder)
    if family is None:
        return None
    turns = None
    if family.rotation:
        turns = Turns(family, model, table_rows=table_rows, most_tokens=most_tokens)
    if not leads:
        return Sight(device, turns)
    tower = _load(family, config, dtype).to(device)
    return Tower(family, tower, family.processor(config.folder), device, turns)


def _load(family: VisionFamily, config: EngineConfig, dtype: torch.dtype) -> Any:
    import transformers

    log: Any = transformers.logging
    tensors = {}
    for path in weight_files(config.folder):
        with safe_open(path, framework="pt") as file:
            for name in filter(family.is_of_tower, file.keys()):
                tensors[name.removeprefix("model.")] = file.get_tensor(name)
    verbosity, shows_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()  # it would list the text model as missing
    log.disable_progress_bar()
    try:
        model, info = of_transformers(family.model).from_pretrained(
            None,
            config=_small_config(config),
            state_dict=tensors,
            dtype=dtype,
            output_loading_info=True,
        )
    finally:
        log.set_verbosity(verbosity)
        if shows_bars:
            log.enable_progress_bar()
    missing = [name for name in info["missing_keys"] if not name.startswith("language_model.")]
    if wrong := [*missing, *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise CheckpointError(
            f"{config.folder}: these tensors of the vision tower are missing, extra or misshapen: "
            f"{', '.join(map(str, sorted(wrong, key=str)[:8]))}"
        )
    del model.language_model
    return model.eval()


def _small_config(config: EngineConfig) -> Any:
    """Return the config with a tiny text model, which is not used, of the same hidden size."""
    from transformers import AutoConfig

    small = AutoConfig.from_pretrained(config.folder, local_files_only=True)
    for name, value in TINY.items():
        setattr(small.text_config, name, value)
    if hasattr(small, "audio_config"):
        small.audio_config = None
    if hasattr(small, "quantization_config"):  # of the text model: the tower's tensors are plain
        del small.quantization_config
    return small


def tower_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    """Return the memory of rank 0's tower: its weights, a bound of its activations, its cache."""
    family = family_of(config.folder)
    if family is None:
        return 0
    with torch.device("meta"):
        model = of_transformers(family.model)(_small_config(config))
    del model.language_model
    limits = family.limits(family.processor(config.folder))
    vision = family.config["vision_config"]
    hidden = int(vision.get("hidden_size", 1024))
    widest = 6 * hidden + 2 * int(vision.get("intermediate_size", 4 * hidden))
    width = (1 + family.num_deep) * int(family.config["text_config"]["hidden_size"])
    places = CACHED_IMAGES * limits.places * width
    patches = max(limits.patches, BATCH_PATCHES)
    activations = 4 * patches * (widest + patches * family.has_mask)
    weights: int = sum(each.numel() for each in model.parameters())
    return (weights + places) * dtype.itemsize + activations


def most_whole(folder: Path) -> int:
    """Return the tokens of the largest image that a step must compute whole; 0 if none is."""
    family = family_of(folder)
    if family is None or not family.whole:
        return 0
    return family.limits(family.processor(folder)).places
