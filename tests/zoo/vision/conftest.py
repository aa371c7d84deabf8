from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import pictures
from helpers.pictures import Sample
from helpers.seen import Eyes, start


def _saved(make: Callable[[Path], Sample]) -> Any:
    """Return the fixture of a checkpoint, by the name of its family."""

    @pytest.fixture(scope="session", name=make.__name__)
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Sample:
        return make(tmp_path_factory.mktemp(make.__name__) / "model")

    return fixture


mistral3 = _saved(pictures.mistral3)
qwen3_vl = _saved(pictures.qwen3_vl)
qwen3_5 = _saved(pictures.qwen3_5)
qwen3_vl_moe = _saved(pictures.qwen3_vl_moe)
qwen3_5_moe = _saved(pictures.qwen3_5_moe)
gemma3 = _saved(pictures.gemma3)
gemma4 = _saved(pictures.gemma4)
gemma4_e2b = _saved(pictures.gemma4_e2b)
gemma4_unified = _saved(pictures.gemma4_unified)
lfm2_vl = _saved(pictures.lfm2_vl)
lfm2_vl_moe = _saved(pictures.lfm2_vl_moe)


@pytest.fixture
def eyes(mistral3: Sample) -> Iterator[Eyes]:
    engine = start(mistral3, max_prefill_length=512)
    yield Eyes(mistral3, engine)
    engine.close()
