"""Who gets which rows of a batch: subscriptions by topic, matched once per target and batch.

Pure. It knows targets as opaque keys and hands nothing over.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch, LoggedBatch

    Rows = NDArray[np.intp] | None

PLANS_MAX = 10_000
"""Plans kept; when more kinds of batches come by, they are made anew."""


class Nothing:
    """No row matches; None would mean that all do."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = Nothing()

Target = TypeVar("Target", bound=Hashable)


class Taker(Hashable, Protocol):
    """What the service's own table knows as targets: a sink's feed, a connection's outlet."""

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """Take a batch that has become visible; `rows` None means all. Never waits."""

    def note_visible(self) -> None:
        """More of the log may be read; what of it matches has been offered."""

    def note_recovered(self) -> None:
        """The log was recovered in place: more or less may be in it than was shown."""


class Table(Generic[Target]):
    """Subscriptions. Who takes a batch whole and who looks at its rows is worked out once for each
    combination of namespaces, kinds and tags; vector ids are compared as sets before any row is.
    """

    def __init__(self) -> None:
        self._wants: dict[Target, _Wants] = {}
        # Who asks for a name; the inner dictionaries are sets that keep their order.
        self._by_vector_id: dict[str, dict[Target, None]] = {}
        self._by_namespace: dict[str, dict[Target, None]] = {}
        self._by_tag: dict[str, dict[Target, None]] = {}
        self._with_control_rows: dict[Target, None] = {}
        self._plans: dict[Hashable, _Plan[Target]] = {}
        self._last: _Last[Target] = _NO_LAST

    def subscribe(self, target: Target, topics: Iterable[Topic], *, control_rows: bool = False) -> None:
        """Give a target these topics, in place of those it had; `control_rows`: those rows as well."""
        self.unsubscribe(target)
        wants = self._wants[target] = _Wants(topics)
        if control_rows:
            self._with_control_rows[target] = None
        for index, names in self._indexes(wants):
            for name in names:
                index.setdefault(name, {})[target] = None

    def unsubscribe(self, target: Target) -> None:
        """Forget a target, if it is known."""
        self._plans.clear()
        self._last = _NO_LAST
        self._with_control_rows.pop(target, None)
        wants = self._wants.pop(target, None)
        for index, names in () if wants is None else self._indexes(wants):
            for name in names:
                del index[name][target]
                if not index[name]:
                    del index[name]

    def plan(self, batch: Batch) -> Sequence[tuple[Target, Rows]]:
        """Each target that gets something of a batch, once, with its rows (None: all of them)."""
        if batch.is_control:
            return tuple(self._with_control_rows.items())
        names, kinds, whole = self._last
        if (
            batch.namespace_names is names and batch.kinds_mask == kinds
        ):  # often it is the same table of names
            return whole
        plan = self._plan(batch)
        named = self._by_vector_id and not self._by_vector_id.keys().isdisjoint(batch.keys)
        if not named and not plan.partly:
            if not self._by_vector_id and not self._by_tag:
                self._last = batch.namespace_names, batch.kinds_mask, plan.whole
            return plan.whole
        rows_by_id = self._rows_by_id(batch) if named else {}
        found: list[tuple[Target, Rows]] = list(plan.whole)
        for target in dict.fromkeys((*plan.partly, *rows_by_id)):
            if target not in plan.takers:
                rows = self._wants[target].rows(batch, rows_by_id.get(target, ()))
                if not isinstance(rows, Nothing):
                    found.append((target, rows))
        return found

    def rows_for(self, target: Target, batch: Batch) -> Rows | Nothing:
        """The rows of a batch that a target gets: an index array, None for all, or NOTHING."""
        wants = self._wants.get(target)
        if batch.is_control:
            return None if target in self._with_control_rows else NOTHING
        if wants is None:
            return NOTHING
        return wants.rows(batch, wants.rows_by_id(batch))

    # --- helpers

    def _indexes(self, wants: _Wants) -> tuple[tuple[dict[str, dict[Target, None]], set[str]], ...]:
        return (
            (self._by_vector_id, wants.vector_ids),
            (self._by_namespace, wants.namespaces),
            (self._by_tag, wants.tags),
        )

    def _plan(self, batch: Batch) -> _Plan[Target]:
        names = batch.namespace_names
        key = (  # names that nobody asks for make no difference, however many there are
            None if self._by_namespace.keys().isdisjoint(names) else names,
            batch.kinds_mask,
            batch.custom_topics.intersection(self._by_tag) if self._by_tag else None,
        )
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(batch)
        return plan

    def _make_plan(self, batch: Batch) -> _Plan[Target]:
        takers = {target: None for target, wants in self._wants.items() if wants.whole(batch)}
        others = [one for one in self._wants.items() if one[0] not in takers]
        return _Plan(
            whole=tuple(takers.items()),
            takers=frozenset(takers),
            partly=tuple(target for target, wants in others if wants.partly(batch)),
        )

    def _rows_by_id(self, batch: Batch) -> dict[Target, list[int]]:
        rows: dict[Target, list[int]] = {}
        for row, key in enumerate(batch.keys):
            for target in self._by_vector_id.get(key, ()):
                rows.setdefault(target, []).append(row)
        return rows


