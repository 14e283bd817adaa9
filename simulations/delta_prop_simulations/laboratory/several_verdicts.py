"""The verdict per promise of a run with machines, from what everybody holds at rest.

A promise that the scenario never put to the test has no verdict; nothing is claimed for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_prop_simulations.laboratory import agreement
from delta_prop_simulations.laboratory.result import Verdict
from delta_prop_simulations.laboratory.verdicts import LOST_PLACE
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop.statistics import Statistics
    from delta_prop_simulations.laboratory.agreement import Held
    from delta_prop_simulations.laboratory.clients import Acknowledged
    from delta_prop_simulations.laboratory.offering import Outcomes
    from delta_prop_simulations.laboratory.readers import Reader
    from delta_prop_simulations.laboratory.scenario import Scenario
    from delta_prop_simulations.laboratory.supervised import Supervised


@dataclass(frozen=True, slots=True)
class SeenAt:
    """One machine at the end. `held`, `statistics` None: no service runs there."""

    held: Held | None
    statistics: Statistics | None
    site: Supervised
    acknowledged: list[Acknowledged]
    readers: list[Reader]


@dataclass(frozen=True, slots=True)
class SeenTogether:
    """All of them. `groups`: the machines that are to hold the same. `struck`: faults of the network.
    `checked`: steps at which marks and bounds were looked at; where one does not hold the run ends.
    """

    scenario: Scenario
    sites: dict[str, SeenAt]
    groups: list[list[str]]
    outcomes: Outcomes
    settled: bool
    struck: int
    checked: int


def verdicts(seen: SeenTogether) -> list[Verdict]:
    """P1 to P9, in order."""
    return [
        _kept(seen),
        _order(seen),
        _once(seen),
        _bounded(seen),
        _answered(seen),
        Verdict("P6", None, "priorities are looked at where a scenario has one service"),
        Verdict("P7", None, "nothing was damaged"),
        _unmoved(seen),
        Verdict("P9", None, "nobody sent what breaks the protocol"),
    ]


def _bounded(seen: SeenTogether) -> Verdict:
    if not seen.checked:
        return Verdict("P4", None, "marks and bounds are looked at with --checks")
    return Verdict("P4", True, f"marks and bounds held at every service, at {seen.checked:,} steps")


def _kept(seen: SeenTogether) -> Verdict:
    acknowledged = sum(one.count for at in seen.sites.values() for one in at.acknowledged)
    if not acknowledged:
        return Verdict("P1", None, "nothing was acknowledged")
    wrong = [*_lost(seen), *_unapplied(seen), *_misled(seen)]
    if wrong:
        return _broken(seen, "P1", wrong)
    where = (
        "at its service" if len(seen.sites) == 1 else "where it was said, and at every service linked to it"
    )
    without = [*_without_place(seen)]
    whom = "every other sink and every reader" if without else "every sink and reader"
    what = f"{acknowledged:,} acknowledged deltas stand {where}, and came to {whom}"
    return Verdict("P1", True, "; ".join([what, *without]), limited=bool(without))


def _without_place(seen: SeenTogether) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.held is None or at.statistics is None:
            continue
        for sink_name, (_, sink) in at.site.sinks.items():
            feed = at.statistics.sinks[sink_name]
            if feed.state == LOST_PLACE:
                missed = at.held.deltas - sink.fresh - feed.quarantined
                yield (
                    f"{sink_name} at {name} lost its place, and says so: {missed:,} deltas did not come to it"
                )


def _lost(seen: SeenTogether) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.held is None:
            yield f"{name} has no service: {'; '.join(at.site.told[-1:]) or 'it did not come back'}"
        elif lost := agreement.missing(at.held, at.acknowledged) + agreement.told_twice(at.acknowledged):
            yield f"{name} lacks {lost:,} deltas that it had acknowledged"


def _unapplied(seen: SeenTogether) -> Iterator[str]:
    for name, at in seen.sites.items():
        if at.held is None or at.statistics is None:
            continue
        for sink_name, (spec, sink) in at.site.sinks.items():
            feed = at.statistics.sinks[sink_name]
            told = sink.fresh + feed.quarantined
            if feed.state != LOST_PLACE and spec.topics == ("*",) and told != at.held.deltas:
                yield f"{sink_name} at {name} has applied {told:,} of {at.held.deltas:,}: {feed.state}"


def _misled(seen: SeenTogether) -> Iterator[str]:
    for name, at in seen.sites.items():
        for reader in [] if at.held is None else at.readers:
            assert at.held is not None
            who = f"{reader.spec.name}, a reader at {name},"
            if reader.failure is not None:
                yield f"{who} was sent away: {reader.failure}"
            if count := agreement.unknown(at.held, reader.shown):
                yield f"{who} was shown {count:,} deltas that were taken back"
            if reader.spec.topics == ("*",) and reader.failure is None and reader.rows != at.held.deltas:
                yield f"{who} got {reader.rows:,} of {at.held.deltas:,}"


def _broken(seen: SeenTogether, promise: str, wrong: Sequence[str]) -> Verdict:
    """A promise that does not hold. Where a power cut may have taken what was acknowledged or shown, as
    nobody had to wait for the disk, it was not given.
    """
    what, log = "; ".join(wrong), seen.scenario.service.log
    cut = any(fault.what == "power_cut" for fault in seen.scenario.fault)
    if cut and log is not None and log.level is not AckLevel.DURABLE:
        return Verdict(promise, None, f"{what}: after a power cut the log's level, logged, allows it")
    return Verdict(promise, False, what)


def _order(seen: SeenTogether) -> Verdict:
    wrong = [
        f"{count:,} deltas of {name}'s log come before what they depend on"
        for name, at in seen.sites.items()
        if at.held is not None and (count := agreement.out_of_order(at.held))
    ]
    wrong += [
        f"{sink_name} at {name} had deltas out of the log's order"
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
        f"{' and '.join(group)} do not hold the same" for group in seen.groups if not _agree(seen, group)
    ]
    if wrong:
        return _broken(seen, "P2", wrong)
    several = [group for group in seen.groups if len(group) > 1]
    what = "each log keeps the order of each producer, each sink the log's"
    if several:
        what += "; " + "; ".join(f"{', '.join(group)} hold the same" for group in several)
    return Verdict("P2", True, what)


def _agree(seen: SeenTogether, group: Sequence[str]) -> bool:
    held = [seen.sites[name].held for name in group]
    keys = [one.keys() for one in held if one is not None]
    return len(keys) == len(group) and all(np.array_equal(one, keys[0]) for one in keys)


def _once(seen: SeenTogether) -> Verdict:
    wrong = []
    for name, at in seen.sites.items():
        if at.held is not None and (count := agreement.repeated(at.held)):
            wrong.append(f"{count:,} deltas stand twice in {name}'s log")
        if count := agreement.told_twice(at.acknowledged):
            wrong.append(f"{name} acknowledged {count:,} deltas under the place of another")
    if wrong:
        return _broken(seen, "P3", wrong)
    again = sum(sink.again for at in seen.sites.values() for _, sink in at.site.sinks.values())
    starts = sum(at.site.starts for at in seen.sites.values())
    what = f"after {starts - len(seen.sites)} restarts each delta stands once in each log"
    if again:
        what += f"; sinks were brought {again:,} again, which they had"
    return Verdict("P3", True, what)


def _answered(seen: SeenTogether) -> Verdict:
    outcomes = seen.outcomes
    if outcomes.unexplained:
        return Verdict(
            "P5", False, f"refused without a reason or a time: {', '.join(outcomes.unexplained[:5])}"
        )
    if not seen.settled:
        waits = [name for name, at in seen.sites.items() if at.statistics is None]
        waits += [
            f"{sink} at {name}: {feed.state}"
            for name, at in seen.sites.items()
            for sink, feed in (at.statistics.sinks.items() if at.statistics else ())
            if feed.lag
        ]
        open_ = f"{outcomes.unsettled:,} deltas without an answer"
        return Verdict("P5", False, f"after the deadline not at rest: {'; '.join([*waits, open_])}")
    if not outcomes.codes:
        return Verdict("P5", True, "everything was answered, and nothing refused")
    codes = ", ".join(f"{code} {count:,}" for code, count in sorted(outcomes.codes.items()))
    return Verdict("P5", True, f"every refusal had a code, a reason and a time: {codes}")


def _unmoved(seen: SeenTogether) -> Verdict:
    faults = [fault.what for fault in seen.scenario.fault]
    clocks = faults.count("clock_jumps") + sum(
        one.clock_ahead != 0 or one.clock_drift != 0 for one in seen.scenario.machine
    )
    ends = sum(at.site.starts for at in seen.sites.values()) - len(seen.sites)
    if not clocks and not ends and not seen.struck:
        return Verdict("P8", None, "no clock was wrong, nothing was started anew, no connection broke")
    told = f"{clocks} wrong clocks, {ends} restarts, {seen.struck:,} faults of the network"
    ok = all(one.ok is not False for one in (_kept(seen), _order(seen), _once(seen)))
    return Verdict("P8", ok, told + (": no order and no effect changed" if ok else ""))
