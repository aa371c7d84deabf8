"""What differs between families of vision towers, and whether a checkpoint has one that is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from safetensors import safe_open

from minisgl import plugins
from minisgl.errors import ConfigError, MinisglError
from minisgl.utils.hf import read_json, weight_files
from minisgl.utils.logger import get_logger

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

MIN_TRANSFORMERS = (5, 24)
"""The version whose towers and processors the tests compare with."""

IdOf = Callable[[str], int]
"""Returns the id of a special token. Raises InvalidRequest."""

Sizes = Sequence[tuple[int, ...]]
"""The `Pixels.sizes` of some tiles."""

PLAIN = {"F32", "BF16", "F16"}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class Refusal(Exception):
    """The text says what is wrong with a picture, or with a checkpoint."""


class Pixels(NamedTuple):
    """A processed tile of a picture. array: uint8, resized. sizes: its rows and columns of patches,
    then what else its family's `expand` needs."""

    array: Any
    sizes: tuple[int, ...]


class Limits(NamedTuple):
    """Of the largest picture. patches: tokens inside of the tower, of a tile. places: in a prompt,
    of the whole."""

    patches: int
    places: int


class Rotation(NamedTuple):
    """Three positions for a token (`minisgl_zoo.vision.turns`). section: the pairs of dims that
    rotate by each; the last two take turns with the first, from pair 1 and 2 on."""

    section: tuple[int, ...]


class VisionFamily(ABC):
    """One architecture. config: the checkpoint's config.json. Raises Refusal for an old form of it.

    Most towers see a picture as it is. Some see tiles of it, each of which is an `Image`.

    num_deep: how many decoder blocks get rows of an image, too. has_mask: the tower has a mask of
    all pairs of patches. model: the class of transformers that has `get_image_features`. towers:
    how the names of its tensors in the files begin, after an optional "model.". whole: see
    `minisgl.core.image.Image`. around: the processor's text before and behind an image.
    """

    model: ClassVar[str]
    towers: ClassVar[tuple[str, ...]]
    has_mask: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    around: ClassVar[str] = ""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    @property
    def num_deep(self) -> int:
        return 0

    @property
    def rotation(self) -> Rotation | None:
        return None

    def grid(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows and columns of an image's places, for a family with a rotation."""
        raise NotImplementedError

    def channel_axis(self) -> int:
        """Return the axis of the pixels that has the colours."""
        return 0

    @property
    @abstractmethod
    def token(self) -> int:
        """The model's id at an image's places."""

    @property
    def mark(self) -> int:
        """The id that the chat template writes once for an image."""
        return self.token

    def written(self, token_of: Callable[[int], str | None]) -> str:
        """Return what a chat template writes for an image."""
        return token_of(self.mark) or ""

    def processor(self, folder: Path) -> Any:
        """Return the checkpoint's image processor, that of PIL: it rounds alike on all machines."""
        auto = of_transformers("AutoImageProcessor")
        return auto.from_pretrained(folder, backend="pil", local_files_only=True)

    @abstractmethod
    def process(self, processor: Any, image: Any) -> list[Pixels]:
        """Resize a picture of PIL, and return its tiles. Raises Refusal."""

    @abstractmethod
    def expand(self, tiles: Sizes, id_of: IdOf) -> list[list[int]]:
        """Return the ids that replace the mark of a picture, for each of its tiles, one `token` for
        each place."""

    @abstractmethod
    def limits(self, processor: Any) -> Limits: ...

    @abstractmethod
    def features(self, model: Any, pixels: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """Run the tower. pixels: normalised. Returns the rows of each image, one for a place: those
        of the embedding, and of `num_deep` blocks, side by side."""

    def is_of_tower(self, name: str) -> bool:
        """Return whether a file's tensor is one of the tower's."""
        return name.removeprefix("model.").startswith(self.towers)


def of_transformers(name: str) -> Any:
    """Return a class of transformers. Raises ConfigError."""
    import transformers

    try:
        return getattr(transformers, name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"transformers cannot import its {name} ({error.__cause__ or error}); a torchvision of "
            "another torch does this, and is not needed: pip uninstall torchvision"
        ) from None


def resized(processor: Any, image: Any, **options: Any) -> Any:
    """Return what the processor makes of a picture, uint8 as it is sent. options: further ones."""
    return processor(
        images=[image], do_rescale=False, do_normalize=False, return_tensors="np", **options
    )


def family_of(folder: Path) -> VisionFamily | None:
    """Return the checkpoint's family; None if it has no tower that is used here.

    The tokenizer and the engine ask this, so they agree. Logs what is missing.
    """
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    family: type[VisionFamily] | None = plugins.find("vision", name)
    if family is None or not isinstance(config.get("vision_config"), dict):
        return None
    try:
        found = family(config)
    except Refusal as error:
        logger.warning("images are not read: %s: %s", folder, error)
        return None
    if not _has_tower(folder, found):
        return None
    if not has_extra():
        logger.info('images are not read: pip install "minisgl[vision]" for the vision tower')
        return None
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        logger.warning("images are not read: %s has no %s", folder, " or ".join(PROCESSOR_FILES))
        return None
    return found


def has_extra() -> bool:
    """Return whether the packages of minisgl[vision] are installed, and new enough."""
    if not find_spec("PIL"):
        return False
    try:
        return tuple(map(int, version("transformers").split(".")[:2])) >= MIN_TRANSFORMERS
    except (PackageNotFoundError, ValueError):
        return False


def _has_tower(folder: Path, family: VisionFamily) -> bool:
    """Return whether the files have the tower's tensors, and not quantised."""
    try:
        files = weight_files(folder)
    except MinisglError:
        return False  # the loader says why, or the weights are dummies
    kinds = set()
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names = filter(family.is_of_tower, file.keys())
            kinds |= {file.get_slice(name).get_dtype() for name in names}
    if kinds and not kinds <= PLAIN:
        logger.warning("images are not read: %s has a quantised vision tower", folder)
    return bool(kinds) and kinds <= PLAIN