_Last: TypeAlias = tuple[tuple[str, ...] | None, int, tuple[tuple[Target, None], ...]]
"""Names and kinds of the batch that was planned last, and who took all of it, where nothing else counts."""
_NO_LAST: _Last[Any] = (None, 0, ())


@dataclass(frozen=True, slots=True)
class _Plan(Generic[Target]):
    """What all batches of one combination have in common; `takers`: those in `whole`; `partly`: others."""

    whole: tuple[tuple[Target, None], ...]
    takers: frozenset[Target]
    partly: tuple[Target, ...]


class _Wants:
    """One target's topics, by kind."""

    __slots__ = ("everything", "kind_flags", "kinds", "namespaces", "tags", "vector_ids")

    def __init__(self, topics: Iterable[Topic]) -> None:
        self.everything = False
        self.vector_ids: set[str] = set()
        self.namespaces: set[str] = set()
        self.kinds: set[int] = set()
        self.tags: set[str] = set()
        names = {
            TopicKind.VECTOR_ID: self.vector_ids,
            TopicKind.NAMESPACE: self.namespaces,
            TopicKind.CUSTOM: self.tags,
        }
        for topic in topics:
            if topic.kind is TopicKind.ALL:
                self.everything = True
            elif isinstance(topic.value, int):
                self.kinds.add(topic.value)
            elif topic.value is not None:
                names[topic.kind].add(topic.value)
        self.kind_flags = np.zeros(256, bool)
        self.kind_flags[list(self.kinds)] = True

    def whole(self, batch: Batch) -> bool:
        """Whether every row matches because all have one namespace or one kind."""
        return self.everything or batch.namespace in self.namespaces or batch.kind in self.kinds

    def partly(self, batch: Batch) -> bool:
        """Whether some row may match by anything but its vector id."""
        return (
            not self.namespaces.isdisjoint(batch.namespace_names)
            or any(batch.kinds_mask >> kind & 1 for kind in self.kinds)
            or not self.tags.isdisjoint(batch.custom_topics)
        )

    def rows_by_id(self, batch: Batch) -> Sequence[int]:
        """The rows that match by their vector id."""
        if not self.vector_ids or self.vector_ids.isdisjoint(batch.keys):
            return ()
        return [row for row, key in enumerate(batch.keys) if key in self.vector_ids]

    def rows(self, batch: Batch, by_id: Sequence[int]) -> Rows | Nothing:
        """All rows that match, given those that do by their vector id."""
        if self.whole(batch):
            return None
        if not (self.kinds or self.namespaces or self.tags):
            return _rows_of(np.array(by_id, np.intp), batch)
        mask = np.zeros(batch.count, bool)
        if self.kinds and batch.kind is None:
            mask |= self.kind_flags[np.frombuffer(batch.kinds, np.uint8)]
        if self.namespaces and batch.namespace is None:
            mask |= [name in self.namespaces for name in batch.namespaces]
        if self.tags:
            mask[[row for row, tag in batch.tags if tag in self.tags]] = True
        if by_id:
            mask[by_id] = True
        return _rows_of(np.flatnonzero(mask), batch)


def _rows_of(rows: NDArray[np.intp], batch: Batch) -> Rows | Nothing:
    if len(rows) == batch.count:
        return None
    return rows if len(rows) else NOTHING
