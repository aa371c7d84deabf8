"""From a plan to sampled ids: build the batch, run the model, sample, remember the last tokens.

`launch` returns at once; everything it does happens in stream order (`Device.enqueue`), so a step
may rely on whatever earlier steps wrote: the KV pool, the page table, the last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minisgl import env
from minisgl.attention import create_attention_backend
from minisgl.core import Batch, Context, Plan, StepFailed, StepOutcome, StepResult
from minisgl.distributed import DistributedCommunicator, create_communicator
from minisgl.engine import probe, warm_up
from minisgl.engine.config import EngineConfig
from minisgl.engine.device import Device, Pending, StepSize, out_of_memory
from minisgl.engine.guard import PageGuard
from minisgl.engine.inputs import StepTensors, make_arrays
from minisgl.engine.memory import MemoryPlan, plan_memory
from minisgl.engine.profiler import StepProfiler
from minisgl.engine.registry import create_device
from minisgl.engine.tables import RequestTables
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import MHAKVCache, create_kvcache_pool
from minisgl.models import ModelConfig, ModelSpec, build_model, load_model
from minisgl.utils.arch import slow_dtype_advice
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock
from minisgl.utils.text import counted

logger = get_logger(__name__)


class Engine:
    """A model on a device. Mutable: it owns weights, KV pool and tables. One thread launches."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
        clock: StartClock | None = None,
    ) -> None:
        """Load everything, measure the prefill rate. `progress(done, total)` counts weight bytes.
        `clock` laps after each of its parts.

        Raises ConfigError (and its kinds) for a checkpoint or settings that cannot work, and
        OutOfDeviceMemory.
        """
        clock = clock or StartClock()
        self.device, self.comm = connect(config)
        clock.lap("device")
        self.profiler = StepProfiler()
        self._guard: PageGuard | None = None
        try:
            self._build(config, progress, clock)
            self._measure(config, clock)
        except Exception as error:
            if self.comm.size == 1:  # else what was enqueued may wait for other ranks for ever
                self.device.close()
            if self.device.is_out_of_memory(error):
                raise out_of_memory(
                    "loading", "lower --memory-ratio or --num-pages", error
                ) from error
            raise

    def _build(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None,
        clock: StartClock,
    ) -> None:
        self.model_config = ModelConfig.from_folder(config.folder)
        self.dtype = resolve_dtype(config, self.model_config, self.device)
        ops = create_ops(self.device.torch_device)
        clock.lap("kernels")  # those of C++
        comm = self.comm
        self.memory = plan_engine_memory(config, self.model_config, self.dtype, self.device, comm)
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
        clock.lap("weights")
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
        self.runner = self.device.create_runner(max_graph_rows, _max_prompt_tokens(config))
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
        clock.lap("memory")
        self.max_prefill_tokens = self.max_stalling_tokens = _max_prompt_tokens(config)

    def _measure(self, config: EngineConfig, clock: StartClock) -> None:
        """Steps that serve nobody: kernels are compiled, sizes chosen, graphs captured."""
        warm_up.compile_kernels(self)
        clock.lap("kernels")
        probe.tune(self)
        if self._attn.prompts_graph_safe:
            probe.choose_prompt_graphs(self)
        if not config.max_prefill_tokens:
            self.max_prefill_tokens, self.max_stalling_tokens = probe.choose_chunks(self)
        clock.lap("measuring")
        probe.capture_prompts(self)
        clock.lap("graphs")
        if env.check_pages():
            pool = self._context.kv_pool
            self._guard = PageGuard(pool, self.model_config.num_layers, config.page_size)
        self.comm.all_min(0)  # nobody serves before all can

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

    def rehearse(self, plans: Iterable[Plan]) -> None:
        """Have all kernels of these steps compiled, side by side; none runs (`Device.rehearse`)."""

        def prepared(plan: Plan) -> Callable[[], object]:
            size = self.runner.padded(plan)
            step = self._upload(plan, size)[1]
            return lambda: self._sample(self._forward(plan, size, step), step)

        self.device.rehearse(partial(prepared, plan) for plan in plans)

    def can_rehearse(self, plan: Plan) -> bool:
        """Whether the device can, and nothing in the step waits for it."""
        has_prompts = plan.num_decodes < plan.num_rows
        is_safe = self._attn.prompts_graph_safe if has_prompts else self._attn.graph_safe
        return self.device.can_rehearse and is_safe

    def _upload(self, plan: Plan, size: StepSize | None) -> tuple[Hashable, StepTensors]:
        """The step's shape, None if it is not padded, and what it needs, on the device."""
        arrays = make_arrays(plan, self._tables, self.page_size, size)
        step = StepTensors.of(arrays, self.device.upload(arrays.arrays))
        if plan.new_pages:  # before any graph: how many there are is no part of a shape
            self._ops.write_pages(self._tables.page_table, step.new_pages)
        return arrays.shape, step

    def _step(self, plan: Plan) -> Tensor:
        """Run one step, in stream order. Returns the output of `_sample` without padding, flat."""
        if self._guard:
            self._guard.before(plan)
        size = self.runner.padded(plan)
        shape, step = self._upload(plan, size)
        num_samples = len(plan.sample_rows)
        if plan.num_decodes < plan.num_rows:  # whose shape says nothing of what samples
            x_SD = self.runner.run(shape, lambda: self._forward(plan, size, step))
            next_ids = self._sample(x_SD[:num_samples], step).flatten()
        else:
            next_ids = self.runner.run(
                shape, lambda: self._sample(self._forward(plan, size, step), step)
            )[..., :num_samples].flatten()
        if self._guard:
            self._guard.after(plan)
        return next_ids

    def _forward(self, plan: Plan, size: StepSize | None, step: StepTensors) -> Tensor:
        """What the model has for the head, [S, D], padding included; all of it on the device."""
        if size is None or not size.num_prompts:
            attn_metadata = self._attn.prepare(plan)
        else:
            attn_metadata = self._attn.prepare_any(
                size.num_prompts, size.num_prompt_tokens, size.longest
            )
        # Promised ids are on the device only.
        decoding = step.rows[0, : step.num_decodes]
        batch = Batch(
            input_ids=self._ops.take_ids(step.token_ids, decoding, self._tables.last_token),
            positions=step.positions,
            slots=step.slots,
            sample_positions=step.sample_positions,
            attn_metadata=attn_metadata,
            context=self._context,
            rows=step.rows,
            shared=step.shared,
        )
        return self.model.forward(batch)

    def _sample(self, x_SD: Tensor, step: StepTensors) -> Tensor:
        """int32 ids [S], padding included; remembered as last tokens. Where a row asks for
        log-probabilities, [2, S]: the ids, and the bits of the float32 log-probabilities.

        Of many rows each rank samples its share, R, and tells the others; of few all do, and rank
        0's ids count: equal logits on two devices are likely, not promised.
        """
        num_rows = len(x_SD)
        shared = self.comm.shares_rows(num_rows)
        rows = self.comm.info.share(num_rows) if shared else range(num_rows)
        logits_RV = self.model.logits(x_SD, shared)
        if self._guard:
            is_padding_S = step.sample_table_idxs == self._tables.padding_idx
            self._guard.watch(logits_RV, is_padding_S[rows.start : rows.stop])
        ids_R = self._ops.sample(logits_RV, step.sampling.take(rows))
        next_ids_S = self.comm.all_gather(ids_R, 0) if shared else self.comm.broadcast(ids_R)
        self._tables.last_token[step.sample_table_idxs] = next_ids_S
        if not step.has_logprobs:
            return next_ids_S
        ids_R = next_ids_S[rows.start : rows.stop]
        logprobs_R = self._ops.logprobs(logits_RV, ids_R).view(torch.int32)
        logprobs_S = self.comm.all_gather(logprobs_R, 0) if shared else logprobs_R
        return torch.stack((next_ids_S, logprobs_S))

    # --- start and end -------------------------------------------------------------------------

    @property
    def attn_name(self) -> str:
        return self._attn.name

    def close(self) -> None:
        """Finish the steps in the air and give back threads and memory. The engine is done for."""
        self.device.close()
        for name in ("runner", "model", "_context", "_tables", "_attn", "_guard"):
            self.__dict__.pop(name, None)
        self.comm.close()  # after the graphs, which hold what they captured of it
        self.device.release()


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
            return _result(self.plan, self.pending.wait())
        except Exception as error:
            if not self.device.is_out_of_memory(error):
                raise
            advice = (
                "lower --max-prefill-length, --max-running-requests, --memory-ratio or --num-pages"
            )
            failure = out_of_memory("computing a step", advice, error)
            if not self.is_alone:
                raise failure from error
            newest = self.plan.uids[self.plan.num_decodes :] or self.plan.uids[-1:]
            return StepFailed(error=failure, uids=tuple(newest))


