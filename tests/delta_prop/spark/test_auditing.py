"""Audits on Spark find and repair a hundred planted differences in a storage file and in an index."""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from operator import itemgetter
from typing import TYPE_CHECKING

import anyio
import pytest

pytest.importorskip("pyspark")

from delta_prop import Propagator, auditing
from delta_prop.auditing import RepairResult
from delta_prop.auditing.audit_scope import read_quarantined_keys
from delta_prop.auditing.sink_file import StorageSinkFile
from delta_prop.client import SyncProducer
from delta_prop.spark.jobs.auditing import audit, differences_in, repair
from delta_prop.spark.jobs.replaying import replay
from delta_prop.spark.states.sink_contents import contents_of
from delta_prop.spark.states.storage_rows import read_states
from delta_prop_sinks import CallbackSink, RejectDelta
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused, UsageError
from tests.broker.histories import comparable
from tests.delta_prop.auditing.planted_differences import (
    KINDS,
    Service,
    corrupt_file,
    corrupt_index,
    document_id,
    planted_faults,
)
from tests.delta_prop.client.threaded_service import served

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from delta_prop.auditing import Difference


def check_planted(differences: DataFrame, local: Iterable[Difference]) -> DataFrame:
    """Check that both audits found the planted faults, and the same ones; return `differences`."""
    rows = differences.collect()
    lines = sorted(
        (one.line() for one in differences_in(differences)), key=itemgetter("namespace", "vector_id")
    )
    assert lines == [one.line() for one in local]
    assert {row.vector_id: row.difference for row in rows} == planted_faults()
    assert len(rows) == 100
    assert [sum(row.difference == kind for row in rows) for kind in KINDS] == [25] * 4
    assert all(row.reason for row in rows)
    return differences


@pytest.mark.spark
def test_planted_differences_are_found_and_only_those_repaired(spark: SparkSession, tmp_path: Path) -> None:
    data = str(tmp_path / "log")
    with served(propagator={"data": data}) as running:
        service = Service(running, tmp_path)
        corrupt_file(service)
        stored = service.select("SELECT * FROM vectors")
        differences = check_planted(
            audit(spark, data, str(service.file)), auditing.audit(data, str(service.file))
        )
        with SyncProducer(running.address, name="repair") as p:
            assert repair(differences, p) == RepairResult(100)
        service.settle()
        after = service.select("SELECT * FROM vectors")
        assert {name for name, row in after.items() if row != stored.get(name)} == set(planted_faults())
        assert audit(spark, data, str(service.file)).collect() == []

        service.call(lambda: corrupt_index(service))
        states_before = {row[:2]: comparable(row[2]) for row in service.rows()}
        differences = check_planted(
            audit(spark, data, contents_of(spark, service.rows())), auditing.audit(data, service.rows())
        )
        with SyncProducer(running.address, name="repair-index") as p:
            p.publish(*(Delta(one, create([0.5] * 8), "docs") for one in (document_id(100), "never-3")))
            outcome = repair(differences, p)  # the repair keeps deltas published meanwhile
        assert (outcome.repaired, outcome.changed, outcome.refused) == (98, 2, 0)
        assert {line.split(": ")[0] for line in outcome.reasons} == {
            f"docs {document_id(100)}",
            "docs never-3",
        }
        service.settle()
        after = {row[:2]: comparable(row[2]) for row in service.rows()}
        assert {name[1] for name, row in after.items() if row != states_before.get(name)} == set(
            planted_faults()
        )
        assert audit(spark, data, contents_of(spark, service.rows())).collect() == []
        replayed = replay(spark, f"delta://{running.address}", at=150).collect()
        assert sorted(replayed) == sorted(replay(spark, data, at=150).collect())
    assert audit(spark, data, str(service.file)).collect() == []


@pytest.mark.spark
def test_unusable_log_or_sink_file_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    with served(propagator={"data": str(tmp_path / "log")}) as running:
        Service(running, tmp_path)
    with (
        served(propagator={"data": str(tmp_path / "other")}) as running,
        SyncProducer(running.address, name="x") as p,
    ):
        p.publish(Delta("a", create([1.0]), metadata={"not": "told"}))
    file, other = str(tmp_path / "vectors.db"), str(tmp_path / "other")
    with pytest.raises(UsageError, match=r"belongs to log [0-9a-f]{32}, but .* has log [0-9a-f]{32}"):
        audit(spark, other, file)
    with pytest.raises(UsageError, match="no storage file at"):
        audit(spark, other, str(tmp_path / "nothing.db"))
    with closing(sqlite3.connect(tmp_path / "mine.db")) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(UsageError, match="is not a storage sink's file"):
        audit(spark, other, str(tmp_path / "mine.db"))
    with pytest.raises(UsageError, match="column vector_id is missing"):
        audit(spark, other, spark.createDataFrame([], "id string, vector array<float>"))
    foreign = spark.createDataFrame([("a", [1.0]), ("b", [2.0])], "vector_id string, vector array<double>")
    # An index of another system does not know the last delta of each row.
    (row,) = audit(spark, other, foreign).collect()
    assert (row.vector_id, row.difference, row.op) == ("b", "extra", "delete")
    with pytest.raises(UsageError, match="the sink has reached offset 2, but the log ends at 1"):
        audit(spark, other, foreign, next_offset=2)
    (tmp_path / "broken.db").write_bytes((tmp_path / "vectors.db").read_bytes()[:5_000])
    with (
        pytest.raises(UsageError, match="cannot be read"),
        StorageSinkFile(str(tmp_path / "broken.db")) as broken,
    ):
        list(read_states(broken))


def test_quarantined_keys_of_a_sink_are_read(tmp_path: Path) -> None:
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
    assert read_quarantined_keys(str(tmp_path), "picky") == {"n\0b"}
    assert read_quarantined_keys(str(tmp_path), None) == frozenset()
    with pytest.raises(UsageError, match=r"no sink named 'storage' is remembered in .*: picky$"):
        read_quarantined_keys(str(tmp_path), "storage")
