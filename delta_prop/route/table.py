"""Who gets which rows of a batch: subscriptions by topic, matched once per target and batch.

Pure. It knows targets as opaque keys and hands nothing over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch

    Rows = NDArray[np.intp] | None

PLANS_MAX = 10_000
"""Plans kept; when more kinds of batches come by, they are made anew."""


class Nothing:
    """No row matches; None would mean that all do."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING: Final = Nothing()

Target = TypeVar("Target", bound="Hashable")


class _Wants:
    """One target's topics, by kind."""

    __slots__ = ("everything", "kinds", "namespaces", "tags", "vector_ids")

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

    def all_rows(self, batch: Batch) -> bool:
        """Whether every row of a batch of one namespace and one kind matches by these."""
        return self.everything or batch.namespace in self.namespaces or batch.kind in self.kinds

    def some_rows(self, batch: Batch) -> bool:
        """Whether a row may match by anything but its vector id."""
        return (
            any(name in self.namespaces for name in batch.namespace_names)
            or any(batch.kinds_mask >> kind & 1 for kind in self.kinds)
            or not self.tags.isdisjoint(batch.custom_topics)
        )


class Table(Generic[Target]):
    """Subscriptions. A plan, the targets that take a batch whole and those that look at its rows, is
    made once for each combination of namespace, kinds and tags.
    """

    def __init__(self) -> None:
        self._wants: dict[Target, _Wants] = {}
        self._by_vector_id: dict[str, list[Target]] = {}
        self._plans: dict[Hashable, tuple[tuple[tuple[Target, None], ...], tuple[Target, ...]]] = {}

    def subscribe(self, target: Target, topics: Sequence[Topic]) -> None:
        """Give a target these topics, in place of those it had."""
        self.unsubscribe(target)
        wants = self._wants[target] = _Wants(topics)
        if not wants.everything:
            for vector_id in wants.vector_ids:
                self._by_vector_id.setdefault(vector_id, []).append(target)

    def unsubscribe(self, target: Target) -> None:
        """Forget a target."""
        self._plans.clear()
        wants = self._wants.pop(target, None)
        for vector_id in () if wants is None or wants.everything else wants.vector_ids:
            targets = self._by_vector_id[vector_id]
            targets.remove(target)
            if not targets:
                del self._by_vector_id[vector_id]

    def plan(self, batch: Batch) -> Sequence[tuple[Target, Rows]]:
        """Each target that gets something of a batch, once, with its rows (None: all of them)."""
        if batch.is_control:
            return ()
        key = (
            batch.namespace_names,
            batch.kinds_mask,
            batch.custom_topics if batch.tags else None,
        )
        found = self._plans.get(key)
        if found is None:
            found = self._make_plan(key, batch)
        whole, partial = found
        named = self._by_vector_id and not self._by_vector_id.keys().isdisjoint(batch.keys)
        if not partial and not named:
            return whole
        targets = dict.fromkeys(partial)
        if named:
            for vector_id in batch.keys:
                targets.update(dict.fromkeys(self._by_vector_id.get(vector_id, ())))
            for target, _ in whole:
                targets.pop(target, None)
        plan: list[tuple[Target, Rows]] = list(whole)
        for target in targets:
            rows = self._rows(self._wants[target], batch)
            if not isinstance(rows, Nothing):
                plan.append((target, rows))
        return plan

    def rows_for(self, target: Target, batch: Batch) -> Rows | Nothing:
        """The rows of a batch that a target gets: an index array, None for all, or NOTHING."""
        wants = self._wants.get(target)
        if wants is None or batch.is_control:
            return NOTHING
        return self._rows(wants, batch)

    # --- helpers

    def _make_plan(
        self, key: Hashable, batch: Batch
    ) -> tuple[tuple[tuple[Target, None], ...], tuple[Target, ...]]:
        alike = batch.namespace is not None and batch.kind is not None
        whole, partial = [], []
        for target, wants in self._wants.items():
            if wants.everything or (alike and wants.all_rows(batch)):
                whole.append((target, None))
            elif wants.some_rows(batch):
                partial.append(target)
        if len(self._plans) >= PLANS_MAX:
            self._plans.clear()
        self._plans[key] = plan = (tuple(whole), tuple(partial))
        return plan

    def _rows(self, wants: _Wants, batch: Batch) -> Rows | Nothing:
        if wants.everything:
            return None
        mask = np.zeros(batch.count, bool)
        if batch.namespace in wants.namespaces or batch.kind in wants.kinds:
            return None
        if batch.namespace is None and wants.namespaces:
            mask |= [name in wants.namespaces for name in batch.namespaces]
        if batch.kind is None and wants.kinds:
            mask |= np.isin(np.frombuffer(batch.kinds, np.uint8), list(wants.kinds))
        if wants.vector_ids and not wants.vector_ids.isdisjoint(batch.keys):
            mask |= [key in wants.vector_ids for key in batch.keys]
        if wants.tags:
            mask[[row for row, tag in batch.tags if tag in wants.tags]] = True
        if mask.all():
            return None
        rows = np.flatnonzero(mask)
        return rows if len(rows) else NOTHING
