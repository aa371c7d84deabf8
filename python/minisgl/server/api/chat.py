"""POST /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta, field
from msgspec.structs import replace

from minisgl.core import Finished
from minisgl.errors import InvalidRequest
from minisgl.message import ChatPrompt, TextReply
from minisgl.server.api.answers import ChatLogprobs, OpenAIShape, PromptLogprob
from minisgl.server.api.chat_answer import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
)
from minisgl.server.api.left_out import OmissionLog, unused_switch
from minisgl.server.api.messages import (
    MAX_TOOLS,
    AllowedChoice,
    ChosenTool,
    Message,
    Prediction,
    TemplateArgs,
    Tool,
    ToolChoice,
    call_begins,
    call_goes_on,
    chat_prompt,
)
from minisgl.server.api.schema import (
    CacheKey,
    CacheOptions,
    CacheRetention,
    Moderation,
    NonNegative,
    OpenAIFields,
    Positive,
)
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json, ignored, only
from minisgl.server.web import body
from minisgl.server.web.respond import Output, event, respond

_REASONING_IS_APART: Final = "reasoning is in reasoning_content, in streams too"
_REASONING_SWITCHES: Final = ("reasoning_effort", "enable_thinking")


class ThinkingSwitch(Json, frozen=True, kw_only=True):
    type: Literal["enabled", "disabled"]
    clear_thinking: Annotated[bool | None, only(why="use chat_template_kwargs")] = None


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)] = field(default_factory=list)
    prompt: Annotated[
        str | None, Meta(description="Instead of messages: the text of one user's message.")
    ] = None
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: TemplateArgs = None
    add_generation_prompt: Annotated[
        bool | None, Meta(description="Whether the prompt ends where a new answer begins.")
    ] = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Continue the last message, which is the assistant's.")
    ] = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[
        bool | None,
        Meta(description="true: an answer that must call may have several calls; else it has one."),
    ] = None
    functions: Annotated[list[Any] | None, only([], why="use tools")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, only("none", "auto", why="use tool_choice")
    ] = None
    reasoning_effort: Annotated[
        str | None, Meta(description="For the chat template; none switches reasoning off.")
    ] = None
    enable_thinking: Annotated[
        bool | None, Meta(description="For the chat template: whether the model reasons.")
    ] = None
    thinking_budget: Annotated[
        NonNegative | None, Meta(description="Tokens of reasoning at most.")
    ] = None
    thinking: Annotated[
        ThinkingSwitch | None,
        Meta(description="enable_thinking, as GLM's and DeepSeek's APIs say it"),
    ] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: Annotated[
        NonNegative | None,
        Meta(description="How many most likely tokens to report at each token of the prompt."),
    ] = None
    modalities: Annotated[list[str] | None, only(["text"], why="this server writes text only")] = (
        None
    )
    audio: Annotated[dict[str, Any] | None, only(why="this server writes text only")] = None
    prediction: Annotated[
        Prediction | None,
        Meta(
            description="Text that the answer may repeat, such as a file to edit. It only makes "
            "the answer faster, where drafts are on (docs/performance.md)."
        ),
    ] = None
    verbosity: Annotated[
        str | None, only("medium", why="ask for short or long answers in a message")
    ] = None
    web_search_options: Annotated[
        dict[str, Any] | None, only(why="put what you found into a message")
    ] = None
    moderation: Moderation = None
    store: Annotated[bool | None, only(False, why="keep the answer in the client")] = None
    service_tier: Annotated[
        str | None, ignored("Changes nothing: there is one tier, and priority.")
    ] = None
    prompt_cache_options: CacheOptions = None
    prompt_cache_retention: CacheRetention = None
    prompt_cache_key: CacheKey = None
    metadata: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    safety_identifier: Annotated[str | None, ignored("Changes nothing.")] = None

    # Clients of other engines send these, mostly with a value that changes nothing.
    separate_reasoning: Annotated[bool | None, only(True, why=_REASONING_IS_APART)] = None
    stream_reasoning: Annotated[bool | None, only(True, why=_REASONING_IS_APART)] = None
    include_reasoning: Annotated[bool | None, only(True, why=_REASONING_IS_APART)] = None
    echo: Annotated[bool | None, only(False, why="the client has the messages")] = None
    add_special_tokens: Annotated[
        bool | None, only(False, why="the chat template writes the special tokens")
    ] = None

    @property
    def plain_prompt(self) -> ChatPrompt:
        """The prompt without tools. Raises InvalidRequest."""
        if not self.messages:
            raise InvalidRequest("the field messages is missing", param="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt begins a message, and continue_final_message continues the "
                "last one: set one of them",
                param="continue_final_message",
            )
        names = ("add_generation_prompt", "continue_final_message", *_REASONING_SWITCHES)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.thinking is not None:
            self.thinking.refuse_unsupported("thinking.")
            reasons = self.thinking.type == "enabled"
            if given.setdefault("enable_thinking", reasons) != reasons:
                raise InvalidRequest("thinking and enable_thinking differ", param="thinking")
        prompt = chat_prompt(self.messages, (self.chat_template_kwargs or {}) | given)
        return replace(prompt, prediction=self.prediction.text) if self.prediction else prompt

    @property
    def split_prompt(self) -> ChatPrompt:
        """`plain_prompt` with the tools. Its answer is split into reasoning, content and calls
        (`TextReply.parts`, `Output.answer`)."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        choice = self.tool_choice
        if isinstance(choice, AllowedChoice):
            tools, choice = choice.of(tools), choice.allowed_tools.mode
        return replace(
            self.plain_prompt,
            tools=[tool.for_template() for tool in tools],
            tool_choice=choice.function.name
            if isinstance(choice, ChosenTool)
            else ("required" if choice in ("required", "any") else "auto"),
            parallel_tool_calls=bool(self.parallel_tool_calls),
            is_split=True,
            thinking_budget=self.thinking_budget,
        )

    def sampling_fields(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        return super().sampling_fields()


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()
    omissions = OmissionLog()

    @routes.post(
        "/v1/chat/completions", **operation(ChatRequest, ChatCompletion, ChatCompletionChunk)
    )
    async def chat_completions(request: Request) -> Response:
        """Continue a chat; OpenAI's schema with a few extensions."""
        asked = await body.read(request, ChatRequest)
        shape = _ChatShape(model.check(asked.model), asked)
        sampling, names = asked.params(model.defaults)
        prompt = asked.split_prompt
        return await respond(
            request,
            frontend,
            [prompt],
            sampling,
            asked,
            shape=shape,
            names={"prompt": names.get("messages", "messages"), **names},
            num_choices=asked.n or 1,
            warning=omissions.warning(unused_switch(prompt.template_args, model.abilities)),
        )

    return routes


class _ChatShape(OpenAIShape):
    chunk_type = ChatCompletionChunk
    nothing = Delta()

    def __init__(self, model: str, asked: ChatRequest) -> None:
        super().__init__("chatcmpl", model, asked, has_logprobs=bool(asked.logprobs))
        self._has_prompt = asked.prompt_logprobs is not None
        self._num_calls = [0] * self._num_choices

    def whole(self, outputs: list[Output]) -> ChatCompletion:
        for index, output in enumerate(outputs):
            self._num_calls[index] = len(output.answer.calls)
        return ChatCompletion(
            **self._head,
            choices=[
                ChatChoice(
                    message=AnswerMessage.of(output), **self._choice(index, output.end, output)
                )
                for index, output in enumerate(outputs)
            ],
            **self._of_prompt(0, outputs[0]),
            **self._totals([output.end for output in outputs]),
        )

    def opening(self, num_prompt_tokens: int) -> bytes:
        super().opening(num_prompt_tokens)
        delta = Delta(role="assistant", content="")
        return b"".join(event(self._chunk(index, delta)) for index in range(self._num_choices))

    def text(self, index: int, reply: TextReply) -> bytes:
        has_prompt = self._has_prompt and bool(reply.prompt) and not index
        self._count(reply)
        has_more = self._has_details or has_prompt
        if not has_more and reply.text and len(reply.parts) < 2:
            return self._only_text(index, reply.text)
        deltas = [self._delta(index, kind, text) for kind, text in reply.parts]
        if not deltas and has_more:
            deltas = [Delta(content=reply.text)]
        chunks = []
        for position, delta in enumerate(deltas):
            shown = reply if has_more and not position else None
            chunks.append(event(self._chunk(index, delta, reply=shown)))
        return b"".join(chunks)

    def _delta(self, index: int, kind: str, text: str) -> Delta:
        if kind == "content":
            return Delta(content=text)
        if kind == "reasoning":
            return Delta(reasoning_content=text)
        if kind == "call":
            self._num_calls[index] += 1
            return Delta(tool_calls=[call_begins(self._num_calls[index] - 1, text)])
        return Delta(tool_calls=[call_goes_on(self._num_calls[index] - 1, text)])

    def _choice(
        self, index: int, end: Finished | None, shown: Output | TextReply | None
    ) -> dict[str, Any]:
        fields = super()._choice(index, end, shown)
        if self._num_calls[index] and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs_of(self, output: Output | TextReply) -> ChatLogprobs:
        return ChatLogprobs.of(output.tokens, output.logprobs or [])

    def _of_prompt(self, index: int, shown: Output | TextReply | None) -> dict[str, Any]:
        """Return what an answer says of the prompt, which is the same for each choice."""
        if index:
            return {}
        fields: dict[str, Any] = {"prompt_token_ids": self._prompt_ids(0)}
        if self._has_prompt and shown is not None:
            fields["prompt_logprobs"] = [PromptLogprob.of(token) for token in shown.prompt]
        return fields

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk(index, Delta(content=text))

    def _chunk(
        self,
        index: int,
        content: Delta,
        end: Finished | None = None,
        reply: TextReply | None = None,
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            **self._head,
            choices=[ChunkChoice(delta=content, **self._choice(index, end, reply))],
            **self._of_prompt(index, reply if reply and reply.prompt else None),
            **self._so_far(end),
        )


ROUTES: Final = Routes(router, (ChatRequest, ChatCompletion, ChatCompletionChunk))
