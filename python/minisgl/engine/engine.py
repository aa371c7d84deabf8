"""From a plan to sampled ids: build the batch, run the model, sample, remember the last tokens.

`launch` returns at once; everything it does happens in stream order (`Device.enqueue`), so a step
may rely on whatever earlier steps wrote: the KV pool, the page table, the last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minisgl import env
from minisgl.attention import create_attention_backend
from minisgl.core import Batch, Context, Plan
from minisgl.engine import probe, warm_up
from minisgl.engine.config import EngineConfig
from minisgl.engine.connect import connect, resolve_dtype
from minisgl.engine.device import StepSize, out_of_memory
from minisgl.engine.flight import ForwardOutput
from minisgl.engine.inputs import StepTensors, make_arrays
from minisgl.engine.memory import max_prompt_tokens, plan_engine_memory
from minisgl.engine.tables import RequestTables
from minisgl.kernel.registry import create_ops
from minisgl.kvcache.pool import create_kvcache_pool
from minisgl.models import ModelConfig, load_model
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock

if TYPE_CHECKING:
    from minisgl.engine.guard import PageGuard
    from minisgl.engine.profiler import StepProfiler

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
        self._profiler: StepProfiler | None = None
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
            expert_parallel=config.ep,
            dummy=config.dummy_weight,
            progress=progress,
        )
        clock.lap("weights")
        if comm.rank == 0:  # the others' differ little, and the pool is the smallest of all
            logger.info("memory on %s:\n%s", self.device.describe(), self.memory.table())
        self.page_size = config.page_size
        self.max_running = config.max_running_requests
        self.max_seq_len = self.memory.max_seq_len
        self._ops = ops
        self._tables = RequestTables(
            self.device,
            max_running=config.max_running_requests,
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
        max_graph_rows = comm.all_min(min(max_graph_rows, config.max_running_requests))
        self.runner = self.device.create_runner(max_graph_rows, max_prompt_tokens(config))
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
        self.max_prefill_tokens = self.max_stalling_tokens = max_prompt_tokens(config)

    def _measure(self, config: EngineConfig, clock: StartClock) -> None:
        """Steps that serve nobody: kernels are compiled, sizes chosen, graphs captured."""
        warm_up.compile_kernels(self)
        clock.lap("kernels")
        probe.tune(self)
        if self._attn.prompts_graph_safe:
            probe.choose_prompt_graphs(self)
        if not config.max_prefill_length:
            self.max_prefill_tokens, self.max_stalling_tokens = probe.choose_chunks(self)
        clock.lap("measuring")
        probe.capture_prompts(self)
        clock.lap("graphs")
        if env.check_pages():
            from minisgl.engine.guard import PageGuard

            pool = self._context.kv_pool
            self._guard = PageGuard(pool, self.model_config.num_layers, config.page_size)
        self.comm.all_min(0)  # nobody serves before all can

    # --- steps ---------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> ForwardOutput:
        """Enqueue the step (`minisgl.core.executor.Executor`)."""
        work: Callable[[], Tensor] = partial(self._step, plan)
        if self._profiler:
            work = self._profiler.named(plan, work)
        pending = self.device.enqueue(work)
        return ForwardOutput(
            plan=plan, device=self.device, pending=pending, is_alone=self.comm.size == 1
        )

    @property
    def profiler(self) -> StepProfiler:
        if self._profiler is None:
            from minisgl.engine.profiler import StepProfiler

            self._profiler = StepProfiler()
        return self._profiler

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
