"""The tools of POST /v1/messages."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.server.api.messages import Function, Tool
from minisgl.server.strict import Json, ignored, only
from minisgl.utils.text import brief
from minisgl_gateway.turns import decoded

_NO_CACHE_MARKS: Final = "Changes nothing: equal prefixes are found without marks."
CacheControl = Annotated[dict[str, Any] | None, ignored(_NO_CACHE_MARKS)]

HOSTED_BY_DEFAULT: Final = ("web_search_", "web_fetch_", "tool_search_tool_")
"""The types of hosted tools that agents offer by default. A date follows each."""

_OF_HOSTED: Final = "Of a hosted tool, which is left out."


class AnthropicTool(Json, frozen=True, kw_only=True):
    """A tool of the client, or a hosted tool of Anthropic; hosted ones are left out or refused."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Annotated[
        str | None, Meta(description="custom. Tools that Anthropic's servers run are left out.")
    ] = None
    cache_control: CacheControl = None
    strict: Annotated[bool | None, ignored("Changes nothing: see tool_choice.")] = None
    eager_input_streaming: Annotated[bool | None, ignored("Input is streamed as it comes.")] = None
    defer_loading: Annotated[
        bool | None, ignored("Changes nothing: all tools are offered at once.")
    ] = None
    allowed_callers: Annotated[list[str] | None, only(["direct"], why="no code is run here")] = None
    input_examples: Annotated[
        list[Any] | None, Meta(description="They are added to the description.")
    ] = None
    max_uses: Annotated[int | None, ignored(_OF_HOSTED)] = None
    allowed_domains: Annotated[list[Any] | None, ignored(_OF_HOSTED)] = None
    blocked_domains: Annotated[list[Any] | None, ignored(_OF_HOSTED)] = None
    user_location: Annotated[dict[str, Any] | None, ignored(_OF_HOSTED)] = None
    citations: Annotated[dict[str, Any] | None, ignored(_OF_HOSTED)] = None
    max_content_tokens: Annotated[int | None, ignored(_OF_HOSTED)] = None
    use_cache: Annotated[bool | None, ignored(_OF_HOSTED)] = None

    @property
    def hosted(self) -> str:
        """The kind of a hosted tool that is left out; "" for other tools."""
        kind = self.type or ""
        return next((name[:-1] for name in HOSTED_BY_DEFAULT if kind.startswith(name)), "")

    def for_chat(self, path: str) -> Tool:
        """Return the tool in the form of chat completions. Raises InvalidRequest."""
        self.refuse_unsupported(f"{path}.")
        if self.type not in (None, "custom"):
            raise InvalidRequest(
                f"{path}.type must be custom, got {brief(self.type)}: this server does not run "
                "Anthropic's tools; give a custom tool with a name and an input_schema",
                param=f"{path}.type",
            )
        if self.input_schema is None:
            param = f"{path}.input_schema"
            raise InvalidRequest(f"the field {param} is missing", param=param)
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        examples = [msgspec.json.encode(each).decode() for each in self.input_examples or ()]
        about = [self.description or "", *(f"Example of its input: {each}" for each in examples)]
        if text := "\n".join(filter(None, about)):
            function["description"] = text
        return Tool(function=decoded(function, Function, path))


class AnthropicChoice(Json, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chat(self) -> str | dict[str, Any]:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type

    @property
    def allows_several(self) -> bool | None:
        """`parallel_tool_calls` of chat completions."""
        disabled = self.disable_parallel_tool_use
        return None if disabled is None else not disabled
