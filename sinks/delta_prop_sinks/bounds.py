"""Bounds of what sinks are made with; who is wrong is told the name, the value and the bound."""

from __future__ import annotations

from delta_prop_wire.errors import UsageError


def check_at_least(least: int, **values: float) -> None:
    """Check that none of these is below `least`. Raises UsageError."""
    for name, value in values.items():
        if not value >= least:
            raise UsageError(f"{name} {value}: give at least {least}")


def check_above_zero(**values: float) -> None:
    """Check that each of these is above 0. Raises UsageError."""
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} {value}: give a number above 0")
