"""The tables of README.md and docs/performance.md are what the results say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import results_table as table  # noqa: E402 # of the line before


@pytest.mark.parametrize(
    ("name", "rows", "flag"),
    [("README.md", table.SHORT, " --short"), ("docs/performance.md", table.ROWS, "")],
)
def test_a_page_has_the_table_that_the_results_make(
    name: str, rows: tuple[table.Row, ...], flag: str
) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    made = table.with_table(page, table.make_table(rows=rows))
    assert page == made, f"run scripts/results_table.py{flag} --write {name}"


def test_what_is_missing_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--results", str(tmp_path)]) == 2
    assert "peers-h200.json" in capsys.readouterr().err.replace("\n", "")
    shutil.copy(table.RESULTS / "peers-h200.json", tmp_path)
    assert table.main(["--results", str(tmp_path)]) == 2
    assert "offline-qwen3-0.6b.json" in capsys.readouterr().err.replace("\n", "")
    page = tmp_path / "page.md"
    page.write_text("no marks")
    assert table.main(["--write", str(page)]) == 2
    assert page.read_text() == "no marks"


@pytest.mark.parametrize(("door", "has_peers"), [("LLM.generate", True), ("inner loop", False)])
def test_a_peer_stands_only_beside_the_same_door(
    door: str, has_peers: bool, tmp_path: Path
) -> None:
    shutil.copytree(table.RESULTS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "offline-qwen3-0.6b.json"
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row["door"] = door
    path.write_text(json.dumps(content))
    made = table.make_table(tmp_path).splitlines()
    (row,) = (line for line in made if "common prefix" in line)
    assert row.split(" | ")[2] == door
    assert ("0.829 s" in row) is has_peers
    assert ("0.581 to 0.658 s" in row) is has_peers
    (http,) = (line for line in made if "Qwen3-0.6B" in line and "| HTTP |" in line)
    assert "15,620 tok/s" in http
    assert "22,458" not in http, "a peer's offline figure beside our server"


def test_the_public_door_wins_over_the_inner_loop(tmp_path: Path) -> None:
    shutil.copytree(table.RESULTS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "offline-qwen3-14b.json"
    content = json.loads(path.read_text())
    inner = [{**row, "door": "inner loop"} for row in content["rows"]]
    public = [{**row, "door": "LLM.generate", "tokens_per_s": 1.0} for row in content["rows"]]
    path.write_text(json.dumps({**content, "rows": inner + public}))
    rows = [line for line in table.make_table(tmp_path).splitlines() if "Qwen3-14B" in line]
    assert all("| LLM.generate | 1 tok/s |" in row for row in rows)


def test_the_heads_name_versions_and_dates() -> None:
    head = table.make_table().partition("\n")[0]
    for name in ("mini-sglang 20fcd7f (2026-11-20", "vLLM 0.26.0 (2026-11", "SGLang 0.5.17 (2026"):
        assert name in head
