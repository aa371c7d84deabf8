"""The request of POST /v1/messages, and the `ChatRequest` that it becomes.

The text blocks of a turn are joined with line breaks. Successive turns of one role become one turn,
as Anthropic's documentation says. If the last turn is the assistant's, it is continued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.left_out import Omission
from minisgl.server.api.messages import (
    ImagePart,
    Message,
    TemplateArgs,
    TextPart,
    ToolCall,
    ToolFunction,
)
from minisgl.server.api.schema import NonNegative, Positive, Timeout, TopK
from minisgl.server.api.structured import JsonSchema, ResponseFormat
from minisgl.server.strict import Json, ignored, only
from minisgl_gateway.anthropic.tools import AnthropicChoice, AnthropicTool, CacheControl
from minisgl_gateway.pictures import UNREADABLE, Content, content_of, picture, picture_of
from minisgl_gateway.turns import joined, tool_choice_of

_KEEP_THINKING: Final = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


class TextBlock(Json, tag_field="type", tag="text", frozen=True, kw_only=True):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, ignored("Changes nothing: only the text is read.")] = (
        None
    )
    parsed_output: Annotated[Any, ignored("Changes nothing: the client adds it.")] = None


class ThinkingBlock(Json, tag_field="type", tag="thinking", frozen=True, kw_only=True):
    thinking: str
    signature: Annotated[str, ignored("Changes nothing.")] = ""


class ToolUseBlock(Json, tag_field="type", tag="tool_use", frozen=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None


class RedactedBlock(Json, tag_field="type", tag="redacted_thinking", frozen=True, kw_only=True):
    """Another server's encrypted thinking. It is left out, with a warning."""

    data: str


class HostedBlock(Json, tag_field="type", frozen=True, kw_only=True):
    """A call or result of another server's hosted tool in an earlier turn. It is left out, with a
    warning."""

    id: Annotated[str | None, ignored("Of a block that is left out.")] = None
    name: Annotated[str | None, ignored("Of a block that is left out.")] = None
    input: Annotated[Any, ignored("Of a block that is left out.")] = None
    tool_use_id: Annotated[str | None, ignored("Of a block that is left out.")] = None
    content: Annotated[Any, ignored("Of a block that is left out.")] = None
    caller: Annotated[Any, ignored("Of a block that is left out.")] = None
    cache_control: CacheControl = None


class ServerToolBlock(HostedBlock, tag="server_tool_use", frozen=True, kw_only=True):
    pass


class SearchResultBlock(HostedBlock, tag="web_search_tool_result", frozen=True, kw_only=True):
    pass


class FetchResultBlock(HostedBlock, tag="web_fetch_tool_result", frozen=True, kw_only=True):
    pass


class ToolSearchBlock(HostedBlock, tag="tool_search_tool_result", frozen=True, kw_only=True):
    pass


LeftOutBlock = (
    RedactedBlock | ServerToolBlock | SearchResultBlock | FetchResultBlock | ToolSearchBlock
)


class Base64Source(Json, tag_field="type", tag="base64", frozen=True, kw_only=True):
    data: str
    media_type: str


class UrlSource(Json, tag_field="type", tag="url", frozen=True, kw_only=True):
    url: str


class ImageBlock(Json, tag_field="type", tag="image", frozen=True, kw_only=True):
    """In a tool's result it is replaced by `UNREADABLE` if the model reads text only."""

    source: Base64Source | UrlSource
    cache_control: CacheControl = None

    @property
    def part(self) -> ImagePart:
        if isinstance(self.source, UrlSource):
            return picture(self.source.url)
        return picture_of(self.source.data, self.source.media_type)


class DocumentBlock(Json, tag_field="type", tag="document", frozen=True, kw_only=True):
    """A part of a tool's result, which is replaced by `UNREADABLE`."""

    source: dict[str, Any]
    title: Annotated[str | None, ignored("Documents are not read.")] = None
    context: Annotated[str | None, ignored("Documents are not read.")] = None
    citations: Annotated[dict[str, Any] | None, ignored("Documents are not read.")] = None
    cache_control: CacheControl = None


class ToolResultBlock(Json, tag_field="type", tag="tool_result", frozen=True, kw_only=True):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] = ""
    is_error: Annotated[
        bool | None, Meta(description="The model sees the content after the word Error.")
    ] = None
    cache_control: CacheControl = None


