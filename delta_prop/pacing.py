"""Which sinks slow the source down, and for what: measures them ten times a second, steps the pacer.

A sink paces for one of three things that fill up: its mailbox (where that was asked for), a backlog of
its own (rows that an index has still to link), or its share of the log (where the log waits for it).
Each has a rate of its own; the source goes at the smallest.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from delta_prop.backpressure.controller import DrainLaw, SpecificationLaw
from delta_prop.backpressure.credit import Credits
from delta_prop.backpressure.pacer import Measure, Mode, Pacer
from delta_prop.route.status import FeedState, text_of
from delta_prop_sinks.sink import HasBacklog
from delta_prop_wire.frames import Level

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop.backpressure.controller import Law
    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.config import Settings
    from delta_prop.route.feed import Feed
    from delta_prop_broker.log.contract import Log

LOOKS = 11
"""Ten intervals: one second."""
LOOK_SHARE = 0.01
"""After so much of the log's bounds has gone down, what it holds is looked at, whatever the time."""
BATCH_BYTES, ROW_BYTES = 4_096, 128
"""What a batch and a row take in a log beside their own bytes, about."""

FULL = 0.99
"""A log is taken for full from here on: what is left may be less than a batch."""
FULL_RETRY_AFTER_MS = 100
TELL_S = 60.0
"""How often, at most, the program's log is told that one sink paces."""

logger = logging.getLogger("delta_prop")


