"""Control rows: each row has a type, all rows of a batch have one type, and invalid bodies are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.control_rows import (
    LOG_TYPES,
    ControlType,
    NoOp,
    add_type,
    control_type,
    pack_refused,
    read_noop,
    refused_code,
    uses_dots,
)
from delta_prop_wire.delta import Dot, Priority
from delta_prop_wire.encode import assemble, encode_batch, encode_noop, with_control_types
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.spec import Attribute, ErrorCode
from tests.delta_prop.support import make_delta
from tests.wire.control_batches import control_batch, without_types

ORIGIN = 0x0000_0ABC_DEF0_0002
CODES = st.sampled_from(ErrorCode)
CRCS = st.integers(0, (1 << 32) - 1)
OFFSETS = st.none() | st.integers(0, (1 << 63) - 1)


@given(code=CODES, crc=CRCS, offsets=st.lists(OFFSETS, min_size=1, max_size=5), detail=st.integers(0, 2))
def test_refused_rows_round_trip(code: ErrorCode, crc: int, offsets: list[int | None], detail: int) -> None:
    """`detail`: 0 for rows with only a code, 1 for a checksum besides, 2 for offsets, too."""
    packed_crc, first_offsets = (crc if detail > 0 else None), (offsets if detail > 1 else None)
    batch = encode_noop(
        origin=ORIGIN,
        base=1,
        count=len(offsets),
        code=code,
        refused_crc=packed_crc,
        first_offsets=first_offsets,
    )
    assert parse_batch(batch.raw).raw == batch.raw
    assert control_type(batch) is ControlType.REFUSED
    assert uses_dots(batch)
    assert read_noop(batch) == NoOp(
        code, packed_crc, None if first_offsets is None else dict(enumerate(first_offsets))
    )
    assert [refused_code(batch, row) for row in range(batch.count)] == [code] * batch.count
    assert {batch.blob(row)[0] for row in range(batch.count)} == {0}
    assert len(batch.blob(0)) == (3, 7, 15)[detail]


def test_refused_row_with_an_unknown_code_is_a_noop() -> None:
    batch = control_batch(*pack_refused(1, 60_000), origin=ORIGIN)
    assert read_noop(parse_batch(batch.raw)) == NoOp(ErrorCode.INVALID_DELTA, None, None)
    assert refused_code(batch, 0) == 60_000


@pytest.mark.parametrize("kind", [kind for kind in ControlType if kind is not ControlType.REFUSED])
def test_other_types_are_read_and_use_no_dots(kind: ControlType) -> None:
    batch = parse_batch(control_batch(bytes((kind,)) + b"what follows", bytes((kind,))).raw)
    assert control_type(batch) is kind
    assert not uses_dots(batch)


def test_batch_of_deltas_uses_dots() -> None:
    assert uses_dots(encode_batch([make_delta("v")], origin=ORIGIN, base=1))


def test_unknown_control_type_is_none_and_uses_no_dots() -> None:
    for batch in (control_batch(b"\x07"), control_batch(b"\xff"), control_batch(b"")):
        assert control_type(batch) is None
        assert not uses_dots(batch)


@pytest.mark.parametrize(
    ("blobs", "origin", "message"),
    [
        ((b"",), ORIGIN, "without a type"),
        ((b"\0\x0e\0", b""), ORIGIN, "without a type"),
        ((b"\0\x0e\0", b"\1"), ORIGIN, "one batch"),
        ((b"\1", b"\2"), 0, "one batch"),
        ((b"\x07",), 0, "type 7: send a type from 0 to 6"),
        ((b"\xff\x0e\0",), ORIGIN, "type 255"),
        ((b"\0",), ORIGIN, "3, 7 or 15"),
        ((b"\0\x0e",), ORIGIN, "3, 7 or 15"),
        ((b"\0\x0e\0", b"\0\x0e\0\0"), ORIGIN, "3, 7 or 15"),
        ((b"\0" * 16,), ORIGIN, "3, 7 or 15"),
        *(((bytes((kind,)),), ORIGIN, "send them under origin 0") for kind in sorted(LOG_TYPES)),
    ],
)
def test_invalid_control_rows_are_refused(blobs: tuple[bytes, ...], origin: int, message: str) -> None:
    with pytest.raises(ProtocolError, match=message) as caught:
        parse_batch(control_batch(*blobs, origin=origin).raw)
    assert caught.value.code is ErrorCode.BAD_FRAME


def test_control_batch_without_blobs_is_refused() -> None:
    batch = assemble(
        {}, attributes=Attribute.CONTROL, count=2, origin=ORIGIN, epoch=1, base=1, hybrid_time=0, kinds_mask=1
    )
    with pytest.raises(ProtocolError, match="without a type"):
        parse_batch(batch.raw)


# --- from format 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\x0e\0", b"\0\x0e\0"),
        (b"\x0e\0CRC4", b"\0\x0e\0CRC4"),
        (b"\x0e\0CRC4OFFSET-8", b"\0\x0e\0CRC4OFFSET-8"),
        (b"", b"\0\0\0"),
        (b"\x0e", b"\0\x0e\0"),
        (b"\x0e\0CR", b"\0\x0e\0"),
        (b"\x0e\0CRC4OFF", b"\0\x0e\0CRC4"),
        (b"\x0e\0CRC4OFFSET-8 and more", b"\0\x0e\0CRC4OFFSET-8"),
    ],
)
def test_row_of_format_1_is_converted_to_a_typed_row(old: bytes, new: bytes) -> None:
    assert add_type(old) == new


def test_converted_batch_of_format_1_equals_a_typed_batch() -> None:
    typed = encode_noop(
        origin=ORIGIN,
        base=5,
        count=2,
        code=ErrorCode.CONFLICT,
        epoch=3,
        clock=[Dot(3, 4)],
        priority=Priority.HIGH,
        previous=2,
        counters=[5, 9],
        hybrid_time=77,
        refused_crc=5,
        first_offsets=[8, None],
        ids=[bytes(16), b"i" * 16],
    )
    old = without_types(typed)
    assert len(old.blob(0)) == 14
    assert with_control_types(old).raw == typed.raw
