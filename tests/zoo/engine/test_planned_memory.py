"""The memory table against what an engine holds, for each kind of family."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.family_cases import CASES, SIZES
from helpers.model_harness import make_reference
from minisgl.core import SamplingParams
from minisgl.distributed import SingleRank
from minisgl.engine import Engine, EngineConfig
from minisgl.kernel.ops import Ops
from minisgl.message import UserMsg, ids_to_bytes
from minisgl.models import build_model
from minisgl.models.loading.reading import read_config
from minisgl.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.checkpoint import write_checkpoint
from minisgl_bench.fakes import InstantExecutor
from minisgl_bench.shapes import SHAPES
from minisgl_zoo.cache_groups.manager import GroupedCacheManager

NAMES = (
    *("llama", "phi3-window-old", "gemma3", "gemma4-shared", "gemma4-experts", "gpt-oss"),
    *("qwen3-moe", "glm4-lite-moe", "qwen3.5", "qwen3.5-moe", "lfm3", "nemotron-3", "falcon-h1"),
)
BIG = {"vocab_size": 4001, "hidden_size": 256, "max_position_embeddings": 1024}
"""So large that page tables and the like are less than a hundredth."""


def held_bytes() -> int:
    """The bytes of all tensors of this process; views of one memory are counted once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of objects that this only looks at
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_holds_what_was_planned(name: str, tmp_path: Path) -> None:
    config_class, changes, *_ = CASES[name]
    sizes = {**SIZES, **changes, **BIG}
    if "vocab_size_per_layer_input" in sizes:
        sizes["vocab_size_per_layer_input"] = BIG["vocab_size"]
    make_reference(config_class(**sizes)).save_pretrained(tmp_path)
    before = held_bytes()
    engine = Engine(
        EngineConfig(model=str(tmp_path), device="cpu", num_pages=256, max_running_requests=8)
    )
    try:
        planned = engine.memory.weight_bytes + engine.memory.kv_bytes
        assert planned <= held_bytes() - before <= 1.01 * planned
    finally:
        engine.close()


def test_gemma_holds_as_many_pages_of_a_window_at_32k_as_the_formula_says(tmp_path: Path) -> None:
    """`CacheGroup.most_pages`: the window and the chunk of a prompt. From the second page
    of its output on, a request holds the window and a page that is begun."""
    page_size, chunk, context = 16, 2048, 32_768
    write_checkpoint(tmp_path, SHAPES["gemma-4-31b"], weights=False)
    config = read_config(tmp_path)
    model = build_model(config, dtype=torch.bfloat16, ops=Ops(), comm=SingleRank())
    groups = tuple(replace(group, num_pages=context // page_size) for group in model.layout.groups)
    assert [group.kind for group in groups] == ["full", "window"]
    scheduler = Scheduler(
        SchedulerConfig(
            groups=groups, page_size=page_size, max_seq_len=context, vocab_size=1000,
            eos_ids=frozenset(), max_prefill_tokens=chunk, max_running=1,
        )
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    ids = [index % 997 for index in range(context - 200)]
    scheduler.handle(UserMsg(uid=0, ids=ids_to_bytes(ids), sampling=sampling))
    executor, cache = InstantExecutor(), scheduler.requests.cache
    assert isinstance(cache, GroupedCacheManager)
    (tail,), window = cache._tails, groups[1]
    prompt_pages, decode_pages = [], []
    while (plan := scheduler.plan()) is not None:
        held = window.num_pages - tail.num_available
        (decode_pages if plan.num_decodes else prompt_pages).append(held)
        scheduler.commit(plan, executor.launch(plan).wait())
    assert len(decode_pages) > 190
    formula = window.most_pages(context, chunk, page_size)
    assert 0.9 * formula <= max(prompt_pages) <= formula
    assert set(decode_pages[page_size:]) <= {window.window // page_size + more for more in (0, 1)}
