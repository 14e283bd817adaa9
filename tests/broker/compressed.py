"""Frames that shrink, and their compressed form, for the tests of compressed segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.log.compressed import compress_frame
from delta_prop_broker.log.frames import Walk
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.compression import Compression
from delta_prop_wire.encode import encode_vectors
from tests.broker.durable import Writer, commit, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.frames import Place
    from delta_prop_wire.batch import Batch, LoggedBatch


def shrinking(rows: int, base: int, *, dimension: int = 64, origin: int = 16) -> Batch:
    """A batch that any codec makes much smaller."""
    values = np.tile(np.arange(dimension, dtype=np.float32) % 7, (rows, 1))
    keys = [f"v-{base + row:06}" for row in range(rows)]
    return encode_vectors(keys, values, namespace="n", origin=origin, base=base)


def logged_frames(*, large: int = 4, small: int = 2) -> list[LoggedBatch]:
    """Frames of a log one behind the other: large ones that shrink, and small ones that stay as they are."""
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    for number in range(large + small):
        if number % 3 == 2 and small:
            writer.append(1)
        else:
            writer.append_batch(shrinking(6, writer.counter + 1))
        commit(log)
    return [place.logged for place in log.frames()]


def stored(logged: LoggedBatch, codec: Compression) -> bytes:
    """The frame as a compressed segment holds it."""
    packed = compress_frame(logged.head, logged.batch.body, codec)
    return logged.head + bytes(logged.batch.body) if packed is None else packed


def walked(raw: bytes, base: int = 0) -> list[Place]:
    """All frames of a file with these bytes."""
    disk = SimDisk()
    disk.put("file", raw)
    file = disk.open("file", read_only=True)
    return list(Walk(file, position=0, offset=base, end=len(raw), previous_crc=None))
