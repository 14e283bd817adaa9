"""Computes a reader's lag in deltas and in seconds, as the HTTP port reports it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from delta_prop_broker.log.contract import Log


def lag_at(log: Log, offset: int | None) -> dict[str, Any]:
    """Return the lag of a reader that has processed all below `offset`, which is None if unknown."""
    if offset is None:
        return {"lag": None, "lag_s": None}
    age_s = log.age_s(offset)
    return {"lag": max(log.high_watermark - offset, 0), "lag_s": None if age_s is None else round(age_s, 3)}


def lags_of(rows: Iterable[Mapping[str, Any]], name_key: str) -> dict[str, dict[str, Any]]:
    """Return the lag of each row, if known, in deltas and in seconds, by the row's value of `name_key`."""
    lagging = (row for row in rows if row["lag"] is not None)
    return {str(row[name_key]): {"deltas": row["lag"], "seconds": row["lag_s"]} for row in lagging}
