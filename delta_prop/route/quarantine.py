"""A sink's quarantine: deltas that it rejected, and behind each of them what must not overtake it.

A rejected delta leaves a gap in its vector. Applied over the gap, the vector's later deltas would make
a state that no fold makes; so they line up behind it, and so does what names any of these as a parent,
until an operator has the rejected one applied again, or drops it. Other vectors go on. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Delta, Dot

    Vector = tuple[str, str]
    Name = Dot | bytes


GIVEN_UP_MAX = 100_000


@dataclass(slots=True, eq=False)
class SetAside:
    """One delta in the quarantine. `reason`: why it was rejected; None: it lines up behind `behind`.

    `behind` is the offset of the delta that it waits for: one that was rejected, or that waits for nothing
    any more as a replay was given up half-way. For those two it is their own.
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
        """How another delta may name it as a parent: by itself, or as one of those published with it.

        A publish is named by its last delta.
        """
        batch = self.logged.batch
        yield batch.dot(self.row)
        if self.row < batch.count - 1:
            yield batch.dot(batch.count - 1)
        if batch.ids is not None:
            yield batch.ids[self.row]


class Sifted(NamedTuple):
    """What of a delivery may be applied now; `full_at`: from this offset on the quarantine had no room."""

    passing: Delivery | None
    lined_up: list[int]
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
        self._given_up: dict[int, None] = {}  # offsets that were dropped, the last `GIVEN_UP_MAX` of them
        self._given_up_end = 0  # behind the highest of them
        self._held: dict[int, SetAside] = {}
        self._batches: dict[int, int] = {}  # offset of a batch -> rows of it that are held
        self._vectors: dict[Vector, list[int]] = {}  # -> the offsets held of it, ascending
        self._ids: Counter[str] = Counter()  # -> how many are held of that vector id
        self._names: dict[Name, set[int]] = {}  # -> the offsets that may be meant by it
        self._moved = False  # some have gone, so others may wait for others now
        self._coming_out: frozenset[int] = frozenset()  # in a call of the sink that runs
        self.touched: set[int] | None = None
        """Offsets about which something has changed, for whoever writes it down and empties this; None:
        nobody does."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, offset: int) -> bool:
        return offset in self._held

    def __getitem__(self, offset: int) -> SetAside:
        self._line_up()
        return self._held[offset]

    @property
    def matters(self) -> bool:
        """Whether it has to wait for its sink's return."""
        return bool(self._held or self._given_up)

    def concerns(self, offset: int) -> bool:
        """Whether what lies at `offset` or behind it has to be sifted."""
        return bool(self._held) or offset < self._given_up_end

    def withholds(self, offset: int) -> bool:
        """Whether the delta there must not have an effect at this sink: it is held, or was dropped."""
        if offset in self._coming_out:
            return False
        return offset in self._held or offset in self._given_up

    @contextmanager
    def coming_out(self, records: Iterable[SetAside]) -> Iterator[None]:
        """These are being applied: what comes behind them may count on them."""
        self._coming_out = frozenset(one.offset for one in records)
        try:
            yield
        finally:
            self._coming_out = frozenset()

    def get(self, offset: int) -> SetAside | None:
        """What is held there; for whom it waits may have changed."""
        return self._held.get(offset)

    @property
    def given_up(self) -> list[int]:
        """Offsets that were dropped, in the order of that."""
        return list(self._given_up)

    def records(self) -> list[SetAside]:
        """Everything held, in log order."""
        self._line_up()
        return self._in_order()

    def _in_order(self) -> list[SetAside]:
        return sorted(self._held.values(), key=lambda one: one.offset)

    def holds_any(self, start: int, end: int) -> SetAside | None:
        """The first delta held whose offset is at least `start` and below `end`."""
        self._line_up()
        if end - start > len(self._held):
            return next((one for one in self.records() if start <= one.offset < end), None)
        return next((self._held[offset] for offset in range(start, end) if offset in self._held), None)

    def first_of(self, vector: Vector) -> int | None:
        """The first offset held of a vector; None: none is."""
        self._line_up()
        offsets = self._vectors.get(vector)
        return offsets[0] if offsets else None

    # --- going in

    def reject(self, logged: LoggedBatch, row: int, reason: str, at_us: int) -> bool:
        """Set aside what the sink rejected; False where there is no room, and nothing has changed."""
        offset = logged.offset + row
        held = self._held.get(offset)
        if held is not None:
            held.reason, held.behind = reason, offset
            self.rejected += 1
            self._moved = True
            self._touch(offset)
            return True
        if not self._has_room(logged):
            return False
        self._hold(SetAside(logged, row, at_us, offset, _parents_of(logged, row), reason))
        self.rejected += 1
        return True

    def sift(self, delivery: Delivery, at_us: int) -> Sifted:
        """Line up what waits for something held; skip what is held already, or was dropped; let the rest
        pass."""
        logged, batch = delivery.logged, delivery.batch
        parents = batch.parents
        if (
            self._ids.keys().isdisjoint(batch.keys)
            and logged.offset not in self._batches
            and logged.offset >= self._given_up_end
            and (not parents or self._names.keys().isdisjoint(parent for _, parent in parents))
        ):
            return Sifted(delivery, [], None)
        self._line_up()
        passing: list[int] = []
        lined_up: list[int] = []
        full_at = None
        ids, keys, named = self._ids, batch.keys, _parents_by_row(logged)
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            if logged.offset + row in self._given_up:
                continue
            if keys[row] not in ids and row not in named:
                passing.append(row)
                continue
            if logged.offset + row in self._held:
                continue
            one = SetAside(logged, row, at_us, -1, named.get(row, ()))
            one.behind = self._in_the_way(one)
            if one.behind < 0:
                passing.append(row)
            elif self._has_room(logged):
                self._hold(one)
                lined_up.append(one.offset)
            else:
                full_at = one.offset
                break
        self.lined_up += len(lined_up)
        passes = replace(
            delivery,
            rows=np.array(passing, np.intp),
            end=delivery.end if full_at is None else full_at,  # the sink's own cursor must not pass it
        )
        return Sifted(passes if passing else None, lined_up, full_at)

    # --- coming out

    def replay(self, offset: int) -> None:
        """Let one go that is applied now."""
        if offset in self._held:
            self._remove(offset)
        self.replayed += 1

    def drop(self, offset: int) -> None:
        """Let one go for good, not applied."""
        self._remove(offset)
        self._give_up(offset)
        self.dropped += 1

    def forget(self, offset: int) -> None:
        """Let one go that is delivered again."""
        if offset in self._held:
            self._remove(offset)
        self.lined_up -= 1

    def come_back(self, start: int) -> None:
        """Its sink is attached again and reads on from `start`: what lies there comes again from the log, but
        for what was dropped, and of what is held only what lies below stays. It counts anew."""
        for one in self._in_order():
            if one.offset >= start:
                self._remove(one.offset)
        self.rejected = self.lined_up = self.dropped = self.replayed = 0

    def cut(self, end: int) -> None:
        """The log lost what lay from `end` on; other deltas get these offsets."""
        for offset in [offset for offset in self._held if offset >= end]:
            self._remove(offset)
        for offset in [offset for offset in self._given_up if offset >= end]:
            del self._given_up[offset]
            self._touch(offset)

    def bring_back(self, logged: LoggedBatch, row: int, reason: str | None, at_us: int) -> None:
        """Hold again what an earlier process held, whatever room there is."""
        self._hold(SetAside(logged, row, at_us, logged.offset + row, _parents_of(logged, row), reason))
        self._moved = True

    def bring_back_given_up(self, offsets: Iterable[int]) -> None:
        """Withhold again what was dropped in an earlier process."""
        for offset in offsets:
            self._give_up(offset)

    def clear(self, below: int) -> None:
        """Let go of everything below: its sink was rebuilt, and has the states that all those deltas made."""
        for one in self._in_order():
            if one.offset < below:
                self._remove(one.offset)
        for offset in [offset for offset in self._given_up if offset < below]:
            del self._given_up[offset]
            self._touch(offset)
        self.rejected = self.lined_up = self.dropped = self.replayed = 0

    # --- helpers

    def _touch(self, offset: int) -> None:
        if self.touched is not None:
            self.touched.add(offset)

    def _give_up(self, offset: int) -> None:
        self._given_up[offset] = None
        self._given_up_end = max(self._given_up_end, offset + 1)
        self._touch(offset)
        if len(self._given_up) > GIVEN_UP_MAX:
            first = next(iter(self._given_up))
            del self._given_up[first]
            self._touch(first)

    def _remove(self, offset: int) -> None:
        one = self._held.pop(offset)
        self._moved = True
        self._touch(offset)
        base = one.logged.offset
        self._batches[base] -= 1
        if not self._batches[base]:
            del self._batches[base]
            self.bytes -= one.logged.batch.size
        for name in one.names():
            self._names[name].remove(offset)
            if not self._names[name]:
                del self._names[name]
        namespace, vector_id = one.vector
        offsets = self._vectors[namespace, vector_id]
        del offsets[bisect_left(offsets, offset)]
        if not offsets:
            del self._vectors[namespace, vector_id]
        self._ids[vector_id] -= 1
        if not self._ids[vector_id]:
            del self._ids[vector_id]

    def _line_up(self) -> None:
        """Say of each for whom it waits now."""
        if not self._moved:
            return
        self._moved = False
        vectors: dict[Vector, int] = {}
        names: dict[Name, int] = {}
        for one in self._in_order():
            if one.reason is None:
                waits_for = (vectors.get(one.vector), *(names.get(parent) for parent in one.parents))
                one.behind = next((behind for behind in waits_for if behind is not None), one.offset)
            vectors[one.vector] = one.behind
            for name in one.names():
                names.setdefault(name, one.behind)

    def _in_the_way(self, one: SetAside) -> int:
        """The rejected delta that this one has to wait for, -1 for none."""
        offsets = self._vectors.get(one.vector)
        if offsets is not None and offsets[0] < one.offset:
            return self._held[offsets[0]].behind
        for parent in one.parents:
            held = self._names.get(parent)
            if held is not None:
                return self._held[min(held)].behind
        return -1

    def _has_room(self, logged: LoggedBatch) -> bool:
        more = 0 if logged.offset in self._batches else logged.batch.size
        return len(self._held) < self.deltas_max and (not self._held or self.bytes + more <= self.bytes_max)

    def _hold(self, one: SetAside) -> None:
        base = one.logged.offset
        self._held[one.offset] = one
        self._touch(one.offset)
        if base not in self._batches:
            self.bytes += one.logged.batch.size
        self._batches[base] = self._batches.get(base, 0) + 1
        insort(self._vectors.setdefault(one.vector, []), one.offset)
        self._ids[one.vector[1]] += 1
        for name in one.names():
            self._names.setdefault(name, set()).add(one.offset)


