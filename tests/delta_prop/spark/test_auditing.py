"""A hundred differences planted in a store's file and in an index of a running service: found, and mended."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

pytest.importorskip("pyspark")

from delta_prop import Propagator
from delta_prop.client import SyncProducer
from delta_prop.spark.jobs.auditing import Repaired, _set_aside, audit, repair
from delta_prop.spark.jobs.replaying import replay
from delta_prop.spark.states.held import contents_of
from delta_prop.spark.states.stored import StoredFile
from delta_prop_sinks import CallbackSink, IndexSink, RejectDelta, Resident, StorageSink
from delta_prop_sinks.table import put
from delta_prop_wire.algebra import State
from delta_prop_wire.delta import Delta, create, delete, opaque, sparse
from delta_prop_wire.errors import Refused, UsageError
from tests.broker.histories import seen
from tests.delta_prop.client.threaded import Served, served

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

DOCUMENTS = 200
KINDS = ("missing", "stale", "extra", "corrupted")


def document(at: int) -> str:
    return f"doc-{at:03}"


class Service:
    """A service with a store and an index of its own, and what each of them held in the middle."""

    def __init__(self, running: Served, path: Path) -> None:
        self.running = running
        self.file = path / "vectors.db"
        self.storage = StorageSink(self.file, flush_s=0.01)
        self.index = IndexSink(resident=Resident())
        for sink in (self.storage, self.index):
            self.call(partial(running._propagator.attach, sink))
        with SyncProducer(running.address, name="documents") as p:
            numbers = np.random.default_rng(7).normal(size=(DOCUMENTS, 8)).astype(np.float32)
            for at in range(DOCUMENTS):
                p.offer(Delta(document(at), create(numbers[at]), "docs", metadata={"page": at}))
            p.publish(Delta("row", opaque(b"bytes"), "rows"))
            self.settle()
            self.before = {row[1]: row[2] for row in self.rows()}
            self.stored_before = self.select("SELECT * FROM vectors")
            for at in range(0, DOCUMENTS, 2):
                p.offer(Delta(document(at), sparse([at % 8], [at]), "docs"))
            p.publish(*(Delta(document(at), delete(), "docs") for at in range(180, DOCUMENTS)))
        self.settle()

    def call(self, function: Any) -> Any:
        return self.running.call(function)

    def settle(self) -> None:
        """Until both sinks have everything, on disk too."""
        propagator = self.running._propagator

        async def wait() -> None:
            last = propagator.inside().log.visible - 1
            await propagator.wait_visible(last, committed=True, timeout_s=20)

        self.call(wait)

    def rows(self) -> list[tuple[str, str, State]]:
        return self.call(lambda: list(self.index.rows()))

    def select(self, statement: str) -> dict[str, tuple[Any, ...]]:
        with closing(sqlite3.connect(self.file)) as connection:
            return {row[1]: row for row in connection.execute(statement)}


def planted() -> dict[str, str]:
    """What is wrong with which vector: 25 of each kind."""
    told = {document(at): "missing" for at in range(25)}
    told |= {document(at): "stale" for at in range(30, 80, 2)}
    told |= {f"never-{at}": "extra" for at in range(13)} | {document(at): "extra" for at in range(180, 192)}
    return told | {document(at): "corrupted" for at in range(100, 125)}


def spoil_file(service: Service) -> None:
    """Change rows behind the service's back."""
    marks = ", ".join("?" * 13)
    insert = f"INSERT OR REPLACE INTO vectors VALUES ({marks})"
    with closing(sqlite3.connect(service.file, timeout=10)) as connection, connection:
        for name, kind in planted().items():
            row = list(service.stored_before.get(name, service.stored_before[document(1)]))
            if kind == "missing":
                connection.execute("DELETE FROM vectors WHERE vector_id = ?", [name])
            elif kind in ("stale", "extra"):
                row[1] = name
                connection.execute(insert, row)
            elif name.endswith("0"):
                connection.execute("UPDATE vectors SET metadata = '{}' WHERE vector_id = ?", [name])
            else:
                spoiled = bytes([row[5][0] ^ 1, *row[5][1:]])
                connection.execute("UPDATE vectors SET value = ? WHERE vector_id = ?", [spoiled, name])


def spoil_index(service: Service) -> None:
    table = service.index.resident.tables["docs"]
    for name, kind in planted().items():
        if kind == "missing":
            table.release(table.slots[name])
        elif kind in ("stale", "extra"):
            state = service.before.get(name, service.before[document(1)])
            put(table, name, state, 3)
        elif name.endswith("0"):
            table.metadata[table.slots[name]] = {"page": -1}
        else:
            assert table.matrix is not None
            table.matrix[table.slots[name]][5] += 1


