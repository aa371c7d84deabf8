"""`minisgl selfcheck`: checks that a request has the same answer under each condition.

On the user's model and machine, each request is first answered alone in an empty cache, and then
again under each condition: cached, in batches, beside aborts, without overlap, in chunks,
retracted, with drafts, without CUDA graphs, on one rank. Random weights depend on the number of
ranks, so they are not compared on one. `minisgl_bench.comparer` defines when two answers are equal.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec.structs
import numpy as np
import torch

from minisgl.builtin import model_path
from minisgl.core.args import EngineConfig
from minisgl.core.options import options_of
from minisgl.core.sampling import SamplingParams
from minisgl.errors import ConfigError, EngineError, RequestError
from minisgl.kernel.sampling import gumbel_noise
from minisgl.llm.engines import OwnEngine
from minisgl.llm.llm import LLM
from minisgl.llm.output import RequestOutput
from minisgl.runtime.scheduling import can_draft
from minisgl.server.args import server_options
from minisgl.server.flags import Parser, add_model, server_args, server_parser
from minisgl.utils.hf import resolve_checkpoint
from minisgl_bench.comparer import ROUNDING, ROUNDING_8_BIT, Comparer, Condition
from minisgl_zoo.drafts.rule import DraftRule

LENGTHS: Final = (1, 3, 17, 40, 64, 97, 150, 330)
"""The lengths of the prompts, in turn: below, at and above the usual page sizes, in tokens."""

BATCHES: Final = (2, 4, 8, 16, 32, 64)


class SelfCheck:
    """Asks under each condition, and compares the answers. Mutable: it counts namespaces.

    num_requests: half of them are greedy, half seeded. num_tokens: the length of each answer. say:
    called with a line for each condition.
    """

    def __init__(
        self,
        args: EngineConfig,
        *,
        num_requests: int = 32,
        num_tokens: int = 32,
        batches: Sequence[int] = BATCHES,
        say: Callable[[str], object] = print,
    ) -> None:
        folder = resolve_checkpoint(
            args.model or str(model_path()), source=args.model_source, weights=not args.dummy_weight
        )
        self._args = replace(args, model=str(folder))
        config = json.loads((folder / "config.json").read_text())
        config |= config.get("text_config") or {}
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = args.dtype if args.dtype != "auto" else stored.removeprefix("torch.")
        self.rounding = ROUNDING.get(dtype, ROUNDING["bfloat16"])
        if args.kv_cache_dtype != "auto":
            self.rounding = max(self.rounding, ROUNDING_8_BIT)
        self._batches = batches
        self._say = say
        self._num_namespaces = 0
        self._can_draft = False  # not known before the first engine runs
        limit = min(int(config["max_position_embeddings"]), args.max_seq_len or 2**31)
        vocab = int(config["vocab_size"])
        draw = np.random.default_rng(0)
        lengths = [min(LENGTHS[i % len(LENGTHS)], limit - num_tokens) for i in range(num_requests)]
        if min(lengths) < 1:
            raise ConfigError(
                f"a context of {limit} tokens is too short for {num_tokens} of output"
            )
        self._prompts = [draw.integers(vocab, size=length).tolist() for length in lengths]
        self._params = [
            SamplingParams(
                temperature=float(i % 2),
                seed=i,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                max_tokens=num_tokens,
                ignore_eos=True,
                logprobs=True,
            )
            for i in range(num_requests)
        ]

    def run(self) -> list[Condition]:
        """Compare under all conditions, and return them."""
        with self._llm() as llm:
            own = llm._engine.engine if isinstance(llm._engine, OwnEngine) else None
            self._can_draft = own is not None and can_draft(own)
            self._comparer = Comparer(
                [self._ask(llm, [i], self._fresh())[0] for i in range(len(self._prompts))],
                self.rounding,
                partial(self._scores, llm),
            )
            conditions = list(self._of_one_engine(llm))
            for name, changes in self._other_engines().items():
                conditions.append(self._of_another_engine(name, changes))
        return conditions

    def _other_engines(self) -> dict[str, dict[str, Any]]:
        """Return the conditions that need an engine of their own, and its other arguments."""
        args, num_pages = self._args, self._pages_that_run_out()
        engines: dict[str, dict[str, Any]] = {
            "without overlap": {},
            "in chunks": {"max_prefill_length": 2 * args.page_size},
            "retracted": {"num_pages": num_pages, "memory_ratio": None},
        }
        if self._can_draft:
            engines["with drafts"] = {
                "drafts": self._drafters,
                "draft_model": args.draft_model,
            }
        if args.cuda_graph_max_bs > 0 and args.device != "cpu" and torch.cuda.is_available():
            engines["without CUDA graphs"] = {"cuda_graph_max_bs": 0}
        if args.tp > 1 and not args.dummy_weight:
            engines["on one rank"] = {"tp": 1, "ep": False}
        return engines

    def _of_one_engine(self, llm: LLM) -> Iterator[Condition]:
        everything = range(len(self._prompts))
        with self._condition("again") as condition:
            for i in everything:
                self._comparer.compare(condition, [i], self._ask(llm, [i], self._fresh()))
        yield condition

        with self._condition("cached") as condition:
            salt, num_cached = self._fresh(), 0
            for i in everything:
                self._ask(llm, [i], salt)
            for i in everything:
                outputs = self._ask(llm, [i], salt)
                num_cached += outputs[0].num_cached_tokens
                self._comparer.compare(condition, [i], outputs)
            condition.note = f", {num_cached} tokens from the cache"
        yield condition

        for size in self._batches:
            with self._condition(f"in batches of {size}") as condition:
                indices = [i % len(everything) for i in range(max(size, len(everything)))]
                for start in range(0, len(indices) - size + 1, size):
                    batch = indices[start : start + size]
                    self._comparer.compare(condition, batch, self._ask(llm, batch, self._fresh()))
            yield condition

        with self._condition("beside aborts") as condition:
            with self._aborting(llm) as num_aborted:
                outputs = self._ask(llm, everything, self._fresh())
            condition.note = f", {num_aborted[0]} requests aborted"
            self._comparer.compare(condition, everything, outputs)
        yield condition

    @contextmanager
    def _condition(self, name: str) -> Iterator[Condition]:
        """Let the block fill a condition, then print it. The error of a request ends the block."""
        condition = Condition(name=name)
        try:
            yield condition
        except (EngineError, RequestError) as error:
            condition.failure = str(error)
        self._say(str(condition))

    def _of_another_engine(self, name: str, changes: dict[str, Any]) -> Condition:
        everything = range(len(self._prompts))
        without_overlap = _overlap_disabled(name == "without overlap")
        with self._condition(name) as condition:
            with without_overlap, self._llm(**changes) as llm:
                own = llm._engine.scheduler if isinstance(llm._engine, OwnEngine) else None
                retracting = own if name == "retracted" else None
                if retracting:  # start without room to grow
                    retracting.requests.watermark_tokens = 0
                if own and name == "with drafts":
                    # The tree guesses these answers: right ones, and those of other seeds.
                    self._ask(llm, everything, "")
                    self._ask(llm, everything, "", first_seed=len(everything))
                    rule = own._drafts
                    assert isinstance(rule, DraftRule)
                    rule.take_all()
                outputs = self._ask(llm, everything, "")
                if own and own.stats.num_drafted:
                    num_drafted, num_accepted = own.stats.num_drafted, own.stats.num_accepted
                    condition.note = f", {num_accepted} of {num_drafted} drafts right"
                if retracting:
                    condition.note = f", {retracting.stats.num_retractions} retractions"
            self._comparer.compare(condition, everything, outputs)
        return condition

    def _llm(self, **changes: Any) -> LLM:
        options = {name: getattr(self._args, name) for name in options_of(EngineConfig)}
        return LLM(**(options | {"drafts": "off", "draft_model": None} | changes), progress=False)

    @property
    def _drafters(self) -> str:
        """The drafters of one condition; the others have none."""
        return "tree,ngram" if self._args.drafts in ("auto", "off") else self._args.drafts

    def _pages_that_run_out(self) -> int:
        """Return half of the pages that all requests need, but enough for the longest."""
        num_tokens = self._params[0].max_tokens or 0
        needs = [
            -(-(len(prompt) + num_tokens + 1) // self._args.page_size) for prompt in self._prompts
        ]
        return max(sum(needs) // 2, max(needs) + 1)

    def _fresh(self) -> str:
        """Return a namespace of the prefix cache that is not used yet."""
        self._num_namespaces += 1
        return f"selfcheck-{self._num_namespaces}"

    def _ask(
        self, llm: LLM, indices: Sequence[int], salt: str, first_seed: int = 0
    ) -> list[RequestOutput]:
        return llm.generate(
            [self._prompts[i] for i in indices],
            [msgspec.structs.replace(self._params[i], seed=first_seed + i) for i in indices],
            cache_salt=salt,
        )

    def _scores(
        self, llm: LLM, request: int, answer: Sequence[int], tokens: Sequence[int]
    ) -> dict[int, float]:
        """Return the scores of `tokens` after the first tokens of the request's answer, `answer`.

        Each is computed alone in an empty cache, as a prompt's log-probability: with random weights
        a token may not be among the most likely ones, so top_logprobs would not have it.
        """
        params, scores = self._params[request], {}
        ids = [*self._prompts[request], *answer]
        scored = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        for token in tokens:
            (output,) = llm.generate([[*ids, token]], scored, cache_salt=self._fresh())
            scores[token] = (output.prompt_logprobs or [])[-1] or 0.0
        if not params.temperature:
            return scores
        at = torch.tensor([params.seed]), torch.tensor([len(answer)])
        (noise,) = gumbel_noise(*at, max(tokens) + 1)
        return {token: scores[token] / params.temperature + float(noise[token]) for token in tokens}

    @contextmanager
    def _aborting(self, llm: LLM) -> Iterator[list[int]]:
        """In this block, requests begin and are aborted. Yields their number, in a list."""
        ended, num_aborted = threading.Event(), [0]
        salt = self._fresh()

        def work() -> None:
            while not ended.is_set():
                index = num_aborted[0] % len(self._prompts)
                stream = llm.stream(self._prompts[index], self._params[index], cache_salt=salt)
                next(iter(stream))
                stream.close()
                num_aborted[0] += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield num_aborted
        finally:
            ended.set()
            thread.join()


def selfcheck_parser() -> Parser:
    """Return the parser of `minisgl selfcheck`."""
    others = options_of(server_options()).keys() - options_of(EngineConfig).keys()
    about = "Check that a request has the same answer whatever happens around it."
    parser = server_parser("minisgl selfcheck", about, without=others)
    add_model(parser)
    return parser


def selfcheck(argv: Sequence[str], began: float) -> int:
    """Run `minisgl selfcheck`. Returns the exit code."""
    parser = selfcheck_parser()
    args = server_args(parser, parser.parse_all(argv))
    try:
        return run_selfcheck(args)
    except (ConfigError, EngineError) as error:
        print(f"minisgl selfcheck: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run_selfcheck(args: EngineConfig) -> int:
    """Check, and print the comparisons. Returns the exit code: 1 if an answer differs."""
    check = SelfCheck(args)
    conditions = check.run()
    num_ties = sum(len(condition.ties) for condition in conditions)
    wrong = [condition.name for condition in conditions if condition.differs]
    print(
        f"\n{sum(each.num_requests for each in conditions)} answers were compared; "
        f"{num_ties} near ties (within {2 * check.rounding:g} nats)"
    )
    if wrong:
        print(f"answers differ {', '.join(wrong)}: this is a bug, or damaged hardware or weights")
        return 1
    print("every request has the same answer under each condition")
    return 0


@contextmanager
def _overlap_disabled(disabled: bool) -> Iterator[None]:
    name = "MINISGL_DISABLE_OVERLAP_SCHEDULING"
    before = os.environ.get(name)
    if disabled:
        os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
