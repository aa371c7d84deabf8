"""The engine of an `LLM`, in this process. `minisgl.llm.ranks` has one in several processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from minisgl import env
from minisgl.core.req import Masker
from minisgl.engine.startup import start_engine
from minisgl.llm.session import Session
from minisgl.message import UserMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.scheduling import Grammars, create_grammars, scheduler_config
from minisgl.scheduler import Scheduler, run
from minisgl.tokenizer.tokenizer import load_tokenizer


class OwnEngine:
    """An engine and a scheduler in this process. Mutable: the first grammar makes `_grammars`."""

    def __init__(
        self,
        args: RuntimeArgs,
        eos_ids: frozenset[int],
        progress: Callable[[int, int], None],
    ) -> None:
        """Load the model. progress: called with (loaded, total) bytes. Raises ConfigError."""
        self._folder = args.folder
        self.engine = start_engine(args, progress=progress, measure_steps=args.draft_names != "off")
        try:
            config = scheduler_config(args, self.engine, eos_ids)
            self.context = min(config.max_seq_len, config.num_pool_tokens)
            self.scheduler = Scheduler(config, create_masker=self._masker)
        except Exception:
            self.engine.close()
            raise

    def run(self, session: Session) -> None:
        self._session = session
        overlap = not env.overlap_disabled()
        run(self.scheduler, self.engine, session, session, overlap=overlap)

    def close(self) -> None:
        if grammars := vars(self).get("_grammars"):
            grammars.close(waits=False)  # its thread may need a lock of who closes
        self.engine.close()

    @cached_property
    def _grammars(self) -> Grammars:
        config = self.scheduler.config
        grammars = create_grammars(
            lambda: load_tokenizer(self._folder),
            config.vocab_size,
            config.eos_ids,
            lambda message: self._session.post(message),
        )
        assert grammars, "the encoder that compiled the grammar is installed"
        return grammars

    def _masker(self, message: UserMsg) -> Masker | None:
        return self._grammars.create(message) if message.grammar else None
