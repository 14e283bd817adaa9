"""Scenarios with machines: faults change no verdict, and planted defects are found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop.client import Producer
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_simulations.scenarios import agreement
from delta_prop_simulations.scenarios.clients import AckedRows
from delta_prop_simulations.scenarios.reading import read_setups
from delta_prop_simulations.scenarios.run import RunInputs, run
from delta_prop_simulations.scenarios.sinks import PersistentSink
from delta_prop_wire.delta import make_origin, producer_id_of
from tests.simulations.scenarios.test_topology import TWO_MACHINES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop.calls.outcomes import PublishAck
    from delta_prop_simulations.scenarios.result import Alternative
    from delta_prop_sinks.sink import Delivery
    from delta_prop_wire.delta import Delta

READERS = """
[[reader]]
name = "late"
machine = "west"
from = "1s"
[[reader]]
name = "staller"
machine = "west"
stall = [{from = "500ms", for = "1s"}]
"""
DURATION_S = 6
SHORT = TWO_MACHINES.replace('duration = "6s"', 'duration = "1s"\nseed = 1')


def run_text(text: str = TWO_MACHINES, *, checks: bool = False) -> Alternative:
    return run(read_setups(text)[0], RunInputs(checks=checks))


def verdict(result: Alternative, promise: str) -> bool | None:
    """Return the verdict on a promise: True if it was kept, None if it was not tested."""
    (only_verdict,) = (verdict for verdict in result.verdicts if verdict.promise == promise)
    return only_verdict.ok


def shorten(text: str) -> str:
    """Let the scenario end after the faults of its first second."""
    return text.replace('duration = "6s"', 'duration = "2s"')


def with_faults(*faults: str) -> str:
    return TWO_MACHINES[: TWO_MACHINES.index("[[fault]]")] + "".join(
        f"[[fault]]\n{fault}\n" for fault in faults
    )


def test_partitioned_and_killed_services_converge() -> None:
    result = run_text(checks=True)
    totals = result.totals
    assert totals["acknowledged"] == totals["offered"] > 400
    assert (totals["service_starts"], totals["dropped"]) == (3, 0)
    assert 1.0 <= totals["service_down_s"] < 1.5
    assert {
        verdict.promise: verdict.ok for verdict in result.verdicts if verdict.ok is not None
    } == dict.fromkeys(("P1", "P2", "P3", "P4", "P5", "P8"), True)
    sinks = {sink.name: sink for sink in result.sinks}
    assert sinks.keys() == {"east/index", "west/index", "west → east"}
    assert {sink.applied for sink in sinks.values()} == {totals["offered"]}
    assert sinks["west → east"].lag.quantiles["max"] > 0.5  # while the service was down
    assert 0 < sinks["west → east"].within_1s_per_s * DURATION_S < totals["offered"]
    names = {series.name for series in result.series}
    assert {"east up", "east holds", "west lacks"} <= names
    assert "west up" not in names  # no fault hit this machine


def test_same_seed_gives_the_same_run() -> None:
    other_seed = run_text(SHORT.replace("seed = 1", "seed = 2"))
    assert run_text(SHORT).trace == run_text(SHORT).trace != other_seed.trace


def test_power_cut_after_ack_loses_no_durable_delta() -> None:
    power = 'from = "1s"\nfor = "500ms"\nwhat = "power_cut"\nmachine = "west"\nafter_ack = true'
    result = run_text(shorten(with_faults(power)) + READERS)
    sinks = {sink.name: sink for sink in result.sinks}
    assert sinks["late"].applied == sinks["staller"].applied == result.totals["offered"]
    assert sinks["staller"].lag.quantiles["max"] > 0.9
    assert [verdict.ok for verdict in result.verdicts if verdict.promise in {"P1", "P2", "P3"}] == [True] * 3
    assert result.totals["client_reconnects"] > 0


def test_power_cut_may_lose_logged_deltas_and_reports_it() -> None:
    power = 'from = "1s"\nfor = "500ms"\nwhat = "power_cut"\nmachine = "west"\nafter_ack = true'
    text = (shorten(with_faults(power)) + READERS).replace("log = {}", 'log = {read_level = "logged"}')
    result = run_text(text.replace('machine = "west"\nrate', 'machine = "west"\nack_level = "logged"\nrate'))
    (verdict_of_p1,) = (verdict for verdict in result.verdicts if verdict.promise == "P1")
    assert verdict_of_p1.ok is None
    assert "the log's read level, logged, permits this" in verdict_of_p1.what
    assert "late, a reader at west, was " in verdict_of_p1.what


def test_failing_full_and_slow_disks_lose_nothing() -> None:
    result = run_text(
        with_faults(
            'from = "1s"\nfor = "1s"\nwhat = "disk_fails"\nmachine = "west"',
            'from = "2500ms"\nfor = "1s"\nwhat = "disk_full"\nmachine = "west"',
            'from = "4s"\nfor = "1s"\nwhat = "disk_slow"\nmachine = "east"\nfactor = 100',
            'from = "4s"\nwhat = "clock_jumps"\nby = "-1h"\nmachine = "west"',
            'from = "4500ms"\nwhat = "resets"\nmachine = "west"',
            'from = "5s"\nwhat = "restart"\nmachine = "east"',
        )
    )
    assert {verdict(result, promise) for promise in ("P1", "P2", "P3", "P5", "P8")} == {True}
    assert result.totals["acknowledged"] == result.totals["offered"]


# --- planted defects are found


def test_lost_deltas_and_lost_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, count = Producer.publish, PersistentSink._count

    async def misreport(self: Producer, *deltas: Delta, **options: object) -> PublishAck:
        published = await publish(self, *deltas, **options)  # type: ignore[arg-type]
        assert published.offset is not None
        return replace(published, offset=published.offset + 1)

    def forget_first(self: PersistentSink, deliveries: list[Delivery], end: int) -> None:
        if deliveries[0].first_offset:
            count(self, deliveries, end)

    monkeypatch.setattr(Producer, "publish", misreport)
    monkeypatch.setattr(PersistentSink, "_count", forget_first)
    (verdict_of_p1,) = (verdict for verdict in run_text(SHORT).verdicts if verdict.promise == "P1")
    assert verdict_of_p1.ok is False
    assert "west lacks 1 acknowledged deltas" in verdict_of_p1.what
    assert "index at east has applied" in verdict_of_p1.what


def log_rows(*rows: tuple[int, int, int, int]) -> agreement.LogRows:
    columns: list[NDArray[np.uint64]] = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    return agreement.LogRows(*columns, np.zeros(len(rows), bool))


def test_logs_are_compared_row_by_row() -> None:
    local = make_origin(producer_id_of("me"), 2)
    first = log_rows((0, local, 1, 1), (1, local, 2, 2), (2, 9, 1, 2))
    assert first.delta_count == 3
    assert (agreement.count_duplicates(first), agreement.count_out_of_order(first)) == (0, 0)
    second = log_rows((0, 9, 1, 2), (1, local, 1, 1), (2, local, 2, 2))
    assert np.array_equal(first.keys(), second.keys())
    assert not np.array_equal(first.keys(), log_rows((0, 9, 1, 3), (1, local, 1, 1), (2, local, 2, 2)).keys())
    assert agreement.count_out_of_order(log_rows((0, local, 2, 2), (1, 9, 1, 3), (2, local, 1, 1))) == 1
    assert agreement.count_duplicates(log_rows((0, local, 1, 1), (1, local, 1, 4))) == 1
    assert agreement.count_missing(first, [AckedRows("me", 0, 2)]) == 0
    # One row is of another producer, one is beyond the end of the log.
    assert agreement.count_missing(first, [AckedRows("me", 1, 3)]) == 2
    assert (
        agreement.count_lost_deliveries(
            first, [agreement.DeliveredDelta(0, local, 1), agreement.DeliveredDelta(2, 9, 1)]
        )
        == 0
    )
    assert (
        agreement.count_lost_deliveries(
            first, [agreement.DeliveredDelta(0, local, 2), agreement.DeliveredDelta(3, 9, 2)]
        )
        == 2
    )
    assert agreement.count_double_acks([AckedRows("me", 0, 2), AckedRows("me", 1, 1)]) == 1


def test_step_exceeding_a_bound_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check = StepChecker.check

    def exceed_bound(self: StepChecker, service: object) -> None:
        check(self, service)  # type: ignore[arg-type]
        require(self.check_count < 50, "bounds", "more than there may be")

    monkeypatch.setattr(StepChecker, "check", exceed_bound)
    with pytest.raises(Violation, match="more than there may be"):
        run_text(SHORT, checks=True)
