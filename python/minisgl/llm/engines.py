"""The engine of an `LLM` in this process. `minisgl.llm.ranks` runs one in several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from minisgl import env
from minisgl.core.args import EngineArgs
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.llm.session import Session
from minisgl.runtime.scheduler_config import masker_factory, scheduler_config
from minisgl.scheduler import Scheduler, run


class LLMEngine(Protocol):
    """The interface of an engine to an `LLM`."""

    def run(self, session: Session) -> None:
        """Run the loop until the session sends an `ExitMsg`. Unusable after an error."""

    def close(self) -> None:
        """Release memory, threads and processes."""


class OwnEngine:
    """An engine and a scheduler in this process."""

    def __init__(
        self,
        args: EngineArgs,
        folder: Path,
        eos_ids: frozenset[int],
        progress: Callable[[int, int], None],
    ) -> None:
        """Load the model. `progress(done, total)` counts bytes. Raises ConfigError."""
        self.engine = start_engine(EngineConfig.of(args, folder), progress=progress)
        try:
            self.scheduler = Scheduler(
                scheduler_config(args, self.engine, eos_ids),
                create_masker=masker_factory(folder, self.engine.model_config.vocab_size, eos_ids),
            )
        except Exception:
            self.engine.close()
            raise

    def run(self, session: Session) -> None:
        overlap = not env.overlap_disabled()
        run(self.scheduler, self.engine, session, session, overlap=overlap)

    def close(self) -> None:
        self.engine.close()
