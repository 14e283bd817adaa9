"""Compaction of a log that is far larger than the memory that compaction may use."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.retention.compaction import Compaction, SegmentRange, run_to_end
from delta_prop_broker.retention.snapshot import open_snapshot
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import Delta, Source, sparse_add
from delta_prop_wire.encode import encode_batch, encode_vectors
from tests.broker.durable import LOG_ID, Clock, FixedRandomness, commit

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1024 * 1024
KEYS = 10_000
FLOATS = 256


def make_large_log(path: Path) -> DurableLog:
    """Make a log of about 24 MiB: full vectors, some of which are overwritten or changed later."""
    settings = LogSettings(segment_bytes_max=2 * MIB, reserve_bytes=0, free_bytes_min=0, compact=False)
    log, _ = DurableLog.open(LocalDisk(path), settings=settings, randomness=FixedRandomness(), clock=Clock())
    ids = [f"vector-{number:06}" for number in range(KEYS)]
    matrix = np.ones((200, FLOATS), np.float32)
    base = 1
    for first in range(0, 2 * KEYS, 200):
        keys = [ids[(first + 7 * row) % KEYS] for row in range(200)]
        batch = encode_vectors(keys, matrix * first, namespace="n", origin=1, base=base)
        log.append(batch, lamport=base, source=Source.LOCAL)
        base += 200
        if first % 1_000 == 0:
            changes = [Delta(key, sparse_add([3], [1.0]), "n") for key in keys[:50]]
            log.append(encode_batch(changes, origin=1, base=base), lamport=base, source=Source.LOCAL)
            base += 50
            commit(log)
    commit(log)
    return log


def test_compaction_memory_is_bounded(tmp_path: Path) -> None:
    log = make_large_log(tmp_path)
    segments = [
        SegmentRange(segment.path, segment.base, segment.end) for segment in list(log.segments.all)[:-1]
    ]
    size = sum(segment.size for segment in log.segments.all)
    disk = LocalDisk(tmp_path)
    compaction = Compaction(
        disk, DIRECTORY, log_id=LOG_ID, segments=segments, previous=None, run_bytes_max=2 * MIB
    )
    tracemalloc.start()
    assert run_to_end(compaction)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"{size / MIB:.0f} MiB of log in {compaction.run_count} runs, {peak / MIB:.1f} MiB at the peak")
    assert compaction.run_count > 5
    assert size > 18 * MIB
    assert peak < 12 * MIB
    snapshot = open_snapshot(disk, DIRECTORY, compaction.offset)
    snapshot.verify()
    snapshot.close()
    log.close()
