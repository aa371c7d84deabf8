"""The grammar of an answer with reasoning, forced tool calls or structured content."""

from __future__ import annotations

from functools import partial
from typing import Final

from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling
from minisgl.grammar import calls
from minisgl.grammar.answer import AnswerGrammar
from minisgl.grammar.compile import answer_grammar, checked_schema, compiled, problem
from minisgl.grammar.pairs import pairs_call
from minisgl.tokenizer.answers import AnswerPlan
from minisgl.tokenizer.parse.formats import HARMONY, Calls, call_format, reasoning_marks
from minisgl.tokenizer.parse.parser import AnswerForm
from minisgl.tokenizer.tokenizer import Tokenizer

LISTS: Final = ("mistral_v3", "granite", "cohere", "nemotron")
"""Formats whose calls are one list of JSON objects. Calls in Python's syntax are written as such a
list, too, as grammars know JSON; LFM2 also writes it where it is asked to."""


def constraint(
    plan: AnswerPlan, form: AnswerForm, sampling: SamplingParams, tokenizer: Tokenizer
) -> str:
    """Return the text of the grammar: reasoning, then tool calls, structured content, or any text.

    Raises InvalidSampling if it cannot be compiled, and for options that exclude one another.
    """
    content = sampling.structured_outputs
    must_call = plan.choice != "auto"
    if content:
        compiled(content)  # names the part that is wrong
    if must_call:
        for name in ("structured_outputs", "ignore_eos", "min_tokens", "allowed_token_ids"):
            if getattr(sampling, name):
                raise InvalidSampling(
                    f"{name} cannot be combined with a tool_choice that requires a call", param=name
                )
    grammar = AnswerGrammar(token_id=partial(added_token_id, tokenizer))
    lead = ""
    if form.reasoning == HARMONY:
        lead = grammar.harmony_reasoning(plan.thinking_budget)
    elif form.reasoning:
        begin, end = reasoning_marks(form.reasoning)
        lead = grammar.reasoning(begin, end, is_open=form.is_open, budget=plan.thinking_budget)
    if must_call:
        for tool, schema in plan.tools:
            checked_schema(schema, f"tools.{tool}.parameters")
        body = _calls(grammar, plan, form.calls)
    elif content:
        body = grammar.sub(answer_grammar(content))
        if form.reasoning == HARMONY:
            body = f"{grammar.literal('<|channel|>final<|message|>')} {body}"
    else:
        body = "<[*]>*"
    text = grammar.finish(f"{lead} {body}")
    if reason := problem(text):
        param = "tools" if must_call else "structured_outputs"
        raise InvalidSampling(f"{param} cannot be used: {reason}", param=param)
    return text


def added_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of `text` if it is an added token that llguidance does not treat as text; else
    None."""
    id: int | None = tokenizer.backend.token_to_id(text)
    is_tag = text.startswith("<") and text.endswith(">")
    if id is None or not (id in tokenizer.special_ids or is_tag):
        return None
    return id if id in tokenizer.backend.get_added_tokens_decoder() else None


def _calls(grammar: AnswerGrammar, plan: AnswerPlan, name: Calls) -> str:
    """Return Lark for one call, or for one or more if parallel calls are allowed and `choice` names
    no tool."""
    tools = plan.tools
    is_one = not plan.is_parallel or plan.choice != "required"
    if name == HARMONY:
        header = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        return calls.named_call(grammar, tools, "", header, "")
    form = call_format(name)
    begin, end = form.begin, form.end
    if form.is_list or form.syntax == "python" or name in LISTS:
        keys, most = (form.name_key, form.key or "arguments"), 1 if is_one else None
        return calls.list_of_calls(grammar, tools, keys, begin, end, most)
    if form.is_bare:
        return calls.object_call(grammar, tools, form.key, "", "")
    if form.syntax == "object":
        call = calls.object_call(grammar, tools, form.key, begin, end, form.name_key)
    elif form.syntax == "named":
        header = form.header or f"NAME{form.separator}"
        if name == "deepseek_v3":
            header = "function<｜tool▁sep｜>NAME\n```json\n"
        call = calls.named_call(
            grammar, tools, begin, header, f"\n```{end}" if name == "deepseek_v3" else end
        )
    elif form.syntax == "pairs":
        call = pairs_call(grammar, tools, begin, end, form.quote)
    elif not isinstance(name, str):
        item = f"{form.key}KEY{form.key_end}{form.value_begin}VALUE{form.value_end}"
        call = calls.tagged_call(grammar, tools, begin, form.header, item, end)
    elif name == "minimax":
        item = '<parameter name="KEY">VALUE</parameter>\n'
        call = calls.tagged_call(grammar, tools, "\n" + begin, 'NAME">\n', item, end)
    elif name == "glm":
        item = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
        call = calls.tagged_call(grammar, tools, begin, "NAME\n", item, end)
    else:
        line = "" if name == "seed" else "\n"
        item = f"<parameter=KEY>{line}VALUE{line}</parameter>\n"
        header = "\n<function=NAME>\n"
        call = calls.tagged_call(grammar, tools, begin, header, item, f"</function>\n{end}")
    before, after = (grammar.literal(text) if text else "" for text in form.section)
    several = f"({call})" if is_one else f'({call}) (("\\n")? ({call}))*'
    return f"{before} {several} {after}"
