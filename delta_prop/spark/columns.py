"""The columns of a DataFrame of deltas: those that a read gives, those that a write takes.

Pure: types of Spark, no session. What does not fit is refused on the driver, before anything runs, naming the
column, its type, what is wanted, and how to get that.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql.types import DataType

READ = StructType(
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
"""What a read gives; the same as `rows.SCHEMA`."""


class _Taken(NamedTuple):
    """What a column may be: its types, the elements of its arrays, how that is said, how to get it."""

    types: tuple[type[DataType], ...]
    elements: tuple[type[DataType], ...]
    wanted: str
    cure: str


_NUMBERS = _Taken(
    (ArrayType,),
    (FloatType, DoubleType),
    "array<float> (or array<double>, which is narrowed)",
    'col("{name}").cast("array<float>")',
)
_WHOLE_NUMBERS = _Taken(
    (ArrayType,),
    (IntegerType, LongType, ShortType, ByteType),
    "array<int>",
    'col("{name}").cast("array<int>")',
)
_TEXT = _Taken((StringType,), (), "string", 'col("{name}").cast("string")')
_TEXTS = _Taken((ArrayType,), (StringType,), "array<string>", 'col("{name}").cast("array<string>")')
_BYTES = _Taken((BinaryType,), (), "binary", 'col("{name}").cast("binary")')
_TIME = _Taken((TimestampType,), (), "timestamp", 'col("{name}").cast("timestamp")')
TAKEN = {
    "vector_id": _TEXT,
    "namespace": _TEXT,
    "op": _TEXT,
    "vector": _NUMBERS,
    "indices": _WHOLE_NUMBERS,
    "values": _NUMBERS,
    "data": _BYTES,
    "metadata": _TEXT,
    "topics": _TEXTS,
    "id": _BYTES,
    "timestamp": _TIME,
}
"""What a write takes."""
_GIVEN = tuple(name for name in READ.names if name not in TAKEN)
"""What a read gives and the service gives anew."""


def check_written(schema: StructType) -> None:
    """Whether a DataFrame of these columns can be written. Raises UsageError."""
    names = schema.names
    _check_names(names)
    for field in schema.fields:
        _check_type(field, TAKEN[field.name])
    if "vector_id" not in names:
        raise UsageError(
            "column vector_id is missing: it says which fact a row changes; name it, such as "
            'df.withColumn("vector_id", col("key").cast("string"))'
        )
    if not {"op", "vector", "data"} & set(names):
        raise UsageError(
            "none of the columns vector, data, op is there: give vectors as `vector`, bytes as `data`, or "
            'say with `op` what each row does, such as df.withColumn("op", lit("delete"))'
        )
    for one, other in (("indices", "values"), ("values", "indices")):
        if one in names and other not in names:
            raise UsageError(
                f"column {one} is there without {other}: a sparse change has both; whole vectors are given "
                "as `vector`"
            )


def check_read(schema: StructType) -> None:
    """Whether a read can give these columns: some of `READ`, as they are. Raises UsageError."""
    known = {field.name: field for field in READ.fields}
    for field in schema.fields:
        if field.name not in known:
            raise UsageError(
                f"column {field.name:.60} is none of a read: there are {', '.join(known)}; leave the schema "
                "out to get all of them"
            )
        wanted = known[field.name].dataType
        if field.dataType != wanted:
            raise UsageError(
                f"column {field.name} is {field.dataType.simpleString()} in the schema, and a read gives "
                f"{wanted.simpleString()}: leave the schema out, and cast what was read"
            )
        if schema.names.count(field.name) > 1:
            raise UsageError(f"column {field.name} is there {schema.names.count(field.name)} times")


def _check_names(names: Sequence[str]) -> None:
    given = [name for name in names if name in _GIVEN]
    if given:
        listed = ", ".join(f'"{name}"' for name in given)
        raise UsageError(
            f"column {given[0]} is given by the service, and cannot be written: leave it out with "
            f"df.drop({listed})"
        )
    for name in names:
        if name not in TAKEN:
            near = get_close_matches(name.lower(), TAKEN, 1)
            cure = f'df.withColumnRenamed("{name}", "{near[0]}")' if near else f'df.drop("{name}")'
            raise UsageError(
                f"column {name:.60} is no delta's: there are {', '.join(TAKEN)}; mend it with {cure:.160}"
            )
        if names.count(name) > 1:
            raise UsageError(
                f"column {name} is there {names.count(name)} times: select the one that is meant"
            )


def _check_type(field: StructField, taken: _Taken) -> None:
    kind = field.dataType
    element = kind.elementType if isinstance(kind, ArrayType) else None
    fits = isinstance(kind, taken.types) and (element is None or isinstance(element, taken.elements))
    if fits:
        return
    cure = f'df.withColumn("{field.name}", {taken.cure.format(name=field.name)})'
    if isinstance(kind, UserDefinedType):  # the vectors of pyspark.ml
        cure = f'pyspark.ml.functions.vector_to_array(col("{field.name}"))'
    raise UsageError(
        f"column {field.name} is {kind.simpleString():.60}, and has to be {taken.wanted}: mend it with {cure}"
    )
