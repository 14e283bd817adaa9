"""Runs of small scenarios: equal for equal seeds; faults of a sink show in the measured values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.report import format_result, html
from delta_prop_simulations.scenarios.result import Result
from delta_prop_simulations.scenarios.run import RunInputs
from tests.simulations.scenarios.small_scenarios import TWO_SINKS, run_scenario, sink, verdict


def test_result_depends_only_on_seed() -> None:
    first, second, other = (run_scenario(seed=seed, duration=1.0) for seed in (3, 3, 4))
    assert replace(first, cpu_s=0.0) == replace(second, cpu_s=0.0)
    assert first.trace != other.trace


def test_every_offered_delta_is_applied_and_promises_hold() -> None:
    result = run_scenario()
    assert 2_400 < result.totals["offered"] < 3_600
    assert result.totals["acknowledged"] == result.totals["offered"]
    assert [each.applied for each in result.sinks] == [result.totals["offered"]] * 2
    assert not [failed for failed in result.verdicts if failed.ok is False]
    assert verdict(result, "P1")
    assert verdict(result, "P2")


def test_sink_lag_equals_its_call_times() -> None:
    result = run_scenario(TWO_SINKS.replace("noise = 0.3", 'distribution = "constant"'))
    quick, slow = sink(result, "quick").lag.quantiles, sink(result, "slow").lag.quantiles
    assert quick["p50"] == pytest.approx(0.001 + 20 * 10e-6, rel=0.05)
    assert 0.005 + 20 * 500e-6 < slow["p99"] < 0.2


def test_series_share_one_time_grid() -> None:
    result = run_scenario(duration=1.0)
    series = [*result.series, *result.sinks[0].series]
    assert all(len(line.times_s) == len(line.values) > 0 for line in series)
    assert {round(at_s / 0.05, 6) % 1 for line in series for at_s in line.times_s} == {0.0}


@pytest.mark.parametrize("what", ["fails", "pauses", "slows"])
def test_fault_of_one_sink_delays_only_that_sink(what: str) -> None:
    faults = f'faults = [{{from = "2s", for = "1s", what = "{what}", factor = 1000}}]'
    result = run_scenario(TWO_SINKS.replace("noise = 0.3", faults), duration=4.0)
    assert sink(result, "slow").lag.quantiles["max"] > 0.9
    assert sink(result, "quick").lag.quantiles["max"] < 0.1
    assert (sink(result, "slow").failures > 0) == (what == "fails")
    assert verdict(result, "P1")


def test_rejected_deltas_are_quarantined_and_others_applied() -> None:
    faults = 'faults = [{from = 1, for = 1, what = "rejects", share = 0.02}]'
    result = run_scenario(TWO_SINKS.replace("noise = 0.3", faults), duration=3.0)
    assert result.totals["offered"] - 500 < sink(result, "slow").applied < result.totals["offered"]
    assert verdict(result, "P1")
    assert "quarantine" in result.verdicts[0].what


def test_sink_with_full_quarantine_stops_and_reports_reason() -> None:
    faults = 'faults = [{from = 0, for = 3, what = "rejects", share = 0.1}]'
    text = TWO_SINKS.replace("noise = 0.3", faults) + "[service]\nquarantine_deltas_max = 5\n"
    result = run_scenario(text, duration=1.0)
    assert verdict(result, "P1")
    assert "slow is stopped, and reports the reason" in result.verdicts[0].what
    assert sink(result, "slow").applied < sink(result, "quick").applied


LOSES_CURSOR = (
    TWO_SINKS.replace(
        "noise = 0.3", 'on_log_full = "invalidate_cursor"\nfaults = [{from = 1, for = 60, what = "pauses"}]'
    )
    + "[service]\nlog_deltas_max = 1000\n"
)


def test_terminal_report_names_sink_with_invalidated_cursor() -> None:
    invalidated = run_scenario(LOSES_CURSOR, duration=4.0)
    result = Result("lost", "", 1, 4.0, [run_scenario(duration=1.0), invalidated])
    missed = int(invalidated.totals["offered"]) - sink(invalidated, "slow").applied
    assert missed > 1_000
    note = f"slow has an invalidated cursor: {missed:,} deltas did not reach it"
    text, page = format_result(result, width=200), html(result)
    row = next(line for line in text.splitlines() if line.startswith("  P1 "))
    assert row.split()[-3:] == ["kept", "kept,", "but"]
    assert f"kept, but: P1 by {invalidated.name!r}: " in text
    assert text.count("kept, but: ") == 1
    for report in (text, page):
        assert note in report


def test_checks_at_every_step_do_not_change_result() -> None:
    plain, checked = run_scenario(duration=1.0), run_scenario(duration=1.0, inputs=RunInputs(checks=True))
    assert checked.totals.pop("steps_checked") > 100
    assert replace(plain, cpu_s=0.0) == replace(checked, cpu_s=0.0)


def test_violation_found_by_a_check_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    violation = Violation("marks", "an offset went back")

    def fail(*_: object) -> None:
        raise violation

    monkeypatch.setattr(StepChecker, "check", fail)
    with pytest.raises(Violation) as caught:
        run_scenario(duration=1.0, inputs=RunInputs(checks=True))
    assert caught.value is violation


def test_full_queue_of_pacing_sink_refuses_with_code() -> None:
    text = TWO_SINKS.replace("noise = 0.3", "pacing = true\ncapacity_per_s = 200") + (
        "[service]\nqueue_deltas_max = 200\nmailbox_deltas_max = 100\n"
    )
    result = run_scenario(text, duration=2.0)
    assert result.totals["refusals: QUEUE_FULL"] > 0
    assert result.totals["acknowledged"] == result.totals["offered"]
    assert verdict(result, "P5")
    without_retries = run_scenario(text.replace("batch = 20", "batch = 20\nretry = false"), duration=2.0)
    assert without_retries.totals["refused"] == without_retries.totals["refusals: QUEUE_FULL"] > 0
    assert (
        without_retries.totals["refused"] + without_retries.totals["acknowledged"]
        == without_retries.totals["offered"]
    )


def test_log_on_disk_with_named_writers_loses_nothing() -> None:
    text = TWO_SINKS.replace("batch = 20", "batch = 20\nwriters = 3") + (
        "[service.log]\nsegment_bytes_max = 65536\nbytes_max = 10000000\nretention_bytes = 1000000\n"
    )
    result = run_scenario(text, duration=2.0)
    assert result.totals["acknowledged"] == result.totals["offered"] > 1_000
    assert verdict(result, "P1")
    assert result.acks.quantiles["p50"] > 0


def test_every_operation_can_be_sent() -> None:
    kinds = ["create", "dense", "sparse", "sparse_add", "scale", "offset", "delete", "metadata", "opaque"]
    mix = ", ".join(f"{kind} = 1" for kind in kinds)
    text = TWO_SINKS.replace("batch = 20", f"batch = 20\ndeltas = {{keys = 50, mix = {{{mix}}}}}")
    result = run_scenario(text, duration=1.0)
    assert result.totals["acknowledged"] == result.totals["offered"] > 500
