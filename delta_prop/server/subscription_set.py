"""The combined subscriptions of one connection, with their filters, narrowed to readable namespaces.

Pure. A delta that matches several subscriptions is one row. Filters select complete batches, since all rows
of a batch have one source and one priority.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.delivery.routing_table import NO_ROWS, NoRows, RoutingTable, Rows
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Priority, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions
    from delta_prop_wire.frames import Filter, Subscription

SUBSCRIPTIONS_MAX = 64
TOPICS_MAX = 4_096
"""Limit per connection, over all its subscriptions."""


class SubscriptionSet:
    """Subscriptions by number, of a client with these permissions.

    `topics`: those of all subscriptions. `wants_all`: True if every row of every batch is sent.
    `is_narrowing`: True if `narrow` may leave rows out.
    """

    def __init__(self, permissions: Permissions) -> None:
        self.topics: tuple[Topic, ...] = ()
        self.wants_all = False
        self._can_read = permissions.read_filter
        self.is_narrowing = self._can_read is not None
        self._requests: dict[int, Subscription] = {}
        self._has_filters = False
        # a target is a set of subscriptions by number: those whose filters let a batch through
        self._routing_table: RoutingTable[frozenset[int]] = RoutingTable()
        self._matching_cache: dict[tuple[Source, Priority], frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, number: int) -> bool:
        return number in self._requests

    def add(self, request: Subscription) -> None:
        """Add a subscription. Raises Refused (BAD_REQUEST) and changes nothing."""
        number, topics = request.subscription, {*self.topics, *request.topics}
        if number in self._requests:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"subscription {number}: already open on this connection: give another number",
            )
        if len(self._requests) >= SUBSCRIPTIONS_MAX or len(topics) > TOPICS_MAX:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"{len(self._requests) + 1} subscriptions of {len(topics)} topics on one connection: use up "
                f"to {SUBSCRIPTIONS_MAX} and {TOPICS_MAX}, and another connection for more",
            )
        self._requests[number] = request
        self._combine()

    def remove(self, number: int) -> None:
        """Remove a subscription. Raises Refused (BAD_REQUEST)."""
        if number not in self._requests:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"subscription {number}: not open on this connection: name one of {sorted(self._requests)}",
            )
        del self._requests[number]
        self._combine()

    def clear(self) -> None:
        """Remove all subscriptions."""
        self._requests.clear()
        self._combine()

    def narrow(self, logged: LoggedBatch, rows: Rows) -> Rows | NoRows:
        """Return those of `rows` that filters and rights let through. All `rows` must match `topics`."""
        if self._has_filters:
            return self.rows(logged)
        return rows if self._can_read is None else self._readable_rows(logged.batch, rows)

    def rows(self, logged: LoggedBatch) -> Rows | NoRows:
        """Return the rows of a batch that match a subscription and may be read; None for all of them."""
        matching = self._matching_subscriptions(logged)
        if not matching or logged.batch.is_control:
            return NO_ROWS
        rows = self._routing_table.rows_for(matching, logged.batch)
        if self._can_read is None or isinstance(rows, NoRows):
            return rows
        return self._readable_rows(logged.batch, rows)

    # --- helpers

    def _combine(self) -> None:
        requests = self._requests.values()
        self.topics = tuple(dict.fromkeys(topic for request in requests for topic in request.topics))
        self._has_filters = any(_is_filtering(request.filter) for request in requests)
        self.is_narrowing = self._has_filters or self._can_read is not None
        self.wants_all = self._can_read is None and any(
            topic.kind is TopicKind.ALL
            for request in requests
            if not _is_filtering(request.filter)
            for topic in request.topics
        )
        self._routing_table = RoutingTable()
        self._matching_cache.clear()

    def _matching_subscriptions(self, logged: LoggedBatch) -> frozenset[int]:
        key = (logged.source, logged.batch.priority)
        matching = self._matching_cache.get(key)
        if matching is None:
            matching = self._matching_cache[key] = frozenset(
                number for number, request in self._requests.items() if _matches(request.filter, *key)
            )
            topics = [topic for number in matching for topic in self._requests[number].topics]
            self._routing_table.subscribe(matching, topics)
        return matching

    def _readable_rows(self, batch: Batch, rows: Rows) -> Rows | NoRows:
        can_read = self._can_read
        assert can_read is not None
        readable = {name: can_read(name) for name in batch.namespace_names}
        if all(readable.values()):
            return rows
        if not any(readable.values()):
            return NO_ROWS
        mask = np.fromiter((readable[name] for name in batch.namespaces), bool, batch.count)
        rows = np.flatnonzero(mask) if rows is None else rows[mask[rows]]
        if len(rows) == batch.count:
            return None
        return rows if len(rows) else NO_ROWS


def _is_filtering(filter_: Filter | None) -> bool:
    return filter_ is not None and bool(filter_.sources or filter_.priorities)


def _matches(filter_: Filter | None, source: Source, priority: Priority) -> bool:
    if filter_ is None:
        return True
    return (not filter_.sources or source in filter_.sources) and (
        not filter_.priorities or priority in filter_.priorities
    )
