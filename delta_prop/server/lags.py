"""How far somebody is behind a log, in deltas and in seconds, as the HTTP port tells it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from delta_prop_broker.log.contract import Log


def lag_at(log: Log, offset: int | None) -> dict[str, Any]:
    """The lag of who has processed all below an offset; None: nobody knows how far it is."""
    if offset is None:
        return {"lag": None, "lag_s": None}
    age_s = log.age_s(offset)
    return {"lag": max(log.visible - offset, 0), "lag_s": None if age_s is None else round(age_s, 3)}


def lags_of(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Of rows with a lag, by name: how many deltas, and how many seconds."""
    told = (one for one in rows if one["lag"] is not None)
    return {str(one[name]): {"deltas": one["lag"], "seconds": one["lag_s"]} for one in told}
