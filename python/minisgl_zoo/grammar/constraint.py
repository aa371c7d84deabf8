"""The grammar of an answer with reasoning, required tool calls or structured content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from minisgl.core import SamplingParams
from minisgl.errors import InvalidSampling
from minisgl.tokenizer.tokenizer import Tokenizer
from minisgl_zoo.calls.known import CALLS, REASONING, message_format
from minisgl_zoo.calls.parser import AnswerForm
from minisgl_zoo.grammar import calls
from minisgl_zoo.grammar.answer import AnswerGrammar
from minisgl_zoo.grammar.calls import Tool
from minisgl_zoo.grammar.closed import closed
from minisgl_zoo.grammar.compile import answer_grammar, check_schemas, compiled, problem
from minisgl_zoo.grammar.pairs import pairs_call


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """How the answer to one prompt is parsed, and what a grammar must enforce in it.

    form: None if the answer can only be text. tools: the tools that may be called. choice: "auto",
    "required", or the name of the tool that must be called. is_parallel: whether an answer that
    must call may have several calls. thinking_budget: the largest number of tokens of reasoning;
    None is no limit.
    """

    form: AnswerForm | None = None
    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    is_parallel: bool = False
    thinking_budget: int | None = None

    def resolve(self, sampling: SamplingParams, tokenizer: Tokenizer) -> tuple[str, str]:
        """Return the answer's grammar and the JSON of its form; each is "" if there is none.

        Raises InvalidSampling for a grammar that cannot be compiled.
        """
        if self.form and (sampling.echo or sampling.prompt_logprobs is not None):
            name = "echo" if sampling.echo else "prompt_logprobs"
            raise InvalidSampling(
                f"{name} cannot be combined with tools or reasoning: the answer has parts",
                param=name,
            )
        form = "" if self.form is None else msgspec.json.encode(self.form).decode()
        must_call = self.choice != "auto"
        if self.form is None or not (
            sampling.structured_outputs or must_call or self.thinking_budget is not None
        ):
            content = sampling.structured_outputs
            return compiled(content) if content else "", form
        return constraint(self, self.form, sampling, tokenizer), form


def constraint(
    plan: AnswerPlan, form: AnswerForm, sampling: SamplingParams, tokenizer: Tokenizer
) -> str:
    """Return the text of the grammar: reasoning, then tool calls, structured content, or any text.
    Where an answer may but need not call tools, it is calls or structured content. An answer that
    must call has no text, so none that could have a form.

    Raises InvalidSampling if it cannot be compiled, or if two options exclude each other.
    """
    content = sampling.structured_outputs
    must_call = plan.choice != "auto"
    if content:
        compiled(content)  # its error names the part that is wrong
    if plan.thinking_budget is not None and sampling.allowed_token_ids is not None:
        raise InvalidSampling(
            "allowed_token_ids cannot be combined with thinking_budget, which forces the end of "
            "reasoning; leave one of them out",
            param="allowed_token_ids",
        )
    if must_call:
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
            if getattr(sampling, name):
                raise InvalidSampling(
                    f"{name} cannot be combined with a tool_choice that requires a call", param=name
                )
    grammar = AnswerGrammar(token_id=partial(added_token_id, tokenizer))
    lead = ""
    messages = message_format(form.reasoning)
    if messages:
        lead = grammar.message(*messages.thinking, budget=plan.thinking_budget)
    elif form.reasoning:
        begin, end = REASONING[form.reasoning]
        lead = grammar.reasoning(begin, end, is_open=form.is_open, budget=plan.thinking_budget)
    bodies, may_call = [], must_call or bool(content and plan.tools)
    if may_call:
        try:
            tools = _closed(plan.tools)
        except InvalidSampling:
            if must_call:
                raise
            tools = _closed([(tool, _loose(schema)) for tool, schema in plan.tools])
        bodies.append(_calls(grammar, replace(plan, tools=tools), form.calls))
    if content and not must_call:
        body = grammar.sub(answer_grammar(content))
        bodies.append(f"{grammar.literal(messages.answer)} {body}" if messages else body)
    text = grammar.finish(f"{lead} ({' | '.join(bodies) or '<[*]>*'})")
    if reason := problem(text):
        param = "tools" if may_call else "structured_outputs"
        raise InvalidSampling(f"{param} cannot be used: {reason}", param=param)
    return text


def _closed(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools with closed schemas. Raises InvalidSampling for one that is not enforced."""
    schemas = {f"tools.{tool}.parameters": schema for tool, schema in tools}
    check_schemas(schemas)
    names = (tool for tool, _ in tools)
    return tuple(
        zip(names, (closed(schema, path) for path, schema in schemas.items()), strict=True)
    )


def _loose(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the names and types of the arguments. Without a form, a model that may but
    need not call writes arguments freely, so a schema that is not enforced is no reason to refuse
    them."""
    kept: dict[str, Any] = {key: schema[key] for key in ("type", "required") if key in schema}
    declared = schema.get("properties")
    for name, part in declared.items() if isinstance(declared, dict) else ():
        types = {"type": part["type"]} if isinstance(part, dict) and "type" in part else {}
        kept.setdefault("properties", {})[name] = types
    return kept


def added_token_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of `text` if it is an added token that llguidance keeps apart from text; else
    None."""
    id: int | None = tokenizer.backend.token_to_id(text)
    is_tag = text.startswith("<") and text.endswith(">")
    if id is None or not (id in tokenizer.special_ids or is_tag):
        return None
    return id if id in tokenizer.backend.get_added_tokens_decoder() else None


def _calls(grammar: AnswerGrammar, plan: AnswerPlan, name: str) -> str:
    """Return Lark for one call, or for one or more if parallel calls are allowed and `choice` names
    no tool."""
    tools = plan.tools
    is_one = not plan.is_parallel or plan.choice not in ("auto", "required")
    if messages := message_format(name):  # one call: another would be in a message of its own
        if messages.argument:
            return calls.tagged_call(
                grammar, tools, messages.header, messages.argument, messages.footer
            )
        return calls.named_call(grammar, tools, messages.header, messages.footer)
    form = CALLS[name]
    begin, end, keys = form.begin, form.end, (form.name_key, form.key)
    if form.is_list:
        return calls.list_of_calls(grammar, tools, keys, begin, end, is_one=is_one)
    if form.is_bare:
        return calls.object_call(grammar, tools, keys, "", "")
    if form.syntax == "object":
        call = calls.object_call(grammar, tools, keys, begin, end)
    elif form.syntax == "named":
        call = calls.named_call(grammar, tools, form.header, form.footer)
    elif form.syntax == "pairs":
        call = pairs_call(grammar, tools, begin, end, form.quote)
    else:
        call = calls.tagged_call(grammar, tools, form.header, form.argument, form.footer)
    before, after = (grammar.literal(text) if text else "" for text in form.section)
    several = f"({call})" if is_one else f'({call}) (("\\n")? ({call}))*'
    return f"{before} {several} {after}"
