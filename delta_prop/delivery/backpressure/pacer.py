"""The gate before the pipeline: limits the source to the pace of the slowest pacing sink, within its credit.

Pure: `now` is an argument, in seconds of a monotonic clock. The gate has no queue: a caller that is not
admitted keeps its batch, and asks again after `wait_s`, or when a sink has made progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from delta_prop.delivery.backpressure.controller import INTERVAL_S, Law, Measure
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import PressureLevel


class Credits:
    """A window of deltas and bytes. It is never exceeded, except by one larger batch alone."""

    __slots__ = ("bytes_max", "bytes_outstanding", "deltas_max", "deltas_outstanding")

    def __init__(self, deltas_max: int, bytes_max: int) -> None:
        if deltas_max < 1 or bytes_max < 1:
            raise UsageError(f"credits for {deltas_max} deltas, {bytes_max} bytes: give at least 1 of each")
        self.deltas_max = deltas_max
        self.bytes_max = bytes_max
        self.deltas_outstanding = 0
        self.bytes_outstanding = 0

    @property
    def available(self) -> tuple[int, int]:
        """Deltas and bytes that may still be admitted; never below 0."""
        deltas, size = self.deltas_max - self.deltas_outstanding, self.bytes_max - self.bytes_outstanding
        return max(deltas, 0), max(size, 0)

    @property
    def used_share(self) -> float:
        """Used share of the window, of deltas or bytes, whichever is larger; above 1 after a larger batch."""
        return max(self.deltas_outstanding / self.deltas_max, self.bytes_outstanding / self.bytes_max)

    def can_take(self, count: int, size: int) -> bool:
        """Return True if a batch may be admitted: it fits, or nothing is outstanding."""
        return (
            self.deltas_outstanding + count <= self.deltas_max
            and self.bytes_outstanding + size <= self.bytes_max
        ) or self.deltas_outstanding == self.bytes_outstanding == 0

    def take(self, count: int, size: int) -> None:
        """Spend the credit of an admitted batch. Raises UsageError if it does not fit."""
        if count < 0 or size < 0 or not self.can_take(count, size):
            deltas, size_left = self.available
            raise UsageError(
                f"{count} deltas of {size} bytes: only {deltas} deltas, {size_left} bytes are left: "
                "call can_take first"
            )
        self.deltas_outstanding += count
        self.bytes_outstanding += size

    def release(self, count: int, size: int) -> None:
        """Return the credit of applied or skipped deltas. Raises UsageError if more than is outstanding."""
        if not (0 <= count <= self.deltas_outstanding and 0 <= size <= self.bytes_outstanding):
            raise UsageError(
                f"{count} deltas of {size} bytes: only {self.deltas_outstanding} and "
                f"{self.bytes_outstanding} are outstanding: release what was taken"
            )
        self.deltas_outstanding -= count
        self.bytes_outstanding -= size

    def set_outstanding(self, deltas: int, size: int) -> None:
        """Set the outstanding amount, e.g. at a start or after a stop. It may exceed the window."""
        if deltas < 0 or size < 0:
            raise UsageError(f"{deltas} deltas of {size} bytes: give at least 0")
        self.deltas_outstanding = deltas
        self.bytes_outstanding = size


WARN_SHARE = 0.8
"""Used share of the queue, or of a sink's bound, from which the pressure level is WARN."""
CATCH_UP_SHARE = 0.7
"""Share of its drain rate to which a sink that catches up limits the source."""
RETRY_AFTER_MS_MIN = 1
RETRY_AFTER_MS_MAX = 10_000
RETRY_AFTER_MS_UNMEASURED = 100
"""Time to retry while no sink limits the rate."""
ROUNDING = 1e-6  # in deltas, so that rounding does not hold back a batch whose wait is over


