"""What other packages add to a step, as an engine calls it in stream order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl import plugins
from minisgl.core import Plan
from minisgl.core.adapters import AdapterLoad
from minisgl.core.args import EngineConfig
from minisgl.core.batch import ImageRows
from minisgl.distributed import DistributedCommunicator
from minisgl.engine.inputs import Array, StepInputs
from minisgl.models import BaseLLMModel, ModelConfig
from minisgl.quantization import Part, Weight


class LogitOptions(Protocol):
    """Penalties, biases, allowed and forbidden tokens (the row `logit_options`: `create`).

    S: the rows that sample. V: vocabulary.
    """

    def begin(self, plan: Plan) -> None:
        """Keep the tokens so far of the requests with options that start in this step."""

    def apply(self, logits_SV: Tensor, plan: Plan) -> Tensor:
        """Return a float32 copy of the logits, with the options of `Plan.option_rows`."""

    def append(self, plan: Plan, ids_S: Tensor) -> None:
        """Append the sampled tokens to those of their rows."""


class Probe(NamedTuple):
    """Measures a vision tower. num_bytes: of the image's pixels. run: runs the tower, in stream
    order, and returns which part of it has run before that took long."""

    num_bytes: int
    run: Callable[[], float]


class Vision(Protocol):
    """Turns images into rows of embeddings (the row `tower` of the table `vision`)."""

    def begin(self, plan: Plan, forward: dict[str, Array]) -> None:
        """Keep what later steps need of the requests that start. Write the positions by which the
        step's tokens are rotated, in place, and add the ends of their keys. forward: see
        `StepInputs`."""

    def rows(self, plan: Plan) -> ImageRows | None:
        """Return the rows of a step; None if it computes no place of an image."""

    def probe(self, side: int) -> Probe | None:
        """Return what runs the tower for a square image; None on ranks without a tower."""


class EngineAdapters(Protocol):
    """The adapters of an engine and its slots for them (the row `adapters`: `engine`)."""

    @property
    def key(self) -> Hashable:
        """What decides, beside a step's shape, which kernels a step with adapters launches."""

    def adapt(self, weight: Weight, parts: Sequence[Part]) -> Weight:
        """See `BuildContext`."""

    def bind(self, model: BaseLLMModel) -> None:
        """Take the loaded model, and check the adapters of the options. Raises ConfigError."""

    def check(self, folder: Path) -> None:
        """Raise ConfigError if the model cannot use the adapter in a folder."""

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Fill slots, before the forward pass. Raises AdapterLost, on every rank or on none."""

    def begin(self, slots_T: Tensor | None, positions_S: Tensor) -> None:
        """Tell the weights of a forward pass which slot each of its tokens uses, 0 for none, and
        which tokens the last layers compute. slots_T: None if no token uses any."""


def create_adapters(
    config: EngineConfig, model: ModelConfig, device: torch.device, comm: DistributedCommunicator
) -> EngineAdapters | None:
    """Return the adapters of an engine; None if it is started without. Raises ConfigError."""
    if not config.num_slots:
        return None
    create = plugins.need("adapters", "engine", "--lora")
    made: EngineAdapters = create(config, model, device, comm)
    return made


class Guesser(Protocol):
    """Guesses the tokens after each sampled one: the model's own layer
    (`minisgl.models.spec.NextTokens`), or a draft model (the row `guesser` of the table `drafts`).

    needs_states: whether it takes the hidden states of all tokens. num_guesses: behind each
    sampled token.
    """

    needs_states: bool
    num_guesses: int

    def arrays(self, inputs: StepInputs) -> dict[str, Array]:
        """Return what guessing needs beside the arrays of the forward pass, by name."""

    def guess(self, x_TD: Tensor, sampled: Tensor, inputs: StepInputs) -> Tensor:
        """Return the guesses, int32 [S * num_guesses]; -1 for none.

        x_TD: the hidden states of all tokens if it needs them, else of those that sample. sampled:
        the output of `Sampler.sample`.
        """


class StepGuard(Protocol):
    """A debug mode that checks each step, and raises EngineError (the row `guards`: `pages`)."""

    def before(self, plan: Plan) -> None: ...

    def watch(self, logits_SV: Tensor, is_padding_S: Tensor) -> None:
        """Look at the logits on the device; a graph may capture it."""

    def after(self, plan: Plan) -> None: ...
