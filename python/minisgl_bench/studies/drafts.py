"""What drafts bring, and that they cost nothing where they bring nothing.

Two `LLM`s of one model, one with `drafts="off"` and one with `drafts="auto"`, answer the same
prompts in turn; odd rounds swap the order. A workload's result is the geometric mean of the ratios
of wall seconds, off over auto, of all rounds (above 1 drafts are faster), with a bootstrap interval
of 95 %.

    again     an agent repeats its last task: the same prompts, greedy
    edit      the prompt has a list, and the answer repeats it; the client predicts nothing
    json      answers follow a schema
    chat      answers in text, at temperature 0.7, one stream to many
    random    prompts of random tokens, at temperature 1.3: nothing repeats

The exit status is 1 if an answer differs. In bfloat16 another number of rows may round a near tie
in another way, so `--dtype float32` is the test of equal answers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from minisgl import LLM, SamplingParams
from minisgl.errors import InvalidRequest
from minisgl.llm.engines import OwnEngine
from minisgl_bench.arguments import add_json, benchmark_parser, natural, naturals
from minisgl_bench.report import machine_load, write_json
from minisgl_bench.studies.paired import interval

TASKS: Final = (
    "What can you tell me about yourself?",
    "How do I start a server?",
    "Explain what a prefix cache is.",
    "What is 12 + 30?",
    "Write a short story about a lighthouse.",
    "List five animals and what they eat.",
    "How do I count tokens?",
    "Describe the sea.",
)
PEOPLE: Final = "\n".join(
    f"{index}. {name} lives in {city} and works as {job}."
    for index, (name, city, job) in enumerate(
        (
            ("Anna", "Berlin", "a baker"),
            ("Bob", "Paris", "a doctor"),
            ("Carla", "Rome", "an engineer"),
            ("David", "Madrid", "a teacher"),
            ("Emma", "Vienna", "a lawyer"),
            ("Frank", "Oslo", "a painter"),
        ),
        1,
    )
)
_TEXT: Final = {"type": "string", "maxLength": 12}
PERSON: Final = {
    "type": "object",
    "properties": {
        "first_name": _TEXT,
        "last_name": _TEXT,
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "home_address": {
            "type": "object",
            "properties": {"street_name": _TEXT, "city_name": _TEXT},
            "required": ["street_name", "city_name"],
            "additionalProperties": False,
        },
    },
    "required": ["first_name", "last_name", "age_in_years", "home_address"],
    "additionalProperties": False,
}

Ids = list[list[int]]
Work = Callable[[LLM, int, int], Ids]
"""Answers as many prompts as the first number, those of the round with the second number."""


def _tokens(outputs: Sequence[Any]) -> Ids:
    return [list(output.token_ids) for output in outputs]


def _asked(task: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": task}]


def again(llm: LLM, streams: int, round_: int) -> Ids:
    asked = [_asked(TASKS[index % len(TASKS)]) for index in range(streams)]
    return _tokens(_chat(llm, asked, SamplingParams(temperature=0.0, max_tokens=100)))


def edit(llm: LLM, streams: int, round_: int) -> Ids:
    asked = [_asked(f"List {index}, {round_}. Repeat it.\n{PEOPLE}") for index in range(streams)]
    return _tokens(_chat(llm, asked, SamplingParams(temperature=0.0, max_tokens=100)))


def json(llm: LLM, streams: int, round_: int) -> Ids:
    params = [
        SamplingParams(
            temperature=0.7,
            seed=1000 * round_ + index,
            max_tokens=100,
            structured_outputs={"json": PERSON},
        )
        for index in range(streams)
    ]
    asked = [_asked("Invent a person. Answer in JSON.")] * streams
    return _tokens(_chat(llm, asked, params))


def chat(llm: LLM, streams: int, round_: int) -> Ids:
    params = [
        SamplingParams(temperature=0.7, seed=1000 * round_ + index, max_tokens=100)
        for index in range(streams)
    ]
    asked = [_asked(TASKS[(index + round_) % len(TASKS)]) for index in range(streams)]
    return _tokens(_chat(llm, asked, params))


def noise(llm: LLM, streams: int, round_: int) -> Ids:
    rng = random.Random(round_)
    prompts = [[rng.randrange(300, 1300) for _ in range(40)] for _ in range(streams)]
    params = SamplingParams(temperature=1.3, seed=round_, max_tokens=100, ignore_eos=True)
    return _tokens(llm.generate(prompts, params))


def _chat(llm: LLM, asked: list[list[dict[str, str]]], params: Any) -> Sequence[Any]:
    try:
        return llm.chat(asked, params)
    except InvalidRequest:  # a base model has no chat template
        return llm.generate([messages[0]["content"] for messages in asked], params)


WORKS: Final[dict[str, Work]] = {
    "again": again,
    "edit": edit,
    "json": json,
    "chat": chat,
    "random": noise,
}


def main(argv: list[str]) -> int:
    parser = benchmark_parser(__name__, __doc__)
    add = parser.add_argument
    add("--model", help="a folder or file (default: the built-in model)")
    add("--dtype", default="auto", help="of both LLMs")
    add("--streams", type=naturals, default=[1, 4, 16], help="with commas")
    add("--works", default=",".join(WORKS), help="with commas")
    add("--rounds", type=natural, default=20, help="counted rounds, after two to warm up")
    add("--threads", type=natural, default=None, help="of both LLMs (default: start-up chooses)")
    add_json(parser)
    args = parser.parse_args(argv)
    load, rows, all_equal = machine_load(), [], True
    options = {"dtype": args.dtype, "threads": args.threads, "device": "cpu", "progress": False}
    with (
        LLM(args.model, num_pages=2000, drafts="off", **options) as off,
        LLM(args.model, num_pages=2000, drafts="auto", **options) as auto,
    ):
        for name in args.works.split(","):
            for streams in args.streams:
                row, is_equal = _compare(off, auto, WORKS[name], streams, args.rounds)
                all_equal &= is_equal
                rows.append({"work": name, "streams": streams, **row})
                low, high = row["interval"]
                print(
                    f"{name:8} {streams:4} streams  off/auto {row['ratio']:.3f} "
                    f"[{low:.3f}, {high:.3f}]  {row['off_tokens_per_s']:.0f} -> "
                    f"{row['auto_tokens_per_s']:.0f} tokens/s, {row['accepted']} of "
                    f"{row['drafted']} drafts, answers {'equal' if is_equal else 'DIFFER'}",
                    flush=True,
                )
    if args.json:
        result = {"load_before": load, "model": args.model and args.model.rpartition("/")[2]}
        write_json(args.json, {**result, "dtype": args.dtype, "rows": rows})
    return 0 if all_equal else 1


def _compare(
    off: LLM, auto: LLM, work: Work, streams: int, rounds: int
) -> tuple[dict[str, Any], bool]:
    """Return the row of a workload, and whether all answers are equal."""
    assert isinstance(auto._engine, OwnEngine)
    stats = auto._engine.scheduler.stats
    ratios: list[float] = []
    seconds: dict[str, float] = {"off": 0.0, "auto": 0.0}
    num_tokens, is_equal = 0, True
    before = stats.num_drafted, stats.num_accepted
    for round_ in range(-2, rounds):
        took: dict[str, float] = {}
        answers: dict[str, Ids] = {}
        sides = [("off", off), ("auto", auto)]
        for name, llm in sides if round_ % 2 else reversed(sides):
            start = time.perf_counter()
            answers[name] = work(llm, streams, round_)
            took[name] = time.perf_counter() - start
        is_equal &= answers["off"] == answers["auto"]
        if round_ < 0:
            continue
        ratios.append(took["off"] / took["auto"])
        num_tokens += sum(map(len, answers["off"]))
        for name in seconds:
            seconds[name] += took[name]
    ratio, low, high = interval(ratios)
    return {
        "ratio": round(ratio, 4),
        "interval": [round(low, 4), round(high, 4)],
        "ratios": [round(value, 4) for value in ratios],
        "off_tokens_per_s": round(num_tokens / seconds["off"], 1),
        "auto_tokens_per_s": round(num_tokens / seconds["auto"], 1),
        "drafted": stats.num_drafted - before[0],
        "accepted": stats.num_accepted - before[1],
    }, is_equal
