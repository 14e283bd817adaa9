"""Axes of plots, with ticks at round numbers of a unit that suits the largest value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

TICKS = 5
"""The approximate number of ticks, so that labels are readable on a phone."""
DECADES_MAX = 6
"""Maximum number of decades of a logarithmic axis; smaller values are drawn at its lower end."""
DIGITS = 3
"""The number of significant digits of a formatted value."""

_SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((1024.0**3, "GiB"), (1024.0**2, "MiB"), (1024.0, "KiB"), (1.0, "bytes"))
_ROUND = (1.0, 2.0, 5.0, 10.0)
_ROUND_OF_60 = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis in the data's unit. `unit`: the displayed unit; `factor`: its size in the data's unit."""

    low: float
    high: float
    unit: str
    ticks: tuple[tuple[float, str], ...]
    factor: float = 1.0
    logarithmic: bool = False

    def position(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1; values outside of the axis are clamped."""
        if not self.logarithmic:
            return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        if value <= self.low:
            return 0.0
        return min(log10(value / self.low) / log10(self.high / self.low), 1.0)


def linear_axis(high: float, unit: str, *, tight: bool = False) -> Axis:
    """Return an axis from 0 to the first tick that is not below `high`; with `tight`, to exactly `high`."""
    high = high if high > 0 else 1.0
    factor, shown_unit = _scale(high, unit)
    step = _step(high / factor / TICKS, of_60=shown_unit in ("min", "s") and high >= 30) * factor
    end = high if tight else ceil(round(high / step, 9)) * step
    count = floor(end / step + 1e-9)
    ticks = tuple((number * step, _format_digits(number * step / factor)) for number in range(count + 1))
    return Axis(0.0, end, shown_unit, ticks, factor)


def logarithmic_axis(values: Sequence[float], unit: str) -> Axis:
    """Return an axis of up to `DECADES_MAX` whole decades that includes the largest positive values."""
    positive = [value for value in values if value > 0] or [1.0]
    last = ceil(round(log10(max(positive)), 9))
    first = max(min(floor(round(log10(min(positive)), 9)), last - 1), last - DECADES_MAX)
    ticks = tuple((10.0**power, _power(power, unit)) for power in range(first, last + 1))
    return Axis(10.0**first, 10.0**last, unit, ticks, logarithmic=True)


def format_value(value: float, unit: str) -> str:
    """Return a value with its unit, in three digits: `250 ms`, `1.5 MiB`, `9,880 deltas/s`."""
    factor, shown_unit = _scale(abs(value), unit)
    return f"{_format_digits(value / factor)} {shown_unit}".rstrip()


def _power(power: int, unit: str) -> str:
    """Return the label of a power of ten; seconds are not shown as minutes, which are not powers of ten."""
    return f"{10**power:,} s" if unit == "s" and power >= 0 else format_value(10.0**power, unit)


def _scale(value: float, unit: str) -> tuple[float, str]:
    """Return the largest unit that suits a value, with its factor; for 0, the data's unit."""
    scales = _SECONDS if unit == "s" else _BYTES if unit in ("bytes", "B") else ((1.0, unit),)
    if value == 0:
        return 1.0, scales[0][1] if len(scales) == 1 else unit
    # Minutes are used from two minutes on, hours likewise.
    for factor, name in scales:
        if value >= factor * (2 if name in ("h", "min") else 1):
            return factor, name
    return scales[-1]


def _step(minimum: float, *, of_60: bool) -> float:
    """Return the smallest round number from `minimum` on. `of_60`: a round part of a minute or an hour."""
    if of_60:
        for step in _ROUND_OF_60:
            if step >= minimum:
                return step
    power = 10.0 ** floor(log10(minimum))
    return next(step * power for step in _ROUND if step * power >= minimum * (1 - 1e-9))


def _format_digits(value: float) -> str:
    """Return a number with three digits and no trailing zeros; from 100 on, as an integer with commas."""
    if value == 0:
        return "0"
    decimals = max(DIGITS - 1 - floor(log10(abs(value))), 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
