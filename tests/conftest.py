"""One thread for arithmetic, no GPU but in `tests/gpu`, Ctrl-C that interrupts, logging as it was.

The collector of garbage rests while the tests are imported and collected, and never visits what
lives from then on. Bytecode is cached, also by the processes that tests start, whatever the
environment says: most of them would compile the same modules again.

Clients of httpx wait a minute instead of five seconds, unless a test says otherwise, because a
process may wait that long on a busy machine.

The tests run side by side on few cores and compute on tiny tensors: with more threads each, the
threads wait for each other most of the time (18 times slower was measured). Tests that name no
device are about the CPU, also on a machine with GPUs. If a script starts the tests with `&`, they
and their processes would ignore Ctrl-C, which some tests need. A test may set up logging, as
commands do; the next test in its process starts without it.
"""

import gc
import inspect
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

import httpx
import pytest
import torch

from helpers.endless import save_endless

if TYPE_CHECKING:
    from helpers.running_server import RunningServer

GPU_TESTS = Path(__file__).parent / "gpu"

sys.dont_write_bytecode = False
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_waits = inspect.signature(httpx.Client).parameters["timeout"].default  # all calls have this one
_waits.connect = _waits.read = _waits.write = _waits.pool = 60.0


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose answers outlast a test."""
    return save_endless(tmp_path_factory.mktemp("m") / "endless")


@pytest.fixture(scope="session")
def builtin() -> "Iterator[RunningServer]":
    """A server with the built-in model, for all tests that only send requests: its start takes 3 s
    of CPU time. Its prefix cache is not empty, because other tests use it, too. It finds no counter
    of energy, no active environment, and proxies that answer nothing."""
    from helpers.running_server import RunningServer

    proxies = {"http_proxy": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"}
    with RunningServer(MINISGL_POWERCAP="/none", VIRTUAL_ENV="", **proxies) as server:
        assert server.url
        yield server


@pytest.fixture
def launch() -> "Iterator[Callable[..., RunningServer]]":
    """Starts a server with these flags and environment variables. All end with the test."""
    from helpers.running_server import RunningServer

    with ExitStack() as servers:
        yield lambda *flags, **env: servers.enter_context(RunningServer(*flags, **env))


@pytest.fixture
def sockets() -> Iterator[Path]:
    """An empty folder with a short name: `tmp_path` may be too long for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@cache
def _is_here(name: str) -> bool:
    """Return whether a package is here, or a module of it."""
    package, _, module = name.partition(".")
    return find_spec(package) is not None and (not module or find_spec(name) is not None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("needs"):
            if not _is_here(marker.args[0]):
                item.add_marker(pytest.mark.skip(reason=f"{marker.args[0]} is not here"))
    # Processes that share the tests begin with one part each, so one of them starts the server.
    uses = {i.path for i in items if isinstance(i, pytest.Function) and "builtin" in i.fixturenames}
    items.sort(key=lambda item: item.path not in uses)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Around a test and its fixtures."""
    with pytest.MonkeyPatch.context() as patch, _logging_put_back():
        if GPU_TESTS not in item.path.parents:  # nor has any process that the test starts
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
            patch.setattr(torch.cuda, "is_available", lambda: False)
        return (yield)


@contextmanager
def _logging_put_back() -> Iterator[None]:
    logger = logging.getLogger("minisgl")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
