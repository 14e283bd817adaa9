"""The parts of a log directory hold each row below the high watermark once, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")

from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition  # noqa: E402
from delta_prop.spark.data_source import segments  # noqa: E402
from delta_prop.spark.data_source.segments import log_of, states_of  # noqa: E402
from delta_prop.spark.jobs.counting import open_logs_for_counting  # noqa: E402
from delta_prop.spark.states.buckets import bucket_count_for, fold_blobs, spread  # noqa: E402
from delta_prop.spark.states.changes import CHANGES, changes_of, split_keys  # noqa: E402
from delta_prop.spark.states.folding import fold  # noqa: E402
from delta_prop.spark.states.folding_rows import state_of_row  # noqa: E402
from delta_prop_broker.corruption import LogCorrupted  # noqa: E402
from delta_prop_wire import delta as d  # noqa: E402
from delta_prop_wire.delta import Delta  # noqa: E402
from delta_prop_wire.errors import Refused, UsageError  # noqa: E402
from tests.broker.durable import SEGMENTS  # noqa: E402
from tests.broker.histories import Rows, Step, Writer, comparable, steps_with_ids  # noqa: E402
from tests.delta_prop.spark.logs import COMPACTING, TINY, write  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

HISTORY = [
    Step([Delta(f"v{(number * 3 + row) % 11}", d.create([number, row])) for row in range(4)], 1, 0)
    for number in range(40)
]


@pytest.fixture(autouse=True)
def one_segment_per_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "PART_BYTES", 1)


def offsets(log: segments.LogView) -> list[int]:
    row_offsets: list[int] = []
    for part in log.parts:
        table = pa.Table.from_batches([changes_of(one, log.end) for one in part.batches()], CHANGES)
        rows = table.filter(
            pa.array([offset >= log.start for offset in table.column("offset").to_pylist()], pa.bool_())
        )
        row_offsets += rows.column("offset").to_pylist()
    return row_offsets


def states(log: segments.LogView, bucket_count: int = 3) -> dict[Any, Any]:
    """Fold the parts of a log in this process; return each vector's state."""
    spread_batches: list[Any] = [
        batch for part in log.parts for batch in spread(part.batches(), bucket_count, log.end)
    ]
    state_by_name = {}
    for bucket in range(bucket_count):
        blobs = [
            one.filter(
                pa.array([bucket_of_row == bucket for bucket_of_row in one.column(0).to_pylist()], pa.bool_())
            )
            for one in spread_batches
        ]
        blobs = pa.Table.from_batches(blobs).sort_by("first").to_batches() if blobs else []
        table = fold_blobs(blobs)
        names = [one.to_pylist() for one in split_keys(table.column("key").combine_chunks())]
        for namespace, vector_id, row in zip(*names, table.to_pylist(), strict=True):
            assert (namespace, vector_id) not in state_by_name
            state_by_name[namespace, vector_id] = comparable(state_of_row(row))
    return state_by_name


def expected_states(writer: Writer, end: int = 1 << 60) -> dict[Any, Any]:
    return {name: comparable(state) for name, state in Rows.below(writer.batches, end).fold().items()}


def test_full_log_is_read_from_its_segments(tmp_path: Path) -> None:
    writer = write(tmp_path, HISTORY)
    log = log_of(str(tmp_path))
    assert (log.start, log.end, log.is_complete) == (0, 160, True)
    assert len(log.parts) > 5
    assert offsets(log) == list(range(160))
    assert states(states_of(str(tmp_path))) == expected_states(writer)


def test_small_segments_are_read_by_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, HISTORY)
    monkeypatch.setattr(segments, "PART_BYTES", 1 << 20)
    log = log_of(str(tmp_path))
    assert len(log.parts) == 1
    assert offsets(log) == list(range(160))


@pytest.mark.parametrize(("start", "end"), [(0, 1), (3, 150), (41, 43), (159, 160), (100, 100), (160, 200)])
def test_only_the_requested_range_is_read(tmp_path: Path, start: int, end: int) -> None:
    write(tmp_path, HISTORY)
    log = log_of(str(tmp_path), start=LogPosition(offset=start), end=LogPosition(offset=end))
    assert offsets(log) == list(range(start, min(end, 160)))


def test_range_that_starts_beyond_the_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, HISTORY)
    with pytest.raises(
        UsageError, match=r"offset 161 is after the end of the log .its last delta has offset 15"
    ):
        log_of(str(tmp_path), start=LogPosition(offset=161))


def test_state_at_an_offset_includes_that_offset(tmp_path: Path) -> None:
    writer = write(tmp_path, HISTORY)
    for offset in (0, 1, 57, 159):
        assert states(states_of(str(tmp_path), at=LogPosition(offset=offset))) == expected_states(
            writer, offset + 1
        )
    with pytest.raises(UsageError, match="offset 160 is after the end of the log: give an offset below 160"):
        states_of(str(tmp_path), at=LogPosition(offset=160))


