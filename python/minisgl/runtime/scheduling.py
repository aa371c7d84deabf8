"""What a scheduler is made of, in a rank and in an `LLM`: its settings, its drafts, and maskers of
grammars."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

from minisgl import plugins
from minisgl.core.req import Masker
from minisgl.engine import Engine
from minisgl.engine.memory import has_drafts
from minisgl.errors import ConfigError
from minisgl.message import AbortMsg, CompiledMsg, UserMsg
from minisgl.runtime.args import RuntimeArgs
from minisgl.scheduler import SchedulerConfig
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)


def scheduler_config(args: RuntimeArgs, engine: Engine, eos_ids: frozenset[int]) -> SchedulerConfig:
    """Return the settings. eos_ids: those that the model's vocabulary lacks are left out, because
    it cannot sample them.

    Unless `args.offline`, the engine must have been started with `measure_steps`.
    """
    is_encoder = engine.model.spec.is_encoder
    return SchedulerConfig(
        groups=engine.memory.groups,
        page_size=engine.page_size,
        max_seq_len=engine.max_seq_len,
        vocab_size=engine.model_config.vocab_size,
        eos_ids=frozenset(id for id in eos_ids if id < engine.model_config.vocab_size),
        max_prefill_tokens=engine.max_prefill_tokens,
        max_stall_s=None if args.offline or is_encoder else _stall_bound_s(args, engine),
        step_times=engine.tuning.step_times,
        max_running=engine.max_running,
        max_queued=None if args.offline else args.max_queued_requests,
        cache="naive" if is_encoder else args.cache,
        drafters=() if is_encoder else _drafters(args, engine),
        num_slots=args.num_slots,
        is_encoder=is_encoder,
        num_labels=engine.model.spec.num_labels,
    )


def _stall_bound_s(args: RuntimeArgs, engine: Engine) -> float:
    """Return the seconds of `--max-stall-ms`, or else of the default chunk; rank 0 logs them."""
    times = engine.tuning.step_times
    assert times is not None, "an engine that serves measures its steps"
    bound_s = args.max_stall_ms / 1e3 if args.max_stall_ms else times.default_stall_s
    if args.rank == 0:
        largest, chunk = engine.max_prefill_tokens, times.default_chunk
        logger.info(
            "prefill runs at %s tokens/s in chunks of %s, at %s in chunks of %s; the prompts of a "
            "step hold up running streams for at most %.1f ms (--max-stall-ms), and have at most "
            "%s tokens (--max-prefill-length)",
            f"{times.rate(largest):,.0f}",
            f"{largest:,}",
            f"{times.rate(chunk):,.0f}",
            f"{chunk:,}",
            bound_s * 1e3,
            f"{largest:,}",
        )
    return bound_s


def can_draft(engine: Engine) -> bool:
    """Return whether the model can have drafts on its device. On a GPU, kernels of recurrent layers
    compute the rows of a step in no order."""
    is_cpu = engine.device.torch_device.type == "cpu"
    return is_cpu or not any(group.interval for group in engine.memory.groups)


def _drafters(args: RuntimeArgs, engine: Engine) -> tuple[str, ...]:
    """Return the drafters of an engine.

    Raises ConfigError for drafters of a model that has none here.
    """
    names = args.draft_names
    if not has_drafts(args, engine.device):
        return ()
    if not can_draft(engine):
        raise ConfigError(
            f"--drafts {names} needs a CPU, or a model without recurrent layers; use --drafts off"
        )
    chosen: list[str] = []
    for name in names.split(","):
        is_auto = name == "auto"
        chosen += [row.name for row in plugins.rows("drafters")] if is_auto else [name]
    return tuple(dict.fromkeys(chosen))


Post = Callable[[CompiledMsg | AbortMsg], None]


class Grammars(Protocol):
    """The maskers of one rank: what the row `maskers` of the table `grammars` makes."""

    def prepare(self) -> Future[object]:
        """Read the vocabulary now, in a thread, instead of with the first grammar."""

    def create(self, message: UserMsg) -> Masker | None:
        """Return the masker of a request, and let a thread compile its grammar. None if it has
        none."""

    def close(self, *, waits: bool = True) -> None:
        """Compile no more. waits: until the grammar is compiled that is being compiled. After that
        nothing is posted."""


def create_grammars(
    tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_ids: Collection[int], post: Post
) -> Grammars | None:
    """Return the maskers; None without a package that has them, where grammars are refused.

    tokenizer: called once, in a thread. vocab_size: above every id of the model. post: called in
    the thread with a message for the scheduler, when a request's grammar is compiled or wrong.
    """
    create: Callable[..., Grammars] | None = plugins.find("grammars", "maskers")
    return create(tokenizer, vocab_size, eos_ids, post) if create else None
