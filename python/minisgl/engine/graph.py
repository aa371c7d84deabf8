"""CUDA graphs: a step of a shape that came before is replayed as one launch.

A graph contains the addresses that its kernels use. So a padded step has its inputs at the
addresses of an earlier step of its shape (`Device.upload`). All graphs use one memory pool for
intermediate tensors, since they run one after another. The output of each graph, ids or inputs of
the LM head, has its own memory.

A shape is captured lazily: its first step runs without a graph, its second is captured and
replayed. This depends only on the plans, so all ranks capture at the same step. For most shapes,
start-up runs both steps before the engine serves (`minisgl.engine.startup.graphs`).
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.paged import SHORT_CONTEXT
from minisgl.core import Plan
from minisgl.engine.device import Runner, StepSize
from minisgl.utils.logger import get_logger

logger = get_logger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 208, 256)
"""Numbers of rows. Padding rows cost little if a step takes long. 192, 224 and 240 are left out,
because the next larger size takes no longer, by the GEMMs of a layer of Qwen3-14B."""
SIZE_STEP = 64  # between sizes above these
PROMPT_TOKENS = (64, 128, 256, 512, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192)
BESIDE_PROMPTS = (0, 16, 64, 256)
"""Numbers of prompt tokens, and of decode rows beside them, of graphs with prompts. Both are few,
because all combinations are captured at the start. Start-up measures up to how many tokens a graph
is faster (`minisgl.engine.startup.graphs.choose_prompt_graphs`)."""
TOKENS_PER_PROMPT, MAX_PROMPTS = 16, 64
"""A graph of 64 tokens has rows for 4 prompts; a graph of 1,024 or more tokens has rows for 64.
There must be fewer rows than tokens, because equal numbers would mean that every token samples."""
MAX_CONTEXT = 8192
"""The longest context of a prompt in such a step, in tokens. A graph's attention splits the work as
if each prompt had this length, so a step with a longer context runs without a graph."""
MAX_NEW_PAGES = 32768  # of a step with prompts, so that they fit the staging buffers


def graph_sizes(max_rows: int) -> list[int]:
    """Return the padded numbers of rows, ascending. The last one is `max_rows`."""
    return _up_to(max_rows, (*SIZES, *range(SIZES[-1] + SIZE_STEP, max_rows, SIZE_STEP)))


class GraphRunner(Runner):
    """Mutable: the graphs that it has captured, by shape."""

    def __init__(self, max_rows: int, max_prompt_tokens: int) -> None:
        self.decode_sizes = graph_sizes(max_rows)
        self.beside_prompts = _up_to(max_rows, BESIDE_PROMPTS)
        self.prompt_sizes = _up_to(min(max_prompt_tokens, PROMPT_TOKENS[-1]), PROMPT_TOKENS)
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def padded(self, plan: Plan) -> StepSize | None:
        num_decodes, num_prompts = plan.num_decodes, plan.num_rows - plan.num_decodes
        if num_decodes > self.decode_sizes[-1]:
            return None
        if not num_prompts:
            num_rows = _at_least(num_decodes, self.decode_sizes)
            is_short = num_rows <= self.short_rows and max(plan.ends) <= SHORT_CONTEXT
            return StepSize(num_rows, 0, 0, longest=SHORT_CONTEXT if is_short else 0)
        # A size has tokens for all, and rows for all prompts.
        num_tokens = max(plan.num_tokens - num_decodes, num_prompts * TOKENS_PER_PROMPT)
        if (
            num_prompts > MAX_PROMPTS
            or num_tokens > self.prompt_sizes[-1]
            or max(plan.ends[num_decodes:]) > MAX_CONTEXT
            or sum(len(run.pages) for run in plan.new_pages) > MAX_NEW_PAGES
        ):
            return None
        num_tokens = _at_least(num_tokens, self.prompt_sizes)
        size = StepSize(
            num_decodes=_at_least(num_decodes, self.beside_prompts),
            num_prompts=min(num_tokens // TOKENS_PER_PROMPT, MAX_PROMPTS),
            num_prompt_tokens=num_tokens,
            longest=MAX_CONTEXT,
        )
        return size if size.num_tokens <= self.max_tokens else None

    def run(self, shape: Hashable | None, compute: Callable[[], Tensor]) -> Tensor:
        if shape is None:
            return compute()
        if shape not in self._seen:
            output = compute()
            self._seen.add(shape)  # only now: after a failed first run, a capture could fail
            return output
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape, compute)
        graph, output = self._graphs[shape]
        graph.replay()
        return output

    def _capture(
        self, shape: Hashable, compute: Callable[[], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        start = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self._pool, "thread_local"):
            output = compute()
        logger.debug("captured %s in %.3f s", shape, time.perf_counter() - start)
        return graph, output


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, mode: str) -> Iterator[None]:
    """Capture the kernels that the body launches on the current stream; they do not run.

    pool: the graphs' memory. mode: which CUDA calls are errors meanwhile (`capture_begin`).
    """
    graph.capture_begin(pool=pool, capture_error_mode=mode)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it only says that something failed
            graph.capture_end()
        raise
    graph.capture_end()


def _up_to(most: int, sizes: Iterable[int]) -> list[int]:
    """Return the ascending sizes that are smaller than `most`, then `most`."""
    return [*(size for size in sizes if size < most), most]


def _at_least(number: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the ascending sizes that is at least `number`."""
    return sizes[bisect_left(sizes, number)]
