"""Which sinks slow the source down, and for what: measures them ten times a second, steps the pacer.

A sink paces for one of three things that fill up: its mailbox (where that was asked for), a backlog of
its own (rows that an index has still to link), or its share of the log (where the log waits for it).
Each has a rate of its own; the source goes at the smallest.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from delta_prop.backpressure.controller import DrainLaw, SpecificationLaw
from delta_prop.backpressure.credit import Credits
from delta_prop.backpressure.pacer import Measure, Mode, Pacer
from delta_prop.route.status import FeedState
from delta_prop_sinks.sink import HasBacklog

if TYPE_CHECKING:
    from delta_prop.backpressure.controller import Law
    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.config import Settings
    from delta_prop.route.feed import Feed
    from delta_prop_broker.log.contract import Log

LOOKS = 11
"""Ten intervals: one second."""

logger = logging.getLogger("delta_prop")


class Pacing:
    """The gate before the chain, with eyes: it looks at the feeds and at the log."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.pacer = Pacer()
        self._settings = settings
        self._log = log
        self._gauges: dict[str, Gauge] = {}
        self._mailboxes: tuple[MailboxGauge, ...] = ()

    def add(self, feed: Feed, *, pacing: bool, required: bool, gives_way: bool, now: float) -> None:
        """Look at a sink from now on; with `pacing` it paces at once, else when something fills up."""
        gauges: list[Gauge] = []
        if pacing:
            gauge = MailboxGauge(feed, self._log)
            gauges.append(gauge)
            self.pacer.pace(gauge.name, self._law(gauge), gauge.credits, now)
            gauge.note_pacing(True, 0.0)
            self._set_mode(gauge, now)
        if isinstance(feed.sink, HasBacklog):
            gauges.append(BacklogGauge(feed, feed.sink, self._log))
        if required:
            gauges.append(LogGauge(feed, self._log, gives_way=gives_way))
        self._gauges.update((gauge.name, gauge) for gauge in gauges)
        self._sort()

    def remove(self, feed: Feed, now: float) -> None:
        """Look at it no more."""
        for gauge in [one for one in self._gauges.values() if one.feed is feed]:
            del self._gauges[gauge.name]
            self.pacer.release(gauge.name, now)
        self._sort()

    # --- the gate

    def admits(self, count: int, size: int, now: float) -> bool:
        """Whether so many deltas and bytes may go down the chain now."""
        if self.pacer.rate is None:
            return True
        for gauge in self._mailboxes:
            gauge.count()
        return self.pacer.admits(count, size, now)

    def note(self, count: int, size: int, now: float) -> None:
        """They go."""
        self.pacer.note(count, size, now)

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """When to ask again, in seconds; None when a sink has made progress."""
        for gauge in self._mailboxes:
            gauge.count()
        return self.pacer.wait_s(count, size, now)

    # --- ten times a second

    def step(self, now: float) -> None:
        """Measure every sink; see who paces, who no longer does; set the rate."""
        measures: dict[str, Measure] = {}
        for gauge in self._gauges.values():
            gauge.feed.watch(now)
            full, measure = gauge.measure(now, self._settings.pacing_from)
            mode = self.pacer.mode(gauge.name)
            if mode is None and full >= gauge.starts_at(self._settings):
                self.pacer.pace(gauge.name, self._law(gauge), gauge.credits, now)
                gauge.note_pacing(True, full)
            elif mode is not None and full < gauge.ends_at(self._settings):
                self.pacer.release(gauge.name, now)
                gauge.note_pacing(False, full)
            if self.pacer.mode(gauge.name) is not None:
                self._set_mode(gauge, now)
                measures[gauge.name] = measure
        self.pacer.step(now, measures)

    def _set_mode(self, gauge: Gauge, now: float) -> None:
        mode = gauge.mode()
        if mode is Mode.SUSPENDED:
            self.pacer.suspend(gauge.name, now)
        elif mode is Mode.CATCHING_UP:
            self.pacer.catching_up(gauge.name, now)
        else:
            self.pacer.resume(gauge.name, now)

    def _law(self, gauge: Gauge) -> Law:
        limits = self._settings.rate_limits(gauge.drained_a_second())
        return DrainLaw(limits) if self._settings.rate_law == "drain" else SpecificationLaw(limits)

    def _sort(self) -> None:
        self._mailboxes = tuple(one for one in self._gauges.values() if isinstance(one, MailboxGauge))


