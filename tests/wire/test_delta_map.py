"""One delta as a map: every field that is missing, mistyped or out of place is named."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from delta_prop_wire import delta as d
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.delta import Delta, Kind
from delta_prop_wire.errors import PeerError, Refused
from delta_prop_wire.frames import (
    DeltaFrame,
)
from delta_prop_wire.header import DELTA_PAYLOAD_BYTES_MAX, pack_header
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode, FrameType
from tests.wire.sealing import sealed


def refused(raw: bytes) -> PeerError:
    with pytest.raises(PeerError) as caught:
        decode(raw)
    return caught.value


# --- the delta map


def delta_frame(**fields: Any) -> bytes:
    """A Delta frame of a sound map with some fields changed; None takes one away."""
    known: dict[str, Any] = {"vector_id": "doc-1", "op": 0, "values": bytes(8)}
    known.update(fields)
    return sealed(
        FrameType.DELTA, msgpack.packb({name: value for name, value in known.items() if value is not None})
    )


def read_delta(**fields: Any) -> Delta:
    frame = decode(delta_frame(**fields))
    assert isinstance(frame, DeltaFrame)
    return frame.delta


def test_the_least_that_a_delta_says() -> None:
    assert read_delta() == Delta("doc-1", d.create([0, 0]))
    assert read_delta(vector_id="docs:1").namespace == "docs"
    assert read_delta(new_field=[1, {"a": None}]) == Delta("doc-1", d.create([0, 0]))
    assert read_delta(topics=[], metadata={}, timestamp=None).metadata == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vector_id", None),
        ("vector_id", 7),
        ("vector_id", b"raw"),
        ("op", None),
        ("op", "create"),
        ("op", 64),
        ("op", True),
        ("values", None),
        ("values", [1.0, 2.0]),
        ("values", b"abc"),
        ("indices", bytes(8)),
        ("data", b""),
        ("id", bytes(15)),
        ("id", "0" * 16),
        ("parents", [bytes(3)]),
        ("parents", [[1, 2, 3]]),
        ("parents", [[1, 0]]),
        ("clock", [[2, 1], [1, 1]]),
        ("clock", [[1, 1], [1, 2]]),
        ("clock", [[i, 1] for i in range(1025)]),
        ("timestamp", -1),
        ("timestamp", 1.5),
        ("priority", 4),
        ("source", 9),
        ("metadata", [1]),
        ("topics", "news"),
        ("topics", [1]),
        ("expect", [1, COUNTER_MAX + 1]),
        ("ack_level", 4),
    ],
)
def test_an_unsound_field_is_named(field: str, value: Any) -> None:
    error = refused(delta_frame(**{field: value}))
    assert error.code is ErrorCode.BAD_FRAME
    assert field in error.message


def test_a_dot_is_whole_or_not_there() -> None:
    assert "counter" in refused(delta_frame(origin=1)).message
    assert "origin" in refused(delta_frame(counter=1)).message


@pytest.mark.parametrize("kind", [Kind.SCALE, Kind.OFFSET, Kind.SPARSE, Kind.SPARSE_ADD])
def test_operations_have_as_many_numbers_as_they_need(kind: Kind) -> None:
    error = refused(delta_frame(op=int(kind), values=bytes(8), indices=_indices(kind, 4)))
    assert error.code is ErrorCode.BAD_FRAME


def _indices(kind: Kind, size: int) -> bytes | None:
    return bytes(size) if kind in (Kind.SPARSE, Kind.SPARSE_ADD) else None


def test_unknown_kinds_travel_as_they_are() -> None:
    frame = DeltaFrame(1, Delta("a", d.Operation(63, data=b"later"), "n"))
    assert decode(encode(frame)) == frame


def test_a_map_of_more_items_than_a_delta_can_have() -> None:
    error = refused(delta_frame(metadata={"a": [0] * 200_000}))
    assert error.code is ErrorCode.BAD_FRAME
    assert "allowed are 131072" in error.message
    assert len(read_delta(metadata={"a": [0] * 60_000}).metadata or {}) == 1


@pytest.mark.parametrize("size", range(5))
def test_a_delta_frame_without_a_map(size: int) -> None:
    error = refused(pack_header(FrameType.DELTA, 0, 1, size) + bytes(size))
    assert error.code in (ErrorCode.BAD_FRAME, ErrorCode.CHECKSUM)


def test_a_damaged_delta_fails_its_checksum() -> None:
    raw = bytearray(delta_frame())
    raw[-5] ^= 1
    assert refused(bytes(raw)).code is ErrorCode.CHECKSUM


def test_a_delta_beyond_the_bound_is_refused_to_its_maker() -> None:
    with pytest.raises(Refused) as caught:
        encode(DeltaFrame(1, Delta("a", d.opaque(bytes(DELTA_PAYLOAD_BYTES_MAX)), "n")))
    assert caught.value.code is ErrorCode.TOO_LARGE
