"""The payloads of the six control frames: each frame's packer and unpacker, side by side.

Each is one msgpack map with documented keys (`docs/protocol.md`); one without fields is no payload at all.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from delta_prop_wire.cursor import LOG_ID_BYTES, Cursor
from delta_prop_wire.delta import AckLevel, Priority, Source
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    Backpressure,
    Credit,
    Decide,
    Decision,
    Filter,
    Heartbeat,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Level,
    Nack,
    OriginClaim,
    OriginGrant,
    RefusedRow,
    StagedPart,
    Start,
    StartAt,
    Subscribe,
    Subscribed,
    Subscription,
    Unsubscribe,
    Welcome,
)
from delta_prop_wire.packing import (
    U32_MAX,
    Fields,
    blob,
    cut,
    flag,
    list_of,
    mapping,
    number,
    one_of,
    pack,
    pack_map,
    record,
    text,
    uint,
    unpack_map,
    unpack_short,
)
from delta_prop_wire.spec import (
    BATCH_ROWS_MAX,
    COUNTER_MAX,
    VECTOR_ID_BYTES_MAX,
    VERSION,
    ErrorCode,
    FrameType,
)
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

RANGES_MAX = 1024
ORIGINS_MAX = 1024
TOPICS_MAX = 256
FEATURES_MAX = 32
PARTS_MAX = 2_500
FEATURE_BYTES_MAX = 64
TOKEN_BYTES_MAX = 4096
TEXT_BYTES_MAX = 4096
NAME_BYTES_MAX = 255
WAIT_MS_MAX = 60_000
REFUSED_ROWS_MAX = 10
"""Of a job's refused deltas, the first ones are told one by one."""
REFUSED_ID_BYTES_MAX = 128
REFUSED_TEXT_BYTES_MAX = 300

_NOTHING_SAID = pack_map({})

W = TypeVar("W", bound=Enum)

ControlFrame = Ack | Nack | Backpressure | Heartbeat | Subscribe | Unsubscribe

_u64 = uint()
_u32 = uint(U32_MAX)
_offset = uint(COUNTER_MAX)
_rows = uint(BATCH_ROWS_MAX, least=1)
_wait = uint(WAIT_MS_MAX)
_name = text(NAME_BYTES_MAX)
_features = list_of(text(FEATURE_BYTES_MAX), FEATURES_MAX)
_topic_bytes = blob(1, 1 + VECTOR_ID_BYTES_MAX)
_cursor_parts = record(blob(LOG_ID_BYTES, LOG_ID_BYTES), _offset, _offset)
_credit_parts = record(_u64, _u64)
_range_parts = record(_u64, _u64, _offset, flag)


def pack_control(frame: ControlFrame) -> tuple[FrameType, bytes]:
    """Type and payload of a control frame. Raises UsageError where a request says nothing."""
    match frame:
        case Ack():
            return FrameType.ACK, _pack_ack(frame)
        case Nack():
            return FrameType.NACK, _packed(_nack_fields(frame))
        case Backpressure():
            return FrameType.BACKPRESSURE, _packed(_backpressure_fields(frame))
        case Heartbeat():
            return FrameType.HEARTBEAT, _packed(_heartbeat_fields(frame))
        case Subscribe():
            return FrameType.SUBSCRIBE, _packed(_subscribe_fields(frame))
        case Unsubscribe():
            return FrameType.UNSUBSCRIBE, _packed(_unsubscribe_fields(frame))


def unpack_control(kind: FrameType, sequence: int, payload: Buffer) -> ControlFrame:
    """Read the payload of a control frame. Raises PeerError, naming the field."""
    if kind is FrameType.ACK and (ack := _short_ack(sequence, payload)) is not None:
        return ack
    name = kind.name.capitalize()
    fields = unpack_map(name, payload) if memoryview(payload) else Fields(name, {})
    return _UNPACK[kind](sequence, fields)


def _packed(fields: dict[str, Any]) -> bytes:
    packed = pack_map(fields)
    return b"" if packed == _NOTHING_SAID else packed


