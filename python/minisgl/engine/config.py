"""The settings of one rank's engine, given (`EngineConfig`) or measured (`Tuning`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Self

from minisgl.core.args import EngineArgs
from minisgl.distributed import DistributedInfo

if TYPE_CHECKING:
    from minisgl.core.step_times import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(EngineArgs):
    """The user's options, and this rank's place. The engine resolves options that are None.

    folder: the checkpoint on disk, which the caller found by `model` and `model_source`. rank: this
    rank, of `tp`. num_local: the number of ranks on this machine. store: where the ranks meet
    (`minisgl.distributed.ranks.create_communicator`).
    """

    folder: Path
    rank: int = 0
    num_local: int = 1
    store: str = ""

    @classmethod
    def of(
        cls, args: EngineArgs, folder: Path, *, rank: int = 0, num_local: int = 1, store: str = ""
    ) -> Self:
        """Return the options of `args` for one rank."""
        options = {field.name: getattr(args, field.name) for field in fields(EngineArgs)}
        return cls(**options, folder=folder, rank=rank, num_local=num_local, store=store)

    @property
    def ranks(self) -> DistributedInfo:
        return DistributedInfo(self.rank, self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The settings that start-up measures. All ranks have the same.

    num_threads: CPU threads that steps run on; None leaves torch's number. graph_tokens: steps with
    prompts and up to this many tokens are replayed from CUDA graphs. step_times: how long steps
    take; None if it was not measured.
    """

    num_threads: int | None = None
    graph_tokens: int = 0
    step_times: StepTimes | None = None
