"""Columns of a DataFrame of deltas: those that a read returns, those that a write accepts.

Pure: types of Spark, no session. A column that does not fit is refused on the driver, before anything runs,
with its name, its type, the expected type and the fix.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    UserDefinedType,
)

from delta_prop_wire.errors import UsageError

READ_SCHEMA = StructType(
    [
        StructField("offset", LongType(), nullable=False),
        StructField("vector_id", StringType(), nullable=False),
        StructField("namespace", StringType(), nullable=False),
        StructField("op", StringType(), nullable=False),
        StructField("vector", ArrayType(FloatType())),
        StructField("indices", ArrayType(IntegerType())),
        StructField("values", ArrayType(FloatType())),
        StructField("data", BinaryType()),
        StructField("metadata", StringType()),
        StructField("topics", ArrayType(StringType())),
        StructField("id", BinaryType()),
        StructField("timestamp", TimestampType()),
        StructField("priority", StringType(), nullable=False),
        StructField("source", StringType(), nullable=False),
        StructField("origin", StringType(), nullable=False),
        StructField("counter", LongType(), nullable=False),
        StructField("lamport", LongType(), nullable=False),
    ]
)
"""Columns that a read returns: those of `rows.SCHEMA`, as types of Spark."""
STREAM_READ_SCHEMA = StructType(
    [READ_SCHEMA.fields[0], StructField("partition", IntegerType(), nullable=False), *READ_SCHEMA.fields[1:]]
)
"""Columns that a read of a named stream returns, in which an offset belongs to a partition."""


class _ColumnRule(NamedTuple):
    """Types that a column may have.

    `elements`: those of an array's elements; `expected`: the accepted types as text, for
    messages; `conversion`: an expression that converts another type.
    """

    types: tuple[type[DataType], ...]
    elements: tuple[type[DataType], ...]
    expected: str
    conversion: str


_NUMBERS = _ColumnRule(
    (ArrayType,),
    (FloatType, DoubleType),
    "array<float> (or array<double>, which is narrowed)",
    'col("{name}").cast("array<float>")',
)
_INTEGERS = _ColumnRule(
    (ArrayType,),
    (IntegerType, LongType, ShortType, ByteType),
    "array<int>",
    'col("{name}").cast("array<int>")',
)
_TEXT = _ColumnRule((StringType,), (), "string", 'col("{name}").cast("string")')
_TEXTS = _ColumnRule((ArrayType,), (StringType,), "array<string>", 'col("{name}").cast("array<string>")')
_BYTES = _ColumnRule((BinaryType,), (), "binary", 'col("{name}").cast("binary")')
_TIME = _ColumnRule((TimestampType,), (), "timestamp", 'col("{name}").cast("timestamp")')
WRITABLE_COLUMNS = {
    "vector_id": _TEXT,
    "namespace": _TEXT,
    "op": _TEXT,
    "vector": _NUMBERS,
    "indices": _INTEGERS,
    "values": _NUMBERS,
    "data": _BYTES,
    "metadata": _TEXT,
    "topics": _TEXTS,
    "id": _BYTES,
    "timestamp": _TIME,
}
"""Columns that a write accepts, each with the types that it may have."""
_SERVICE_COLUMNS = tuple(name for name in STREAM_READ_SCHEMA.names if name not in WRITABLE_COLUMNS)
"""Columns of a read that the service assigns, so that a write cannot set them."""


def check_write_schema(schema: StructType) -> None:
    """Check that a DataFrame of these columns can be written. Raises UsageError."""
    names = schema.names
    _check_names(names)
    for field in schema.fields:
        _check_type(field, WRITABLE_COLUMNS[field.name])
    if "vector_id" not in names:
        raise UsageError(
            "column vector_id is missing: it identifies the vector that a row changes: add it, such as "
            'df.withColumn("vector_id", col("key").cast("string"))'
        )
    if not {"op", "vector", "data"} & set(names):
        raise UsageError(
            "columns vector, data and op are missing: give vectors as `vector`, bytes as `data`, or each "
            'row\'s operation as `op`, such as df.withColumn("op", lit("delete"))'
        )
    for one, other in (("indices", "values"), ("values", "indices")):
        if one in names and other not in names:
            raise UsageError(
                f"column {one}: column {other} is missing: give both for sparse changes; give full vectors "
                "as `vector`"
            )


def check_read_schema(schema: StructType) -> None:
    """Check that a read can return these columns, some of `STREAM_READ_SCHEMA`. Raises UsageError."""
    known = {field.name: field for field in STREAM_READ_SCHEMA.fields}
    for field in schema.fields:
        if field.name not in known:
            raise UsageError(
                f"column {field.name:.60} is not a column of a read: name some of {', '.join(known)}, or "
                "leave the schema out to get all of them"
            )
        expected_type = known[field.name].dataType
        if field.dataType != expected_type:
            raise UsageError(
                f"column {field.name} is {field.dataType.simpleString()} in the schema, but a read returns "
                f"{expected_type.simpleString()}: leave the schema out, and cast after the read"
            )
        if schema.names.count(field.name) > 1:
            raise UsageError(
                f"column {field.name} occurs {schema.names.count(field.name)} times: name it once"
            )


def _check_names(names: Sequence[str]) -> None:
    assigned = [name for name in names if name in _SERVICE_COLUMNS]
    if assigned:
        listed = ", ".join(f'"{name}"' for name in assigned)
        raise UsageError(
            f"column {assigned[0]} is assigned by the service and cannot be written: leave it out with "
            f"df.drop({listed})"
        )
    for name in names:
        if name not in WRITABLE_COLUMNS:
            near = get_close_matches(name.lower(), WRITABLE_COLUMNS, 1)
            fix = f'df.withColumnRenamed("{name}", "{near[0]}")' if near else f'df.drop("{name}")'
            raise UsageError(
                f"column {name:.60} is not a column of a delta, which are {', '.join(WRITABLE_COLUMNS)}: "
                f"correct it with {fix:.160}"
            )
        if names.count(name) > 1:
            raise UsageError(f"column {name} occurs {names.count(name)} times: select one of them")


def _check_type(field: StructField, rule: _ColumnRule) -> None:
    kind = field.dataType
    element = kind.elementType if isinstance(kind, ArrayType) else None
    fits = isinstance(kind, rule.types) and (element is None or isinstance(element, rule.elements))
    if fits:
        return
    fix = f'df.withColumn("{field.name}", {rule.conversion.format(name=field.name)})'
    if isinstance(kind, UserDefinedType):  # the vectors of pyspark.ml
        fix = f'pyspark.ml.functions.vector_to_array(col("{field.name}"))'
    raise UsageError(
        f"column {field.name} is {kind.simpleString():.60}, but must be {rule.expected}: convert it with "
        f"{fix}"
    )
