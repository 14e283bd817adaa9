"""Compressible frames and their compressed form, for the tests of compressed segments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.segments.compressed import compress_frame
from delta_prop_broker.segments.frames import FrameScanner
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.compression import Compression
from delta_prop_wire.encode import encode_vectors
from tests.broker.durable import SMALL, Writer, commit, open_log

if TYPE_CHECKING:
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.settings import Compress, LogSettings
    from delta_prop_broker.retention.segment_compression import SegmentCompression
    from delta_prop_broker.segments.frames import FrameLocation
    from delta_prop_wire.batch import Batch, LoggedBatch


def compressible_batch(rows: int, base: int, *, dimension: int = 64, origin: int = 16) -> Batch:
    """Return a batch that every codec makes much smaller."""
    values = np.tile(np.arange(dimension, dtype=np.float32) % 7, (rows, 1))
    keys = [f"v-{base + row:06}" for row in range(rows)]
    return encode_vectors(keys, values, namespace="n", origin=origin, base=base)


def logged_frames(*, frame_count: int = 6, with_small: bool = True) -> list[LoggedBatch]:
    """Return consecutive frames of a log: large ones that shrink, and every third one too small for that."""
    log, _ = open_log(SimDisk())
    writer = Writer(log)
    for number in range(frame_count):
        if number % 3 == 2 and with_small:
            writer.append(1)
        else:
            writer.append_batch(compressible_batch(6, writer.counter + 1))
        commit(log)
    return [location.logged for location in log.frames()]


def stored_form(logged: LoggedBatch, codec: Compression) -> bytes:
    """Return the bytes of the frame in a compressed segment."""
    packed = compress_frame(logged.head, logged.batch.body, codec)
    return logged.head + bytes(logged.batch.body) if packed is None else packed


def scan_frames(raw: bytes, base: int = 0) -> list[FrameLocation]:
    """Return the locations of all frames of a file with these bytes."""
    disk = SimDisk()
    disk.put("file", raw)
    file = disk.open("file", read_only=True)
    return list(FrameScanner(file, position=0, offset=base, end=len(raw), previous_crc=None))


COMPRESSED = replace(SMALL, segment_bytes_max=4_500, bytes_max=60_000, retention_bytes=50_000, compress="lz4")


def compress_next_segment(log: DurableLog) -> SegmentCompression | None:
    """Compress the next segment, as the service does; after a disk error the log stays usable."""
    compression = log.take_compression()
    if compression is None:
        return None
    is_final = False
    try:
        while not is_final:
            is_final = compression.step()
    except LogCorrupted:
        is_final = True
        raise
    finally:
        compression.close()
        log.finish_compression(compression, retry=not is_final)
    return compression


def compressed_log(
    codec: Compress = "lz4", *, batches: int = 9, settings: LogSettings = COMPRESSED
) -> tuple[SimDisk, Writer, int]:
    """Return the disk and writer of a log with all sealed segments compressed, and its uncompressed size."""
    disk = SimDisk()
    log, _ = open_log(disk, replace(settings, compress=codec))
    writer = Writer(log)
    for _ in range(batches):
        writer.append_batch(compressible_batch(6, writer.counter + 1))
        commit(log)
    uncompressed_bytes = log.statistics().bytes
    while compress_next_segment(log) is not None:
        pass
    return disk, writer, uncompressed_bytes
