"""The checkpoint to serve: its folder, its name and its sampling defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from minisgl.core import SamplingParams
from minisgl.runtime.check_early import check_context, check_device, check_weights
from minisgl.runtime.check_ranks import check_ranks
from minisgl.server.args import ServerArgs
from minisgl.tokenizer.defaults import sampling_defaults
from minisgl.utils.hf import resolve_checkpoint
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

BUILTIN_NAME: Final = "minisgl-builtin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint. names: requests may use any; answers to requests without one have the first.
    defaults: the sampling parameters of requests that leave them out."""

    folder: Path
    names: tuple[str, ...]
    defaults: SamplingParams


def find_checkpoint(args: ServerArgs) -> Found:
    """Find the model of `args.model`, or download it.

    Raises ConfigError, also for options that do not fit the machine or the model, as far as that
    is known without torch.
    """
    check_device(args)
    if args.model is None:
        from minisgl.builtin import model_path

        folder, name = model_path(), BUILTIN_NAME
    else:
        folder = resolve_checkpoint(
            args.model, source=args.model_source, weights=not args.dummy_weight
        )
        path = Path(args.model).expanduser()
        is_here = path.exists()
        name = (path.stem if path.is_file() else folder.resolve().name) if is_here else args.model
    check_ranks(folder, args)
    check_context(folder, args)
    if not (args.dummy_weight or args.dry_run):
        check_weights(folder)
    given = (args.served_model_name or "").split(",")
    names = tuple(filter(None, map(str.strip, given))) or (name,)
    logger.info("the model is %s, from %s", " and ".join(names), folder)
    return Found(folder=folder, names=names, defaults=sampling_defaults(folder))
