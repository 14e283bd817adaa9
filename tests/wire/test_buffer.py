"""The receive buffer: bytes come out in order, in pieces of any size, and its memory is bounded."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.buffer import BUFFER_BYTES_MAX, BUFFER_BYTES_MIN, SMALL_READS_MAX, ReceiveBuffer
from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Heartbeat
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, HEADER_BYTES

SIZES = st.integers(0, 50) | st.integers(0, 3 * BUFFER_BYTES_MIN)


@given(steps=st.lists(st.tuples(st.booleans(), SIZES)))
def test_bytes_come_out_in_order(steps: list[tuple[bool, int]]) -> None:
    buffer, expected, byte_values = ReceiveBuffer(100_000), b"", itertools.cycle(range(251))
    for into_buffer, size in steps:
        chunk = bytes(itertools.islice(byte_values, size))
        if into_buffer:
            space = buffer.get_buffer(len(buffer) + size)
            chunk = chunk[: len(space)]
            space[: len(chunk)] = chunk
            buffer.buffer_updated(len(chunk))
        else:
            buffer.feed(chunk)
        expected += chunk
        assert len(buffer) == len(expected)
        taken = min(len(buffer), size * 2 // 3)
        assert buffer.peek(taken) == expected[:taken]
        assert buffer.take(taken) == expected[:taken]
        expected = expected[taken:]
    assert buffer.take(len(buffer)) == expected


def test_peek_consumes_nothing() -> None:
    buffer = ReceiveBuffer(100)
    buffer.feed(b"abc")
    assert buffer.peek(4) is None
    assert buffer.peek(2) == b"ab"
    assert len(buffer) == 3


def test_taken_bytes_are_unaffected_by_later_writes() -> None:
    buffer = ReceiveBuffer(100)
    chunk = bytearray(b"abcdef")
    buffer.feed(chunk)
    taken = buffer.take(4)
    chunk[:] = b"XXXXXX"
    buffer.feed(b"ghi" * 50)
    assert taken == b"abcd"


def test_feeding_beyond_the_bound_is_refused() -> None:
    buffer = ReceiveBuffer(100)
    buffer.feed(bytes(HEADER_BYTES + 99))
    buffer.feed(bytes(50))
    with pytest.raises(UsageError, match="take the events"):
        buffer.feed(b"x")
    buffer.take(50)
    buffer.feed(b"x")


def test_receiving_beyond_the_bound_is_refused() -> None:
    buffer = ReceiveBuffer(10 * BUFFER_BYTES_MAX)
    while len(buffer) < BUFFER_BYTES_MAX:
        buffer.buffer_updated(len(buffer.get_buffer()))
    with pytest.raises(UsageError, match="take the events"):
        buffer.get_buffer()
    buffer.take(1)
    assert len(buffer.get_buffer()) == 1


def test_read_size_grows_with_traffic_and_shrinks_afterwards() -> None:
    buffer, sizes = ReceiveBuffer(FRAME_PAYLOAD_BYTES_MAX), []
    for _ in range(6):
        sizes.append(len(buffer.get_buffer()))
        buffer.buffer_updated(sizes[-1])
        buffer.take(sizes[-1])
    assert sizes == [4096, 16_384, 65_536, 262_144, 262_144, 262_144]
    for _ in range(SMALL_READS_MAX + 2):
        buffer.buffer_updated(len(buffer.get_buffer()[:9]))
        buffer.take(9)
    assert len(buffer.get_buffer()) == BUFFER_BYTES_MIN


def test_memory_of_a_large_frame_is_released() -> None:
    buffer, frame_bytes = ReceiveBuffer(FRAME_PAYLOAD_BYTES_MAX), 9_000_000
    reads = 0
    while len(buffer) < frame_bytes:
        space = buffer.get_buffer(frame_bytes)
        assert len(buffer) + len(space) <= 4 * max(len(buffer), BUFFER_BYTES_MAX)
        buffer.buffer_updated(len(space))
        reads += 1
    assert len(buffer) == frame_bytes
    assert reads < 10
    buffer.take(frame_bytes - 5)
    for _ in range(SMALL_READS_MAX):
        assert len(buffer.get_buffer(16)) > BUFFER_BYTES_MAX, (
            "the block shrank, though another large frame may follow"
        )
    assert len(buffer.get_buffer(16)) == BUFFER_BYTES_MAX - 5


def test_consecutive_large_frames_reuse_the_same_memory() -> None:
    buffer, frame_bytes = ReceiveBuffer(FRAME_PAYLOAD_BYTES_MAX), 300_000
    blocks = set()
    for _ in range(100):
        buffer.buffer_updated(len(buffer.get_buffer()[:16]))  # the header announces a large frame
        while len(buffer) < frame_bytes:
            space = buffer.get_buffer(frame_bytes)
            buffer.buffer_updated(min(len(space), 100_000, frame_bytes - len(buffer)))
        blocks.add(id(buffer.unread().obj))
        buffer.take(frame_bytes)
    assert len(blocks) <= 3


def test_memory_is_bounded_for_a_stream_of_any_length() -> None:
    decoder = Decoder()
    chunk = encode(Heartbeat(1)) * 1001
    tracemalloc.start()
    try:
        for _ in range(20):
            decoder.receive(chunk[:-3])
            decoder.receive(chunk[-3:])
            while decoder.next_event() is not NEED_BYTES:
                pass
        assert tracemalloc.get_traced_memory()[1] < 10 * len(chunk)
    finally:
        tracemalloc.stop()
    assert decoder.buffered_bytes == 0
