"""The JSON of the API families: what a request may say and what a response looks like.

Every field of OpenAI's two request schemas stands here. A field is honoured; or it carries `only`,
which names the values that change nothing and refuses the others with a reason; a field that is
not here is refused by name. So nothing a client asks for is dropped in silence.

Why not pydantic: `msgspec` decodes, type-checks and bounds-checks in one pass over the bytes, its
errors name the path, and it is strict where JSON is (no NaN, no invalid UTF-8, no "5" for 5).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minisgl.core import Finished, FinishReason, SamplingParams
from minisgl.errors import InvalidRequest, shortened
from minisgl.message import (
    ChatPrompt,
    Namespace,
    Priority,
    Prompt,
    TextPrompt,
    TokenPrompt,
    ids_to_bytes,
)

MAX_PROMPTS: Final = 1024  # of one call; several times `--max-running-requests`
# Of `chat_template_kwargs`. Python's own limit is near 1,000, and another in each process: what one
# can write another might not read. JSON schemas of tools nest some ten deep.
MAX_DEPTH: Final = 100

NonNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


def only(*values: Any, why: str) -> Meta:
    """Marks a field that is accepted as null or one of `values`, which change nothing."""
    description = f"Only {_listed(values)}: {why}."
    return Meta(description=description, extra={"only": values, "why": why})


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(["null", *(msgspec.json.encode(value).decode() for value in values)])


def ignored(why: str) -> Meta:
    """Marks a field that changes nothing whatever it holds."""
    return Meta(description=why)


class _Json(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    def refuse_unsupported(self, path: str = "") -> None:
        """Raise InvalidRequest if a field marked `only` has another value."""
        for name, values, why in _restricted(type(self)):
            value = getattr(self, name)
            # In Python False == 0: compare the JSON types as well.
            if value is not None and not any(
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                for neutral in values
            ):
                raise InvalidRequest(
                    f"{path}{name} is supported only as {_listed(values)}: {why}",
                    param=path + name,
                )


@cache
def _restricted(struct: type[_Json]) -> tuple[tuple[str, tuple[Any, ...], str], ...]:
    """(field, neutral values, reason) of the fields marked `only`."""
    return tuple(
        (field.name, meta.extra["only"], meta.extra["why"])
        for field in msgspec.structs.fields(struct)
        for meta in getattr(field.type, "__metadata__", ())
        if isinstance(meta, Meta) and meta.extra
    )


# --- requests ----------------------------------------------------------------------------------


class StreamOptions(_Json, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: Annotated[
        bool | None, only(False, why="chunks are not padded against traffic analysis")
    ] = None


class SamplingFields(_Json, frozen=True, kw_only=True):
    """What all families share. A field that is left out takes the checkpoint's default."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    stream: bool | None = None

    # Extensions to OpenAI's schema, named as elsewhere in the field.
    top_k: NonNegative | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[NonNegative] | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[
        Priority | None, Meta(description="Lower is served first; the default is 0.")
    ] = None
    cache_salt: Annotated[
        Namespace | None,
        Meta(description="Only requests with the same salt share cached prefixes."),
    ] = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the request says. Raises InvalidSampling."""
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        elif self.stop is not None:
            given["stop"] = tuple(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = tuple(self.stop_token_ids)
        return msgspec.structs.replace(defaults, **given)


_SAMPLING_FIELDS: Final = (
    "temperature",
    "top_p",
    "seed",
    "max_tokens",
    "top_k",
    "min_p",
    "ignore_eos",
    "skip_special_tokens",
)


class _OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that OpenAI's chat and text completions share."""

    model: Annotated[
        str | None, Meta(description="The served model's name; left out, it is the served model.")
    ] = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, only(1, why="one choice is made per prompt")] = None
    frequency_penalty: Annotated[float | None, only(0, why="there are no penalties")] = None
    presence_penalty: Annotated[float | None, only(0, why="there are no penalties")] = None
    logit_bias: Annotated[dict[str, Any] | None, only({}, why="logits are not biased")] = None
    user: Annotated[str | None, ignored("Changes nothing.")] = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk. Raises InvalidRequest without `stream`."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise InvalidRequest(
                "stream_options is allowed only together with stream=true", param="stream_options"
            )
        self.stream_options.refuse_unsupported("stream_options.")
        return bool(self.stream_options.include_usage)


class TextPart(_Json, tag_field="type", tag="text", frozen=True, kw_only=True):
    text: str