class Pacing:
    """The gate before the chain, with eyes: it looks at the feeds and at the log."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.pacer = Pacer()
        self._settings = settings
        self._log = log
        self._gauges: dict[str, Gauge] = {}
        self._mailboxes: tuple[MailboxGauge, ...] = ()
        self._delta_share = 1 / settings.log_deltas_max + ROW_BYTES / settings.log_bytes_max
        self._byte_share = 1 / settings.log_bytes_max
        self._batch_share = BATCH_BYTES / settings.log_bytes_max
        self._unseen = 0.0  # the share of the log that has gone down since the last look at it

    def add(self, feed: Feed, *, pacing: bool, required: bool, gives_way: bool, now: float) -> None:
        """Look at a sink from now on; with `pacing` it paces at once, else when something fills up."""
        gauges: list[Gauge] = []
        if pacing:
            gauge = MailboxGauge(feed, self._log)
            gauges.append(gauge)
            self._pace(gauge, now)
            feed.pacing = True
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
        self._count(now)
        return self.pacer.admits(count, size, now)

    def note(self, count: int, size: int, now: float) -> None:
        """They go. A source may fill a log faster than ten times a second can see."""
        if self.pacer.rate is not None:
            self.pacer.note(count, size, now)
        self._unseen += count * self._delta_share + size * self._byte_share + self._batch_share
        if self._unseen > LOOK_SHARE:
            self._unseen = 0.0
            self._look_at_log(now)

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """When to ask again, in seconds; None when a sink has made progress."""
        self._count(now)
        return self.pacer.wait_s(count, size, now)

    @property
    def counts(self) -> bool:
        """Whether it matters when a sink gets on: some are held to what they do."""
        return bool(self._mailboxes)

    def note_progress(self, now: float) -> None:
        """A sink got on."""
        for gauge in self._mailboxes:
            gauge.note_progress(now)

    def pressure(self, queue_depth: int, queue_capacity: int) -> Pressure:
        """What to tell producers."""
        return at_full_log(self.pacer.pressure(queue_depth, queue_capacity), self._gauges.values())

    # --- ten times a second

    def step(self, now: float, *, waiting: bool) -> None:
        """Measure every sink; see who paces, who no longer does; set the rate.

        `waiting`: somebody waits at the gate.
        """
        measures: dict[str, Measure] = {}
        paces: dict[Feed, bool] = {}
        for gauge in self._gauges.values():
            full, measure = gauge.measure(now, self._settings.pacing_from)
            if self.pacer.mode(gauge.name) is None:
                if gauge.begins(full, self._settings.pacing_from):
                    self._begin(gauge, full, now)
            elif gauge.ends(full, self._settings.pacing_until):
                self.pacer.release(gauge.name, now)
                gauge.tell(False, full)
            if self.pacer.mode(gauge.name) is not None:
                self._set_mode(gauge, now)
                measures[gauge.name] = measure
            mode = self.pacer.mode(gauge.name)
            paces[gauge.feed] = paces.get(gauge.feed, False) or mode not in (None, Mode.SUSPENDED)
        for feed, pacing in paces.items():
            feed.pacing = pacing
        self._count(now)  # nobody may have asked since; what is told of pressure rests on it too
        self.pacer.step(now, measures, waiting=waiting)

    def _count(self, now: float) -> None:
        for gauge in self._mailboxes:
            gauge.count(now)

    def _look_at_log(self, now: float) -> None:
        """Let who is near the limit of the log pace from here on."""
        for gauge in self._gauges.values():
            if isinstance(gauge, LogGauge) and self.pacer.mode(gauge.name) is None:
                full = gauge.full()
                if gauge.begins(full, self._settings.pacing_from):
                    self._begin(gauge, full, now)

    def _begin(self, gauge: Gauge, full: float, now: float) -> None:
        self._pace(gauge, now)
        gauge.feed.pacing = True
        gauge.tell(True, full)

    def _pace(self, gauge: Gauge, now: float) -> None:
        self.pacer.pace(gauge.name, self._law(gauge), gauge.credits, now)
        self._set_mode(gauge, now)

    def _set_mode(self, gauge: Gauge, now: float) -> None:
        mode = gauge.mode()
        if mode is Mode.SUSPENDED:
            self.pacer.suspend(gauge.name, now)
        elif mode is Mode.CATCHING_UP:
            self.pacer.catching_up(gauge.name, now)
        else:
            self.pacer.resume(gauge.name, now)

    def _law(self, gauge: Gauge) -> Law:
        limits = self._settings.rate_limits(gauge.rate(self._settings))
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
        self._told_at = -inf
        self._left: int | None = None
        self._looks: deque[tuple[float, int]] = deque(maxlen=LOOKS)

    def begins(self, full: float, mark: float) -> bool:
        """Whether it is so full that it paces from now on. A sink that stands still paces nobody."""
        return full >= mark and self.mode() is not Mode.SUSPENDED

    def ends(self, full: float, mark: float) -> bool:
        """Whether it is so empty that it paces no more."""
        return full < mark

    def full(self) -> float:
        """How full it is; 1 is all."""
        depth, depth_max = self._look()
        return depth / depth_max if depth_max else 1.0

    def mode(self) -> Mode:
        """A sink that stands still must not hold the source; one that reads the log is let catch up."""
        if self.stands_still:
            return Mode.SUSPENDED
        return Mode.CATCHING_UP if self.feed.behind else Mode.PACING

    @property
    def stands_still(self) -> bool:
        """Whether nothing is applied for now, however slow the source goes."""
        feed = self.feed
        return feed.ended or feed.rebuilding or feed.state is FeedState.BREAKER_OPEN

    def measure(self, now: float, mark: float) -> tuple[float, Measure]:
        """How full it is, and what was drained since the last look.

        What lies below `mark`, where pacing starts, is let stand: the law steers what is above it.
        """
        depth, depth_max = self._look()
        left = self._reached() - depth
        drained = 0 if self._left is None else max(left - self._left, 0)
        self._left = left
        self._looks.append((now, drained))
        below = 0 if self.credits is not None else int(mark * depth_max)
        return (depth / depth_max if depth_max else 1.0), Measure(
            drained, max(depth - below, 0), max(depth_max - below, 1), self._in_call(now, depth)
        )

    def rate(self, settings: Settings) -> float:
        """What to begin with, deltas a second: what was drained over the last second, where that is known.

        Else as usual, but so that what is left above the mark lasts a second.
        """
        looks = self._looks
        if self.credits is not None:
            return settings.rate_initial
        if len(looks) == LOOKS and (seconds := looks[-1][0] - looks[0][0]) > 0:
            return sum(count for _, count in list(looks)[1:]) / seconds
        return min(settings.rate_initial, (1 - settings.pacing_from) * self._look()[1])

    def tell(self, paces: bool, full: float) -> None:
        """Tell who reads the program's log."""
        told = "paces" if paces else "no longer paces"
        often = paces and self._looks and self._looks[-1][0] - self._told_at < TELL_S
        if paces and not often:
            self._told_at = self._looks[-1][0] if self._looks else 0.0
        level = logging.WARNING if paces and not often else logging.DEBUG
        logger.log(
            level, "sink %r %s the source: %s is %.0f %% full", self.feed.name, told, self.what, full * 100
        )

    def _look(self) -> tuple[int, int]:
        """What stands there, and how much may, in deltas."""
        raise NotImplementedError

    def _reached(self) -> int:
        """The offset behind what came there; without what stands there, what has left."""
        return self._log.visible

    def _in_call(self, now: float, depth: int) -> int | None:
        """What the call in hand should have done by now; None where that is not known."""
        return None


