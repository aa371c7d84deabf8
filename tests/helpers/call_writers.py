"""Tool calls as each family's models write them."""

from __future__ import annotations

import json
from typing import Any

TYPES = {
    "get_weather": {"city": "string", "days": "integer"},
    "search": {"query": "string", "options": "object", "zip": "string"},
    "now": {},
}
WEATHER = ("get_weather", {"city": "Zürich 🏔", "days": 3})
SEARCH = ("search", {"query": 'a "b" }\n<x>', "options": {"deep": [1, {"a": "]"}]}, "zip": "01"})
NOW: tuple[str, dict[str, Any]] = ("now", {})


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(*calls: Any) -> str:
    each = [
        f'<tool_call>\n{{"name": "{n}", "arguments": {dumped(a)}}}\n</tool_call>' for n, a in calls
    ]
    return "\n".join(each)


def coder(*calls: Any) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{shown(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm(*calls: Any) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def deepseek_v3(*calls: Any) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
        for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls: Any) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def mistral(*calls: Any) -> str:
    return "".join(f"[TOOL_CALLS]{n}[CALL_ID]abc[ARGS]{dumped(a)}" for n, a in calls)


def mistral_v3(*calls: Any) -> str:
    return "[TOOL_CALLS] " + dumped([{"name": n, "arguments": a} for n, a in calls])


def pairs(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{pairs(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(pairs(v, quote) for v in value) + "]"
    return dumped(value)


def gemma(*calls: Any) -> str:
    form = "<start_function_call>call:{}{}<end_function_call>"
    return "".join(form.format(n, pairs(a, "<escape>")) for n, a in calls)


def gemma4(*calls: Any) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{n}{pairs(a, quote)}<tool_call|>" for n, a in calls)


def llama3(*calls: Any) -> str:
    return "; ".join(dumped({"name": n, "parameters": a}) for n, a in calls)


def harmony(*calls: Any) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>"
        for n, a in calls
    )


def muse_glimmer(*calls: Any) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        texts = {k: v if isinstance(v, str) else dumped(v) for k, v in arguments.items()}
        lines = [f'<atem:parameter name="{k}">{v}</atem:parameter>' for k, v in texts.items()]
        return "\n".join([f'<atem:invoke name="{name}">', *lines, "</atem:invoke>\n"])

    return "<|eom|><|start|>assistant".join(
        f" to={n}<|message|><atem:function_calls>\n{one(n, a)}</atem:function_calls>"
        for n, a in calls
    )


def seed(*calls: Any) -> str:
    return coder(*calls).replace("tool_call>", "seed:tool_call>")


def cohere(*calls: Any) -> str:
    each = [{"tool_call_id": "0", "tool_name": n, "parameters": a} for n, a in calls]
    return f"<|START_ACTION|>{dumped(each)}<|END_ACTION|>"


def phi4(*calls: Any) -> str:
    each = [{"name": n, "arguments": a} for n, a in calls]
    return f"<|tool_call|>{dumped(each)}<|/tool_call|>"


def granite(*calls: Any) -> str:
    return phi4(*calls).removesuffix("<|/tool_call|>")


def minimax(*calls: Any) -> str:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else dumped(value)

    each = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{shown(v)}</parameter>\n' for k, v in values.items())
        + "</invoke>\n"
        for name, values in calls
    ]
    return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"


def nemotron(*calls: Any) -> str:
    return f"<TOOLCALL>{dumped([{'name': n, 'arguments': a} for n, a in calls])}</TOOLCALL>"


def hunyuan(*calls: Any) -> str:
    each = dumped([{"name": n, "arguments": a} for n, a in calls])
    return f"<answer>\n<tool_calls>{each}</tool_calls>\n</answer>"


def python(*calls: Any) -> list[str]:
    return [f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls]


def lfm2(*calls: Any) -> str:
    return f"<|tool_call_start|>[{', '.join(python(*calls))}]<|tool_call_end|>"


def olmo3(*calls: Any) -> str:
    lines = "\n".join(python(*calls)).replace("True", "true")
    return f"<function_calls>\n{lines}\n</function_calls>"


WRITERS = {
    "minimax": minimax, "nemotron": nemotron, "lfm2": lfm2, "olmo3": olmo3,
    "seed": seed, "cohere": cohere, "phi4": phi4, "granite": granite,
    "hermes": hermes, "qwen3_coder": coder, "glm": glm, "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31, "mistral": mistral, "mistral_v3": mistral_v3, "gemma": gemma,
    "hunyuan": hunyuan, "gemma4": gemma4, "llama3": llama3, "harmony": harmony,
    "muse_glimmer": muse_glimmer,
}  # fmt: skip
CALLS = [[WEATHER], [NOW], [SEARCH], [WEATHER, NOW, SEARCH]]
