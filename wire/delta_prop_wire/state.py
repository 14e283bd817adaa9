"""Who may say what, and when: one table, (speaker, phase, what is said) to allowed or the refusal.

Credits are not in it; they are `window.py`'s.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Decide,
    DeltaFrame,
    Describe,
    FindOffsets,
    Get,
    Heartbeat,
    Hello,
    Nack,
    Subscribe,
    Subscription,
    UnknownRequest,
    Unsubscribe,
)
from delta_prop_wire.spec import Attribute, ErrorCode, FrameType

if TYPE_CHECKING:
    from delta_prop_wire.frames import Frame, Request

UNAUTHORIZED_TEXT = "no token that allows this: say hello with one that does"
"""What everyone is told who may not do something, whatever the reason is."""


class Role(Enum):
    """Which end of a connection."""

    CLIENT = "client"
    SERVER = "server"


class Speaker(Enum):
    """Whose frame it is. A forwarder is a client whose hello said that its deltas are replicas."""

    __hash__ = object.__hash__  # an enumeration's own is a Python function, and each frame asks for four

    CLIENT = "a client"
    FORWARDER = "a forwarder"
    SERVER = "a server"


class Phase(Enum):
    """How far a connection is: nothing was said, a hello waits for its answer, open, ended."""

    __hash__ = object.__hash__

    OPENING = auto()
    GREETED = auto()
    OPEN = auto()
    ENDED = auto()


class Saying(Enum):
    """What a frame says, as far as the table tells frames apart."""

    __hash__ = object.__hash__

    HELLO = "a hello"
    WELCOME = "the answer to a hello"
    SUBSCRIBE = "a Subscribe"
    UNSUBSCRIBE = "an Unsubscribe"
    DECIDE = "a decision about a job"
    ASK = "a question"
    DELTA = "a Delta"
    BATCH = "a Batch with a producer's stamp"
    LOGGED_DELTA = "a Delta with a Lamport number"
    LOGGED_BATCH = "a Batch with a log's stamp"
    CUT_BATCH = "a Batch with row offsets"
    ACK = "an Ack"
    NACK = "a Nack"
    BACKPRESSURE = "a Backpressure"
    HEARTBEAT = "a Heartbeat"


class Refusal(NamedTuple):
    """Why something may not be said."""

    code: ErrorCode
    text: str


_ALWAYS = {Saying.ACK, Saying.NACK, Saying.BACKPRESSURE, Saying.HEARTBEAT}
_LATER = {Saying.SUBSCRIBE, Saying.UNSUBSCRIBE, Saying.ASK}
"""Requests that may follow a hello at once; they are answered behind it."""
_OPEN = {
    Speaker.CLIENT: _ALWAYS | _LATER | {Saying.HELLO, Saying.DECIDE, Saying.DELTA, Saying.BATCH},
    Speaker.FORWARDER: _ALWAYS | _LATER | {Saying.HELLO, Saying.LOGGED_BATCH},
    Speaker.SERVER: _ALWAYS | {Saying.WELCOME, Saying.LOGGED_DELTA, Saying.LOGGED_BATCH, Saying.CUT_BATCH},
}
_MAY = {
    Phase.OPENING: {
        Speaker.CLIENT: {Saying.HELLO},
        Speaker.FORWARDER: {Saying.HELLO},
        Speaker.SERVER: {Saying.NACK},
    },
    Phase.GREETED: {
        Speaker.CLIENT: _LATER | {Saying.DECIDE, Saying.HEARTBEAT},
        Speaker.FORWARDER: _LATER | {Saying.HEARTBEAT},
        Speaker.SERVER: {Saying.WELCOME, Saying.NACK},
    },
    Phase.OPEN: _OPEN,
    Phase.ENDED: {  # nothing is read any more; of what had come a server still tells the outcome
        Speaker.CLIENT: {Saying.NACK},
        Speaker.FORWARDER: {Saying.NACK},
        Speaker.SERVER: {Saying.NACK, Saying.ACK},
    },
}
_NOT_NOW = {
    Phase.OPENING: "before a hello was said",
    Phase.GREETED: "before the hello was answered: wait for that",
    Phase.OPEN: "",
    Phase.ENDED: "after the end of the connection",
}


def _refusal(speaker: Speaker, phase: Phase, said: Saying) -> Refusal | None:
    if said in _MAY[phase][speaker]:
        return None
    if phase is Phase.OPENING and speaker is not Speaker.SERVER:
        return Refusal(ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
    when = _NOT_NOW[phase]
    if said in _OPEN[speaker]:
        return Refusal(ErrorCode.BAD_FRAME, f"{said.value} from {speaker.value} {when}")
    return Refusal(ErrorCode.BAD_FRAME, f"{said.value} is nothing that {speaker.value} sends")


TABLE = {
    (speaker, phase): {said: _refusal(speaker, phase, said) for said in Saying}
    for speaker in Speaker
    for phase in Phase
}
"""None: it may be said."""

_SAYINGS = {
    FrameType.DELTA: (Saying.DELTA, Saying.LOGGED_DELTA),
    FrameType.BATCH: (Saying.BATCH, Saying.LOGGED_BATCH, Saying.CUT_BATCH),
    FrameType.ACK: (Saying.ACK, Saying.WELCOME),
    FrameType.NACK: (Saying.NACK,),
    FrameType.BACKPRESSURE: (Saying.BACKPRESSURE,),
    FrameType.HEARTBEAT: (Saying.HEARTBEAT,),
    FrameType.SUBSCRIBE: (Saying.SUBSCRIBE, Saying.HELLO, Saying.DECIDE, Saying.ASK),
    FrameType.UNSUBSCRIBE: (Saying.UNSUBSCRIBE,),
}


def _by_type(table: dict[Saying, Refusal | None]) -> dict[FrameType, Refusal | None]:
    refusals = {kind: [table[said] for said in sayings] for kind, sayings in _SAYINGS.items()}
    return {kind: None if None in of_kind else of_kind[0] for kind, of_kind in refusals.items()}


TYPES = {place: _by_type(table) for place, table in TABLE.items()}
"""The same of a frame's type alone: the refusal where nothing of that type may be said."""


_REQUEST_SAYINGS: dict[type, Saying] = {
    Hello: Saying.HELLO,
    Subscription: Saying.SUBSCRIBE,
    Decide: Saying.DECIDE,
    Get: Saying.ASK,
    FindOffsets: Saying.ASK,
    Describe: Saying.ASK,
}


def saying_of(frame: Frame) -> Saying:
    """What a frame says."""
    match frame:
        case BatchFrame():
            if frame.batch.attributes & Attribute.ROW_OFFSETS:
                return Saying.CUT_BATCH
            return Saying.BATCH if frame.stamp is None or frame.stamp.is_sent else Saying.LOGGED_BATCH
        case DeltaFrame():
            return Saying.DELTA if frame.lamport is None else Saying.LOGGED_DELTA
        case Ack():
            return Saying.ACK if frame.welcome is None else Saying.WELCOME
        case Nack():
            return Saying.NACK
        case Backpressure():
            return Saying.BACKPRESSURE
        case Heartbeat():
            return Saying.HEARTBEAT
        case Subscribe():
            return _saying_of_request(frame.request)
        case Unsubscribe():
            return Saying.UNSUBSCRIBE


def _saying_of_request(request: Request) -> Saying:
    if isinstance(request, UnknownRequest):  # a hello in a version that is not known is one all the same
        return Saying.HELLO if request.name == "hello" else Saying.ASK
    return _REQUEST_SAYINGS[type(request)]
