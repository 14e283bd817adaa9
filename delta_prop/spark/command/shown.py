"""What jobs give, as lines of JSON, files of Parquet, and tables for people."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from delta_prop.auditing.differences import Difference
from delta_prop.commands import edge
from delta_prop.commands.places import printable
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pyspark.sql import DataFrame, Row

    from delta_prop.client.jobs import JobStatus
    from delta_prop.spark.jobs.counting import Stats
    from delta_prop.spark.jobs.rebuilding import Rebuilt

ROWS_MAX = 20
"""Of a table for people."""
_WIDTH_MAX = 60


def give(rows: DataFrame, output: str | None, line: Callable[[Row], dict[str, Any]]) -> None:
    """Write rows to a new file, as Parquet or JSON lines, or these to standard output. Raises UsageError."""
    if output is not None and output.endswith(".parquet"):
        try:
            rows.write.mode("error").parquet(output)
        except Exception:
            edge.remove_empty(output)  # which Spark made, and leaves; there was none before
            raise
        return
    with edge.whole_output(output) as out:
        for row in rows.toLocalIterator():
            out.write(_json(line(row)))
        out.flush()


def _json(told: dict[str, Any]) -> bytes:
    try:
        return json.dumps(told, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except ValueError:
        raise UsageError(
            f"vector_id {told['vector_id']!r:.100} has a number that is not finite, and no delta has such: "
            "mend it or leave the row out"
        ) from None


def delta_line(row: Row) -> dict[str, Any]:
    """A delta as `publish` reads it."""
    told = {"vector_id": row.vector_id, "namespace": row.namespace, "op": row.op}
    return told | _payload(row)


def state_line(row: Row) -> dict[str, Any]:
    """A vector's state."""
    told = {"vector_id": row.vector_id, "namespace": row.namespace, "alive": row.alive} | _payload(row)
    told |= {name: row[name] for name in ("offset", "lamport", "origin", "counter")}
    return told | ({"ignored": row.ignored} if row.ignored else {})


def difference_line(row: Row) -> dict[str, Any]:
    """A difference, and the delta that mends it."""
    return Difference(**row.asDict()).line()


def _payload(row: Row) -> dict[str, Any]:
    fields = row.asDict()
    told = {name: fields.get(name) for name in ("vector", "indices", "values")}
    told["data"] = None if row.data is None else base64.b64encode(row.data).decode()
    told["metadata"] = None if row.metadata is None else json.loads(row.metadata)
    return {name: value for name, value in told.items() if value is not None}


def put_job(producer: str, status: JobStatus | None) -> None:
    """What became of deltas that were sent, for programs. None: there were none."""
    told: dict[str, Any] = {"producer": producer, "state": "published", "deltas": 0, "published": 0}
    told |= {"duplicates": 0, "refused": 0}
    if status is not None:
        told["state"] = status.state.name.lower()
        told |= {name: getattr(status, name) for name in ("deltas", "published", "duplicates", "refused")}
    edge.confirm(json.dumps(told, ensure_ascii=False))


def put_rebuilt(file: str, made: Rebuilt, *, as_json: bool) -> None:
    """What a storage sink's file was given."""
    if as_json:
        edge.confirm(json.dumps({"storage": file, **made._asdict()}, ensure_ascii=False))
        return
    edge.confirm(
        f"{file}: {made.rows:,} rows, {made.alive:,} of them alive; its sink goes on from offset "
        f"{made.next_offset}"
    )


# --- tables


def put_table(rows: DataFrame) -> None:
    """The first rows, and whether there are more."""
    found = rows.limit(ROWS_MAX + 1).collect()
    put_rows(rows.columns, found[:ROWS_MAX], more=len(found) > ROWS_MAX)


def put_rows(heads: Sequence[str], rows: Iterable[Iterable[object]], *, more: bool) -> None:
    """Rows as a table; `more`: they are not all."""
    _put_rows(heads, [[_cell(value) for value in row] for row in rows])
    if more:
        edge.put("and more: --json or --output give all")


def put_stats(found: Stats, top: int, *, as_json: bool) -> None:
    """What was counted."""
    traffic = [row.asDict() for row in found.traffic.collect()]
    vectors = [row.asDict() for row in found.vectors.limit(top).collect()]
    if as_json:
        told = {"first_offset": found.first_offset, "next_offset": found.next_offset, "traffic": traffic}
        edge.put(json.dumps(told | {"vectors": vectors, "sinks": found.sinks}, ensure_ascii=False))
        return
    deltas, size = (sum(row[name] for row in traffic) for name in ("deltas", "bytes"))
    edge.put(f"offsets {found.first_offset:,} to {found.next_offset:,}: {deltas:,} deltas, {size:,} bytes\n")
    heads = ["namespace", "op", "deltas", "bytes", "numbers", "share of a vector"]
    _put_rows(heads, [[_cell(value) for value in row.values()] for row in traffic])
    edge.put("\nvectors that change most")
    _put_rows(
        ["namespace", "vector", "deltas", "bytes"], [[_cell(one) for one in row.values()] for row in vectors]
    )
    if found.sinks:
        edge.put("\nwho reads the log in this directory")
        rows = [[one["name"], one["kind"], _cell(one["offset"]), _cell(one["lag"])] for one in found.sinks]
        _put_rows(["name", "kind", "offset", "lag"], rows)


def _put_rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = [list(heads), *map(list, rows)]
    widths = [max(len(row[at]) for row in table) for at in range(len(heads))]
    edge.put_all("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3g}"
    text = ", ".join(f"{one:.4g}" for one in value) if isinstance(value, list) else str(value)
    text = printable(text)
    return text if len(text) <= _WIDTH_MAX else text[: _WIDTH_MAX - 1] + "…"
