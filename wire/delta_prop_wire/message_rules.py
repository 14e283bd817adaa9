"""The rules of messages on a connection: one table from (speaker, phase, message) to a violation or None.

Credit is not part of the table: `credit_window.py` has it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Decide,
    DeltaFrame,
    Describe,
    FindOffsets,
    Frame,
    Get,
    Heartbeat,
    Hello,
    Nack,
    Request,
    Subscribe,
    Subscription,
    UnknownRequest,
    Unsubscribe,
)
from delta_prop_wire.spec import Attribute, ErrorCode, FrameType
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)

UNAUTHORIZED_TEXT = "no token that allows this: send a hello with one that does"
"""The text of every UNAUTHORIZED refusal, which does not disclose the reason."""


class Role(Enum):
    """The two ends of a connection."""

    CLIENT = "client"
    SERVER = "server"


class Speaker(Enum):
    """The sender of a frame. A forwarder is a client whose hello declared its deltas to be replicas."""

    __hash__ = (
        object.__hash__
    )  # faster: an enumeration's own hash is a Python function, and each frame needs four

    CLIENT = "a client"
    FORWARDER = "a forwarder"
    SERVER = "a server"


class Phase(Enum):
    """The phases of a connection: nothing sent, hello sent and not answered, open, ended."""

    __hash__ = object.__hash__

    OPENING = auto()
    GREETED = auto()
    OPEN = auto()
    ENDED = auto()


class MessageKind(Enum):
    """The kinds of messages that the table distinguishes."""

    __hash__ = object.__hash__

    HELLO = "a hello"
    WELCOME = "the answer to a hello"
    SUBSCRIBE = "a Subscribe"
    UNSUBSCRIBE = "an Unsubscribe"
    DECIDE = "a decision about a job"
    QUERY = "a query"
    DELTA = "a Delta"
    BATCH = "a Batch with a producer's stamp"
    LOGGED_DELTA = "a Delta with a Lamport number"
    LOGGED_BATCH = "a Batch with a log's stamp"
    SLICED_BATCH = "a Batch with row offsets"
    ACK = "an Ack"
    NACK = "a Nack"
    BACKPRESSURE = "a Backpressure"
    HEARTBEAT = "a Heartbeat"


class RuleViolation(NamedTuple):
    """The reason why a message is not allowed."""

    code: ErrorCode
    text: str


_ALWAYS = {MessageKind.ACK, MessageKind.NACK, MessageKind.BACKPRESSURE, MessageKind.HEARTBEAT}
_PIPELINED = {MessageKind.SUBSCRIBE, MessageKind.UNSUBSCRIBE, MessageKind.QUERY}
"""Requests that may follow a hello at once; they are answered after it."""
_OPEN = {
    Speaker.CLIENT: _ALWAYS
    | _PIPELINED
    | {MessageKind.HELLO, MessageKind.DECIDE, MessageKind.DELTA, MessageKind.BATCH},
    Speaker.FORWARDER: _ALWAYS | _PIPELINED | {MessageKind.HELLO, MessageKind.LOGGED_BATCH},
    Speaker.SERVER: _ALWAYS
    | {MessageKind.WELCOME, MessageKind.LOGGED_DELTA, MessageKind.LOGGED_BATCH, MessageKind.SLICED_BATCH},
}
_ALLOWED = {
    Phase.OPENING: {
        Speaker.CLIENT: {MessageKind.HELLO},
        Speaker.FORWARDER: {MessageKind.HELLO},
        Speaker.SERVER: {MessageKind.NACK},
    },
    Phase.GREETED: {
        Speaker.CLIENT: _PIPELINED | {MessageKind.DECIDE, MessageKind.HEARTBEAT},
        Speaker.FORWARDER: _PIPELINED | {MessageKind.HEARTBEAT},
        Speaker.SERVER: {MessageKind.WELCOME, MessageKind.NACK},
    },
    Phase.OPEN: _OPEN,
    Phase.ENDED: {  # nothing more is read, but a server still reports outcomes of what it received
        Speaker.CLIENT: {MessageKind.NACK},
        Speaker.FORWARDER: {MessageKind.NACK},
        Speaker.SERVER: {MessageKind.NACK, MessageKind.ACK},
    },
}
_PHASE_TEXTS = {
    Phase.OPENING: "before a hello: send a hello first",
    Phase.GREETED: "before the answer to the hello: wait for the answer",
    Phase.OPEN: "",
    Phase.ENDED: "after the end of the connection: open another one",
}


def _find_violation(speaker: Speaker, phase: Phase, message: MessageKind) -> RuleViolation | None:
    if message in _ALLOWED[phase][speaker]:
        return None
    if phase is Phase.OPENING and speaker is not Speaker.SERVER:
        return RuleViolation(ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
    phase_text = _PHASE_TEXTS[phase]
    if message in _OPEN[speaker]:
        return RuleViolation(ErrorCode.BAD_FRAME, f"{message.value} from {speaker.value} {phase_text}")
    return RuleViolation(
        ErrorCode.BAD_FRAME, f"{message.value} from {speaker.value} is never allowed: leave it out"
    )


RULES = {
    (speaker, phase): {message: _find_violation(speaker, phase, message) for message in MessageKind}
    for speaker in Speaker
    for phase in Phase
}
"""Maps (speaker, phase), then the message, to the violation; None: the message is allowed."""

_KINDS_OF_TYPE = {
    FrameType.DELTA: (MessageKind.DELTA, MessageKind.LOGGED_DELTA),
    FrameType.BATCH: (MessageKind.BATCH, MessageKind.LOGGED_BATCH, MessageKind.SLICED_BATCH),
    FrameType.ACK: (MessageKind.ACK, MessageKind.WELCOME),
    FrameType.NACK: (MessageKind.NACK,),
    FrameType.BACKPRESSURE: (MessageKind.BACKPRESSURE,),
    FrameType.HEARTBEAT: (MessageKind.HEARTBEAT,),
    FrameType.SUBSCRIBE: (MessageKind.SUBSCRIBE, MessageKind.HELLO, MessageKind.DECIDE, MessageKind.QUERY),
    FrameType.UNSUBSCRIBE: (MessageKind.UNSUBSCRIBE,),
}


def _group_by_type(table: dict[MessageKind, RuleViolation | None]) -> dict[FrameType, RuleViolation | None]:
    violations_by_type = {
        kind: [table[message] for message in messages] for kind, messages in _KINDS_OF_TYPE.items()
    }
    return {
        kind: None if None in candidates else candidates[0] for kind, candidates in violations_by_type.items()
    }


TYPE_RULES = {key: _group_by_type(table) for key, table in RULES.items()}
"""Maps (speaker, phase), then the frame type, to the violation; None: a message of that type is allowed."""


_KIND_OF_REQUEST: dict[type, MessageKind] = {
    Hello: MessageKind.HELLO,
    Subscription: MessageKind.SUBSCRIBE,
    Decide: MessageKind.DECIDE,
    Get: MessageKind.QUERY,
    FindOffsets: MessageKind.QUERY,
    Describe: MessageKind.QUERY,
    CreateStream: MessageKind.QUERY,
    AlterStream: MessageKind.QUERY,
    DeleteStream: MessageKind.QUERY,
    TruncateStream: MessageKind.QUERY,
    EraseVector: MessageKind.QUERY,
}


def message_kind_of(frame: Frame) -> MessageKind:
    """Return the kind of message in a frame."""
    match frame:
        case BatchFrame():
            if frame.batch.attributes & Attribute.ROW_OFFSETS:
                return MessageKind.SLICED_BATCH
            return (
                MessageKind.BATCH
                if frame.stamp is None or frame.stamp.is_from_producer
                else MessageKind.LOGGED_BATCH
            )
        case DeltaFrame():
            return MessageKind.DELTA if frame.lamport is None else MessageKind.LOGGED_DELTA
        case Ack():
            return MessageKind.ACK if frame.welcome is None else MessageKind.WELCOME
        case Nack():
            return MessageKind.NACK
        case Backpressure():
            return MessageKind.BACKPRESSURE
        case Heartbeat():
            return MessageKind.HEARTBEAT
        case Subscribe():
            return _request_kind_of(frame.request)
        case Unsubscribe():
            return MessageKind.UNSUBSCRIBE


def _request_kind_of(request: Request) -> MessageKind:
    if isinstance(request, UnknownRequest):  # a hello in an unknown version is still a hello
        return MessageKind.HELLO if request.name == "hello" else MessageKind.QUERY
    return _KIND_OF_REQUEST[type(request)]
