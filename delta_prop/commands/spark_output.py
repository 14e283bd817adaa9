"""Writes jobs' results as JSON lines, Parquet files, and tables for people."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from delta_prop.auditing.differences import Difference
from delta_prop.directory.log_positions import escape_unprintable
from delta_prop.platform import system
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

    from delta_prop.client.jobs import JobStatus
    from delta_prop.spark.jobs.counting import Stats
    from delta_prop.spark.jobs.rebuilding import RebuildResult

ROWS_MAX = 20
"""Maximum number of rows in a table for people."""
_WIDTH_MAX = 60


def write_rows(rows: DataFrame, output: str | None, to_line: Callable[[Row], dict[str, Any]]) -> None:
    """Write rows to a new file as Parquet or JSON lines, or to standard output as JSON lines.

    Raises UsageError.
    """
    if output is not None and output.endswith(".parquet"):
        try:
            rows.write.mode("error").parquet(output)
        except Exception:
            system.remove_empty_directory(output)  # Spark created it
            raise
        return
    with system.open_atomic_output(output) as out:
        for row in rows.toLocalIterator():
            out.write(_to_json_line(to_line(row)))
        out.flush()


def _to_json_line(fields: dict[str, Any]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise UsageError(
            f"vector_id {fields['vector_id']!r:.100} has a number that is not finite, which no delta may "
            "have: correct it or leave the row out"
        ) from None


def to_delta_line(row: Row) -> dict[str, Any]:
    """Return the fields of a delta's line, as `publish` reads them."""
    return {"vector_id": row.vector_id, "namespace": row.namespace, "op": row.op} | _payload_of(row)


def to_state_line(row: Row) -> dict[str, Any]:
    """Return the fields of a line with a vector's state."""
    fields = {"vector_id": row.vector_id, "namespace": row.namespace, "alive": row.alive} | _payload_of(row)
    fields |= {name: row[name] for name in ("offset", "lamport", "origin", "counter")}
    return fields | ({"ignored": row.ignored} if row.ignored else {})


def to_difference_line(row: Row) -> dict[str, Any]:
    """Return the fields of a line with a difference and the delta that repairs it."""
    return Difference(**row.asDict()).line()


def _payload_of(row: Row) -> dict[str, Any]:
    columns = row.asDict()
    fields = {name: columns.get(name) for name in ("vector", "indices", "values")}
    fields["data"] = None if row.data is None else base64.b64encode(row.data).decode()
    fields["metadata"] = None if row.metadata is None else json.loads(row.metadata)
    return {name: value for name, value in fields.items() if value is not None}


def put_job(producer: str, status: JobStatus | None) -> None:
    """Print the outcome of sent deltas, for programs; `status` is None if none were sent."""
    fields = {"producer": producer, "state": "published" if status is None else status.state.name.lower()}
    counts = {name: getattr(status, name, 0) for name in ("deltas", "published", "duplicates", "refused")}
    system.confirm(json.dumps(fields | counts, ensure_ascii=False))


def put_rebuilt(file: str, result: RebuildResult, *, as_json: bool) -> None:
    """Print the counts of a rebuilt file."""
    if as_json:
        system.confirm(json.dumps({"storage": file, **result._asdict()}, ensure_ascii=False))
        return
    system.confirm(
        f"{file}: {result.rows:,} rows, {result.alive:,} of them alive; its sink continues from offset "
        f"{result.next_offset}"
    )


# --- tables


def put_table(rows: DataFrame) -> None:
    """Print the first rows as a table, and whether there are more."""
    first_rows = rows.limit(ROWS_MAX + 1).collect()
    put_rows(rows.columns, first_rows[:ROWS_MAX], has_more=len(first_rows) > ROWS_MAX)


def put_rows(headers: Sequence[str], rows: Iterable[Iterable[object]], *, has_more: bool = False) -> None:
    """Print rows as a table; if `has_more`, say that there are more rows."""
    table = [list(headers), *([_format_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(headers))]
    system.put_all("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    if has_more:
        system.put("and more: give --json or --output to get all")


def put_stats(stats: Stats, top: int, *, as_json: bool) -> None:
    """Print statistics, with the `top` vectors that change most."""
    traffic = [row.asDict() for row in stats.traffic.collect()]
    vectors = [row.asDict() for row in stats.vectors.limit(top).collect()]
    if as_json:
        fields = {"ranges": [one._asdict() for one in stats.ranges], "traffic": traffic}
        system.put(json.dumps(fields | {"vectors": vectors, "sinks": stats.sinks}, ensure_ascii=False))
        return
    deltas, size = (sum(row[name] for row in traffic) for name in ("deltas", "bytes"))
    for one in stats.ranges:
        of_partition = f"partition {one.partition}: " if len(stats.ranges) > 1 else ""
        system.put(f"{of_partition}offsets {one.start_offset:,} to {one.next_offset:,}")
    system.put(f"{deltas:,} deltas, {size:,} bytes\n")
    headers = ["namespace", "op", "deltas", "bytes", "numbers", "share of a vector"]
    put_rows(headers, [row.values() for row in traffic])
    system.put("\nvectors that change most")
    put_rows(["namespace", "vector", "deltas", "bytes"], [row.values() for row in vectors])
    if stats.sinks:
        system.put("\nsinks and groups of this directory")
        columns = ["name", "partition", "kind", "offset", "lag"]
        sinks = [sink | {"partition": f"{sink['stream']}/{sink['partition']}"} for sink in stats.sinks]
        put_rows(columns, [[sink[column] for column in columns] for sink in sinks])


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = ", ".join(f"{one:.4g}" for one in value) if isinstance(value, list) else str(value)
    text = escape_unprintable(text)
    return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"
