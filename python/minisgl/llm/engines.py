"""The engine of an `LLM`, in this process. `minisgl.llm.ranks` has one in several processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from minisgl import env
from minisgl.core.args import EngineArgs
from minisgl.engine import EngineConfig
from minisgl.engine.startup import start_engine
from minisgl.llm.session import Session
from minisgl.runtime.scheduler_config import scheduler_config
from minisgl.scheduler import Scheduler, run

if TYPE_CHECKING:
    from minisgl.core.req import Masker
    from minisgl.message import UserMsg
    from minisgl_zoo.grammar.grammars import Grammars


class LLMEngine(Protocol):
    """The interface of an engine to an `LLM`."""

    def run(self, session: Session) -> None:
        """Run the loop until the session sends an `ExitMsg`. After an error the engine is
        unusable."""

    def close(self) -> None:
        """Release memory, threads and processes."""


class OwnEngine:
    """An engine and a scheduler in this process. Mutable: the first grammar makes `_grammars`."""

    def __init__(
        self,
        args: EngineArgs,
        folder: Path,
        eos_ids: frozenset[int],
        progress: Callable[[int, int], None],
    ) -> None:
        """Load the model. progress: called with (loaded, total) bytes. Raises ConfigError."""
        self._folder = folder
        self.engine = start_engine(EngineConfig.of(args, folder), progress=progress)
        try:
            config = scheduler_config(args, self.engine, eos_ids)
            self.scheduler = Scheduler(config, create_masker=self._masker)
        except Exception:
            self.engine.close()
            raise

    def run(self, session: Session) -> None:
        self._session = session
        overlap = not env.overlap_disabled()
        run(self.scheduler, self.engine, session, session, overlap=overlap)

    def close(self) -> None:
        self.engine.close()

    @cached_property
    def _grammars(self) -> Grammars:
        from minisgl_zoo.grammar.grammars import grammars_of

        return grammars_of(
            self._folder, self.scheduler.config, lambda message: self._session.post(message)
        )

    def _masker(self, message: UserMsg) -> Masker | None:
        return self._grammars.create(message) if message.grammar else None
