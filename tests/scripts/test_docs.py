"""Documented commands: all are parsed, one block is run; `scripts/check_docs.py` runs the rest."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def docs() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "check_docs.py")))


def test_every_documented_command_exists(docs: SimpleNamespace) -> None:
    found = [block for path in docs.documents() for block in docs.blocks(path)]
    for block in found:
        docs.check(block)
    kinds = [block.kind for block in found]
    assert min(kinds.count(kind) for kind in ("run", "server", "serve")) >= 2


def test_commands_scripts_and_links_in_the_text_exist(docs: SimpleNamespace) -> None:
    prose = docs.check_prose
    found = [fault for page in prose.documents() for fault in prose.faults(page, docs.parse)]
    assert not found, "\n".join(found)
    assert sum(len(prose.commands(page)) for page in prose.documents()) > 60


def test_faults_of_a_text(docs: SimpleNamespace) -> None:
    text = """
Run `minisgl bench ofline`, `minisgl serve --no-such-flag`, `minisgl bench online --sweep auto`
or `python -m minisgl_bench.studies paired --rounds N`; see [x](no.md), [y](api.md#none) and
scripts/none.py.

  ```json {"a":
  1} ```
"""
    page = ROOT / "docs" / "clients.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, **options: text)
        found = list(docs.check_prose.faults(page, docs.parse))
    assert [fault.split(": ")[1] for fault in found] == [
        "a fence stands alone",
        "a fence stands alone",
        "minisgl bench ofline",
        "minisgl serve --no-such-flag",
        "there is no scripts/none.py",
        "there is no no.md",
        "api.md has no heading for #none",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("minisgl serve --tensor-parallel-size 2", "that is --tp here"),
        ("minisgl chat --dry-run", "unrecognized arguments: --dry-run"),
        ("minisgl rewind x", "no command of minisgl: rewind"),
        ("minisgl bench online --no-such-flag", "--no-such-flag"),
        ("python -m minisgl_bench.studies paired --no-such-flag", "--no-such-flag"),
        ("python -m minisgl --port 0", "say minisgl, without python -m"),
        ("python -m no_such_module", "no module no_such_module"),
        ("make serves", "no target of the Makefile"),
        ('pip install "minisgl[gpu]"', "no extra of pyproject.toml"),
        ("echo x | mini run", "an unknown command"),
    ],
)
def test_a_command_that_does_not_exist(docs: SimpleNamespace, line: str, says: str) -> None:
    block = docs.Block(where="here", language="bash", kind="gpu", text=line + "\n")
    with pytest.raises(ValueError, match="here") as raised:
        docs.check(block)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```bash\nmake serve\n```\n", "say how it is checked"),
        ("```bash sometimes\nmake serve\n```\n", "say how it is checked"),
        ("```\nminisgl serve\n```\n", "a block without a language: minisgl serve"),
    ],
)
def test_a_block_that_is_not_checked(docs: SimpleNamespace, text: str, says: str) -> None:
    page = ROOT / "docs" / "clients.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda path, **options: text)
        with pytest.raises(ValueError, match=says):
            docs.blocks(page)


def test_a_documented_command_works(docs: SimpleNamespace, tmp_path: Path) -> None:
    blocks = [block for block in docs.blocks(ROOT / "README.md") if block.kind == "run"]
    [bash] = [block for block in blocks if block.language == "bash"]
    runner = docs.Runner(tmp_path)
    runner.run(bash)
    failing = docs.Block(where="here", language="bash", kind="run", text="minisgl run ./none hi\n")
    with pytest.raises(ValueError, match=r"(?s)here ended with 1:\n.*there is no folder \./none"):
        runner.run(failing)
