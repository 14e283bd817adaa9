"""Recorded traffic reads back as written, and contains neither names nor content."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.directory.recorded_traffic import (
    BLOCK_HEAD,
    BLOCK_ROWS,
    FILE_HEAD,
    SALT_BYTES,
    RecordedTraffic,
    TrafficWriter,
)
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Priority,
    Source,
    create,
    dense,
    opaque,
    sparse,
)
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

SALT = bytes(range(SALT_BYTES))
SECOND_US = 1_000_000
GOLDEN = bytes.fromhex(
    "d374726166666963010000000700000000000000eba56c66"
    "3200000001000000010000001e5a26a840420f00000000002025ee2e"
    "780163646060d895142d933f598b17c804838de90a179ca40acb18813c250ea820030b90a17ab178d9a7c3edb10002930af0"
    "00000000000000000000000000000000405489000000000001dbc94e"
)
"""One row: the file's head, the head of a block, the block's compressed columns, the last block."""


def record(*batches: tuple[Batch, int], salt: bytes = SALT, block_per_batch: bool = False) -> bytes:
    """Return the bytes of a complete recording; with `block_per_batch`, one block per batch."""
    writer = TrafficWriter(salt)
    parts = [writer.begin(7)]
    for batch, time_us in batches:
        parts.append(writer.add(batch, time_us, Source.IMPORT))
        if block_per_batch:
            parts.append(writer.flush())
    return b"".join([*parts, writer.end(9 * SECOND_US)])


def open_recording(raw: bytes, piece_bytes: int = 1000) -> RecordedTraffic:
    pieces = [raw[start : start + piece_bytes] for start in range(0, len(raw), piece_bytes)]
    return RecordedTraffic(pieces, "'some.trace'")


def encode_rows(*deltas: Delta, base: int = 1, **more: AckLevel | Priority) -> Batch:
    return encode_batch(deltas, origin=5, base=base, **more)  # type: ignore[arg-type]


A_BATCH = encode_rows(
    Delta("doc-1", create([1.0, 2.0]), namespace="docs"),
    Delta("row-9", opaque(b"twelve bytes"), namespace="rows", metadata={"a": 1}),
    Delta("doc-1", sparse([1], [4.0]), namespace="docs"),
    priority=Priority.HIGH,
    ack_level=AckLevel.DURABLE,
)


def test_recorded_batch_is_read_back_equal() -> None:
    (batch,) = open_recording(record((A_BATCH, SECOND_US))).batches()
    assert (batch.time_us, batch.priority, batch.ack_level) == (SECOND_US, Priority.HIGH, AckLevel.DURABLE)
    assert (batch.source, batch.kinds, batch.count) == (Source.IMPORT, A_BATCH.kinds, 3)
    assert batch.numbers.tolist() == [2, 0, 1]
    assert batch.sizes.tolist() == [5 + 8, 5 + 12 + 4, 5 + 8]
    assert batch.keys[0] == batch.keys[2] != batch.keys[1]
    assert batch.namespaces[0] == batch.namespaces[2] != batch.namespaces[1]


def test_recording_bytes_equal_golden_bytes() -> None:
    raw = record((encode_rows(Delta("v", opaque(b"abc"))), SECOND_US))
    columns = slice(FILE_HEAD.size + BLOCK_HEAD.size, -BLOCK_HEAD.size)
    assert raw[: FILE_HEAD.size] == GOLDEN[: FILE_HEAD.size]
    assert raw[-BLOCK_HEAD.size :] == GOLDEN[-BLOCK_HEAD.size :]
    # Compressed bytes may differ between zlib versions; their content does not.
    assert zlib.decompress(raw[columns]) == zlib.decompress(GOLDEN[columns])
    (batch,) = open_recording(GOLDEN).batches()
    assert (batch.origin, *batch.keys.tolist()) == (8534631643105748913, 6739570814325346597)
    assert (batch.time_us, *batch.sizes.tolist()) == (SECOND_US, 4)


def test_recording_contains_no_names_or_content() -> None:
    raw = record((A_BATCH, 1), block_per_batch=True)
    decoded = b"".join(bytes(str(batch), "ascii") for batch in open_recording(raw).batches())
    for name in (b"doc-1", b"row-9", b"docs", b"rows", b"twelve"):
        assert name not in raw
        assert name not in decoded
    other = record((A_BATCH, 1), salt=bytes(SALT_BYTES))
    (first,), (second,) = open_recording(raw).batches(), open_recording(other).batches()
    assert not {*first.keys.tolist(), *first.namespaces.tolist(), first.origin} & {
        *second.keys.tolist(),
        *second.namespaces.tolist(),
        second.origin,
    }


def test_same_id_in_two_namespaces_is_two_vectors() -> None:
    batch = encode_rows(Delta("v", opaque(b""), namespace="a"), Delta("v", opaque(b""), namespace="b"))
    (read_back,) = open_recording(record((batch, 1))).batches()
    assert read_back.keys[0] != read_back.keys[1]


def test_noops_are_not_recorded() -> None:
    noop = encode_noop(origin=5, base=1, count=1, code=ErrorCode.INVALID_DELTA)
    assert list(open_recording(record((noop, 1))).batches()) == []


def test_recording_takes_few_bytes_per_row() -> None:
    batches = [
        (
            encode_rows(
                *(Delta(f"some-document-{n}", dense([0.5] * 16)) for n in range(start, start + 100)),
                base=start + 1,
            ),
            start,
        )
        for start in range(0, 20_000, 100)
    ]
    raw = record(*batches)
    assert len(raw) / 20_000 < 12  # a hash alone takes eight bytes
    assert sum(batch.count for batch in open_recording(raw).batches()) == 20_000


def test_block_is_written_when_full() -> None:
    writer = TrafficWriter(SALT)
    batch = encode_rows(*(Delta(f"v{n}", opaque(b"")) for n in range(BLOCK_ROWS - 1)))
    assert writer.add(batch, 1, Source.LOCAL) == b""
    assert writer.add(batch, 2, Source.LOCAL)
    assert writer.pending_row_count == 0


def test_clock_set_back_does_not_reorder_arrivals() -> None:
    batches = [(A_BATCH, 5 * SECOND_US), (A_BATCH, 2 * SECOND_US), (A_BATCH, 6 * SECOND_US)]
    for block_per_batch in (False, True):
        arrivals = open_recording(record(*batches, block_per_batch=block_per_batch)).arrivals()
        assert [arrival.at_s for arrival in arrivals] == [0, 0, 1]


def test_speed_two_halves_arrival_times() -> None:
    arrivals = open_recording(record((A_BATCH, SECOND_US), (A_BATCH, 3 * SECOND_US))).arrivals(speed=2)
    assert [arrival.at_s for arrival in arrivals] == [0, 1]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_speed_not_above_zero_is_rejected(speed: float) -> None:
    with pytest.raises(UsageError, match="give a number above 0"):
        next(open_recording(record()).arrivals(speed))


def test_complete_recording_gives_begin_and_end_times() -> None:
    recording = open_recording(record((A_BATCH, 1)))
    assert len(list(recording.batches())) == 1
    assert (recording.began_us, recording.ended_us, recording.fault) == (7, 9 * SECOND_US, None)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not a traffic recording"),
        (b"something else that is longer than a head", "not a traffic recording"),
        (record()[:8] + b"\2" + record()[9:], "version 2"),
        (record()[:16] + b"\xff" + record()[17:], "corrupted in its first bytes"),
    ],
)
def test_bytes_that_are_not_a_recording_are_rejected(raw: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        list(open_recording(raw).batches())


def test_truncated_recording_is_read_up_to_last_full_block() -> None:
    raw = record((A_BATCH, 1), (A_BATCH, 2), block_per_batch=True)
    first_end = len(record((A_BATCH, 1), block_per_batch=True)) - BLOCK_HEAD.size
    for size in range(FILE_HEAD.size, len(raw)):
        recording = open_recording(raw[:size], piece_bytes=7)
        second_end = first_end + first_end - FILE_HEAD.size
        assert len(list(recording.batches())) == (size >= first_end) + (size >= second_end)
        assert recording.fault is not None
        assert "truncated" in recording.fault


@settings(max_examples=40)
@given(st.data())
def test_corruption_is_reported_and_earlier_blocks_are_read(data: st.DataObject) -> None:
    raw = bytearray(record((A_BATCH, 1), (A_BATCH, 2), block_per_batch=True))
    position = data.draw(st.integers(FILE_HEAD.size, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    recording = open_recording(bytes(raw))
    times = [batch.time_us for batch in recording.batches()]
    assert times == [1, 2][: len(times)]
    assert recording.fault is not None


rows = st.tuples(
    st.text("abé☃", min_size=1, max_size=5),
    st.sampled_from(["a", "b", "c"]),
    st.one_of(
        st.binary(max_size=9).map(opaque),
        st.lists(st.just(1.0), min_size=1, max_size=4).map(dense),
        st.lists(st.just(1.0), min_size=1, max_size=4).map(lambda values: sparse(range(len(values)), values)),
    ),
)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.lists(rows, min_size=1, max_size=5),
            st.integers(0, 10**15),
            st.sampled_from(Priority),
            st.sampled_from([AckLevel.LOGGED, AckLevel.DURABLE]),
        ),
        max_size=6,
    ),
    st.booleans(),
    st.integers(1, 100),
)
def test_any_recorded_batches_are_read_back_equal(
    recorded_batches: list[tuple[list[tuple[str, str, object]], int, Priority, AckLevel]],
    block_per_batch: bool,
    piece_bytes: int,
) -> None:
    batches = [
        (
            encode_rows(
                *(Delta(key, operation, namespace=namespace) for key, namespace, operation in rows),
                priority=priority,
                ack_level=level,
            ),
            time,
        )
        for rows, time, priority, level in recorded_batches
    ]
    raw = record(*batches, block_per_batch=block_per_batch)
    read_batches = list(open_recording(raw, piece_bytes).batches())
    assert [(len(rows), priority, level) for rows, _, priority, level in recorded_batches] == [
        (batch.count, batch.priority, batch.ack_level) for batch in read_batches
    ]
    key_by_name: dict[tuple[str, str], int] = {}
    for (batch, _), read_back in zip(batches, read_batches, strict=True):
        for row in range(batch.count):
            delta = batch.delta(row)
            op = delta.operation
            numbers = 0 if op.values is None else len(op.values)
            indices = 0 if op.indices is None else len(op.indices)
            assert read_back.kinds[row] == op.kind
            assert read_back.numbers[row] == numbers
            assert read_back.sizes[row] == len(delta.vector_id.encode()) + 4 * (numbers + indices) + len(
                op.data
            )
            key = int(read_back.keys[row])
            assert key_by_name.setdefault((delta.namespace, delta.vector_id), key) == key
    assert len(set(key_by_name.values())) == len(key_by_name)
