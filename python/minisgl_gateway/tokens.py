"""POST /tokenize and /detokenize: text to token ids and back, without the model."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from minisgl.errors import InvalidRequest
from minisgl.message import Prompt, TextPrompt, ids_from_bytes
from minisgl.server.api.answers import token_name
from minisgl.server.api.chat import ChatRequest
from minisgl.server.api.messages import Message, TemplateArgs
from minisgl.server.api.schema import token_prompt
from minisgl.server.site import Routes, Site, operation
from minisgl.server.strict import Json
from minisgl.server.web import body
from minisgl_gateway.codec import decode, encode, key_number
from minisgl_gateway.codec_answers import check_count
from minisgl_gateway.turns import tools_of


class TokenizeRequest(Json, frozen=True, kw_only=True):
    """POST /tokenize. Exactly one of prompt and messages is given."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: TemplateArgs = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="For prompt; left out: true. A chat template writes its own.")
    ] = None
    return_token_strs: bool | None = None

    @property
    def encoded(self) -> Prompt:
        """The prompt to encode. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", param="prompt")
        if self.prompt is not None:
            for name in _OF_CHATS:
                if getattr(self, name) is not None:
                    raise InvalidRequest(f"{name} needs messages, not prompt", param=name)
            return TextPrompt(text=self.prompt)
        if self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for prompt: the chat template writes the special tokens",
                param="add_special_tokens",
            )
        chat = ChatRequest(
            messages=self.messages or [],
            tools=tools_of(self.tools or ()),
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        chat.refuse_unsupported()
        return chat.split_prompt


_OF_CHATS: Final = (
    "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class Tokenized(Json, frozen=True, kw_only=True):
    """max_model_len: the most tokens of prompt and answer."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Json, frozen=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Any]


class Detokenized(Json, frozen=True, kw_only=True):
    prompt: str


def router(site: Site) -> APIRouter:
    frontend, model = site.frontend, site.model
    routes = APIRouter()

    @routes.post("/tokenize", **operation(TokenizeRequest, Tokenized))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of the prompt of a chat."""
        asked = await body.read(request, TokenizeRequest)
        model.check(asked.model)
        is_plain = asked.add_special_tokens is False
        reply = await encode(
            frontend,
            asked.encoded,
            key_number(request.scope),
            is_plain=is_plain,
            with_pieces=bool(asked.return_token_strs),
        )
        ids = ids_from_bytes(reply.ids).tolist()
        names = [token_name(piece) for piece in reply.pieces] if asked.return_token_strs else None
        answer = Tokenized(
            count=len(ids), max_model_len=frontend.context_length, tokens=ids, token_strs=names
        )
        return body.response(answer)

    @routes.post("/detokenize", **operation(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included."""
        asked = await body.read(request, DetokenizeRequest)
        model.check(asked.model)
        check_count(len(asked.tokens), frontend.context_length, "tokens")
        ids = token_prompt(asked.tokens, "tokens").ids if asked.tokens else b""
        size, highest = frontend.info.get("vocab_size"), max(asked.tokens, default=0)
        if size is not None and highest >= size:
            raise InvalidRequest(
                f"tokens must be token ids between 0 and {size - 1}, got {highest}", param="tokens"
            )
        text = await decode(frontend, ids, key_number(request.scope))
        return body.response(Detokenized(prompt=text))

    return routes


ROUTES: Final = Routes(router, (TokenizeRequest, Tokenized, DetokenizeRequest, Detokenized))
