"""Converts a sink's contents, given as rows or as a table, to states that can be compared with the log's.

Absent metadata are not compared: a table of another system's index may have only vectors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from delta_prop.spark.arguments import check_session
from delta_prop.spark.states.changes import CHANGES, STATE, STATES, join_keys
from delta_prop.spark.states.storage_rows import UNKNOWN_METADATA, pack_metadata
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NO_OFFSET = -1
"""Offset of a row without one."""


def contents_of(spark: SparkSession, rows: Iterable[tuple[str, str, VectorState]]) -> DataFrame:
    """Return the contents of a sink of this process, such as `index.rows()`, as a table for `audit`."""
    check_session(spark)
    return spark.createDataFrame(pa.Table.from_pylist(list(map(_to_row, rows)), schema=_SCHEMA))


def normalize_columns(contents: DataFrame) -> DataFrame:
    """Return a table with the columns that `to_states` takes. Raises UsageError."""
    from pyspark.sql import functions as F

    names = contents.columns
    if "vector_id" not in names:
        raise UsageError(f"column vector_id is missing: rename one of {', '.join(names)} to it")
    if not {"vector", "data"} & set(names):
        raise UsageError("columns vector and data are missing: give the one to compare")
    default = {"namespace": F.lit(DEFAULT_NAMESPACE), "alive": F.lit(True)}
    kinds = {
        name: contents.schema[name].dataType.typeName() for name in ("metadata", "data") if name in names
    }
    types = {"vector": "array<float>", "data": "binary", "alive": "boolean", "origin": "string"}
    types |= dict.fromkeys(("offset", "lamport", "counter"), "long")
    expressions = {
        name: F.col(name) if name in names else default.get(name, F.lit(None)) for name in _SCHEMA.names
    }
    if kinds.get("metadata") in ("struct", "map"):  # as JSON lines have it
        expressions["metadata"] = F.to_json(expressions["metadata"])
    if kinds.get("data") == "string":  # in base64
        expressions["data"] = F.unbase64(expressions["data"])
    columns = [expressions[name].cast(types.get(name, "string")) for name in _SCHEMA.names]
    return contents.select(*(column.alias(name) for column, name in zip(columns, _SCHEMA.names, strict=True)))


def to_states(rows: pa.RecordBatch, *, has_metadata: bool) -> pa.Table:
    """Return rows with the columns of `normalize_columns` as states.

    `has_metadata`: the table had a column of metadata before `normalize_columns`.
    """
    count = rows.num_rows
    alive = pc.fill_null(rows.column("alive"), True).to_numpy(zero_copy_only=False)
    has_vector = rows.column("vector").is_valid().to_numpy(zero_copy_only=False)
    kinds = np.where(alive, np.where(has_vector, Kind.CREATE, Kind.OPAQUE), Kind.DELETE).astype(np.uint8)
    empty = pa.scalar([], pa.list_(pa.float32()))
    lists = pc.coalesce(rows.column("vector").cast(pa.list_(pa.float32())), empty)
    patches = rows.column("metadata").to_pylist()
    columns = {
        "key": join_keys(rows.column("namespace"), rows.column("vector_id")),
        "kind": kinds | np.uint8(STATE),
        "values": pc.if_else(pa.array(kinds == Kind.CREATE), lists, empty),
        "indices": pa.array([[]] * count, pa.list_(pa.uint32())),
        "data": pc.if_else(pa.array(kinds == Kind.OPAQUE), pc.fill_null(rows.column("data"), b""), b""),
        "patch": pa.array(
            map(pack_metadata, patches) if has_metadata else [UNKNOWN_METADATA] * count, pa.binary()
        ),
        "id": pa.nulls(count, pa.binary()),
        "known": np.zeros(count, np.uint8),
        "offset": pc.fill_null(rows.column("offset"), NO_OFFSET),
        "lamport": _number_column(rows, "lamport"),
        "origin": np.array([int(one or "0", 16) for one in rows.column("origin").to_pylist()], np.uint64),
        "counter": _number_column(rows, "counter"),
        "ignored": np.zeros(count, np.int64),
    }
    return pa.table([columns[name] for name in CHANGES.names], schema=CHANGES)


_SCHEMA = pa.schema([STATES.field(name).with_nullable(True) for name in STATES.names if name != "ignored"])


def _number_column(rows: pa.RecordBatch, name: str) -> NDArray[np.uint64]:
    numbers: NDArray[np.uint64] = pc.fill_null(rows.column(name), 0).to_numpy().astype(np.uint64)
    return numbers


def _to_row(row: tuple[str, str, VectorState]) -> dict[str, Any]:
    namespace, vector_id, state = row
    fields: dict[str, Any] = {"namespace": namespace, "vector_id": vector_id, "alive": state.alive}
    fields |= {"vector": state.vector, "data": state.data}
    fields["metadata"] = json.dumps(dict(state.metadata)) if state.metadata else None
    if state.key is not None:
        lamport, origin, counter = state.key
        fields |= {"lamport": lamport, "origin": f"{origin:016x}", "counter": counter}
    return fields
