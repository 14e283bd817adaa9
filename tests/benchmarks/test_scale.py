"""The benchmark of several partitions: figures are ratios, and losses fail it."""

from __future__ import annotations

from benchmarks.scale import NAMES, PARTITIONS, ProgramMeasurement, _report


def test_figures_are_ratios_and_losses_fail() -> None:
    rounds = {
        count: [ProgramMeasurement(4.0 * count, 2.0, 0), ProgramMeasurement(6.0 * count, 4.0, 0)]
        for count in PARTITIONS
    }
    results = _report(rounds)
    assert results.figures["two partitions / one: program"]["median"] == 2.0
    assert results.figures["two partitions / one: server"]["median"] == 1.0
    assert results.figures[f"{NAMES[1]}: program"]["median"] == 5.0
    assert not results.has_failed
    rounds[2] = [ProgramMeasurement(8.0, 2.0, 1)] * 2
    assert _report(rounds).failures == [f"{NAMES[2]}: 2 deltas were not acknowledged"]
