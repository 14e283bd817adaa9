"""One delta as a map: each missing, mistyped or misplaced field is named."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from delta_prop_wire import delta as d
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.delta import Delta, Dot, Kind, Operation
from delta_prop_wire.delta_map import unpack_delta
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.frames import BatchFrame, DeltaFrame
from delta_prop_wire.header import DELTA_PAYLOAD_BYTES_MAX, pack_header
from delta_prop_wire.packed_metadata import PackedMetadata
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode, FrameType
from tests.wire.sealing import frame_with_checksum


def decode_error(raw: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(raw)
    return caught.value


# --- the delta map


def delta_frame(**fields: Any) -> bytes:
    """Return a Delta frame of a valid map with some fields changed; None removes a field."""
    all_fields: dict[str, Any] = {"vector_id": "doc-1", "op": 0, "values": bytes(8)}
    all_fields.update(fields)
    return frame_with_checksum(
        FrameType.DELTA,
        msgpack.packb({name: value for name, value in all_fields.items() if value is not None}),
    )


def read_delta(**fields: Any) -> Delta:
    frame = decode(delta_frame(**fields))
    assert isinstance(frame, DeltaFrame)
    return frame.delta


def test_minimal_delta_map_is_decoded() -> None:
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
        ("values", [1.0, 2.0]),
        ("values", b"abc"),
        ("indices", bytes(8)),
        ("id", bytes(15)),
        ("id", "0" * 16),
        ("parents", [bytes(3)]),
        ("parents", [[1, 2, 3]]),
        ("parents", [[1, -1]]),
        ("clock", [[2, 1], [1]]),
        ("timestamp", -1),
        ("timestamp", 1.5),
        ("priority", 4),
        ("source", 9),
        ("metadata", [1]),
        ("topics", "news"),
        ("topics", [1]),
        ("expect", [1, 1 << 63, 0]),
        ("counter", COUNTER_MAX + 1),
        ("ack_level", 4),
    ],
)
def test_invalid_field_is_named(field: str, value: Any) -> None:
    error = decode_error(delta_frame(**{field: value}, **({"origin": 1} if field == "counter" else {})))
    assert error.code is ErrorCode.BAD_FRAME
    assert field in error.message


def test_field_beyond_its_bound_is_decoded_unchanged() -> None:
    """Decoding does not check bounds: `validate.py` refuses the delta, as in a batch."""
    delta = read_delta(
        op=6,
        namespace="",
        values=bytes(8),
        data=b"x",
        parents=[[1, 0]] * 70,
        clock=[[2, 1], [1, 1 << 63]],
        expect=[1, 0],
        topics=["t" * 300] * 20,
        metadata={"a": [0] * 200_000},
    )
    assert delta.operation == Operation(6, np.zeros(2, np.float32), data=b"x")
    assert (delta.namespace, delta.expect, len(delta.parents)) == ("", Dot(1, 0), 70)
    assert delta.clock == (Dot(2, 1), Dot(1, 1 << 63))
    assert delta.topics == ("t" * 300,) * 20
    assert isinstance(delta.metadata, PackedMetadata)
    assert len(delta.metadata.packed) > 200_000


def test_absent_operands_are_empty() -> None:
    assert read_delta(op=0, values=None).operation == d.create([])
    assert read_delta(op=1, values=None).operation == d.sparse([], [])
    assert read_delta(op=8, values=None).operation == d.opaque(b"")


def test_dot_needs_both_origin_and_counter() -> None:
    assert "counter" in decode_error(delta_frame(origin=1)).message
    assert "origin" in decode_error(delta_frame(counter=1)).message


@pytest.mark.parametrize("kind", [Kind.SPARSE, Kind.SPARSE_ADD, Kind.SCALE, Kind.DELETE, Kind.OPAQUE])
def test_mismatched_indices_are_refused(kind: Kind) -> None:
    error = decode_error(delta_frame(op=int(kind), values=bytes(8), indices=bytes(4)))
    assert error.code is ErrorCode.BAD_FRAME
    assert "indices" in error.message


def test_unknown_kind_round_trips() -> None:
    frame = DeltaFrame(1, Delta("a", d.Operation(63, data=b"later"), "n"))
    assert decode(encode(frame)) == frame


def test_map_with_too_many_items_is_refused() -> None:
    error = decode_error(delta_frame(unknown={"a": [0] * 200_000}))
    assert error.code is ErrorCode.BAD_FRAME
    assert "send up to 131072" in error.message


@pytest.mark.parametrize("key", [b"\xa8", b"\xd9\x08", b"\xda\x00\x08", b"\xdb\x00\x00\x00\x08"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_metadata_keep_their_bytes_at_any_position(key: bytes, position: int) -> None:
    patch = b"\xde\x00\x01\xd9\x01a\xcc\x01"  # no value in its shortest form
    items = [msgpack.packb("vector_id") + msgpack.packb("metadata"), msgpack.packb("op") + b"\x09"]
    items.insert(position, key + b"metadata" + patch)
    delta = unpack_delta(b"\x83" + b"".join(items)).delta
    assert (delta.vector_id, delta.operation.kind) == ("metadata", Kind.METADATA)
    assert isinstance(delta.metadata, PackedMetadata)
    assert delta.metadata.packed == patch
    assert delta.metadata == {"a": 1}
    assert encode_batch([delta], origin=1, base=1).packed_metadata(0) == patch


def test_duplicate_metadata_is_a_bad_frame_and_nil_is_none() -> None:
    head = msgpack.packb("vector_id") + msgpack.packb("a") + msgpack.packb("op") + b"\x09"
    key = msgpack.packb("metadata")
    with pytest.raises(ProtocolError, match="a key occurs twice"):
        unpack_delta(b"\x84" + head + 2 * (key + b"\x80"))
    assert unpack_delta(b"\x83" + head + key + b"\xc0").delta.metadata is None


def test_logged_metadata_are_decoded_at_once() -> None:
    assert type(read_delta(metadata={"a": 1}, lamport=7).metadata) is dict
    error = decode_error(delta_frame(metadata={1: 2}, lamport=7))
    assert (error.code, "breaks the bounds of a log" in error.message) == (ErrorCode.BAD_FRAME, True)


def test_sequence_at_the_counter_bound_is_refused() -> None:
    for sequence, is_valid in ((COUNTER_MAX - 1, True), (COUNTER_MAX, False)):
        frames = (
            DeltaFrame(sequence, Delta("a", d.delete())),
            BatchFrame(sequence, encode_batch([Delta("a", d.delete())], origin=1, base=1)),
        )
        for frame in frames:
            if is_valid:
                decode(encode(frame))
            else:
                assert decode_error(encode(frame)).code is ErrorCode.BAD_FRAME


@pytest.mark.parametrize("size", range(5))
def test_delta_frame_without_a_map_is_refused(size: int) -> None:
    error = decode_error(pack_header(FrameType.DELTA, 0, 1, size) + bytes(size))
    assert error.code in (ErrorCode.BAD_FRAME, ErrorCode.CHECKSUM)


def test_corrupted_delta_fails_its_checksum() -> None:
    raw = bytearray(delta_frame())
    raw[-5] ^= 1
    assert decode_error(bytes(raw)).code is ErrorCode.CHECKSUM


def test_encoding_an_oversized_delta_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        encode(DeltaFrame(1, Delta("a", d.opaque(bytes(DELTA_PAYLOAD_BYTES_MAX)), "n")))
    assert caught.value.code is ErrorCode.TOO_LARGE
