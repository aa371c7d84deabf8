"""A small model of the same vocabulary beside the served one, which guesses its next tokens.

::

    step                tokens 5 to 8 of a prompt      decode of token 9    the next step's chain
    the served model    5  6  7  8                     9
    samples                      9                     10
    draft model, pass 1 5  6  7  8  9                  9  10
    guesses                         10                     11
    passes 2, 3, ...                10  11             11  12

After sampling, the draft model computes the step's own tokens and the sampled one, so its KV exists
wherever the served model's does: it is in pages of the same ids, behind the same page table. So
prompts, prefix hits, retraction and wrong drafts need nothing of their own. Each further pass
computes the guess of the one before. The KV of guesses lies behind the known tokens, and where no
page is taken yet, in pages of the draft model alone; the next step computes the right ones again.

A guess has the noise that the token will have. It sees no mask, and no option that changes logits.

How many passes a step has depends on how often guesses were right, and on the draft model's size
relative to the served one's, by the rule of `minisgl_zoo.drafts.rule`. All ranks sample the same
tokens, so they run the same passes.

On a CPU only: the rows of a pass depend on the sampled tokens, which the host would wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core import PROMISED, Batch, Context, Plan, PoolBatch
from minisgl.core.batch_sampling import BatchSamplingArgs
from minisgl.engine.contexts import create_context
from minisgl.engine.inputs import COLUMNS
from minisgl.errors import ConfigError
from minisgl.models import BaseLLMModel, PoolBuild, build_model, load_model
from minisgl.models.loading.reading import read_config
from minisgl.models.registry import spec_of
from minisgl.utils.hf import read_json
from minisgl_zoo.drafts.rule import MOST_STREAMS, Rate

if TYPE_CHECKING:
    from minisgl.core.args import EngineConfig
    from minisgl.distributed import DistributedCommunicator
    from minisgl.engine.engine import Engine
    from minisgl.engine.inputs import Array, StepInputs
    from minisgl.kernel.ops import Ops
    from minisgl.models import ModelConfig

MOST_GUESSES: Final = 8
"""Behind each token. A draft model takes a pass for each, so more pay only where all are right."""
PROBE: Final = 16
"""Where no guess pays, one step in so many makes one, so that a change is noticed."""


def draft_bytes(
    config: EngineConfig,
    served: BaseLLMModel,
    dtype: torch.dtype,
    comm: DistributedCommunicator,
    ops: Ops,
    max_seq_len: int,
) -> tuple[int, int]:
    """Return the bytes of the draft model's weights and own pages, and those of its KV in a page.

    served: the model, on `meta`. Raises ConfigError for a pair of models that cannot work.
    """
    draft = read_config(config.draft_folder)
    _check(draft, served, config, max_seq_len)
    model = build_model(draft, dtype=dtype, ops=ops, comm=comm, max_context=max_seq_len)
    page_bytes = sum(pool.page_bytes(0, config.page_size, dtype) for pool in model.pools)
    return model.num_weight_bytes + _own_pages(config.page_size) * page_bytes, page_bytes


def _check(
    draft: ModelConfig, served: BaseLLMModel, config: EngineConfig, max_seq_len: int
) -> None:
    name = "the draft model (--draft-model)"  # its folder may be one of a cache
    spec = spec_of(draft)
    if served.config.is_wrapped or draft.is_wrapped:
        raise ConfigError(f"{name}: models that read images have no draft model; leave it out")
    if served.layout.groups[0].kind != "full":
        raise ConfigError(
            f"{name}: {served.config.architecture} has no layer that keeps all tokens, whose pages "
            "a draft model shares; leave it out"
        )
    if spec.is_encoder:
        raise ConfigError(f"{name}: {draft.architecture} writes no text; take another one")
    if any(group.kind != "full" for layer in spec.layers for group in layer.groups):
        raise ConfigError(
            f"{name}: a draft model has layers of full attention only, and {draft.architecture} "
            "has others; take another one"
        )
    if not _same_words(config.draft_folder, config.folder, draft, served.config):
        raise ConfigError(
            f"{name} has another vocabulary than the model; it needs the same tokens with the same "
            "ids: take another one"
        )
    if draft.max_context < max_seq_len:
        raise ConfigError(
            f"{name} was made for {draft.max_context} tokens, and requests may have {max_seq_len}; "
            f"lower --max-seq-len to {draft.max_context}, or take another draft model"
        )


def _same_words(one: Path, other: Path, draft: ModelConfig, served: ModelConfig) -> bool:
    """Return whether two checkpoints have the same tokens. The files may pad their embeddings."""
    files = [folder / "tokenizer.json" for folder in (one, other)]
    if not all(file.is_file() for file in files):
        return draft.vocab_size == served.vocab_size
    words, others = ((read_json(file).get("model") or {}).get("vocab") for file in files)
    return bool(words == others)


def _own_pages(page_size: int) -> int:
    return MOST_STREAMS * -(-MOST_GUESSES // page_size)


def create_guesser(
    engine: Engine, config: EngineConfig, ops: Ops, page_table: Tensor
) -> ModelGuesser:
    """Load the draft model of an engine. page_table: of the group of full attention."""
    model = load_model(
        config.draft_folder,
        dtype=engine.dtype,
        device=engine.device.torch_device,
        ops=ops,
        comm=engine.comm,
        max_context=engine.max_seq_len,
        dummy=config.dummy_weight,
    )
    num_pages = engine.memory.groups[0].num_pages
    full = replace(engine.memory.groups[0], num_pages=num_pages + _own_pages(config.page_size))
    build = PoolBuild(
        ops=ops,
        groups=(full,),
        page_table=lambda group: page_table,
        page_size=config.page_size,
        dtype=engine.dtype,
        device=engine.device.torch_device,
        attn=config.attn,
    )
    needs = model.spec.attention
    contexts = [create_context(p, build, engine.dtype, needs) for p in model.pools]
    return ModelGuesser(
        model=model,
        contexts=contexts,
        comm=engine.comm,
        ops=ops,
        page_size=config.page_size,
        num_pages=num_pages,
        max_seq_len=engine.max_seq_len,
        vocab_size=min(model.config.vocab_size, engine.model_config.vocab_size),
        # The ranks' shares may differ in size, and all must run the same passes.
        cost=-engine.comm.all_min(-model.num_weight_bytes * 1000 // engine.model.num_weight_bytes)
        / 1000,
    )


@dataclass(slots=True, eq=False)
class _Span:
    """Tokens of a request from `start` on, as the step knows them now. Mutable: right drafts are
    appended. slots: where their KV goes. index: of the last one in `sample_rows`, -1 if it does not
    sample. sampled: the token after them."""

    table_idx: int
    start: int
    tokens: list[int]
    slots: list[int]
    index: int = -1
    sampled: int = -1
    is_over: bool = False  # a draft was wrong

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True, kw_only=True)
class ModelGuesser:
    """`minisgl.engine.extras.Guesser`. Mutable: it counts how often guesses are right.

    num_pages: of the served model; higher ids are own pages. cost: the time of a pass in steps of
    the served model. last: the token that each row of the tables has sampled. chains: by row, the
    position and the guesses of the tokens from there on.
    """

    model: BaseLLMModel
    contexts: Sequence[Context]
    comm: DistributedCommunicator
    ops: Ops
    page_size: int
    num_pages: int
    max_seq_len: int
    vocab_size: int
    cost: float
    needs_states: bool = False
    num_guesses: int = MOST_GUESSES
    last: dict[int, int] = field(default_factory=dict)
    chains: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    rates: list[Rate] = field(default_factory=lambda: [Rate() for _ in range(MOST_GUESSES)])
    num_steps: int = 0

    def arrays(self, inputs: StepInputs) -> dict[str, Array]:
        return {}

    def guess(self, x_TD: Tensor, sampled: Tensor, inputs: StepInputs) -> Tensor:
        plan = inputs.plan
        for table_idx, *_ in plan.begins:
            self.chains.pop(table_idx, None)
        next_ids = sampled.flatten()[: len(plan.sample_rows)].tolist()
        spans = self._spans(plan, inputs.forward["slots"][0], next_ids)
        for span in spans:
            self._judge(span)
            self.last[span.table_idx] = span.sampled
        guesses = torch.full((len(next_ids), MOST_GUESSES), -1, dtype=torch.int32)
        guessing = [
            span
            for span in spans
            if span.sampled >= 0 and span.end + MOST_GUESSES <= self.max_seq_len
        ]
        count = self._count(len(guessing))
        self._run(spans, guessing if count else [], count, guesses, inputs)
        for span in guessing:
            self.chains[span.table_idx] = (span.end + 1, guesses[span.index].tolist())
        return guesses.flatten()

    def _spans(self, plan: Plan, slots: Array, next_ids: Sequence[int]) -> list[_Span]:
        """Return the tokens of each request, without wrong drafts."""
        spans: dict[int, _Span] = {}
        samples = {row: index for index, row in enumerate(plan.sample_rows)}
        at = 0
        for row, (table_idx, start) in enumerate(zip(plan.table_idxs, plan.starts, strict=True)):
            count = plan.ends[row] - start
            tokens = plan.token_ids[at : at + count].tolist()
            if tokens[0] == PROMISED:
                tokens[0] = self.last[table_idx]
            span = spans.get(table_idx)
            if span is None:
                span = spans[table_idx] = _Span(table_idx, start, [], [])
            elif span.is_over or span.sampled != tokens[0]:
                span.is_over = True
                at += count
                continue
            span.tokens += tokens
            span.slots += slots[at : at + count].tolist()
            span.index = samples.get(row, -1)
            span.sampled = next_ids[span.index] if span.index >= 0 else -1
            at += count
        return list(spans.values())

    def _judge(self, span: _Span) -> None:
        """Compare the guesses of the step before with the tokens that are known now."""
        start, guesses = self.chains.pop(span.table_idx, (0, []))
        known = [*span.tokens, span.sampled][start - span.start :]
        if start != span.start + 1:
            return
        for rate, guess, token in zip(self.rates, guesses, known, strict=False):
            if guess < 0:
                return
            rate.add(guess == token)
            if guess != token:
                return

    def _count(self, num_rows: int) -> int:
        """Return how many guesses behind each token raise the expected tokens per second."""
        self.num_steps += 1
        if not 0 < num_rows <= MOST_STREAMS:
            return 0
        chance, expected, seconds = 1.0, 1.0, 1.0 + self.cost
        for count, rate in enumerate(self.rates):
            chance *= rate.value
            if chance * seconds <= expected * self.cost:
                return count or int(self.num_steps % PROBE == 0)
            expected, seconds = expected + chance, seconds + self.cost
        return MOST_GUESSES

    def _run(
        self,
        spans: Sequence[_Span],
        guessing: Sequence[_Span],
        count: int,
        guesses: Tensor,
        inputs: StepInputs,
    ) -> None:
        """Compute the tokens of the step, and guess behind those of `guessing`. Writes `guesses`,
        [S, MOST_GUESSES]."""
        order = [*guessing, *(span for span in spans if span not in guessing)]
        pages = self._pages(order, len(guessing))
        ids: list[int] = []
        slots: list[int] = []
        ends: list[int] = []
        for index, span in enumerate(order):
            ids += span.tokens
            slots += span.slots
            if index < len(guessing):
                ids.append(span.sampled)
                slots.append(self._slot(pages[index], span.end))
            ends.append(span.end + (index < len(guessing)))
        lengths = [end - span.start for span, end in zip(order, ends, strict=True)]
        firsts = np.cumsum([0, *lengths[:-1]])
        lasts = [int(first) + length - 1 for first, length in zip(firsts, lengths, strict=True)]
        rows = torch.tensor([span.index for span in guessing], dtype=torch.int64)
        x = self._forward(ids, slots, ends, lengths, lasts[: len(guessing)], pages)
        for step in range(count):
            next_ids = self._sample(x, rows, step, inputs)
            guesses[rows, step] = next_ids
            if step + 1 == count:
                return
            ends = [span.end + 2 + step for span in guessing]
            slots = [self._slot(row, end - 1) for row, end in zip(pages, ends, strict=False)]
            ones = [1] * len(guessing)
            at = list(range(len(guessing)))
            x = self._forward(next_ids.tolist(), slots, ends, ones, at, pages)

    def _pages(self, order: Sequence[_Span], num_guessing: int) -> Tensor:
        """Return the page table of the passes. Own pages follow those of the known tokens."""
        table_idxs = torch.tensor([span.table_idx for span in order])
        pages = self.contexts[0].page_table[table_idxs]
        each = -(-MOST_GUESSES // self.page_size)
        for index, span in enumerate(order[:num_guessing]):
            first = -(-span.end // self.page_size)
            own = self.num_pages + index * each
            width = min(each, pages.shape[1] - first)
            pages[index, first : first + width] = torch.arange(own, own + width)
        return pages

    def _slot(self, pages: Tensor, position: int) -> int:
        return int(pages[position // self.page_size]) * self.page_size + position % self.page_size

    def _forward(
        self,
        ids: Sequence[int],
        slots: Sequence[int],
        ends: Sequence[int],
        lengths: Sequence[int],
        positions_S: Sequence[int],
        pages: Tensor,
    ) -> Tensor:
        """Return the hidden states [S, D] of a pass; its rows use the rows of `pages` in order."""
        starts = [end - length for end, length in zip(ends, lengths, strict=True)]
        idxs = list(range(len(ends)))
        spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows = torch.tensor(np.stack((idxs, firsts, lengths, ends)), dtype=torch.int32)
        plan = SimpleNamespace(table_idxs=idxs, starts=starts, ends=ends)
        views = tuple(
            PoolBatch(
                positions=torch.tensor(np.concatenate(spans), dtype=torch.int32),
                slots=torch.tensor(slots, dtype=torch.int32),
                attn_metadata=context.attn.prepare(plan),
                context=replace(context, page_table=pages),
                rows=rows,
            )
            for context in self.contexts
        )
        ids_T = torch.tensor(ids, dtype=torch.int32).clamp(0, self.model.config.vocab_size - 1)
        at = torch.tensor(positions_S, dtype=torch.int64)
        return self.model.forward(Batch(input_ids=ids_T, sample_positions=at, pools=views))

    def _sample(self, x: Tensor, rows: Tensor, step: int, inputs: StepInputs) -> Tensor:
        columns = {name: inputs[name][rows] for name in inputs.sample if name in COLUMNS}
        if "output_idxs" in columns:
            columns["output_idxs"] = columns["output_idxs"] + 1 + step
        args = BatchSamplingArgs(all_greedy=not columns, **columns)
        logits = self.model.logits(x)[:, : self.vocab_size].contiguous()
        return self.comm.broadcast(self.ops.sample(logits, args))
