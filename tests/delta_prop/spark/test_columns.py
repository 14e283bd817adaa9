"""Columns are checked on the driver: a wrong one is reported with its type and the line that fixes it."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.ml.linalg import VectorUDT
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructType,
    TimestampNTZType,
)

from delta_prop.spark.columns import READ_SCHEMA, WRITABLE_COLUMNS, check_read_schema, check_write_schema
from delta_prop.spark.data_source.rows import SCHEMA
from delta_prop_wire.errors import UsageError


def schema_of(**types: DataType) -> StructType:
    schema = StructType()
    for name, kind in types.items():
        schema = schema.add(name, kind)
    return schema


TEXT, NUMBERS = StringType(), ArrayType(DoubleType())


def test_read_schema_equals_the_arrow_schema() -> None:
    assert to_arrow_schema(READ_SCHEMA, timezone="UTC").equals(SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [
        schema_of(vector_id=TEXT, vector=NUMBERS),
        schema_of(vector_id=TEXT, op=TEXT),
        schema_of(vector_id=TEXT, op=TEXT, indices=ArrayType(LongType()), values=NUMBERS),
        StructType([field for field in READ_SCHEMA.fields if field.name in WRITABLE_COLUMNS]),
    ],
)
def test_valid_write_schema_is_accepted(schema: StructType) -> None:
    check_write_schema(schema)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (schema_of(vector=NUMBERS), r'column vector_id is missing: .*df.withColumn\("vector_id"'),
        (schema_of(vector_id=TEXT), "columns vector, data and op are missing"),
        (
            schema_of(vector_id=TEXT, vec=NUMBERS),
            r"vec is not a column of a delta, .*withColumnRenamed\(\"vec\", \"vector\"\)",
        ),
        (schema_of(vector_id=TEXT, Vector=NUMBERS), r'withColumnRenamed\("Vector", "vector"\)'),
        (
            schema_of(vector_id=TEXT, vector=NUMBERS, price=LongType()),
            r'column price is not a column of a delta.*df.drop\("price"',
        ),
        (
            schema_of(vector_id=LongType(), vector=NUMBERS),
            r'column vector_id is bigint, but must be string: convert it with df.withColumn\("vector_id", '
            r'col\("vector_id"\).cast\("string"\)\)',
        ),
        (
            schema_of(vector_id=TEXT, vector=ArrayType(DecimalType(10, 2))),
            r"column vector is array<decimal\(10,2\)>, but must be array<float>",
        ),
        (schema_of(vector_id=TEXT, vector=VectorUDT()), "column vector is vector, .*vector_to_array"),
        (schema_of(vector_id=TEXT, vector=TEXT), "column vector is string, but must be array<float>"),
        (
            schema_of(vector_id=TEXT, data=TEXT),
            r'column data is string, but must be binary: .*cast\("binary"\)',
        ),
        (
            schema_of(vector_id=TEXT, data=TEXT, timestamp=TimestampNTZType()),
            "column data is string",
        ),
        (
            schema_of(vector_id=TEXT, op=TEXT, timestamp=TimestampNTZType()),
            "column timestamp is timestamp_ntz, but must be timestamp",
        ),
        (schema_of(vector_id=TEXT, op=TEXT, values=NUMBERS), "column values: column indices is missing"),
        (
            schema_of(vector_id=TEXT, op=TEXT, indices=ArrayType(LongType())),
            "column indices: column values is miss",
        ),
        (
            READ_SCHEMA,
            r'column offset is assigned by the service .*df.drop\("offset", "priority", "source", "origin"',
        ),
        (schema_of(vector_id=TEXT, op=TEXT).add("op", TEXT), "column op occurs 2 times"),
    ],
)
def test_wrong_write_schema_is_refused(schema: StructType, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        check_write_schema(schema)


def test_read_schema_may_have_only_some_columns() -> None:
    check_read_schema(READ_SCHEMA)
    check_read_schema(schema_of(vector_id=TEXT, offset=LongType()))
    with pytest.raises(
        UsageError, match="column vec is not a column of a read: name some of offset, partition, vec"
    ):
        check_read_schema(schema_of(vec=NUMBERS))
    with pytest.raises(
        UsageError, match="column vector is array<double> in the schema, but a read returns arr"
    ):
        check_read_schema(schema_of(vector=NUMBERS))
