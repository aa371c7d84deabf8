"""Plain records that the parts of the engine hand to each other.

What it is for: `SamplingParams`, `Req`, `Plan`, `StepResult`, the events of a request, and the
tensors of one step (`Batch`, `Context`). What it does not know: how they are decided, computed or
sent. It imports torch for the type checker only, so the text workers start in milliseconds. Read
next: `minisgl.scheduler`.
"""

from minisgl.core.batch import Batch, Context, PoolBatch
from minisgl.core.batch_sampling import BatchSamplingArgs
from minisgl.core.event import Accepted, Event, Failed, Finished, FinishReason, Token
from minisgl.core.plan import PROMISED, Plan, StepFailed, StepOutcome, StepResult
from minisgl.core.req import Req
from minisgl.core.sampling import SamplingParams

__all__ = [
    "PROMISED",
    "Accepted",
    "Batch",
    "BatchSamplingArgs",
    "Context",
    "Event",
    "Failed",
    "FinishReason",
    "Finished",
    "Plan",
    "PoolBatch",
    "Req",
    "SamplingParams",
    "StepFailed",
    "StepOutcome",
    "StepResult",
    "Token",
]
