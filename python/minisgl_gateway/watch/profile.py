"""POST /start_profile and /stop_profile: a torch profile of the steps in between, on each rank."""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from fastapi import APIRouter, Response

from minisgl.core import Failed
from minisgl.errors import EngineError, MinisglError
from minisgl.message import ProfileMsg, ProfileReply
from minisgl.server.frontend import Frontend
from minisgl.server.site import Routes, Site
from minisgl.server.web import body
from minisgl.server.web.errors import ErrorObject, error_body

# The first start takes 1.3 s on 2 cores. A stop writes a trace, which may have many steps.
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 300.0


class ProfileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /stop_profile. traces: the files on the server, one per rank. trace: the first.
    requests: the X-Request-Id of each uid in the names of the steps."""

    trace: str
    traces: list[str]
    num_steps: int
    requests: dict[int, str]


class ProfileFailed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of /stop_profile if a rank failed. requests: for the other ranks' traces."""

    error: ErrorObject
    requests: dict[int, str] = {}


def router(site: Site) -> APIRouter:
    frontend = site.frontend
    routes = APIRouter()

    @routes.post("/start_profile")
    async def start_profile() -> Response:
        """Start a torch profile of the engine. 409 if one runs already."""
        replies = await _ask(frontend, "start", START_TIMEOUT_S)
        if not all(reply.failed for reply in replies):
            frontend.observer.note_ids()
        if error := _failure(replies):
            raise error
        return body.response({"status": "profiling"})

    @routes.post("/stop_profile")
    async def stop_profile() -> Response:
        """Write the traces into --profile-dir, and return their names. 409 if no profile runs."""
        replies = await _ask(frontend, "stop", STOP_TIMEOUT_S)
        requests = frontend.observer.noted_ids()
        if error := _failure(replies):
            status, failed = error_body(error)
            frontend.observer.answered(failed.error.code)
            return body.response(ProfileFailed(error=failed.error, requests=requests), status)
        traces = [reply.trace or "" for reply in replies]
        profile = ProfileAnswer(
            trace=traces[0], traces=traces, num_steps=replies[0].num_steps, requests=requests
        )
        return body.response(profile)

    return routes


async def _ask(
    frontend: Frontend, action: Literal["start", "stop"], timeout_s: float
) -> list[ProfileReply]:
    """Return one reply for each rank, in order. A rank that does not answer in time has failed.

    Raises EngineError if a worker is gone.
    """
    trips = frontend.round_trips
    message = ProfileMsg(seq=trips.new_seq(), action=action)
    answers = await trips.ask(message, trips.num_ranks, timeout_s)
    by_rank = {answer.rank: answer for answer in answers if isinstance(answer, ProfileReply)}
    too_late = EngineError(f"no answer from the engine within {timeout_s:g} s")
    failed = Failed.of(message.seq, too_late)
    return [
        by_rank.get(rank) or ProfileReply(seq=message.seq, rank=rank, failed=failed)
        for rank in range(trips.num_ranks)
    ]


def _failure(replies: list[ProfileReply]) -> MinisglError | None:
    """Return None if no rank failed, the 4xx that all ranks report, or an error with the reports of
    all ranks."""
    failed = replies[0].failed
    if all(reply.failed == failed for reply in replies) and (not failed or failed.status < 500):
        return failed.to_error() if failed else None
    return EngineError("; ".join(map(_report, sorted(replies, key=lambda r: r.failed is None))))


def _report(reply: ProfileReply) -> str:
    if reply.failed:
        return f"rank {reply.rank} failed: {reply.failed.message}"
    if reply.trace:
        return f"rank {reply.rank} wrote {reply.trace}"
    return f"rank {reply.rank} is profiling; POST /stop_profile ends it"


ROUTES: Final = Routes(router)
