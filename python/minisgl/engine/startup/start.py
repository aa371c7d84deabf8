"""Builds an engine from its settings and makes it ready to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from minisgl.core.args import EngineConfig
from minisgl.engine.connect import closing_on_error
from minisgl.engine.device import Tuning
from minisgl.engine.engine import Engine
from minisgl.engine.startup.graphs import capture_decodes, capture_prompts, choose_prompt_graphs
from minisgl.engine.startup.measure import choose_threads, measure_image_ns, measure_step_times
from minisgl.engine.startup.warm_up import compile_kernels, load_kernels
from minisgl.utils.logger import get_logger
from minisgl.utils.start import StartClock

logger = get_logger(__name__)


def start_engine(
    config: EngineConfig,
    *,
    progress: Callable[[int, int], None] | None = None,
    clock: StartClock | None = None,
    measure_steps: bool = False,
) -> Engine:
    """Build the engine, then compile, measure and capture. Returns when all ranks are ready.

    measure_steps: also measure how long steps take (`Engine.tuning`), for the stall bound, and load
    the kernels of all steps with prompts.
    progress, clock and errors are those of `Engine`.
    """
    clock = clock or StartClock()
    engine = Engine(config, progress=progress, clock=clock)
    with closing_on_error(engine.device, engine.comm):
        tune(engine, clock, measure_steps=measure_steps)
        engine.comm.all_min(0)
    return engine


def tune(engine: Engine, clock: StartClock, *, measure_steps: bool) -> Tuning:
    """Run probes and apply the settings that they give. Returns these settings."""
    if engine.device.warm_up_rows(engine.max_running):
        compile_kernels(engine)
        if measure_steps:
            load_kernels(engine)
        clock.lap("kernels")
    tuning = engine.tuning
    # Ranks would run different steps. An encoder's steps have many tokens, so all threads are best.
    if engine.device.max_threads and engine.comm.size == 1 and not engine.model.spec.is_encoder:
        tuning = replace(tuning, num_threads=choose_threads(engine))
        engine.apply(tuning)
    replays_prompts = engine.prompts_graph_safe and bool(engine.runner.prompt_sizes)
    if replays_prompts:
        tuning = replace(tuning, graph_tokens=choose_prompt_graphs(engine))
        engine.apply(tuning)
    if measure_steps:
        if engine.comm.rank == 0:
            logger.info("measuring how long steps take")
        times = replace(measure_step_times(engine), image_ns=measure_image_ns(engine))
        tuning = replace(tuning, step_times=times)
        engine.apply(tuning)
    clock.lap("measuring")
    if engine.runner.decode_sizes:
        capture_decodes(engine)
        if replays_prompts:
            capture_prompts(engine)
    clock.lap("graphs")
    return tuning
