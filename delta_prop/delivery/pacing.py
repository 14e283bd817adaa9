"""Pacing of the source by slow sinks: measures the sinks ten times a second, steps the pacer.

A sink paces for one of three resources that fill up: its mailbox (if attached with `pacing`), a backlog of
its own (rows that an index has still to link), or its share of the log (if the log waits for it). Each has a
rate of its own; the source is held to the smallest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from delta_prop.delivery.backpressure.controller import DepthLaw, DrainLaw, Law, Measure
from delta_prop.delivery.backpressure.pacer import Credits, Mode, Pacer, Pressure
from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.status import format_failure
from delta_prop_sinks.sink import HasBacklog
from delta_prop_wire.frames import PressureLevel

if TYPE_CHECKING:
    from delta_prop.api.settings import Settings
    from delta_prop.delivery.feed import Feed
    from delta_prop_broker.log.contract import Log

SAMPLES = 11
"""Number of samples: ten intervals, one second."""
POLL_SHARE = 0.01
"""The log is also measured each time that this share of its bounds has been appended, between the regular
measurements."""
BATCH_BYTES, ROW_BYTES = 4_096, 128
"""Approximate overhead of a batch and of a row in a log, in bytes."""

FULL_SHARE = 0.99
"""Share from which a log counts as full: the rest may be less than a batch."""
FULL_RETRY_AFTER_MS = 100
"""Minimum time to retry while a sink keeps the log full."""
REPORT_S = 60.0
"""Minimum seconds between two warnings that one sink paces."""

logger = logging.getLogger("delta_prop")


class PacingGate:
    """The gate that paces producers, by measurements of the feeds and the log."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.pacer = Pacer()
        self._settings = settings
        self._log = log
        self._gauges: dict[str, Gauge] = {}
        self._mailbox_gauges: tuple[MailboxGauge, ...] = ()
        # Shares of the log's bounds that one delta, one byte and one batch take.
        self._delta_share = 1 / settings.log_deltas_max + ROW_BYTES / settings.log_bytes_max
        self._byte_share = 1 / settings.log_bytes_max
        self._batch_share = BATCH_BYTES / settings.log_bytes_max
        self._unpolled_share = 0.0  # share of the log's bounds appended since the log was last measured

    def add(self, feed: Feed, *, pacing: bool, required: bool, evictable: bool, now: float) -> None:
        """Measure a sink; with `pacing` it paces at once. `evictable`: its cursor may be invalidated."""
        gauges: list[Gauge] = []
        if pacing:
            gauge = MailboxGauge(feed, self._log)
            gauges.append(gauge)
            self._pace(gauge, now)
            feed.pacing = True
        if isinstance(feed.sink, HasBacklog):
            gauges.append(BacklogGauge(feed, feed.sink, self._log))
        if required:
            gauges.append(LogGauge(feed, self._log, evictable=evictable))
        self._gauges.update((gauge.name, gauge) for gauge in gauges)
        self._index_mailboxes()

    def remove(self, feed: Feed, now: float) -> None:
        """Stop measuring a sink."""
        for gauge in [known for known in self._gauges.values() if known.feed is feed]:
            del self._gauges[gauge.name]
            self.pacer.release(gauge.name, now)
        self._index_mailboxes()

    def admits(self, count: int, size: int, now: float) -> bool:
        """True if `count` deltas of `size` bytes together may enter the pipeline now."""
        if self.pacer.rate is None:
            return True
        self._update_credits(now)
        return self.pacer.admits(count, size, now)

    def note(self, count: int, size: int, now: float) -> None:
        """Charge what enters, and measure the log at once if much has entered since the last poll."""
        if self.pacer.rate is not None:
            self.pacer.note(count, size, now)
        self._unpolled_share += count * self._delta_share + size * self._byte_share + self._batch_share
        if self._unpolled_share > POLL_SHARE:
            self._unpolled_share = 0.0
            self._poll_log(now)

    def wait_s(self, count: int, size: int, now: float) -> float | None:
        """Return the seconds until the caller is to ask again; None if a sink must progress first."""
        self._update_credits(now)
        return self.pacer.wait_s(count, size, now)

    @property
    def has_paced_mailboxes(self) -> bool:
        """True if some sinks pace by their mailboxes, so that their progress matters."""
        return bool(self._mailbox_gauges)

    def note_progress(self, now: float) -> None:
        """Update the gauges after a sink's progress."""
        for gauge in self._mailbox_gauges:
            gauge.note_progress(now)

    def pressure(self, queue_depth: int, queue_capacity: int) -> Pressure:
        """Return the pressure to report to producers."""
        return stop_at_full_log(self.pacer.pressure(queue_depth, queue_capacity), self._gauges.values())

    # --- ten times a second

    def step(self, now: float, *, waiting: bool) -> None:
        """Measure every sink, start and stop pacing, set the rate. `waiting`: True if work waits."""
        measures: dict[str, Measure] = {}
        pacing_by_feed: dict[Feed, bool] = {}
        for gauge in self._gauges.values():
            fill_ratio, measure = gauge.measure(now, self._settings.pacing_high_mark)
            if self.pacer.mode(gauge.name) is None:
                if gauge.should_start(fill_ratio, self._settings.pacing_high_mark):
                    self._start_pacing(gauge, fill_ratio, now)
            elif gauge.should_stop(fill_ratio, self._settings.pacing_low_mark):
                self.pacer.release(gauge.name, now)
                gauge.report(False, fill_ratio)
            if self.pacer.mode(gauge.name) is not None:
                self.pacer.set_mode(gauge.name, gauge.mode(), now)
                measures[gauge.name] = measure
            mode = self.pacer.mode(gauge.name)
            is_pacing = mode not in (None, Mode.SUSPENDED)
            pacing_by_feed[gauge.feed] = pacing_by_feed.get(gauge.feed, False) or is_pacing
        for feed, pacing in pacing_by_feed.items():
            feed.pacing = pacing
        # `admits` updates the credits, but is not called while no work arrives; `pressure` needs them, too
        self._update_credits(now)
        self.pacer.step(now, measures, waiting=waiting)

    def _update_credits(self, now: float) -> None:
        for gauge in self._mailbox_gauges:
            gauge.update_credits(now)

    def _poll_log(self, now: float) -> None:
        for gauge in self._gauges.values():
            if isinstance(gauge, LogGauge) and self.pacer.mode(gauge.name) is None:
                fill_ratio = gauge.fill_ratio()
                if gauge.should_start(fill_ratio, self._settings.pacing_high_mark):
                    self._start_pacing(gauge, fill_ratio, now)

    def _start_pacing(self, gauge: Gauge, fill_ratio: float, now: float) -> None:
        self._pace(gauge, now)
        gauge.feed.pacing = True
        gauge.report(True, fill_ratio)

    def _pace(self, gauge: Gauge, now: float) -> None:
        self.pacer.pace(gauge.name, self._make_law(gauge), gauge.credits, now)
        self.pacer.set_mode(gauge.name, gauge.mode(), now)

    def _make_law(self, gauge: Gauge) -> Law:
        limits = self._settings.rate_limits(gauge.initial_rate(self._settings))
        return DrainLaw(limits) if self._settings.rate_law == "drain" else DepthLaw(limits)

    def _index_mailboxes(self) -> None:
        self._mailbox_gauges = tuple(
            gauge for gauge in self._gauges.values() if isinstance(gauge, MailboxGauge)
        )


