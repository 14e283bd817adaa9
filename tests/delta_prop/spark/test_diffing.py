"""`diff` of tables of vectors and of rows on Spark: its deltas turn the old table into the new one."""

from __future__ import annotations

import argparse
import email.message
import json
import logging
import random
import statistics
import tarfile
import typing
import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

pytest.importorskip("pyspark")

from delta_prop import Propagator
from delta_prop.demo.corpus import documents_of
from delta_prop.demo.embedding import Embedding
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.jobs.diffing import deltas_from, diff
from delta_prop.spark.jobs.importing import read_table, to_deltas
from delta_prop_sinks import StorageSink
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from delta_prop.demo.corpus import Document
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.batch import Batch

MODULES = (argparse, email.message, logging, random, statistics, tarfile, typing, unittest.mock)
COLUMNS = ("vector_id", "vector", "title", "words", "rate", "tags")


def batches(deltas: DataFrame, rows: int = 500) -> list[Batch]:
    """Encode deltas as batches of up to `rows` rows."""
    table = deltas.toArrow().combine_chunks()
    blocks = [
        to_block(rows_of_batch, namespace="default")
        for rows_of_batch in table.to_batches(rows)
        if rows_of_batch.num_rows
    ]
    return [block.encode(origin=1, base=1) for block in blocks]


async def publish_and_read(path: Path, *stages: list[Batch]) -> dict[str, VectorState]:
    """Publish all stages; return the states of the live vectors in a storage sink."""
    async with Propagator() as p:
        storage = await p.attach(StorageSink(path / "vectors.db"))
        for stage in stages:
            for batch in stage:
                published = await p.publish(*map(batch.delta, range(batch.count)))
        await p.wait_visible(published, committed=True)
        return {vector_id: state async for _, vector_id, state in storage.rows() if state.alive}


def table_of(documents: list[Document], weights: Embedding) -> Any:
    import pyarrow as pa

    columns = [
        [one.id for one in documents],
        pa.array([weights.document(one) for one in documents], pa.list_(pa.float32())),
        [one.signature for one in documents],
        [len(one.text.split()) for one in documents],
        pa.nulls(len(documents), pa.float64()),
        [[one.module] for one in documents],
    ]
    return pa.table(columns, names=COLUMNS)


@pytest.mark.spark
def test_diff_of_edited_documents_is_exact_and_small(spark: SparkSession, tmp_path: Path) -> None:
    documents = [
        document
        for module in MODULES
        for document in documents_of(Path(module.__file__).name, Path(module.__file__).read_text())
    ]
    edited = list(documents)
    for index in range(0, len(documents), 20):  # every twentieth document
        edited[index] = replace(documents[index], text=documents[index].text + " A quokka juggles zeppelins.")
    weights = Embedding()
    weights.learn(documents)
    before, after = table_of(documents, weights), table_of(edited, weights)
    old, new = spark.createDataFrame(before), spark.createDataFrame(after)
    creates, changes = batches(to_deltas(old)), batches(deltas_from(old, new))
    count = sum(batch.count for batch in changes)
    assert len(documents) > 500
    assert count == len(range(0, len(documents), 20))
    states = anyio.run(publish_and_read, tmp_path, creates, changes)
    expected = {row["vector_id"]: row for row in after.to_pylist()}
    assert states.keys() == expected.keys()
    for name, state in states.items():
        row = expected[name]
        assert state.vector is not None
        assert state.vector.tobytes() == np.array(row["vector"], np.float32).tobytes()
        assert state.metadata == {"title": row["title"], "words": row["words"], "tags": row["tags"]}
    changed_bytes, all_bytes = (
        sum(batch.size for batch in batches_of_one) for batches_of_one in (changes, creates)
    )
    summary = f"{changed_bytes:,} bytes for {all_bytes:,}, {all_bytes / changed_bytes:.0f} times fewer"
    print(f"{count} of {len(documents)} documents changed: {summary}")
    assert all_bytes >= 10 * changed_bytes


ROWS = "id long, name string, price double, at struct<x int, y int>"


