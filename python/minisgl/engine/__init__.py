"""Runs plans on a device: weights, KV pool, tables, sampling.

What it is for: turning a `Plan` into sampled token ids. What it does not know: requests, queues,
text. Read `engine.py` first, then `device.py` (what differs between devices), then `cpu.py` and
`cuda.py`.
"""

from minisgl.core.args import EngineConfig
from minisgl.engine.engine import Engine

__all__ = ["Engine", "EngineConfig"]