def _said(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


# --- Ack


_NO_OTHERS = (None,) * 5


def _pack_ack(ack: Ack) -> bytes:
    """The short way of what a server says most, offsets and credit; all else the long way."""
    others = ack.cursor, ack.processed, ack.correlation_id, ack.welcome, ack.subscribed
    if ack.credit is None or not ack.ranges or others != _NO_OTHERS:
        return _packed(_ack_fields(ack))
    return pack({"ranges": ack.ranges, "credit": ack.credit})


def _ack_fields(ack: Ack) -> dict[str, Any]:
    return {
        "ranges": ack.ranges or None,
        "processed": ack.processed,
        "cursor": ack.cursor,
        "credit": ack.credit,
        "correlation_id": ack.correlation_id,
        "welcome": None if ack.welcome is None else _said(_welcome_fields(ack.welcome)),
        "subscribed": None if ack.subscribed is None else _subscribed_fields(ack.subscribed),
        "job": None if ack.job is None else _job_fields(ack.job),
    }


def _short_ack(sequence: int, payload: Buffer) -> Ack | None:
    """What a subscriber says most, a cursor alone; None: read it the long way, which does the same."""
    try:
        return Ack(sequence, cursor=_cursor(unpack_short(payload).get("cursor")))
    except ValueError:  # what is wrong with it is told by the long way
        return None


def _unpack_ack(sequence: int, fields: Fields) -> Ack:
    return Ack(
        sequence,
        ranges=fields.get("ranges", _ranges, ()),
        processed=fields.get("processed", _offset, None),
        cursor=fields.get("cursor", _cursor, None),
        credit=fields.get("credit", _credit, None),
        correlation_id=fields.get("correlation_id", _u64, None),
        welcome=_unpack_welcome(fields.inner("welcome")) if "welcome" in fields else None,
        subscribed=_unpack_subscribed(fields.inner("subscribed")) if "subscribed" in fields else None,
        job=_unpack_job(fields.inner("job")) if "job" in fields else None,
    )


def _welcome_fields(welcome: Welcome) -> dict[str, Any]:
    return {
        "version": welcome.version,
        "features": list(welcome.features),
        "origins": list(welcome.origins),
        "more": welcome.more or None,
        "log": welcome.log,
        "level": None if welcome.level is None else int(welcome.level),
    }


def _unpack_welcome(fields: Fields) -> Welcome:
    return Welcome(
        version=fields.need("version", uint(255, least=1)),
        features=fields.get("features", _features, ()),
        origins=fields.get("origins", list_of(_grant, ORIGINS_MAX), ()),
        more=fields.get("more", flag, False),
        log=fields.get("log", _cursor, None),
        level=fields.get("level", one_of(AckLevel), None),
    )


def _subscribed_fields(granted: Subscribed) -> dict[str, Any]:
    return {
        "subscription": granted.subscription,
        "start": granted.start,
        "batch_deltas_max": granted.batch_deltas_max,
        "wait_ms_max": granted.wait_ms_max,
    }


def _unpack_subscribed(fields: Fields) -> Subscribed:
    return Subscribed(
        subscription=fields.need("subscription", _u32),
        start=fields.need("start", _cursor),
        batch_deltas_max=fields.need("batch_deltas_max", _rows),
        wait_ms_max=fields.need("wait_ms_max", _wait),
    )


def _job_fields(status: JobStatus) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "deltas": status.deltas,
        "published": status.published,
        "duplicates": status.duplicates,
        "refused": status.refused,
    } | ({"refused_rows": list(map(_refused_fields, status.refused_rows))} if status.refused_rows else {})


def _refused_fields(row: RefusedRow) -> list[Any]:
    told = cut(row.vector_id, REFUSED_ID_BYTES_MAX), int(row.code), cut(row.text, REFUSED_TEXT_BYTES_MAX)
    return [row.part, row.row, *told]


def _unpack_job(fields: Fields) -> JobStatus:
    return JobStatus(
        state=fields.need("state", _word_of(JobState)),
        deltas=fields.get("deltas", _u64, 0),
        published=fields.get("published", _u64, 0),
        duplicates=fields.get("duplicates", _u64, 0),
        refused=fields.get("refused", _u64, 0),
        refused_rows=fields.get("refused_rows", list_of(_refused_row, REFUSED_ROWS_MAX), ()),
    )


# --- Nack


def _nack_fields(nack: Nack) -> dict[str, Any]:
    return {
        "code": int(nack.code),
        "text": cut(nack.text, TEXT_BYTES_MAX),
        "retry_after_ms": nack.retry_after_ms,
        "row": nack.row,
        "field": None if nack.field is None else cut(nack.field, NAME_BYTES_MAX),
        "details": dict(nack.details) or None,
        "correlation_id": nack.correlation_id,
        "frame": nack.frame,
    }


def _unpack_nack(sequence: int, fields: Fields) -> Nack:
    return Nack(
        sequence,
        code=fields.need("code", one_of(ErrorCode)),
        text=fields.get("text", text(TEXT_BYTES_MAX), ""),
        retry_after_ms=fields.get("retry_after_ms", _u32, None),
        row=fields.get("row", uint(BATCH_ROWS_MAX - 1), None),
        field=fields.get("field", _name, None),
        details=fields.get("details", mapping, {}),
        correlation_id=fields.get("correlation_id", _u64, None),
        frame=True if fields.get("frame", flag, False) else None,
    )


