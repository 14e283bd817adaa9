"""Vector clocks: how far each origin had come, as seen from one delta.

Pure arithmetic on mappings of origin to counter. A missing entry equals zero, everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Dot
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRIES_MAX = 262_144
"""Clock entries kept over all origins."""


class Order(Enum):
    """How two clocks stand to each other."""

    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


def covers(clock: Mapping[int, int], other: Mapping[int, int] | Iterable[Dot]) -> bool:
    """Whether `clock` has seen all that `other` has."""
    return all(clock.get(origin, 0) >= counter for origin, counter in _entries(other))


def compare(one: Mapping[int, int], other: Mapping[int, int]) -> Order:
    """How `one` stands to `other`."""
    ahead, behind = covers(one, other), covers(other, one)
    if ahead and behind:
        return Order.EQUAL
    if ahead:
        return Order.AFTER
    return Order.BEFORE if behind else Order.CONCURRENT


def concurrent(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether each has seen something that the other has not."""
    return not covers(one, other) and not covers(other, one)


def merge(*clocks: Mapping[int, int] | Iterable[Dot]) -> dict[int, int]:
    """The least clock that covers all of them."""
    merged: dict[int, int] = {}
    for clock in clocks:
        for origin, counter in _entries(clock):
            if counter > merged.get(origin, 0):
                merged[origin] = counter
    return merged


def canonical(clock: Mapping[int, int] | Iterable[Dot]) -> tuple[Dot, ...]:
    """The one form of a clock: its entries above zero, by origin."""
    return tuple(Dot(*entry) for entry in sorted(merge(clock).items()))


def changed(before: Mapping[int, int], after: Mapping[int, int]) -> tuple[Dot, ...]:
    """The entries of `after` that `before` does not cover: what a batch has to carry."""
    return canonical({o: counter for o, counter in after.items() if counter > before.get(o, 0)})


class OriginClocks:
    """Each origin's whole clock, rebuilt from the changed entries that its batches carry.

    Moves only by `appended`, so there is nothing to undo. Bounded: an origin keeps the `CLOCK_ENTRIES_MAX`
    entries that changed last, and in all `entries_max` are kept, of the origins that wrote last. A clock
    that has lost entries calls more deltas concurrent than are, never fewer; order does not look at it.
    """

    def __init__(
        self, *, entries_max: int = ENTRIES_MAX, entries_per_origin_max: int = CLOCK_ENTRIES_MAX
    ) -> None:
        assert 0 < entries_per_origin_max <= entries_max
        self._entries_max = entries_max
        self._entries_per_origin_max = entries_per_origin_max
        self._clocks: OrderedDict[int, dict[int, int]] = OrderedDict()  # that wrote longest ago first
        self.entries = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._clocks)

    def clock(self, origin: int) -> dict[int, int]:
        """What the origin's last delta had seen of the other origins; a copy."""
        return dict(self._clocks.get(origin, ()))

    def saw(self, origin: int, entries: Iterable[Dot], dot: Dot) -> bool:
        """Whether the origin's next batch, which carries these changed entries, has seen `dot`."""
        return dot.origin == origin or self.seen(origin, entries, dot.origin) >= dot.counter

    def seen(self, origin: int, entries: Iterable[Dot], other: int) -> int:
        """Up to which counter of `other` that batch has seen; 0 where it has seen nothing of it."""
        clock = self._clocks.get(origin)
        counter = 0 if clock is None else clock.get(other, 0)
        return max((told for name, told in entries if name == other and told > counter), default=counter)

    def appended(self, origin: int, entries: Iterable[Dot]) -> None:
        """Note the changed entries of a batch that has got its place."""
        clock = self._clocks.get(origin)
        for other, counter in entries:
            if other == origin:
                continue
            if clock is None:
                clock = self._clocks[origin] = {}
            before = clock.pop(other, 0)  # put back at the end: a dict keeps the order of change
            clock[other] = max(before, counter)
            self.entries += not before
        if clock is not None:
            self._clocks.move_to_end(origin)
            self._cut(clock)

    def take_back(self, clocks: Mapping[int, dict[int, int]]) -> None:
        """Begin with clocks as `clock` gave them, each in its order of change."""
        for origin, clock in clocks.items():
            self.forget(origin)
            self._clocks[origin] = clock
            self.entries += len(clock)
            self._cut(clock)

    def forget(self, origin: int) -> None:
        """Drop an origin's clock."""
        self.entries -= len(self._clocks.pop(origin, ()))

    def snapshot(self) -> dict[int, tuple[Dot, ...]]:
        """All clocks in canonical form; `restore` takes them back."""
        return {origin: canonical(clock) for origin, clock in sorted(self._clocks.items())}

    def restore(self, snapshot: Mapping[int, Iterable[Dot]]) -> None:
        """Begin with the clocks of a snapshot."""
        self._clocks.clear()
        self.entries = 0
        for origin, entries in snapshot.items():
            self.appended(origin, entries)

    def _cut(self, clock: dict[int, int]) -> None:
        while len(clock) > self._entries_per_origin_max:
            del clock[next(iter(clock))]
            self.entries -= 1
            self.forgotten += 1
        while self.entries > self._entries_max:
            _, oldest = self._clocks.popitem(last=False)
            self.entries -= len(oldest)
            self.forgotten += len(oldest)


def _entries(clock: Mapping[int, int] | Iterable[Dot]) -> Iterable[tuple[int, int]]:
    return clock.items() if isinstance(clock, Mapping) else clock
