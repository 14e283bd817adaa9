"""How a table's files are read, by what they are called. Pure."""

from __future__ import annotations

from delta_prop_wire.errors import UsageError

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def format_of(path: str, chosen: str | None = None) -> str:
    """What is chosen, or what the end of the name tells. Raises UsageError."""
    named = next((one for end, one in FORMATS.items() if path.rstrip("/").lower().endswith(end)), None)
    found = chosen or named
    if found is None:
        raise UsageError(f"{path!r:.300}: its name does not tell what it holds: say parquet, csv or json")
    return found
