"""The verdict on each promise for a run with one service; None if the scenario does not test it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.status import FeedStatistics
from delta_prop_simulations.scenarios.result import Verdict
from delta_prop_wire.delta import Priority

if TYPE_CHECKING:
    from delta_prop.api.statistics import Statistics
    from delta_prop_simulations.scenarios.offering import Outcomes
    from delta_prop_simulations.scenarios.sinks import SimulatedSink

CURSOR_INVALIDATED = FeedState.NEEDS_SNAPSHOT.value
HALTED_STATES = frozenset({CURSOR_INVALIDATED, FeedState.STOPPED.value, FeedState.PAUSED.value})
"""States of a sink that gets nothing until an operator acts; the service reports the reason."""


@dataclass(slots=True)
class RunObservation:
    """The parts of a run at its end. `peaks`: the highest value of each bounded quantity, with its bound."""

    sinks: Sequence[SimulatedSink]
    outcomes: Outcomes
    statistics: Statistics
    peaks: dict[str, tuple[float, float]]
    is_idle: bool
    """True if the service was idle before the deadline."""


def verdicts(observed: RunObservation) -> list[Verdict]:
    """Return the verdicts P1 to P9, in order."""
    return [
        _judge_delivery(observed),
        _judge_order(observed),
        _judge_single_effect(observed),
        _judge_isolation(observed),
        _judge_refusals(observed),
        _judge_priorities(observed),
        Verdict("P7", None, "no data was corrupted"),
        Verdict("P8", None, "no clock was wrong, no service restarted"),
        Verdict("P9", None, "no peer used the network"),
    ]


def is_idle(statistics: Statistics) -> bool:
    """True if every sink has reached the end of the log, or gets nothing until an operator acts."""
    return all(feed.lag == 0 or feed.state in HALTED_STATES for feed in statistics.sinks.values())


def _judge_delivery(observed: RunObservation) -> Verdict:
    log, missing, notes = observed.statistics.log, [], []
    for sink in observed.sinks:
        feed = observed.statistics.sinks[sink.name]
        if feed.quarantined:
            notes.append(f"{sink.name} has {feed.quarantined:,} in its quarantine")
        if feed.state in HALTED_STATES:
            missed = log.next_offset - feed.applied_deltas - feed.skipped - feed.quarantined
            notes.append(_format_halted(feed, log.start_offset, missed))
        elif feed.applied_offset < log.next_offset or sink.counts.lag.count != feed.applied_deltas:
            missing.append(
                f"{sink.name} has applied {feed.applied_offset:,} of {log.next_offset:,} rows: {feed.state}"
            )
    if observed.outcomes.acknowledged > observed.statistics.accepted:
        lost = observed.outcomes.acknowledged - observed.statistics.accepted
        missing.append(f"{lost:,} acknowledged deltas are not in the log")
    if missing:
        return Verdict("P1", False, "; ".join(missing))
    if not observed.outcomes.acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    has_halted = any(feed.state in HALTED_STATES for feed in observed.statistics.sinks.values())
    receivers = "every other sink" if has_halted else "every sink"
    what = f"{observed.outcomes.acknowledged:,} acknowledged deltas reached {receivers}"
    return Verdict("P1", True, "; ".join([what, *notes]), limited=has_halted)


def _format_halted(feed: FeedStatistics, start_offset: int, missed: int) -> str:
    """Say why a sink gets nothing, and how many deltas it has missed, or how many wait for it in the log."""
    if feed.state == CURSOR_INVALIDATED or feed.applied_offset < start_offset:
        return f"{feed.name} has an invalidated cursor: {missed:,} deltas did not reach it"
    return f"{feed.name} is {feed.state}, and reports the reason; {feed.lag:,} deltas wait for it in the log"


def _judge_order(observed: RunObservation) -> Verdict:
    wrong = [sink.name for sink in observed.sinks if sink.counts.out_of_order]
    call_count = sum(observed.statistics.sinks[sink.name].deliveries for sink in observed.sinks)
    if wrong:
        return Verdict("P2", False, f"out of the log's order at {', '.join(wrong)}")
    return Verdict("P2", True if call_count else None, f"{call_count:,} calls came in the log's order")


def _judge_single_effect(observed: RunObservation) -> Verdict:
    wrong = [sink.name for sink in observed.sinks if sink.counts.duplicates]
    if wrong:
        return Verdict("P3", False, f"{', '.join(wrong)} got deltas again after having applied them")
    retries = sum(sink.counts.failures for sink in observed.sinks) + observed.outcomes.retried
    if not retries:
        return Verdict("P3", None, "no delta was sent or delivered twice")
    return Verdict("P3", True, f"after {retries:,} retries no delta had a second effect")


def _judge_isolation(observed: RunObservation) -> Verdict:
    exceeded = [
        f"{name}: {peak:,.0f} of {bound:,.0f}"
        for name, (peak, bound) in observed.peaks.items()
        if peak > bound
    ]
    if exceeded:
        return Verdict("P4", False, f"above its bound: {'; '.join(exceeded)}")
    feeds = observed.statistics.sinks
    lagging = [sink for sink in observed.sinks if feeds[sink.name].pulled and not feeds[sink.name].pacing]
    if not lagging:
        return Verdict("P4", None, "no sink without pacing lagged; all stayed within bounds")
    others = [sink for sink in observed.sinks if sink not in lagging and not sink.counts.failures]
    worst_s = max((sink.counts.lag.quantile(0.99) for sink in others), default=0.0)
    what = f"{', '.join(sink.name for sink in lagging)} lagged; all stayed within bounds"
    return Verdict("P4", True, what + (f"; the others' p99 was {worst_s:.3g} s" if others else ""))


def _judge_refusals(observed: RunObservation) -> Verdict:
    outcomes = observed.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a retry time: {', '.join(outcomes.unexplained[:5])}"
        )
    if outcomes.unsettled:
        return Verdict("P5", False, f"{outcomes.unsettled:,} deltas were never answered")
    if not observed.is_idle:
        lagging = [f"{name} {feed.state}" for name, feed in observed.statistics.sinks.items() if feed.lag]
        return Verdict("P5", False, f"not idle by the deadline: {', '.join(lagging)}")
    if not outcomes.codes:
        return Verdict("P5", True, "every delta was answered, and none was refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a retry time: {codes}")


def _judge_priorities(observed: RunObservation) -> Verdict:
    times = {
        priority: histogram for priority, histogram in observed.outcomes.ack_times.items() if histogram.count
    }
    if len(times) < 2 or observed.statistics.queue.taken == 0:
        return Verdict("P6", None, "the queue never held deltas of several priorities")
    medians = [
        f"{Priority(priority).name.lower()} {times[priority].quantile(0.5):.3g} s"
        for priority in sorted(times)
    ]
    highest, lowest = min(times), max(times)
    ok = times[highest].quantile(0.5) <= times[lowest].quantile(0.5)
    return Verdict("P6", ok, f"median time to an acknowledgement: {', '.join(medians)}")
