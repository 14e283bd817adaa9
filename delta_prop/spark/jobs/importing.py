"""Import: converts a table's rows to deltas that create them, and writes deltas to a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from delta_prop.spark.arguments import check_table, format_of
from delta_prop.spark.jobs.pairs import MEMBER, NEW
from delta_prop.spark.jobs.tables import column_mapping_of, join_members, to_facts


def to_deltas(
    table: DataFrame,
    *,
    key: str = "vector_id",
    vector: str | Sequence[str] | None = "vector",
    namespace: str | None = None,
) -> DataFrame:
    """Return each row of a table as a delta that creates its fact with its metadata.

    The parameters are those of `diff`. Raises UsageError.
    """
    check_table("table", table)
    facts = to_facts(table, column_mapping_of([table], key, vector, namespace), NEW)
    members = [F.col(f"`{name.replace('`', '``')}`") for name in facts.columns if name.startswith(MEMBER)]
    metadata = F.col("metadata")
    if members:
        metadata = join_members(members)
    fault = F.concat(F.col("vector_id"), F.lit(": "), F.col("wrong"))
    return facts.select(
        "vector_id",
        "namespace",
        F.when(F.col("data").isNull(), "create").otherwise("opaque").alias("op"),
        "vector",
        "data",
        F.when(F.col("wrong").isNotNull(), F.raise_error(fault)).otherwise(metadata).alias("metadata"),
    )


def read_table(spark: SparkSession, path: str, format_: str | None = None) -> DataFrame:
    """Read a table from files of Parquet, CSV (with a header line) or JSON lines. Raises UsageError."""
    chosen = format_of(path, format_)
    reader = spark.read
    if chosen == "csv":
        return reader.csv(path, header=True, inferSchema=True)
    return reader.format(chosen).load(path)


def write_deltas(deltas: DataFrame, url: str, producer: str, **options: Any) -> None:
    """Send deltas to a service, each exactly once under this producer's name, even if the call is repeated.

    `options` are those of the data source. Raises what the write raises.
    """
    texts = {name: str(value) for name, value in options.items()}
    deltas.write.format("delta_prop").options(url=url, producer=producer, **texts).mode("append").save()
