"""Packs and reads the payloads of the six control frames: each packer beside its unpacker.

A payload is one msgpack map with documented keys (`docs/protocol.md`); a map without fields is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from delta_prop_wire.control_values import (
    NAME_BYTES_MAX,
    read_credit,
    read_cursor,
    read_name,
    read_offset,
    read_u16,
    read_u32,
    read_u64,
)
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    Backpressure,
    Heartbeat,
    Nack,
    PressureLevel,
    Subscribe,
    Unsubscribe,
)
from delta_prop_wire.packing import (
    Fields,
    flag,
    list_of,
    mapping,
    number,
    one_of,
    pack,
    pack_map,
    record,
    text,
    truncate,
    uint,
    unpack_map,
)
from delta_prop_wire.requests import (
    pack_request,
    pack_response,
    read_code,
    unpack_request,
    unpack_response,
)
from delta_prop_wire.spec import BATCH_ROWS_MAX, FrameType

if TYPE_CHECKING:
    from typing_extensions import Buffer

RANGES_MAX = 1024
TEXT_BYTES_MAX = 4096

_EMPTY_MAP = pack_map({})

ControlFrame = Ack | Nack | Backpressure | Heartbeat | Subscribe | Unsubscribe

_range_parts = record(read_u64, read_u64, read_offset, flag)


def pack_control(frame: ControlFrame) -> tuple[FrameType, bytes]:
    """Return type and payload of a control frame. Raises UsageError as `pack_request` does."""
    match frame:
        case Ack():
            fields = _ack_fields(frame)
            return FrameType.ACK, pack(fields) if fields else b""
        case Nack():
            return FrameType.NACK, _pack_fields(_nack_fields(frame))
        case Backpressure():
            return FrameType.BACKPRESSURE, _pack_fields(_backpressure_fields(frame))
        case Heartbeat():
            return FrameType.HEARTBEAT, _pack_fields(_heartbeat_fields(frame))
        case Subscribe():
            return FrameType.SUBSCRIBE, _pack_fields(pack_request(frame.request))
        case Unsubscribe():
            return FrameType.UNSUBSCRIBE, _pack_fields(_unsubscribe_fields(frame))


def unpack_control(kind: FrameType, sequence: int, payload: Buffer) -> ControlFrame:
    """Read the payload of a control frame. Raises ProtocolError, naming the field."""
    name = kind.name.capitalize()
    fields = unpack_map(name, payload) if memoryview(payload) else Fields(name, {})
    return _UNPACK[kind](sequence, fields)


def _pack_fields(fields: dict[str, Any]) -> bytes:
    packed = pack_map(fields)
    return b"" if packed == _EMPTY_MAP else packed


# --- Ack


def _ack_fields(ack: Ack) -> dict[str, Any]:
    """Return the fields that are present, one by one, since most Acks have two."""
    fields: dict[str, Any] = {}
    if ack.ranges:
        fields["ranges"] = ack.ranges
    if ack.processed is not None:
        fields["processed"] = ack.processed
    if ack.cursor is not None:
        fields["cursor"] = ack.cursor
    if ack.credit is not None:
        fields["credit"] = ack.credit
    if ack.correlation_id is not None:
        fields["correlation_id"] = ack.correlation_id
    if ack.response is not None:
        fields["request"], fields["response"] = pack_response(ack.response)
    for name, place in (("more", ack.more), ("stream", ack.stream), ("partition", ack.partition)):
        if place:
            fields[name] = place
    return fields


def _unpack_ack(sequence: int, fields: Fields) -> Ack:
    request, response = fields.get("request", read_name, None), None
    if "response" in fields:
        response_fields = fields.require_map("response")
        response = None if request is None else unpack_response(request, response_fields)
    return Ack(
        sequence,
        ranges=fields.get("ranges", _read_ranges, ()),
        processed=fields.get("processed", read_offset, None),
        cursor=fields.get("cursor", read_cursor, None),
        credit=fields.get("credit", read_credit, None),
        correlation_id=fields.get("correlation_id", read_u64, None),
        response=response,
        more=fields.get("more", flag, False),
        stream=fields.get("stream", read_u32, 0),
        partition=fields.get("partition", read_u16, 0),
    )


# --- Nack


def _nack_fields(nack: Nack) -> dict[str, Any]:
    return {
        "code": int(nack.code),
        "text": truncate(nack.text, TEXT_BYTES_MAX),
        "retry_after_ms": nack.retry_after_ms,
        "row": nack.row,
        "field": None if nack.field is None else truncate(nack.field, NAME_BYTES_MAX),
        "details": dict(nack.details) or None,
        "correlation_id": nack.correlation_id,
        "frame": nack.frame,
    }


def _unpack_nack(sequence: int, fields: Fields) -> Nack:
    return Nack(
        sequence,
        code=fields.require("code", read_code),
        text=fields.get("text", text(TEXT_BYTES_MAX), ""),
        retry_after_ms=fields.get("retry_after_ms", read_u32, None),
        row=fields.get("row", uint(BATCH_ROWS_MAX - 1), None),
        field=fields.get("field", read_name, None),
        details=fields.get("details", mapping, {}),
        correlation_id=fields.get("correlation_id", read_u64, None),
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
        level=fields.require("level", one_of(PressureLevel)),
        depth=fields.get("depth", read_u64, 0),
        capacity=fields.get("capacity", read_u64, 0),
        rate=fields.get("rate", number, None),
        retry_after_ms=fields.get("retry_after_ms", read_u32, None),
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
        sent_us=fields.get("sent_us", read_u64, None),
        echo_us=fields.get("echo_us", read_u64, None),
        delivered=fields.get("delivered", read_u64, None),
        received=fields.get("received", read_u64, None),
        credit=fields.get("credit", read_credit, None),
        processed=fields.get("processed", read_offset, None),
    )


# --- Unsubscribe


def _unsubscribe_fields(frame: Unsubscribe) -> dict[str, Any]:
    return {"subscription": frame.subscription, "drain": frame.drain}


def _unpack_unsubscribe(sequence: int, fields: Fields) -> Unsubscribe:
    return Unsubscribe(
        sequence,
        subscription=fields.require("subscription", read_u32),
        drain=fields.get("drain", flag, True),
    )


_UNPACK: dict[FrameType, Callable[[int, Fields], ControlFrame]] = {
    FrameType.ACK: _unpack_ack,
    FrameType.NACK: _unpack_nack,
    FrameType.BACKPRESSURE: _unpack_backpressure,
    FrameType.HEARTBEAT: _unpack_heartbeat,
    FrameType.SUBSCRIBE: lambda sequence, fields: Subscribe(sequence, unpack_request(fields)),
    FrameType.UNSUBSCRIBE: _unpack_unsubscribe,
}


# --- values that travel as arrays


def _read_range(value: Any) -> AckRange:
    ack_range = AckRange(*_range_parts(value))
    if ack_range.first > ack_range.last:
        raise ValueError(
            f"has a range from {ack_range.first} to {ack_range.last}: end it at its start or later"
        )
    return ack_range


_read_ranges = list_of(_read_range, RANGES_MAX)
