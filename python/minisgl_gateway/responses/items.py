"""The items of a conversation in POST /v1/responses, which become chat messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import ImagePart, Message, ToolCall, ToolFunction
from minisgl.server.strict import Json, ignored, only
from minisgl_gateway.pictures import UNREADABLE, Content, content_of, picture
from minisgl_gateway.responses.tools import custom_arguments

Hosted = Literal[
    "web_search_call", "tool_search_call", "tool_search_output", "image_generation_call"
]
HOSTED: Final[tuple[str, ...]] = get_args(Hosted)
"""Items of another server's hosted tools in earlier turns. They are left out, with a warning."""


class InputPart(Json, frozen=True, kw_only=True):
    """A text, an image or a file. In a tool's output `UNREADABLE` replaces a file, and an image if
    the model reads text only; elsewhere these are refused."""

    type: Literal[
        "input_text",
        "output_text",
        "reasoning_text",
        "summary_text",
        "text",
        "input_image",
        "input_file",
    ]
    text: str | None = None
    annotations: Annotated[list[Any] | None, ignored("Changes nothing.")] = None
    logprobs: Annotated[list[Any] | None, ignored("Changes nothing.")] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    parsed: Annotated[Any, ignored("Changes nothing.")] = None
    image_url: str | None = None
    detail: Annotated[
        str | None, ignored("Changes nothing: the model's own processor sizes pictures.")
    ] = None
    file_id: Annotated[str | None, ignored("Files are not read.")] = None
    file_url: Annotated[str | None, ignored("Files are not read.")] = None
    file_data: Annotated[str | None, ignored("Files are not read.")] = None
    filename: Annotated[str | None, ignored("Files are not read.")] = None

    @property
    def is_unreadable(self) -> bool:
        return self.type in ("input_image", "input_file")


class InputItem(Json, frozen=True, kw_only=True):
    """A message, a call, a call's output, reasoning, or a reference to an item of an answer.

    A client can send the items of an answer back unchanged.
    """

    type: (
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "item_reference",
            Hosted,
        ]
        | None
    ) = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: Annotated[
        str | None, Meta(description="Of an item_reference: the id of an item of a stored answer.")
    ] = None
    status: Annotated[str | None, ignored("Changes nothing.")] = None
    phase: Annotated[str | None, ignored("Changes nothing.")] = None
    caller: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    encrypted_content: Annotated[
        str | None, ignored("Reasoning of another server, which is left out.")
    ] = None
    namespace: str | None = None
    # OpenAI's clients add these to the items of an answer.
    parsed_arguments: Annotated[Any, ignored("Changes nothing.")] = None
    async_: Annotated[bool | None, only(False, why="send the output with the call")] = None
    # Items of hosted tools, which are left out, have these.
    action: Annotated[Any, ignored("Of an item that is left out.")] = None
    execution: Annotated[str | None, ignored("Of an item that is left out.")] = None
    tools: Annotated[list[Any] | None, ignored("Of an item that is left out.")] = None
    result: Annotated[Any, ignored("Of an item that is left out.")] = None
    revised_prompt: Annotated[str | None, ignored("Of an item that is left out.")] = None

    @property
    def _is_encrypted(self) -> bool:
        return bool(self.type == "reasoning" and self.encrypted_content) and not (
            self.content or self.summary
        )

    def resolved(self, item_of: Callable[[str, str], Json], path: str) -> InputItem:
        """Return the item that this reference names, or this item if it is not a reference.

        item_of: returns the item of an id; its second argument is the id's path. Raises
        InvalidRequest.
        """
        if self.type != "item_reference":
            return self
        item = item_of(_given(self.id, f"{path}.id"), f"{path}.id")
        return msgspec.convert(msgspec.to_builtins(item), InputItem)

    def left_out(self, path: str) -> list[Omission]:
        """Return what `message` leaves out. path: of the item."""
        if self.type in HOSTED:
            return [Omission(path, self.type)]
        if self._is_encrypted:
            return [Omission(path, "encrypted reasoning")]
        parts = self.output if isinstance(self.output, list) else []
        return [
            Omission(f"{path}.output[{index}]", part.type)
            for index, part in enumerate(parts)
            if part.is_unreadable
        ]

    def message(self, path: str) -> Message | None:
        """Return the chat message, or None if the item is left out. Raises InvalidRequest."""
        self.refuse_unsupported(f"{path}.")
        if self.type in HOSTED or self._is_encrypted:
            return None
        match self.type:
            case "function_call" | "custom_tool_call":
                return self._call(path)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _given(self.call_id, f"{path}.call_id")
                output = _given(self.output, f"{path}.output")
                content = _content(output, f"{path}.output", UNREADABLE)
                return Message(role="tool", tool_call_id=call_id, content=content)
            case "reasoning":
                thoughts = _text(self.content or self.summary or "", f"{path}.content")
                return Message(role="assistant", content="", reasoning_content=thoughts)
        content = _content(_given(self.content, f"{path}.content"), f"{path}.content")
        return Message(role=_given(self.role, f"{path}.role"), content=content)

    def _call(self, path: str) -> Message:
        name = _given(self.name, f"{path}.name")
        if self.type == "custom_tool_call":
            arguments = custom_arguments(_given(self.input, f"{path}.input"))
        else:
            arguments = _given(self.arguments, f"{path}.arguments")
            if not isinstance(arguments, str):
                param = f"{path}.arguments"
                raise InvalidRequest(f"{param}: expected a string, got an object", param=param)
        function = ToolFunction(
            name=f"{self.namespace}.{name}" if self.namespace else name, arguments=arguments
        )
        call = ToolCall(id=_given(self.call_id, f"{path}.call_id"), function=function)
        return Message(role="assistant", tool_calls=[call])


def _given(value: Any, path: str) -> Any:
    if value is None:
        raise InvalidRequest(f"the field {path} is missing", param=path)
    return value


def _text(content: str | list[InputPart], path: str) -> str:
    """Return the text of the parts of reasoning. Raises InvalidRequest for others."""
    if isinstance(content, str):
        return content
    return "".join(_given(part.text, f"{path}[{i}].text") for i, part in enumerate(content))


def _content(content: str | list[InputPart], path: str, unreadable: str = "") -> Content:
    """Return the parts of a message. unreadable: replaces files, and images that have no URL; ""
    refuses them."""
    if isinstance(content, str):
        return content
    pieces: list[str | ImagePart] = []
    for index, part in enumerate(content):
        if part.type == "input_image" and part.image_url:
            pieces.append(picture(part.image_url))
        elif not part.is_unreadable:
            pieces.append(_given(part.text, f"{path}[{index}].text"))
        elif unreadable:
            pieces.append(unreadable)
        else:
            what = "has no image_url" if part.type == "input_image" else f"is of type {part.type}"
            raise InvalidRequest(
                f"{path}[{index}] {what}, and this server reads text only, and images by their "
                "image_url",
                param=f"{path}[{index}].type",
            )
    return content_of(pieces)
