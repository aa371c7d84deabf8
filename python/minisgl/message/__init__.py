"""The records that cross process boundaries, and their encoding.

What it is for: one place that says what may travel, strictly typed: an unknown tag, an unknown or
ill-typed field is an error at the door of the receiver. What it does not know: sockets (see
`minisgl.utils.zmq`) and what the receiver does with a record. Read next: `minisgl.tokenizer`.
"""

from minisgl.message.records import (
    AbortBackendMsg,
    AbortMsg,
    AcceptedReply,
    ChatPrompt,
    DetokenizeMsg,
    ExitMsg,
    FailedReply,
    FinishedReply,
    FrontendMsg,
    PingMsg,
    PongMsg,
    Prompt,
    SchedulerMsg,
    StopMsg,
    TextPrompt,
    TextReply,
    TokenizeMsg,
    TokenPrompt,
    UserMsg,
    UserReply,
    decoder,
    encode,
    ids_from_bytes,
    ids_to_bytes,
)

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "AcceptedReply",
    "ChatPrompt",
    "DetokenizeMsg",
    "ExitMsg",
    "FailedReply",
    "FinishedReply",
    "FrontendMsg",
    "PingMsg",
    "PongMsg",
    "Prompt",
    "SchedulerMsg",
    "StopMsg",
    "TextPrompt",
    "TextReply",
    "TokenPrompt",
    "TokenizeMsg",
    "UserMsg",
    "UserReply",
    "decoder",
    "encode",
    "ids_from_bytes",
    "ids_to_bytes",
]
