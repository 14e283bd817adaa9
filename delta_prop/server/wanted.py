"""What one connection wants: its subscriptions together, each with its filter, narrowed to what it may read.

Pure. A delta that matches several subscriptions is one row; filters look at whole batches alone, since all
rows of a batch have one source and one priority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.route.table import NOTHING, Nothing, Table
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import TopicKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.route.table import Rows
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import Priority, Source
    from delta_prop_wire.frames import Filter, Subscription
    from delta_prop_wire.topics import Topic

SUBSCRIPTIONS_MAX = 64
TOPICS_MAX = 4_096
"""Of one connection, over all its subscriptions."""


class Wanted:
    """Subscriptions by number. `may_read` tells of a namespace whether the connection may have it; None: all.

    `topics`: what all of them ask for together. `everything`: every row of every batch is wanted. `narrows`:
    whether `narrow` may leave something out.
    """

    def __init__(self, may_read: Callable[[str], bool] | None = None) -> None:
        self.topics: tuple[Topic, ...] = ()
        self.everything = False
        self.narrows = may_read is not None
        self._may_read = may_read
        self._requests: dict[int, Subscription] = {}
        self._filtered = False
        self._table: Table[frozenset[int]] = Table()  # targets: subscriptions that let a batch through
        self._open: dict[tuple[Source, Priority], frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def add(self, request: Subscription) -> None:
        """One more. Raises Refused (BAD_REQUEST) and changes nothing."""
        number, topics = request.subscription, {*self.topics, *request.topics}
        if number in self._requests:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"subscription {number} is open on this connection: give another number",
            )
        if len(self._requests) >= SUBSCRIPTIONS_MAX or len(topics) > TOPICS_MAX:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"{len(self._requests) + 1} subscriptions of {len(topics)} topics on one connection, allowed "
                f"are {SUBSCRIPTIONS_MAX} and {TOPICS_MAX}: open another connection for more",
            )
        self._requests[number] = request
        self._combine()

    def remove(self, number: int) -> None:
        """One less. Raises Refused (BAD_REQUEST)."""
        if number not in self._requests:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"no subscription {number} is open on this connection; open are {sorted(self._requests)}",
            )
        del self._requests[number]
        self._combine()

    def clear(self) -> None:
        """None any more."""
        self._requests.clear()
        self._combine()

    def narrow(self, logged: LoggedBatch, rows: Rows) -> Rows | Nothing:
        """Of the rows that match `topics`, those that are wanted."""
        if self._filtered:
            return self.rows(logged)
        return rows if self._may_read is None else self._readable(logged.batch, rows)

    def rows(self, logged: LoggedBatch) -> Rows | Nothing:
        """The rows of a batch that are wanted; None for all of them."""
        let_through = self._let_through(logged)
        if not let_through or logged.batch.is_control:
            return NOTHING
        rows = self._table.rows_for(let_through, logged.batch)
        if self._may_read is None or isinstance(rows, Nothing):
            return rows
        return self._readable(logged.batch, rows)

    # --- helpers

    def _combine(self) -> None:
        requests = self._requests.values()
        self.topics = tuple(dict.fromkeys(topic for one in requests for topic in one.topics))
        self._filtered = any(_filters(one.filter) for one in requests)
        self.narrows = self._filtered or self._may_read is not None
        self.everything = self._may_read is None and any(
            topic.kind is TopicKind.ALL
            for one in requests
            if not _filters(one.filter)
            for topic in one.topics
        )
        self._table = Table()
        self._open.clear()

    def _let_through(self, logged: LoggedBatch) -> frozenset[int]:
        key = (logged.source, logged.batch.priority)
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = frozenset(
                number for number, one in self._requests.items() if _lets_through(one.filter, *key)
            )
            topics = [topic for number in found for topic in self._requests[number].topics]
            self._table.subscribe(found, topics)
        return found

    def _readable(self, batch: Batch, rows: Rows) -> Rows | Nothing:
        may_read = self._may_read
        assert may_read is not None
        readable = {name: may_read(name) for name in batch.namespace_names}
        if all(readable.values()):
            return rows
        if not any(readable.values()):
            return NOTHING
        mask = np.fromiter((readable[name] for name in batch.namespaces), bool, batch.count)
        rows = np.flatnonzero(mask) if rows is None else rows[mask[rows]]
        if len(rows) == batch.count:
            return None
        return rows if len(rows) else NOTHING


def _filters(one: Filter | None) -> bool:
    return one is not None and bool(one.sources or one.priorities)


def _lets_through(one: Filter | None, source: Source, priority: Priority) -> bool:
    if one is None:
        return True
    return (not one.sources or source in one.sources) and (not one.priorities or priority in one.priorities)
