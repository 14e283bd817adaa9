"""Axes with round ticks, lines that keep their peaks, values with suitable units, an aligned table."""

from __future__ import annotations

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_simulations.report import format_result
from delta_prop_simulations.report.axis import format_value, linear_axis, logarithmic_axis
from delta_prop_simulations.report.plot import Line, Plot, svg, thin
from tests.simulations.report.results import result


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "s", "0 s"), (0.25, "s", "250 ms"), (90, "s", "90 s"), (7200, "s", "2 h"),
        (1536, "bytes", "1.5 KiB"),
        (9880.4, "deltas/s", "9,880 deltas/s"), (0.00033, "s", "330 µs"), (12.3456, "", "12.3"),
    ],
)  # fmt: skip
def test_value_is_formatted_in_a_suitable_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


@given(st.floats(1e-6, 1e12), st.sampled_from(["s", "bytes", "deltas", ""]))
def test_linear_axis_holds_highest_value_and_few_round_ticks(high: float, unit: str) -> None:
    axis = linear_axis(high, unit)
    assert axis.high >= high * (1 - 1e-9)
    assert axis.position(0.0) == 0.0
    assert isclose(axis.position(axis.high), 1.0)
    assert 2 <= len(axis.ticks) <= 12
    assert len({label for _, label in axis.ticks}) == len(axis.ticks)


@given(st.lists(st.floats(0, 1e9), max_size=20))
def test_logarithmic_axis_holds_every_value(values: list[float]) -> None:
    axis = logarithmic_axis(values, "s")
    assert all(0.0 <= axis.position(value) <= 1.0 for value in values)
    assert axis.low < axis.high


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=2_000), st.integers(10, 300))
def test_thinned_line_keeps_highest_and_lowest_point(ys: list[float], points_max: int) -> None:
    xs = [float(index) for index in range(len(ys))]
    points = thin(xs, ys, points_max)
    assert len(points) <= max(points_max, 2)
    assert max(y for _, y in points) == max(ys)
    assert min(y for _, y in points) == min(ys)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_line_has_a_gap_at_unknown_value() -> None:
    line = Line("a", 0, [0.0, 1.0, 2.0, 3.0], [1.0, float("nan"), 2.0, 3.0])
    drawn = svg(Plot("p", linear_axis(3.0, "s"), linear_axis(3.0, ""), (line,)))
    path = drawn.rpartition(' d="')[2]
    assert path.count("M") == 2


@pytest.mark.parametrize("width", [60, 100, 200])
def test_table_is_aligned_and_names_broken_promise(width: int) -> None:
    text = format_result(result(3, 2), width=width)
    assert "BROKEN: P3 by" in text
    numbers = [line for line in text.splitlines() if line.startswith("  applied  ")]
    assert numbers
    assert len({len(line) for line in numbers if line.count("60,000") == numbers[0].count("60,000")}) == 1
    for name in ("offered", "× real time", "lag, 99 %", "acknowledged after, median"):
        assert f"  {name}" in text
