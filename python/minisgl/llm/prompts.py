"""Turns the arguments of `LLM`'s methods, which may have many forms, into records.

Token ids may come as lists, tuples, NumPy arrays or torch tensors. They are checked as one array:
checking the ids of many long prompts one by one would take longer than a GPU takes to compute them.
"""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from minisgl import plugins
from minisgl.core import SamplingParams
from minisgl.core.sampling import MAX_CHOICES
from minisgl.errors import InvalidRequest
from minisgl.message import MAX_NAMESPACE, ChatPrompt, Prompt, Role, TextPrompt, TokenPrompt
from minisgl.utils.text import brief, is_unicode

MAX_ID = 2**31 - 1
ROLES: Final[tuple[str, ...]] = get_args(Role)

Records = tuple[Iterator[Prompt], int]
"""Prompts as records, each checked when it is reached, and their number."""


def prompt_records(prompts: Any) -> Records:
    """Return the prompts of `LLM.generate`. Raises InvalidRequest; for a wrong item of a list, when
    the iterator reaches it."""
    batch = as_batch(prompts)
    records = (
        TextPrompt(text=prompt)
        if isinstance(prompt, str)
        else TokenPrompt(ids=ids_of_prompt(prompt))
        for prompt in batch
    )
    return records, len(batch)


def chat_records(
    messages: Any, template_args: dict[str, Any], tools: Any, tool_choice: Any
) -> Records:
    """Return the prompts of `LLM.chat`. Raises InvalidRequest."""
    batch = as_conversations(messages)
    if not isinstance(template_args, Mapping) or "messages" in template_args:
        raise InvalidRequest(
            f"chat_template_kwargs must be a dict without messages, got {brief(template_args)}",
            param="chat_template_kwargs",
        )
    fields: dict[str, Any] = {}
    if tools is not None or tool_choice != "auto":
        prompt_fields = plugins.find("answers", "tools")
        if prompt_fields is None:
            raise InvalidRequest(f"tools {plugins.absent('answers')}; leave it out", param="tools")
        fields = prompt_fields(tools, tool_choice)
    records = (
        ChatPrompt(
            messages=[_checked(turn, index) for index, turn in enumerate(turns)],
            template_args=template_args,
            **fields,
        )
        for turns in batch
    )
    return records, len(batch)


def check_salt(cache_salt: Any) -> None:
    """Raise InvalidRequest for a wrong `cache_salt`."""
    is_text = isinstance(cache_salt, str) and is_unicode(cache_salt)
    if not is_text or len(cache_salt) > MAX_NAMESPACE:
        raise InvalidRequest(
            f"cache_salt must be a string of at most {MAX_NAMESPACE} characters, got "
            f"{brief(cache_salt)}",
            param="cache_salt",
        )


def params_of_each(params: Any, num_prompts: int, n: Any) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, checked. Raises InvalidRequest for a wrong
    argument, and InvalidSampling."""
    if isinstance(params, SamplingParams):
        params = [params] * num_prompts
    if not is_list(params) or not all(isinstance(item, SamplingParams) for item in params):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, or one for each prompt, got {brief(params)}",
            param="sampling_params",
        )
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"there must be as many sampling_params as prompts, {num_prompts}, or one for all; got "
            f"{len(params)}",
            param="sampling_params",
        )
    if type(n) is not int or not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be 1 to {MAX_CHOICES}, got {brief(n)}", param="n")
    # Again, because msgspec's `replace` checks nothing.
    distinct = {id(item): item for item in params}
    checked = {key: item.but() for key, item in distinct.items()}
    return [checked[id(item)] for item in params]


def as_batch(prompts: Any) -> list[Any]:
    """Return the prompts of one call: a text or a sequence of ids is one prompt.

    Raises InvalidRequest for anything but these, or an iterable of them.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Iterator):
        return list(prompts)
    batch = _items(prompts)
    is_one_prompt = len(batch) > 0 and isinstance(batch[0], Integral)
    return [prompts] if is_one_prompt else list(batch)


