"""Diff: two snapshots of a table become the deltas that make the one of the other."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.spark.arguments import check_table
from delta_prop.spark.jobs.comparing import DELTAS_DDL, compare
from delta_prop.spark.jobs.pairs import NEW, OLD
from delta_prop.spark.jobs.tables import facts, has_whole_metadata, shape_of
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame


def diff(
    old: DataFrame,
    new: DataFrame,
    *,
    key: str = "vector_id",
    vector: str | Sequence[str] | None = "vector",
    namespace: str | None = None,
    threshold: float = 0.0,
) -> DataFrame:
    """The deltas that make `new` of `old`, one for each fact that differs, as they are written.

    A fact that is new is a create, one that is gone a delete; of one that changes, its vector is sparse or
    dense, whichever is smaller, and other columns are a metadata patch. A table without the column `vector`
    is one of rows: each is its whole content, as JSON.

    `key` tells facts apart. `vector`: a column of arrays, or several of numbers. `namespace`: of all facts;
    None: what the column of that name says, and `default`. `threshold`: a number that differs by no more
    stays as it was, exactly; so let `old` be what the sinks hold (`replay`), else such differences add up.

    Raises UsageError. Tasks fail with INVALID_DELTA where a key is NULL or there twice, or a vector or a
    number is NULL or not finite, naming table, vector id and column.
    """
    check_table("old", old)
    check_table("new", new)
    if not (threshold >= 0 and math.isfinite(threshold)):
        raise UsageError(f"threshold {threshold!r}: give a number from 0 on")
    shape = shape_of([old, new], key, vector, namespace)
    whole = any(has_whole_metadata(table, shape) for table in (old, new))
    before, after = facts(old, shape, OLD, whole=whole), facts(new, shape, NEW, whole=whole)
    both = before.unionByName(after, allowMissingColumns=True)
    placed = both.repartition("namespace", "vector_id")
    rows = placed.sortWithinPartitions("namespace", "vector_id", "side")
    return rows.mapInArrow(partial(compare, threshold=threshold), DELTAS_DDL)


deltas_from = diff
