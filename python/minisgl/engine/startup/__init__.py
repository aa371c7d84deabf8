"""Starts an engine: builds it, compiles kernels, measures steps, captures graphs.

What it is for: `start_engine`, the only function that builds an engine for serving. What it does
not know: requests. It uses the engine through `launch`; the engine does not import it. Read
`start.py` first.
"""

from minisgl.engine.startup.start import start_engine

__all__ = ["start_engine"]
