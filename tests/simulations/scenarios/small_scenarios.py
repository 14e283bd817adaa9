"""Small scenarios for tests: a source, two sinks, a few seconds."""

from __future__ import annotations

from delta_prop_simulations.scenarios.reading import Setup, read_setups
from delta_prop_simulations.scenarios.result import Alternative, SinkResult
from delta_prop_simulations.scenarios.run import RunInputs, run

TWO_SINKS = """
name = "two sinks"
duration = "3s"
[[source]]
name = "web"
rate = 1000
batch = 20
[[sink]]
name = "quick"
per_call_ms = 1.0
[[sink]]
name = "slow"
per_call_ms = 5.0
per_delta_us = 500.0
noise = 0.3
"""


def setup(text: str = TWO_SINKS, **overrides: float) -> Setup:
    """Return the first setup of a scenario, the only one if it has no alternatives."""
    return read_setups(text, **overrides)[0]  # type: ignore[arg-type]


def run_scenario(
    text: str = TWO_SINKS, *, inputs: RunInputs | None = None, **overrides: float
) -> Alternative:
    return run(setup(text, **overrides), inputs)


def sink(result: Alternative, name: str) -> SinkResult:
    """Return the result of one sink."""
    return next(candidate for candidate in result.sinks if candidate.name == name)


def verdict(result: Alternative, promise: str) -> bool | None:
    """Return the verdict on a promise: True if it was kept, None if it was not tested."""
    return next(verdict.ok for verdict in result.verdicts if verdict.promise == promise)
