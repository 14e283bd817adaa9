"""A sink's quarantine: deltas that it rejected, and behind each of them what must not overtake it.

A rejected delta leaves a gap in its vector. Applied over the gap, the vector's later deltas would make
a state that no fold makes; so they line up behind it, and so does what names any of these as a parent,
until an operator has the rejected one applied again, or drops it. Other vectors go on. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_sinks.sink import Delivery

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Delta, Dot

    Vector = tuple[str, str]
    Name = Dot | bytes


@dataclass(slots=True, eq=False)
class SetAside:
    """One delta in the quarantine. `reason`: why it was rejected; None: it lines up behind `behind`.

    `behind` is the offset of the rejected delta that it waits for, its own for a rejected one.
    """

    logged: LoggedBatch
    row: int
    at_us: int
    behind: int
    parents: tuple[Name, ...] = ()
    reason: str | None = None

    @property
    def offset(self) -> int:
        """Its place in the log."""
        return self.logged.offset + self.row

    @property
    def vector(self) -> Vector:
        """Its namespace and vector id."""
        return self.logged.batch.namespaces[self.row], self.logged.batch.keys[self.row]

    @property
    def delta(self) -> Delta:
        """What it says."""
        return self.logged.batch.delta(self.row, self.logged.source)

    def names(self) -> Iterator[Name]:
        """How another delta may name it as a parent."""
        batch = self.logged.batch
        yield batch.dot(self.row)
        if batch.ids is not None:
            yield batch.ids[self.row]


class Sifted(NamedTuple):
    """What of a delivery may be applied now; `full_at`: from this offset on the quarantine had no room."""

    passing: Delivery | None
    lined_up: int
    full_at: int | None


class Quarantine:
    """Bounded in deltas, and in the bytes of the batches that they keep in memory."""

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        self.deltas_max = deltas_max
        self.bytes_max = bytes_max
        self.bytes = 0
        self.rejected = 0
        self.lined_up = 0
        self.dropped = 0
        self.replayed = 0
        self._held: dict[int, SetAside] = {}
        self._batches: dict[int, int] = {}  # offset of a batch -> rows of it that are held
        self._vectors: dict[Vector, list[int]] = {}  # -> the offsets held of it, ascending
        self._ids: Counter[str] = Counter()  # -> how many are held of that vector id
        self._names: dict[Name, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, offset: int) -> bool:
        return offset in self._held

    def __getitem__(self, offset: int) -> SetAside:
        return self._held[offset]

    def records(self) -> list[SetAside]:
        """Everything held, in log order."""
        return sorted(self._held.values(), key=lambda one: one.offset)

    def holds_any(self, start: int, end: int) -> SetAside | None:
        """The first delta held whose offset is at least `start` and below `end`."""
        if end - start > len(self._held):
            return next((one for one in self.records() if start <= one.offset < end), None)
        return next((self._held[offset] for offset in range(start, end) if offset in self._held), None)

    # --- going in

    def reject(self, logged: LoggedBatch, row: int, reason: str, at_us: int) -> bool:
        """Set aside what the sink rejected; False where there is no room, and nothing has changed."""
        offset = logged.offset + row
        held = self._held.get(offset)
        if held is not None:
            held.reason, held.behind = reason, offset
            self.rejected += 1
            return True
        parents = _parents_by_row(logged).get(row, ())
        if not self._hold(SetAside(logged, row, at_us, offset, parents, reason)):
            return False
        self.rejected += 1
        return True

    def sift(self, delivery: Delivery, at_us: int) -> Sifted:
        """Line up what waits for something held; skip what is held already; let the rest pass."""
        logged, batch = delivery.logged, delivery.batch
        parents = batch.parents
        if (
            self._ids.keys().isdisjoint(batch.keys)
            and logged.offset not in self._batches
            and (not parents or self._names.keys().isdisjoint(parent for _, parent in parents))
        ):
            return Sifted(delivery, 0, None)
        passing: list[int] = []
        lined_up, full_at = 0, None
        named = _parents_by_row(logged)
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            if logged.offset + row in self._held:
                continue
            one = SetAside(logged, row, at_us, -1, named.get(row, ()))
            one.behind = self._in_the_way(one)
            if one.behind < 0:
                passing.append(row)
            elif self._hold(one):
                lined_up += 1
            else:
                full_at = logged.offset + row
                break
        self.lined_up += lined_up
        rows = np.array(passing, np.intp)
        return Sifted(Delivery(logged, rows) if passing else None, lined_up, full_at)

    # --- coming out

    def freed_by(self, leaving: Collection[int]) -> list[SetAside]:
        """What can be applied if these go: themselves where they are rejected, and what waits for nothing
        else, in log order."""
        vectors: set[Vector] = set()
        names: set[Name] = set()
        freed: list[SetAside] = []
        for one in self.records():
            stays = (
                one.vector in vectors
                or not names.isdisjoint(one.parents)
                or (one.reason is not None and one.offset not in leaving)
            )
            if stays:
                vectors.add(one.vector)
                names.update(one.names())
            else:
                freed.append(one)
        return freed

    def replay(self, offset: int) -> None:
        """Let one go that is applied now."""
        self._remove(offset)
        self.replayed += 1

    def drop(self, offset: int) -> None:
        """Let one go for good, not applied."""
        self._remove(offset)
        self.dropped += 1

    # --- helpers

    def _remove(self, offset: int) -> None:
        one = self._held.pop(offset)
        base = one.logged.offset
        self._batches[base] -= 1
        if not self._batches[base]:
            del self._batches[base]
            self.bytes -= one.logged.batch.size
        for name in one.names():
            self._names.pop(name, None)
        namespace, vector_id = one.vector
        offsets = self._vectors[namespace, vector_id]
        del offsets[bisect_left(offsets, offset)]
        if not offsets:
            del self._vectors[namespace, vector_id]
        self._ids[vector_id] -= 1
        if not self._ids[vector_id]:
            del self._ids[vector_id]

    def _in_the_way(self, one: SetAside) -> int:
        """The rejected delta that this one has to wait for, -1 for none."""
        offsets = self._vectors.get(one.vector)
        if offsets is not None and offsets[0] < one.offset:
            return self._held[offsets[0]].behind
        for parent in one.parents:
            held = self._names.get(parent)
            if held is not None:
                return self._held[held].behind
        return -1

    def _hold(self, one: SetAside) -> bool:
        base, size = one.logged.offset, one.logged.batch.size
        more = 0 if base in self._batches else size
        if len(self._held) >= self.deltas_max or (self._held and self.bytes + more > self.bytes_max):
            return False
        self._held[one.offset] = one
        self._batches[base] = self._batches.get(base, 0) + 1
        self.bytes += more
        insort(self._vectors.setdefault(one.vector, []), one.offset)
        self._ids[one.vector[1]] += 1
        for name in one.names():
            self._names[name] = one.offset
        return True


def _parents_by_row(logged: LoggedBatch) -> dict[int, tuple[Name, ...]]:
    named: dict[int, tuple[Name, ...]] = {}
    for row, parent in logged.batch.parents:
        named[row] = (*named.get(row, ()), parent)
    return named
