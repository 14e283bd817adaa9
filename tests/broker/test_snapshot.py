"""The snapshot file: written rows are found, and every changed byte is detected."""

from __future__ import annotations

import numpy as np
import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.retention.snapshot import (
    OriginWatermark,
    Snapshot,
    SnapshotFacts,
    SnapshotWriter,
    newest_snapshot,
    open_snapshot,
    snapshot_path,
)
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import Dot
from delta_prop_wire.state_rows import StateRow, encode_states, state_of
from tests.broker.durable import LOG_ID

FACTS = SnapshotFacts(LOG_ID, 40, time_us=1_700_000_000_000_000, lamport=44, chain_crc=0xABCD)
WATERMARKS = {3: OriginWatermark(2, 17, (Dot(5, 1), Dot(9, 8))), 5: OriginWatermark(1, 1)}
PATH = snapshot_path(DIRECTORY, 40)


def state_row(namespace: str, key: str, number: int) -> StateRow:
    state = VectorState(True, np.array([number], np.float32), None, {"n": number}, 0, (number, 3, number))
    return StateRow(namespace, key, state, number - 1)


def write_snapshot(disk: SimDisk, frames: list[list[StateRow]]) -> Snapshot:
    disk.make_directory(DIRECTORY)
    writer = SnapshotWriter(disk, DIRECTORY, FACTS)
    for rows in frames:
        writer.append(encode_states(rows))
    return writer.finish(WATERMARKS, alive=sum(map(len, frames)), out_of_order=0, unfolded=0)


FRAMES = [
    [state_row("a", "x", 1), state_row("a", "y", 2)],
    [state_row("a", "é", 3), state_row("b", "a", 4)],
    [state_row("b", "b", 5)],
]


def test_written_rows_are_read_and_found_by_name() -> None:
    disk = SimDisk()
    write_snapshot(disk, FRAMES).close()
    snapshot = open_snapshot(disk.crash(), DIRECTORY, 40)
    snapshot.verify()
    assert (snapshot.offset, snapshot.rows, snapshot.lamport, snapshot.log_id) == (40, 5, 44, LOG_ID)
    assert dict(snapshot.watermarks) == WATERMARKS
    assert [logged.batch.keys for logged in snapshot.frames()] == [["x", "y"], ["é", "a"], ["b"]]
    for expected in (row for frame in FRAMES for row in frame):
        found = snapshot.find(expected.namespace, expected.vector_id)
        assert found is not None
        logged, row = found
        assert logged.row_offset(row) == expected.offset
        assert state_of(logged.batch, row).content == expected.state.content
    for namespace, key in (("a", "w"), ("a", "z"), ("b", "aa"), ("c", "a"), ("", "x")):
        assert snapshot.find(namespace, key) is None


def test_frames_are_read_by_number() -> None:
    snapshot = write_snapshot(SimDisk(), FRAMES)
    keys = [["x", "y"], ["é", "a"], ["b"]]
    assert snapshot.frame_count == 3
    for start in range(3):
        for stop in range(start, 4):
            found = [logged.batch.keys for logged in snapshot.frames(start, stop)]
            assert found == keys[start:stop]
        assert [logged.batch.keys for logged in snapshot.frames(start)] == keys[start:]


def test_snapshot_without_rows_is_valid() -> None:
    snapshot = write_snapshot(SimDisk(), [])
    snapshot.verify()
    assert list(snapshot.frames()) == []
    assert snapshot.find("a", "x") is None


def test_newest_snapshot_must_belong_to_the_log() -> None:
    disk = SimDisk()
    assert newest_snapshot(disk, DIRECTORY, LOG_ID) is None
    write_snapshot(disk, FRAMES).close()
    disk.put(snapshot_path(DIRECTORY, 39), b"older, so it is not read")
    newest = newest_snapshot(disk, DIRECTORY, LOG_ID)
    assert newest is not None
    assert newest.offset == 40
    with pytest.raises(LogCorrupted, match="it belongs to log"):
        newest_snapshot(disk, DIRECTORY, bytes(16))
    disk.rename(PATH, snapshot_path(DIRECTORY, 41))
    with pytest.raises(LogCorrupted, match="offset 40 under another name"):
        newest_snapshot(disk, DIRECTORY, LOG_ID)


def test_flipped_bit_is_found() -> None:
    disk = SimDisk()
    write_snapshot(disk, [[state_row("a", "x", 1)], [state_row("a", "y", 2)]]).close()
    intact = disk.peek(PATH)
    for position in range(len(intact)):
        for bit in range(8):
            disk.flip(PATH, position, bit)
            with pytest.raises(LogCorrupted, match=PATH):
                open_snapshot(disk, DIRECTORY, 40).verify()
            disk.flip(PATH, position, bit)
    assert disk.peek(PATH) == intact


@pytest.mark.parametrize("size_change", [1, 8, 200, 600])
def test_truncated_or_extended_snapshot_is_corruption(size_change: int) -> None:
    disk = SimDisk()
    write_snapshot(disk, FRAMES).close()
    intact = disk.peek(PATH)
    for wrong in (intact[:-size_change], intact + bytes(size_change)):
        disk.put(PATH, wrong)
        with pytest.raises(LogCorrupted, match=PATH):
            open_snapshot(disk, DIRECTORY, 40).verify()
