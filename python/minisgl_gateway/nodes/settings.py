"""The settings that must be equal on all nodes of one server."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Final

from minisgl import env, plugins
from minisgl.core.options import flag_of, options_of
from minisgl.version import __version__
from minisgl_gateway.args import GatewayArgs

TAIL_BYTES: Final = 1 << 16  # of each weight file, for the digest
WEIGHTS: Final = (".safetensors", ".gguf")
OF_THE_FILE: Final = "tensors.json"
"""The index of a GGUF file's folder, which has the time of the file, another one on each node."""

OWN: Final = frozenset(
    ("model", "model_source", "node_rank", "dist_init_addr", "dry_run", "shell", "log_level",
     "log_format", "profile_dir", "hang_timeout", "threads")
)  # fmt: skip
"""Options of which each node has its own value."""

OF_NODE_0: Final = frozenset(
    ("served_model_name", "host", "port", "num_tokenizer", "log_requests", "log_steps",
     "otlp_endpoint", "api_key", "api_key_file", "cors_origin", "allowed_host",
     "max_tokens_policy", "ssl_certfile", "ssl_keyfile", "drain_timeout", "max_queue_wait",
     "restart", "max_restarts", "no_resume", "record", "tool_call_parser", "xray_text", "dp",
     "allowed_media_folder", "allow_image_urls")
)  # fmt: skip
"""Options that only the node with HTTP uses. All nodes must agree on the others."""


def settings_of(args: GatewayArgs, folder: Path) -> dict[str, str]:
    """Return the settings of this node that must equal node 0's, by the names that users know."""
    flags = {
        flag_of(name): str(getattr(args, name))
        for name in options_of(GatewayArgs)
        if name not in OWN | OF_NODE_0
    }
    return flags | {
        "the version of minisgl": __version__,
        "the version of torch": version("torch"),
        "MINISGL_DISABLE_OVERLAP_SCHEDULING": str(int(env.overlap_disabled())),
        "MINISGL_CHECK_PLANS": str(int(env.check_plans())),
        "MINISGL_CHECK_PAGES": str(int(env.check_pages())),
        "MINISGL_DISABLE_JIT": str(int(env.jit_disabled())),
        "the plugins": plugins.digest(),
        "the checkpoint": _digest(folder, weights=not args.dummy_weight),
    }


def digest_of(args: GatewayArgs, folder: Path) -> str:
    """Return a digest of what servers with the same answers have in common."""
    settings = repr(sorted(settings_of(args, folder).items()))
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def given_of_node_0(args: GatewayArgs) -> list[str]:
    """Return the given flags that only node 0 uses, as a user types them."""
    return [
        flag_of(name)
        for name, (default, _) in options_of(GatewayArgs).items()
        if name in OF_NODE_0 and getattr(args, name) != default
    ]


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """Return a sentence about the settings that differ, or "" if none does."""
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return ""
    pairs = "; ".join(f"{n} is {theirs.get(n)} there, {ours.get(n)} on node 0" for n in names)
    rule = "All nodes must run the same version with the same flags, variables and checkpoint"
    return f"{pairs}. {rule}"


def _digest(folder: Path, *, weights: bool) -> str:
    """Return a hash of the JSON files and templates, and of the names, sizes and ends of the weight
    files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        has_weights = path.suffix in WEIGHTS
        is_index = path.name.endswith(".safetensors.index.json")
        if path.name == OF_THE_FILE or path.suffix not in (".json", ".jinja", *WEIGHTS):
            continue
        if not weights and (is_index or has_weights):
            continue  # with random weights a node may lack them
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - TAIL_BYTES, 0) if has_weights else 0)
            digest.update(f"{path.name} {size} ".encode())
            digest.update(file.read())
    return digest.hexdigest()[:12]
