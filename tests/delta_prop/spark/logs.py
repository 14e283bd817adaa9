"""Log directories for tests of jobs: many small segments, some compacted or compressed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.retention.compaction import run_to_end
from tests.broker.durable import SMALL, Clock, commit, open_log
from tests.broker.histories import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from delta_prop_broker.log.settings import LogSettings
    from tests.broker.histories import Step

TINY = replace(SMALL, segment_bytes_max=900, bytes_max=1 << 22, retention_bytes=1 << 22)
COMPACTING = replace(TINY, retention_bytes=1_000, compact=True, min_compaction_lag_s=1.0)


def write(path: Path, history: Iterable[Step], settings: LogSettings = TINY) -> Writer:
    """Write a log, compact it if `settings` say so, and close it; return its writer."""
    clock = Clock()
    log, _ = open_log(LocalDisk(path), settings, clock=clock)
    writer = Writer(log)
    for step in history:
        writer.append(step)
        commit(log)
    while (compression := log.take_compression()) is not None:
        while not compression.step():
            pass
        compression.close()
        log.finish_compression(compression)
    if settings.compact:
        clock.wait(10)
        compaction = log.take_compaction()
        assert compaction is not None
        log.finish_compaction(compaction, made=run_to_end(compaction))
        assert log.retain()
        commit(log, sync=True)
    log.close()
    return writer
