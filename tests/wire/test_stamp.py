"""The stamp: its exact layout, its checksum, and its link to the previous stamp."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.codec import encode_head
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, Priority, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.header import pack_header, unpack_header
from delta_prop_wire.spec import (
    COUNTER_MAX,
    FRAME_PAYLOAD_BYTES_MAX,
    HEADER_BYTES,
    STAMP_BYTES,
    ErrorCode,
    Flag,
    FrameType,
)
from delta_prop_wire.stamp import (
    DEFAULT_LOG,
    Stamp,
    pack_logged_head,
    pack_producer_stamp,
    pack_stamp,
    stamp_crc,
    unpack_stamp,
)
from tests.native_core import NativeCore, needs_native_core

HEADER = pack_header(FrameType.BATCH, Flag.BATCHED, 17, 128)
STAMP = Stamp(
    lamport=0x1111111111111111,
    source=Source.TRANSFORM,
    append_time=0x2222222222222222,
    previous_crc=0x33333333,
    body_crc=0x44444444,
    synced_offset=0x5555555555555555,
    leader_epoch=0x66666666,
    stream=0x77777777,
    partition=0x8888,
)
U32 = st.integers(0, (1 << 32) - 1)
NUMBERS = st.integers(0, COUNTER_MAX)


def test_stamp_layout_is_exact() -> None:
    raw = pack_stamp(STAMP, HEADER)
    assert raw[4:].hex(" ") == (
        "66 66 66 66 77 77 77 77 88 88 03 00 22 22 22 22 22 22 22 22 11 11 11 11 11 11 11 11 "
        "33 33 33 33 44 44 44 44 55 55 55 55 55 55 55 55"
    )
    assert struct.unpack("<I", raw[:4])[0] == crc32c(HEADER + raw[4:]) == stamp_crc(raw)


def test_numbers_are_little_endian() -> None:
    raw = pack_stamp(Stamp(lamport=1, append_time=2, synced_offset=3, leader_epoch=4, partition=5), HEADER)
    assert (raw[4], raw[12], raw[16], raw[24], raw[40]) == (4, 5, 2, 1, 3)


@given(
    stamp=st.builds(
        Stamp, NUMBERS, st.sampled_from(Source), NUMBERS, U32, U32, NUMBERS, U32, U32, st.integers(0, 65535)
    )
)
def test_stamp_round_trips(stamp: Stamp) -> None:
    raw = pack_stamp(stamp, HEADER)
    unpacked = unpack_stamp(raw, HEADER)
    assert unpacked == stamp
    assert len(raw) == STAMP_BYTES
    assert unpacked.crc == stamp_crc(raw)


STAMPS = st.builds(Stamp, NUMBERS, st.sampled_from(Source), NUMBERS, U32, st.just(0), NUMBERS)


@given(NUMBERS, STAMPS, st.sampled_from(Priority))
def test_logged_head_equals_the_general_head(offset: int, stamp: Stamp, priority: Priority) -> None:
    batch = encode_batch([Delta("a", create([1.0]))], origin=1, base=1, priority=priority)
    head, crc = pack_logged_head(
        batch,
        offset,
        lamport=stamp.lamport,
        source=stamp.source,
        time=stamp.append_time,
        previous_crc=stamp.previous_crc,
        synced_offset=stamp.synced_offset,
    )
    assert head == encode_head(batch, offset, dataclasses.replace(stamp, body_crc=batch.crc))
    assert crc == stamp_crc(head[HEADER_BYTES:])


@needs_native_core
@given(
    NUMBERS,
    STAMPS,
    st.sampled_from([1, 3, 5, 9, 11, 16]),  # valid and invalid flags
    st.sampled_from([48, 47, 1 << 20, FRAME_PAYLOAD_BYTES_MAX + 1]),
    st.integers(0, 64 * 8),
)
def test_native_head_decoder_agrees_with_the_general_one(
    sequence: int, stamp: Stamp, flags: int, length: int, flipped_bit: int
) -> None:
    header = pack_header(FrameType.BATCH, flags ^ 1 | Flag.BATCHED, sequence, length)
    raw = bytearray(header + pack_stamp(stamp, header))
    if flipped_bit < 64 * 8:
        raw[flipped_bit // 8] ^= 1 << flipped_bit % 8
    try:
        parsed = unpack_header(raw)
        general_stamp = unpack_stamp(raw[HEADER_BYTES:], raw[:HEADER_BYTES])
    except ProtocolError:
        parsed = general_stamp = None
    native = NativeCore().unpack_logged_head(bytes(raw))
    if (
        parsed is None
        or general_stamp is None
        or parsed.type is not FrameType.BATCH
        or parsed.flags & Flag.COMPRESSED
    ):
        assert native is None
    else:
        assert native == (parsed.sequence, parsed.length, general_stamp)
        assert native[2].crc == general_stamp.crc


def test_producer_stamp_holds_only_its_partition() -> None:
    assert pack_producer_stamp(HEADER, DEFAULT_LOG) == pack_stamp(Stamp(), HEADER)
    assert unpack_stamp(pack_producer_stamp(HEADER, DEFAULT_LOG), HEADER).is_from_producer
    assert unpack_stamp(pack_stamp(Stamp(stream=7, partition=3), HEADER), HEADER).is_from_producer
    assert not unpack_stamp(pack_stamp(Stamp(append_time=1), HEADER), HEADER).is_from_producer


def test_zero_stamp_is_refused() -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack_stamp(bytes(48), HEADER)
    assert caught.value.code is ErrorCode.CHECKSUM


def test_stamp_holds_the_checksum_of_the_previous_one() -> None:
    first = pack_stamp(STAMP, HEADER)
    second = unpack_stamp(
        pack_stamp(dataclasses.replace(STAMP, previous_crc=stamp_crc(first)), HEADER), HEADER
    )
    assert second.previous_crc == stamp_crc(first)


@pytest.mark.parametrize("part", ["stamp", "header"])
def test_every_flipped_bit_breaks_the_checksum(part: str) -> None:
    stamp, header = bytearray(pack_stamp(STAMP, HEADER)), bytearray(HEADER)
    corrupted = stamp if part == "stamp" else header
    for bit in range(8 * len(corrupted)):
        corrupted[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError) as caught:
            unpack_stamp(stamp, header)
        assert caught.value.code is ErrorCode.CHECKSUM
        corrupted[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    ("position", "byte", "message"),
    [(14, 4, "source 4"), (15, 3, "known ids 3"), (31, 0x80, "Lamport"), (47, 0x80, "synced offset")],
)
def test_invalid_stamp_field_is_refused_despite_its_checksum(position: int, byte: int, message: str) -> None:
    raw = bytearray(pack_stamp(STAMP, HEADER))
    raw[position] = byte
    raw[:4] = struct.pack("<I", crc32c(HEADER + raw[4:]))
    with pytest.raises(ProtocolError, match=message) as caught:
        unpack_stamp(raw, HEADER)
    assert caught.value.code is ErrorCode.BAD_FRAME
