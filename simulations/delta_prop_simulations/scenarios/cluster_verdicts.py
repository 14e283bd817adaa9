"""The verdict on each promise for a run with several machines, from their data once all are idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_simulations.scenarios import agreement
from delta_prop_simulations.scenarios.agreement import LogRows
from delta_prop_simulations.scenarios.result import Verdict
from delta_prop_simulations.scenarios.verdicts import CURSOR_INVALIDATED
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from delta_prop.api.statistics import Statistics
    from delta_prop_simulations.scenarios.clients import AckedRows, Reader
    from delta_prop_simulations.scenarios.offering import Outcomes
    from delta_prop_simulations.scenarios.scenario import Scenario
    from delta_prop_simulations.scenarios.site import SupervisedSite


@dataclass(frozen=True, slots=True)
class MachineObservation:
    """One machine at the end of the run. `log_rows`, `statistics`: None if no service runs there."""

    log_rows: LogRows | None
    statistics: Statistics | None
    site: SupervisedSite
    acknowledged: list[AckedRows]
    readers: list[Reader]


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    """All machines at the end of the run. `groups`: the groups of machines whose logs must hold the same
    rows. `network_fault_count`: the number of cuts and resets. `check_count`: the number of steps at which
    offsets and bounds were checked; a violation ends the run.
    """

    scenario: Scenario
    machines: dict[str, MachineObservation]
    groups: list[list[str]]
    outcomes: Outcomes
    is_idle: bool
    network_fault_count: int
    check_count: int


def verdicts(observed: ClusterObservation) -> list[Verdict]:
    """Return the verdicts P1 to P9, in order."""
    return [
        _judge_durability(observed),
        _judge_order(observed),
        _judge_single_effect(observed),
        _judge_bounds(observed),
        _judge_answers(observed),
        Verdict("P6", None, "priorities are only judged in a scenario with one service"),
        Verdict("P7", None, "no data was corrupted"),
        _judge_faults(observed),
        Verdict("P9", None, "no peer violated the protocol"),
    ]


def _judge_bounds(observed: ClusterObservation) -> Verdict:
    if not observed.check_count:
        return Verdict("P4", None, "offsets and bounds are checked with --checks only")
    return Verdict("P4", True, f"offsets and bounds held at every service, at {observed.check_count:,} steps")


def _judge_durability(observed: ClusterObservation) -> Verdict:
    acknowledged = sum(rows.count for machine in observed.machines.values() for rows in machine.acknowledged)
    if not acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    wrong = [*_log_losses(observed), *_sink_losses(observed), *_reader_errors(observed)]
    if wrong:
        return _broken_verdict(observed, "P1", wrong)
    if len(observed.machines) == 1:
        where = "in the log of the service"
    else:
        where = "in the log at their offsets, and in the log of every linked service"
    exceptions = [*_cursor_losses(observed)]
    receivers = "every other sink and every reader" if exceptions else "every sink and reader"
    what = f"{acknowledged:,} acknowledged deltas are {where}, and reached {receivers}"
    return Verdict("P1", True, "; ".join([what, *exceptions]), limited=bool(exceptions))


def _cursor_losses(observed: ClusterObservation) -> Iterator[str]:
    for name, machine in observed.machines.items():
        if machine.log_rows is None or machine.statistics is None:
            continue
        for sink_name, (_, sink) in machine.site.sinks.items():
            feed = machine.statistics.sinks[sink_name]
            if feed.state == CURSOR_INVALIDATED:
                missed = machine.log_rows.delta_count - sink.new_row_count - feed.quarantined
                yield f"{sink_name} at {name} has an invalidated cursor: {missed:,} deltas did not reach it"


def _log_losses(observed: ClusterObservation) -> Iterator[str]:
    for name, machine in observed.machines.items():
        if machine.log_rows is None:
            yield f"{name} has no service: {'; '.join(machine.site.errors[-1:]) or 'it was not restarted'}"
        elif lost := agreement.count_missing(
            machine.log_rows, machine.acknowledged
        ) + agreement.count_double_acks(machine.acknowledged):
            yield f"{name} lacks {lost:,} acknowledged deltas"


def _sink_losses(observed: ClusterObservation) -> Iterator[str]:
    for name, machine in observed.machines.items():
        if machine.log_rows is None or machine.statistics is None:
            continue
        for sink_name, (spec, sink) in machine.site.sinks.items():
            feed = machine.statistics.sinks[sink_name]
            done_count = sink.new_row_count + feed.quarantined
            delta_count = machine.log_rows.delta_count
            if feed.state != CURSOR_INVALIDATED and spec.topics == ("*",) and done_count != delta_count:
                yield f"{sink_name} at {name} has applied {done_count:,} of {delta_count:,}: {feed.state}"


def _reader_errors(observed: ClusterObservation) -> Iterator[str]:
    for name, machine in observed.machines.items():
        for reader in [] if machine.log_rows is None else machine.readers:
            assert machine.log_rows is not None
            who = f"{reader.spec.name}, a reader at {name},"
            if reader.failure is not None:
                yield f"{who} was refused: {reader.failure}"
            if lost := agreement.count_lost_deliveries(machine.log_rows, reader.delivered):
                yield f"{who} got {lost:,} deltas that were lost later"
            delta_count = machine.log_rows.delta_count
            if reader.spec.topics == ("*",) and reader.failure is None and reader.lag.count != delta_count:
                yield f"{who} got {reader.lag.count:,} of {delta_count:,}"


def _broken_verdict(observed: ClusterObservation, promise: str, wrong: Sequence[str]) -> Verdict:
    """Return a broken promise's verdict: None if the read level permits a power cut to remove rows."""
    what, log = "; ".join(wrong), observed.scenario.service.log
    cut = any(fault.what == "power_cut" for fault in observed.scenario.fault)
    if cut and log is not None and log.read_level is not AckLevel.DURABLE:
        return Verdict(promise, None, f"{what}: the log's read level, logged, permits this after a power cut")
    return Verdict(promise, False, what)


