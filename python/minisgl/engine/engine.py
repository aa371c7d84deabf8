"""From a plan to sampled ids: build the batch, run the model, sample.

`minisgl.engine.inputs` turns the plan into tensors, `minisgl.models.blocks.decoder` runs the model,
`minisgl.engine.sampler` samples and stores the ids. `launch` returns at once. Its work runs in
stream order (`Device.enqueue`), so a step can read what earlier steps wrote: the KV pool, the page
table and each request's last token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from minisgl import env, plugins
from minisgl.core import Batch, Plan
from minisgl.core.args import EngineConfig
from minisgl.core.req import Mask
from minisgl.engine.batch import make_batch
from minisgl.engine.connect import closing_on_error, connect, resolve_dtype, resolve_kv_dtype
from minisgl.engine.contexts import create_context
from minisgl.engine.device import Pending, Tuning
from minisgl.engine.extras import Guesser, StepGuard, Vision, create_adapters
from minisgl.engine.flight import ForwardOutput, SampleLate
from minisgl.engine.inputs import Array, StepInputs, make_inputs, mask_arrays
from minisgl.engine.memory import max_decode_rows, most_whole, plan_engine_memory, pools_of
from minisgl.engine.sampler import Sampler
from minisgl.engine.tables import RequestTables
from minisgl.errors import ConfigError
from minisgl.kernel.registry import create_ops
from minisgl.models import PoolBuild, load_model
from minisgl.models.loading.reading import read_config
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock

logger = get_logger(__name__)


Named = Callable[[Plan, Callable[[], Tensor]], Callable[[], Tensor]]
"""Returns the work of a plan's step under the step's name, for profiles."""


class Engine:
    """A model on a device. Mutable: it owns weights, KV pool and tables. One thread launches.

    named: gives each step a name; None until an observer sets it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Callable[[int, int], None] | None = None,
        clock: StartClock | None = None,
    ) -> None:
        """Load the model and allocate the KV pool.

        This measures nothing. To serve, use `minisgl.engine.startup.start_engine`. progress: called
        with (loaded, total) weight bytes. clock: takes the time of each part of the start. Raises
        ConfigError for a checkpoint or settings that cannot work, and OutOfDeviceMemory.
        """
        clock = clock or StartClock()
        self.device, self.comm = connect(config)
        clock.lap("device")
        self.named: Named | None = None
        self._guard: StepGuard | None = None
        self.tuning = Tuning()
        with closing_on_error(self.device, self.comm):
            self._build(config, progress, clock)

    def _build(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None,
        clock: StartClock,
    ) -> None:
        self.model_config = read_config(config.folder, config.quantization, mtp=config.mtp)
        self.dtype = resolve_dtype(config, self.model_config, self.device)
        device, comm, ops = self.device, self.comm, create_ops(self.device.torch_device)
        clock.lap("kernels")  # the C++ kernels are compiled or loaded
        self.adapters = create_adapters(config, self.model_config, device.torch_device, comm)
        adapt = self.adapters.adapt if self.adapters else None
        self.memory = plan_engine_memory(
            config, self.model_config, self.dtype, device, comm, ops, adapt
        )
        self.model = load_model(
            config.folder,
            dtype=self.dtype,
            device=self.device.torch_device,
            ops=ops,
            comm=comm,
            max_context=self.memory.max_seq_len,
            expert_parallel=config.ep,
            adapt=adapt,
            quantization=config.quantization,
            dummy=config.dummy_weight,
            progress=progress,
            mtp=config.mtp,
        )
        if self.adapters:
            self.adapters.bind(self.model)
        self.device.release()  # memory that only loading needed
        clock.lap("weights")
        if comm.rank == 0:  # other ranks differ little, and use the same number of pages
            logger.info("memory on %s:\n%s", self.device.describe(), self.memory)
        self.page_size = config.page_size
        self.max_running = config.max_running_requests
        self.max_decode_rows = max_decode_rows(config, device)
        self.max_seq_len = self.memory.max_seq_len
        self._ops = ops
        groups = self.memory.groups
        self._tables = RequestTables(
            self.device,
            # One starts while another leaves. Probes have a request in each row of a step.
            request_rows=self.max_decode_rows + 1,
            max_pages=-(-self.max_seq_len // config.page_size),
            groups=groups,
        )
        self._pools = pools_of(self.model, config, device)
        build = PoolBuild(
            ops=ops,
            groups=groups,
            page_table=self._tables.group_table,
            page_size=config.page_size,
            dtype=self.dtype,
            device=self.device.torch_device,
            attn=config.attn,
        )
        kv_dtype, needs = resolve_kv_dtype(config, self.dtype), self.model.spec.attention
        self._contexts = [create_context(pool, build, kv_dtype, needs) for pool in self._pools]
        if config.kv_cache_dtype == "fp8" and not config.dummy_weight:
            load_kv_scales = plugins.need("kv_formats", "scales", "--kv-cache-dtype fp8")
            load_kv_scales(self.model, config.folder, self._contexts, comm)
        backends = [context.attn for context in self._contexts]
        self.graph_safe = all(attn.graph_safe for attn in backends)
        self.prompts_graph_safe = all(attn.prompts_graph_safe for attn in backends)
        self.attn_name = " and ".join(dict.fromkeys(attn.name for attn in backends))
        # Collectives are replayed on GPUs only.
        can_replay = self.graph_safe and (comm.size == 1 or device.torch_device.type == "cuda")
        max_graph_rows = config.cuda_graph_max_bs if can_replay else 0
        # All ranks pad a step to the same size, because they all-reduce its rows.
        max_graph_rows = comm.all_min(min(max_graph_rows, self.max_decode_rows))
        self.max_prefill_tokens = self.memory.chunk
        create_vision = plugins.find("vision", "tower") if self.model_config.is_wrapped else None
        self.vision: Vision | None = create_vision and create_vision(
            config,
            self.dtype,
            device.torch_device,
            self.model,
            table_rows=self._tables.request_rows + 1,
            most_tokens=self.max_prefill_tokens,
            leads=comm.rank == 0,
        )
        takes_two_way = all(attn.takes_two_way for attn in backends)
        if self.vision and most_whole(config, self.model_config) and not takes_two_way:
            raise ConfigError(
                f"this model's images attend both ways, --attn {config.attn} only one; leave it out"
            )
        self.runner = self.device.create_runner(max_graph_rows, self.max_prefill_tokens, ops)
        self.runner.short_rows = max(attn.short_rows for attn in backends)
        if env.check_pages():
            create_guard = plugins.need("guards", "pages", "MINISGL_CHECK_PAGES")
            self._guard = create_guard(groups, self._pools, self._contexts, config.page_size)
        create_options = plugins.find("logit_options", "create")
        self.sampler = Sampler(
            model=self.model,
            tables=self._tables,
            comm=comm,
            ops=ops,
            guard=self._guard,
            pool=plugins.find("pooling", "rows"),
            options=create_options
            and create_options(
                self.device.torch_device,
                self._tables.request_rows,
                self.model_config.vocab_size,
            ),
        )
        self._guesser: Guesser | None = None
        if config.draft_model:
            create = plugins.need("drafts", "guesser", "--draft-model")
            self._guesser = create(self, config, ops, self._tables.group_table(0))
        elif self.model.mtp:
            self._guesser = self.model.mtp.guesser(self.model, comm, ops, self._batch)
        clock.lap("memory")

    def apply(self, tuning: Tuning) -> None:
        """Use these settings for later steps. `minisgl.engine.startup` measures them."""
        if tuning.num_threads is not None:
            self.device.set_threads(tuning.num_threads)
        self.runner.max_tokens = tuning.graph_tokens
        self.tuning = tuning

    # --- steps ---------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> ForwardOutput:
        """Enqueue the step and return its flight. If it has late rows, enqueue the forward pass
        only; `Flight.sample_late` enqueues the sampling (`minisgl.core.plan`)."""
        if plan.late_rows:
            return self._launch_late(plan)
        return self._flight(plan, self.enqueue(plan, lambda: self._step(plan)))

    def _flight(
        self, plan: Plan, pending: Pending, late: SampleLate | None = None
    ) -> ForwardOutput:
        is_alone = self.comm.size == 1
        num_guesses = self._guesser.num_guesses if self._guesser else 0
        return ForwardOutput(plan, self.device, pending, is_alone, num_guesses, late)

    def enqueue(self, plan: Plan, work: Callable[[], Tensor]) -> Pending:
        """Enqueue work of a step, under the step's name if an observer gives names."""
        return self.device.enqueue(self.named(plan, work) if self.named else work)

    def synchronize(self, work: Callable[[], object] = bool) -> None:
        """Wait until all launched steps have run, and then `work`."""

        def last() -> Tensor:
            work()
            return _no_ids()

        self.device.enqueue(last).wait()

    def _step(self, plan: Plan) -> Tensor:
        """Run one step, in stream order.

        Returns the output of `Sampler.sample` for the plan's rows, flat.
        """
        inputs = self.upload_step(plan)
        if self._guesser:
            x_TD = self.runner.run(self._shape(inputs), lambda: self.forward(inputs))
            sampled = self.sampler.sample(_sampling(x_TD, inputs), inputs)
            return self._end_step(inputs, sampled, x_TD)

        def forward() -> Tensor:
            return self.forward(inputs)

        sample = self.sampler.sample
        if self.runner.samples and plan.num_decodes == plan.num_rows and not inputs.has_options:
            sampled = self.runner.run(self._shape(inputs), lambda: sample(forward(), inputs))
        else:  # a graph is found by the shape, which does not say how these rows sample
            sampled = sample(self.runner.run(self._shape(inputs), forward), inputs)
        return self._end_step(inputs, sampled)

    def _launch_late(self, plan: Plan) -> ForwardOutput:
        """Enqueue the forward pass of a step with late rows, whose masks depend on the tokens of
        the step before. The forward pass and the LM head need no masks; the sampling is enqueued
        when the host has them (docs/decisions/0021)."""
        # Filled and emptied in stream order.
        forwarded: list[tuple[StepInputs, Tensor, Tensor]] = []

        def forward() -> Tensor:
            forwarded.append(self._forward_late(plan))
            return _no_ids()

        def sample(masks: Sequence[Mask]) -> Pending:
            return self.enqueue(plan, lambda: self._sample_late(*forwarded.pop(), masks))

        return self._flight(plan, self.enqueue(plan, forward), sample)

    def _forward_late(self, plan: Plan) -> tuple[StepInputs, Tensor, Tensor]:
        """Run the forward pass, in stream order. Returns the step's inputs, the logits of this
        rank's rows, and the hidden states. If prompt tokens are scored or pooled, it returns hidden
        states instead of logits, because those logits are computed block by block."""
        inputs = self._begin_step(plan)
        self._upload(inputs, inputs.forward, writes_pages=True)
        x = self.runner.run(self._shape(inputs), lambda: self.forward(inputs))
        x_SD = _sampling(x, inputs)
        return inputs, x_SD if plan.reports else self.sampler.logits(x_SD, inputs), x

    def _sample_late(
        self, inputs: StepInputs, forwarded: Tensor, x: Tensor, masks: Sequence[Mask]
    ) -> Tensor:
        """Sample from the output of `_forward_late`, in stream order. Returns the ids as a step
        does."""
        _, rows = self.sampler.split(inputs)
        arrays = inputs.sample | mask_arrays(inputs.plan.late_rows, masks, rows)
        if self._guesser:  # it needs them after this upload
            arrays |= inputs.forward
        self._upload(inputs, arrays)
        sample = self.sampler.sample if inputs.plan.reports else self.sampler.choose
        return self._end_step(inputs, sample(forwarded, inputs), x)

    def upload_step(self, plan: Plan) -> StepInputs:
        """Make and upload the inputs of a step."""
        inputs = self._begin_step(plan)
        self._upload(inputs, inputs.forward | inputs.sample, writes_pages=True)
        return inputs

    def _begin_step(self, plan: Plan) -> StepInputs:
        if self._guard:
            self._guard.before(plan)
        if plan.histories:
            assert self.sampler.options, "the scheduler refuses options that nothing applies"
            self.sampler.options.begin(plan)
        if plan.loads:
            assert self.adapters, "a request without an engine's adapters is refused"
            self.adapters.load(plan.loads)
        padded = None if plan.reports or plan.images else self.runner.padded(plan)
        inputs = make_inputs(plan, self._tables, self.page_size, padded)
        if self.vision:
            self.vision.begin(plan, inputs.forward)
        if self._guesser:
            inputs.forward.update(self._guesser.arrays(inputs))
        return inputs

    def _shape(self, inputs: StepInputs) -> Hashable | None:
        """Return what steps must have in common to be replayed from one graph."""
        if self.adapters and inputs.shape and "adapters" in inputs.forward:
            return inputs.shape, self.adapters.key
        return inputs.shape

    def _end_step(self, inputs: StepInputs, sampled: Tensor, x: Tensor | None = None) -> Tensor:
        """Return the output of `Sampler.sample` without padding rows, flat, and the guesses. x: the
        hidden states from which a model guesses."""
        guesses = None
        if self._guesser and x is not None:
            guesses = self._guesser.guess(x, sampled, inputs)
        if self._guard:
            self._guard.after(inputs.plan)
        if not inputs.has_options:
            sampled = sampled[..., : len(inputs.plan.sample_rows)]
        return sampled.flatten() if guesses is None else torch.cat((sampled.flatten(), guesses))

    def _upload(
        self, inputs: StepInputs, arrays: dict[str, Array], *, writes_pages: bool = False
    ) -> None:
        """Upload arrays in one transfer, with the step's new pages if these are to be written."""
        if writes_pages:
            arrays = {**arrays, "new_pages": inputs.new_pages}
        tensors = self.device.upload(list(arrays.values()))
        inputs.tensors.update(zip(arrays, tensors, strict=True))
        if writes_pages and inputs.new_pages.size:  # outside the graph: their number varies
            self._ops.write_pages(self._tables.page_table, inputs["new_pages"])

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run the model. Returns the hidden states [S, D] for the LM head, padding included; those
        of all tokens if the model's own layer guesses."""
        decoding = inputs["rows"][0, : inputs.num_decodes]  # only these can have promised ids
        ids_T = self._ops.take_ids(inputs["token_ids"], decoding, self._tables.last_token)
        positions = inputs["sample_positions"]
        if self._guesser and self._guesser.needs_states and len(positions) < len(ids_T):
            positions = torch.arange(len(ids_T), device=ids_T.device)
        if self.adapters:
            self.adapters.begin(inputs.tensors.get("adapters"), positions)
        return self.model.forward(self._batch(inputs, ids_T, positions))

    def _batch(self, inputs: StepInputs, ids_T: Tensor, positions: Tensor) -> Batch:
        groups, images = self.memory.groups, None
        if inputs.plan.images:
            assert self.vision, "no other model accepts images"
            images = self.vision.rows(inputs.plan)
        return make_batch(inputs, ids_T, positions, self._pools, self._contexts, groups, images)

    # --- start and end -------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the launched steps and release threads and memory. No call may follow."""
        self.device.close()
        owned = "runner model adapters _contexts _tables _guard sampler vision _guesser _ops"
        for name in owned.split():
            self.__dict__.pop(name, None)
        self.comm.close()  # after the graphs, which hold its buffers
        self.device.release()


def _sampling(x: Tensor, inputs: StepInputs) -> Tensor:
    """Return the hidden states for the LM head, from those or from all tokens'."""
    positions_S = inputs["sample_positions"]
    return x if len(x) == len(positions_S) else x[positions_S]


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int32)
