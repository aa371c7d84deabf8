"""From a plan to sampled ids: build the batch, run the model, sample, remember the last tokens.

`launch` returns at once; everything it does happens in stream order (`Device.enqueue`), so a step
may rely on whatever earlier steps wrote: the KV pool, the page table, the last tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl import __version__, env
from minisgl.attention import BaseAttnMetadata, create_attention_backend
from minisgl.core import Batch, Context, Plan, SamplingParams, StepFailed, StepOutcome, StepResult
from minisgl.distributed import DistributedCommunicator, create_communicator
from minisgl.engine.config import EngineConfig
from minisgl.engine.device import Device, Pending, create_device, out_of_memory
from minisgl.engine.inputs import StepTensors, make_arrays
from minisgl.engine.memory import MemoryPlan, plan_memory
from minisgl.engine.profiler import StepProfiler
from minisgl.engine.tables import RequestTables
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops, create_ops
from minisgl.kvcache.pool import MHAKVCache, create_kvcache_pool
from minisgl.models import ModelConfig, ModelSpec, build_model, load_model
from minisgl.utils.arch import slow_dtype_advice
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

CHUNK_TARGET_S = 0.3
"""A prefill chunk takes about this long at most: a pause that a reader of a streamed answer
notices but does not mind, and how long a new request may wait for its first step."""

MAX_PREFILL_TOKENS = 8192
"""No larger chunk even where it would be fast: activations grow with it, throughput does not."""

CHUNK_MULTIPLE = 64  # tokens; a measured chunk is rounded to it or to a power of two


class Engine:
    """A model on a device. Mutable: it owns weights, KV pool and tables. One thread launches."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load everything, measure the prefill rate. `progress(done, total)` counts weight bytes.

        Raises ConfigError (and its kinds) for a checkpoint or settings that cannot work, and
        OutOfDeviceMemory.
        """
        self.device, self.comm = connect(config)
        self.profiler = StepProfiler()
        try:
            self._build(config, progress)
        except Exception as error:
            if self.comm.size == 1:  # else what was enqueued may wait for other ranks for ever
                self.device.close()
            if self.device.is_out_of_memory(error):
                raise out_of_memory(
                    "loading", "lower --memory-ratio or --num-pages", error
                ) from error
            raise

    def _build(self, config: EngineConfig, progress: Callable[[int, int], None] | None) -> None:
        self.model_config = ModelConfig.from_folder(config.folder)
        self.dtype = resolve_dtype(config, self.model_config, self.device)
        ops = create_ops(self.device.torch_device)
        comm = self.comm
        self.memory = plan_engine_memory(config, self.model_config, self.dtype, self.device, comm)
        start = time.monotonic()
        self.model = load_model(
            config.folder,
            dtype=self.dtype,
            device=self.device.torch_device,
            ops=ops,
            comm=comm,
            max_context=self.memory.max_seq_len,
            expert_parallel=config.expert_parallel,
            dummy=config.dummy_weight,
            progress=progress,
        )
        logger.info("weights loaded in %.1f s", time.monotonic() - start)
        if comm.rank == 0:  # the others' differ little, and the pool is the smallest of all
            logger.info("memory on %s:\n%s", self.device.describe(), self.memory.table())
        self.page_size = config.page_size
        self.max_running = config.max_running
        self.max_seq_len = self.memory.max_seq_len
        self._ops = ops
        self._tables = RequestTables(
            self.device,
            max_running=config.max_running,
            max_pages=-(-self.max_seq_len // config.page_size),
        )
        self._attn = create_attention_backend(
            config.attn,
            ops,
            self.device.torch_device,
            dtype=self.dtype,
            head_dim=self.model_config.head_dim,
            page_size=config.page_size,
        )
        max_graph_rows = config.cuda_graph_max_bs if self._attn.graph_safe else 0
        # The same on all ranks, as sums of padded steps have more rows.
        max_graph_rows = comm.all_min(min(max_graph_rows, config.max_running))
        self._runner = self.device.create_runner(max_graph_rows)
        self._context = Context(
            kv_pool=create_kvcache_pool(
                num_layers=self.model_config.num_layers,
                num_pages=self.memory.num_pages,
                page_size=config.page_size,
                num_kv_heads=self.model.num_kv_heads,
                head_dim=self.model_config.head_dim,
                dtype=self.dtype,
                device=self.device.torch_device,
            ),
            page_table=self._tables.page_table,
            attn=self._attn,
        )
        if comm.size == 1:  # ranks that take different times would run different numbers of steps
            decode = self._probe(0, 1)
            self.device.tune(lambda: self._run_probe(decode))
        self._warm_up()
        if config.max_prefill_tokens:
            self.max_prefill_tokens = self.max_stalling_tokens = config.max_prefill_tokens
        else:
            self._choose_chunks()
        comm.all_min(0)  # nobody serves before all can

    # --- steps ---------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> ForwardOutput:
        """Enqueue the step (`minisgl.core.executor.Executor`)."""
        work = self.profiler.named(plan, lambda: self._step(plan))
        pending = self.device.enqueue(work)
        return ForwardOutput(
            plan=plan, device=self.device, pending=pending, is_alone=self.comm.size == 1
        )

    def settle(self) -> None:
        """Wait for all that was launched."""
        self.device.enqueue(lambda: torch.empty(0, dtype=torch.int32)).wait()

    def _step(self, plan: Plan) -> Tensor:
        """One step, in stream order: int32 ids [S] of the rows that sample."""
        arrays = make_arrays(plan, self._tables, self.page_size, self._runner.padded_rows(plan))
        tensors = self.device.upload(arrays.arrays)
        next_ids = self._runner.run(
            arrays.shape,
            lambda: self._compute(StepTensors.of(arrays, tensors), self._attn.prepare(plan)),
        )
        return next_ids[: len(plan.sample_rows)]

    def _compute(self, step: StepTensors, attn_metadata: BaseAttnMetadata) -> Tensor:
        """int32 ids [S], padding included; everything here is on the device."""
        page_table, last_token = self._tables.page_table, self._tables.last_token
        self._ops.write_pages(page_table, step.new_pages)
        # Promised ids are on the device only.
        decoding = step.rows[0, : step.num_decodes]
        batch = Batch(
            input_ids=self._ops.take_ids(step.token_ids, decoding, last_token),
            positions=step.positions,
            slots=step.slots,
            sample_positions=step.sample_positions,
            attn_metadata=attn_metadata,
            context=self._context,
            sampling=step.sampling,
            rows=step.rows,
            shared=step.shared,
        )
        logits_SV = self.model.forward(batch)
        # Rank 0's are everybody's: equal logits on two devices are likely, not promised.
        next_ids_S = self.comm.broadcast(self._ops.sample(logits_SV, batch.sampling))
        last_token[step.sample_table_idxs] = next_ids_S
        return next_ids_S

    # --- start and end -------------------------------------------------------------------------

    def _choose_chunks(self) -> None:
        """How many prompt tokens a step may compute, from the measured rate."""
        rate = self._measure_prefill_rate()
        self.max_prefill_tokens = _chunk(rate, CHUNK_TARGET_S)
        stalling = max(_chunk(rate, self.device.stall_target_s), self.device.min_chunk_tokens)
        self.max_stalling_tokens = min(stalling, self.max_prefill_tokens)
        if self.comm.rank > 0:
            return
        logger.info(
            "prefill runs at %s tokens/s on %s: chunks of %s tokens, %s while more requests decode "
            "than wait (--max-prefill-length)",
            f"{rate:,.0f}",
            self.device.describe(),
            f"{self.max_prefill_tokens:,}",
            f"{self.max_stalling_tokens:,}",
        )

    def _measure_prefill_rate(self) -> int:
        """Prompt tokens that this device computes in a second, by a probe; the slowest rank's."""
        num_tokens = min(self.device.probe_tokens, self.max_seq_len, self.memory.num_tokens)
        plan = self._probe(0, num_tokens)
        seconds = []
        for _ in range(3):  # the first warms up
            start = time.perf_counter()
            self._run_probe(plan)
            seconds.append(time.perf_counter() - start)
        return self.comm.all_min(int(num_tokens / min(seconds[1:])))

    def _probe(self, start: int, end: int) -> Plan:
        """A plan of one greedy request that computes [start, end), in pages nobody owns yet."""
        return Plan(
            step=-1,
            uids=[-1],
            table_idxs=[0],
            starts=[start],
            ends=[end],
            token_ids=np.zeros(end - start, np.int32),
            num_decodes=int(end - start == 1),
            sample_rows=[0],
            output_idxs=[0],
            new_pages=[(0, index, index) for index in range(-(-end // self.page_size))],
            begins=[(0, SamplingParams(temperature=0.0))],
        )

    def _warm_up(self) -> None:
        """Run steps of the sizes whose kernels would otherwise be compiled when one is met: once
        on a machine, since then they are found on its disk."""
        rows = [count for count in self.device.warm_up_rows if count < self.max_running]
        marker = self._warm_marker()
        if not rows or self.comm.all_min(int(marker.exists())):
            return
        logger.info("compiling the kernels of decode steps (first start of this model only) ...")
        start = time.monotonic()
        for num_decodes in rows:
            for num_tokens in (0, self.page_size):
                self._run_probe(self._decode_probe(num_decodes, num_tokens))
        logger.info("compiled in %.1f s", time.monotonic() - start)
        with contextlib.suppress(OSError):  # the next start does it again
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def _warm_marker(self) -> Path:
        """A file that says that a start like this one has compiled what it runs."""
        config = self.model_config
        depends = (
            __version__, torch.__version__, self.device.describe(), self._attn.name, self.dtype,
            self.comm.size, self.page_size, self.max_running, config.hidden_size, config.num_heads,
            config.num_kv_heads, config.head_dim, config.intermediate_size, config.vocab_size,
            config.architecture,
        )  # fmt: skip
        key = hashlib.sha256(repr(depends).encode()).hexdigest()[:16]
        return env.cache_dir() / f"warm-{key}"

    def _decode_probe(self, num_decodes: int, num_tokens: int) -> Plan:
        """A plan of rows that decode at position 0, which is one page to all of them, and of a
        prompt in another page, if it has tokens."""
        num_rows = num_decodes + (num_tokens > 0)
        sampling = SamplingParams(temperature=1.0, seed=0)
        return Plan(
            step=-1,
            uids=[-1] * num_rows,
            table_idxs=list(range(num_rows)),
            starts=[0] * num_rows,
            ends=[1] * num_decodes + [num_tokens] * (num_tokens > 0),
            token_ids=np.zeros(num_decodes + num_tokens, np.int32),
            num_decodes=num_decodes,
            sample_rows=list(range(num_rows)),
            output_idxs=[0] * num_rows,
            new_pages=[(row, 0, row // num_decodes) for row in range(num_rows)],
            begins=[(row, sampling) for row in range(num_rows)],
        )

    def _run_probe(self, plan: Plan) -> None:
        outcome = self.launch(plan).wait()
        if isinstance(outcome, StepFailed):
            raise outcome.error

    def close(self) -> None:
        """Finish the steps in the air and give back threads and memory. The engine is done for."""
        self.device.close()
        for name in ("_runner", "model", "_context", "_tables", "_attn"):
            self.__dict__.pop(name, None)
        self.comm.close()  # after the graphs, which hold what they captured of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """A launched step: `minisgl.core.executor.Flight`."""

    plan: Plan
    device: Device
    pending: Pending
    is_alone: bool

    def wait(self) -> StepOutcome:
        """The step's ids. A failed allocation fails the step's newest requests; any other error is
        a bug of ours and ends the worker. So does an allocation that fails on one of many ranks:
        the others wait in a collective that this one left out."""
        try:
            return StepResult(next_ids=self.pending.wait())
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            advice = "lower --max-prefill-length, --max-running-requests or --memory-ratio"
            failure = out_of_memory("computing a step", advice, error)
            if not self.is_alone:
                raise failure from error
            newest = self.plan.uids[self.plan.num_decodes :] or self.plan.uids[-1:]
            return StepFailed(error=failure, uids=tuple(newest))


def connect(config: EngineConfig) -> tuple[Device, DistributedCommunicator]:
    """This rank's device, and its line to the other ranks. Raises ConfigError and EngineError."""
    ranks, num_local = config.ranks, config.num_local
    device = create_device(config.device, ranks.rank % num_local, num_local)
    try:
        comm = create_communicator(
            ranks, store=config.store, device=device.torch_device, pynccl=config.pynccl
        )
    except Exception:
        device.close()
        raise
    return device, comm


def _chunk(rate: float, seconds: float) -> int:
    """About as many tokens as take `seconds` at `rate` tokens a second."""
    chunk = max(int(rate * seconds), CHUNK_MULTIPLE)
    # An eighth of its size: a round chunk cuts round prompts into fewer pieces.
    multiple = max(CHUNK_MULTIPLE, 1 << max(chunk.bit_length() - 3, 0))
    return min(round(chunk / multiple) * multiple, MAX_PREFILL_TOKENS)


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> torch.dtype:
    """`--dtype`: auto follows the checkpoint, and says so when this CPU would do better."""
    dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if device.torch_device.type == "cpu" and (advice := slow_dtype_advice(dtype)):
        logger.warning("%s", advice)
    assert isinstance(dtype, torch.dtype)
    return dtype


def plan_engine_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    comm: DistributedCommunicator,
) -> MemoryPlan:
    """The memory table of a model that is not loaded yet; what `--dry-run` shows.

    Every rank's pool has as many pages as the smallest.
    """
    max_seq_len = model.max_context
    if config.max_seq_len is not None:
        if config.max_seq_len > model.max_context:
            raise ConfigError(
                f"--max-seq-len {config.max_seq_len} exceeds the {model.max_context} tokens that "
                "the model was made for (max_position_embeddings and its rope scaling)"
            )
        max_seq_len = config.max_seq_len
    skeleton = build_model(
        model,
        dtype=dtype,
        ops=Ops(),  # it computes nothing
        comm=comm,
        max_context=max_seq_len,
        expert_parallel=config.expert_parallel,
    )
    memory = plan_memory(
        free_bytes=device.free_bytes(),
        memory_ratio=config.memory_ratio or device.default_memory_ratio,
        weight_bytes=skeleton.num_weight_bytes,
        activation_bytes=_activation_bytes(config, skeleton.spec, dtype),
        page_bytes=MHAKVCache.page_bytes(
            num_layers=model.num_layers,
            page_size=config.page_size,
            num_kv_heads=skeleton.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
        ),
        page_size=config.page_size,
        max_seq_len=max_seq_len,
        max_running=config.max_running,
        num_pages=config.num_pages,
    )
    return replace(memory, num_pages=comm.all_min(memory.num_pages))


def _activation_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Upper estimate for one step: the widest layer's tensors, and float32 logits with a copy."""
    model = spec.config
    num_tokens = (config.max_prefill_tokens or MAX_PREFILL_TOKENS) + config.max_running
    heads = model.num_heads + 2 * model.num_kv_heads
    widest = 3 * model.hidden_size + max(spec.mlp_width, 3 * heads * model.head_dim)
    return num_tokens * widest * dtype.itemsize + 3 * config.max_running * model.vocab_size * 4