class Gauge:
    """One thing of one sink that may fill up."""

    what = ""

    def __init__(self, feed: Feed, log: Log) -> None:
        self.feed = feed
        self.name = feed.name if not self.what else f"{feed.name} ({self.what})"
        self.credits: Credits | None = None
        self._log = log
        self._visible = log.visible
        self._depth = 0
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    def starts_at(self, settings: Settings) -> float:
        """How full it must be to pace."""
        return settings.pacing_from

    def ends_at(self, settings: Settings) -> float:
        """How empty it must be to pace no more."""
        return settings.pacing_until

    def mode(self) -> Mode:
        """A sink that stands still must not hold the source for ever."""
        still = self.feed.ended or self.feed.state is FeedState.BREAKER_OPEN
        return Mode.SUSPENDED if still else Mode.PACING

    def measure(self, now: float, mark: float) -> tuple[float, Measure]:
        """How full it is, and what was drained since the last look.

        What lies below `mark`, where pacing starts, is let stand: the law steers what is above it.
        """
        depth, depth_max = self._look()
        visible = self._log.visible
        drained = max(visible - self._visible - (depth - self._depth), 0)
        self._visible, self._depth = visible, depth
        self._looks.append((now, drained))
        below = 0 if self.credits is not None else int(mark * depth_max)
        return (depth / depth_max if depth_max else 1.0), Measure(
            drained, max(depth - below, 0), max(depth_max - below, 1)
        )

    def drained_a_second(self) -> float | None:
        """Lately; None where that is not known."""
        if self.credits is not None or len(self._looks) < LOOKS:
            return None
        seconds = self._looks[-1][0] - self._looks[0][0]
        return sum(count for _, count in list(self._looks)[1:]) / seconds if seconds > 0 else None

    def note_pacing(self, paces: bool, full: float) -> None:
        """Tell who reads the program's log."""
        self.feed.pacing = paces
        told = "paces" if paces else "no longer paces"
        logger.warning(
            "sink %r %s the source: %s is %.0f %% full", self.feed.name, told, self.what, full * 100
        )

    def _look(self) -> tuple[int, int]:
        raise NotImplementedError


class MailboxGauge(Gauge):
    """A sink that was attached to pace: what is admitted and not yet applied, within its credits."""

    def __init__(self, feed: Feed, log: Log) -> None:
        super().__init__(feed, log)
        self.credits = Credits(feed.limits.mailbox_deltas_max, feed.limits.mailbox_bytes_max)

    def starts_at(self, settings: Settings) -> float:
        """Always."""
        return 0.0

    def ends_at(self, settings: Settings) -> float:
        """Never."""
        return 0.0

    def count(self) -> None:
        """Bring the credits up to what really is out."""
        assert self.credits is not None
        self.credits.set_out(*self.feed.in_flight)

    def mode(self) -> Mode:
        """A sink that reads the log is not held to credits; it is let catch up."""
        mode = super().mode()
        return Mode.CATCHING_UP if mode is Mode.PACING and self.feed.behind else mode

    def note_pacing(self, paces: bool, full: float) -> None:
        """Nothing new: it was asked for."""
        self.feed.pacing = paces

    def _look(self) -> tuple[int, int]:
        rows, _ = self.feed.in_flight
        if not rows:
            return 0, self.feed.limits.mailbox_deltas_max
        lag = self._log.visible - self.feed.applied
        return lag, max(self.feed.limits.mailbox_deltas_max * lag // rows, 1)


class BacklogGauge(Gauge):
    """A sink with work of its own behind what it applied."""

    what = "its backlog"

    def __init__(self, feed: Feed, sink: HasBacklog, log: Log) -> None:
        super().__init__(feed, log)
        self._sink = sink

    def _look(self) -> tuple[int, int]:
        backlog = self._sink.backlog()
        return backlog.rows, backlog.rows_max


class LogGauge(Gauge):
    """A sink that the log waits for: how much of the log's bounds it keeps from being free."""

    what = "its share of the log"

    def __init__(self, feed: Feed, log: Log, *, gives_way: bool) -> None:
        super().__init__(feed, log)
        self._gives_way = gives_way

    def mode(self) -> Mode:
        """A sink that stands still, and for which the log will refuse producers, slows them down first."""
        return super().mode() if self._gives_way else Mode.PACING

    def _look(self) -> tuple[int, int]:
        needed = self.feed.committed
        lag, full = self._log.visible - needed, self._log.fill(needed)
        return lag, max(round(lag / full), 1) if full else 1


def differs(told: Pressure, now: Pressure) -> bool:
    """Whether producers should hear of it: another level or cause, or a rate that is off by a tenth."""
    if (told.level, told.paced_by, told.rate_limit is None) != (
        now.level,
        now.paced_by,
        now.rate_limit is None,
    ):
        return True
    was = told.rate_limit or 0.0
    return abs((now.rate_limit or 0.0) - was) > was / 10
