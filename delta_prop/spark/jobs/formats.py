"""Derives the format of a table's files from their name. Pure."""

from __future__ import annotations

from delta_prop_wire.errors import UsageError

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def format_of(path: str, chosen: str | None = None) -> str:
    """Return the chosen format, else that of the name's suffix. Raises UsageError."""
    by_suffix = next(
        (name for suffix, name in FORMATS.items() if path.rstrip("/").lower().endswith(suffix)), None
    )
    format_name = chosen or by_suffix
    if format_name is None:
        raise UsageError(
            f"table {path!r:.300}: its name has no known suffix: give parquet, csv or json as format"
        )
    return format_name
