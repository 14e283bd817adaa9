"""Diff: computes the deltas that turn one snapshot of a table into another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from pyspark.sql import DataFrame

from delta_prop.spark.arguments import check_table
from delta_prop.spark.jobs.comparing import DELTAS_DDL, compare
from delta_prop.spark.jobs.pairs import NEW, OLD
from delta_prop.spark.jobs.tables import column_mapping_of, has_metadata_column, to_facts
from delta_prop_wire.errors import UsageError


def diff(
    old: DataFrame,
    new: DataFrame,
    *,
    key: str = "vector_id",
    vector: str | Sequence[str] | None = "vector",
    namespace: str | None = None,
    threshold: float = 0.0,
) -> DataFrame:
    """Return the deltas that turn `old` into `new`, one row per differing fact.

    The rows have the columns that the data source writes.

    A new fact becomes a create, a removed one a delete. Of a changed fact, the vector becomes a sparse or a
    dense delta, whichever is smaller, and the other columns become its metadata patch. In a table without
    the column `vector`, each row is a fact with the full row as JSON.

    `key`: the column that identifies facts. `vector`: a column of arrays, or several of numbers. `namespace`:
    for all facts; None: the column of that name, else `default`. `threshold`: a number that differs by up to
    this stays as it was; so let `old` be the sinks' contents (`replay`), else such differences add up.

    Raises UsageError. Tasks fail with INVALID_DELTA if a key is NULL or duplicate, or a vector or a number is
    NULL or not finite, naming table, vector id and column.
    """
    check_table("old", old)
    check_table("new", new)
    if not (threshold >= 0 and math.isfinite(threshold)):
        raise UsageError(f"threshold {threshold!r}: give a number from 0 on")
    mapping = column_mapping_of([old, new], key, vector, namespace)
    merges_metadata = any(has_metadata_column(table, mapping) for table in (old, new))
    before, after = (
        to_facts(old, mapping, OLD, merges_metadata=merges_metadata),
        to_facts(new, mapping, NEW, merges_metadata=merges_metadata),
    )
    both = before.unionByName(after, allowMissingColumns=True)
    partitioned = both.repartition("namespace", "vector_id")
    rows = partitioned.sortWithinPartitions("namespace", "vector_id", "side")
    return rows.mapInArrow(partial(compare, threshold=threshold), DELTAS_DDL)


deltas_from = diff
