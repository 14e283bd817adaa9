"""A user's table as facts: each row's namespace, vector id, vector or bytes, and metadata, in our columns.

On the driver: expressions of Spark SQL, nothing is read. What does not fit is refused, naming the column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

_JSON = {"ignoreNullFields": "false"}
_INFINITE = float("inf")
_OF_STATES = ("alive", "offset", "lamport", "origin", "counter", "ignored")
"""Columns that a replay gives beside the content."""


class Shape(NamedTuple):
    """Which columns of a table are what.

    `vector`: one of arrays, or several of numbers; None: there is none, and a fact is its row as JSON.
    `namespace`: the name for all; None: the column of that name, or the default.
    """

    key: str
    vector: str | tuple[str, ...] | None
    namespace: str | None


def shape_of(
    tables: Sequence[DataFrame], key: str, vector: str | Sequence[str] | None, namespace: str | None
) -> Shape:
    """What the tables share. Raises UsageError."""
    columns = [set(table.columns) for table in tables]
    for there in columns:
        if key not in there:
            raise UsageError(
                f"column {key} is missing, which is to be the key: there are {', '.join(sorted(there))}; "
                "name the one that tells facts apart with key="
            )
    if vector == "vector" and not any("vector" in there for there in columns):
        vector = None
    chosen = vector if vector is None or isinstance(vector, str) else tuple(vector)
    for name in () if chosen is None else (chosen,) if isinstance(chosen, str) else chosen:
        if not all(name in there for there in columns):
            raise UsageError(
                f"column {name} is missing, which is to hold the vector: name another one with vector=, or "
                "give vector=None to send rows as JSON"
            )
    return Shape(key, chosen, namespace)


def has_whole_metadata(table: DataFrame, shape: Shape) -> bool:
    """Whether a table has all metadata in one column, of JSON, as a replay gives them."""
    return shape.vector is not None and _has_content(dict(_fields(table)))


def facts(table: DataFrame, shape: Shape, side: int, *, whole: bool = False) -> DataFrame:
    """The table's facts, with the columns of `pairs.py`; `whole`: all metadata in one. Raises UsageError."""
    _check(table, shape)
    fields = dict(_fields(table))
    own = {shape.key} | ({"namespace"} if shape.namespace is None else set())
    if shape.vector is not None:
        own |= {shape.vector} if isinstance(shape.vector, str) else set(shape.vector)
        own |= {"namespace", "data", "metadata"} if _has_content(fields) else set()
    others = [name for name in fields if name not in own]
    told = others if shape.vector is not None else sorted(fields)
    faults = [_wrong(name, fields[name]) for name in told] + _too_large(fields, shape)
    wrong = F.coalesce(_nothing(), *faults)
    names = others if shape.vector is not None else []
    metadata = F.col("metadata") if "metadata" in own and "metadata" in fields else _nothing()
    if whole and names:
        metadata, names = joined([_member(name) for name in names]), []
    selected = [
        _namespace(fields, shape).alias("namespace"),
        F.col(_quoted(shape.key)).cast("string").alias("vector_id"),
        F.lit(side).alias("side"),
        _vector(fields, shape).alias("vector"),
        _data(fields, shape).alias("data"),
        metadata.alias("metadata"),
        wrong.alias("wrong"),
    ]
    return table.select(*selected, *(_member(name).alias(MEMBER + name) for name in names))


def joined(members: Sequence[Column]) -> Column:
    """Members as one object of JSON; NULL where there is none."""
    return F.nullif(F.concat(F.lit("{"), F.concat_ws(",", *members), F.lit("}")), F.lit("{}"))


def _fields(table: DataFrame) -> list[tuple[str, DataType]]:
    return [(field.name, field.dataType) for field in table.schema.fields]


def _check(table: DataFrame, shape: Shape) -> None:
    names = table.columns
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"column {name} is there {names.count(name)} times: select the one that is meant"
            )
    fields = dict(_fields(table))
    if _has_content(fields) and shape.vector is not None:
        known = {shape.key, "namespace", shape.vector, "data", "metadata"}
        more = [name for name in names if name not in known]
        if more:
            cure = "select(*CONTENT)" if set(more) <= set(_OF_STATES) else f'drop("{more[0]}")'
            raise UsageError(
                f"column {more[0]} stands beside metadata, which holds all of a fact's metadata as JSON: "
                f"leave it out with {cure}, or leave metadata out"
            )
    for field in table.schema.fields:
        if _holds_map(field.dataType):
            raise UsageError(
                f"column {field.name} is {field.dataType.simpleString():.60}: the members of a map have no "
                "order, so that it cannot be compared; turn it into a struct, or into text with to_json"
            )


