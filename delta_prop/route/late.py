"""What comes out of a quarantine late: an operator's request, and quarantined deltas as deliveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_sinks.sink import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from delta_prop.route.quarantine import SetAside
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.errors import Refused


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a request: deltas applied, deltas dropped, deltas still in the quarantine."""

    applied: int
    dropped: int
    left: int


class ReplayRequest:
    """Apply (or drop) what the sink rejected at these offsets (None: all of it), and what that frees."""

    def __init__(self, offsets: frozenset[int] | None, *, drop: bool) -> None:
        self.offsets = offsets
        self.drop = drop
        self.withdrawn = False
        self._answer: Replayed | Refused | None = None
        self._answered = anyio.Event()

    def end(self, answer: Replayed | Refused) -> None:
        """Tell what became of it."""
        self._answer = answer
        self._answered.set()

    async def wait(self) -> Replayed:
        """Wait for the answer. Raises Refused; cancelled, what is not begun yet is not begun any more."""
        try:
            await self._answered.wait()
        finally:
            self.withdrawn = True
        if isinstance(self._answer, Replayed):
            return self._answer
        assert self._answer is not None
        raise self._answer.with_traceback(None)


def rows_of(delivery: Delivery) -> NDArray[np.intp]:
    """The rows that are meant, as numbers."""
    return np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows


def late_deliveries(records: Sequence[SetAside]) -> list[Delivery]:
    """Quarantined deltas in log order as deliveries, those of one batch together."""
    rows: dict[int, tuple[LoggedBatch, list[int]]] = {}
    for one in records:
        rows.setdefault(one.logged.offset, (one.logged, []))[1].append(one.row)
    return [Delivery(logged, np.array(some, np.intp), late=True) for logged, some in rows.values()]
