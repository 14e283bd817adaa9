"""The bounded queue before the pipeline: four lanes weighted 8:4:2:1, in order of dependencies.

Pure. It never waits, keeps the order within a lane, and serves no item before its dependencies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import exp2, inf

from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

AGEING_DOUBLINGS_MAX = 6
"""A lane's weight grows up to 64-fold with the age of its head: after a long standstill, old background work
gets up to eight times the share of new critical work, but not all of it."""

KEY_FIFO_MIN = 64
"""From this number of items on, those of one vector are in a `_Fifo`. Below it, a dict takes less memory,
although it must skip all removed entries to find its first one."""

METER_WINDOW_S = 0.1
RETRY_AFTER_MS_MIN = 1
RETRY_AFTER_MS_MAX = 10_000
RETRY_AFTER_MS_UNMEASURED = 100
"""The time to retry that a refusal names before the drain rate is measured."""


@dataclass(slots=True, eq=False)
class Item:
    """An item of the queue.

    `lane`: the index of its lane, 0 is the most urgent. `count`, `size`: its number of deltas, and of bytes.
    `keys`: the vectors that it changes, as (namespace, vector id) or any hashable that is equal for the same
    vector. `after`: the items that it depends on; emptied when the item leaves the queue.
    """

    lane: int
    count: int
    size: int
    keys: Sequence[Hashable] = ()
    after: Sequence[Item] = ()
    payload: object = None
    enqueued_at: float = field(default=0.0, init=False)
    is_queued: bool = field(default=False, init=False)
    _unblocked: int = field(default=0, init=False)  # for keys[:_unblocked], no earlier item is queued
    _arrival: int = field(default=0, init=False)


_Fifo = OrderedDict[Item, None]
"""A queue from the middle of which an item is removed in constant time."""


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Statistics of one lane: `depth` and `taken` count deltas. `wait_s_…`: the seconds that items waited
    until they were taken.
    """

    depth: int
    taken: int
    items_taken: int
    wait_s_total: float
    wait_s_max: float


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Statistics of the queue, now and since its start, in deltas.

    `level`: 1 from the high mark until the depth is below the low mark, else 0. `items_donated`: the number
    of items that were served in the turn of another lane. `lanes`: in order of priority.
    """

    depth: int
    depth_bytes: int
    depth_max: int
    capacity: int
    capacity_bytes: int
    level: int
    offered: int
    taken: int
    withdrawn: int
    refused_full: int
    refused_too_large: int
    times_above_high: int
    items_donated: int
    lanes: tuple[LaneStatistics, ...]


class FairQueue:
    """Four lanes before one pipeline, bounded together in deltas and in bytes.

    Within a lane, items leave in order of arrival. Between lanes, stride scheduling: to serve `count` deltas
    advances a lane's tag by `count / weight`, and the lane with the smallest tag is next. While its head
    waits, a lane's weight doubles each `ageing_s`, so its remaining debt shrinks. A lane that was idle starts
    at the present virtual time, without credit.

    Priority donation: if a lane's head depends on an item in another lane, the head of that lane is served
    instead; if this one depends on an item too, the same applies again. Each step leads to an item that
    arrived earlier and heads its lane. So there are up to three steps, and some head can always be served.

    Dependencies by vector are indexed only from the moment when a second lane is in use until the queue is
    empty, since a single lane is in order anyway.
    """

    def __init__(
        self,
        *,
        capacity_deltas: int = 100_000,
        capacity_bytes: int = 256 * 1024 * 1024,
        high: float = 0.8,
        low: float = 0.5,
        weights: Sequence[int] = (8, 4, 2, 1),
        ageing_s: float = 1.0,
    ) -> None:
        if not (capacity_deltas >= 1 and capacity_bytes >= 1):
            raise UsageError(f"a queue for {capacity_deltas} deltas, {capacity_bytes} bytes: give at least 1")
        if not 0 < low <= high <= 1:
            raise UsageError(f"marks low={low}, high={high}: give 0 < low <= high <= 1")
        if len(weights) != len(Priority) or min(weights) < 1 or not ageing_s > 0:
            raise UsageError(
                f"weights {weights}, ageing_s={ageing_s}: give four weights of at least 1 and a time"
            )
        self.capacity_deltas = capacity_deltas
        self.capacity_bytes = capacity_bytes
        self.depth = 0
        self.depth_bytes = 0
        self.level = 0
        self._high = (high * capacity_deltas, high * capacity_bytes)
        self._low = (low * capacity_deltas, low * capacity_bytes)
        self._ageing_s = ageing_s
        self._lanes = tuple(_Lane(weight) for weight in weights)
        self._virtual_time = 0.0
        self._arrivals = 0
        self._lanes_in_use = 0
        self._is_indexed = False
        # For each vector its queued items, in order of arrival.
        self._index: dict[Hashable, Item | dict[Item, None]] = {}
        # The choice of `peek`: the item, the lane whose turn it is, its tag, and the time of the choice.
        self._pick: tuple[Item, _Lane, float, float] | None = None
        self._meter = _Meter()
        self._depth_max = 0
        self._offered = 0
        self._taken = 0
        self._withdrawn = 0
        self._refused_full = 0
        self._refused_too_large = 0
        self._times_above_high = 0
        self._items_donated = 0
        self._last_refused: tuple[int, int] | None = None  # deltas and bytes of the last refused item

    def offer(self, item: Item, now: float) -> None:
        """Queue an item, or raise Refused and change nothing. Never waits."""
        assert item.count >= 1
        assert item.size >= 0
        assert not item.is_queued
        depth, depth_bytes = self.depth + item.count, self.depth_bytes + item.size
        if depth > self.capacity_deltas or depth_bytes > self.capacity_bytes:
            raise self._make_refusal(item, now)
        if self.depth == 0:
            self._meter.start(now)
        self.depth, self.depth_bytes = depth, depth_bytes
        self._depth_max = max(self._depth_max, depth)
        self._offered += item.count
        self._push(item, now)
        if self.level == 0 and (depth >= self._high[0] or depth_bytes >= self._high[1]):
            self.level = 1
            self._times_above_high += 1

    def shortage(self, now: float) -> Refused | None:
        """Return the refusal that the last refused item would get now; None if there is capacity."""
        if self._last_refused is None:
            return None
        count, size = self._last_refused
        if self.depth + count > self.capacity_deltas or self.depth_bytes + size > self.capacity_bytes:
            return self._queue_full(count, size, now)
        self._last_refused = None
        return None

    def peek(self, now: float) -> Item | None:
        """Return the next item without removing it; the choice holds until `take`."""
        turn = self._next_lane(now)
        if turn is None:
            return None
        lane, tag = turn
        item = next(iter(lane.fifo))
        while (earlier := self._find_dependency(item)) is not None:
            assert earlier._arrival < item._arrival
            item = next(iter(self._lanes[earlier.lane].fifo))
        self._pick = (item, lane, tag, now)
        return item

    def take(self, item: Item) -> None:
        """Remove the item that `peek` returned last, and charge the lane whose turn it was."""
        assert self._pick is not None
        picked, lane, tag, now = self._pick
        assert picked is item
        self._virtual_time = lane.start = max(self._virtual_time, tag)
        lane.debt = item.count
        own_lane = self._lanes[item.lane]
        own_lane.count_taken(item, now)
        if own_lane is not lane:
            self._items_donated += 1
        self._taken += item.count
        self._meter.note(item, now)
        self._remove(item)

    def next(self, now: float) -> Item | None:
        """Take the next item; return None if the queue is empty."""
        item = self.peek(now)
        if item is not None:
            self.take(item)
        return item

    def withdraw(self, item: Item) -> bool:
        """Remove an item from any position, as if it had never arrived; return False if it is not queued."""
        if not item.is_queued:
            return False
        self._withdrawn += item.count
        self._remove(item)
        return True

    def statistics(self) -> QueueStatistics:
        """Return the queue's state now and since its start."""
        return QueueStatistics(
            depth=self.depth,
            depth_bytes=self.depth_bytes,
            depth_max=self._depth_max,
            capacity=self.capacity_deltas,
            capacity_bytes=self.capacity_bytes,
            level=self.level,
            offered=self._offered,
            taken=self._taken,
            withdrawn=self._withdrawn,
            refused_full=self._refused_full,
            refused_too_large=self._refused_too_large,
            times_above_high=self._times_above_high,
            items_donated=self._items_donated,
            lanes=tuple(lane.statistics() for lane in self._lanes),
        )

    # --- insertion and removal

    def _push(self, item: Item, now: float) -> None:
        self._arrivals += 1
        item._arrival, item._unblocked = self._arrivals, 0
        item.enqueued_at, item.is_queued = now, True
        lane = self._lanes[item.lane]
        if not lane.fifo:
            lane.wake(self._virtual_time)
            self._lanes_in_use += 1
            if self._lanes_in_use == 2 and not self._is_indexed:
                self._build_index()
        lane.fifo[item] = None
        lane.depth += item.count
        if self._is_indexed:
            self._add_to_index(item)

    def _remove(self, item: Item) -> None:
        lane = self._lanes[item.lane]
        del lane.fifo[item]
        lane.depth -= item.count
        item.is_queued, item.after = False, ()
        self.depth -= item.count
        self.depth_bytes -= item.size
        if self.depth < self._low[0] and self.depth_bytes < self._low[1]:
            self.level = 0
        if self._pick is not None and self._pick[0] is item:
            self._pick = None
        if self._is_indexed:
            self._remove_from_index(item)
        if not lane.fifo:
            self._lanes_in_use -= 1
        if self.depth == 0:
            self._reset_accounts()

    def _reset_accounts(self) -> None:
        """Reset the lanes' accounts: no item waits, so no lane owes another."""
        assert not self._index
        self._is_indexed = False
        self._virtual_time = 0.0
        for lane in self._lanes:
            lane.start, lane.debt = 0.0, 0

    def _make_refusal(self, item: Item, now: float) -> Refused:
        if item.count > self.capacity_deltas or item.size > self.capacity_bytes:
            self._refused_too_large += item.count
            return Refused(
                ErrorCode.TOO_LARGE,
                f"{item.count} deltas of {item.size} bytes: more than the queue's capacity of "
                f"{self.capacity_deltas} deltas and {self.capacity_bytes} bytes: make smaller batches",
                details={"capacity": self.capacity_deltas, "capacity_bytes": self.capacity_bytes},
            )
        self._refused_full += item.count
        self._last_refused = item.count, item.size
        return self._queue_full(item.count, item.size, now)

    def _queue_full(self, count: int, size: int, now: float) -> Refused:
        retry_after_ms = self._retry_after_ms(now)
        return Refused(
            ErrorCode.QUEUE_FULL,
            f"queue: {self.depth} of {self.capacity_deltas} deltas and {self.depth_bytes} of "
            f"{self.capacity_bytes} bytes in use, no capacity for {count} more of {size} bytes: retry in "
            f"{retry_after_ms} ms",
            retry_after_ms=retry_after_ms,
            details={
                "depth": self.depth,
                "capacity": self.capacity_deltas,
                "depth_bytes": self.depth_bytes,
                "capacity_bytes": self.capacity_bytes,
                "full": "queue",
            },
        )

    def _retry_after_ms(self, now: float) -> int:
        """Return the time that the queue takes to fall to its low marks at its recent drain rate."""
        rates = self._meter.rates(now)
        if rates is None:
            return RETRY_AFTER_MS_UNMEASURED
        wait_s = max(
            (self.depth - self._low[0]) / max(rates[0], 1.0),
            (self.depth_bytes - self._low[1]) / max(rates[1], 1.0),
        )
        return int(min(max(1000 * wait_s, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX))

    # --- scheduling

    def _next_lane(self, now: float) -> tuple[_Lane, float] | None:
        """Return the lane with the smallest tag (of equals, the most urgent lane), and the tag."""
        best, best_tag = None, inf
        for lane in self._lanes:
            if lane.fifo and (tag := self._tag(lane, now)) < best_tag:
                best, best_tag = lane, tag
        return None if best is None else (best, best_tag)

    def _tag(self, lane: _Lane, now: float) -> float:
        """Return the lane's position in virtual time; its debt is divided by its present weight."""
        if lane.debt == 0:
            return lane.start
        doublings = (now - next(iter(lane.fifo)).enqueued_at) / self._ageing_s
        if doublings > AGEING_DOUBLINGS_MAX:
            return lane.start + lane.debt / lane.weight_max
        return lane.start + lane.debt / (lane.weight * exp2(doublings))

    # --- dependencies

    def _find_dependency(self, item: Item) -> Item | None:
        """Find an item in another lane that must be taken before `item`, which heads its own lane."""
        for other in item.after:
            if other.is_queued:
                return other
        if self._is_indexed:
            keys = item.keys
            while item._unblocked < len(keys):
                entry = self._index[keys[item._unblocked]]
                first = entry if isinstance(entry, Item) else next(iter(entry))
                if first is not item:
                    return first
                item._unblocked += 1  # later items of this vector stay after this one
        return None

    def _build_index(self) -> None:
        self._is_indexed = True
        for lane in self._lanes:
            for item in lane.fifo:
                self._add_to_index(item)

    def _add_to_index(self, item: Item) -> None:
        """Add the item after all items that change the same vectors. Most vectors have only one item."""
        index = self._index
        if len(item.keys) > 1:
            item.keys = tuple(dict.fromkeys(item.keys))
        for key in item.keys:
            entry = index.setdefault(key, item)
            if entry is item:
                continue
            if isinstance(entry, Item):
                index[key] = {entry: None, item: None}
                continue
            entry[item] = None
            if len(entry) == KEY_FIFO_MIN:
                index[key] = _Fifo(entry)

    def _remove_from_index(self, item: Item) -> None:
        index = self._index
        for key in item.keys:
            entry = index[key]
            if entry is item:
                del index[key]
                continue
            assert not isinstance(entry, Item)
            del entry[item]
            if len(entry) == 1:
                index[key] = next(iter(entry))


class _Lane:
    """One lane and its account: its position `start`, and its `debt`, the deltas served since."""

    __slots__ = (
        "debt",
        "depth",
        "fifo",
        "items_taken",
        "start",
        "taken",
        "wait_s_max",
        "wait_s_total",
        "weight",
        "weight_max",
    )

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.weight_max = weight << AGEING_DOUBLINGS_MAX
        self.fifo: _Fifo = OrderedDict()
        self.start = 0.0
        self.debt = 0
        self.depth = 0
        self.taken = 0
        self.items_taken = 0
        self.wait_s_total = 0.0
        self.wait_s_max = 0.0

    def wake(self, virtual_time: float) -> None:
        """Resume after idleness. The debt stays until the other lanes have caught up: otherwise a lane that
        gets one item at a time would always be first.
        """
        if self.start + self.debt / self.weight <= virtual_time:
            self.start, self.debt = virtual_time, 0

    def count_taken(self, item: Item, now: float) -> None:
        waited = now - item.enqueued_at
        self.taken += item.count
        self.items_taken += 1
        self.wait_s_total += waited
        self.wait_s_max = max(self.wait_s_max, waited)

    def statistics(self) -> LaneStatistics:
        return LaneStatistics(self.depth, self.taken, self.items_taken, self.wait_s_total, self.wait_s_max)


class _Meter:
    """The drain rate, in deltas and in bytes per second, measured while the queue is not empty."""

    __slots__ = ("_bytes", "_deltas", "_rates", "_since")

    def __init__(self) -> None:
        self._since = 0.0
        self._deltas = 0
        self._bytes = 0
        self._rates: tuple[float, float] | None = None

    def start(self, now: float) -> None:
        """Start a new measurement, with counts of 0 and from this time on."""
        self._since, self._deltas, self._bytes = now, 0, 0

    def note(self, item: Item, now: float) -> None:
        self._deltas += item.count
        self._bytes += item.size
        if now - self._since >= METER_WINDOW_S:
            self._rates = self.rates(now)
            self.start(now)

    def rates(self, now: float) -> tuple[float, float] | None:
        """Return the rates, which fall while no item is taken; None before the first measurement."""
        elapsed = now - self._since
        if elapsed < METER_WINDOW_S:
            return self._rates
        measured = (self._deltas / elapsed, self._bytes / elapsed)
        if self._rates is None:
            return measured
        return (self._rates[0] + measured[0]) / 2, (self._rates[1] + measured[1]) / 2
