"""Memory planning: decides how many pages the KV pools get.

::

    free memory  |==================== memory_ratio =====================|----- left alone -----|
                 |= weights =|= activations =|======= KV pool ===========|
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from minisgl import plugins
from minisgl.core.args import EngineConfig, context_exceeded
from minisgl.core.groups import CacheGroup
from minisgl.core.plan import most_decode_rows
from minisgl.distributed import DistributedCommunicator
from minisgl.engine.connect import resolve_kv_dtype
from minisgl.engine.device import Device
from minisgl.errors import ConfigError
from minisgl.kernel.cpu import FEW_ROWS, CpuOps
from minisgl.kernel.ops import Ops
from minisgl.layers.base import Adapt
from minisgl.models import BaseLLMModel, ModelConfig, ModelSpec, PoolSpec, build_model
from minisgl.models.registry import spec_of
from minisgl.utils.logger import get_logger
from minisgl.utils.text import counted, size_of

logger = get_logger(__name__)

TILE_CODE_BYTES: Final = 4 * (700 << 10)
"""What torch keeps of the GEMMs of one number of rows on a CPU with AMX tiles: most blocks have
matrices of four shapes, and 165 GEMMs took 120 MB (torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How the memory of one device is divided.

    free_bytes: free memory before loading. kv_limit_bytes: the most for all pools together, if the
    user did not say how much; None for what the ratio leaves. activation_bytes: an upper bound for
    one step. vision_bytes: of a vision tower, its activations and its cache. groups: the cache
    groups with their numbers of pages. group_page_bytes: bytes of one page of each group, over all
    its layers. num_pages, num_tokens: those of the first group. chunk: the most prompt tokens in a
    step. max_seq_len: the most tokens of a request. max_running: the most running requests.
    """

    free_bytes: int
    memory_ratio: float
    weight_bytes: int
    activation_bytes: int
    vision_bytes: int = 0
    groups: tuple[CacheGroup, ...]
    group_page_bytes: tuple[int, ...]
    page_size: int
    chunk: int
    max_seq_len: int
    max_running: int
    kv_limit_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        sizes = zip(self.groups, self.group_page_bytes, strict=True)
        return sum(group.num_pages * page_bytes for group, page_bytes in sizes)

    @property
    def num_pages(self) -> int:
        return self.groups[0].num_pages

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_requests(self) -> int:
        """The number of requests of `max_seq_len` tokens that fit at once, whatever their phases:
        one computes a chunk, the others decode."""
        size, longest = self.page_size, self.max_seq_len
        fitting = self.max_running
        for group in self.groups:
            most = group.most_pages(longest, self.chunk, size)
            if not most:
                continue  # shorter requests than an interval have no state
            each = (
                group.held_pages(0, size) if group.interval else group.most_pages(longest, 1, size)
            )
            fitting = min(fitting, 1 + (group.num_pages - most) // each)
        return max(fitting, 0)

    def with_pages(self, num_pages: int) -> MemoryPlan:
        """Return the plan with `num_pages` pages of the first group.

        `CacheGroup.pool_pages` says how many each other group gets. Saved states take about half as
        many bytes as the first group (docs/decisions/0024).
        """
        sizes = zip(self.groups, self.group_page_bytes, strict=True)
        state_bytes = next((size for group, size in sizes if group.kind == "state"), 0)
        num_saved = num_pages * self.group_page_bytes[0] // (2 * state_bytes or 1)
        limits = (self.max_running, self.max_seq_len, self.chunk, self.page_size)
        groups = [
            replace(group, num_pages=group.pool_pages(num_pages, *limits, num_saved))
            for group in self.groups
        ]
        if groups[0].kind == "window":  # all pages; those that no request needs cache prefixes
            groups[0] = replace(groups[0], num_pages=num_pages)
        return replace(self, groups=tuple(groups))

    def __str__(self) -> str:
        """Return the memory table that the log shows."""
        groups = zip(self.groups, self.group_page_bytes, strict=True)
        rows = [
            ("free before loading", size_of(self.free_bytes), ""),
            ("weights", size_of(self.weight_bytes), ""),
            ("activations, at most", size_of(self.activation_bytes), ""),
            *self._vision_rows(),
            *(
                [
                    *(self._pool_row(group, page_bytes) for group, page_bytes in groups),
                    *self._limit_rows(),
                    ("tokens that fit", f"{self.num_tokens:,}", ""),
                ]
                if any(self.group_page_bytes)  # an encoder caches nothing
                else []
            ),
            (
                "requests at full length",
                f"{self.num_requests:,}",
                f"of {self.max_seq_len:,} tokens",
            ),
        ]
        return "\n".join(f"  {name:<24}{value:>12}  {note}".rstrip() for name, value, note in rows)

    def _vision_rows(self) -> list[tuple[str, str, str]]:
        note = "its weights, activations and cache, at most"
        return [("vision tower", size_of(self.vision_bytes), note)] if self.vision_bytes else []

    def _limit_rows(self) -> list[tuple[str, str, str]]:
        if self.kv_limit_bytes is None:
            return []
        note = "a quarter of the machine's memory, unless --memory-ratio or --num-pages says more"
        return [("KV cache, at most", size_of(self.kv_limit_bytes), note)]

    def _pool_row(self, group: CacheGroup, page_bytes: int) -> tuple[str, str, str]:
        name = "KV pool" if len(self.groups) == 1 else f"KV pool, {group.kind}"
        pages = f"{group.num_pages:,} page{'' if group.num_pages == 1 else 's'}"
        if group.kind == "state":
            note = f"{pages}, a state every {counted(group.interval, 'token')}"
        else:
            per_token = size_of(page_bytes // self.page_size)
            note = f"{pages} of {counted(self.page_size, 'token')} ({per_token} a token)"
        if group.kind == "window":
            note += f", window {group.window:,}"
        return name, size_of(group.num_pages * page_bytes), note


def plan_memory(memory: MemoryPlan, num_pages: int | None) -> MemoryPlan:
    """Return the plan with its pages. Raises ConfigError, which states the sizes, if none fits.

    num_pages: pages of the first group. None is as many as the memory ratio and the limit of the KV
    cache allow, but no more than `max_running` requests of full length fill.
    """

    def kv_bytes(num_pages: int) -> int:
        return memory.with_pages(num_pages).kv_bytes

    free, weights = size_of(memory.free_bytes), size_of(memory.weight_bytes)
    activations = size_of(memory.activation_bytes)
    if memory.activation_bytes > memory.free_bytes:
        raise ConfigError(
            f"a step's activations would take up to {activations}, and {free} are free; lower "
            "--max-prefill-length or --max-running-requests"
        )
    room = memory.free_bytes - memory.weight_bytes - memory.vision_bytes
    if num_pages is None:
        usable = int(memory.free_bytes * memory.memory_ratio)
        budget = usable - memory.weight_bytes - memory.activation_bytes - memory.vision_bytes
        if memory.kv_limit_bytes is not None:
            budget = min(budget, memory.kv_limit_bytes)
        most = memory.max_running * -(-memory.max_seq_len // memory.page_size)
        num_pages = bisect_right(range(1, most + 1), budget, key=kv_bytes)
        if num_pages < 1:
            advice = (
                "Free some memory, raise --memory-ratio, or lower --max-seq-len, "
                "--max-prefill-length or --max-running-requests"
            )
            if room < memory.activation_bytes:
                advice = (
                    "The model is too large for this machine: take --quantization int4, a 4-bit "
                    "file, more GPUs (--tp) or a smaller model"
                )
            if memory.vision_bytes:
                weights += f", the vision tower {size_of(memory.vision_bytes)}"
            raise ConfigError(
                f"no memory is left for the KV cache: {free} are free, of which --memory-ratio "
                f"{memory.memory_ratio:g} may be used; weights take {weights} and activations up "
                f"to {activations}. {advice}"
            )
    elif kv_bytes(num_pages) > room:
        fitting = bisect_right(range(1, num_pages), room, key=kv_bytes)
        raise ConfigError(
            f"--num-pages {num_pages} needs {size_of(kv_bytes(num_pages))} beside {weights} of "
            f"weights, but {free} are free; the most that fits is {fitting}"
        )
    return memory.with_pages(num_pages)


def plan_engine_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    comm: DistributedCommunicator,
    ops: Ops,
    adapt: Adapt | None = None,
) -> MemoryPlan:
    """Plan the memory of a model that is not loaded yet. `--dry-run` prints the plan.

    ops: they decide in which formats weights are held. adapt: see `BuildContext`; the memory of
    adapters and of a draft model counts as weights. All ranks use the number of pages of the rank
    that has the fewest.
    """
    spec, sizes = spec_of(model), model
    if spec.is_encoder:
        plugins.need("pooling", "options", "an encoder")(config)
        sizes = spec.config  # its family may serve fewer positions than the file has
    max_seq_len = sizes.default_context
    if config.max_seq_len is None and max_seq_len < model.max_context and comm.rank == 0:
        logger.info(
            "longrope: serving a context of %d tokens with the short factors; --max-seq-len %d "
            "serves the longer one, with the long factors at every position",
            max_seq_len,
            model.max_context,
        )
    if config.max_seq_len is not None:
        if config.max_seq_len > sizes.max_context:
            raise ConfigError(context_exceeded(config.max_seq_len, sizes.max_context))
        max_seq_len = config.max_seq_len
    kv_dtype = resolve_kv_dtype(config, dtype)
    skeleton = build_model(
        model,
        dtype=dtype,
        ops=ops,
        comm=comm,
        max_context=max_seq_len,
        expert_parallel=config.ep,
        adapt=adapt,
    )
    chunk = config.max_prefill_length or max(device.best_chunk, most_whole(config, model))
    if spec.is_encoder:
        chunk = max(chunk, max_seq_len)
    page_bytes = [
        sum(
            pool.page_bytes(number, config.page_size, dtype if pool.is_recurrent else kv_dtype)
            for pool in pools_of(skeleton, config, device)
        )
        for number in range(len(skeleton.layout.groups))
    ]
    draft_bytes = 0
    if config.draft_model:
        if device.torch_device.type != "cpu":
            raise ConfigError("--draft-model needs a CPU; leave it out on a GPU")
        count = plugins.need("drafts", "bytes", "--draft-model")
        draft_bytes, in_page = count(config, skeleton, dtype, comm, ops, max_seq_len)
        page_bytes[0] += in_page
    is_sized = config.memory_ratio is not None or config.num_pages is not None
    memory = MemoryPlan(
        free_bytes=device.free_bytes(),
        memory_ratio=config.memory_ratio or device.default_memory_ratio,
        kv_limit_bytes=None if is_sized else device.kv_limit_bytes,
        weight_bytes=skeleton.num_weight_bytes + draft_bytes,
        activation_bytes=_activation_bytes(config, device, ops, skeleton.spec, dtype, chunk),
        vision_bytes=_vision_bytes(config, dtype) if model.is_wrapped and comm.rank == 0 else 0,
        groups=skeleton.layout.groups,
        group_page_bytes=tuple(page_bytes),
        page_size=config.page_size,
        chunk=chunk,
        max_seq_len=max_seq_len,
        max_running=config.max_running_requests,
    )
    groups = plan_memory(memory, config.num_pages).groups
    agreed = (replace(group, num_pages=comm.all_min(group.num_pages)) for group in groups)
    return replace(memory, groups=tuple(agreed))


def most_whole(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of the largest image that a step must compute whole; 0 if none is."""
    count: Callable[[Path], int] | None
    count = plugins.find("vision", "whole") if model.is_wrapped else None
    return count(config.folder) if count else 0


def pools_of(model: BaseLLMModel, config: EngineConfig, device: Device) -> Sequence[PoolSpec]:
    """Return the pools of this rank. On a GPU, models with recurrent layers have no drafts."""
    is_cpu = device.torch_device.type == "cpu"
    can_draft = is_cpu and has_drafts(config, device)
    return [pool.with_drafts() for pool in model.pools] if can_draft else model.pools


def has_drafts(config: EngineConfig, device: Device) -> bool:
    """Return whether `--drafts` gives drafts on this device."""
    names = config.draft_names
    return names != "off" and (names != "auto" or device.torch_device.type == "cpu")


def max_decode_rows(config: EngineConfig, device: Device) -> int:
    """Return the most decode rows of a step of this engine."""
    return most_decode_rows(config.max_running_requests, has_drafts(config, device))


def _vision_bytes(config: EngineConfig, dtype: torch.dtype) -> int:
    count: Callable[[EngineConfig, torch.dtype], int] | None = plugins.find("vision", "bytes")
    return count(config, dtype) if count else 0


def _activation_bytes(
    config: EngineConfig, device: Device, ops: Ops, spec: ModelSpec, dtype: torch.dtype, chunk: int
) -> int:
    """Return an upper bound of a step's activations: the tensors of the widest layer, and three
    times the float32 logits, because filters and noise copy them. If there are CUDA graphs, a step
    in a graph and a step outside of graphs both count, because they use separate memory pools. On
    a CPU with tiles also a matrix that is unpacked, and torch's code (`CpuOps.packed_linear`)."""
    model = spec.config
    inner = max(spec.mlp_width, 3 * max(layer.width for layer in spec.layers))
    widest = 3 * model.hidden_size + inner
    if model.mtp:  # the hidden states of all tokens, and the layer's own inputs
        widest += 4 * model.hidden_size
    rows = max_decode_rows(config, device)
    num_tokens, num_steps = chunk + rows, 1
    if config.cuda_graph_max_bs and device.max_graph_tokens:
        num_tokens += min(device.max_graph_tokens + rows, num_tokens)
        num_steps = 2
    num_bytes = num_tokens * widest * dtype.itemsize + num_steps * 3 * rows * model.vocab_size * 4
    if isinstance(ops, CpuOps) and ops.most_packed_rows == FEW_ROWS and ops.packs(dtype):
        num_bytes += model.hidden_size * inner * dtype.itemsize
        num_bytes += -(-num_tokens // FEW_ROWS) * TILE_CODE_BYTES
    return num_bytes
