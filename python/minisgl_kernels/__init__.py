"""Faster twins of the core's ops: what they compute is what the core's reference says.

What it is for: GEMMs, experts, delta rules and all-reduces in CUDA C++ and Triton, packed weights,
recorded steps of a CPU. What it does not know: models, requests, files of checkpoints.
"""

from pathlib import Path
from typing import Final

CSRC: Final = Path(__file__).parent / "csrc"
"""The sources in CUDA C++."""