def _result(plan: Plan, values: list[int]) -> StepResult:
    """values: S ids and, where a row asks for log-probabilities, the bits of S float32."""
    if not plan.logprob_rows:
        return StepResult(next_ids=values)
    num_samples = len(plan.sample_rows)
    logprobs = np.array(values[num_samples:], np.int32).view(np.float32).tolist()
    return StepResult(
        next_ids=values[:num_samples],
        logprobs={index: logprobs[index] for index in plan.logprob_rows},
    )


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


def resolve_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> torch.dtype:
    """`--dtype`: auto is the checkpoint's. Warns where this CPU computes slowly in it."""
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
                f"--max-seq-len {config.max_seq_len} exceeds the "
                f"{counted(model.max_context, 'token')} that the model was made for "
                "(max_position_embeddings and its rope scaling)"
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
        activation_bytes=_activation_bytes(config, device, skeleton.spec, dtype),
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


def _max_prompt_tokens(config: EngineConfig) -> int:
    """Of a step; what is measured later may be less."""
    return config.max_prefill_tokens or probe.MAX_PREFILL_TOKENS


def _max_step_tokens(config: EngineConfig) -> int:
    return _max_prompt_tokens(config) + config.max_running


def _activation_bytes(
    config: EngineConfig, device: Device, spec: ModelSpec, dtype: torch.dtype
) -> int:
    """Upper estimate for one step: the widest layer's tensors, and float32 logits three times, as
    filters and noise are added to copies. All graphs share one memory, which steps outside of them
    cannot use: it is counted beside theirs."""
    model = spec.config
    heads = model.num_heads + 2 * model.num_kv_heads
    widest = 3 * model.hidden_size + max(spec.mlp_width, 3 * heads * model.head_dim)
    num_tokens, num_steps = _max_step_tokens(config), 1
    if config.cuda_graph_max_bs and device.max_graph_tokens:
        num_tokens += min(device.max_graph_tokens + config.max_running, num_tokens)
        num_steps = 2
    logit_bytes = 3 * config.max_running * model.vocab_size * 4
    return num_tokens * widest * dtype.itemsize + num_steps * logit_bytes
