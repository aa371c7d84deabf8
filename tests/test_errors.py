"""An error keeps its class and fields when it crosses a process, and says what can be changed."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import pkgutil
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

import minisgl
import minisgl_gateway
from helpers.sent_errors import ERRORS
from minisgl.core import Failed
from minisgl.errors import AdapterLost, EngineError, InvalidRequest, MinisglError, RequestError
from minisgl.llm.keywords import in_keywords
from minisgl.server.errors import DeadlineExceeded


def test_an_error_keeps_its_class_and_fields_across_a_process() -> None:
    command = [sys.executable, "-m", "helpers.sent_errors"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=120)
    records = msgspec.msgpack.decode(done.stdout, type=list[Failed])
    for sent, record in zip(ERRORS, records, strict=True):
        got = record.to_error()
        assert type(got) is type(sent)
        assert str(got) == str(sent)
        assert got.status == sent.status
        names = (*sent.fields, *(["param"] if isinstance(sent, RequestError) else []))
        assert [getattr(got, name) for name in names] == [getattr(sent, name) for name in names]


def test_an_error_can_be_pickled_and_copied() -> None:
    """A worker of a `multiprocessing.Pool` sends the errors of its `LLM` so. An error that cannot
    be read there leaves the pool waiting for ever."""
    lost = AdapterLost("gone", digest="d", folder="f")
    named = InvalidRequest("wrong", param="n")
    named.message = "prompt 1: wrong"
    for error in (*ERRORS, lost, named, DeadlineExceeded(2.5)):
        for got in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(got), str(got), vars(got)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize(("status", "kind"), [(415, InvalidRequest), (504, EngineError)])
def test_a_code_without_a_class_keeps_its_status(status: int, kind: type[MinisglError]) -> None:
    error = Failed(uid=0, message="m", code="odd", status=status).to_error()
    assert (type(error), error.code, error.status) == (kind, "odd", status)


def test_an_error_of_another_library_is_an_engine_error() -> None:
    error = Failed.of(0, KeyError("k")).to_error()
    assert (type(error), str(error)) == (EngineError, "KeyError: 'k'")


def test_no_two_classes_have_one_code() -> None:
    for package in (minisgl, minisgl_gateway):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2] in ("errors", "proxy", "fleet"):
                importlib.import_module(module.name)
    todo, codes = [RequestError, EngineError], Counter[str]()
    while todo:
        kind = todo.pop()
        codes.update([vars(kind)["code"]] if "code" in vars(kind) else [])
        todo += kind.__subclasses__()
    assert [code for code, count in codes.items() if count > 1] == []


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("use at most --tp 4", "use at most tp=4"),
        ("try --dtype bfloat16 or float32", "try dtype='bfloat16' or float32"),
        ("--num-pages and --memory-ratio both", "num_pages and memory_ratio both"),
        ("choose --attn fa,triton: then", "choose attn='fa,triton': then"),
        ("leave --ep out, or say --device cpu.", "leave ep out, or say device='cpu'."),
        ("raise --max-queued-requests", "raise --max-queued-requests"),
    ],
)
def test_advice_for_an_llm_names_keywords(flags: str, keywords: str) -> None:
    assert in_keywords(flags) == keywords