def ids_of_prompt(prompt: Any) -> bytes:
    """Return the ids of one prompt as little-endian int32.

    Raises InvalidRequest unless each is an integer in [0, 2**31); a bool is no integer here.
    """
    ids = _items(prompt)
    if not len(ids):
        return b""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise _not_ids(ids.tolist(), "")
        if not (ids.min() >= 0 and ids.max() <= MAX_ID):
            raise _not_ids(_first_wrong(ids.tolist()), " in one")
        return ids.astype("<i4").tobytes()
    try:
        # `pack` is the fastest conversion of a list to int32, but it accepts True as 1. So ids of
        # at most 1 are checked again, which also finds negative ids.
        data = struct.pack(f"<{len(ids)}i", *ids)
    except (struct.error, TypeError) as error:
        raise _not_ids(_first_wrong(ids), " in one") from error
    suspects = np.flatnonzero(np.frombuffer(data, "<i4") <= 1)
    if any(_is_wrong(ids[index]) for index in suspects.tolist()):
        raise _not_ids(_first_wrong(ids), " in one")
    return data


def as_conversations(messages: Any) -> list[Any]:
    """Return the conversations of one call: one list of messages is a batch of one.

    Raises InvalidRequest if `messages` is neither a conversation nor a list of them.
    """
    if isinstance(messages, Iterator):
        messages = list(messages)
    if is_list(messages):
        batch = [messages] if is_conversation(messages) else list(messages)
        if all(is_list(turns) and all(isinstance(t, Mapping) for t in turns) for turns in batch):
            return batch
    raise InvalidRequest(
        'messages must be a list like [{"role": "user", "content": "Hi"}], or several of them, '
        f"got {brief(messages)}",
        param="messages",
    )


def _checked(turn: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of a message. Raises InvalidRequest for another role or form of calls."""
    if turn.get("role") not in ROLES:
        text = f"must be one of {', '.join(ROLES)}, got {brief(turn.get('role'))}"
        raise InvalidRequest(f"messages[{index}].role {text}", param="messages")
    calls = turn.get("tool_calls") or []
    if not is_list(calls) or not all(map(_is_call, calls)):
        raise InvalidRequest(
            f"messages[{index}].tool_calls must be a list of calls like "
            '{"type": "function", "function": {"name": "f", "arguments": "{}"}}, '
            f"got {brief(calls)}",
            param="messages",
        )
    content: Any = turn.get("content")
    return {**turn, "content": list(map(_as_part, content))} if is_list(content) else dict(turn)


def _as_part(part: Any) -> Any:
    """Return {"type": "image", "image": ...} in the form of chat completions. Raises
    InvalidRequest."""
    if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
        return part
    image = part["image"]
    if isinstance(image, str | PathLike):
        try:
            data = Path(image).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a null character
            why = getattr(error, "strerror", error)
            raise InvalidRequest(f"the image {image}: {why}", param="messages") from None
    elif hasattr(image, "save"):  # of PIL
        file = io.BytesIO()
        # PNG has no CMYK, for one; RGB has no grey values of 16 bits.
        (image if image.mode == "I;16" else image.convert("RGB")).save(file, "PNG")
        data = file.getvalue()
    else:
        raise InvalidRequest(
            f"an image is one of PIL, or the path of a file, got {brief(image)}", param="messages"
        )
    url = f"data:image/*;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _items(prompt: Any) -> Sequence[Any] | npt.NDArray[Any]:
    """Return a list or a tuple as it is, an array or a tensor as a NumPy array of one dimension or
    more.

    An array of Python objects becomes a list. Raises InvalidRequest for anything else.
    """
    if hasattr(prompt, "detach"):  # a torch tensor; this module does not import torch
        tensor = prompt.detach().cpu()
        prompt = tensor.float().numpy() if tensor.dtype.is_floating_point else tensor.numpy()
    if hasattr(prompt, "dtype") and hasattr(prompt, "tolist"):
        array = np.asarray(prompt)
        if array.ndim and array.dtype.kind in "iufb":
            return array
        prompt = array.tolist()
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        raise _not_ids(prompt, "")
    return prompt


def _first_wrong(ids: Sequence[Any]) -> Any:
    return next((item for item in ids if _is_wrong(item)), None)


def _is_wrong(item: Any) -> bool:
    is_integer = isinstance(item, Integral) and not isinstance(item, bool)
    return not is_integer or not 0 <= int(item) <= MAX_ID


def _not_ids(got: Any, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"a prompt is a text or a list of token ids, got {brief(got)}{where}", param="prompts"
    )


def is_conversation(value: Any) -> bool:
    return is_list(value) and len(value) > 0 and isinstance(value[0], Mapping)


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