class Turn(Json, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: (
        str
        | list[
            TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | LeftOutBlock
        ]
    )

    def left_out(self, path: str) -> list[Omission]:
        """Return the blocks that `messages` leaves out. path: of the turn."""
        left_out = []
        blocks = [] if isinstance(self.content, str) else self.content
        for i, block in enumerate(blocks):
            if isinstance(block, LeftOutBlock):
                kind = str(block.__struct_config__.tag)
                left_out.append(Omission(f"{path}.content[{i}]", kind))
            elif isinstance(block, ToolResultBlock) and not isinstance(block.content, str):
                left_out += [
                    Omission(f"{path}.content[{i}].content[{number}]", kind)
                    for number, part in enumerate(block.content)
                    if (kind := str(part.__struct_config__.tag)) != "text"
                ]
        return left_out

    def messages(self, path: str) -> list[Message]:
        """Return the chat messages of the turn: one for each tool result, and one for the rest.

        Raises InvalidRequest.
        """
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        results, thoughts, calls = [], [], []
        pieces: list[str | ImagePart] = []
        for i, block in enumerate(self.content):
            where = f"{path}.content[{i}]"
            block.refuse_unsupported(f"{where}.")
            if isinstance(block, TextBlock):
                pieces.append(block.text)
            elif isinstance(block, ImageBlock):
                pieces.append(block.part)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                if self.role != "assistant":
                    raise InvalidRequest(f"{where}: only the assistant has tool_use", param=where)
                arguments = msgspec.json.encode(block.input).decode()
                function = ToolFunction(name=block.name, arguments=arguments)
                calls.append(ToolCall(id=block.id, function=function))
            elif isinstance(block, ToolResultBlock):
                content = _joined(block.content)
                if block.is_error:
                    content = content_of(["Error: ", *_pieces(content)])
                results.append(
                    Message(role="tool", content=content, tool_call_id=block.tool_use_id)
                )
        if results and not (pieces or calls or thoughts):
            return results
        spoken = Message(
            role=self.role,
            content=content_of(pieces, "\n") or (None if calls else ""),
            reasoning_content="\n".join(thoughts) or None,
            tool_calls=calls or None,
        )
        return [*results, spoken]


def _joined(content: str | Sequence[TextBlock | ImageBlock | DocumentBlock]) -> Content:
    if isinstance(content, str):
        return content
    pieces: list[str | ImagePart] = []
    for each in content:
        if isinstance(each, ImageBlock):
            pieces.append(each.part)
        else:
            pieces.append(each.text if isinstance(each, TextBlock) else UNREADABLE)
    return content_of(pieces, "\n")


def _pieces(content: Content) -> Sequence[str | TextPart | ImagePart]:
    return [content] if isinstance(content, str) else content


class Thinking(Json, frozen=True, kw_only=True):
    """adaptive: the chat template decides. budget_tokens: the most tokens of enabled thinking."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NonNegative | None = None
    display: Annotated[
        Literal["summarized", "omitted"] | None,
        Meta(description="omitted: thinking blocks are empty. summarized: they are whole."),
    ] = None


class OutputFormat(Json, frozen=True, kw_only=True):
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(Json, frozen=True, kw_only=True):
    format: Annotated[
        OutputFormat | None, Meta(description="A JSON schema that the answer's text follows.")
    ] = None
    effort: Annotated[str | None, Meta(description="reasoning_effort of chat completions.")] = None


class CountRequest(Json, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str | None = None
    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        OutputFormat | None, Meta(description="The older name of output_config.format.")
    ] = None
    context_management: Annotated[
        dict[str, Any] | None,
        only({}, {"edits": []}, _KEEP_THINKING, why="the client edits its messages itself"),
    ] = None
    mcp_servers: Annotated[list[Any] | None, only([], why="call tools in the client")] = None
    compaction: Annotated[dict[str, Any] | None, only(why="ask for a summary in a message")] = None
    speed: Annotated[str | None, only("standard", why="there is one speed")] = None
    billing_policy: Annotated[Any, ignored("Changes nothing: nothing is billed.")] = None

    chat_template_kwargs: TemplateArgs = None

    @property
    def left_out(self) -> list[Omission]:
        """The tools and blocks that `chat` leaves out."""
        tools = [
            Omission(f"tools[{i}]", tool.hosted)
            for i, tool in enumerate(self.tools or ())
            if tool.hosted
        ]
        return tools + [
            each for i, turn in enumerate(self.messages) for each in turn.left_out(f"messages[{i}]")
        ]

    @property
    def chat(self) -> ChatRequest:
        """The same request to chat completions. Raises InvalidRequest."""
        system = [Message(role="system", content=_joined(self.system))] if self.system else []
        given = [
            message
            for index, turn in enumerate(self.messages)
            for message in turn.messages(f"messages[{index}]")
        ]
        messages = joined([*system, *given], ("system", "user", "assistant"))
        last = messages[-1]
        if len(messages) > 1 and last == Message(role="assistant", content=""):
            last = messages.pop()
        is_begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
        thinking = self.thinking or Thinking(type="adaptive")
        choice = self.tool_choice or AnthropicChoice(type="auto")
        tools = [
            tool.for_chat(f"tools[{i}]")
            for i, tool in enumerate(self.tools or ())
            if not tool.hosted
        ]
        must_call = choice.type in ("any", "tool")
        output = self.output_config or OutputConfig()
        form = output.format or self.output_format
        if self.output_format not in (None, form):
            raise InvalidRequest(
                "output_format and output_config.format mean the same and differ: give one of them",
                param="output_format",
            )
        schema = JsonSchema(schema=form.schema) if form else None
        chat = ChatRequest(
            model=self.model,
            messages=messages,
            reasoning_effort=output.effort,
            response_format=(
                ResponseFormat(type="json_schema", json_schema=schema) if schema else None
            ),
            tools=tools,
            tool_choice=tool_choice_of(choice.for_chat) if tools or must_call else None,
            parallel_tool_calls=choice.allows_several,
            enable_thinking=None if thinking.type == "adaptive" else thinking.type == "enabled",
            thinking_budget=thinking.budget_tokens if thinking.type == "enabled" else None,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=is_begun or None,
        )
        chat.refuse_unsupported()
        return chat


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None
    metadata: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    service_tier: Annotated[str | None, ignored("Changes nothing: there is one tier.")] = None
    container: Annotated[Any, only(why="no code is run here")] = None
    diagnostics: Annotated[dict[str, Any] | None, only(why="timings says what was cached")] = None
    inference_geo: Annotated[str | None, only("global", why="the server is where it is")] = None
    fallbacks: Annotated[Any, only([], "default", why="one model is served")] = None
    fallback_credit_token: Annotated[Any, only(why="nothing is billed")] = None
    thread: Annotated[dict[str, Any] | None, only(why="send the whole conversation")] = None
    timeout: Timeout = None

    @property
    def chat(self) -> ChatRequest:
        return msgspec.structs.replace(
            super().chat,
            max_tokens=self.max_tokens,
            max_tokens_policy="clamp",
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            timeout=self.timeout,
        )
