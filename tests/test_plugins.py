"""Manifests: rows are found by name, a stranger's too; what is wrong is said by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import plugins
from minisgl.errors import ConfigError
from minisgl.plugins import Row, find, need, row_of, rows

ACME = """
from minisgl.plugins import Row

ROWS = [Row("families", "AcmeForCausalLM", "acme_families:FAMILY", ("ACMEForCausalLM",))]
"""
MORE = """
Row('weight_formats', 'acme4', 'acme_families:read_acme4'),
Row('routes', 'acme', 'acme_server:ROUTES'),
Row('loop_observers', 'acme', 'acme_server:create_observer'),
"""
SCRIPT = """
import json, pathlib, sys
from minisgl import plugins
from minisgl.models import get_model_class, read_config
from minisgl.runtime.args import RuntimeArgs
from minisgl.runtime.observers import create_observers

print(get_model_class("ACMEForCausalLM").defaults, "acme_server" in sys.modules)
file = pathlib.Path(sys.argv[1]) / "config.json"
sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
counts = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "max_position_embeddings"), 2)
stored = {"quant_method": "acme4", "group": 32}
values = {"architectures": ["LlamaForCausalLM"], "quantization_config": stored, **sizes, **counts}
file.write_text(json.dumps(values))
print(read_config(file.parent).formats)
routes = [row.load() for row in plugins.rows("routes") if row.name == "acme"]
print([route.path for route in routes[0].router(None).routes])
print(type(create_observers(RuntimeArgs())[-1]).__name__)
"""


def stranger(folder: Path, manifest: str) -> dict[str, str]:
    """Install the distribution acme into a folder. Returns an environment that finds it."""
    (folder / "acme_manifest.py").write_text(manifest)
    (folder / "acme_families.py").write_text(
        "from dataclasses import replace\n"
        "from minisgl.models.families.dense import LLAMA\n"
        "FAMILY = replace(LLAMA, defaults={'acme': 1})\n"
        "def read_acme4(values, where, aliases):\n"
        "    return values['group'], where[-11:], aliases('lm_head')\n"
    )
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minisgl.plugins]\nacme = acme_manifest\n")
    path = os.pathsep.join([str(folder), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


def run(script: str, env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_what_a_stranger_adds_is_found_by_his_entry_point(tmp_path: Path) -> None:
    """A family, a format of weights, and the route and the observer of docs/extending.md. In one
    process, because most of it is the import of torch."""
    page = (Path(__file__).parents[1] / "docs/extending.md").read_text(encoding="utf-8")
    code = page.partition("# acme_minisgl/server.py\n")[2].partition("```")[0]
    (tmp_path / "acme_server.py").write_text(code)
    env = stranger(tmp_path, ACME.replace("ROWS = [", f"ROWS = [{MORE}"))
    done = run(SCRIPT, env, str(tmp_path))
    assert done.stdout.splitlines() == [
        "{'acme': 1} False",
        "(32, 'config.json', ['lm_head'])",
        "['/acme']",
        "Printer",
    ], done.stderr


@pytest.mark.parametrize(
    ("manifest", "wrong"),
    [
        ("raise RuntimeError('half written')", "RuntimeError: half written"),
        ("ROWS = [('families', 'X')]", "TypeError: ROWS has ('families', 'X')"),
        (ACME.replace('"families"', '"familes"'), "ValueError: there is no table 'familes'"),
    ],
)
def test_a_broken_manifest_is_one_line_with_its_distribution(
    tmp_path: Path, manifest: str, wrong: str
) -> None:
    script = "from minisgl import plugins; print(len(plugins.installed()) > 7)"
    done = run(script, stranger(tmp_path, manifest))
    assert done.stdout.strip() == "True"
    assert done.stderr.startswith(f"plugin acme is not used: {wrong}")
    assert done.stderr.count("\n") == 1


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    env = stranger(tmp_path, ACME.replace('"AcmeForCausalLM"', '"LlamaForCausalLM"'))
    script = "import sys; from minisgl import cli; sys.exit(cli.run_command(['--port', '0'], 0))"
    done = run(script, env)
    assert done.returncode not in (0, 130)
    assert "two plugins have 'LlamaForCausalLM' of families" in done.stderr
    assert "Traceback" not in done.stderr


def test_facts_choose_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    here = (
        Row("families", "on-a-gpu", "minisgl.models.families.dense:LLAMA", when={"device": "cuda"}),
        Row("families", "anywhere", "minisgl.models.families.dense:LLAMA"),
    )
    monkeypatch.setattr(plugins, "_installed", here)
    assert [row.name for row in rows("families")] == ["anywhere"]
    assert [row.name for row in rows("families", device="cuda")] == ["on-a-gpu", "anywhere"]
    assert row_of("families", "on-a-gpu", device="cpu") is None
    assert find("families", "anywhere", device="cpu") is not None
    with pytest.raises(ConfigError, match=r"^--x needs minisgl_zoo, which is not installed here$"):
        need("families", "x", "--x")


def test_no_manifest_imports_what_its_rows_name() -> None:
    script = (
        "import sys; from minisgl import plugins; plugins.installed(); "
        "print([n for n in sys.modules if n in {r.target.split(':')[0] for r in "
        "plugins.installed()}], 'torch' in sys.modules)"
    )
    done = run(script, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.stdout.strip() == "[] False", done.stderr


def test_every_row_is_of_a_table_and_every_family_loads() -> None:
    assert {row.table for row in plugins.installed()} <= set(plugins.TABLES)
    assert all(row.load() is not None for row in rows("families"))