def check(found: DataFrame) -> DataFrame:
    rows = found.collect()
    assert {row.vector_id: row.difference for row in rows} == planted()
    assert len(rows) == 100
    assert [sum(row.difference == kind for row in rows) for kind in KINDS] == [25] * 4
    assert all(row.reason for row in rows)
    return found


@pytest.mark.spark
def test_what_is_planted_is_found_and_a_repair_mends_just_that(spark: SparkSession, tmp_path: Path) -> None:
    data = str(tmp_path / "log")
    with served(propagator={"data": data}) as running:
        service = Service(running, tmp_path)
        spoil_file(service)
        stored = service.select("SELECT * FROM vectors")
        found = check(audit(spark, data, str(service.file)))
        with SyncProducer(running.address, name="repair") as p:
            assert repair(found, p) == Repaired(100)
        service.settle()
        after = service.select("SELECT * FROM vectors")
        assert {name for name, row in after.items() if row != stored.get(name)} == set(planted())
        assert audit(spark, data, str(service.file)).collect() == []

        service.call(lambda: spoil_index(service))
        held = {row[:2]: seen(row[2]) for row in service.rows()}
        found = check(audit(spark, data, contents_of(spark, service.rows())))
        with SyncProducer(running.address, name="repair-index") as p:
            p.publish(Delta(document(100), create([0.5] * 8), "docs"))  # meanwhile
            outcome = repair(found, p)
        assert (outcome.mended, outcome.moved_on, outcome.refused) == (99, 1, 0)
        assert outcome.told[0].startswith(f"docs {document(100)}: ")
        service.settle()
        after = {row[:2]: seen(row[2]) for row in service.rows()}
        assert {name[1] for name, row in after.items() if row != held.get(name)} == set(planted())
        assert audit(spark, data, contents_of(spark, service.rows())).collect() == []
        told = replay(spark, f"delta://{running.address}", at=150).collect()
        assert sorted(told) == sorted(replay(spark, data, at=150).collect())
    assert audit(spark, data, str(service.file)).collect() == []


@pytest.mark.spark
def test_what_cannot_be_audited_is_told(spark: SparkSession, tmp_path: Path) -> None:
    with served(propagator={"data": str(tmp_path / "log")}) as running:
        Service(running, tmp_path)
    with (
        served(propagator={"data": str(tmp_path / "other")}) as running,
        SyncProducer(running.address, name="x") as p,
    ):
        p.publish(Delta("a", create([1.0]), metadata={"not": "told"}))
    file, other = str(tmp_path / "vectors.db"), str(tmp_path / "other")
    with pytest.raises(UsageError, match=r"is of log [0-9a-f]{32}, the log in .* is [0-9a-f]{32}"):
        audit(spark, other, file)
    with pytest.raises(UsageError, match="no storage file at"):
        audit(spark, other, str(tmp_path / "nothing.db"))
    with closing(sqlite3.connect(tmp_path / "mine.db")) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(UsageError, match="is no storage sink's file"):
        audit(spark, other, str(tmp_path / "mine.db"))
    with pytest.raises(UsageError, match="column vector_id is missing"):
        audit(spark, other, spark.createDataFrame([], "id string, vector array<float>"))
    foreign = spark.createDataFrame([("a", [1.0]), ("b", [2.0])], "vector_id string, vector array<double>")
    (row,) = audit(spark, other, foreign).collect()  # of another system's index, which tells no deltas
    assert (row.vector_id, row.difference, row.op) == ("b", "extra", "delete")
    with pytest.raises(UsageError, match="come to offset 2, the log ends at 1: it is ahead"):
        audit(spark, other, foreign, come=2)
    (tmp_path / "broken.db").write_bytes((tmp_path / "vectors.db").read_bytes()[:5_000])
    with pytest.raises(UsageError, match="cannot be read"), StoredFile(str(tmp_path / "broken.db")) as broken:
        list(broken.states())


def test_vectors_in_a_sinks_quarantine_are_known(tmp_path: Path) -> None:
    def reject(offset: int, _: Delta) -> None:
        if offset == 1:
            raise RejectDelta(offset, "not this one")

    async def run() -> None:
        async with Propagator(data=tmp_path) as p:
            await p.attach(CallbackSink(reject, name="picky"))
            for vector_id in ("a", "b", "a"):
                published = await p.publish(Delta(vector_id, create([1.0]), "n"))
            with suppress(Refused):
                await p.wait_visible(published)

    anyio.run(run)
    assert _set_aside(str(tmp_path), "picky") == {"n\0b"}
    assert _set_aside(str(tmp_path), "storage") == frozenset()
