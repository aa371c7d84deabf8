"""The sampling parameters of a request: how its next token is chosen, and when it ends."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from minisgl.core.sampling_checks import INT32, MAX_TOP_LOGPROBS, checked
from minisgl.errors import InvalidSampling

MAX_CHOICES = 128
"""The most choices of one prompt. They have the same parameters, but for the seed."""


Count = Annotated[int, Meta(ge=0, le=INT32)]
"""A number or an id of tokens, which the device keeps as int32."""
NumTop = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class _Checked(msgspec.StructMeta):
    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Make a record, checked. Raises InvalidSampling."""
        known: tuple[str, ...] = cls.__struct_fields__
        if args or (unknown := [name for name in fields if name not in known]):
            wrong = "values without a name" if args else ", ".join(unknown)
            hint = "n is an argument of generate, chat and stream; " if wrong == "n" else ""
            says = f"SamplingParams has no field for {wrong}; {hint}the fields are "
            raise InvalidSampling(says + ", ".join(known))
        given = {name: fields[name] for name in fields if fields[name] is not _DEFAULTS[name]}
        return super().__call__(**checked(given))


class SamplingParams(
    msgspec.Struct,
    metaclass=_Checked,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """How one request samples and stops. The values are checked when the record is made, and only
    then. Another process decodes them, which keeps the types and bounds of the fields, and trusts
    the rest.

    The filters apply in this order, as in Hugging Face's `generate`: temperature, top-k, top-p,
    min-p. Each renormalises the probabilities that the one before has left. ``temperature=0`` is
    greedy and ignores the filters. Noise is a function of (seed, index of the output token,
    vocabulary id) only, so equal logits and an equal seed give equal text in any batch.

    temperature: 0 to 2. top_k: 1 to 2**31 - 1; 0 or -1 for all. top_p: above 0, to 1.
    min_p: 0 to 1. seed: any 64-bit integer; if it is None, the server or `LLM` draws one.
    max_tokens: the most output tokens; None is as many as the context and the KV pool leave. 0 is
    allowed with `prompt_logprobs` or `echo`.
    ignore_eos: do not end at the model's end-of-sequence tokens.
    stop_token_ids: also end at these, at most 256; they are in the ids, but not in the text.
    stop: end at one of these strings, and cut the text before it; at most 16, of at most 1,024
    characters each.
    skip_special_tokens: leave special tokens out of the text.
    include_stop_str_in_output: the text includes the stop string that ended it.
    logprobs: report the log-probability of each output token in the model's own distribution,
    before temperature and filters. top_logprobs: also report this many of the most likely tokens at
    each position, at most 20.
    prompt_logprobs: report the log-probability of each prompt token except the first, and this many
    of the most likely tokens at its position, 0 to 20; None reports neither. The whole prompt is
    then computed, even if the prefix cache has it.
    echo: the text begins with the prompt.
    truncate_prompt_tokens: keep at most this many tokens of the prompt, the last ones.

    These change the logits, before temperature and filters and also for greedy requests:
    repetition_penalty: divides the positive logits of the tokens in prompt and output, multiplies
    the negative ones; 0.01 to 10. frequency_penalty, presence_penalty: subtracted from the logits
    of the output's tokens, for each occurrence and once; -2 to 2. logit_bias: token id -> the
    number that is added to its logit, -100 to 100, at most 1,024 tokens. allowed_token_ids: no
    other token is sampled. bad_words_ids: sequences of tokens that must not appear in the output:
    the last token of a sequence is not sampled after its others. bad_words: texts whose tokens
    become such sequences, with and without a space before them; at most 256 texts of at most 256
    characters. min_tokens: no end-of-sequence or stop token is sampled before this many output
    tokens. structured_outputs: the answer's form, a dictionary with one of `json` (a JSON schema),
    `json_object` (True), `regex`, `choice` (a list of texts) and `grammar` (Lark or GBNF). The
    output follows it, and the model's end of sequence is sampled only where the form is complete.

    Raises InvalidSampling, which names the field, the given value and the allowed values; also for
    a wrong type, because ``stop="abc"`` would otherwise stop at each of the three letters.
    """

    temperature: float = 1.0
    top_k: Count = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: Count | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[Count, ...] = ()
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: bool = False
    top_logprobs: NumTop = 0
    prompt_logprobs: NumTop | None = None
    echo: bool = False
    truncate_prompt_tokens: Annotated[int, Meta(ge=1)] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[Count, float] = {}
    allowed_token_ids: tuple[Count, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[Annotated[tuple[Count, ...], Meta(min_length=1)], ...] = ()
    min_tokens: Count = 0
    structured_outputs: dict[str, Any] | None = None

    def but(self, **fields: Any) -> SamplingParams:
        """Return the parameters with other values of these fields. Raises InvalidSampling."""
        return SamplingParams(**(msgspec.structs.asdict(self) | fields))

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        penalties = (self.repetition_penalty - 1, self.frequency_penalty, self.presence_penalty)
        return any(penalties)

    @property
    def changes_logits(self) -> bool:
        """Whether an option changes the model's logits before temperature and filters."""
        others = (self.logit_bias, self.allowed_token_ids, self.min_tokens, self.bad_words_ids)
        return self.has_penalties or any(others)

    @property
    def shows_prompt(self) -> bool:
        """Whether the output has text or log-probabilities of the prompt."""
        return self.echo or self.prompt_logprobs is not None

    def with_seed(self, choice: int = 0) -> SamplingParams:
        """Return the parameters of a choice: without a seed a random one, else the seed + `choice`
        (docs/api.md)."""
        if self.seed is not None and not choice:
            return self
        seed = secrets.randbits(63) if self.seed is None else (self.seed + choice) % 2**64
        return msgspec.structs.replace(self, seed=seed)

    def kept(self, ids: bytes) -> bytes:
        """Return the part of a prompt, int32 ids, that `truncate_prompt_tokens` keeps."""
        most = self.truncate_prompt_tokens
        return ids if most is None else ids[-4 * most :]


_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(SamplingParams)}
