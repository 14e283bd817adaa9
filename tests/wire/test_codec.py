"""The codec against golden bytes, every split point, truncation, flipped bits and garbage."""

from __future__ import annotations

import dataclasses
import json
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest

from delta_prop_wire.codec import NEED_BYTES, Decoder, decode, encode, encode_head
from delta_prop_wire.compression import Compression
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.encode import encode_batch, encode_noop, encode_vectors
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import (
    BatchFrame,
    DeltaFrame,
    Frame,
    Heartbeat,
)
from delta_prop_wire.header import CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX, pack_header
from delta_prop_wire.spec import COUNTER_MAX, FRAME_PAYLOAD_BYTES_MAX, ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import DEFAULT_LOG, Stamp, pack_producer_stamp
from tests.wire.samples import (
    COMPRESSED,
    DOCS,
    ORIGIN,
    SAMPLES,
    SPARSE,
    STAMP,
    small_batch,
    to_json_value,
)
from tests.wire.sealing import frame_with_checksum

NAMES = pytest.mark.parametrize("name", SAMPLES)
WITH_DELTAS = pytest.mark.parametrize(
    "name", [name for name in SAMPLES if name.startswith(("delta", "batch"))]
)


def take_events(decoder: Decoder) -> list[Frame]:
    received = []
    while (event := decoder.next_event()) is not NEED_BYTES:
        received.append(event)
    return received


def decode_chunks(*chunks: bytes) -> list[Frame]:
    decoder = Decoder()
    frames = []
    for chunk in chunks:
        decoder.receive(chunk)
        frames += take_events(decoder)
    assert decoder.buffered_bytes == 0
    return frames


def golden_entries() -> dict[str, dict[str, Any]]:
    entries = json.loads((DOCS / "protocol-golden.json").read_text())
    return {entry["name"]: entry for entry in entries["frames"]}


# --- golden bytes


def test_first_golden_frame_encodes_and_decodes() -> None:
    frame = bytes.fromhex("D3 01 05 00 00 00 00 00 00 00 00 01 00 00 00 00")
    assert encode(Heartbeat(1)) == frame
    assert decode(frame) == Heartbeat(1)


def test_every_sample_has_golden_bytes() -> None:
    assert list(golden_entries()) == list(SAMPLES)