class Release:
    """What of a quarantine can be applied, in log order, while some of it stays.

    Those at `leaving` go, where they were rejected; the others that were rejected stay, and what waits for
    any of them. Each record is looked at once, and once more if it is given back.
    """

    def __init__(self, records: list[SetAside], leaving: Collection[int]) -> None:
        self._records = iter(records)
        self._leaving = leaving
        self._staying = _Line()
        self._given_back: deque[SetAside] = deque()
        self._rejected_again = _Line()  # these lie before all that is given back

    def take(self, count: int) -> list[SetAside]:
        """The next records that wait for nothing that stays, at most so many."""
        taken: list[SetAside] = []
        while self._given_back and len(taken) < count:
            one = self._given_back.popleft()
            if self._rejected_again.holds_up(one):
                self._rejected_again.add(one)
            else:
                taken.append(one)
        while len(taken) < count and (following := next(self._records, None)) is not None:
            stays = following.reason is not None and following.offset not in self._leaving
            if stays or self._staying.holds_up(following) or self._rejected_again.holds_up(following):
                self._staying.add(following)
            else:
                taken.append(following)
        return taken

    def give_back(self, records: Sequence[SetAside], rejected: SetAside | None = None) -> None:
        """These were taken last and not applied; the one before them was rejected again, and stays."""
        self._given_back.extendleft(reversed(records))
        if rejected is not None:
            self._rejected_again.add(rejected)


class _Line:
    """Who stays, as far as others may have to wait for them."""

    def __init__(self) -> None:
        self._vectors: set[Vector] = set()
        self._names: set[Name] = set()

    def add(self, one: SetAside) -> None:
        self._vectors.add(one.vector)
        self._names.update(one.names())

    def holds_up(self, one: SetAside) -> bool:
        return one.vector in self._vectors or not self._names.isdisjoint(one.parents)


def _parents_of(logged: LoggedBatch, row: int) -> tuple[Name, ...]:
    return tuple(parent for at, parent in logged.batch.parents if at == row)


def _parents_by_row(logged: LoggedBatch) -> dict[int, tuple[Name, ...]]:
    named: dict[int, list[Name]] = {}
    for row, parent in logged.batch.parents:
        named.setdefault(row, []).append(parent)
    return {row: tuple(some) for row, some in named.items()}