@pytest.mark.spark
def test_rows_become_json_and_number_columns_a_vector(spark: SparkSession, tmp_path: Path) -> None:
    old = spark.createDataFrame(
        [(1, "a", 1.5, (1, 2)), (2, "b", None, None), (3, "c", 0.1, (0, None)), (4, "gone", 1.0, None)], ROWS
    )
    new = spark.createDataFrame(
        [(1, "a", 1.5, (1, 2)), (2, "b", 2.0, None), (3, "c", 0.1, (0, 7)), (5, 'ü"', 1.0, None)], ROWS
    )
    rows = {row.vector_id: row for row in diff(old, new, key="id", namespace="rows").collect()}
    assert {name: row.op for name, row in rows.items()} == {
        "2": "opaque",
        "3": "opaque",
        "4": "delete",
        "5": "opaque",
    }
    assert bytes(rows["2"].data) == b'{"at":null,"id":2,"name":"b","price":2.0}'
    assert bytes(rows["5"].data) == '{"at":null,"id":5,"name":"ü\\"","price":1.0}'.encode()
    assert rows["5"].namespace == "rows"
    # With two columns as the vector and the others as metadata, deltas for the same rows result.
    old, new = old.drop("name").fillna(0.0), new.drop("name")
    rows = {row.vector_id: row for row in diff(old, new, key="id", vector=["price", "id"]).collect()}
    assert rows["2"].vector == [2.0, 2.0]
    assert (rows["3"].op, json.loads(rows["3"].metadata)) == ("metadata", {"at": {"x": 0, "y": 7}})
    assert set(rows) == {"2", "3", "4", "5"}
    path = tmp_path / "table.csv"
    path.write_text('key,vector,colour\nx,"[1, 0.5]",red\ny,"[2, 1]",\n')
    imported = (
        to_deltas(read_table(spark, str(path)), key="key", namespace="n").orderBy("vector_id").collect()
    )
    assert [(row.op, row.vector, row.metadata) for row in imported] == [
        ("create", [1.0, 0.5], '{"colour":"red"}'),
        ("create", [2.0, 1.0], None),
    ]
    bad = spark.createDataFrame(
        [("x", [1.0], float("nan"))], "vector_id string, vector array<double>, price double"
    )
    with pytest.raises(Exception, match="x: column price has a number that is not finite"):
        to_deltas(bad).collect()
    for columns, more in (
        ("vector_id string, vector array<double>", {}),
        ("vector_id string, vector string", {}),
        ("vector_id string, x double, y float", {"vector": ["x", "y"]}),
    ):
        numbers = (-1e300, 0.5) if more else ([-1e300, 0.5] if "array" in columns else "[-1e300, 0.5]",)
        large = spark.createDataFrame([("x", *numbers)], columns)
        with pytest.raises(Exception, match=r"x: number -1.0E300 does not fit in float32"):
            to_deltas(large, **more).collect()
    with pytest.raises(Exception, match=r"new table: vector_id 'x': number -1.0E300 does not fit in"):
        diff(large.limit(0), large, **more).collect()


@pytest.mark.spark
def test_incomparable_tables_are_refused_before_a_job_runs(spark: SparkSession) -> None:
    def empty(columns: str) -> DataFrame:
        return spark.createDataFrame([], columns)

    vectors = "vector_id int, vector array<float>"
    for columns, more, expected in (
        ("id int, vector array<float>", {}, "column vector_id, the key, is missing"),
        ("vector_id int, vector int", {}, "column vector is int, but must be an array of numbers: convert"),
        ("vector_id int, v array<float>", {"vector": "w"}, "column w, for the vector, is missing"),
        ("vector_id int, a string", {"vector": ["a"]}, "column a is string, not a number"),
        (f"{vectors}, m map<string,int>", {}, "column m is map<string,int>"),
        (f"{vectors}, metadata string, offset long", {}, r"leave it out with select\(\*CONTENT"),
        (vectors, {"threshold": -1.0}, "threshold -1.0: give a number from 0 on"),
    ):
        with pytest.raises(UsageError, match=expected):
            diff(empty(columns), empty(columns), **more)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="its name has no known suffix"):
        read_table(spark, "table")
