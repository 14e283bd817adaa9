"""A small log on a simulated disk, and helpers that append to it, commit and read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.encode import encode_vectors
from delta_prop_wire.errors import Refused
from delta_prop_wire.stamp import unpack_stamp

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.recovery.recovery import RecoveryReport
    from delta_prop_wire.batch import Batch, LoggedBatch

LOG_ID = bytes(range(16))
SMALL = LogSettings(
    segment_bytes_max=2_000,
    bytes_max=40_000,
    retention_bytes=30_000,
    unwritten_bytes_max=20_000,
    tail_bytes_max=1,
    free_bytes_min=0,
    compact=False,
    made_by="test",
)
EVERYTHING = {"rows_max": 1 << 20, "bytes_max": 1 << 30}
SEGMENTS = DIRECTORY


START_US = 1_700_000_000_000_000


@dataclass
class Clock:
    """A monotonic clock that advances by `step_us` at each read, and a wall clock, ahead by `off_us`."""

    us: int = START_US
    step_us: int = 1_000_000
    off_us: int = 0

    def now(self) -> float:
        self.us += self.step_us
        return (self.us - START_US) / 1e6

    def wall_us(self) -> int:
        return self.us + self.off_us

    def wait(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)


class FixedRandomness:
    """A source that returns the same bytes each time, those of `LOG_ID` if none are given."""

    def __init__(self, drawn: bytes = LOG_ID) -> None:
        self._drawn = drawn

    def bytes(self, count: int) -> bytes:
        return self._drawn[:count]


def open_log(
    disk: Disk, settings: LogSettings = SMALL, *, read_only: bool = False, clock: Clock | None = None
) -> tuple[DurableLog, RecoveryReport]:
    return DurableLog.open(
        disk,
        settings=settings,
        randomness=FixedRandomness(),
        clock=clock or Clock(),
        read_only=read_only,
    )


def batch_of(
    rows: int, base: int = 1, *, origin: int = 16, level: AckLevel = AckLevel.DURABLE, dimension: int = 1
) -> Batch:
    values = np.arange(rows * dimension, dtype=np.float32).reshape(rows, dimension) + base
    keys = [f"v-{base + row:06}" for row in range(rows)]
    return encode_vectors(keys, values, namespace="n", origin=origin, base=base, ack_level=level)


@dataclass
class Writer:
    """Appends distinguishable batches and records their frames."""

    log: DurableLog
    counter: int = 0
    appended: dict[int, bytes] = field(default_factory=dict)  # offset to the full frame

    def append(
        self, rows: int = 2, *, level: AckLevel = AckLevel.DURABLE, origin: int = 16, dimension: int = 1
    ) -> LoggedBatch:
        return self.append_batch(
            batch_of(rows, self.counter + 1, level=level, origin=origin, dimension=dimension)
        )

    def append_batch(self, batch: Batch) -> LoggedBatch:
        logged = self.log.append(batch, lamport=self.log.next_offset + 1, source=Source.LOCAL)
        self.counter += batch.count
        self.appended[logged.offset] = frame(logged)
        return logged


def commit(log: DurableLog, *, sync: bool = False) -> bool:
    """Run one full commit on this thread; an error of the disk fails the log and is raised."""
    taken = log.take_commit(sync=sync)
    if taken is None:
        return False
    try:
        taken.run()
    except OSError as error:
        log.fail(error)
        raise
    log.finish_commit(taken)
    return True


def append_until_refused(writer: Writer, *, commits: bool = True) -> Refused:
    """Append until the log refuses; return the refusal."""
    while True:
        try:
            writer.append()
        except Refused as refusal:
            return refusal
        if commits:
            commit(writer.log)


def frame(logged: LoggedBatch) -> bytes:
    return logged.head + bytes(logged.batch.body)


def contents(log: DurableLog, **bounds: int) -> dict[int, bytes]:
    """Return all visible frames by offset, read in order; check their offsets and their stamps."""
    frames: dict[int, bytes] = {}
    offset = log.start_offset
    while batches := log.read(offset, **(bounds or EVERYTHING)):
        for logged in batches:
            assert logged.offset == offset, "offsets must have no gap and no duplicate"
            stamp = unpack_stamp(logged.head[16:64], logged.head[:16])
            assert stamp is not None
            assert (stamp.lamport, stamp.source) == (logged.lamport, logged.source)
            frames[offset] = frame(logged)
            offset = logged.next_offset
    assert offset == log.high_watermark
    return frames