class MailboxGauge(Gauge):
    """A sink that was attached to pace: what is admitted and not yet applied, within its credits."""

    def __init__(self, feed: Feed, log: Log) -> None:
        super().__init__(feed, log)
        self.credits = Credits(feed.limits.mailbox_deltas_max, feed.limits.mailbox_bytes_max)
        self._applied = feed.applied
        self._applied_at: float | None = None  # or when it was last seen with nothing to do
        self._call = (0, 0.0)  # how much the last call did, in which time

    def ends(self, full: float, mark: float) -> bool:
        """Never: it was asked for."""
        return False

    def count(self, now: float) -> None:
        """Bring the credits up to what really is out."""
        assert self.credits is not None
        out = self.feed.in_flight
        self.credits.set_out(*out)
        if not out[0]:
            self._applied, self._applied_at = self.feed.applied, now

    def note_progress(self, now: float) -> None:
        """See when calls end: ten looks a second are too few to tell how long they take."""
        done = self.feed.applied - self._applied
        if done > 0:
            if self._applied_at is not None:
                self._call = (done, now - self._applied_at)
            self._applied, self._applied_at = self._applied + done, now

    def _look(self) -> tuple[int, int]:
        lag, rows_max = self._log.visible - self.feed.applied, self.feed.limits.mailbox_deltas_max
        if self.feed.behind:
            return lag, max(lag, rows_max)
        rows, _ = self.feed.in_flight
        # Of the deltas that lie between, others may be for other sinks only.
        return (lag, max(rows_max * lag // rows, 1)) if rows else (0, rows_max)

    def _in_call(self, now: float, depth: int) -> int | None:
        """As fast as the last call."""
        rows, took_s = self._call
        if self._applied_at is None or not took_s > 0:
            return None
        return min(int(rows * (now - self._applied_at) / took_s), rows, depth)


class BacklogGauge(Gauge):
    """A sink with work of its own behind what it applied."""

    what = "its backlog"

    def __init__(self, feed: Feed, sink: HasBacklog, log: Log) -> None:
        super().__init__(feed, log)
        self._sink = sink

    def _look(self) -> tuple[int, int]:
        try:
            backlog = self._sink.backlog()
            rows = max(int(backlog.rows) - int(backlog.before), 0)
            rows_max = max(int(backlog.rows_max) - int(backlog.before), 1)
        except Exception as failure:  # of one sink, which stops alone
            self.feed.stop(self.feed.failed(f"its backlog() failed with {text_of(failure)}"))
            return 0, 1
        return rows, rows_max

    def _reached(self) -> int:
        # What still waits in front of the sink is no part of its backlog, and has not left it.
        return self.feed.applied


class LogGauge(Gauge):
    """A sink that the log waits for: how much of the log's bounds it keeps from being free."""

    what = "its share of the log"

    def __init__(self, feed: Feed, log: Log, *, gives_way: bool) -> None:
        super().__init__(feed, log)
        self._gives_way = gives_way

    def mode(self) -> Mode:
        """One that stands still slows producers down, where the log will refuse them for its sake."""
        return Mode.SUSPENDED if self._gives_way and self.stands_still else Mode.PACING

    @property
    def keeps_full(self) -> bool:
        """Whether the log has no room for its sake, and will refuse rather than let it lose its place."""
        return not self._gives_way and self._log.fill(self.feed.committed) >= FULL

    def _look(self) -> tuple[int, int]:
        needed = self.feed.committed
        lag, full = self._log.visible - needed, self._log.fill(needed)
        return lag, max(round(lag / full), 1) if full else 1


def at_full_log(told: Pressure, gauges: Iterable[Gauge]) -> Pressure:
    """The pressure where a sink keeps the log full, so that nothing goes: the pacer does not see that."""
    for gauge in gauges:
        if isinstance(gauge, LogGauge) and told.level < Level.STOP and gauge.keeps_full:
            return replace(
                told,
                level=Level.STOP,
                retry_after_ms=max(told.retry_after_ms or 0, FULL_RETRY_AFTER_MS),
                reason=f"sink {gauge.feed.name!r} keeps the log full: it is {gauge.feed.state.value}",
            )
    return told


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
