"""Vector clocks: for each origin, the highest counter that a delta has seen.

Pure arithmetic on mappings of origin to counter. A missing entry always counts as zero.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum

from delta_prop_wire.delta import Dot
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX

ENTRIES_MAX = 262_144
"""Maximum number of stored clock entries of all origins together."""


class Order(Enum):
    """Causal relation of two clocks."""

    EQUAL = "equal"
    BEFORE = "before"
    AFTER = "after"
    CONCURRENT = "concurrent"


def covers(clock: Mapping[int, int], other: Mapping[int, int] | Iterable[Dot]) -> bool:
    """Return True if `clock` has seen every delta that `other` has seen."""
    return all(clock.get(origin, 0) >= counter for origin, counter in _entries(other))


def compare(clock: Mapping[int, int], other: Mapping[int, int]) -> Order:
    """Return the causal relation of `clock` to `other`."""
    is_after, is_before = covers(clock, other), covers(other, clock)
    if is_after and is_before:
        return Order.EQUAL
    if is_after:
        return Order.AFTER
    return Order.BEFORE if is_before else Order.CONCURRENT


def merge(*clocks: Mapping[int, int] | Iterable[Dot]) -> dict[int, int]:
    """Return the least clock that covers all these clocks."""
    merged: dict[int, int] = {}
    for clock in clocks:
        for origin, counter in _entries(clock):
            if counter > merged.get(origin, 0):
                merged[origin] = counter
    return merged


def to_canonical(clock: Mapping[int, int] | Iterable[Dot]) -> tuple[Dot, ...]:
    """Return the canonical form of a clock: its entries above zero, by origin."""
    return tuple(Dot(*entry) for entry in sorted(merge(clock).items()))


class OriginClocks:
    """Each origin's whole clock, rebuilt from the changed entries that its batches carry.

    Only appended batches change a clock, so no change must be undone. An origin keeps the
    `entries_per_origin_max` entries that changed last. If all origins together have more than `entries_max`
    entries, the clocks of the origins that wrote least recently are dropped. Without the dropped entries, too
    many deltas count as concurrent, but never too few; the orderer does not read these clocks.
    """

    def __init__(
        self, *, entries_max: int = ENTRIES_MAX, entries_per_origin_max: int = CLOCK_ENTRIES_MAX
    ) -> None:
        assert 0 < entries_per_origin_max <= entries_max
        self._entries_max = entries_max
        self._entries_per_origin_max = entries_per_origin_max
        self._clocks: OrderedDict[int, dict[int, int]] = OrderedDict()  # least recent writer first
        self.entry_count = 0
        self.forgotten_count = 0
        """Number of entries dropped at the two bounds."""

    def __len__(self) -> int:
        return len(self._clocks)

    def clock(self, origin: int) -> dict[int, int]:
        """Return a copy of the clock of the origin's last delta: its seen counters of other origins."""
        return dict(self._clocks.get(origin, ()))

    def has_seen(self, origin: int, entries: Iterable[Dot], dot: Dot) -> bool:
        """Return True if the origin's next batch, which carries these changed entries, has seen `dot`."""
        return dot.origin == origin or self.seen_counter(origin, entries, dot.origin) >= dot.counter

    def seen_counter(self, origin: int, entries: Iterable[Dot], other: int) -> int:
        """Return the highest counter of `other` that the origin's next batch has seen; 0 if none."""
        clock = self._clocks.get(origin)
        counter = 0 if clock is None else clock.get(other, 0)
        later = (seen for dot_origin, seen in entries if dot_origin == other and seen > counter)
        return max(later, default=counter)

    def note_appended(self, origin: int, entries: Iterable[Dot]) -> None:
        """Note the changed entries of a batch that was appended."""
        clock = self._clocks.get(origin)
        for other, counter in entries:
            if other == origin:
                continue
            if clock is None:
                clock = self._clocks[origin] = {}
            before = clock.pop(other, 0)  # inserted at the end: the dict keeps the order of change
            clock[other] = max(before, counter)
            self.entry_count += not before
        if clock is not None:
            self._clocks.move_to_end(origin)
            self._evict(clock)

    def restore_clocks(self, clocks: Mapping[int, dict[int, int]]) -> None:
        """Restore clocks that `clock` returned, with their entries in the order of change."""
        for origin, clock in clocks.items():
            self.forget(origin)
            self._clocks[origin] = clock
            self.entry_count += len(clock)
            self._evict(clock)

    def forget(self, origin: int) -> None:
        """Drop an origin's clock."""
        self.entry_count -= len(self._clocks.pop(origin, ()))

    def snapshot(self) -> dict[int, tuple[Dot, ...]]:
        """Return all clocks in canonical form, for `restore`."""
        return {origin: to_canonical(clock) for origin, clock in sorted(self._clocks.items())}

    def restore(self, snapshot: Mapping[int, Iterable[Dot]]) -> None:
        """Replace all clocks with those of a snapshot."""
        self._clocks.clear()
        self.entry_count = 0
        for origin, entries in snapshot.items():
            self.note_appended(origin, entries)

    def _evict(self, clock: dict[int, int]) -> None:
        while len(clock) > self._entries_per_origin_max:
            del clock[next(iter(clock))]
            self.entry_count -= 1
            self.forgotten_count += 1
        while self.entry_count > self._entries_max:
            _, oldest = self._clocks.popitem(last=False)
            self.entry_count -= len(oldest)
            self.forgotten_count += len(oldest)


def _entries(clock: Mapping[int, int] | Iterable[Dot]) -> Iterable[tuple[int, int]]:
    return clock.items() if isinstance(clock, Mapping) else clock
