"""Which rank this process is, and the collectives between ranks.

What it is for: `DistributedInfo` (rank and size) and `DistributedCommunicator`, which a layer is
given when it is built, so that a layer's code is the same on one rank and on many
(`minisgl.distributed.ranks` creates one). What it does not know: weights, requests, how the ranks'
processes start. Read next: `minisgl.distributed.communicator`, `minisgl.layers.linear`.
"""

from minisgl.distributed.communicator import (
    DistributedCommunicator,
    DistributedInfo,
    SingleRank,
)

__all__ = [
    "DistributedCommunicator",
    "DistributedInfo",
    "SingleRank",
]
