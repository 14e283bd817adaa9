"""Queries of a client about its log, over the connection that it has.

Pure. A query is sent again on the next connection until it has an answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_prop.client.session import Session
    from delta_prop_wire.errors import Refused
    from delta_prop_wire.frames import FindOffsets, FoundOffsets

IN_FLIGHT_MAX = 16


@dataclass(slots=True, eq=False)
class Query:
    """A request for offsets, and its outcome: `found` or `refusal`."""

    request: FindOffsets
    found: FoundOffsets | None = None
    refusal: Refused | None = None

    @property
    def done(self) -> bool:
        """True once it has an outcome."""
        return self.found is not None or self.refusal is not None


class Queries:
    """The queries without an outcome, in the order of the calls; a bounded number of them is in flight."""

    def __init__(self) -> None:
        self._unsent: deque[Query] = deque()
        self._in_flight: dict[int, Query] = {}

    def add(self, query: Query) -> Query:
        """Send a query soon; return it."""
        self._unsent.append(query)
        return query

    def discard(self, query: Query) -> None:
        """Forget a query whose outcome nobody needs; an answer to it is ignored."""
        if query in self._unsent:
            self._unsent.remove(query)

    def data_to_send(self, session: Session) -> list[bytes]:
        """Return the requests to send now."""
        parts = []
        while self._unsent and len(self._in_flight) < IN_FLIGHT_MAX:
            query = self._unsent.popleft()
            number, raw = session.request(query.request)
            self._in_flight[number] = query
            parts.append(raw)
        return parts

    def on_answer(self, correlation_id: int | None, found: FoundOffsets) -> None:
        """Note an answer."""
        query = self._pop(correlation_id)
        if query is not None:
            query.found = found

    def on_refusal(self, correlation_id: int | None, refusal: Refused) -> Query | None:
        """Return the query that is refused, if it is one."""
        query = self._pop(correlation_id)
        if query is not None:
            query.refusal = refusal
        return query

    def on_disconnect(self) -> None:
        """Send the queries in flight again on the next connection."""
        self._unsent.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()

    def _pop(self, correlation_id: int | None) -> Query | None:
        return None if correlation_id is None else self._in_flight.pop(correlation_id, None)
