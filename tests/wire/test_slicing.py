"""Sliced frames: rows keep the contents, dots and offsets that they have in the full frame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire import slicing
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.codec import decode, encode, encode_head
from delta_prop_wire.delta import AckLevel, Delta, Dot, KnownIds, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.slicing import FEW_ROWS, rows_of, select_rows, slice_rows
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode
from delta_prop_wire.stamp import Stamp
from tests.wire.test_frames import DELTAS


def logged_batch(batch: Batch, *, offset: int = 1000, lamport: int = 7000) -> LoggedBatch:
    stamp = Stamp(lamport, Source.IMPORT, 1_700_000_000_000_000, 5, batch.crc, 900)
    return LoggedBatch(batch, offset, lamport, Source.IMPORT, encode_head(batch, offset, stamp))


def sliced_frames(logged: LoggedBatch, rows: list[int]) -> list[BatchFrame]:
    """Return the frames of a slice as a subscriber gets them."""
    parts = slice_rows(logged, np.array(rows, np.intp))
    frames = []
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        frame = decode(head + body)
        assert isinstance(frame, BatchFrame)
        frames.append(frame)
    return frames


def expected_rows(logged: LoggedBatch, rows: list[int]) -> list[tuple[int, int, Delta]]:
    """Return these rows as the full frame has them."""
    return [
        (logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source)) for row in rows
    ]


def reencode(logged: LoggedBatch, rows: list[int]) -> Batch:
    """Encode the values of these rows with the general encoder."""
    batch = logged.batch
    return encode_batch(
        [batch.delta(row) for row in rows],
        origin=batch.origin,
        base=batch.counter(rows[0]),
        epoch=batch.epoch,
        clock=batch.clock,
        previous=batch.previous if batch.has_gaps else batch.base - 1,
        counters=[batch.counter(row) for row in rows],
        row_offsets=[logged.offset + row for row in rows],
        ack_level=batch.ack_level,
        priority=batch.priority,
        hybrid_time=batch.hybrid_time,
    )


@st.composite
def logged_batches(draw: st.DrawFn) -> LoggedBatch:
    deltas = draw(st.lists(DELTAS, min_size=1, max_size=5))
    few_namespaces = draw(st.booleans())
    with_ids = draw(st.booleans())
    with_times = draw(st.booleans())
    deltas = [
        replace(
            delta,
            timestamp=delta.timestamp if with_times else 0,
            id=bytes(15) + bytes((row,)) if with_ids else None,
            namespace=f"space {row % 2}" if few_namespaces else delta.namespace,
        )
        for row, delta in enumerate(deltas)
    ]
    counters = draw(st.none() | st.just([5 + 3 * row for row in range(len(deltas))]))
    return logged_batch(
        encode_batch(
            deltas,
            origin=7,
            base=5,
            epoch=3,
            previous=2 if counters else 0,
            counters=counters,
            clock=draw(st.sampled_from([(), (Dot(1, 9), Dot(3, 1))])),
            ack_level=draw(st.sampled_from(AckLevel)),
            priority=draw(st.sampled_from(Priority)),
            hybrid_time=draw(st.sampled_from([0, 99])),
        )
    )


@settings(max_examples=settings().max_examples // 2)
@given(logged=logged_batches(), data=st.data())
def test_sliced_frame_holds_the_rows_of_the_full_frame(logged: LoggedBatch, data: st.DataObject) -> None:
    rows = data.draw(st.sets(st.integers(0, logged.count - 1), min_size=1).map(sorted))
    (frame,) = sliced_frames(logged, rows)
    assert list(rows_of(frame)) == expected_rows(logged, rows)
    assert frame.sequence == logged.offset + rows[0]
    assert frame.batch.epoch == logged.batch.epoch
    assert frame.batch.ack_level == logged.batch.ack_level
    if all(is_encoded_plainly(logged.batch, row) for row in range(logged.count)):
        assert bytes(frame.batch.body) == bytes(reencode(logged, rows).body)


@settings(max_examples=settings().max_examples // 2)
@given(logged=logged_batches(), data=st.data())
def test_selected_rows_keep_their_content_and_dots(logged: LoggedBatch, data: st.DataObject) -> None:
    batch = logged.batch
    rows = data.draw(st.sets(st.integers(0, logged.count - 1), min_size=1).map(sorted))
    previous = data.draw(st.sampled_from([batch.counter(rows[0]) - 1, batch.previous]))
    clock = data.draw(st.sampled_from([(), batch.clock]))
    selected = select_rows(batch, np.array(rows, np.intp), previous=previous, clock=clock)
    frame = decode(encode(BatchFrame(1, selected)))
    assert isinstance(frame, BatchFrame)
    assert bytes(frame.batch.body) == bytes(selected.body)
    assert [replace(selected.delta(row), clock=()) for row in range(selected.count)] == [
        replace(batch.delta(row), clock=()) for row in rows
    ]
    assert (selected.clock, selected.epoch, selected.ack_level) == (clock, batch.epoch, batch.ack_level)
    assert selected.has_gaps == (
        batch.counter(rows[0]) != previous + 1 or selected.last - selected.base != selected.count - 1
    )
    assert selected.previous == (previous if selected.has_gaps else 0)
    assert selected.row_offsets is None


def is_encoded_plainly(batch: Batch, row: int) -> bool:
    """True if a row has neither a time of its own nor an empty list of numbers, which may be left out."""
    values = batch.operation(row).values
    return batch.timestamp(row) in (0, batch.hybrid_time) and (values is None or len(values) > 0)


def mixed_delta(row: int) -> Delta:
    """Return a delta whose kind and optional fields vary with the row."""
    operation = [
        d.create([row, 1, 2]),
        d.sparse([row, 7], [0.5, -1.5]),
        d.opaque(bytes(row % 9)),
        d.dense([row, 4, 4]),
        d.sparse_add([3], [row]),
        d.scale(row),
        d.offset(row),
        d.transform(f"function {row}"),
        d.delete(),
        d.metadata_only(),
        d.Operation(40, data=b"unknown"),
    ][row % 11]
    return Delta(
        f"vector ä {row % 13}",
        operation,
        f"space {row % 5}",
        id=row.to_bytes(16, "big"),
        parents=(Dot(9, row + 1), bytes(16))[: row % 3],
        timestamp=row * (row % 2),
        metadata={"row": row} if row % 4 == 0 else None,
        topics=(f"topic {row % 6}", "all")[: row % 3],
        expect=Dot(1, row) if row % 7 == 1 else None,
    )


ROW_COUNT = 400
BATCHES: dict[str, Batch] = {
    "mixed": encode_batch([mixed_delta(row) for row in range(ROW_COUNT)], origin=7, base=5),
    "mixed, with gaps": encode_batch(
        [mixed_delta(row) for row in range(ROW_COUNT)],
        origin=7,
        base=5,
        previous=1,
        counters=[5 + 2 * row for row in range(ROW_COUNT)],
    ),
    "opaque": encode_batch(
        [Delta(f"v{row}", d.opaque(bytes([row % 256]) * (row % 30))) for row in range(ROW_COUNT)],
        origin=7,
        base=5,
    ),
    "long": encode_batch(
        [Delta(f"v{row}", d.opaque(bytes([row % 256]) * 300)) for row in range(ROW_COUNT)], origin=7, base=5
    ),
    "vectors": encode_batch(
        [Delta(f"v{row}", d.create([row] * 8)) for row in range(ROW_COUNT)], origin=7, base=5
    ),
    "sparse": encode_batch(
        [Delta(f"v{row}", d.sparse(range(row % 5 + 1), [row] * (row % 5 + 1))) for row in range(ROW_COUNT)],
        origin=7,
        base=5,
    ),
    "two dimensions": encode_batch(
        [Delta(f"v{row}", d.dense([row] * (3 + row % 2))) for row in range(ROW_COUNT)], origin=7, base=5
    ),
    "deletes": encode_batch([Delta(f"v{row}", d.delete()) for row in range(ROW_COUNT)], origin=7, base=5),
}
CHOICES = {
    "one": [17],
    "first and last": [0, ROW_COUNT - 1],
    "few": [*range(3, ROW_COUNT, 40)],
    "of one kind": [*range(0, ROW_COUNT, 11)],
    "of one namespace": [*range(2, ROW_COUNT, 5)],
    "half": [*range(1, ROW_COUNT, 2)],
    "a run": [*range(100, 300)],
    "all": [*range(ROW_COUNT)],
}


@pytest.mark.parametrize("batch_name", BATCHES)
@pytest.mark.parametrize("choice", CHOICES)
def test_slice_of_a_large_batch_holds_its_rows(batch_name: str, choice: str) -> None:
    logged, rows = logged_batch(BATCHES[batch_name]), CHOICES[choice]
    (frame,) = sliced_frames(logged, rows)
    assert list(rows_of(frame)) == expected_rows(logged, rows)
    if "mixed" not in batch_name:
        assert bytes(frame.batch.body) == bytes(reencode(logged, rows).body)


@pytest.mark.parametrize("batch_name", BATCHES)
def test_few_and_many_rows_are_sliced_equally(batch_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged, rows = logged_batch(BATCHES[batch_name]), CHOICES["half"]
    monkeypatch.setattr(slicing, "LONG_PART_BYTES", 10**9)
    by_mask = slice_rows(logged, np.array(rows))
    monkeypatch.setattr(slicing, "FEW_ROWS", 10**9)
    assert slice_rows(logged, np.array(rows)) == by_mask
    assert len(rows) > FEW_ROWS


def test_sliced_frame_hides_names_of_removed_rows() -> None:
    logged = logged_batch(BATCHES["mixed"])
    (frame,) = sliced_frames(logged, [7])
    assert frame.batch.namespace_names == ("space 2",)
    assert frame.batch.namespace == "space 2"
    assert frame.batch.custom_topics == {"topic 1"}
    assert b"space 3" not in frame.batch.body
    assert b"topic 2" not in frame.batch.body


def test_sliced_frame_has_a_rebuilt_stamp() -> None:
    logged = logged_batch(BATCHES["opaque"])
    (frame,) = sliced_frames(logged, [3, 8])
    batch = frame.batch
    assert frame.stamp == Stamp(7003, Source.IMPORT, 1_700_000_000_000_000, 0, batch.crc, 0)
    assert frame.sequence == 1003
    assert (batch.base, batch.previous, batch.last) == (8, 4, 13)
    assert batch.row_offsets is not None
    assert batch.row_offsets.tolist() == [1003, 1008]
    without_head = LoggedBatch(
        logged.batch, logged.offset, logged.lamport, logged.source, known_ids=KnownIds.SOME
    )
    (frame,) = sliced_frames(without_head, [3])
    assert frame.stamp is not None
    assert frame.stamp.known_ids is KnownIds.SOME
    assert frame.stamp.append_time == 0


@settings(max_examples=settings().max_examples // 4)
@given(first=st.sets(st.integers(0, ROW_COUNT - 1), min_size=3), data=st.data())
def test_sliced_frame_can_be_sliced_further(first: set[int], data: st.DataObject) -> None:
    logged, rows = logged_batch(BATCHES["mixed, with gaps"]), sorted(first)
    second = data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1).map(sorted))
    parts = slice_rows(logged, np.array(rows))
    frame = decode(b"".join(parts))
    assert isinstance(frame, BatchFrame)
    assert frame.stamp is not None
    first_slice = LoggedBatch(frame.batch, frame.sequence, frame.stamp.lamport, frame.stamp.source, parts[0])
    assert slice_rows(first_slice, np.array(second)) == slice_rows(
        logged, np.array([rows[row] for row in second])
    )


def test_slice_above_the_frame_bound_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, rows = logged_batch(BATCHES["long"]), CHOICES["all"]
    monkeypatch.setattr("delta_prop_wire.encode.FRAME_PAYLOAD_BYTES_MAX", logged.batch.size)
    frames = sliced_frames(logged, rows)
    assert len(frames) == 2
    assert [row for frame in frames for row in rows_of(frame)] == expected_rows(logged, rows)


def test_single_row_above_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_prop_wire.encode.FRAME_PAYLOAD_BYTES_MAX", 200)
    with pytest.raises(Exception, match="TOO_LARGE"):
        slice_rows(logged_batch(BATCHES["long"]), np.array([1]))


# --- reading


@pytest.mark.parametrize(
    ("offsets", "sequence", "lamport", "is_stamped"),
    [
        ([5, 7], 4, 900, True),
        ([5, 5], 5, 900, True),
        ([7, 5], 7, 900, True),
        ([5, COUNTER_MAX + 1], 5, 0, True),
        ([5, 905], 5, COUNTER_MAX - 899, True),
        ([5, 7], 5, 900, False),
    ],
)
def test_invalid_row_offsets_are_refused(
    offsets: list[int], sequence: int, lamport: int, is_stamped: bool
) -> None:
    batch = encode_batch([Delta("a", d.delete())] * 2, origin=7, base=1, counters=[1, 3], row_offsets=offsets)
    stamp = Stamp(lamport, body_crc=batch.crc) if is_stamped else None
    with pytest.raises(ProtocolError, match="row offsets") as caught:
        decode(encode(BatchFrame(sequence, batch, stamp)))
    assert caught.value.code is ErrorCode.BAD_FRAME


def test_rows_of_a_full_frame_are_read() -> None:
    logged = logged_batch(BATCHES["mixed"])
    frame = decode(logged.head + bytes(logged.batch.body))
    assert isinstance(frame, BatchFrame)
    assert list(rows_of(frame)) == expected_rows(logged, [*range(ROW_COUNT)])


def test_noop_rows_are_skipped() -> None:
    noop = encode_noop(origin=7, base=5, count=3, code=ErrorCode.CONFLICT)
    assert list(rows_of(BatchFrame(5, noop, Stamp(9)))) == []