class Mode(Enum):
    """The effect of a sink on the source.

    While it catches up, its law follows a share of its drain rate, without credit, so that it gains on the
    source. While it has stopped, or fails, it is suspended: it sets no limit.
    """

    PACING = "pacing"
    CATCHING_UP = "catching up"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pressure on the source, and its reason. `depth` and `capacity` are those of the queue.

    `rate_limit`: deltas per second; None: no limit. `paced_by`: the sink with the smallest rate.
    """

    level: PressureLevel
    rate_limit: float | None
    depth: int
    capacity: int
    retry_after_ms: int | None
    paced_by: str | None
    reason: str


class _PacedSink:
    __slots__ = ("credits", "law", "measure", "mode", "name", "stepped_at")

    def __init__(self, name: str, law: Law, credits_: Credits | None, now: float) -> None:
        self.name = name
        self.law = law
        self.credits = credits_
        self.mode = Mode.PACING
        self.stepped_at = now
        self.measure = Measure(0, 0, 0)

    @property
    def used_share(self) -> float:
        depth_share = self.measure.depth / self.measure.depth_max if self.measure.depth_max > 0 else 0.0
        return max(depth_share, 0.0 if self.credits is None else self.credits.used_share)

    @property
    def is_stalled(self) -> bool:
        """True if it has no credit left, and no delta has left it for a whole window."""
        return self.credits is not None and not min(self.credits.available) and not self.law.drain_rate


class Pacer:
    """The pacing sinks by name, and a token bucket with the smallest of their rates, for the source.

    The bucket holds the tokens of one interval. A batch larger than that is admitted when the bucket is full,
    and later batches wait longer. So within any time t, up to rate * t deltas are admitted, plus one interval
    or one batch, whichever is larger. When the rate falls, the tokens by which the bucket shrinks may be
    admitted in addition to such a batch.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        """Deltas per second that the source may send; None: no limit."""
        self.paced_by: str | None = None
        """The sink with the smallest rate; None: no limit."""
        self._sinks: dict[str, _PacedSink] = {}
        self._credited: tuple[_PacedSink, ...] = ()  # sinks whose credit limits the source
        self._tokens = 0.0
        self._tokens_at = 0.0  # time of the last refill
        # Sinks that held the source back: in this interval, in the last interval, and at the last `admits`.
        self._holders: set[str] = set()
        self._last_holders: frozenset[str] = frozenset()
        self._current_holder: str | None = None

    # --- pacing sinks

    def pace(self, name: str, law: Law, credits_: Credits | None, now: float) -> None:
        """Let this sink pace the source from now on; it replaces a sink of the same name.

        `credits_`: None if only the rate limits the source, since the sink bounds its own backlog. Before
        this, set what the sink already holds, by `set_outstanding` of its credit.
        """
        self._sinks[name] = _PacedSink(name, law, credits_, now)
        self._update_rate(now)

    def release(self, name: str, now: float) -> None:
        """Stop pacing by this sink. An unknown name is ignored."""
        if self._sinks.pop(name, None) is not None:
            self._update_rate(now)

    def set_mode(self, name: str, mode: Mode, now: float) -> None:
        """Change the effect of a sink on the source. Raises UsageError for an unknown sink.

        Before `PACING` resumes, set what the sink holds, by `set_outstanding` of its credit. A suspended
        sink's law keeps its state.
        """
        paced = self._sinks.get(name)
        if paced is None:
            known = ", ".join(map(repr, self._sinks)) or "none"
            raise UsageError(f"sink {name!r}: not a pacing sink: name one of these: {known}")
        if paced.mode is not mode:
            paced.mode, paced.stepped_at = mode, now
            self._update_rate(now)

    def mode(self, name: str) -> Mode | None:
        """Return the effect of this sink on the source; None if the sink is unknown."""
        paced = self._sinks.get(name)
        return None if paced is None else paced.mode

    def admits(self, count: int, size: int, now: float) -> bool:
        """Return True if a batch of `count` deltas and `size` bytes may enter the pipeline now."""
        if self.rate is None:
            return True
        holder = self._find_holder(count, size, now)
        self._current_holder = holder
        if holder is None:
            return True
        self._holders.add(holder)
        return False

    def note(self, count: int, size: int, now: float) -> None:
        """Note a batch that `admits` admitted at this moment. Raises UsageError without credit."""
        if self.rate is None:
            return
        for paced in self._credited:
            assert paced.credits is not None
            paced.credits.take(count, size)
        self._refill(now)
        self._tokens -= count

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """Return the seconds after which this batch may be admitted; None if a sink must progress first."""
        if self.rate is None:
            return 0.0
        if self._find_sink_without_credit(count, size) is not None:
            return None
        self._refill(now)
        missing = min(count, self._burst) - self._tokens
        return missing / self.rate if missing > ROUNDING else 0.0

    def step(self, now: float, measures: Mapping[str, Measure], *, waiting: bool = True) -> float | None:
        """Step the laws every `INTERVAL_S`; return the source's rate. `waiting`: True if a batch may wait."""
        if not waiting:
            self._current_holder = None
        for name, measure in measures.items():
            paced = self._sinks.get(name)
            if paced is None or paced.mode is Mode.SUSPENDED:
                continue
            elapsed_s, paced.stepped_at, paced.measure = now - paced.stepped_at, now, measure
            if paced.mode is Mode.CATCHING_UP:
                paced.law.follow(drained=measure.drained, share=CATCH_UP_SHARE, elapsed_s=elapsed_s)
                continue
            paced.law.update(
                drained=measure.drained,
                depth=measure.depth,
                depth_max=measure.depth_max,
                elapsed_s=elapsed_s,
                demand_limited=name not in self._holders,
                in_call=measure.in_call,
            )
        self._last_holders = frozenset(self._holders)
        self._holders = set() if self._current_holder is None else {self._current_holder}
        self._update_rate(now)
        return self.rate

    def pressure(self, queue_depth: int, queue_capacity: int) -> Pressure:
        """Return the pressure: WARN from 80 % full, THROTTLE while the gate holds back, STOP when full."""
        level, reason = self._level(queue_depth, queue_capacity)
        retry_after_ms: int | None = None
        if level >= PressureLevel.THROTTLE:
            retry_after_ms = RETRY_AFTER_MS_UNMEASURED
            if self.rate is not None:
                wait_ms = 1000 * (queue_depth + 1) / self.rate
                retry_after_ms = int(min(max(wait_ms, RETRY_AFTER_MS_MIN), RETRY_AFTER_MS_MAX))
        return Pressure(level, self.rate, queue_depth, queue_capacity, retry_after_ms, self.paced_by, reason)

    @property
    def _burst(self) -> float:
        assert self.rate is not None
        return self.rate * INTERVAL_S

    def _update_rate(self, now: float) -> None:
        """Set the rate to the smallest of all sinks. Tokens up to now are added at the old rate."""
        old_rate = self.rate
        if old_rate is not None:
            self._refill(now)
        rate, self.paced_by = inf, None
        for paced in self._sinks.values():
            if paced.mode is not Mode.SUSPENDED and paced.law.rate < rate:
                rate, self.paced_by = paced.law.rate, paced.name
        self._credited = tuple(
            paced for paced in self._sinks.values() if paced.mode is Mode.PACING and paced.credits is not None
        )
        if self.paced_by is None:
            self.rate, self._current_holder = None, None
            self._holders.clear()
            return
        self.rate = rate
        if old_rate is None:
            self._tokens, self._tokens_at = self._burst, now
        else:
            self._tokens = min(self._tokens, self._burst)

    def _refill(self, now: float) -> None:
        assert self.rate is not None
        added = self.rate * max(now - self._tokens_at, 0.0)
        self._tokens = min(self._tokens + added, self._burst)
        self._tokens_at = max(now, self._tokens_at)

    def _find_sink_without_credit(self, count: int, size: int) -> str | None:
        for paced in self._credited:
            assert paced.credits is not None
            if not paced.credits.can_take(count, size):
                return paced.name
        return None

    def _find_holder(self, count: int, size: int, now: float) -> str | None:
        """Return the sink that holds this batch back: a sink without credit, else `paced_by`."""
        holder = self._find_sink_without_credit(count, size)
        if holder is not None:
            return holder
        self._refill(now)
        return None if self._tokens + ROUNDING >= min(count, self._burst) else self.paced_by

    def _level(self, queue_depth: int, queue_capacity: int) -> tuple[PressureLevel, str]:
        stalled = next((paced for paced in self._credited if paced.is_stalled), None)
        if stalled is not None:
            return PressureLevel.STOP, f"{self._format_sink(stalled)}, but nothing leaves it"
        if queue_depth >= queue_capacity:
            return PressureLevel.STOP, f"the queue holds {queue_depth} of {queue_capacity} deltas"
        holders = self._holders | self._last_holders
        holder = next((paced for name, paced in self._sinks.items() if name in holders), None)
        if self.rate is not None and holder is not None and holder.mode is not Mode.SUSPENDED:
            return (
                PressureLevel.THROTTLE,
                f"{self._format_sink(holder)}; the source may send {self.rate:.0f} deltas/s",
            )
        if queue_depth >= WARN_SHARE * queue_capacity:
            return PressureLevel.WARN, f"the queue holds {queue_depth} of {queue_capacity} deltas"
        gating = [paced for paced in self._sinks.values() if paced.mode is Mode.PACING]
        fullest = max(gating, key=lambda paced: paced.used_share, default=None)
        if fullest is not None and fullest.used_share >= WARN_SHARE:
            return PressureLevel.WARN, self._format_sink(fullest)
        return PressureLevel.OK, "there is capacity"

    @staticmethod
    def _format_sink(paced: _PacedSink) -> str:
        depth, depth_max = paced.measure.depth, paced.measure.depth_max
        return (
            f"sink {paced.name!r} is {paced.mode.value}: {depth} of {depth_max} deltas wait for it; "
            f"it drains {paced.law.drain_rate:.0f} deltas/s"
        )
