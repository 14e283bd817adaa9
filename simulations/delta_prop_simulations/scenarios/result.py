"""The result of a scenario's run, in virtual seconds, as plain data: the only input of reports. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Series:
    """One quantity, sampled over time."""

    name: str
    unit: str
    times_s: list[float]
    values: list[float]


@dataclass(frozen=True)
class Latency:
    """A distribution of durations. `quantiles`: "p50", "p90", "p99", "p999", "max", in seconds. `buckets`:
    pairs of an upper bound in seconds and a count; empty buckets are left out.
    """

    count: int = 0
    quantiles: dict[str, float] = field(default_factory=dict)
    buckets: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class SinkResult:
    """The results of one sink. `lag`: the times from a delta's append to its application. `within_1s_per_s`:
    the number of deltas that were applied within a second of their append, per second of the scenario.
    """

    name: str
    applied: int
    failures: int
    within_1s_per_s: float
    lag: Latency
    series: list[Series] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a promise. `ok`: None if the scenario does not test it.

    `limited`: the promise holds, but with its documented exception; `what` names the affected sinks.
    """

    promise: str
    ok: bool | None
    what: str
    limited: bool = False


@dataclass(frozen=True)
class Alternative:
    """One alternative of a scenario, and its results. `trace`: the hash of the run's trace, determined by the
    seed.

    `cpu_s`: the CPU time of the run, the only number that differs from run to run. `acks`: the times from a
    delta's first offer to its acknowledgement.
    """

    name: str
    what: str
    sinks: list[SinkResult]
    series: list[Series]
    totals: dict[str, float]
    verdicts: list[Verdict]
    trace: str
    virtual_s: float
    cpu_s: float
    acks: Latency = field(default_factory=Latency)


@dataclass(frozen=True)
class Result:
    """A scenario's alternatives, run with one seed."""

    scenario: str
    about: str
    seed: int
    duration_s: float
    alternatives: list[Alternative]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return asdict(self)
