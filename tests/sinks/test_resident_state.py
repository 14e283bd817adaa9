"""The parts of resident vectors: progress, residency, rebuild, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from delta_prop_sinks.resident_tables import FoldPace, FoldProgress, Residency, ResidentTables, VectorRebuild
from delta_prop_sinks.sink import StopSink, TryAgain
from delta_prop_sinks.vector_table import SLOT_BYTES
from delta_prop_wire.errors import UsageError
from tests.sinks.support import FakeLog


def context(**fields: Any) -> Any:
    log = FakeLog()
    for name, value in fields.items():
        setattr(log, name, value)
    return log


def test_only_another_log_invalidates_the_offset() -> None:
    progress = FoldProgress()
    assert not progress.enter(context())
    progress.next_offset, progress.lamport = 7, 9
    assert not progress.enter(context())
    assert progress.next_offset == 7
    with pytest.raises(UsageError, match="topics"):
        progress.enter(context(topics=frozenset({"docs"})))
    assert progress.enter(context(log_id=bytes(16)))
    assert (progress.next_offset, progress.lamport, progress.lamport_before_log) == (0, 9, 9)


def test_pinned_vectors_stay_in_memory() -> None:
    residency = Residency()
    assert residency.is_pinned, "no store has a copy"
    residency.stored = True
    assert not residency.is_pinned
    residency.pin(100)
    assert residency.is_pinned
    with pytest.raises(StopSink, match="resident_bytes_max 100"):
        residency.begin_partial(100)
    residency.unpin()
    residency.note_evicted(0)
    assert residency.complete
    residency.note_evicted(2)
    assert (residency.complete, residency.evicted) == (False, 2)
    with pytest.raises(StopSink, match="too small"):
        residency.pin(100)


def test_one_sink_rebuilds_at_a_time() -> None:
    rebuild, first, second = VectorRebuild(), context(), context()
    assert rebuild.begin(first)
    assert rebuild.begin(first)
    assert not rebuild.begin(second)
    rebuild.abandon()
    assert rebuild.is_running, "the vectors are invalid until a rebuild has ended"
    assert rebuild.begin(second)
    assert rebuild.is_by(second)
    rebuild.end()
    assert (rebuild.is_running, rebuild.count, rebuild.is_by(second)) == (False, 1, False)


def test_size_follows_changed_and_replaced_tables() -> None:
    tables = ResidentTables(10_000)
    tables.follow_dimensions({"docs": 3}.get)
    table, empty_size = tables.table("docs"), tables.size
    table.set_vector(table.slot_of("a"), np.zeros(3, np.float32))
    assert tables.table("docs") is table
    assert tables.size == empty_size + SLOT_BYTES + 12
    pace = FoldPace(FakeLog().clock, tables)
    tables.staged = {}
    assert tables.table("docs") is not table
    assert list(tables.take_touched()) == [table]
    pace.check()
    staged, tables.staged = tables.staged, None
    tables.replace(staged)
    assert tables.size == empty_size
    with pytest.raises(TryAgain, match="rebuilt"):
        pace.check()
