"""Two ranks as two threads: layers shard by the communicator's size, with no code of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from model_harness import VOCAB, Runner, Sequence, load, make_reference, random_ids
from test_model_families import SIZES
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from minisgl.distributed import DistributedCommunicator, DistributedInfo, SingleRank
from minisgl.errors import ConfigError
from minisgl.kernel.ops import Ops
from minisgl.models import ModelConfig, build_model


class ThreadRank(DistributedCommunicator):
    """One of the ranks that share `slots` and `barrier`."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        super().__init__(DistributedInfo(rank, len(slots)))
        self.slots, self.barrier = slots, barrier

    def _exchange(
        self, x: torch.Tensor, join: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.slots[self.rank] = x
        self.barrier.wait(timeout=30)
        result = join(self.slots)
        self.barrier.wait(timeout=30)
        return result

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange(x, lambda slots: torch.stack(slots).sum(0))

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self._exchange(x, lambda slots: torch.cat(slots, dim))

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return self._exchange(x, lambda slots: slots[source].clone())


def ranks(size: int) -> list[ThreadRank]:
    slots, barrier = [torch.empty(0)] * size, threading.Barrier(size)
    return [ThreadRank(rank, slots, barrier) for rank in range(size)]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}),
        # One key/value head for two ranks, and tied embeddings.
        Qwen3Config(
            **{**SIZES, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
        ),
    ],
    ids=["llama-biases", "qwen3-one-kv-head"],
)
def test_two_ranks_compute_what_one_does(config: PreTrainedConfig, tmp_path: Path) -> None:
    make_reference(config).save_pretrained(tmp_path)

    def run(comm: DistributedCommunicator) -> torch.Tensor:
        with torch.inference_mode():
            sequence = Sequence(random_ids(11), 5)
            Runner(load(tmp_path, comm=comm)).generate([sequence], chunk=4)
            return torch.cat(sequence.logits)

    alone = run(SingleRank())
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, ranks(2)))
    assert together[0].shape == (15, VOCAB)
    assert torch.equal(together[0], together[1])
    torch.testing.assert_close(together[0], alone, rtol=1e-4, atol=1e-4)


def test_shares_of_two_ranks_are_the_whole(tmp_path: Path) -> None:
    reference = make_reference(LlamaConfig(**SIZES))
    reference.save_pretrained(tmp_path)
    weights = reference.state_dict()
    shares = [load(tmp_path, comm=comm) for comm in ranks(2)]
    checked = set()
    for parameters in zip(*(model.parameters() for model in shares), strict=True):
        tensors = [getattr(parameter.owner, parameter.attr) for parameter in parameters]
        row = 0
        for parts in zip(*(parameter.parts for parameter in parameters), strict=True):
            part = parts[0]
            sizes = [p.local_shape[0] for p in parts]
            pieces = [t[row : row + n] for t, n in zip(tensors, sizes, strict=True)]
            row += sizes[0]
            replicated = part.stop - part.start == part.shape[part.axis]
            joined = pieces[0] if replicated else torch.cat(pieces, part.axis)
            assert torch.equal(joined, weights[part.name]), part.name
            assert replicated == ("norm" in part.name), part.name
            checked.add(part.name)
        assert not tensors[1][row:].any()
    assert checked == set(weights)


@pytest.mark.parametrize(
    ("size", "message"),
    [(3, "4 query heads cannot be shared by 3 ranks"), (8, "4 query heads cannot be shared by 8")],
)
def test_ranks_that_do_not_divide_are_refused(size: int, message: str, tmp_path: Path) -> None:
    make_reference(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=message):
        build_model(config, dtype=torch.float32, ops=Ops(), comm=ranks(size)[0])