def _has_content(fields: dict[str, DataType]) -> bool:
    """Whether metadata are one column, of JSON, as a replay gives them."""
    return isinstance(fields.get("metadata"), StringType)


def _holds_map(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_holds_map(field.dataType) for field in kind.fields)
    return isinstance(kind, MapType) or (isinstance(kind, ArrayType) and _holds_map(kind.elementType))


def _quoted(name: str) -> str:
    """A column's name as Spark takes it, whatever stands in it."""
    return "`" + name.replace("`", "``") + "`"


def _nothing() -> Column:
    return F.lit(None).cast("string")


def _namespace(fields: dict[str, DataType], shape: Shape) -> Column:
    if shape.namespace is not None:
        return F.lit(shape.namespace)
    if isinstance(fields.get("namespace"), StringType):
        return F.coalesce(F.col("namespace"), F.lit(DEFAULT_NAMESPACE))
    return F.lit(DEFAULT_NAMESPACE)


def _vector(fields: dict[str, DataType], shape: Shape) -> Column:
    if shape.vector is None:
        return F.lit(None).cast("array<float>")
    if not isinstance(shape.vector, str):
        for name in shape.vector:
            if not isinstance(fields[name], NumericType):
                raise UsageError(f"column {name} is {fields[name].simpleString()}, no number of a vector")
        return F.array(*(F.col(_quoted(name)).cast("float") for name in shape.vector))
    name, kind = shape.vector, fields[shape.vector]
    if isinstance(kind, StringType):  # as CSV has it
        return F.from_json(F.col(_quoted(name)), "array<double>").cast("array<float>")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return F.col(_quoted(name)).cast("array<float>")
    cure = f'withColumn("{name}", col("{name}").cast("array<float>"))'
    if isinstance(kind, UserDefinedType):  # the vectors of pyspark.ml
        cure = f'withColumn("{name}", pyspark.ml.functions.vector_to_array(col("{name}")))'
    raise UsageError(
        f"column {name} is {kind.simpleString():.60}, and has to be an array of numbers: mend it with {cure}"
    )


def _data(fields: dict[str, DataType], shape: Shape) -> Column:
    """The bytes of a fact that has no vector: its row as JSON, names sorted, NULL as null."""
    if shape.vector is None:
        row = F.struct(*(F.col(_quoted(name)) for name in sorted(fields)))
        return F.encode(F.to_json(row, _JSON), "UTF-8")
    if _has_content(fields) and isinstance(fields.get("data"), BinaryType):
        return F.col("data")
    return F.lit(None).cast("binary")


def _member(name: str) -> Column:
    """One of the metadata as it stands in JSON, `"name":value`; null where it is NULL."""
    column = F.col(_quoted(name))
    text = F.to_json(F.struct(column), _JSON)
    return F.when(column.isNotNull(), F.substr(text, F.lit(2), F.length(text) - 2))


def _wrong(name: str, kind: DataType) -> Column:
    """What is said where a number in a column is not finite."""
    found = _not_finite(F.col(_quoted(name)), kind)
    said = F.lit(f"column {name} is not finite: JSON has no such number")
    return _nothing() if found is None else F.when(found, said)


def _too_large(fields: dict[str, DataType], shape: Shape) -> list[Column]:
    """What is said of a number that is finite, and infinite as one of 32 bits: the number as it was given."""
    if shape.vector is None:
        return []
    vector = _vector(fields, shape)
    if isinstance(shape.vector, str):
        given = F.col(_quoted(shape.vector))
        if isinstance(fields[shape.vector], StringType):
            given = F.from_json(given, "array<double>")
    else:
        given = F.array(*(F.col(_quoted(name)).cast("double") for name in shape.vector))
    infinite = [F.lit(bound).cast("float") for bound in (_INFINITE, -_INFINITE)]
    large = F.filter(given, lambda one: (F.abs(one) < _INFINITE) & (F.abs(one.cast("float")) == infinite[0]))
    said = F.concat(
        F.lit("number "), F.get(large, F.lit(0)).cast("string"), F.lit(" does not fit in float32")
    )
    # The one look that every row takes is a quick one.
    return [F.when(F.array_contains(vector, bound), said) for bound in infinite]


def _not_finite(column: Column, kind: DataType) -> Column | None:
    if isinstance(kind, FloatType | DoubleType):
        return F.isnan(column) | (F.abs(column) == _INFINITE)
    if isinstance(kind, ArrayType):
        element = kind.elementType
        if _not_finite(column, element) is None:
            return None
        return F.exists(column, lambda one: _not_finite(one, element))
    if isinstance(kind, StructType):
        found = None
        for field in kind.fields:
            inner = _not_finite(column.getField(field.name), field.dataType)
            found = inner if found is None else found if inner is None else found | inner
        return found
    return None
