"""Fill a model that was built on `meta` from safetensors files, strictly.

The declared names are joined with the names in the files before anything is read, so one error
lists every tensor that is missing, extra or misshapen. Files are memory-mapped. Only this rank's
slice of each tensor is read, straight into its place, so loading needs no more memory than the
model. The copy looks for NaN and infinity. (safetensors, and building on `meta`, are Hugging Face's
ideas.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.errors import CheckpointError
from minisgl.quantization import Parameter, Part, TensorOwner
from minisgl.utils.hf import mending, weight_files
from minisgl.utils.text import counted

if TYPE_CHECKING:
    from minisgl.kernel.ops import Ops

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, total bytes) after each parameter."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
}
"""Tensors of these dtypes are read as they are; others are converted."""
# Tensors that are never missing or extra: rotary tables of old exports; scales of a KV cache, which
# `minisgl_zoo.kv8.scales` reads if they are needed; a GGUF file's blocks, which have a second,
# dequantised name.
_NO_PARAMETER = re.compile(
    r"\.rotary_emb\.inv_freq$|\.self_attn\.([qkv]_proj\.)?([qkv]_scale|output_scale)$"
    r"|\.weight\.blocks$"
)
MAX_NAMED = 30  # the most tensors that an error names

READERS = 4
"""Threads that read. One reads while others convert or copy, so a few are faster than one, also on
two cores."""
STAGING_BYTES = 16 << 20
"""Bytes of pinned memory of each reader: so many that launching their copy to a GPU takes little
beside the copy itself."""


class Checkpoint:
    """The safetensors files of a folder, memory-mapped as long as this and its tensors live.

    files: a tensor's name -> what has it, instead of the folder's files. Raises CheckpointError if
    files are missing or damaged. is_bare: the names lack "model.", as in files of embedders, which
    have no LM head either.
    """

    is_bare = False

    def __init__(self, folder: Path, files: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.files: dict[str, Any] = dict(files or {})
        for path in weight_files(folder) if files is None else ():
            try:
                file: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or incomplete ({error}); {mending(path)}"
                ) from error
            self.files.update(dict.fromkeys(file.keys(), file))
        self.names = set(self.files)
        self.is_bare = "embed_tokens.weight" in self.names

    def source(self, name: str) -> str:
        """Return the name, in the files, of the tensor that has this one."""
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; (1,) for a single number."""
        return tuple(self.files[name].get_slice(name).get_shape()) or (1,)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors spells it."""
        return str(self.files[name].get_slice(name).get_dtype())

    def share(self, name: str, part: Part) -> Tensor:
        """Return `part` of a tensor as a view. Only its pages of the file are read; for a share of
        axis 1 these may be all. They stay in the system's page cache for other ranks of the host.
        """
        if not self.files[name].get_slice(name).get_shape():
            number: Tensor = self.files[name].get_tensor(name)
            return number.reshape(1)[part.share.start : part.share.stop]
        index: list[slice | int] = [slice(0, size) for size in part.shape]
        index[part.axis] = slice(part.share.start, part.share.stop)
        if part.stack and name == part.stack.name:
            rows = index[0]
            assert isinstance(rows, slice)
            index[0] = slice(part.stack.first + rows.start, part.stack.first + rows.stop)
            index.insert(0, part.stack.index)
        tensor: Tensor = self.files[name].get_slice(name)[tuple(index)]
        return tensor


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the first floating-point tensor; float32 if the folder has no weights."""
    if any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint(folder)
        for name in sorted(checkpoint.names):
            if (dtype := DTYPES.get(checkpoint.dtype(name))) not in (None, torch.float64):
                return dtype
    return torch.float32


def load_weight(
    model: TensorOwner,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    ops: Ops,
    progress: Progress | None = None,
) -> None:
    """Give every parameter below `model` its tensor on `device`, converted to the declared dtype.

    Raises CheckpointError, before anything is read, with a list of all tensors that are missing,
    extra or misshapen; and while reading, for a tensor with NaN or infinity in this rank's share.
    """
    parameters = list(model.parameters())
    names = join_names(parameters, checkpoint)

    def fill(parameter: Parameter) -> Tensor:
        tensor = ops.empty(parameter.shape, parameter.dtype, device)
        rows = tensor.flatten(0, tensor.dim() - len(parameter.parts[0].local_shape))
        row = 0
        for part in (part for part in parameter.parts if part.share):
            share = checkpoint.share(names[part.name], part)
            if part.fills:
                made = rows[row : row + len(share)]
                part.fills(share, made)
                share, is_finite = made, not made.is_floating_point() or ops.all_finite(made)
            else:
                share = part.rearrange(share) if part.rearrange else share
                is_finite = _copy(share, rows[row : row + len(share)], ops)
            if not is_finite:
                raise _not_finite(checkpoint.folder, names[part.name], share, tensor.dtype)
            row += len(share)
        rows[row:].zero_()
        return tensor

    with ThreadPoolExecutor(READERS, thread_name_prefix="read-weights") as readers:
        fill_parameters(model, parameters, readers.map(fill, parameters), device, progress)


