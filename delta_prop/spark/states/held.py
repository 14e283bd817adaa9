"""What a sink holds, given as rows or as a table, as states that can be laid beside the log's.

Metadata that are not there are not compared: a table of another system's index may have the vectors alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from delta_prop.spark.arguments import check_session
from delta_prop.spark.jobs.replaying import STATES
from delta_prop.spark.states.changes import CHANGES, STATE, join_keys
from delta_prop.spark.states.stored import UNTOLD, packed
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from pyspark.sql import DataFrame, SparkSession

    from delta_prop_wire.algebra import State

NOWHERE = -1
"""The offset of a row that tells none."""
_ROWS = 8_192


def contents_of(spark: SparkSession, rows: Iterable[tuple[str, str, State]]) -> DataFrame:
    """What a sink of this process holds, such as `index.rows()`, as a table for `audit`."""
    check_session(spark)
    return spark.createDataFrame(pa.Table.from_pylist(list(map(_row, rows)), schema=_TOLD))


def told_columns(contents: DataFrame) -> DataFrame:
    """A table's columns as `held_of` takes them. Raises UsageError."""
    from pyspark.sql import functions as F

    there = contents.columns
    if "vector_id" not in there:
        raise UsageError(f"column vector_id is missing: there are {', '.join(there)}")
    if not {"vector", "data"} & set(there):
        raise UsageError("columns vector and data are missing: one of them holds what is to be compared")
    default = {"namespace": F.lit(DEFAULT_NAMESPACE), "alive": F.lit(True)}
    kinds = {
        name: contents.schema[name].dataType.typeName() for name in ("metadata", "data") if name in there
    }
    types = {"vector": "array<float>", "data": "binary", "alive": "boolean", "origin": "string"}
    types |= dict.fromkeys(("offset", "lamport", "counter"), "long")
    given = {name: F.col(name) if name in there else default.get(name, F.lit(None)) for name in _TOLD.names}
    if kinds.get("metadata") in ("struct", "map"):  # as JSON lines have it
        given["metadata"] = F.to_json(given["metadata"])
    if kinds.get("data") == "string":  # in base64
        given["data"] = F.unbase64(given["data"])
    columns = [given[name].cast(types.get(name, "string")) for name in _TOLD.names]
    return contents.select(*(column.alias(name) for column, name in zip(columns, _TOLD.names, strict=True)))


def held_of(rows: pa.RecordBatch, *, metadata: bool) -> pa.Table:
    """Rows with the columns of `told_columns` as states; `metadata`: whether the table told any."""
    count = rows.num_rows
    alive = pc.fill_null(rows.column("alive"), True).to_numpy(zero_copy_only=False)
    vectors = rows.column("vector").is_valid().to_numpy(zero_copy_only=False)
    kinds = np.where(alive, np.where(vectors, Kind.CREATE, Kind.OPAQUE), Kind.DELETE).astype(np.uint8)
    empty = pa.scalar([], pa.list_(pa.float32()))
    lists = pc.coalesce(rows.column("vector").cast(pa.list_(pa.float32())), empty)
    patches = rows.column("metadata").to_pylist()
    columns = {
        "key": join_keys(rows.column("namespace"), rows.column("vector_id")),
        "kind": kinds | np.uint8(STATE),
        "values": pc.if_else(pa.array(kinds == Kind.CREATE), lists, empty),
        "indices": pa.array([[]] * count, pa.list_(pa.uint32())),
        "data": pc.if_else(pa.array(kinds == Kind.OPAQUE), pc.fill_null(rows.column("data"), b""), b""),
        "patch": pa.array(map(packed, patches) if metadata else [UNTOLD] * count, pa.binary()),
        "id": pa.nulls(count, pa.binary()),
        "known": np.zeros(count, np.uint8),
        "offset": pc.fill_null(rows.column("offset"), NOWHERE),
        "lamport": _numbers(rows, "lamport"),
        "origin": np.array([int(one or "0", 16) for one in rows.column("origin").to_pylist()], np.uint64),
        "counter": _numbers(rows, "counter"),
        "ignored": np.zeros(count, np.int64),
    }
    return pa.table([columns[name] for name in CHANGES.names], schema=CHANGES)


_TOLD = pa.schema([STATES.field(name).with_nullable(True) for name in STATES.names if name != "ignored"])


def _numbers(rows: pa.RecordBatch, name: str) -> NDArray[np.uint64]:
    found: NDArray[np.uint64] = pc.fill_null(rows.column(name), 0).to_numpy().astype(np.uint64)
    return found


def _row(row: tuple[str, str, State]) -> dict[str, Any]:
    namespace, vector_id, state = row
    told: dict[str, Any] = {"namespace": namespace, "vector_id": vector_id, "alive": state.alive}
    told |= {"vector": state.vector, "data": state.data}
    told["metadata"] = json.dumps(dict(state.metadata)) if state.metadata else None
    if state.key is not None:
        lamport, origin, counter = state.key
        told |= {"lamport": lamport, "origin": f"{origin:016x}", "counter": counter}
    return told
