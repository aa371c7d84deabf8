"""What a server does for the other nodes: the rows of the table `nodes`."""

from __future__ import annotations

import gc
from pathlib import Path

from minisgl.runtime.signals import Signals
from minisgl.runtime.workers import Workers
from minisgl.server.launch import workers_until_end
from minisgl.server.model import find_model
from minisgl.utils.logger import get_logger
from minisgl_gateway.args import GatewayArgs
from minisgl_gateway.nodes.join import gather_nodes, join_node_0, with_network
from minisgl_gateway.nodes.settings import given_of_node_0, settings_of

logger = get_logger(__name__)


def gather(args: GatewayArgs, folder: Path, workers: Workers) -> None:
    """On node 0, before the workers start: wait for the other nodes."""
    links = gather_nodes(args, settings_of(args, folder))
    workers.nodes = links
    workers.endpoints = with_network(workers.endpoints, args, links)


def serve_node(args: GatewayArgs, signals: Signals) -> int:
    """Run this node's ranks for as long as node 0 serves. Returns the exit code."""
    if flags := given_of_node_0(args):
        logger.info("only node 0 uses %s; this node does not", ", ".join(flags))
    try:
        with workers_until_end(signals) as workers:
            model = find_model(args)
            link = join_node_0(args, settings_of(args, model.folder))
            workers.nodes = [link]
            workers.endpoints = with_network(workers.endpoints, args, [link])
            ranks = args.local_ranks
            logger.info(
                "starting ranks %d to %d; HTTP and tokenizers are node 0's", ranks[0], ranks[-1]
            )
            workers.start_engine(model.resolved(args))
            workers.wait_ready()
            gc.freeze()  # see `WorkerStatus.ready`
            logger.info("this node is ready")
            workers.wait_ended()
    except KeyboardInterrupt:
        logger.info("stopped")
    return 0