def _copy(source: Tensor, target: Tensor, ops: Ops) -> bool:
    """Copy from a mapped file to any device, with conversion. `target` is contiguous.

    Returns whether all values are finite. If not, the copy may be incomplete.
    """
    if not source.numel():
        return True
    is_float = target.is_floating_point()
    if target.device.type == "cpu":
        if is_float:
            return ops.copy_finite(source, target)
        target.copy_(source)
        return True
    # Without our own pinned memory, the driver would pin small pieces one by one, and the device
    # would wait for the disk.
    num_rows = max(STAGING_BYTES // target[:1].nbytes, 1)
    pieces, places = torch.split(source, num_rows), torch.split(target, num_rows)
    for piece, place in zip(pieces, places, strict=True):
        pinned = torch.empty(piece.shape, dtype=target.dtype, pin_memory=True).copy_(piece)
        place.copy_(pinned, non_blocking=True)
        torch.cuda.current_stream(target.device).synchronize()  # other readers go on meanwhile
        if is_float and not ops.all_finite(place):
            return False
    return True


def _not_finite(folder: Path, name: str, share: Tensor, dtype: torch.dtype) -> CheckpointError:
    """Return the error for a share that has a value which is not finite in `dtype`."""
    for piece in torch.split(share, 1024):
        values = piece.float().flatten()
        if len(bad := values[~values.to(dtype).float().isfinite()]):
            break
    where = f"the weights in {folder} cannot be used: {name} holds {bad[0].item():g}"
    if bad[0].isfinite():
        return CheckpointError(
            f"{where}, which is infinite in {str(dtype)[6:]}; choose --dtype float32"
        )
    return CheckpointError(
        f"{where}; the file is damaged, or the training that made it diverged: download it again, "
        "or take another checkpoint"
    )


def fill_parameters(
    model: TensorOwner,
    parameters: list[Parameter],
    tensors: Iterable[Tensor],
    device: torch.device,
    progress: Progress | None,
) -> None:
    """Give each parameter its tensor, in order, then compute the model's buffers."""
    total = sum(parameter.num_bytes for parameter in parameters)
    done = 0
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.set(tensor)
        done += parameter.num_bytes
        if progress:
            progress(done, total)
    for op in model.walk():
        op.init_buffers(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # steps run on a stream of their own


def join_names(parameters: list[Parameter], checkpoint: Checkpoint) -> dict[str, str]:
    """Return a declared name -> the name in the files, for all parameters. Raises
    CheckpointError."""
    in_files = checkpoint.names
    extra = {name for name in in_files if not _NO_PARAMETER.search(name)}
    names: dict[str, str] = {}
    problems: list[str] = []
    declared = ((part, parameter.dtype) for parameter in parameters for part in parameter.parts)
    for part, dtype in declared:
        quantised = QUANTISED.get(part.stored or dtype)
        dtypes = [quantised] if quantised else list(DTYPES)
        shapes = {part.name: part.shape}
        if part.alias:
            shapes[part.alias] = part.shape
        if part.stack:
            shapes[part.stack.name] = part.stack.shape
        extra.difference_update(shapes, part.unread)
        found = next((name for name in shapes if name in in_files), None)
        if found is None:
            problems.append(f"missing: {part.name} {list(part.shape)}")
        elif (shape := checkpoint.shape(found)) != shapes[found]:
            problems.append(f"misshapen: {found} is {list(shape)}, expected {list(shapes[found])}")
        elif checkpoint.dtype(found) not in dtypes:
            problems.append(
                f"quantised: {found} is {checkpoint.dtype(found)}, expected one of {dtypes}"
            )
        else:
            names[part.name] = found
    problems += [f"extra: {name} {list(checkpoint.shape(name))}" for name in sorted(extra)]
    if problems:
        lines = problems[:MAX_NAMED]
        if more := len(problems) - len(lines):
            lines.append(f"and {more:,} more")
        raise CheckpointError(
            f"the weights in {checkpoint.folder} do not fit its config.json; "
            f"{counted(len(problems), 'tensor')} {'differs' if len(problems) == 1 else 'differ'}:"
            "\n  " + "\n  ".join(lines)
        )
    return names
