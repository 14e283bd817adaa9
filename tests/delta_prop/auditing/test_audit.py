"""Audits on one machine find and repair all planted differences, for any history of the log."""

from __future__ import annotations

import os
import re
import sqlite3
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.auditing import Difference, Lines, RepairResult, audit, repair, repair_directory, repairs
from delta_prop.auditing.audit_scope import open_audited_log
from delta_prop.auditing.repairing import repair_delta_of
from delta_prop.client import SyncProducer
from delta_prop.delivery.cursors import write_cursors
from delta_prop.delivery.status import SavedCursor
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.delta import ABSENT, Delta, Dot, Kind, Source, create, delete, opaque, sparse_add
from delta_prop_wire.encode import encode_batch, encode_vectors
from delta_prop_wire.errors import UsageError
from tests.broker.durable import Clock, FixedRandomness, commit
from tests.broker.histories import Rows as HistoryRows
from tests.broker.histories import Step, comparable, steps_with_ids
from tests.delta_prop.auditing.expected_differences import differences_of, history_states
from tests.delta_prop.auditing.planted_differences import (
    Service,
    corrupt_file,
    corrupt_index,
    document_id,
    planted_faults,
)
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.spark.logs import COMPACTING, write

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024 * 1024


def check_planted(found: list[Difference]) -> list[Difference]:
    assert {difference.vector_id: difference.difference for difference in found} == planted_faults()
    assert len(found) == 100
    assert all(difference.reason for difference in found)
    return found


def test_planted_differences_are_found_and_only_those_repaired(tmp_path: Path) -> None:
    data = str(tmp_path / "log")
    with served(propagator={"data": data}) as running:
        service = Service(running, tmp_path)
        corrupt_file(service)
        stored = service.select("SELECT * FROM vectors")
        found = check_planted(list(audit(data, str(service.file))))
        with SyncProducer(running.address, name="repair") as p:
            assert repair(repairs(found), p) == RepairResult(100)
        service.settle()
        after = service.select("SELECT * FROM vectors")
        assert {name for name, row in after.items() if row != stored.get(name)} == set(planted_faults())
        assert list(audit(data, str(service.file))) == []

        service.call(lambda: corrupt_index(service))
        states_before = {row[:2]: comparable(row[2]) for row in service.rows()}
        found = check_planted(list(audit(data, service.rows())))
        with SyncProducer(running.address, name="repair-index") as p:
            p.publish(*(Delta(name, create([0.5] * 8), "docs") for name in (document_id(100), "never-3")))
            outcome = repair(repairs(found), p)  # the repair keeps deltas published meanwhile
        assert (outcome.repaired, outcome.changed, outcome.refused) == (98, 2, 0)
        service.settle()
        after = {row[:2]: comparable(row[2]) for row in service.rows()}
        assert {name[1] for name, row in after.items() if row != states_before.get(name)} == set(
            planted_faults()
        )
        (remaining,) = (row[2] for row in service.rows() if row[1] == "never-3")
        assert remaining.vector is not None
        assert remaining.vector.tolist() == [0.5] * 8
        assert list(audit(data, service.rows())) == []
    assert list(audit(data, str(service.file))) == []


