"""The verdict per promise of one run, from the observations of its parts.

A promise that the scenario does not test has no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.route.status import FeedState
from delta_prop_simulations.scenarios.result import Verdict
from delta_prop_wire.delta import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.route.status import FeedStatistics
    from delta_prop.statistics import Statistics
    from delta_prop_simulations.scenarios.offering import Outcomes
    from delta_prop_simulations.scenarios.sinks import SimulatedSink

CURSOR_INVALIDATED = FeedState.NEEDS_SNAPSHOT.value
STANDSTILL_STATES = frozenset({CURSOR_INVALIDATED, FeedState.STOPPED.value, FeedState.PAUSED.value})
"""States in which a sink gets nothing until an operator acts, and reports the reason."""


@dataclass(slots=True)
class RunObservation:
    """One run's parts, at its end. `peaks`: the highest value of each bounded quantity, and its bound."""

    sinks: Sequence[SimulatedSink]
    outcomes: Outcomes
    statistics: Statistics
    peaks: dict[str, tuple[float, float]]
    settled: bool
    """True if all sinks came to rest before the deadline."""


def verdicts(seen: RunObservation) -> list[Verdict]:
    """Return the verdicts P1 to P9, in order."""
    return [
        _judge_delivery(seen),
        _judge_order(seen),
        _judge_single_effect(seen),
        _judge_isolation(seen),
        _judge_refusals(seen),
        _judge_priorities(seen),
        Verdict("P7", None, "no data was corrupted"),
        Verdict("P8", None, "no clock was wrong, no service restarted"),
        Verdict("P9", None, "no peer used the network"),
    ]


def is_at_rest(statistics: Statistics) -> bool:
    """True if every sink has reached the end of the log, or has stopped until an operator acts."""
    return all(feed.lag == 0 or feed.state in STANDSTILL_STATES for feed in statistics.sinks.values())


def _judge_delivery(seen: RunObservation) -> Verdict:
    log, missing, notes = seen.statistics.log, [], []
    for sink in seen.sinks:
        feed = seen.statistics.sinks[sink.name]
        if feed.quarantined:
            notes.append(f"{sink.name} has {feed.quarantined:,} in its quarantine")
        if feed.state in STANDSTILL_STATES:
            missed = log.next_offset - feed.applied_deltas - feed.skipped - feed.quarantined
            notes.append(_format_standstill(feed, log.start_offset, missed))
        elif feed.applied_offset < log.next_offset or sink.applied != feed.applied_deltas:
            missing.append(
                f"{sink.name} has applied {feed.applied_offset:,} of {log.next_offset:,}: {feed.state}"
            )
    if seen.outcomes.acknowledged > seen.statistics.accepted:
        missing.append(f"{seen.outcomes.acknowledged - seen.statistics.accepted:,} are not in the log")
    if missing:
        return Verdict("P1", False, "; ".join(missing))
    if not seen.outcomes.acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    stands = any(feed.state in STANDSTILL_STATES for feed in seen.statistics.sinks.values())
    what = (
        f"{seen.outcomes.acknowledged:,} acknowledged deltas came to {'others' if stands else 'every sink'}"
    )
    return Verdict("P1", True, "; ".join([what, *notes]), limited=stands)


def _format_standstill(feed: FeedStatistics, first_offset: int, missed: int) -> str:
    """Format the standstill of a sink: the log holds the deltas it needs, or its cursor is invalidated."""
    if feed.state == CURSOR_INVALIDATED or feed.applied_offset < first_offset:
        return f"{feed.name} has an invalidated cursor: {missed:,} deltas did not come to it"
    return f"{feed.name} is {feed.state}, and reports the reason; {feed.lag:,} wait for it in the log"


def _judge_order(seen: RunObservation) -> Verdict:
    wrong = [one.name for one in seen.sinks if one.out_of_order]
    calls = sum(seen.statistics.sinks[one.name].deliveries for one in seen.sinks)
    if wrong:
        return Verdict("P2", False, f"out of the log's order at {', '.join(wrong)}")
    return Verdict("P2", True if calls else None, f"{calls:,} calls came in the log's order")


def _judge_single_effect(seen: RunObservation) -> Verdict:
    twice = [one.name for one in seen.sinks if one.duplicates]
    if twice:
        return Verdict("P3", False, f"deltas came twice to {', '.join(twice)}, which had applied them")
    failed = sum(one.failures for one in seen.sinks) + seen.outcomes.retried
    if not failed:
        return Verdict("P3", None, "no delta was sent or delivered twice")
    return Verdict("P3", True, f"after {failed:,} retries no delta had a second effect")


def _judge_isolation(seen: RunObservation) -> Verdict:
    over = [
        f"{name}: {most:,.0f} of {bound:,.0f}" for name, (most, bound) in seen.peaks.items() if most > bound
    ]
    if over:
        return Verdict("P4", False, f"above its bound: {'; '.join(over)}")
    feeds = seen.statistics.sinks
    fell = [one for one in seen.sinks if feeds[one.name].pulled and not feeds[one.name].pacing]
    if not fell:
        return Verdict("P4", None, "no sink without pacing lagged; all stayed within bounds")
    others = [one for one in seen.sinks if one not in fell and not one.failures]
    worst = max((one.lag.quantile(0.99) for one in others), default=0.0)
    what = f"{', '.join(one.name for one in fell)} lagged; all stayed within bounds"
    return Verdict("P4", True, what + (f"; the others' p99 was {worst:.3g} s" if others else ""))


def _judge_refusals(seen: RunObservation) -> Verdict:
    outcomes = seen.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a retry time: {', '.join(outcomes.unexplained[:5])}"
        )
    if outcomes.unsettled:
        return Verdict("P5", False, f"{outcomes.unsettled:,} deltas were never answered")
    if not seen.settled:
        waits = [f"{name} {feed.state}" for name, feed in seen.statistics.sinks.items() if feed.lag]
        return Verdict("P5", False, f"after the deadline still at work: {', '.join(waits)}")
    if not outcomes.codes:
        return Verdict("P5", True, "every delta was answered, and none was refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a retry time: {codes}")


def _judge_priorities(seen: RunObservation) -> Verdict:
    waits = {priority: one for priority, one in seen.outcomes.waits.items() if one.count}
    if len(waits) < 2 or seen.statistics.queue.taken == 0:
        return Verdict("P6", None, "the queue never held deltas of several priorities")
    medians = [f"{Priority(one).name.lower()} {waits[one].quantile(0.5):.3g} s" for one in sorted(waits)]
    first, last = min(waits), max(waits)
    ok = waits[first].quantile(0.5) <= waits[last].quantile(0.5)
    return Verdict("P6", ok, f"median wait for an offset: {', '.join(medians)}")