# --- Backpressure


def _backpressure_fields(pressure: Backpressure) -> dict[str, Any]:
    return {
        "level": int(pressure.level),
        "depth": pressure.depth,
        "capacity": pressure.capacity,
        "rate": None if pressure.rate is None else float(pressure.rate),
        "retry_after_ms": pressure.retry_after_ms,
    }


def _unpack_backpressure(sequence: int, fields: Fields) -> Backpressure:
    return Backpressure(
        sequence,
        level=fields.need("level", one_of(Level)),
        depth=fields.get("depth", _u64, 0),
        capacity=fields.get("capacity", _u64, 0),
        rate=fields.get("rate", number, None),
        retry_after_ms=fields.get("retry_after_ms", _u32, None),
    )


# --- Heartbeat


def _heartbeat_fields(beat: Heartbeat) -> dict[str, Any]:
    return {
        "sent_us": beat.sent_us,
        "echo_us": beat.echo_us,
        "delivered": beat.delivered,
        "received": beat.received,
        "credit": beat.credit,
        "processed": beat.processed,
    }


def _unpack_heartbeat(sequence: int, fields: Fields) -> Heartbeat:
    return Heartbeat(
        sequence,
        sent_us=fields.get("sent_us", _u64, None),
        echo_us=fields.get("echo_us", _u64, None),
        delivered=fields.get("delivered", _u64, None),
        received=fields.get("received", _u64, None),
        credit=fields.get("credit", _credit, None),
        processed=fields.get("processed", _offset, None),
    )


# --- Subscribe


def _subscribe_fields(frame: Subscribe) -> dict[str, Any]:
    request = frame.request
    if isinstance(request, Hello):
        return _hello_fields(request)
    if isinstance(request, Decide):
        return _decide_fields(request)
    return _subscription_fields(request)


def _unpack_subscribe(sequence: int, fields: Fields) -> Subscribe:
    if "topics" in fields:
        return Subscribe(sequence, _unpack_subscription(fields))
    if "decide" in fields:
        return Subscribe(sequence, _unpack_decide(fields))
    return Subscribe(sequence, _unpack_hello(fields))


def _hello_fields(hello: Hello) -> dict[str, Any]:
    return {
        "version": hello.version,
        "features": list(hello.features) or None,
        "token": hello.token,
        "origins": list(hello.origins) or None,
        "source": None if hello.source is Source.LOCAL else int(hello.source),
        "client": None if hello.client is None else cut(hello.client, NAME_BYTES_MAX),
        "log_id": hello.log_id,
        "job": hello.job,
    }


def _unpack_hello(fields: Fields) -> Hello:
    return Hello(
        version=fields.get("version", uint(255, least=1), VERSION),
        features=fields.get("features", _features, ()),
        token=fields.get("token", text(TOKEN_BYTES_MAX), None),
        origins=fields.get("origins", list_of(_claim, ORIGINS_MAX), ()),
        source=fields.get("source", one_of(Source), Source.LOCAL),
        client=fields.get("client", _name, None),
        log_id=fields.get("log_id", blob(LOG_ID_BYTES, LOG_ID_BYTES), None),
        job=fields.get("job", _job_part, None),
    )


def _decide_fields(request: Decide) -> dict[str, Any]:
    return {
        "job": cut(request.job, NAME_BYTES_MAX),
        "decide": request.decision.value,
        "parts": list(request.parts) or None,
        "run": request.run,
    }


def _unpack_decide(fields: Fields) -> Decide:
    return Decide(
        job=fields.need("job", _name),
        decision=fields.need("decide", _word_of(Decision)),
        parts=fields.get("parts", list_of(_staged_part, PARTS_MAX), ()),
        run=fields.get("run", _u32, None),
    )


def _subscription_fields(asked: Subscription) -> dict[str, Any]:
    if not asked.topics:
        raise UsageError("a subscription without topics: name at least one; * is all of them")
    return {
        "subscription": asked.subscription,
        "topics": [topic.to_bytes() for topic in asked.topics],
        "start": [asked.start.at.value] + ([] if asked.start.value is None else [asked.start.value]),
        "credit": asked.credit,
        "batch_deltas_max": asked.batch_deltas_max,
        "wait_ms_max": asked.wait_ms_max,
        "group": asked.group,
        "filter": None if asked.filter is None else _filter_fields(asked.filter),
        "deltas": asked.deltas or None,
    }


