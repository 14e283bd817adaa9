"""Computes a reader's lag in deltas and in seconds, as the HTTP port reports it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from delta_prop_broker.log.contract import Log


def lag_at(log: Log, offset: int | None) -> dict[str, Any]:
    """Return the lag of a reader that has processed all below an offset; None: its offset is unknown."""
    if offset is None:
        return {"lag": None, "lag_s": None}
    age_s = log.age_s(offset)
    return {"lag": max(log.high_watermark - offset, 0), "lag_s": None if age_s is None else round(age_s, 3)}


def lags_of(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Return the lags of the rows that have one, by name: in deltas and in seconds."""
    lagging = (one for one in rows if one["lag"] is not None)
    return {str(one[name]): {"deltas": one["lag"], "seconds": one["lag_s"]} for one in lagging}
