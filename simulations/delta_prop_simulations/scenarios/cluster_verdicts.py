"""The verdict per promise of a run with machines, from the data of all machines at rest.

A promise that the scenario does not test has no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_simulations.scenarios import agreement
from delta_prop_simulations.scenarios.result import Verdict
from delta_prop_simulations.scenarios.verdicts import CURSOR_INVALIDATED
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop.statistics import Statistics
    from delta_prop_simulations.scenarios.agreement import LogRows
    from delta_prop_simulations.scenarios.clients import AckedRows
    from delta_prop_simulations.scenarios.offering import Outcomes
    from delta_prop_simulations.scenarios.readers import Reader
    from delta_prop_simulations.scenarios.scenario import Scenario
    from delta_prop_simulations.scenarios.supervised import SupervisedSite


@dataclass(frozen=True, slots=True)
class SiteObservation:
    """One machine at the end. `log_rows`, `statistics`: None if no service runs there."""

    log_rows: LogRows | None
    statistics: Statistics | None
    site: SupervisedSite
    acknowledged: list[AckedRows]
    readers: list[Reader]


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    """All machines at the end. `groups`: the machines that must hold the same. `struck`: network faults.
    `checked`: the number of steps at which offsets and bounds were checked; a violation ends the run.
    """

    scenario: Scenario
    sites: dict[str, SiteObservation]
    groups: list[list[str]]
    outcomes: Outcomes
    settled: bool
    struck: int
    checked: int


def verdicts(seen: ClusterObservation) -> list[Verdict]:
    """Return the verdicts P1 to P9, in order."""
    return [
        _judge_durability(seen),
        _judge_order(seen),
        _judge_single_effect(seen),
        _judge_bounds(seen),
        _judge_answers(seen),
        Verdict("P6", None, "priorities are only judged in a scenario with one service"),
        Verdict("P7", None, "no data was corrupted"),
        _judge_faults(seen),
        Verdict("P9", None, "no peer violated the protocol"),
    ]


def _judge_bounds(seen: ClusterObservation) -> Verdict:
    if not seen.checked:
        return Verdict("P4", None, "offsets and bounds are checked with --checks only")
    return Verdict("P4", True, f"offsets and bounds held at every service, at {seen.checked:,} steps")


def _judge_durability(seen: ClusterObservation) -> Verdict:
    acknowledged = sum(one.count for at in seen.sites.values() for one in at.acknowledged)
    if not acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    wrong = [*_log_losses(seen), *_sink_losses(seen), *_reader_errors(seen)]
    if wrong:
        return _broken_verdict(seen, "P1", wrong)
    where = "at its service" if len(seen.sites) == 1 else "at their offsets, and at every linked service"
    without = [*_cursor_losses(seen)]
    whom = "every other sink and every reader" if without else "every sink and reader"
    what = f"{acknowledged:,} acknowledged deltas are in the log {where}, and came to {whom}"
    return Verdict("P1", True, "; ".join([what, *without]), limited=bool(without))


def _cursor_losses(seen: ClusterObservation) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.log_rows is None or at.statistics is None:
            continue
        for sink_name, (_, sink) in at.site.sinks.items():
            feed = at.statistics.sinks[sink_name]
            if feed.state == CURSOR_INVALIDATED:
                missed = at.log_rows.deltas - sink.new_rows - feed.quarantined
                yield f"{sink_name} at {name} has an invalidated cursor: {missed:,} deltas did not come to it"


def _log_losses(seen: ClusterObservation) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.log_rows is None:
            yield f"{name} has no service: {'; '.join(at.site.notes[-1:]) or 'it was not restarted'}"
        elif lost := agreement.count_missing(at.log_rows, at.acknowledged) + agreement.count_double_acks(
            at.acknowledged
        ):
            yield f"{name} lacks {lost:,} acknowledged deltas"


def _sink_losses(seen: ClusterObservation) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.log_rows is None or at.statistics is None:
            continue
        for sink_name, (spec, sink) in at.site.sinks.items():
            feed = at.statistics.sinks[sink_name]
            done = sink.new_rows + feed.quarantined
            if feed.state != CURSOR_INVALIDATED and spec.topics == ("*",) and done != at.log_rows.deltas:
                yield f"{sink_name} at {name} has applied {done:,} of {at.log_rows.deltas:,}: {feed.state}"


def _reader_errors(seen: ClusterObservation) -> Iterator[str]:
    for name, at in seen.sites.items():
        for reader in [] if at.log_rows is None else at.readers:
            assert at.log_rows is not None
            who = f"{reader.spec.name}, a reader at {name},"
            if reader.failure is not None:
                yield f"{who} was refused: {reader.failure}"
            if count := agreement.count_withdrawn(at.log_rows, reader.shown):
                yield f"{who} got {count:,} deltas that were lost later"
            if reader.spec.topics == ("*",) and reader.failure is None and reader.rows != at.log_rows.deltas:
                yield f"{who} got {reader.rows:,} of {at.log_rows.deltas:,}"


def _broken_verdict(seen: ClusterObservation, promise: str, wrong: Sequence[str]) -> Verdict:
    """Return the verdict on a broken promise: none if a power cut may have taken the rows, as the log's level
    does not wait for the disk.
    """
    what, log = "; ".join(wrong), seen.scenario.service.log
    cut = any(fault.what == "power_cut" for fault in seen.scenario.fault)
    if cut and log is not None and log.read_level is not AckLevel.DURABLE:
        return Verdict(promise, None, f"{what}: the log's read level, logged, permits this after a power cut")
    return Verdict(promise, False, what)


def _judge_order(seen: ClusterObservation) -> Verdict:
    wrong = [
        f"{count:,} deltas of {name}'s log come before their dependencies"
        for name, at in seen.sites.items()
        if at.log_rows is not None and (count := agreement.count_out_of_order(at.log_rows))
    ]
    wrong += [
        f"{sink_name} at {name} got deltas out of the log's order"
        for name, at in seen.sites.items()
        for sink_name, (_, sink) in at.site.sinks.items()
        if sink.inner.out_of_order
    ]
    wrong += [
        f"{reader.spec.name}, a reader at {name}, got deltas out of the log's order"
        for name, at in seen.sites.items()
        for reader in at.readers
        if reader.out_of_order
    ]
    wrong += [
        f"{' and '.join(group)} do not hold the same"
        for group in seen.groups
        if not _have_same_rows(seen, group)
    ]
    if wrong:
        return _broken_verdict(seen, "P2", wrong)
    several = [group for group in seen.groups if len(group) > 1]
    what = "each log keeps the order of each producer, each sink the log's"
    if several:
        what += "; " + "; ".join(f"{', '.join(group)} hold the same" for group in several)
    return Verdict("P2", True, what)


def _have_same_rows(seen: ClusterObservation, group: Sequence[str]) -> bool:
    held = [seen.sites[name].log_rows for name in group]
    keys = [one.keys() for one in held if one is not None]
    return len(keys) == len(group) and all(np.array_equal(one, keys[0]) for one in keys)


def _judge_single_effect(seen: ClusterObservation) -> Verdict:
    wrong = []
    for name, at in seen.sites.items():
        if at.log_rows is not None and (count := agreement.count_duplicates(at.log_rows)):
            wrong.append(f"{count:,} deltas are twice in {name}'s log")
        if count := agreement.count_double_acks(at.acknowledged):
            wrong.append(f"{name} acknowledged {count:,} deltas with the offset of another")
    if wrong:
        return _broken_verdict(seen, "P3", wrong)
    duplicates = sum(sink.duplicates for at in seen.sites.values() for _, sink in at.site.sinks.values())
    starts = sum(at.site.starts for at in seen.sites.values())
    what = f"after {starts - len(seen.sites)} restarts each delta is once in each log"
    if duplicates:
        what += f"; sinks got {duplicates:,} duplicates"
    return Verdict("P3", True, what)


def _judge_answers(seen: ClusterObservation) -> Verdict:
    outcomes = seen.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a retry time: {', '.join(outcomes.unexplained[:5])}"
        )
    if not seen.settled:
        waits = [name for name, at in seen.sites.items() if at.statistics is None]
        waits += [
            f"{sink} at {name}: {feed.state}"
            for name, at in seen.sites.items()
            for sink, feed in (at.statistics.sinks.items() if at.statistics else ())
            if feed.lag
        ]
        unanswered = f"{outcomes.unsettled:,} deltas without an answer"
        return Verdict("P5", False, f"after the deadline not at rest: {'; '.join([*waits, unanswered])}")
    if not outcomes.codes:
        return Verdict("P5", True, "every delta was answered, and none was refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a retry time: {codes}")


def _judge_faults(seen: ClusterObservation) -> Verdict:
    faults = [fault.what for fault in seen.scenario.fault]
    clocks = faults.count("clock_jumps") + sum(
        one.clock_ahead != 0 or one.clock_drift != 0 for one in seen.scenario.machine
    )
    ends = sum(at.site.starts for at in seen.sites.values()) - len(seen.sites)
    if not clocks and not ends and not seen.struck:
        return Verdict("P8", None, "no clock was wrong, no service restarted, no connection broke")
    summary = f"{clocks} wrong clocks, {ends} restarts, {seen.struck:,} network faults"
    ok = all(
        one.ok is not False
        for one in (_judge_durability(seen), _judge_order(seen), _judge_single_effect(seen))
    )
    return Verdict("P8", ok, summary + (": no order and no effect changed" if ok else ""))
