"""Two nodes on one machine compute the tokens of one rank, and end together."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import openai
import pytest

from helpers.background import Background
from helpers.running_server import RunningServer, assert_nothing_left, free_ports
from minisgl.llm import LLM, SamplingParams

PROMPTS = ["The quick brown fox", "One rank counts pages and the other counts them too. " * 4]
NUM_TOKENS = 12
LOOPBACK = "127.0.0.1"


@pytest.fixture
def nodes(launch: Any) -> list[RunningServer]:
    """Started in the wrong order."""
    address = f"{LOOPBACK}:{free_ports(3)}"
    flags = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", address, "--num-pages", "96")
    flags += ("--hang-timeout", "600")
    started = [
        launch(
            *(*flags, "--dtype", "float32", "--node-rank", str(node)),
            MINISGL_CHECK_PLANS="1",
            MINISGL_DISABLE_OVERLAP_SCHEDULING="1",  # with it: test_ranks.py
        )
        for node in (1, 0)
    ]
    return started[::-1]


def test_two_nodes_compute_the_tokens_of_one_rank(nodes: list[RunningServer]) -> None:
    with LLM(dtype="float32", num_pages=96, progress=False) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        expected = [output.text for output in llm.generate(PROMPTS, params)]
    with nodes[0].client() as client:
        answer = client.completions.create(
            model="minisgl-builtin",
            prompt=PROMPTS,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
        assert [choice.text for choice in answer.choices] == expected
        family = [process for node in nodes for process in node.family()]
        assert len(nodes[1].family()) <= 4  # no API worker, no tokenizer: one rank and helpers
        nodes[0].process.terminate()
    assert [node.ended() for node in nodes] == [0, 0]
    is_told = [
        "only node 0 uses --port; this node does not" in node.output["err"] for node in nodes
    ]
    assert is_told == [False, True]
    for node in nodes:
        assert_nothing_left(node, family)


@pytest.mark.parametrize("victim", ["engine-1", "supervisor of node 0"])
def test_nodes_end_together(nodes: list[RunningServer], victim: str, pool: Background) -> None:
    with nodes[0].client() as client:
        assert nodes[0].url
        detokenizer = nodes[0].pid("detokenizer")
        os.kill(detokenizer, signal.SIGSTOP)  # no answer goes on
        asked = pool.submit(lambda: client.completions.create(model="minisgl-builtin", prompt="a"))
        nodes[0].wait_open(1)
        family = [process for node in nodes for process in node.family()]
        pid = nodes[1].pid(victim) if victim == "engine-1" else nodes[0].process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            asked.result(60)
        if victim == "supervisor of node 0":  # who else would have killed it
            os.kill(detokenizer, signal.SIGCONT)
        survivors = [node for node in nodes if node.process.pid != pid]
        assert [node.ended() for node in survivors] == [1] * len(survivors)
    for node in survivors:
        assert_nothing_left(node, family)
    if victim == "engine-1":
        assert "the engine-1 process was killed by signal 9" in nodes[1].output["err"]
    elif victim == "supervisor of node 0":
        assert "is gone" in nodes[1].output["err"]