def _unpack_subscription(fields: Fields) -> Subscription:
    topics = fields.need("topics", list_of(_topic, TOPICS_MAX))
    if not topics:
        fields.refuse("topics", "is empty: name at least one, or leave the field out for a hello")
    return Subscription(
        subscription=fields.need("subscription", _u32),
        topics=topics,
        start=fields.get("start", _start, Start(StartAt.LATEST)),
        credit=fields.get("credit", _credit, None),
        batch_deltas_max=fields.get("batch_deltas_max", _rows, 100),
        wait_ms_max=fields.get("wait_ms_max", _wait, 10),
        group=fields.get("group", _name, None),
        filter=_unpack_filter(fields.inner("filter")) if "filter" in fields else None,
        deltas=fields.get("deltas", flag, False),
    )


def _filter_fields(asked: Filter) -> dict[str, Any]:
    return {
        "sources": [int(source) for source in asked.sources],
        "priorities": [int(priority) for priority in asked.priorities],
    }


def _unpack_filter(fields: Fields) -> Filter:
    return Filter(
        sources=fields.get("sources", list_of(one_of(Source), len(Source)), ()),
        priorities=fields.get("priorities", list_of(one_of(Priority), len(Priority)), ()),
    )


# --- Unsubscribe


def _unsubscribe_fields(frame: Unsubscribe) -> dict[str, Any]:
    return {"subscription": frame.subscription, "drain": frame.drain}


def _unpack_unsubscribe(sequence: int, fields: Fields) -> Unsubscribe:
    return Unsubscribe(
        sequence,
        subscription=fields.need("subscription", _u32),
        drain=fields.get("drain", flag, True),
    )


_UNPACK: dict[FrameType, Callable[[int, Fields], ControlFrame]] = {
    FrameType.ACK: _unpack_ack,
    FrameType.NACK: _unpack_nack,
    FrameType.BACKPRESSURE: _unpack_backpressure,
    FrameType.HEARTBEAT: _unpack_heartbeat,
    FrameType.SUBSCRIBE: _unpack_subscribe,
    FrameType.UNSUBSCRIBE: _unpack_unsubscribe,
}


# --- values that stand as arrays


def _cursor(value: Any) -> Cursor:
    return Cursor(*_cursor_parts(value))


def _credit(value: Any) -> Credit:
    return Credit(*_credit_parts(value))


def _range(value: Any) -> AckRange:
    found = AckRange(*_range_parts(value))
    if found.first > found.last:
        raise ValueError(f"has a range that starts at {found.first} and ends at {found.last}")
    return found


_ranges = list_of(_range, RANGES_MAX)


def _grant(value: Any) -> OriginGrant:
    return OriginGrant(*record(_u64, _u32, _offset)(value))


def _claim(value: Any) -> OriginClaim:
    return OriginClaim(*record(_u64, _u32)(value))


def _job_part(value: Any) -> JobPart:
    return JobPart(*record(_name, _u32, _u64)(value))


def _staged_part(value: Any) -> StagedPart:
    return StagedPart(*record(_u32, _u64, _u64, _u32)(value))


def _refused_row(value: Any) -> RefusedRow:
    read = record(_u32, _u64, text(REFUSED_ID_BYTES_MAX), one_of(ErrorCode), text(REFUSED_TEXT_BYTES_MAX))
    return RefusedRow(*read(value))


def _word_of(words: type[W]) -> Callable[[Any], W]:
    """A word that `words` has as a value."""

    def read(value: Any) -> W:
        for one in words:
            if one.value == value:
                return one
        known = ", ".join(str(one.value) for one in words)
        raise ValueError(f"is {value!r:.60}; known are {known}")

    return read


def _topic(value: Any) -> Topic:
    try:
        return Topic.from_bytes(_topic_bytes(value))
    except Refused as refused:
        raise PeerError(refused.code, f"Subscribe: {refused.message}") from None


def _start(value: Any) -> Start:
    parts: list[Any] = value if isinstance(value, list) else []
    at = next((at for at in StartAt if parts and parts[0] == at.value), None)
    if at is None:
        raise ValueError(f"starts nowhere known; known are {', '.join(at.value for at in StartAt)}")
    if at in (StartAt.OFFSET, StartAt.TIME):
        return Start(at, record(text(NAME_BYTES_MAX), _offset)(value)[1])
    if at is StartAt.CURSOR:
        return Start(at, record(text(NAME_BYTES_MAX), _cursor)(value)[1])
    if len(parts) != 1:
        raise ValueError(f"{at.value!r} has no value beside it")
    return Start(at)