@given(st.lists(steps_with_ids, min_size=1, max_size=14), st.booleans(), st.data())
def test_correct_sink_has_no_differences_and_a_corrupted_row_is_one(
    history: list[Step], small_memory: bool, data: st.DataObject
) -> None:
    """This holds at any cursor, for any order of arrival, with and without rows ahead of the cursor."""
    with TemporaryDirectory() as folder:
        batches = write(Path(folder), history).batches
        memory_bytes_max = 1 if small_memory else MIB
        rows = HistoryRows.below(batches, 1 << 60)
        next_offset = data.draw(st.integers(0, batches[-1].next_offset))
        ends = dict.fromkeys(rows.changes, next_offset)
        for name in data.draw(st.sets(st.sampled_from(sorted(rows.changes)))) if rows.changes else ():
            later = [row[1] + 1 for row in rows.changes[name] if row[1] >= next_offset]
            folded = history_states(rows, {name: data.draw(st.sampled_from([next_offset, *later]))})
            ends[name] = max(next_offset, folded[name][1] + 1 if name in folded else 0)
        contents = history_states(rows, ends)
        assert differences_of(folder, contents, next_offset, memory_bytes_max=memory_bytes_max) == []
        alive = sorted(name for name, (state, _) in contents.items() if state.alive)
        if not alive:
            return
        name = data.draw(st.sampled_from(alive))
        state, offset = contents[name]
        contents[name] = (replace(state, metadata={**state.metadata, "planted": 1}), offset)
        (found,) = differences_of(folder, contents, next_offset, memory_bytes_max=memory_bytes_max)
        assert (found.namespace, found.vector_id, found.difference) == (*name, "corrupted")
        assert found.reason.startswith("its metadata differ in 'planted'")
        delta = repair_delta_of(found.line())
        assert delta is not None
        end_state = rows.fold()[name]
        assert apply(contents[name][0], delta.operation, delta.metadata).content == end_state.content
        assert end_state.key is not None
        assert delta.expect == Dot(*end_state.key[1:])
        contents[name] = history_states(rows, ends)[name]
        contents["n", "never made"] = contents[name]
        (extra,) = repairs(differences_of(folder, contents, next_offset, memory_bytes_max=memory_bytes_max))
        assert (extra.vector_id, extra.operation.kind, extra.expect) == ("never made", Kind.DELETE, ABSENT)


def test_compacted_log_still_reports_deleted_vectors(tmp_path: Path) -> None:
    deltas = [Delta(f"v{number}", create([number, 1.0]), "n") for number in range(40)]
    history = [Step([delta], 1, 0) for delta in deltas]
    history.append(Step([Delta("v7", delete(), "n"), Delta("v8", delete(), "n")], 1, 0))
    history += [Step([Delta("late", opaque(b"x" * 200), "n")], 1, 0) for _ in range(10)]
    writer = write(tmp_path, history, COMPACTING)
    with open_audited_log(str(tmp_path)) as log:
        assert log.snapshot is not None
        assert log.snapshot.offset > 42
    states = HistoryRows.below(writer.batches, 1 << 60).fold()
    contents = [(*name, state) for name, state in states.items()]
    assert list(audit(str(tmp_path), contents)) == []
    alive = VectorState(True, np.array([7, 1], np.float32), key=(8, 1, 8))
    corrupted = [("n", "v7", alive) if row[1] == "v7" else row for row in contents]
    (found,) = audit(str(tmp_path), corrupted)
    assert (found.difference, found.op) == ("extra", "delete")
    assert found.reason == "the log has it deleted since offset 40"


def test_audit_memory_is_bounded(tmp_path: Path) -> None:
    """The log has about 24 MiB and the sink half of that; every row of the sink differs from the log."""
    settings = LogSettings(segment_bytes_max=2 * MIB, reserve_bytes=0, free_bytes_min=0)
    log, _ = DurableLog.open(
        LocalDisk(tmp_path), settings=settings, randomness=FixedRandomness(), clock=Clock()
    )
    matrix, base = np.ones((200, 256), np.float32), 1
    for number in range(0, 20_000, 200):
        keys = [f"vector-{(number + 7 * row) % 10_000:06}" for row in range(200)]
        batch = encode_vectors(keys, matrix * number, namespace="n", origin=1, base=base)
        log.append(batch, lamport=base, source=Source.LOCAL)
        changes = [Delta(key, sparse_add([3], [1.0]), "n") for key in keys[:50]]
        batch = encode_batch(changes, origin=1, base=base + 200)
        log.append(batch, lamport=base + 200, source=Source.LOCAL)
        base += 250
        commit(log)
    size = log.statistics().bytes
    log.close()
    other = VectorState(True, np.ones(256, np.float32), key=(1, 1, 1))
    contents = (("n", f"vector-{number:06}", other) for number in range(10_000))
    tracemalloc.start()
    difference_count = sum(1 for _ in audit(str(tmp_path), contents, memory_bytes_max=2 * MIB))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"{size / MIB:.0f} MiB of log, {difference_count} differences, {peak_bytes / MIB:.1f} MiB at the peak"
    )
    assert size > 18 * MIB
    assert difference_count > 1_000
    assert peak_bytes < 12 * MIB


