"""Drives a model directly, with the pool and the reference attention, no engine and no scheduler.

Also makes the checkpoints: random weights (biases and norms too, so that none can be forgotten),
saved by transformers, which is the oracle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from minisgl.attention import BaseAttnBackend, create_attention_backend
from minisgl.core import Batch, Context, Plan, PoolBatch
from minisgl.distributed import DistributedCommunicator, SingleRank
from minisgl.kernel.ops import Ops
from minisgl.kvcache.pool import create_kvcache_pool
from minisgl.models import BaseLLMModel, PoolSpec, load_model

CPU = torch.device("cpu")
VOCAB = 211  # odd, so that a vocabulary split over two ranks is padded
MAX_TOKENS = 128  # tokens of one sequence


def make_reference(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Return a random model, each of whose parameters changes its logits."""
    torch.manual_seed(seed)
    return randomised(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    )


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    """Draw each parameter of the model such that it changes its logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.3)
            elif parameter.dim() == 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.3)
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
    return model.eval()


def to_old_spelling(folder: Path) -> None:
    """Rewrite config.json as transformers 4 wrote it."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["torch_dtype"] = values.pop("dtype")
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    rope_type = rope.pop("rope_type")
    values["rope_scaling"] = None if rope_type == "default" else {"type": rope_type, **rope}
    file.write_text(json.dumps(values))


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    comm: DistributedCommunicator | None = None,
    ops: Ops | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> BaseLLMModel:
    return load_model(
        folder, dtype=dtype, device=device, ops=ops or Ops(), comm=comm or SingleRank(), **options
    )


@dataclass
class Sequence:
    prompt: list[int]
    num_outputs: int
    ids: list[int] = field(init=False)
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def outputs(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return len(self.outputs) == self.num_outputs


class Runner:
    """Greedy generation of several sequences in common steps: decodes and odd prefill chunks.

    attn: plain torch by default.
    """

    def __init__(
        self,
        model: BaseLLMModel,
        *,
        page_size: int = 1,
        rows: int = 2,
        ops: Ops | None = None,
        attn: BaseAttnBackend | None = None,
        device: torch.device = CPU,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.device = device
        pages_per_row = -(-MAX_TOKENS // page_size)
        # Scattered pages, so that nothing works only because they are in order.
        pages = torch.randperm(rows * pages_per_row, generator=torch.Generator().manual_seed(1))
        self.page_size = page_size
        self.page_table = pages.int().view(rows, pages_per_row).to(device)
        self.contexts = [
            self._recurrent(pool)
            if pool.is_recurrent
            else Context(
                kv_pool=create_kvcache_pool(
                    num_layers=pool.num_layers,
                    num_pages=rows * pages_per_row,
                    page_size=page_size,
                    num_kv_heads=pool.num_kv_heads,
                    head_dim=pool.head_dim,
                    dtype=kv_dtype or model.embedding.weight.dtype,
                    device=device,
                    values_are_keys=pool.latent is not None,
                ),
                page_table=self.page_table,
                attn=attn or create_attention_backend("torch", ops or Ops()),
            )
            for pool in model.pools
        ]

    def _recurrent(self, pool: PoolSpec) -> Context:
        dtype = self.model.embedding.weight.dtype
        # Late, because the core's own tests run without the zoo.
        from minisgl_zoo.blocks.short_conv import ConvPoolSpec
        from minisgl_zoo.recurrent.backend import create_recurrent_backend
        from minisgl_zoo.recurrent.pool import RecurrentPool
        from minisgl_zoo.recurrent.short_conv import ConvPool, ShortConvBackend
        from minisgl_zoo.recurrent.spec import RecurrentPoolSpec

        if isinstance(pool, ConvPoolSpec):
            return Context(
                kv_pool=ConvPool(
                    num_layers=pool.num_layers,
                    num_pages=self.page_table.numel(),
                    page_size=self.page_size,
                    width=pool.width,
                    dtype=dtype,
                    device=self.device,
                ),
                page_table=self.page_table,
                attn=ShortConvBackend(self.page_size),
            )
        assert isinstance(pool, RecurrentPoolSpec)
        return Context(
            kv_pool=RecurrentPool(
                pool.shape(dtype),
                num_layers=pool.num_layers,
                num_states=self.page_table.numel(),
                num_row_pages=self.page_table.numel(),
                page_size=self.page_size,
                device=self.device,
            ),
            page_table=self.page_table,
            attn=create_recurrent_backend(
                "auto" if self.device.type == "cuda" else "torch",
                Ops(),
                self.device,
                self.page_size,
                self.page_table,
            ),
        )

    def generate(self, sequences: list[Sequence], chunk: int) -> None:
        """Run until all are done. Each sequence keeps the logits of every position in `logits`."""
        while not all(sequence.done for sequence in sequences):
            rows = [
                (row, s.computed, min(s.computed + chunk, len(s.ids)))
                for row, s in enumerate(sequences)
                if not s.done
            ]
            # Decodes (one token left to compute) come first.
            rows.sort(key=lambda row: row[2] - row[1] > 1)
            logits = self.step([(row, a, b, sequences[row].ids[a:b]) for row, a, b in rows])
            for (row, _, end), part in zip(
                rows, logits.split([b - a for _, a, b in rows]), strict=True
            ):
                sequence = sequences[row]
                sequence.logits.append(part)
                sequence.computed = end
                if end == len(sequence.ids):
                    sequence.ids.append(int(part[-1].argmax()))

    def step(
        self, rows: list[tuple[int, int, int, list[int]]], sample: list[int] | None = None
    ) -> torch.Tensor:
        """Compute rows (table row, start, end, ids). Returns logits of the tokens in `sample`, or
        of all."""
        ids = [token for row in rows for token in row[3]]
        lengths = np.array([end - start for _, start, end, _ in rows])
        plan = Plan(
            step=0,
            uids=[row for row, *_ in rows],
            table_idxs=[row for row, *_ in rows],
            starts=[start for _, start, _, _ in rows],
            ends=[end for _, _, end, _ in rows],
            token_ids=np.asarray(ids, np.int32),
            num_decodes=int((np.cumsum(lengths != 1) == 0).sum()),
            sample_rows=[],
            output_idxs=[],
        )
        positions = torch.cat([torch.arange(start, end) for _, start, end, _ in rows])
        owners = torch.cat([torch.full((end - start,), row) for row, start, end, _ in rows])
        pages = self.page_table.cpu()[owners, positions // self.page_size]
        slots = pages * self.page_size + positions % self.page_size
        sampled = range(len(ids)) if sample is None else sample
        firsts = np.cumsum(lengths) - lengths
        on_device = partial(torch.tensor, dtype=torch.int32, device=self.device)
        views = [
            PoolBatch(
                positions=positions.int().to(self.device),
                slots=slots.int().to(self.device),
                attn_metadata=context.attn.prepare(plan),
                context=context,
                rows=on_device(np.array((plan.table_idxs, firsts, lengths, plan.ends))),
            )
            for context in self.contexts
        ]
        x_SD = self.model.forward(
            Batch(
                input_ids=on_device(ids),
                sample_positions=on_device(list(sampled)).long(),
                pools=tuple(views),
            )
        )
        return self.model.logits(x_SD)


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max |difference| over max |logit|."""
    return float((got - expected).abs().max() / expected.abs().max())