class Gauge:
    """One resource of one sink that may fill up."""

    resource = ""
    """The resource in messages and in the gauge's name; "" for the mailbox."""

    def __init__(self, feed: Feed, log: Log) -> None:
        self.feed = feed
        self.name = feed.name if not self.resource else f"{feed.name} ({self.resource})"
        self.credits: Credits | None = None
        self._log = log
        self._reported_at = -inf
        self._drained_offset: int | None = None
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)  # (time, deltas drained)

    def should_start(self, fill_ratio: float, mark: float) -> bool:
        """True if the resource is so full that the sink starts to pace. A stalled sink paces nobody."""
        return fill_ratio >= mark and self.mode() is not Mode.SUSPENDED

    def should_stop(self, fill_ratio: float, mark: float) -> bool:
        """True if the resource is so empty that the sink stops pacing."""
        return fill_ratio < mark

    def fill_ratio(self) -> float:
        """Return the share that is in use; 1 is full."""
        depth, depth_max = self._poll_depth()
        return depth / depth_max if depth_max else 1.0

    def mode(self) -> Mode:
        """Return the mode: a stalled sink must not hold the source; one that reads the log catches up."""
        if self.is_stalled:
            return Mode.SUSPENDED
        return Mode.CATCHING_UP if self.feed.is_catching_up else Mode.PACING

    @property
    def is_stalled(self) -> bool:
        """True if the sink applies nothing for now, however slow the source is."""
        feed = self.feed
        return feed.has_ended or feed.is_rebuilding or feed.state is FeedState.BREAKER_OPEN

    def measure(self, now: float, mark: float) -> tuple[float, Measure]:
        """Return the fill ratio, and a measure of the deltas drained since the last one.

        The depth below `mark`, where pacing starts, is not counted, since the law controls the depth above
        it. A mailbox has no such mark: its full depth is counted.
        """
        depth, depth_max = self._poll_depth()
        drained_offset = self._arrived_offset() - depth
        drained = 0 if self._drained_offset is None else max(drained_offset - self._drained_offset, 0)
        self._drained_offset = drained_offset
        self._samples.append((now, drained))
        below_mark = 0 if self.credits is not None else int(mark * depth_max)
        return (depth / depth_max if depth_max else 1.0), Measure(
            drained,
            max(depth - below_mark, 0),
            max(depth_max - below_mark, 1),
            self._estimate_applied_in_call(now, depth),
        )

    def initial_rate(self, settings: Settings) -> float:
        """Return the initial rate, in deltas per second: the drain rate of the last second, if known.

        Otherwise `rate_initial`, but at most as many deltas per second as fit above the high mark.
        """
        samples = self._samples
        if self.credits is not None:
            return settings.rate_initial
        if len(samples) == SAMPLES and (seconds := samples[-1][0] - samples[0][0]) > 0:
            return sum(count for _, count in list(samples)[1:]) / seconds
        return min(settings.rate_initial, (1 - settings.pacing_high_mark) * self._poll_depth()[1])

    def report(self, is_pacing: bool, fill_ratio: float) -> None:
        """Log that the sink starts or stops pacing."""
        action = "paces" if is_pacing else "no longer paces"
        is_recent = is_pacing and self._samples and self._samples[-1][0] - self._reported_at < REPORT_S
        if is_pacing and not is_recent:
            self._reported_at = self._samples[-1][0] if self._samples else 0.0
        level = logging.WARNING if is_pacing and not is_recent else logging.DEBUG
        logger.log(
            level,
            "sink %r %s the source: %s is %.0f %% full",
            self.feed.name,
            action,
            self.resource,
            fill_ratio * 100,
        )

    def _poll_depth(self) -> tuple[int, int]:
        raise NotImplementedError

    def _arrived_offset(self) -> int:
        """Return the offset after the last delta that arrived; the drained offset is this minus the depth."""
        return self._log.high_watermark

    def _estimate_applied_in_call(self, now: float, depth: int) -> int | None:
        """Return how many deltas the call under way should have applied by now; None if unknown."""
        return None