def test_state_at_a_time_includes_rows_appended_by_then(tmp_path: Path) -> None:
    writer = write(tmp_path, HISTORY)
    start_us = 1_700_000_000_000_000
    for seconds in (0, 5, 20, 1_000):
        log = states_of(str(tmp_path), at=LogPosition(time_us=start_us + seconds * 1_000_000))
        assert states(log) == expected_states(writer, log.end)
        assert log.end % 4 == 0
    assert states_of(str(tmp_path), at=LogPosition(time_us=1)).end == 0


@given(st.lists(steps_with_ids, min_size=4, max_size=20))
def test_parts_of_any_log_give_its_fold(
    tmp_path_factory: pytest.TempPathFactory, history: list[Step]
) -> None:
    path = tmp_path_factory.mktemp("log")
    writer = write(path, history)
    assert states(states_of(str(path))) == expected_states(writer)


def test_compacted_log_starts_with_its_snapshot(tmp_path: Path) -> None:
    writer = write(tmp_path, HISTORY, COMPACTING)
    log = states_of(str(tmp_path))
    assert log.start > 0
    assert log.is_complete
    assert states(log) == expected_states(writer)
    assert states(states_of(str(tmp_path), at=LogPosition(offset=log.start + 2))) == expected_states(
        writer, log.start + 3
    )
    with pytest.raises(Refused, match="the log holds uncompacted deltas from offset"):
        states_of(str(tmp_path), at=LogPosition(offset=log.start - 2))
    with pytest.raises(Refused, match="offset 0 is no longer in the log"):
        log_of(str(tmp_path), start=LogPosition(offset=0))
    assert offsets(log_of(str(tmp_path)))[-1] == 159


def test_planning_leaves_no_file_open(tmp_path: Path) -> None:
    write(tmp_path, HISTORY)
    write(tmp_path / "compacted", HISTORY, COMPACTING)
    before = len(os.listdir("/proc/self/fd"))
    open_logs_for_counting(str(tmp_path), EARLIEST, LATEST)
    for path in (tmp_path, tmp_path / "compacted"):
        states_of(str(path))
        with pytest.raises(UsageError):
            states_of(str(path), at=LogPosition(offset=1_000))
    with pytest.raises(Refused):
        log_of(str(tmp_path / "compacted"), start=LogPosition(offset=0))
    assert len(os.listdir("/proc/self/fd")) == before


def test_compacted_log_without_a_snapshot_is_incomplete(tmp_path: Path) -> None:
    write(tmp_path, HISTORY, COMPACTING)
    for snapshot in (tmp_path / SEGMENTS).glob("*.snapshot"):
        snapshot.unlink()
    log = states_of(str(tmp_path))
    assert not log.is_complete
    assert log.start > 0
    assert states(log)


def test_compressed_segments_are_read_like_others(tmp_path: Path) -> None:
    pytest.importorskip("lz4")
    numbers = [float(one % 7) for one in range(64)]
    history = [
        Step([Delta(f"v{(number + row) % 9}", d.create(numbers)) for row in range(6)], 1, 0)
        for number in range(30)
    ]
    larger = replace(TINY, segment_bytes_max=4_500)
    writer = write(tmp_path / "packed", history, replace(larger, compress="lz4"))
    write(tmp_path / "plain", history, larger)
    assert states(states_of(str(tmp_path / "packed"))) == expected_states(writer)
    assert states_of(str(tmp_path / "packed")).bytes < states_of(str(tmp_path / "plain")).bytes * 0.8


def test_snapshot_removed_while_reading_is_reported(tmp_path: Path) -> None:
    write(tmp_path, HISTORY, COMPACTING)
    log = states_of(str(tmp_path))
    for snapshot in (tmp_path / SEGMENTS).glob("*.snapshot"):
        snapshot.unlink()
    with pytest.raises(Refused, match="was replaced by a newer one while it was read: start the job again"):
        states(log)


def test_corruption_is_reported_and_not_skipped(tmp_path: Path) -> None:
    write(tmp_path, HISTORY)
    log = states_of(str(tmp_path))
    path = sorted((tmp_path / SEGMENTS).glob("*.log"))[2]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(LogCorrupted):
        states(log)


def test_ordered_rows_are_folded_early_and_others_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delta_prop.spark.states.buckets._BUFFER_BYTES", 1)
    folds: list[int] = []
    monkeypatch.setattr(
        "delta_prop.spark.states.buckets.fold", lambda changes: (folds.append(1), fold(changes))[1]
    )
    writer = write(tmp_path / "ordered", HISTORY)
    assert states(states_of(str(tmp_path / "ordered")), 1) == expected_states(writer)
    assert len(folds) > 4
    folds.clear()
    out_of_order = [
        replace(step, lamport_lag=3 * (number % 2), origin=1 + number % 2)
        for number, step in enumerate(HISTORY)
    ]
    writer = write(tmp_path / "forwarded", out_of_order)
    assert states(states_of(str(tmp_path / "forwarded")), 1) == expected_states(writer)
    assert len(folds) == 1


def test_large_log_is_spread_over_more_buckets() -> None:
    assert [bucket_count_for(size) for size in (0, 1 << 20, 1 << 30, 1 << 50)] == [1, 1, 32, 10_000]
