"""The verdict per promise of one run, from what its parts saw.

A promise that the scenario never put to the test has no verdict; nothing is claimed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop.route.status import FeedState
from delta_prop_simulations.laboratory.result import Verdict
from delta_prop_wire.delta import Priority

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.route.status import FeedStatistics
    from delta_prop.statistics import Statistics
    from delta_prop_simulations.laboratory.offering import Outcomes
    from delta_prop_simulations.laboratory.sinks import SimulatedSink

LOST_PLACE = FeedState.NEEDS_SNAPSHOT.value
STANDS = frozenset({LOST_PLACE, FeedState.STOPPED.value, FeedState.PAUSED.value})
"""States in which a sink gets nothing before somebody acts, and says so."""


@dataclass(slots=True)
class Seen:
    """One run's parts, at its end. `peaks`: the most that was seen of what has a bound, and that bound."""

    sinks: Sequence[SimulatedSink]
    outcomes: Outcomes
    statistics: Statistics
    peaks: dict[str, tuple[float, float]]
    settled: bool
    """Whether all sinks came to rest before the deadline."""


def verdicts(seen: Seen) -> list[Verdict]:
    """P1 to P9, in order."""
    return [
        _applied(seen),
        _order(seen),
        _once(seen),
        _isolation(seen),
        _refusals(seen),
        _priorities(seen),
        Verdict("P7", None, "nothing was damaged"),
        Verdict("P8", None, "no clock was set and nothing was started anew"),
        Verdict("P9", None, "nothing came over a network"),
    ]


def at_rest(statistics: Statistics) -> bool:
    """Whether every sink has come to the end of the log, or stands until somebody acts."""
    return all(feed.lag == 0 or feed.state in STANDS for feed in statistics.sinks.values())


def _applied(seen: Seen) -> Verdict:
    log, missing, told = seen.statistics.log, [], []
    for sink in seen.sinks:
        feed = seen.statistics.sinks[sink.name]
        if feed.quarantined:
            told.append(f"{sink.name} has {feed.quarantined:,} in its quarantine")
        if feed.state in STANDS:
            missed = log.next_offset - feed.success - feed.skipped - feed.quarantined
            told.append(_standing(feed, log.first_offset, missed))
        elif feed.applied < log.next_offset or sink.applied != feed.success:
            missing.append(f"{sink.name} has applied {feed.applied:,} of {log.next_offset:,}: {feed.state}")
    if seen.outcomes.acknowledged > seen.statistics.accepted:
        missing.append(f"{seen.outcomes.acknowledged - seen.statistics.accepted:,} are not in the log")
    if missing:
        return Verdict("P1", False, "; ".join(missing))
    if not seen.outcomes.acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    stands = any(feed.state in STANDS for feed in seen.statistics.sinks.values())
    what = (
        f"{seen.outcomes.acknowledged:,} acknowledged deltas came to {'others' if stands else 'every sink'}"
    )
    return Verdict("P1", True, "; ".join([what, *told]), limited=stands)


def _standing(feed: FeedStatistics, first_offset: int, missed: int) -> str:
    """What a sink says that stands; what it still needs is in the log, or it has lost its place."""
    if feed.state == LOST_PLACE or feed.applied < first_offset:
        return f"{feed.name} lost its place, and says so: {missed:,} deltas did not come to it"
    return f"{feed.name} is {feed.state}, and says why; {feed.lag:,} wait for it in the log"


def _order(seen: Seen) -> Verdict:
    wrong = [one.name for one in seen.sinks if one.out_of_order]
    calls = sum(seen.statistics.sinks[one.name].deliveries for one in seen.sinks)
    if wrong:
        return Verdict("P2", False, f"out of the log's order at {', '.join(wrong)}")
    return Verdict("P2", True if calls else None, f"{calls:,} calls came in the log's order")


def _once(seen: Seen) -> Verdict:
    twice = [one.name for one in seen.sinks if one.twice]
    if twice:
        return Verdict("P3", False, f"deltas came again to {', '.join(twice)}, which had applied them")
    failed = sum(one.failures for one in seen.sinks) + seen.outcomes.retried
    if not failed:
        return Verdict("P3", None, "nothing was sent or delivered a second time")
    return Verdict("P3", True, f"after {failed:,} repeats no delta had a second effect")


def _isolation(seen: Seen) -> Verdict:
    over = [
        f"{name}: {most:,.0f} of {bound:,.0f}" for name, (most, bound) in seen.peaks.items() if most > bound
    ]
    if over:
        return Verdict("P4", False, f"above its bound: {'; '.join(over)}")
    feeds = seen.statistics.sinks
    fell = [one for one in seen.sinks if feeds[one.name].backpressure and not feeds[one.name].pacing]
    if not fell:
        return Verdict("P4", None, "no sink fell behind that does not pace; all stayed within its bounds")
    others = [one for one in seen.sinks if one not in fell and not one.failures]
    worst = max((one.lag.quantile(0.99) for one in others), default=0.0)
    what = f"{', '.join(one.name for one in fell)} fell behind; all stayed within its bounds"
    return Verdict("P4", True, what + (f"; the others' p99 was {worst:.3g} s" if others else ""))


def _refusals(seen: Seen) -> Verdict:
    outcomes = seen.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a time: {', '.join(outcomes.unexplained[:5])}"
        )
    if outcomes.unsettled:
        return Verdict("P5", False, f"{outcomes.unsettled:,} deltas were never answered")
    if not seen.settled:
        waits = [f"{name} {feed.state}" for name, feed in seen.statistics.sinks.items() if feed.lag]
        return Verdict("P5", False, f"after the deadline still at work: {', '.join(waits)}")
    if not outcomes.codes:
        return Verdict("P5", True, "everything was answered, and nothing refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a time: {codes}")


def _priorities(seen: Seen) -> Verdict:
    waits = {priority: one for priority, one in seen.outcomes.waits.items() if one.count}
    if len(waits) < 2 or seen.statistics.queue.taken == 0:
        return Verdict("P6", None, "the queue never held deltas of several priorities")
    told = [f"{Priority(one).name.lower()} {waits[one].quantile(0.5):.3g} s" for one in sorted(waits)]
    first, last = min(waits), max(waits)
    ok = waits[first].quantile(0.5) <= waits[last].quantile(0.5)
    return Verdict("P6", ok, f"median wait for an offset: {', '.join(told)}")
