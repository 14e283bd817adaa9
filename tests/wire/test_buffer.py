"""The receive buffer: what goes in comes out in pieces of the size asked for, and memory stays bounded."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.buffer import ReceiveBuffer
from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Heartbeat
from delta_prop_wire.spec import HEADER_BYTES


@given(chunks=st.lists(st.binary(max_size=50)), sizes=st.lists(st.integers(0, 30)))
def test_bytes_come_out_in_order(chunks: list[bytes], sizes: list[int]) -> None:
    buffer = ReceiveBuffer(10_000)
    for chunk in chunks:
        buffer.feed(chunk)
    expected = b"".join(chunks)
    for size in sizes:
        taken = buffer.take(size)
        if size > len(expected):
            assert taken is None
        else:
            assert taken is not None
            assert bytes(taken) == expected[:size]
            expected = expected[size:]
    assert len(buffer) == len(expected)


def test_peeking_takes_nothing() -> None:
    buffer = ReceiveBuffer(100)
    buffer.feed(b"abc")
    assert buffer.peek(4) is None
    assert buffer.peek(2) == b"ab"
    assert len(buffer) == 3


def test_what_was_taken_is_read_only_and_stays() -> None:
    buffer = ReceiveBuffer(100)
    chunk = bytearray(b"abcdef")
    buffer.feed(chunk)
    taken = buffer.take(4)
    assert taken is not None
    assert taken.readonly
    chunk[:] = b"XXXXXX"
    buffer.feed(b"ghi" * 50)
    assert bytes(taken) == b"abcd"


def test_feeding_on_without_taking_is_refused() -> None:
    buffer = ReceiveBuffer(100)
    buffer.feed(bytes(HEADER_BYTES + 99))
    buffer.feed(bytes(50))
    with pytest.raises(UsageError, match="take the events"):
        buffer.feed(b"x")
    buffer.take(50)
    buffer.feed(b"x")


def test_memory_is_one_frame_and_one_chunk_however_long_the_stream() -> None:
    decoder = Decoder()
    chunk = encode(Heartbeat(1)) * 1000 + encode(Heartbeat(1))[:5]
    chunk += encode(Heartbeat(1))[5:]
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
