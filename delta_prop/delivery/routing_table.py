"""Routing: finds the rows of a batch for each subscribed target, by topic, once per target and batch.

Pure. Targets are opaque keys here; nothing is delivered.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.topics import Topic, TopicKind

Rows = NDArray[np.intp] | None

PLANS_MAX = 10_000
"""Maximum number of cached plans; beyond it, the cache is cleared."""


class NoRows:
    """Marker that no row matches (None means that all rows match)."""

    def __repr__(self) -> str:
        return "NO_ROWS"


NO_ROWS: Final = NoRows()

Target = TypeVar("Target", bound=Hashable)


class RouteTarget(Hashable, Protocol):
    """A target in the service's own table: a sink's feed or a consumer session."""

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """Accept a batch below the high watermark; `rows` None means all. Never waits."""

    def note_visible(self) -> None:
        """Note that the high watermark has advanced; all matching rows were offered."""

    def note_recovered(self) -> None:
        """Note that the log was recovered in place: it may hold more or fewer rows than were offered."""


class RoutingTable(Generic[Target]):
    """The subscriptions of all targets.

    For each combination of namespaces, kinds and custom topics, it computes once which targets get all rows,
    and for which targets each row must be checked. Vector ids are first compared as sets, then row by row.
    """

    def __init__(self) -> None:
        self._filters: dict[Target, _TopicFilter] = {}
        # Name -> its targets; the inner dicts are used as ordered sets.
        self._by_vector_id: dict[str, dict[Target, None]] = {}
        self._by_namespace: dict[str, dict[Target, None]] = {}
        self._by_custom_topic: dict[str, dict[Target, None]] = {}
        self._with_control_rows: dict[Target, None] = {}
        self._plans: dict[Hashable, _Plan[Target]] = {}
        self._last_plan: _LastPlan[Target] = _NO_LAST_PLAN

    def subscribe(self, target: Target, topics: Iterable[Topic], *, control_rows: bool = False) -> None:
        """Replace a target's topics; `control_rows`: True if it also gets control rows."""
        self.unsubscribe(target)
        topic_filter = self._filters[target] = _TopicFilter(topics)
        if control_rows:
            self._with_control_rows[target] = None
        for index, names in self._indexes(topic_filter):
            for name in names:
                index.setdefault(name, {})[target] = None

    def unsubscribe(self, target: Target) -> None:
        """Remove a target, if it is known."""
        self._plans.clear()
        self._last_plan = _NO_LAST_PLAN
        self._with_control_rows.pop(target, None)
        topic_filter = self._filters.pop(target, None)
        for index, names in () if topic_filter is None else self._indexes(topic_filter):
            for name in names:
                del index[name][target]
                if not index[name]:
                    del index[name]

    def plan(self, batch: Batch) -> Sequence[tuple[Target, Rows]]:
        """Return each target that gets rows of a batch, once, with its rows (None: all rows)."""
        if batch.is_control:
            return tuple(self._with_control_rows.items())
        names, kinds, targets = self._last_plan
        if batch.namespace_names is names and batch.kinds_mask == kinds:  # often the same tuple of names
            return targets
        plan = self._plan(batch)
        has_named_ids = self._by_vector_id and not self._by_vector_id.keys().isdisjoint(batch.keys)
        if not has_named_ids and not plan.partial:
            if not self._by_vector_id and not self._by_custom_topic:
                self._last_plan = batch.namespace_names, batch.kinds_mask, plan.full
            return plan.full
        rows_by_id = self._rows_by_id(batch) if has_named_ids else {}
        matches: list[tuple[Target, Rows]] = list(plan.full)
        for target in dict.fromkeys((*plan.partial, *rows_by_id)):
            if target not in plan.full_targets:
                rows = self._filters[target].rows(batch, rows_by_id.get(target, ()))
                if not isinstance(rows, NoRows):
                    matches.append((target, rows))
        return matches

    def rows_for(self, target: Target, batch: Batch) -> Rows | NoRows:
        """Return the rows of a batch that a target gets: an index array, None for all, or NO_ROWS."""
        topic_filter = self._filters.get(target)
        if batch.is_control:
            return None if target in self._with_control_rows else NO_ROWS
        if topic_filter is None:
            return NO_ROWS
        return topic_filter.rows(batch, topic_filter.rows_by_id(batch))

    def _indexes(
        self, topic_filter: _TopicFilter
    ) -> tuple[tuple[dict[str, dict[Target, None]], set[str]], ...]:
        return (
            (self._by_vector_id, topic_filter.vector_ids),
            (self._by_namespace, topic_filter.namespaces),
            (self._by_custom_topic, topic_filter.custom_topics),
        )

    def _plan(self, batch: Batch) -> _Plan[Target]:
        names = batch.namespace_names
        key = (  # namespaces to which no target has subscribed make no difference
            None if self._by_namespace.keys().isdisjoint(names) else names,
            batch.kinds_mask,
            batch.custom_topics.intersection(self._by_custom_topic) if self._by_custom_topic else None,
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(batch)
        return plan

    def _make_plan(self, batch: Batch) -> _Plan[Target]:
        full_targets = {
            target: None for target, topic_filter in self._filters.items() if topic_filter.matches_all(batch)
        }
        others = [item for item in self._filters.items() if item[0] not in full_targets]
        return _Plan(
            full=tuple(full_targets.items()),
            full_targets=frozenset(full_targets),
            partial=tuple(target for target, topic_filter in others if topic_filter.may_match_some(batch)),
        )

    def _rows_by_id(self, batch: Batch) -> dict[Target, list[int]]:
        rows: dict[Target, list[int]] = {}
        for row, key in enumerate(batch.keys):
            for target in self._by_vector_id.get(key, ()):
                rows.setdefault(target, []).append(row)
        return rows


_LastPlan: TypeAlias = tuple[tuple[str, ...] | None, int, tuple[tuple[Target, None], ...]]
"""Names and kinds of the batch planned last, and its targets, if the plan depends on nothing else."""
_NO_LAST_PLAN: _LastPlan[Any] = (None, 0, ())


@dataclass(frozen=True, slots=True)
class _Plan(Generic[Target]):
    """Plan for all batches of one combination.

    `full`: the targets that get all rows; `partial`: the targets for which each row must be checked.
    """

    full: tuple[tuple[Target, None], ...]
    full_targets: frozenset[Target]
    partial: tuple[Target, ...]


class _TopicFilter:
    """One target's topics, by kind."""

    __slots__ = ("custom_topics", "kind_flags", "kinds", "matches_everything", "namespaces", "vector_ids")

    def __init__(self, topics: Iterable[Topic]) -> None:
        self.matches_everything = False
        self.vector_ids: set[str] = set()
        self.namespaces: set[str] = set()
        self.kinds: set[int] = set()
        self.custom_topics: set[str] = set()
        names = {
            TopicKind.VECTOR_ID: self.vector_ids,
            TopicKind.NAMESPACE: self.namespaces,
            TopicKind.CUSTOM: self.custom_topics,
        }
        for topic in topics:
            if topic.kind is TopicKind.ALL:
                self.matches_everything = True
            elif isinstance(topic.value, int):
                self.kinds.add(topic.value)
            elif topic.value is not None:
                names[topic.kind].add(topic.value)
        self.kind_flags = np.zeros(256, bool)
        self.kind_flags[list(self.kinds)] = True

    def matches_all(self, batch: Batch) -> bool:
        """Return True if all rows match: by the topic `*`, or by their common namespace or kind."""
        return self.matches_everything or batch.namespace in self.namespaces or batch.kind in self.kinds

    def may_match_some(self, batch: Batch) -> bool:
        """Return True if a row may match by something other than its vector id."""
        return (
            not self.namespaces.isdisjoint(batch.namespace_names)
            or any(batch.kinds_mask >> kind & 1 for kind in self.kinds)
            or not self.custom_topics.isdisjoint(batch.custom_topics)
        )

    def rows_by_id(self, batch: Batch) -> Sequence[int]:
        if not self.vector_ids or self.vector_ids.isdisjoint(batch.keys):
            return ()
        return [row for row, key in enumerate(batch.keys) if key in self.vector_ids]

    def rows(self, batch: Batch, by_id: Sequence[int]) -> Rows | NoRows:
        if self.matches_all(batch):
            return None
        if not (self.kinds or self.namespaces or self.custom_topics):
            return _normalize_rows(np.array(by_id, np.intp), batch)
        mask = np.zeros(batch.count, bool)
        if self.kinds and batch.kind is None:
            mask |= self.kind_flags[np.frombuffer(batch.kinds, np.uint8)]
        if self.namespaces and batch.namespace is None:
            mask |= [name in self.namespaces for name in batch.namespaces]
        if self.custom_topics:
            mask[[row for row, topic in batch.row_topics if topic in self.custom_topics]] = True
        if by_id:
            mask[by_id] = True
        return _normalize_rows(np.flatnonzero(mask), batch)


def _normalize_rows(rows: NDArray[np.intp], batch: Batch) -> Rows | NoRows:
    if len(rows) == batch.count:
        return None
    return rows if len(rows) else NO_ROWS