def _judge_order(observed: ClusterObservation) -> Verdict:
    wrong = [
        f"{count:,} deltas of {name}'s log come before their dependencies"
        for name, machine in observed.machines.items()
        if machine.log_rows is not None and (count := agreement.count_out_of_order(machine.log_rows))
    ]
    wrong += [
        f"{sink_name} at {name} got deltas out of the log's order"
        for name, machine in observed.machines.items()
        for sink_name, (_, sink) in machine.site.sinks.items()
        if sink.inner.counts.out_of_order
    ]
    wrong += [
        f"{reader.spec.name}, a reader at {name}, got deltas out of the log's order"
        for name, machine in observed.machines.items()
        for reader in machine.readers
        if reader.out_of_order
    ]
    wrong += [
        f"{' and '.join(group)} do not hold the same rows"
        for group in observed.groups
        if not _have_same_rows(observed, group)
    ]
    if wrong:
        return _broken_verdict(observed, "P2", wrong)
    linked = [group for group in observed.groups if len(group) > 1]
    what = "each log keeps the order of each producer, each sink that of its log"
    if linked:
        what += "; " + "; ".join(f"{', '.join(group)} hold the same rows" for group in linked)
    return Verdict("P2", True, what)


def _have_same_rows(observed: ClusterObservation, group: Sequence[str]) -> bool:
    logs = [observed.machines[name].log_rows for name in group]
    keys = [log.keys() for log in logs if log is not None]
    return len(keys) == len(group) and all(np.array_equal(other, keys[0]) for other in keys)


def _judge_single_effect(observed: ClusterObservation) -> Verdict:
    wrong = []
    for name, machine in observed.machines.items():
        if machine.log_rows is not None and (count := agreement.count_duplicates(machine.log_rows)):
            wrong.append(f"{count:,} deltas occur twice in {name}'s log")
        if count := agreement.count_double_acks(machine.acknowledged):
            wrong.append(f"{name} acknowledged {count:,} deltas with the offset of another")
    if wrong:
        return _broken_verdict(observed, "P3", wrong)
    duplicates = sum(
        sink.duplicate_count
        for machine in observed.machines.values()
        for _, sink in machine.site.sinks.values()
    )
    starts = sum(machine.site.start_count for machine in observed.machines.values())
    what = f"after {starts - len(observed.machines)} restarts each delta occurs once in each log"
    if duplicates:
        what += f"; sinks got {duplicates:,} duplicates"
    return Verdict("P3", True, what)


def _judge_answers(observed: ClusterObservation) -> Verdict:
    outcomes = observed.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a retry time: {', '.join(outcomes.unexplained[:5])}"
        )
    if not observed.is_idle:
        unfinished = [name for name, machine in observed.machines.items() if machine.statistics is None]
        unfinished += [
            f"{sink} at {name}: {feed.state}"
            for name, machine in observed.machines.items()
            for sink, feed in (machine.statistics.sinks.items() if machine.statistics else ())
            if feed.lag
        ]
        unanswered = f"{outcomes.unsettled:,} deltas without an answer"
        return Verdict("P5", False, f"not idle by the deadline: {'; '.join([*unfinished, unanswered])}")
    if not outcomes.codes:
        return Verdict("P5", True, "every delta was answered, and none was refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a retry time: {codes}")


def _judge_faults(observed: ClusterObservation) -> Verdict:
    faults = [fault.what for fault in observed.scenario.fault]
    wrong_clocks = faults.count("clock_jumps") + sum(
        machine.clock_ahead != 0 or machine.clock_drift != 0 for machine in observed.scenario.machine
    )
    starts = sum(machine.site.start_count for machine in observed.machines.values())
    restarts = starts - len(observed.machines)
    if not wrong_clocks and not restarts and not observed.network_fault_count:
        return Verdict("P8", None, "no clock was wrong, no service restarted, no connection broke")
    summary = (
        f"{wrong_clocks} wrong clocks, {restarts} restarts, {observed.network_fault_count:,} network faults"
    )
    ok = all(
        verdict.ok is not False
        for verdict in (_judge_durability(observed), _judge_order(observed), _judge_single_effect(observed))
    )
    return Verdict("P8", ok, summary + (": order and effects were unaffected" if ok else ""))