class MailboxGauge(Gauge):
    """Gauge of a sink attached with `pacing`: deltas admitted and not yet applied, within its credits."""

    def __init__(self, feed: Feed, log: Log) -> None:
        super().__init__(feed, log)
        self.credits = Credits(feed.limits.mailbox_deltas_max, feed.limits.mailbox_bytes_max)
        self._applied = feed.applied
        self._applied_at: float | None = None  # last progress of the sink, or end of its last idle time
        self._last_call = (0, 0.0)  # rows of the last call, and its seconds

    def should_stop(self, fill_ratio: float, mark: float) -> bool:
        """False: a sink attached with `pacing` always paces."""
        return False

    def update_credits(self, now: float) -> None:
        """Set the credits to what is in flight."""
        assert self.credits is not None
        deltas, size = self.feed.in_flight
        self.credits.set_outstanding(deltas, size)
        if not deltas:
            self._applied, self._applied_at = self.feed.applied, now

    def note_progress(self, now: float) -> None:
        """Note the end of a call: ten polls a second are too few to measure its time."""
        done = self.feed.applied - self._applied
        if done > 0:
            if self._applied_at is not None:
                self._last_call = (done, now - self._applied_at)
            self._applied, self._applied_at = self._applied + done, now

    def _poll_depth(self) -> tuple[int, int]:
        lag, rows_max = self._log.high_watermark - self.feed.applied, self.feed.limits.mailbox_deltas_max
        if self.feed.is_catching_up:
            return lag, max(lag, rows_max)
        rows, _ = self.feed.in_flight
        # The lag also counts deltas for other sinks: scale the maximum by the same ratio.
        return (lag, max(rows_max * lag // rows, 1)) if rows else (0, rows_max)

    def _estimate_applied_in_call(self, now: float, depth: int) -> int | None:
        rows, call_s = self._last_call
        if self._applied_at is None or not call_s > 0:
            return None
        return min(int(rows * (now - self._applied_at) / call_s), rows, depth)


class BacklogGauge(Gauge):
    """Gauge of a sink with work of its own after it has applied deltas."""

    resource = "its backlog"

    def __init__(self, feed: Feed, sink: HasBacklog, log: Log) -> None:
        super().__init__(feed, log)
        self._sink = sink

    def _poll_depth(self) -> tuple[int, int]:
        try:
            backlog = self._sink.backlog()
            rows = max(int(backlog.rows) - int(backlog.before), 0)
            rows_max = max(int(backlog.rows_max) - int(backlog.before), 1)
        except Exception as failure:  # one sink's failure, which stops that sink alone
            self.feed.control.stop_because(f"its backlog() failed with {format_failure(failure)}")
            return 0, 1
        return rows, rows_max

    def _arrived_offset(self) -> int:
        # Deltas that still wait for the sink are neither in its backlog nor drained from it.
        return self.feed.applied


class LogGauge(Gauge):
    """Gauge of a sink that the log waits for: the share of the log's bounds that it retains."""

    resource = "its share of the log"

    def __init__(self, feed: Feed, log: Log, *, evictable: bool) -> None:
        super().__init__(feed, log)
        self._evictable = evictable

    def mode(self) -> Mode:
        """Return the mode: a stalled sink paces producers unless the log can invalidate its cursor."""
        return Mode.SUSPENDED if self._evictable and self.is_stalled else Mode.PACING

    @property
    def is_filling_log(self) -> bool:
        """True if the log is full because of this sink, and will not invalidate its cursor."""
        return not self._evictable and self._log.used_share(self.feed.committed) >= FULL_SHARE

    def _poll_depth(self) -> tuple[int, int]:
        needed = self.feed.committed
        lag, used_share = self._log.high_watermark - needed, self._log.used_share(needed)
        return lag, max(round(lag / used_share), 1) if used_share else 1


def stop_at_full_log(pressure: Pressure, gauges: Iterable[Gauge]) -> Pressure:
    """Return the pressure, raised to `stop` if a sink keeps the log full, which the pacer cannot know."""
    for gauge in gauges:
        if isinstance(gauge, LogGauge) and pressure.level < PressureLevel.STOP and gauge.is_filling_log:
            return replace(
                pressure,
                level=PressureLevel.STOP,
                retry_after_ms=max(pressure.retry_after_ms or 0, FULL_RETRY_AFTER_MS),
                reason=f"sink {gauge.feed.name!r} keeps the log full: it is {gauge.feed.state.value}",
            )
    return pressure


def has_changed(before: Pressure, now: Pressure) -> bool:
    """True if producers should be notified: another level or cause, or a rate that differs by a tenth."""
    if (before.level, before.paced_by, before.rate_limit is None) != (
        now.level,
        now.paced_by,
        now.rate_limit is None,
    ):
        return True
    rate_before = before.rate_limit or 0.0
    return abs((now.rate_limit or 0.0) - rate_before) > rate_before / 10
