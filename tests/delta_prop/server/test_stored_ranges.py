"""Ranges of closed partitions come from their small files; whatever is unclear is left to an opening."""

from __future__ import annotations

from contextlib import closing

import pytest

from delta_prop.server.stored_ranges import read_ranges
from delta_prop_broker.catalogue.stream import Stream
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.frames import PartitionRange
from tests.delta_prop.server.stored_logs import EPOCH, LOG_ID, write_log

STREAM = Stream("orders", 1, 65_535)
DIRECTORY = "streams/orders-1"


def test_clean_logs_have_ranges() -> None:
    disk = SimDisk(1)
    assert read_ranges(disk, STREAM).ranges == {}, "without the stream's directory"
    write_log(disk, f"{DIRECTORY}/12", start=4, end=9)
    write_log(disk, f"{DIRECTORY}/9", end=1)
    disk.make_directory(f"{DIRECTORY}/9-state")
    disk.make_directory(f"{DIRECTORY}/3")  # as a crash during its creation leaves it
    found = read_ranges(disk, STREAM)
    assert [*found.ranges.values()] == [
        PartitionRange(9, 0, Cursor(LOG_ID, EPOCH, 1)),
        PartitionRange(12, 4, Cursor(LOG_ID, EPOCH, 9)),
    ]
    assert found.unclear == []
    assert disk.list(f"{DIRECTORY}/3") == []


@pytest.mark.parametrize("defect", ["not clean", "no log", "no mark", "corrupted log", "corrupted mark"])
def test_other_logs_are_unclear(defect: str) -> None:
    disk = SimDisk(1)
    path = f"{DIRECTORY}/2"
    write_log(disk, path, end=9, clean=defect != "not clean")
    kind, _, name = defect.partition(" ")
    if kind == "no":
        disk.remove(f"{path}/{name}")
    elif kind == "corrupted":
        with closing(disk.open(f"{path}/{name}")) as file:
            for at in (0, 4096):
                file.write(at, [b"nonsense"])
    found = read_ranges(disk, STREAM)
    assert (found.ranges, found.unclear) == ({}, [2])
