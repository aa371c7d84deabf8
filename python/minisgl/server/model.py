"""The model of a server: its checkpoint, names, sampling defaults and chat template."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from minisgl import plugins
from minisgl.core import SamplingParams
from minisgl.core.adapters import Adapter, read_adapters
from minisgl.core.answer import Abilities
from minisgl.errors import CheckpointError, ConfigError, ModelNotFound
from minisgl.message.pooling import OnlyTask, only_task
from minisgl.server.args import ServerArgs
from minisgl.tokenizer.defaults import FOLLOWED, sampling_defaults
from minisgl.tokenizer.template import find_sources
from minisgl.tokenizer.tokenizer import read_json_object
from minisgl.utils.hf import fetched_adapters, fetched_draft_model, resolve_checkpoint
from minisgl.utils.logger import get_logger
from minisgl.utils.text import brief

logger = get_logger(__name__)

BUILTIN_NAME: Final = "minisgl-builtin"


@dataclass(frozen=True, kw_only=True)  # no slots: what is cached is kept in __dict__
class ServedModel:
    """The model of this server.

    names: requests may use any; answers to requests without one have the first. defaults: the
    sampling parameters of requests that leave them out. created: Unix time. folder: of the
    checkpoint. adapters: by name; they change at run time. lora_folder: the only folder from which
    they are then loaded. draft_model: the folder of its draft model.
    """

    names: tuple[str, ...]
    defaults: SamplingParams
    folder: Path
    adapters: dict[str, Adapter] = field(default_factory=dict)
    lora_folder: Path | None = None
    draft_model: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that requests may use, with those of adapters."""
        return *self.names, *self.adapters

    def resolved(self, args: ServerArgs) -> ServerArgs:
        """Return the options with folders instead of ids."""
        folders = {name: adapter.folder for name, adapter in self.adapters.items()}
        return replace(
            args, model=str(self.folder), lora=folders or None, draft_model=self.draft_model
        )

    def check(self, name: str | None) -> str:
        """Return the name for the answer. Raises ModelNotFound if `name` is another model's."""
        if name is None:
            return self.name
        if name not in self.names and name not in self.adapters:
            raise ModelNotFound(
                f"the model {brief(name)} is not served here; ask for "
                f"{' or '.join(map(repr, self.all_names))}, or give the server --served-model-name",
                param="model",
            )
        return name

    @property
    def shown_defaults(self) -> dict[str, float]:
        """The sampling parameters that a checkpoint may recommend, with their defaults."""
        return {name: getattr(self.defaults, name) for name in FOLLOWED}

    @cached_property
    def template(self) -> str:
        """The source of the chat template, or JSON of several; "" if there is none that is usable.
        It is read from the checkpoint when it is first used."""
        try:
            found = find_sources(self.folder)
        except CheckpointError:
            return ""
        if found.keys() <= {"default"}:
            return found.get("default", "")
        return json.dumps([{"name": name, "template": found[name]} for name in found])

    @cached_property
    def abilities(self) -> Abilities:
        """What a chat has beside text, as far as a package here can tell."""
        find: Callable[[str], Abilities] | None = plugins.find("answers", "abilities")
        found = find(self.template) if find else Abilities()
        reads: Callable[[Path], object] | None = plugins.find("vision", "family")
        return replace(found, reads_images=bool(reads and reads(self.folder)))

    @property
    def has_efforts(self) -> bool:
        """Whether the chat template reads an effort, or a switch that an effort can set."""
        names = ("reasoning_effort", "reasoning_strength")
        return any(name in self.template for name in names) or self.abilities.has_switch

    @cached_property
    def only_task(self) -> OnlyTask:
        """What the model does if it writes no text."""
        return only_task(read_json_object(self.folder / "config.json"))

    @cached_property
    def capabilities(self) -> list[str]:
        """What the checkpoint supports, in the words of Ollama's lists."""
        found = [] if self.only_task else ["completion"]
        if "tools" in self.template:
            found.append("tools")
        if self.abilities.has_reasoning or self.abilities.has_switch:
            found.append("thinking")
        if self.abilities.reads_images:
            found.append("vision")
        more: Callable[[Path], list[str]] | None = plugins.find("pooling", "capabilities")
        return found + (more(self.folder) if more else [])


def find_model(args: ServerArgs) -> ServedModel:
    """Return the model of `args.model`, whose checkpoint is downloaded if it is not here.

    Raises ConfigError, also for options that do not fit the machine or the model, as far as the
    rows of `checks` know that without torch; the engine checks all.
    """
    if check_options := plugins.find("checks", "options"):
        check_options(args)
    if args.model is None:
        from minisgl.builtin import model_path

        folder, name = model_path(), BUILTIN_NAME
    else:
        folder = resolve_checkpoint(
            args.model, source=args.model_source, weights=not args.dummy_weight
        )
        path = Path(os.path.expanduser(args.model))
        is_here = path.exists()
        name = (path.stem if path.is_file() else folder.resolve().name) if is_here else args.model
    if check_checkpoint := plugins.find("checks", "checkpoint"):
        check_checkpoint(folder, args)
    given = (args.served_model_name or "").split(",")
    names = tuple(filter(None, map(str.strip, given))) or (name,)
    logger.info("the model is %s, from %s", " and ".join(names), folder)
    adapters = read_adapters(fetched_adapters(args.loras, args.model_source))
    if taken := adapters.keys() & set(names):
        raise ConfigError(f"--lora {taken.pop()}: that is the model's name; choose another")
    writes = not only_task(read_json_object(folder / "config.json"))
    return ServedModel(
        folder=folder,
        names=names,
        defaults=sampling_defaults(folder) if writes else SamplingParams(),
        adapters=adapters,
        lora_folder=args.adapter_folder,
        draft_model=fetched_draft_model(
            args.draft_model, args.model_source, weights=not args.dummy_weight
        ),
    )
