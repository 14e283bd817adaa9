"""The benchmark of several services: figures are ratios, and losses fail it."""

from __future__ import annotations

from benchmarks.scale import SERVICES, SETTINGS, ScaleMeasurement, _report


def test_figures_are_ratios_and_losses_fail() -> None:
    rounds = {
        (setting.name, count): [
            ScaleMeasurement(100.0 * count, 2.0, 1.0, 0),
            ScaleMeasurement(300.0 * count, 4.0, 1.0, 0),
        ]
        for setting in SETTINGS
        for count in SERVICES
    }
    results = _report(rounds, {1: [5.0], 2: [6.0]})
    name = SETTINGS[0].name
    assert results.figures[f"{name}: two against one, rate"]["median"] == 2.0
    assert results.figures[f"{name}: two against one, server CPU a delta"]["median"] == 1.0
    assert not results.has_failed
    rounds[name, 2] = [ScaleMeasurement(100.0, 2.0, 1.0, 1)] * 2
    assert _report(rounds, {1: [5.0], 2: [6.0]}).failures == [f"{name}: 2 deltas were lost, or came twice"]
