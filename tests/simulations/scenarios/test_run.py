"""Runs of small scenarios: the same for the same seed, what befalls a sink is seen in what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.report import html, table
from delta_prop_simulations.scenarios.result import Result
from delta_prop_simulations.scenarios.run import RunInputs
from tests.simulations.scenarios.scenes import TWO_SINKS, ran, sink, verdict


def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    first, again, other = (ran(seed=seed, duration=1.0) for seed in (3, 3, 4))
    assert replace(first, cpu_s=0.0) == replace(again, cpu_s=0.0)
    assert first.trace != other.trace


def test_all_that_was_offered_is_applied_and_every_promise_kept() -> None:
    result = ran()
    assert 2_400 < result.totals["offered"] < 3_600
    assert result.totals["acknowledged"] == result.totals["offered"]
    assert [one.applied for one in result.sinks] == [result.totals["offered"]] * 2
    assert not [one for one in result.verdicts if one.ok is False]
    assert verdict(result, "P1")
    assert verdict(result, "P2")


def test_a_sink_is_as_late_as_its_calls_take() -> None:
    result = ran(TWO_SINKS.replace("noise = 0.3", 'distribution = "constant"'))
    quick, slow = sink(result, "quick").lag.quantiles, sink(result, "slow").lag.quantiles
    assert quick["p50"] == pytest.approx(0.001 + 20 * 10e-6, rel=0.05)
    assert 0.005 + 20 * 500e-6 < slow["p99"] < 0.2


def test_series_are_looked_at_on_one_grid() -> None:
    result = ran(duration=1.0)
    series = [*result.series, *result.sinks[0].series]
    assert all(len(one.times_s) == len(one.values) > 0 for one in series)
    assert {round(at_s / 0.05, 6) % 1 for one in series for at_s in one.times_s} == {0.0}


@pytest.mark.parametrize("what", ["fails", "pauses", "slows"])
def test_what_befalls_a_sink_for_a_second_makes_it_late_and_nobody_else(what: str) -> None:
    befallen = f'faults = [{{from = "2s", for = "1s", what = "{what}", factor = 1000}}]'
    result = ran(TWO_SINKS.replace("noise = 0.3", befallen), duration=4.0)
    assert sink(result, "slow").lag.quantiles["max"] > 0.9
    assert sink(result, "quick").lag.quantiles["max"] < 0.1
    assert (sink(result, "slow").failures > 0) == (what == "fails")
    assert verdict(result, "P1")


def test_rejected_deltas_stand_in_the_quarantine_and_the_rest_is_applied() -> None:
    befallen = 'faults = [{from = 1, for = 1, what = "rejects", share = 0.02}]'
    result = ran(TWO_SINKS.replace("noise = 0.3", befallen), duration=3.0)
    assert result.totals["offered"] - 500 < sink(result, "slow").applied < result.totals["offered"]
    assert verdict(result, "P1")
    assert "quarantine" in result.verdicts[0].what


def test_a_sink_whose_quarantine_is_full_stands_and_says_so() -> None:
    befallen = 'faults = [{from = 0, for = 3, what = "rejects", share = 0.1}]'
    text = TWO_SINKS.replace("noise = 0.3", befallen) + "[service]\nquarantine_deltas_max = 5\n"
    result = ran(text, duration=1.0)
    assert verdict(result, "P1")
    assert "slow is stopped, and reports the reason" in result.verdicts[0].what
    assert sink(result, "slow").applied < sink(result, "quick").applied


LOSES_ITS_PLACE = (
    TWO_SINKS.replace(
        "noise = 0.3", 'on_log_full = "invalidate_cursor"\nfaults = [{from = 1, for = 60, what = "pauses"}]'
    )
    + "[service]\nlog_deltas_max = 1000\n"
)


def test_a_sink_that_lost_its_place_stands_in_the_terminal_report_as_on_the_page() -> None:
    lost = ran(LOSES_ITS_PLACE, duration=4.0)
    result = Result("lost", "", 1, 4.0, [ran(duration=1.0), lost])
    missed = int(lost.totals["offered"]) - sink(lost, "slow").applied
    assert missed > 1_000
    told = f"slow has an invalidated cursor: {missed:,} deltas did not come to it"
    text, page = table(result, width=200), html(result)
    row = next(line for line in text.splitlines() if line.startswith("  P1 "))
    assert row.split()[-3:] == ["kept", "kept,", "but"]
    assert f"kept, but: P1 by {lost.name!r}: " in text
    assert text.count("kept, but: ") == 1
    for report in (text, page):
        assert told in report


def test_checks_at_every_step_change_nothing() -> None:
    plain, checked = ran(duration=1.0), ran(duration=1.0, needs=RunInputs(checks=True))
    assert checked.totals.pop("steps_checked") > 100
    assert replace(plain, cpu_s=0.0) == replace(checked, cpu_s=0.0)


def test_a_check_that_finds_something_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Violation("marks", "one went back")

    def look(*_: object) -> None:
        raise found

    monkeypatch.setattr(StepChecker, "check", look)
    with pytest.raises(Violation) as raised:
        ran(duration=1.0, needs=RunInputs(checks=True))
    assert raised.value is found


def test_a_pacing_sink_holds_the_source_back_and_a_full_queue_refuses_with_a_code() -> None:
    text = TWO_SINKS.replace("noise = 0.3", "pacing = true\ncapacity_per_s = 200") + (
        "[service]\nqueue_deltas_max = 200\nmailbox_deltas_max = 100\n"
    )
    result = ran(text, duration=2.0)
    assert result.totals["refusals: QUEUE_FULL"] > 0
    assert result.totals["acknowledged"] == result.totals["offered"]
    assert verdict(result, "P5")
    given_up = ran(text.replace("batch = 20", "batch = 20\nretry = false"), duration=2.0)
    assert given_up.totals["refused"] == given_up.totals["refusals: QUEUE_FULL"] > 0
    assert given_up.totals["refused"] + given_up.totals["acknowledged"] == given_up.totals["offered"]


def test_a_log_on_disk_and_named_writers_bring_all_of_it_too() -> None:
    text = TWO_SINKS.replace("batch = 20", "batch = 20\nwriters = 3") + (
        "[service.log]\nsegment_bytes_max = 65536\nbytes_max = 10000000\nretention_bytes = 1000000\n"
    )
    result = ran(text, duration=2.0)
    assert result.totals["acknowledged"] == result.totals["offered"] > 1_000
    assert verdict(result, "P1")
    assert result.acks.quantiles["p50"] > 0


def test_every_operation_can_be_sent() -> None:
    kinds = ["create", "dense", "sparse", "sparse_add", "scale", "offset", "delete", "metadata", "opaque"]
    mix = ", ".join(f"{kind} = 1" for kind in kinds)
    text = TWO_SINKS.replace("batch = 20", f"batch = 20\ndeltas = {{keys = 50, mix = {{{mix}}}}}")
    result = ran(text, duration=1.0)
    assert result.totals["acknowledged"] == result.totals["offered"] > 500
