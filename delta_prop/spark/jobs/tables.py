"""Maps a user's table to facts: each row's namespace, vector id, vector or bytes, and metadata.

Runs on the driver: builds expressions of Spark SQL, and reads nothing. Refuses a column that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    MapType,
    NumericType,
    StringType,
    StructType,
    UserDefinedType,
)

from delta_prop.spark.jobs.pairs import MEMBER
from delta_prop_wire.delta import DEFAULT_NAMESPACE
from delta_prop_wire.errors import UsageError

_JSON = {"ignoreNullFields": "false"}
_INFINITE = float("inf")
_STATE_COLUMNS = ("alive", "offset", "lamport", "origin", "counter", "ignored")
"""Columns that a replay has besides those of the content."""


class ColumnMapping(NamedTuple):
    """Columns of a table by their use.

    `vector`: a column of arrays, or several columns of numbers; None: the full row is sent as JSON.
    `namespace`: one namespace for all rows; None: the column `namespace` if there is one, else the default.
    """

    key: str
    vector: str | tuple[str, ...] | None
    namespace: str | None


def column_mapping_of(
    tables: Sequence[DataFrame], key: str, vector: str | Sequence[str] | None, namespace: str | None
) -> ColumnMapping:
    """Return the mapping that fits all tables. Raises UsageError."""
    columns = [set(table.columns) for table in tables]
    for names in columns:
        if key not in names:
            raise UsageError(
                f"column {key}, the key, is missing: name one of {', '.join(sorted(names))} with key="
            )
    if vector == "vector" and not any("vector" in names for names in columns):
        vector = None
    chosen = vector if vector is None or isinstance(vector, str) else tuple(vector)
    for name in () if chosen is None else (chosen,) if isinstance(chosen, str) else chosen:
        if not all(name in names for names in columns):
            raise UsageError(
                f"column {name}, for the vector, is missing: name another one with vector=, or give "
                "vector=None to send rows as JSON"
            )
    return ColumnMapping(key, chosen, namespace)


def has_metadata_column(table: DataFrame, mapping: ColumnMapping) -> bool:
    """True if a table has all metadata in one column of JSON, as in a replay."""
    return mapping.vector is not None and _has_json_metadata(dict(_list_fields(table)))


def to_facts(
    table: DataFrame, mapping: ColumnMapping, side: int, *, merges_metadata: bool = False
) -> DataFrame:
    """Return the table's facts, with the columns of `pairs.py`; `side`: OLD or NEW of that module.

    `merges_metadata`: join all metadata to one column. Raises UsageError.
    """
    _check(table, mapping)
    fields = dict(_list_fields(table))
    used = {mapping.key} | ({"namespace"} if mapping.namespace is None else set())
    if mapping.vector is not None:
        used |= {mapping.vector} if isinstance(mapping.vector, str) else set(mapping.vector)
        used |= {"namespace", "data", "metadata"} if _has_json_metadata(fields) else set()
    others = [name for name in fields if name not in used]
    checked = others if mapping.vector is not None else sorted(fields)
    faults = [_not_finite_message(name, fields[name]) for name in checked] + _overflow_messages(
        fields, mapping
    )
    fault = F.coalesce(_null_text(), *faults)
    names = others if mapping.vector is not None else []
    metadata = F.col("metadata") if "metadata" in used and "metadata" in fields else _null_text()
    if merges_metadata and names:
        metadata, names = join_members([_member_column(name) for name in names]), []
    selected = [
        _namespace_column(fields, mapping).alias("namespace"),
        F.col(_quote(mapping.key)).cast("string").alias("vector_id"),
        F.lit(side).alias("side"),
        _vector_column(fields, mapping).alias("vector"),
        _data_column(fields, mapping).alias("data"),
        metadata.alias("metadata"),
        fault.alias("wrong"),
    ]
    return table.select(*selected, *(_member_column(name).alias(MEMBER + name) for name in names))


def join_members(members: Sequence[Column]) -> Column:
    """Return members joined to one JSON object, NULL if there are none."""
    return F.nullif(F.concat(F.lit("{"), F.concat_ws(",", *members), F.lit("}")), F.lit("{}"))


def _list_fields(table: DataFrame) -> list[tuple[str, DataType]]:
    return [(field.name, field.dataType) for field in table.schema.fields]


def _check(table: DataFrame, mapping: ColumnMapping) -> None:
    names = table.columns
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"column {name} occurs {names.count(name)} times: select one of them")
    fields = dict(_list_fields(table))
    if _has_json_metadata(fields) and mapping.vector is not None:
        known = {mapping.key, "namespace", mapping.vector, "data", "metadata"}
        more = [name for name in names if name not in known]
        if more:
            fix = "select(*CONTENT)" if set(more) <= set(_STATE_COLUMNS) else f'drop("{more[0]}")'
            raise UsageError(
                f"column {more[0]}: column metadata already holds all of a fact's metadata as JSON: "
                f"leave it out with {fix}, or leave metadata out"
            )
    for field in table.schema.fields:
        if _contains_map(field.dataType):
            raise UsageError(
                f"column {field.name} is {field.dataType.simpleString():.60}, which has no order and cannot "
                "be compared: turn it into a struct, or into text with to_json"
            )


def _has_json_metadata(fields: dict[str, DataType]) -> bool:
    """True if a table has all metadata in one column of JSON, as in a replay."""
    return isinstance(fields.get("metadata"), StringType)


def _contains_map(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_contains_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType) or (isinstance(kind, ArrayType) and _contains_map(kind.elementType))


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _null_text() -> Column:
    return F.lit(None).cast("string")


def _namespace_column(fields: dict[str, DataType], mapping: ColumnMapping) -> Column:
    if mapping.namespace is not None:
        return F.lit(mapping.namespace)
    if isinstance(fields.get("namespace"), StringType):
        return F.coalesce(F.col("namespace"), F.lit(DEFAULT_NAMESPACE))
    return F.lit(DEFAULT_NAMESPACE)


def _vector_column(fields: dict[str, DataType], mapping: ColumnMapping) -> Column:
    if mapping.vector is None:
        return F.lit(None).cast("array<float>")
    if not isinstance(mapping.vector, str):
        for name in mapping.vector:
            if not isinstance(fields[name], NumericType):
                raise UsageError(
                    f"column {name} is {fields[name].simpleString()}, not a number: cast it, or leave it out"
                )
        return F.array(*(F.col(_quote(name)).cast("float") for name in mapping.vector))
    name, kind = mapping.vector, fields[mapping.vector]
    if isinstance(kind, StringType):  # as CSV has it
        return F.from_json(F.col(_quote(name)), "array<double>").cast("array<float>")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return F.col(_quote(name)).cast("array<float>")
    fix = f'withColumn("{name}", col("{name}").cast("array<float>"))'
    if isinstance(kind, UserDefinedType):  # the vectors of pyspark.ml
        fix = f'withColumn("{name}", pyspark.ml.functions.vector_to_array(col("{name}")))'
    raise UsageError(
        f"column {name} is {kind.simpleString():.60}, but must be an array of numbers: convert it with {fix}"
    )


def _data_column(fields: dict[str, DataType], mapping: ColumnMapping) -> Column:
    """Return the bytes of a fact without a vector: its row as JSON, names sorted, NULL as null."""
    if mapping.vector is None:
        row = F.struct(*(F.col(_quote(name)) for name in sorted(fields)))
        return F.encode(F.to_json(row, _JSON), "UTF-8")
    if _has_json_metadata(fields) and isinstance(fields.get("data"), BinaryType):
        return F.col("data")
    return F.lit(None).cast("binary")


def _member_column(name: str) -> Column:
    """Return a metadata column as a member of a JSON object, `"name":value`; NULL stays."""
    column = F.col(_quote(name))
    text = F.to_json(F.struct(column), _JSON)
    return F.when(column.isNotNull(), F.substr(text, F.lit(2), F.length(text) - 2))


def _not_finite_message(name: str, kind: DataType) -> Column:
    """Return the message for a column with a number that is not finite, NULL if all are finite."""
    condition = _is_not_finite(F.col(_quote(name)), kind)
    message = F.lit(f"column {name} has a number that is not finite, which JSON cannot represent: replace it")
    return _null_text() if condition is None else F.when(condition, message)


def _overflow_messages(fields: dict[str, DataType], mapping: ColumnMapping) -> list[Column]:
    """Return columns with the message for a finite number that overflows float32; NULL if none does."""
    if mapping.vector is None:
        return []
    vector = _vector_column(fields, mapping)
    if isinstance(mapping.vector, str):
        given = F.col(_quote(mapping.vector))
        if isinstance(fields[mapping.vector], StringType):
            given = F.from_json(given, "array<double>")
    else:
        given = F.array(*(F.col(_quote(name)).cast("double") for name in mapping.vector))
    infinite = [F.lit(bound).cast("float") for bound in (_INFINITE, -_INFINITE)]
    large = F.filter(given, lambda one: (F.abs(one) < _INFINITE) & (F.abs(one.cast("float")) == infinite[0]))
    message = F.concat(
        F.lit("number "), F.get(large, F.lit(0)).cast("string"), F.lit(" does not fit in float32")
    )
    # Every row is tested by a quick expression; only a faulty one evaluates the message.
    return [F.when(F.array_contains(vector, bound), message) for bound in infinite]


def _is_not_finite(column: Column, kind: DataType) -> Column | None:
    """Return the condition that a column has a number that is not finite; None if its type cannot."""
    if isinstance(kind, FloatType | DoubleType):
        return F.isnan(column) | (F.abs(column) == _INFINITE)
    if isinstance(kind, ArrayType):
        element = kind.elementType
        if _is_not_finite(column, element) is None:
            return None
        return F.exists(column, lambda one: _is_not_finite(one, element))
    if isinstance(kind, StructType):
        condition = None
        for field in kind.fields:
            inner = _is_not_finite(column.getField(field.name), field.dataType)
            if inner is not None:
                condition = inner if condition is None else condition | inner
        return condition
    return None
