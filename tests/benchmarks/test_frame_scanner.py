"""The bulk reader's FrameScanner counts every row, wherever the stream is split, and reports a gap."""

from __future__ import annotations

import pytest

from benchmarks._peers_scenes import FrameScanner
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame, Heartbeat


def frame(offset: int, counter: int, rows: int) -> bytes:
    deltas = [Delta("k", opaque(b"x" * 20)) for _ in range(rows)]
    return encode(BatchFrame(offset, encode_batch(deltas, origin=1, base=counter)))


@pytest.mark.parametrize("chunk_bytes", [1, 7, 16, 33, 100, 1_000])
def test_scanner_counts_rows_wherever_stream_is_split(chunk_bytes: int) -> None:
    stream = frame(50, 1, 3) + encode(Heartbeat(1, sent_us=5)) + frame(53, 4, 1) + frame(54, 5, 10)
    scanner = FrameScanner(50)
    for start in range(0, len(stream), chunk_bytes):
        scanner.take(memoryview(stream)[start : start + chunk_bytes])
        assert scanner.rows <= 14
    assert scanner.rows == 14
    assert not scanner.is_unfinished


def test_incomplete_frame_is_unfinished() -> None:
    scanner = FrameScanner(0)
    scanner.take(memoryview(frame(0, 1, 4))[:-1])
    assert (scanner.rows, scanner.is_unfinished) == (4, True)


@pytest.mark.parametrize(("offset", "counter"), [(51, 1), (50, 2)])
def test_gap_is_reported(offset: int, counter: int) -> None:
    with pytest.raises(RuntimeError, match=f"offset {offset}, counter {counter}"):
        FrameScanner(50).take(memoryview(frame(offset, counter, 3)))
