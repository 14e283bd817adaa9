"""The gate before the chain: lets the source go at the pace of the slowest pacing sink, within its credits.

Pure: `now` is an argument, in seconds of a monotonic clock. It holds no queue: who is not admitted
stays where it waits, and asks again after `wait_s`, or when a sink has made progress.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.backpressure.controller import INTERVAL_S
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import Level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delta_prop.backpressure.controller import Law
    from delta_prop.backpressure.credit import Credits

WARN_FULL = 0.8
CATCH_UP_SHARE = 0.7
RETRY_AFTER_MS_MIN = 1
RETRY_AFTER_MS_MAX = 10_000
RETRY_AFTER_MS_UNMEASURED = 100
ROUNDING = 1e-6  # deltas: a wait that has just passed must not be refused for its rounding


class Measure(NamedTuple):
    """What one pacing sink did since the last step, in deltas. `drained` = admitted - growth of `depth`.

    With a mailbox, depth is what is admitted and not applied; with a backlog of the sink's own, its
    rows; beside a log that runs full, the part between its marks that the sink still needs. `in_call`: of
    the depth, what the call in hand should have done by now, where that is known.
    """

    drained: int
    depth: int
    depth_max: int
    in_call: int | None = None


class Mode(Enum):
    """What a sink that is known to the pacer does to the source."""

    PACING = "pacing"
    CATCHING_UP = "catching up"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Pressure:
    """How pressed the source is, why, and what would suit. `depth` and `capacity` are the queue's.

    `rate_limit`: deltas a second, None for any. `paced_by`: the sink with the smallest rate.
    """

    level: Level
    rate_limit: float | None
    depth: int
    capacity: int
    retry_after_ms: int | None
    paced_by: str | None
    reason: str


class _Paced:
    __slots__ = ("credits", "law", "measure", "mode", "name", "share", "stepped_at")

    def __init__(self, name: str, law: Law, credits_: Credits | None, now: float) -> None:
        self.name = name
        self.law = law
        self.credits = credits_
        self.mode = Mode.PACING
        self.share = CATCH_UP_SHARE
        self.stepped_at = now
        self.measure = Measure(0, 0, 0)

    @property
    def full(self) -> float:
        of_depth = self.measure.depth / self.measure.depth_max if self.measure.depth_max > 0 else 0.0
        return max(of_depth, 0.0 if self.credits is None else self.credits.full)

    @property
    def stalled(self) -> bool:
        """It has no credit left, and nothing has left it for a whole window."""
        return self.credits is not None and not min(self.credits.available) and not self.law.drain_rate


class Pacer:
    """Knows the pacing sinks by name; the source's rate is the smallest of theirs.

    With no pacing sink, `admits` is one comparison and `note` another. Where a batch is larger than
    the bucket, it goes when the bucket is full, and those behind it wait the longer: over any time t no
    more is admitted than rate * t and one interval's worth, or one batch if that is more. Where the rate
    falls, the part of an interval's worth by which it falls may go besides such a batch.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """Deltas a second the source may go; None for any."""
        self.paced_by: str | None = None
        self._sinks: dict[str, _Paced] = {}
        self._credited: tuple[_Paced, ...] = ()
        self._tokens = 0.0
        self._tokens_at = 0.0
        # Who held the source back: in this interval, in the last one, and as the gate stands now.
        self._held: set[str] = set()
        self._held_before: frozenset[str] = frozenset()
        self._held_now: str | None = None

    # --- who paces

    def pace(self, name: str, law: Law, credits_: Credits | None, now: float) -> None:
        """From now on this sink paces the source; a sink of that name is replaced.

        Without credits only the rate holds: a backlog of the sink's own is bounded by the sink. What
        the sink already holds is told to its credits by `set_out` before.
        """
        self._sinks[name] = _Paced(name, law, credits_, now)
        self._choose(now)

    def release(self, name: str, now: float) -> None:
        """This sink paces no more. A name that is not known is no mistake."""
        if self._sinks.pop(name, None) is not None:
            self._choose(now)

    def suspend(self, name: str, now: float) -> None:
        """No limit from this sink for now: it has stopped, or fails. Its law keeps what it knows."""
        self._set_mode(name, Mode.SUSPENDED, now)

    def catching_up(self, name: str, now: float, *, share: float = CATCH_UP_SHARE) -> None:
        """The sink reads the log far behind: no credits, and the rate is a share of what it drains.

        Below 1 the sink gains on the source, so that it arrives. Raises UsageError elsewhere.
        """
        if not 0 < share < 1:
            raise UsageError(f"share={share} of what a sink drains: give a share between 0 and 1")
        self._sink(name).share = share
        self._set_mode(name, Mode.CATCHING_UP, now)

    def resume(self, name: str, now: float) -> None:
        """The sink paces as usual again. What it holds is told to its credits by `set_out` before."""
        self._set_mode(name, Mode.PACING, now)

    def mode(self, name: str) -> Mode | None:
        """What this sink does to the source; None if it is not known."""
        paced = self._sinks.get(name)
        return None if paced is None else paced.mode

    def rates(self) -> dict[str, tuple[float, float]]:
        """Of each sink that is not suspended: the rate that suits it, and the rate it drains."""
        return {
            paced.name: (paced.law.rate, paced.law.drain_rate)
            for paced in self._sinks.values()
            if paced.mode is not Mode.SUSPENDED
        }

    # --- the gate

    def admits(self, count: int, size: int, now: float) -> bool:
        """Whether a batch of so many deltas and bytes may go down the chain now."""
        if self.rate is None:
            return True
        holder = self._holder(count, size, now)
        self._held_now = holder
        if holder is None:
            return True
        self._held.add(holder)
        return False

    def note(self, count: int, size: int, now: float) -> None:
        """A batch that `admits` let in at this same moment goes. Raises UsageError without credits."""
        if self.rate is None:
            return
        for paced in self._credited:
            assert paced.credits is not None
            paced.credits.take(count, size)
        self._refill(now)
        self._tokens -= count

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """When to ask again for this batch, in seconds: 0 at once, None when a sink has made progress."""
        if self.rate is None:
            return 0.0
        if self._without_credit(count, size) is not None:
            return None
        self._refill(now)
        missing = min(count, self._burst) - self._tokens
        return missing / self.rate if missing > ROUNDING else 0.0

    # --- the rate

    def step(self, now: float, measures: Mapping[str, Measure], *, waiting: bool = True) -> float | None:
        """Step the laws of the sinks measured, once every `INTERVAL_S`, and return the source's rate.

        `waiting`: somebody may be at the gate. Who was held back and has gone since, is held no more.
        """
        if not waiting:
            self._held_now = None
        for name, measure in measures.items():
            paced = self._sinks.get(name)
            if paced is None or paced.mode is Mode.SUSPENDED:
                continue
            elapsed_s, paced.stepped_at, paced.measure = now - paced.stepped_at, now, measure
            if paced.mode is Mode.CATCHING_UP:
                paced.law.follow(drained=measure.drained, share=paced.share, elapsed_s=elapsed_s)
                continue
            paced.law.update(
                drained=measure.drained,
                depth=measure.depth,
                depth_max=measure.depth_max,
                elapsed_s=elapsed_s,
                demand_limited=name not in self._held,
                in_call=measure.in_call,
            )
        self._held_before = frozenset(self._held)
        self._held = set() if self._held_now is None else {self._held_now}
        self._choose(now)
        return self.rate

    def pressure(self, queue_depth: int, queue_capacity: int) -> Pressure:
        """What to tell producers. Warn from 0.8 full, throttle while the gate holds back, stop when full."""
        level, reason = self._level(queue_depth, queue_capacity)
        retry_after_ms: int | None = None
        if level >= Level.THROTTLE:
            retry_after_ms = RETRY_AFTER_MS_UNMEASURED
            if self.rate is not None:
                wait_ms = 1000 * (queue_depth + 1) / self.rate
                retry_after_ms = int(min(max(wait_ms, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX))
        return Pressure(level, self.rate, queue_depth, queue_capacity, retry_after_ms, self.paced_by, reason)

    # --- inside

    @property
    def _burst(self) -> float:
        assert self.rate is not None
        return self.rate * INTERVAL_S

    def _sink(self, name: str) -> _Paced:
        paced = self._sinks.get(name)
        if paced is None:
            known = ", ".join(map(repr, self._sinks)) or "none"
            raise UsageError(f"sink {name!r} does not pace; those that do: {known}")
        return paced

    def _set_mode(self, name: str, mode: Mode, now: float) -> None:
        paced = self._sink(name)
        if paced.mode is mode:
            return
        paced.mode, paced.stepped_at = mode, now
        self._choose(now)

    def _choose(self, now: float) -> None:
        """The smallest rate counts. What the bucket gathered till now was gathered at the old one."""
        was = self.rate
        if was is not None:
            self._refill(now)
        rate, self.paced_by = inf, None
        for paced in self._sinks.values():
            if paced.mode is not Mode.SUSPENDED and paced.law.rate < rate:
                rate, self.paced_by = paced.law.rate, paced.name
        self._credited = tuple(
            paced for paced in self._sinks.values() if paced.mode is Mode.PACING and paced.credits is not None
        )
        if self.paced_by is None:
            self.rate, self._held_now = None, None
            self._held.clear()
            return
        self.rate = rate
        if was is None:
            self._tokens, self._tokens_at = self._burst, now
        else:
            self._tokens = min(self._tokens, self._burst)

    def _refill(self, now: float) -> None:
        assert self.rate is not None
        gathered = self.rate * max(now - self._tokens_at, 0.0)
        self._tokens = min(self._tokens + gathered, self._burst)
        self._tokens_at = max(now, self._tokens_at)

    def _without_credit(self, count: int, size: int) -> str | None:
        for paced in self._credited:
            assert paced.credits is not None
            if not paced.credits.fits(count, size):
                return paced.name
        return None

    def _holder(self, count: int, size: int, now: float) -> str | None:
        """Who holds this batch back: a sink without credits, or else the one with the smallest rate."""
        holder = self._without_credit(count, size)
        if holder is not None:
            return holder
        self._refill(now)
        return None if self._tokens + ROUNDING >= min(count, self._burst) else self.paced_by

    def _level(self, queue_depth: int, queue_capacity: int) -> tuple[Level, str]:
        stalled = next((paced for paced in self._credited if paced.stalled), None)
        if stalled is not None:
            return Level.STOP, f"{self._told(stalled)}, and nothing leaves it"
        if queue_depth >= queue_capacity:
            return Level.STOP, f"the queue holds {queue_depth} of {queue_capacity} deltas"
        holders = self._held | self._held_before
        held = next((paced for name, paced in self._sinks.items() if name in holders), None)
        if self.rate is not None and held is not None and held.mode is not Mode.SUSPENDED:
            return Level.THROTTLE, f"{self._told(held)}; the source may go {self.rate:.0f} deltas/s"
        if queue_depth >= WARN_FULL * queue_capacity:
            return Level.WARN, f"the queue holds {queue_depth} of {queue_capacity} deltas"
        gating = [paced for paced in self._sinks.values() if paced.mode is Mode.PACING]
        fullest = max(gating, key=lambda paced: paced.full, default=None)
        if fullest is not None and fullest.full >= WARN_FULL:
            return Level.WARN, self._told(fullest)
        return Level.OK, "there is room"

    @staticmethod
    def _told(paced: _Paced) -> str:
        depth, depth_max = paced.measure.depth, paced.measure.depth_max
        return (
            f"sink {paced.name!r} is {paced.mode.value}: {depth} of {depth_max} deltas stand before it, "
            f"it drains {paced.law.drain_rate:.0f} deltas/s"
        )
