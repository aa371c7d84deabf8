"""The command line: every flag is checked here, once, and becomes a field of `ServerArgs`.

A flag whose default is "measured" or "the checkpoint's" is None until the engine, which knows the
device and the model, resolves it and logs what it chose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn
from urllib.parse import urlsplit

from minisgl import __version__
from minisgl.server.node_map import is_interface, ports_of_nodes

DEFAULT_PORT: Final = 1919


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """What the server was asked for; the fields are the flags. It travels to every worker.

    model: a folder, or a model id until the supervisor has fetched it; None is the built-in model.
    offline: no flag; of an `LLM`, whose requests come all at once, and whose tokens nobody reads as
    they come.
    """

    model: str | None = None
    model_source: Literal["huggingface", "modelscope"] = "huggingface"
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    host: str = "127.0.0.1"
    port: int | None = None
    num_tokenizer: int = 1

    page_size: int = 16
    cache: Literal["radix", "naive"] = "radix"
    max_prefill_length: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 1024
    max_seq_len: int | None = None

    device: Literal["auto", "cpu", "cuda"] = "auto"
    attn: str = "auto"
    memory_ratio: float | None = None
    num_pages: int | None = None
    cuda_graph_max_bs: int = 256
    dummy_weight: bool = False

    tp: int = 1
    ep: bool = False
    disable_pynccl: bool = False
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None

    dry_run: bool = False
    shell: bool = False
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    log_format: Literal["text", "json"] | None = None
    log_requests: bool = False
    log_steps: str | None = None
    profile_dir: str = "minisgl-profiles"
    otlp_endpoint: str | None = None

    offline: bool = False

    @property
    def http_port(self) -> int:
        """0 for any free one."""
        if self.port is not None:
            return self.port
        return 0 if self.shell else DEFAULT_PORT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message}\n(see {self.prog} --help)\n")


def parse_args(argv: Sequence[str] | None = None) -> ServerArgs:
    """Exits with code 2 and a sentence when a flag is wrong; with 0 after --help or --version."""
    parser = _Parser(
        prog="python -m minisgl",
        description="Serve a language model over OpenAI's HTTP API.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {__version__}")
    defaults = ServerArgs()

    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help="a checkpoint folder, or a model id such as Qwen/Qwen3-0.6B (default: the built-in "
        "model, a small one that needs no download)",
    )
    group.add_argument(
        "--model-source",
        choices=("huggingface", "modelscope"),
        help=f"where model ids are fetched from (default: {defaults.model_source})",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        type=_name,
        help="the name that requests give the model (default: what --model says; of a folder, "
        "its last part)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="number format of weights and KV cache; auto is the checkpoint's, with a warning "
        f"where this CPU computes slowly in it (default: {defaults.dtype})",
    )

    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        help=f"address to listen on; 0.0.0.0 for all networks (default: {defaults.host})",
    )
    group.add_argument(
        "--port",
        type=integer(0, 65535),
        help=f"port to listen on; 0 for any free one (default: {DEFAULT_PORT}; with --shell: 0)",
    )
    group.add_argument(
        "--num-tokenizer",
        metavar="N",
        type=integer(0, 64),
        help="tokenizer processes; 0 lets the detokenizer's process do both: a process fewer, "
        "but a very long prompt then holds up the text of running streams "
        f"(default: {defaults.num_tokenizer})",
    )

    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--page-size",
        metavar="N",
        type=integer(1, 1024),
        help=f"tokens per page of the KV cache (default: {defaults.page_size})",
    )
    group.add_argument(
        "--cache",
        choices=("radix", "naive"),
        help="radix reuses the KV of equal prompt prefixes, naive reuses nothing "
        f"(default: {defaults.cache})",
    )
    group.add_argument(
        "--max-prefill-length",
        metavar="N",
        type=integer(1),
        help="prompt tokens computed in one step at most; fewer disturb running streams less, "
        "more use the device better (default: from the measured rate)",
    )
    group.add_argument(
        "--max-running-requests",
        metavar="N",
        type=integer(1),
        help=f"requests computed together at most (default: {defaults.max_running_requests})",
    )
    group.add_argument(
        "--max-queued-requests",
        metavar="N",
        type=integer(1),
        help="requests waiting at most; further ones are answered with HTTP 429, and a call of "
        "more prompts than this with 400 "
        f"(default: {defaults.max_queued_requests})",
    )
    group.add_argument(
        "--max-seq-len",
        metavar="N",
        type=integer(2),
        help="tokens of prompt and answer together at most (default: the checkpoint's context)",
    )

    group = parser.add_argument_group("engine")
    group.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        help=f"what computes; auto takes the best that is there (default: {defaults.device})",
    )
    group.add_argument(
        "--attn",
        metavar="NAME[,NAME]",
        type=_attention,
        help="attention backend: torch is the plain reference; cpu the compiled kernel of a CPU; "
        "triton and fa (FlashAttention 3, on Hopper, package sglang-kernel) are a GPU's. Two names "
        "are one for prompts, which may be fa2 (FlashAttention 2, which comes with torch; fa means "
        "it on other GPUs) or fi (FlashInfer), and one for decode, which may be trtllm "
        "(TensorRT-LLM's). auto is the fastest that works here, of cpu and torch on a CPU, "
        "of triton and fa on a GPU "
        f"(default: {defaults.attn})",
    )
    group.add_argument(
        "--memory-ratio",
        metavar="R",
        type=_ratio,
        help="share of the free memory that weights, activations and KV cache together may use, "
        "above 0 and at most 1 (default: 0.5 on a CPU, 0.9 on a GPU)",
    )
    group.add_argument(
        "--num-pages",
        metavar="N",
        type=integer(1),
        help="pages of the KV cache, instead of --memory-ratio (default: from --memory-ratio)",
    )
    group.add_argument(
        "--cuda-graph-max-bs",
        metavar="N",
        type=integer(0),
        help="steps of up to N decoding requests are replayed as CUDA graphs; 0 for none; a CPU "
        f"has none (default: {defaults.cuda_graph_max_bs})",
    )
    group.add_argument(
        "--dummy-weight",
        action="store_true",
        help="random weights instead of the checkpoint's, to measure speed; the folder needs "
        "config.json and a tokenizer",
    )

    group = parser.add_argument_group("many devices")
    group.add_argument(
        "--tp",
        metavar="N",
        type=integer(1, 1024),
        help="tensor parallelism: N processes share each layer of the model, each on a GPU of its "
        "own; on a CPU they share the cores; at most as many as the model has query heads "
        f"(default: {defaults.tp})",
    )
    group.add_argument(
        "--ep",
        action="store_true",
        help="expert parallelism: the --tp ranks share the experts of a mixture, not each expert's "
        "columns; for models that have experts",
    )
    group.add_argument(
        "--disable-pynccl",
        action="store_true",
        help="leave all collectives between GPUs to torch.distributed: the same tokens, slower",
    )
    group.add_argument(
        "--nnodes",
        metavar="N",
        type=integer(1, 1024),
        help="machines that share the --tp ranks equally; start the same command on each, with its "
        f"--node-rank; for trusted networks only (default: {defaults.nnodes})",
    )
    group.add_argument(
        "--node-rank",
        metavar="R",
        type=integer(0, 1023),
        help="which of the machines this is; 0 is the one that serves HTTP "
        f"(default: {defaults.node_rank})",
    )
    group.add_argument(
        "--dist-init-addr",
        metavar="HOST:PORT",
        type=_address,
        help="where the machines meet: an IPv4 address or name of node 0's interface, and the "
        "first of 1 + --tp free ports (default: none)",
    )

    group = parser.add_argument_group("running")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="check config.json, the tokenizer and which tensors the weights' files hold, print "
        "where the memory would go, and exit",
    )
    group.add_argument(
        "--shell", action="store_true", help="serve quietly and chat in this terminal"
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="what is logged (default: $MINISGL_LOG_LEVEL or info; with --shell: warning)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        help="one line of text, or one JSON object, per log entry (default: $MINISGL_LOG_FORMAT or "
        "text)",
    )
    group.add_argument(
        "--log-requests",
        action="store_true",
        help="log a line for each request that ends: its X-Request-Id, times and tokens",
    )
    group.add_argument(
        "--log-steps",
        metavar="FILE",
        help="write a JSON line per step of the engine to FILE, which is emptied first: times of "
        "each part, rows, tokens (default: none)",
    )
    group.add_argument(
        "--profile-dir",
        metavar="DIR",
        help="folder for the traces of POST /start_profile and /stop_profile, made when the first "
        f"is written (default: {defaults.profile_dir})",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        type=_collector,
        help="send a span for each request to this OpenTelemetry collector over HTTP, such as "
        "http://localhost:4318; needs pip install 'minisgl[otel]' (default: none)",
    )

    given = vars(parser.parse_args(argv))
    if given.get("dry_run") and given.get("shell"):
        parser.error("--dry-run serves nothing, so it does not go with --shell")
    if "num_pages" in given and "memory_ratio" in given:
        parser.error("--num-pages and --memory-ratio both size the KV cache: give one of them")
    args = ServerArgs(**given)
    if error := _wrong_nodes(args):
        parser.error(error)
    return args


def _wrong_nodes(args: ServerArgs) -> str | None:
    """What is wrong with the flags for several machines."""
    if args.nnodes == 1:
        if args.node_rank or args.dist_init_addr:
            return "--node-rank and --dist-init-addr need --nnodes 2 or more"
    elif args.node_rank >= args.nnodes:
        return f"--node-rank counts from 0 to {args.nnodes - 1}, got {args.node_rank}"
    elif args.dist_init_addr is None:
        return f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT, the same on each machine"
    elif args.tp % args.nnodes:
        return f"--tp {args.tp} ranks cannot be shared equally by --nnodes {args.nnodes} machines"
    elif args.dry_run:
        return "--dry-run looks at one machine, so it does not go with --nnodes"
    elif args.shell and args.node_rank:
        return "--shell chats with the server, which is on node 0"
    elif args.node_rank == 0 and args.http_port in (taken := ports_of_nodes(args)):
        return (
            f"--port {args.http_port} is one of the ports, from {taken[0]} to {taken[-1]}, that "
            f"the nodes use among themselves (--dist-init-addr {args.dist_init_addr}); choose "
            "another"
        )
    return None


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=96)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of a flag that is a whole number, `low` to `high`."""
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}")
        return value

    return parse


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_host = bool(host) and ":" not in host and is_interface(host)
    if not is_host or not port.isascii() or not port.isdigit():
        raise argparse.ArgumentTypeError(
            f"must be HOST:PORT with the IPv4 address or name of one interface, got {text!r}"
        )
    if not 1 <= int(port) < 65000:  # some ports above it are used
        raise argparse.ArgumentTypeError(f"must have a port from 1 to 64999, got {text!r}")
    return text


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text!r}")
    return value


def _attention(text: str) -> str:
    # As `minisgl.attention` has them, which this process does not import.
    prefill, comma, decode = text.partition(",")
    is_pair = prefill in ("triton", "fa", "fa2", "fi") and decode in ("triton", "fa", "trtllm")
    is_one = not comma and text in ("auto", "torch", "cpu", "triton", "fa")
    if not (is_one or is_pair):
        raise argparse.ArgumentTypeError(
            "must be auto, torch, cpu, triton or fa, or PREFILL,DECODE with triton, fa, fa2 or fi, "
            f"and triton, fa or trtllm; got {text!r}"
        )
    return text


def _collector(text: str) -> str:
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # as of a port of letters, or of an IPv6 address without its end
        is_url = False
    if not is_url or any(character.isspace() for character in text):
        raise argparse.ArgumentTypeError(
            "must be the URL of an OTLP/HTTP collector, such as http://localhost:4318, "
            f"got {text!r}"
        )
    return text


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"must be a printable name, got {text!r}")
    return text
