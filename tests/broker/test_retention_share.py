"""The retention share of an offset grows with size and age up to 1, when the offset is due for removal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_broker.log.memory import MemoryLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Source
from tests.broker.durable import LOG_ID, SMALL, Clock, Writer, batch_of, commit, open_log

SETTINGS = replace(
    SMALL, segment_bytes_max=2_000, bytes_max=80_000, retention_bytes=20_000, retention_s=1_000.0
)


def test_rows_beyond_retention_bytes_are_removed_next() -> None:
    writer = Writer(open_log(SimDisk(), SETTINGS)[0])
    log = writer.log
    assert log.retention_share(0) == 0
    for _ in range(150):
        writer.append()
        commit(log)
    shares = {offset: log.retention_share(offset) for offset in writer.appended}
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert log.retain()
    assert max(share for offset, share in shares.items() if offset >= log.start_offset) <= 1
    assert min(share for offset, share in shares.items() if offset < log.start_offset) > 1
    assert log.retention_share(log.next_offset) == 0


@pytest.mark.parametrize("compact", [False, True])
def test_old_rows_are_removed_next_except_the_last_segment(compact: bool) -> None:
    clock = Clock(step_us=0)
    settings = replace(SETTINGS, compact=compact, min_compaction_lag_s=500.0 if compact else None)
    writer = Writer(open_log(SimDisk(), settings, clock=clock)[0])
    while len(writer.log.segments.all) < 2:
        writer.append()
        commit(writer.log)
    retention_s = 500 if compact else 1_000
    shares = []
    for share in (0.5, 0.5, 1):
        clock.wait(share * retention_s)
        writer.log.clock.read()
        shares.append(writer.log.retention_share(0))
    assert shares == pytest.approx([0.5, 1, 2])
    assert writer.log.retention_share(writer.log.next_offset - 1) == 0


def test_memory_log_share_depends_on_size_only() -> None:
    log = MemoryLog(LOG_ID, deltas_max=10)
    for base in range(1, 9):
        batch = batch_of(1, base, level=AckLevel.MEMORY)
        log.append(batch, lamport=base, source=Source.LOCAL)
    assert [log.retention_share(offset) for offset in (0, 4, 8)] == [0.8, 0.4, 0]