@NAMES
def test_sample_encodes_to_its_golden_bytes(name: str) -> None:
    entry = golden_entries()[name]
    raw = bytes.fromhex(entry["hex"])
    assert encode(SAMPLES[name]) == raw
    assert decode(raw) == SAMPLES[name]
    assert entry["type"] == FrameType(raw[2]).name
    assert entry["fields"] == to_json_value(decode(raw))


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_golden_frames_are_read(name: str) -> None:
    raw, sample = COMPRESSED[name]
    entries = json.loads((DOCS / "protocol-golden.json").read_text())["compressed"]
    assert {"name": name, "type": "BATCH", "hex": raw.hex(), "is": sample} in entries
    assert decode(raw) == SAMPLES[sample]
    flipped = bytearray(raw)
    for bit in range(8 * len(raw)):
        flipped[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.receive(flipped)
        with suppress(ProtocolError):
            assert take_events(decoder) in ([], [SAMPLES[sample]]), bit
        flipped[bit // 8] ^= 1 << bit % 8


# --- streams


@NAMES
def test_frame_is_decoded_at_once_or_byte_by_byte(name: str) -> None:
    frame, raw = SAMPLES[name], encode(SAMPLES[name])
    assert decode_chunks(raw) == [frame]
    assert decode_chunks(*(bytes((byte,)) for byte in raw)) == [frame]
    decoder = Decoder()
    decoder.receive(raw + raw[:7])
    assert take_events(decoder) == [frame]
    assert decoder.buffered_bytes == 7
    decoder.receive(raw[7:])
    assert take_events(decoder) == [frame]


@NAMES
def test_frame_is_decoded_at_every_split_point(name: str) -> None:
    frame, raw = SAMPLES[name], encode(SAMPLES[name])
    for split in range(1, len(raw)):
        assert decode_chunks(raw[:split], raw[split:]) == [frame]


@NAMES
def test_flipped_bit_is_refused_or_has_no_effect(name: str) -> None:
    """A heartbeat without fields has no checksum: a flipped bit may change its sequence, and nothing else."""
    frame, raw = SAMPLES[name], bytearray(encode(SAMPLES[name]))
    for bit in range(8 * len(raw)):
        raw[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.receive(raw)
        with suppress(ProtocolError):
            decoded = take_events(decoder)
            are_bare = all(
                isinstance(event, Heartbeat) and event == Heartbeat(event.sequence) for event in decoded
            )
            assert decoded in ([], [frame]) or (frame == Heartbeat(1) and are_bare), bit
        raw[bit // 8] ^= 1 << bit % 8


@NAMES
def test_truncated_frame_is_never_an_event(name: str) -> None:
    raw = encode(SAMPLES[name])
    for length in range(len(raw)):
        decoder = Decoder()
        decoder.receive(raw[:length])
        assert decoder.next_event() is NEED_BYTES
        assert decoder.buffered_bytes == length
        with pytest.raises(ProtocolError):
            decode(raw[:length])


def test_consecutive_frames_are_decoded_from_any_chunks() -> None:
    raw = b"".join(encode(frame) for frame in SAMPLES.values())
    for size in (1, 15, 16, 17, 64, 1000, len(raw)):
        chunks = [raw[start : start + size] for start in range(0, len(raw), size)]
        assert decode_chunks(*chunks) == list(SAMPLES.values())


def test_decoded_frame_is_unaffected_by_later_frames() -> None:
    decoder = Decoder()
    decoder.receive(encode(SAMPLES["batch"]))
    (first,) = take_events(decoder)
    decoder.receive(encode(SAMPLES["batch from the log"]) * 20)
    assert len(take_events(decoder)) == 20
    assert first == SAMPLES["batch"]


# --- corruption


@WITH_DELTAS
def test_every_flipped_bit_is_refused_or_gives_a_frame_of_the_same_type(name: str) -> None:
    frame = SAMPLES[name]
    raw = bytearray(encode(frame))
    accepted_positions = set()
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.receive(raw)
        try:
            event = decoder.next_event()
        except ProtocolError:
            pass
        else:
            accepted_positions.add(bit // 8)
            assert event is NEED_BYTES or isinstance(event, type(frame))
            assert not isinstance(event, BatchFrame) or event.stamp is None or event == frame
        raw[bit // 8] ^= 1 << bit % 8
    # Flags that a reader ignores, sequence, length.
    assert accepted_positions <= {3, *range(4, 12), *range(12, 16)}
    if name == "batch from the log":
        # The stamp covers the header; a decoder waits for a longer frame.
        assert accepted_positions <= set(range(12, 16))


@NAMES
def test_flipped_bits_raise_only_protocol_errors(name: str) -> None:
    raw = bytearray(encode(SAMPLES[name]))
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        assert_only_protocol_error(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8


def assert_only_protocol_error(raw: bytes) -> None:
    decoder = Decoder()
    decoder.receive(raw)
    try:
        for event in take_events(decoder):
            read_all_rows(event)
            encode(event)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            decoder.next_event()


def read_all_rows(event: Frame) -> None:
    """Read every row of an accepted frame."""
    if not isinstance(event, BatchFrame) or not event.batch.is_control:
        to_json_value(event)


def test_garbage_raises_only_protocol_errors(full: bool) -> None:
    rng = random.Random(7)
    for _ in range(200_000 if full else 3_000):
        kind = rng.randrange(8)
        payload = rng.randbytes(rng.randrange(200))
        flags = Flag.BATCHED if kind == FrameType.BATCH else 0
        if kind == FrameType.DELTA:
            payload += crc32c(payload).to_bytes(4, "little")
        assert_only_protocol_error(frame_with_checksum(FrameType(kind), payload, flags=flags))
        assert_only_protocol_error(rng.randbytes(60))


def test_error_is_permanent_and_frees_the_buffer() -> None:
    decoder = Decoder()
    decoder.receive(encode(Heartbeat(1)) + b"GET / HTTP/1.1\r\n" + encode(Heartbeat(2)))
    assert decoder.next_event() == Heartbeat(1)
    for _ in range(3):
        with pytest.raises(ProtocolError, match="starts with byte 0x47") as caught:
            decoder.next_event()
        assert caught.value.code is ErrorCode.BAD_FRAME
        decoder.receive(encode(Heartbeat(3)))
        assert decoder.buffered_bytes == 0


def test_header_of_the_failed_frame_is_available() -> None:
    payload = msgpack.packb({"level": 9})
    decoder = Decoder()
    decoder.receive(frame_with_checksum(FrameType.BACKPRESSURE, payload, sequence=77))
    with pytest.raises(ProtocolError, match=r"Backpressure: field 'level' is 9: send one of 0 ok, 1 warn"):
        decoder.next_event()
    assert decoder.header is not None
    assert decoder.header.sequence == 77


# --- bounds


def decode_error(raw: bytes) -> ProtocolError:
    decoder = Decoder()
    decoder.receive(raw)
    with pytest.raises(ProtocolError) as caught:
        decoder.next_event()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "flags", "bound"),
    [
        (FrameType.BATCH, Flag.BATCHED, FRAME_PAYLOAD_BYTES_MAX),
        (FrameType.DELTA, 0, DELTA_PAYLOAD_BYTES_MAX),
        (FrameType.ACK, 0, CONTROL_PAYLOAD_BYTES_MAX),
        (FrameType.SUBSCRIBE, 0, CONTROL_PAYLOAD_BYTES_MAX),
    ],
)
def test_oversized_frame_is_refused_by_its_header(kind: FrameType, flags: int, bound: int) -> None:
    decoder = Decoder()
    decoder.receive(pack_header(kind, flags, 1, bound))
    assert decoder.next_event() is NEED_BYTES
    tracemalloc.start()
    try:
        error = decode_error(pack_header(kind, flags, 1, bound + 1))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert error.code is ErrorCode.TOO_LARGE
    assert str(bound) in error.message


def test_announced_size_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        decoder = Decoder()
        decoder.receive(pack_header(FrameType.BATCH, Flag.BATCHED, 1, FRAME_PAYLOAD_BYTES_MAX))
        assert decoder.next_event() is NEED_BYTES
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_decoder_with_a_lower_bound_refuses_larger_frames() -> None:
    decoder = Decoder(payload_bytes_max=4096)
    decoder.receive(pack_header(FrameType.SUBSCRIBE, 0, 1, 4097))
    with pytest.raises(ProtocolError, match="the maximum is 4096"):
        decoder.next_event()


def test_small_frame_cannot_announce_gigabytes() -> None:
    for bomb in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 1000,
        b"\x91" * 5000,
        b"\x81\xa1x" * 5000,
        b"\x81\xa1x" + b"\xdc\x13\x88" * 60 + b"\x00" * 5000,
    ):
        tracemalloc.start()
        try:
            error = decode_error(frame_with_checksum(FrameType.ACK, bomb))
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert error.code is ErrorCode.BAD_FRAME


def test_batch_near_the_size_bound_is_decoded() -> None:
    row_count = 250
    matrix = np.ones((row_count, 16_000), np.float32)
    batch = encode_vectors([f"k{i}" for i in range(row_count)], matrix, namespace="n", origin=1, base=1)
    assert batch.size > 15 * 1024 * 1024
    raw = encode(BatchFrame(1, batch))
    assert decode_chunks(raw[:1000], raw[1000:9_000_000], raw[9_000_000:]) == [BatchFrame(1, batch)]


# --- header rules


@pytest.mark.parametrize(
    ("position", "byte", "code"),
    [
        (0, 0x53, ErrorCode.BAD_FRAME),
        (1, 2, ErrorCode.UNSUPPORTED_VERSION),
        (1, 0, ErrorCode.UNSUPPORTED_VERSION),
        (2, 8, ErrorCode.BAD_FRAME),
        (2, 255, ErrorCode.BAD_FRAME),
        (3, 1, ErrorCode.BAD_FRAME),
        (3, 2, ErrorCode.BAD_FRAME),
        (3, 4, ErrorCode.BAD_FRAME),
        (3, 8, ErrorCode.BAD_FRAME),
    ],
)
def test_invalid_header_byte_is_refused(position: int, byte: int, code: ErrorCode) -> None:
    raw = bytearray(encode(Heartbeat(1)))
    raw[position] = byte
    assert decode_error(bytes(raw)).code is code


@pytest.mark.parametrize("name", ["delta", "batch"])
@pytest.mark.parametrize("flag", [16, 32, 64, 128])
def test_deltas_with_unknown_flags_are_refused(name: str, flag: int) -> None:
    raw = bytearray(encode(SAMPLES[name]))
    raw[3] |= flag
    assert decode_error(bytes(raw)).code is ErrorCode.UNSUPPORTED_FLAG


def test_batch_without_the_batched_flag_is_refused() -> None:
    raw = bytearray(encode(SAMPLES["batch"]))
    raw[3] &= ~Flag.BATCHED
    error = decode_error(bytes(raw))
    assert error.code is ErrorCode.BAD_FRAME
    assert "bit 3" in error.message


@pytest.mark.parametrize("priority", Priority)
def test_payload_priority_overrides_the_priority_bit(priority: Priority) -> None:
    delta = dataclasses.replace(SPARSE, priority=priority)
    batch = encode_batch([SPARSE], origin=ORIGIN, base=1, priority=priority)
    for frame in (DeltaFrame(1, delta), BatchFrame(1, batch)):
        raw = bytearray(encode(frame))
        assert bool(raw[3] & Flag.HIGH_PRIORITY) == (priority <= Priority.HIGH)
        raw[3] ^= Flag.HIGH_PRIORITY
        assert decode(recompute_checksum(raw)) == frame


def recompute_checksum(raw: bytearray) -> bytes:
    """Return a Delta or a producer's Batch with the checksum of its changed header."""
    if raw[2] == FrameType.BATCH:
        raw[16:64] = pack_producer_stamp(bytes(raw[:16]), DEFAULT_LOG)
    else:
        raw[-4:] = crc32c(bytes(raw[:-4])).to_bytes(4, "little")
    return bytes(raw)


def test_batch_shorter_than_its_stamp_is_refused() -> None:
    assert (
        decode_error(pack_header(FrameType.BATCH, Flag.BATCHED, 1, 47) + bytes(47)).code
        is ErrorCode.BAD_FRAME
    )


def test_batch_sequence_beyond_the_bound_is_refused() -> None:
    batch = small_batch()
    assert decode(encode(BatchFrame(COUNTER_MAX - 2, batch))) == BatchFrame(COUNTER_MAX - 2, batch)
    assert decode_error(encode(BatchFrame(COUNTER_MAX - 1, batch))).code is ErrorCode.BAD_FRAME


# --- stamped and compressed batches


def test_head_and_body_concatenate_to_the_frame() -> None:
    batch = small_batch()
    head = encode_head(batch, 17, STAMP)
    assert len(head) == 64
    assert decode(head + batch.body) == BatchFrame(17, batch, STAMP)


@pytest.mark.parametrize("codec", Compression)
@pytest.mark.parametrize("stamp", [None, STAMP])
def test_compressed_batch_decodes_to_the_same_frame(codec: Compression, stamp: Stamp | None) -> None:
    row_count = 100
    batch = encode_vectors(
        [f"k{i}" for i in range(row_count)],
        np.zeros((row_count, 64), np.float32),
        namespace="n",
        origin=1,
        base=1,
    )
    stamp = stamp and dataclasses.replace(stamp, body_crc=batch.crc)
    frame = BatchFrame(3, batch, stamp)
    raw = encode(frame, compression=codec)
    assert len(raw) < batch.size // 4
    assert raw[3] & Flag.COMPRESSED
    assert raw[64] == codec
    assert decode_chunks(raw) == [frame]
    assert raw[16:64] == encode(frame)[16:64]


def test_small_batches_are_not_compressed() -> None:
    assert encode(SAMPLES["batch"], compression=Compression.ZSTD) == encode(SAMPLES["batch"])


def test_stamp_of_another_body_is_refused() -> None:
    stamp = dataclasses.replace(STAMP, body_crc=1)
    error = decode_error(encode(BatchFrame(17, small_batch(), stamp)))
    assert error.code is ErrorCode.CHECKSUM
    assert "stamp" in error.message


def test_stamp_of_a_forwarder_has_no_body_checksum() -> None:
    frame = BatchFrame(17, small_batch(), Stamp(lamport=5, source=Source.REPLICA), ack_wanted=True)
    assert decode_chunks(encode(frame)) == [frame]


def test_lamport_beyond_the_bound_is_refused() -> None:
    frame = BatchFrame(17, small_batch(), Stamp(lamport=COUNTER_MAX))
    assert decode_error(encode(frame)).code is ErrorCode.BAD_FRAME


def test_control_batch_round_trips() -> None:
    batch = encode_noop(origin=ORIGIN, base=1, count=3, code=ErrorCode.INVALID_DELTA)
    assert decode_chunks(encode(BatchFrame(1, batch))) == [BatchFrame(1, batch)]
