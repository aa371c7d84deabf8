from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers import pictures
from helpers.pictures import Sample
from helpers.seen import Eyes, start


@pytest.fixture(scope="session")
def mistral3(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return pictures.mistral3(tmp_path_factory.mktemp("mistral3") / "model")


@pytest.fixture(scope="session")
def qwen3_vl(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return pictures.qwen3_vl(tmp_path_factory.mktemp("qwen3_vl") / "model")


@pytest.fixture(scope="session")
def qwen3_5(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return pictures.qwen3_5(tmp_path_factory.mktemp("qwen3_5") / "model")


@pytest.fixture(scope="session")
def qwen3_vl_moe(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return pictures.qwen3_vl_moe(tmp_path_factory.mktemp("qwen3_vl_moe") / "model")


@pytest.fixture(scope="session")
def qwen3_5_moe(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return pictures.qwen3_5_moe(tmp_path_factory.mktemp("qwen3_5_moe") / "model")


@pytest.fixture
def eyes(mistral3: Sample) -> Iterator[Eyes]:
    engine = start(mistral3, max_prefill_length=512)
    yield Eyes(mistral3, engine)
    engine.close()
