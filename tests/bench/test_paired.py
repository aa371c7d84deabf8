"""`benchmarks paired`: its statistics, a fake worker, and this checkout against itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.errors import ConfigError
from minisgl_bench.lengths import Workload
from minisgl_bench.run import main
from minisgl_bench.studies import paired

ROOT = Path(__file__).parents[2]

FAKE = """
import json, os, sys
root = os.environ["PYTHONPATH"].split(os.pathsep)[0]
side = os.path.basename(os.path.dirname(root))
print(json.dumps({"package": root + "/minisgl", "on_gpu": False}), flush=True)
for number, line in enumerate(sys.stdin):
    work = json.loads(line)
    if number == int(os.environ.get("DIES_AT", -1)):
        sys.exit(3)
    ids = [[sum(prompt)] * length for prompt, length in zip(work["prompts"], work["outputs"])]
    if side == os.environ.get("WRONG"):
        ids[0][-1] += 1
    cpu_s = {"old": 2.0, "new": 1.0}[side] * (1 + number / 100)
    print(json.dumps({"wall_s": 7.0, "cpu_s": cpu_s, "ids": ids}), flush=True)
"""


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two checkouts that hold nothing, and a worker that computes nothing: `old` takes twice."""
    for side in paired.SIDES:
        (tmp_path / side / "python" / "minisgl").mkdir(parents=True)
        (tmp_path / side / "python" / "minisgl" / "__init__.py").touch()
    (tmp_path / "worker.py").write_text(FAKE)
    monkeypatch.setattr(paired, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(paired, "write_checkpoint", lambda *_, **__: None)
    return [str(tmp_path / side) for side in paired.SIDES]


def test_ratios_are_new_over_old_in_rounds(roots: list[str], tmp_path: Path) -> None:
    path = tmp_path / "paired.json"
    flags = ["--shape", "tiny", "--workloads", "single,prefill", "--rounds", "3"]
    assert main(["paired", *roots, *flags, "--json", str(path)], "minisgl_bench.studies") == 0
    result = json.loads(path.read_text())
    assert (result["clock"], result["greedy_equal"]) == ("cpu", True)
    for row in result["rows"]:
        assert row["ratio_low"] == row["ratio"] == row["ratio_high"] == 0.5
        assert len(row["old_s"]) == len(row["new_s"]) == 3
        assert row["equal_answers"] == row["answers"] == 4 * row["requests"]


def test_other_greedy_ids_are_an_error(
    roots: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WRONG", "new")
    flags = ["--shape", "tiny", "--workloads", "single", "--rounds", "1"]
    assert main(["paired", *roots, *flags], "minisgl_bench.studies") == 1
    out = capsys.readouterr().out
    assert "greedy answers to 4 prompts: DIFFERENT" in out
    assert "0 of 2 answers equal" in out


def test_a_worker_that_dies_is_named(
    roots: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIES_AT", "2")
    assert main(["paired", *roots, "--shape", "tiny"], "minisgl_bench.studies") == 2
    err = capsys.readouterr().err
    assert "checkout ended with exit status 3; its error is above" in err


def test_another_package_than_the_checkouts_is_refused(tmp_path: Path, roots: list[str]) -> None:
    (tmp_path / "worker.py").write_text(FAKE.replace('root + "/minisgl"', '"/other/minisgl"'))
    root = Path(roots[0])
    with (
        pytest.raises(ConfigError, match="but Python found /other/minisgl"),
        paired.llm_worker("old", root, tmp_path, {}, paired._environment(root, None)),
    ):
        pytest.fail("it started")


def test_a_root_without_the_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["paired", str(tmp_path), str(ROOT)], "minisgl_bench.studies")
    assert "is not the root of a checkout" in capsys.readouterr().err


def test_the_interval_holds_the_mean_and_shrinks() -> None:
    few = paired.interval([0.9, 1.1, 1.0])
    many = paired.interval([0.9, 1.1, 1.0] * 10)
    assert few == paired.interval([0.9, 1.1, 1.0])
    for mean, low, high in (few, many):
        assert mean == pytest.approx((0.9 * 1.1) ** (1 / 3))
        assert low < mean < high
    assert many[2] - many[1] < (few[2] - few[1]) / 2
    assert paired.verdict(0.9, 0.99) == "faster"
    assert paired.verdict(1.01, 1.02) == "slower"
    assert paired.verdict(0.99, 1.01) == "no difference seen"


def test_pages_hold_the_common_prefix_once() -> None:
    work = Workload(name="w", requests=((4160, 32),) * 128, temperature=0.0, shared=4096)
    # 4,096 common tokens; each of 128 requests has 96 of its own and two pages of room.
    assert paired.num_pages([work]) == (4096 + 128 * (96 + 32)) // 16 + 1


def test_a_checkout_against_itself(tmp_path: Path) -> None:
    path = tmp_path / "paired.json"
    flags = ["--shape", "tiny", "--scale", "0.02", "--workloads", "throughput,shared"]
    paths = [str(ROOT), str(ROOT), *flags, "--rounds", "1", "--threads", "1", "--json", str(path)]
    assert main(["paired", *paths], "minisgl_bench.studies") == 0
    result = json.loads(path.read_text())
    assert result["greedy_equal"]
    assert all(row["equal_answers"] == row["answers"] for row in result["rows"])


def test_a_checkout_against_itself_through_http(tmp_path: Path) -> None:
    path = tmp_path / "paired.json"
    flags = ["--door", "http", "--shape", "tiny", "--scale", "0.02", "--workloads", "streams"]
    flags += ["--rounds", "1", "--threads", "1", "--client-processes", "1"]
    paths = [str(ROOT), str(ROOT), *flags, "--new-flags=--max-stall-ms 9", "--json", str(path)]
    assert main(["paired", *paths], "minisgl_bench.studies") == 0
    result = json.loads(path.read_text())
    assert result["greedy_equal"]
    (row,) = result["rows"]
    assert all(row[side]["itl_max"] > 0 < row[side]["ttft_p50"] for side in paired.SIDES)