@pytest.mark.parametrize("lamport_lag", [0, 3], ids=["in order", "out of order"])
def test_audit_leaves_no_file_open(tmp_path: Path, lamport_lag: int) -> None:
    """Spilled runs are closed when an audit ends, and when its caller closes it early."""
    history = [Step([Delta(f"v{number % 20}", opaque(b"x" * 500), "n")], 1, 0) for number in range(40)]
    write(tmp_path, [*history, Step([Delta("late", create([1.0]), "n")], 2, lamport_lag)])
    with open_audited_log(str(tmp_path)) as log:
        write_cursors(log.disk, log.log_id, {"one": SavedCursor(30, 30)})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(list(audit(str(tmp_path), [], next_offset=30, name="one", memory_bytes_max=2_000))) == 20
    unfinished = audit(str(tmp_path), [], memory_bytes_max=2_000)
    next(unfinished)
    assert len(os.listdir("/proc/self/fd")) > before + 10, "the audit has spilled no runs"
    unfinished.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before


def test_unusable_log_or_sink_file_is_reported(tmp_path: Path) -> None:
    with served(propagator={"data": str(tmp_path / "log")}) as running:
        Service(running, tmp_path)
    write(tmp_path / "other", [Step([Delta("a", create([1.0]))], 1, 0)])
    file, other = str(tmp_path / "vectors.db"), str(tmp_path / "other")

    def error_of(*arguments: Any, **more: Any) -> str:
        with pytest.raises(UsageError) as caught:
            list(audit(*arguments, **more))
        return str(caught.value)

    assert re.search(r"belongs to log [0-9a-f]{32}, but .* has log [0-9a-f]{32}", error_of(other, file))
    assert "no storage file at" in error_of(other, str(tmp_path / "nothing.db"))
    with closing(sqlite3.connect(tmp_path / "mine.db")) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    assert "is not a storage sink's file" in error_of(other, str(tmp_path / "mine.db"))
    assert "reached offset 2, but the log ends at 1: the log lost rows" in error_of(other, [], next_offset=2)
    (tmp_path / "broken.db").write_bytes((tmp_path / "vectors.db").read_bytes()[:5_000])
    broken = error_of(str(tmp_path / "log"), str(tmp_path / "broken.db"))
    assert "cannot be read" in broken
    assert "put a copy in its place, or rebuild it from the log" in broken
    (tmp_path / "dp.toml").write_text("[server]\nport = 7431\n" * 100)
    wrong = error_of(str(tmp_path / "log"), str(tmp_path / "dp.toml"))
    assert "dp.toml is not a storage sink's file: name the one that the storage sink writes; if it" in wrong


def test_argument_of_wrong_type_is_reported_by_name(tmp_path: Path) -> None:
    write(tmp_path / "log", [Step([Delta("a", create([1.0]))], 1, 0)])
    log, wrong = str(tmp_path / "log"), cast("Any", 5)
    unopened = SyncProducer("localhost:1", name="repair")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("data 5: give a path", lambda: audit(wrong, wrong)),
        ("sink 5: give a storage sink's file,", lambda: audit(log, wrong)),
        ("sink b'x': give", lambda: audit(log, cast("Any", b"x"))),
        (
            "sink: 1 is not a row: give (namespace, vector_id, VectorState)",
            lambda: list(audit(log, cast("Any", [1]))),
        ),
        ("path 5: give a path", lambda: Lines(wrong)),
        ("next_offset 'x': give an integer from 0 on", lambda: audit(log, [], next_offset=cast("Any", "x"))),
        ("name 5: give the name under which the sink is attached", lambda: audit(log, [], name=wrong)),
        ("memory_bytes_max 0: give an integer from 1 on", lambda: audit(log, [], memory_bytes_max=0)),
        ("found 5: give the differences that audit() returns", lambda: list(repairs(wrong))),
        ("found: type int is not a Difference", lambda: list(repairs([wrong]))),
        ("deltas 5: give the deltas that repairs() returns", lambda: repair(wrong, unopened)),
        ("producer: type int is not a SyncProducer", lambda: repair([], wrong)),
        ("data 5: give a path", lambda: repair([], unopened, data=wrong)),
        ("data 5: give a path", lambda: anyio.run(repair_directory, [], wrong)),
        ("deltas 5: give the deltas that repairs() returns", lambda: anyio.run(repair_directory, wrong, log)),
        ("5 is not a Delta", lambda: anyio.run(repair_directory, [wrong], log)),
        ("is not a data directory: give", lambda: anyio.run(repair_directory, [], str(tmp_path))),
    ]
    for message, call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert message in str(caught.value)
