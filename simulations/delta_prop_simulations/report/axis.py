"""Axes of plots: positions and labels of round ticks; and formatting of values for people. Pure.

A tick is round in the displayed unit, which suits the largest value: 250 ms, not 0.25 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log10
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TICKS = 5
"""The approximate number of ticks, readable on a phone."""
DECADES_MAX = 6
"""The maximum number of decades of a logarithmic axis; values below are drawn at its lower end."""
FIGURES = 3
"""The number of digits of a formatted value."""

_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "bytes"))
_ROUND = (1.0, 2.0, 5.0, 10.0)
_ROUND_OF_60 = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`, in the data's unit; `unit` is the displayed one, `factor` its size."""

    low: float
    high: float
    unit: str
    ticks: tuple[tuple[float, str], ...]
    factor: float = 1.0
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value on the axis, 0 to 1; values outside are clamped."""
        if not self.logarithmic:
            return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        if value <= self.low:
            return 0.0
        return min(log10(value / self.low) / log10(self.high / self.low), 1.0)


def linear(high: float, unit: str, *, tight: bool = False) -> Axis:
    """Return an axis from 0 to the first tick at or above `high`, or with `tight` to `high` exactly."""
    high = high if high > 0 else 1.0
    factor, shown_unit = _scale(high, unit)
    step = _step(high / factor / TICKS, of_60=shown_unit in ("min", "s") and high >= 30) * factor
    end = high if tight else ceil(round(high / step, 9)) * step
    count = floor(end / step + 1e-9)
    ticks = tuple((number * step, _format_digits(number * step / factor)) for number in range(count + 1))
    return Axis(0.0, end, shown_unit, ticks, factor)


def logarithmic(values: Sequence[float], unit: str) -> Axis:
    """Return an axis of full powers of ten around the positive values, up to six."""
    above = [value for value in values if value > 0] or [1.0]
    last = ceil(round(log10(max(above)), 9))
    first = max(min(floor(round(log10(min(above)), 9)), last - 1), last - DECADES_MAX)
    ticks = tuple((10.0**power, _power(power, unit)) for power in range(first, last + 1))
    return Axis(10.0**first, 10.0**last, unit, ticks, logarithmic=True)


def format_value(value: float, unit: str) -> str:
    """Format a value with its unit, in three digits: `250 ms`, `1.5 MiB`, `9,880 deltas/s`."""
    factor, shown_unit = _scale(abs(value), unit)
    return f"{_format_digits(value / factor)} {shown_unit}".rstrip()


def _power(power: int, unit: str) -> str:
    """Format a power of ten; seconds stay seconds, since a minute is not a power of ten."""
    return f"{10**power:,} s" if unit == "s" and power >= 0 else format_value(10.0**power, unit)


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Return the factor and the unit that suit a value; at least the smallest unit; 0 keeps its unit."""
    scales = _SECONDS if unit == "s" else _BYTES if unit in ("bytes", "B") else ((1.0, unit),)
    if value == 0:
        return 1.0, scales[0][1] if len(scales) == 1 else unit
    # Minutes are used from two minutes on, hours likewise.
    for factor, name in scales:
        if value >= factor * (2 if name in ("h", "min") else 1):
            return factor, name
    return scales[-1]


def _step(least: float, *, of_60: bool) -> float:
    if of_60:
        for one in _ROUND_OF_60:
            if one >= least:
                return one
    power = 10.0 ** floor(log10(least))
    return next(one * power for one in _ROUND if one * power >= least * (1 - 1e-9))


def _format_digits(value: float) -> str:
    """Format three digits without trailing zeros; integers from 100 on, with commas."""
    if value == 0:
        return "0"
    places = max(FIGURES - 1 - floor(log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
