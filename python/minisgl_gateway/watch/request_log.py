"""Logs a line for each request that ends (`--log-requests`)."""

from __future__ import annotations

from minisgl.server.args import ServerArgs
from minisgl.server.observe import EndedPrompt
from minisgl.utils.logger import get_logger
from minisgl_gateway.args import ours
from minisgl_gateway.watch.json_lines import log_fields

logger = get_logger(__name__)


class RequestLog:
    """A `PromptWatcher` that writes the log."""

    def ended(self, prompt: EndedPrompt) -> None:
        origin, end = prompt.origin, prompt.end
        cost = end and end.cost
        log_fields(
            logger,
            "request",
            id=origin.request_id,
            uid=prompt.uid,
            reason=prompt.reason,
            code=prompt.code,
            key=origin.key and origin.key.name,
            ttft_ms=prompt.first_text_s and _ms(prompt.first_text_s),
            total_ms=_ms(prompt.seconds),
            queued_ms=end and _ms(end.queued_s),
            prefill_ms=end and _ms(end.prefill_s),
            decode_ms=end and _ms(end.decode_s),
            prompt_tokens=end and end.num_prompt_tokens,
            cached_tokens=end and end.num_cached_tokens,
            output_tokens=end and end.num_output_tokens,
            chunks=end and end.num_chunks,
            retractions=end and end.num_retractions,
            device_ms=cost and _ms(cost[0]),
            energy_j=cost and round(cost[1], 6),
        )

    def close(self) -> None:
        pass


def request_log(args: ServerArgs, model: str) -> RequestLog | None:
    """Return the watcher if the options ask for it. model: its name, which is not used."""
    return RequestLog() if ours(args).log_requests else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