class ToolFunction(_Json, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolCall(_Json, tag_field="type", tag="function", frozen=True, kw_only=True):
    id: str
    function: ToolFunction


class Message(_Json, frozen=True, kw_only=True):
    """One message of a chat; an answer of this server can be handed back as it came."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: Annotated[str | None, only(why="models here write no refusals apart")] = None
    annotations: Annotated[list[Any] | None, only([], why="there are no annotations")] = None
    audio: Annotated[dict[str, Any] | None, only(why="models here read text")] = None
    function_call: Annotated[dict[str, Any] | None, only(why="use tool_calls")] = None

    def for_template(self, path: str) -> dict[str, Any]:
        """The message for `ChatPrompt`."""
        self.refuse_unsupported(f"{path}.")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidRequest(
                f"{path}.content must be text or a list of text parts", param=f"{path}.content"
            )
        named = {name: getattr(self, name) for name in _TEMPLATE_FIELDS}
        given = {name: value for name, value in named.items() if value is not None}
        return {"role": self.role} | given


_TEMPLATE_FIELDS: Final = ("content", "name", "tool_call_id", "tool_calls")

TemplateArgs = Annotated[
    dict[str, Any] | None, Meta(description="Further variables for the chat template.")
]


def _chat_prompt(messages: list[Message], template_args: dict[str, Any] | None) -> ChatPrompt:
    if template_args and "messages" in template_args:
        raise InvalidRequest(
            "chat_template_kwargs must not hold messages: those are a field of the request",
            param="chat_template_kwargs",
        )
    if (depth := _depth(template_args)) > MAX_DEPTH:
        raise InvalidRequest(
            f"chat_template_kwargs has {depth} levels of objects and lists in one another; at most "
            f"{MAX_DEPTH} are allowed",
            param="chat_template_kwargs",
        )
    return ChatPrompt(
        messages=[message.for_template(f"messages[{i}]") for i, message in enumerate(messages)],
        template_args=template_args or {},
    )


def _depth(value: Any) -> int:
    """How many objects and lists lie in one another."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return depth


class ChatRequest(_OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    chat_template_kwargs: TemplateArgs = None

    tools: Annotated[list[Any] | None, only([], why="tool calls are not parsed")] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, only("none", "auto", why="there are no tools to choose")
    ] = None
    functions: Annotated[list[Any] | None, only([], why="tool calls are not parsed")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, only("none", "auto", why="there are no functions to choose")
    ] = None
    parallel_tool_calls: Annotated[bool | None, ignored("Changes nothing without tools.")] = None
    response_format: Annotated[
        dict[str, Any] | None, only({"type": "text"}, why="the output is not constrained")
    ] = None
    logprobs: Annotated[bool | None, only(False, why="log probabilities are not returned")] = None
    top_logprobs: Annotated[int | None, only(0, why="log probabilities are not returned")] = None
    modalities: Annotated[list[str] | None, only(["text"], why="models here write text")] = None
    audio: Annotated[dict[str, Any] | None, only(why="models here write text")] = None
    prediction: Annotated[
        dict[str, Any] | None, only(why="there is no decoding from predictions")
    ] = None
    reasoning_effort: Annotated[
        str | None, only(why="say it to the template: chat_template_kwargs")
    ] = None
    verbosity: Annotated[str | None, only("medium", why="say it in the prompt")] = None
    web_search_options: Annotated[dict[str, Any] | None, only(why="there is no web search")] = None
    moderation: Annotated[dict[str, Any] | None, only(why="there is no moderation")] = None
    store: Annotated[bool | None, only(False, why="nothing is stored")] = None
    service_tier: Annotated[
        str | None, only("auto", "default", why="there is one tier; see priority")
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, only({"mode": "implicit"}, why="prefixes are cached by themselves")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, only("in_memory", why="the prefix cache lives in memory")
    ] = None
    prompt_cache_key: Annotated[
        str | None, ignored("Changes nothing: equal prefixes are found without a key.")
    ] = None
    metadata: Annotated[dict[str, Any] | None, ignored("Changes nothing.")] = None
    safety_identifier: Annotated[str | None, ignored("Changes nothing.")] = None

    @property
    def prompt(self) -> ChatPrompt:
        return _chat_prompt(self.messages, self.chat_template_kwargs)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        if self.max_completion_tokens is None:
            return super().sampling(defaults)
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens "
                f"({self.max_completion_tokens}) say the same thing differently: give one of them",
                param="max_completion_tokens",
            )
        params = super().sampling(defaults)
        return msgspec.structs.replace(params, max_tokens=self.max_completion_tokens)


class CompletionRequest(_OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[Any],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists.",
            examples=["Once upon a time", ["One", "Two"], [1, 2, 3], [[1, 2], [3]]],
        ),
    ]
    best_of: Annotated[int | None, only(1, why="one choice is made per prompt")] = None
    echo: Annotated[bool | None, only(False, why="the prompt is not repeated")] = None
    logprobs: Annotated[int | None, only(why="log probabilities are not returned")] = None
    suffix: Annotated[str | None, only("", why="text is not inserted")] = None

    @property
    def prompts(self) -> list[Prompt]:
        """One per choice. Raises InvalidRequest."""
        if isinstance(self.prompt, str):
            return [TextPrompt(text=self.prompt)]
        if not self.prompt:
            raise InvalidRequest("prompt must not be an empty list", param="prompt")
        if all(type(item) is int for item in self.prompt):
            return [token_prompt(self.prompt, "prompt")]
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"at most {MAX_PROMPTS} prompts in one call, got {len(self.prompt)}", param="prompt"
            )
        if all(isinstance(item, str) for item in self.prompt):
            return [TextPrompt(text=item) for item in self.prompt]
        if all(isinstance(item, list) for item in self.prompt):
            return [
                token_prompt(item, f"prompt[{index}]") for index, item in enumerate(self.prompt)
            ]
        raise InvalidRequest(
            "prompt must be a text, a list of texts, a list of token ids, or a list of lists of "
            "token ids, not a mixture",
            param="prompt",
        )


class GenerateRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /generate. Exactly one of text, input_ids and messages is given."""

    text: str | None = None
    input_ids: list[NonNegative] | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    chat_template_kwargs: TemplateArgs = None
    logprobs: Annotated[
        bool | None,
        Meta(
            description="Report each token's log-probability under the model's own distribution, "
            "before temperature and filters."
        ),
    ] = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling(defaults)
        return msgspec.structs.replace(params, logprobs=bool(self.logprobs))

    @property
    def prompt_field(self) -> str:
        """Which of the three the prompt came in."""
        if self.messages is not None:
            return "messages"
        return "text" if self.input_ids is None else "input_ids"

    @property
    def prompt(self) -> Prompt:
        if sum(given is not None for given in (self.text, self.input_ids, self.messages)) != 1:
            raise InvalidRequest("give exactly one of text, input_ids and messages", param="text")
        if self.chat_template_kwargs is not None and self.messages is None:
            raise InvalidRequest(
                "chat_template_kwargs is for messages", param="chat_template_kwargs"
            )
        if self.messages is not None:
            return _chat_prompt(self.messages, self.chat_template_kwargs)
        if self.text is not None:
            return TextPrompt(text=self.text)
        return token_prompt(self.input_ids, "input_ids")


def token_prompt(ids: list[Any] | None, path: str) -> TokenPrompt:
    """Raises InvalidRequest unless `ids` are int32 token ids (the vocabulary is checked later)."""
    if not ids:
        raise InvalidRequest(f"{path} has no token ids", param=path)
    for index, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < 2**31:
            got = shortened(msgspec.json.encode(token).decode(), 100)
            raise InvalidRequest(f"{path}[{index}] must be a token id, got {got}", param=path)
    return TokenPrompt(ids=ids_to_bytes(ids))


# --- responses ---------------------------------------------------------------------------------


class PromptTokensDetails(_Json, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(_Json, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, ends: list[Finished]) -> Self:
        """The sum over a call's prompts."""
        num_prompt = sum(end.num_prompt_tokens for end in ends)
        num_output = sum(end.num_output_tokens for end in ends)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(end.num_cached_tokens for end in ends)
            ),
        )


class Timings(_Json, frozen=True, kw_only=True):
    """Seconds on the scheduler's clock, and what happened on the way.

    The three phases follow one another: waiting; from the first launch to the first token; from
    there to the end.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    num_cached_tokens: int
    num_chunks: int
    num_retractions: int

    @classmethod
    def of(cls, ends: list[Finished]) -> Self:
        """The phases of the prompt that took longest, and the sums of what is counted."""
        longest = max(ends, key=lambda end: end.queued_s + end.prefill_s + end.decode_s)
        return cls(
            queued_s=round(longest.queued_s, 6),
            prefill_s=round(longest.prefill_s, 6),
            decode_s=round(longest.decode_s, 6),
            num_cached_tokens=sum(end.num_cached_tokens for end in ends),
            num_chunks=sum(end.num_chunks for end in ends),
            num_retractions=sum(end.num_retractions for end in ends),
        )


class AnswerMessage(_Json, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(_Json, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: None = None


class ChatCompletion(_Json, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings
    object: Literal["chat.completion"] = "chat.completion"


class Delta(_Json, omit_defaults=True, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(_Json, frozen=True, kw_only=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class ChatCompletionChunk(_Json, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextChoice(_Json, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Completion(_Json, frozen=True, kw_only=True):
    """A whole answer and, with one choice at a time, a chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


class Generated(_Json, frozen=True, kw_only=True):
    """The answer of /generate; in a stream the last event, whose text and lists are empty."""

    text: str
    token_ids: list[int]
    logprobs: list[float] | UnsetType = UNSET
    finish_reason: FinishReason
    stop_match: str | int | None
    usage: Usage
    timings: Timings


class GeneratedChunk(_Json, frozen=True, kw_only=True):
    text: str
    token_ids: list[int]
    logprobs: list[float] | UnsetType = UNSET


class Model(_Json, frozen=True, kw_only=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: Literal["minisgl"] = "minisgl"


class ModelList(_Json, frozen=True, kw_only=True):
    data: list[Model]
    object: Literal["list"] = "list"


class ErrorObject(_Json, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(_Json, frozen=True, kw_only=True):
    error: ErrorObject
