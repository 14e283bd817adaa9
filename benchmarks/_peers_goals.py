"""The goals of delta-prop relative to its peers, scene by scene, and relative to the limits of the machine.

A goal compares a figure of ours with another peer's in the same round, with a limit of that round, or with a
fixed bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from benchmarks._peers_scenes import Measurement, Scene
from benchmarks._results import Goal

JETSTREAM, REDIS, REDIS_ALWAYS, KAFKA = "jetstream", "redis", "redis-always", "kafka"
OURS, DURABLE = "ours", "ours-durable"

PUBLISH = Scene("publish to acknowledgement", consumers=0)
FLOW = Scene("publish to receive", consumers=1)
FAN_OUT = Scene("publish to 3 receivers", consumers=3)
PACKED = Scene("packed by the application, 100 each", consumers=1, batch=8, pack=100, window=320)
SINGLE = Scene("single calls", consumers=0, batch=1, has_single_calls=True)
RATE = Scene("2,000 a second", consumers=1, batch=1, rate=2_000.0, seconds_max=5.6)
IDLE = Scene("idle to idle", consumers=1, batch=1, pause_s=0.01, seconds_max=3.0)
BULK = Scene("bulk to one receiver", consumers=1, batch=1_000, window=64_000)
CATCH_UP = Scene("bulk from the log to one receiver", consumers=1, batch=1_000, window=64_000, from_log=True)
LARGE = Scene("bulk of large deltas to one receiver", consumers=1, batch=100, window=2_000, size=3_072)
LARGE_PUBLISH = Scene("bulk of large deltas to acknowledgement", 0, batch=100, window=2_000, size=3_072)
BULK_PUBLISH = Scene("bulk to acknowledgement", consumers=0, batch=1_000, window=64_000)
SCENES = (
    PUBLISH,
    FLOW,
    FAN_OUT,
    PACKED,
    SINGLE,
    RATE,
    IDLE,
    BULK,
    CATCH_UP,
    BULK_PUBLISH,
    LARGE,
    LARGE_PUBLISH,
)

Rounds = dict[tuple[str, str], dict[int, Measurement]]
"""Measurements by scene and peer, then by round."""
Limits = dict[int, dict[str, float]]
"""MB per second by round, then by limit."""
SPEED, CPU, P50, P99 = "deltas_a_second", "server_cpu_us", "latency_p50_us", "latency_p99_us"
_LABELS = {SPEED: "rate", CPU: "server CPU a delta", P50: "p50", P99: "p99"}


class Comparison(NamedTuple):
    """A goal, and the figures that it relates. `figure`: a field of `Measurement`; `ours`: one of our peers;
    `theirs`: another peer, a limit, or empty if our figure itself is judged.
    """

    row: str
    scene: Scene
    figure: str
    ours: str
    theirs: str
    target: float
    moonshot: float | None

    @property
    def goal(self) -> Goal:
        """The goal, in the form in which results have it."""
        suffix = f" / {self.theirs}" if self.theirs else ""
        what = f"{self.scene.name}, {_LABELS[self.figure]}: {self.ours}{suffix}"
        unit = "×" if self.theirs else "µs"
        return Goal(self.row, what, self.target, self.moonshot, unit, less=self.figure != SPEED)

    def ratios(self, rounds: Rounds, limits: Limits, size: int) -> list[float]:
        """Return the ratio of each round that has both figures."""
        ours = {
            number: getattr(measurement, self.figure)
            for number, measurement in rounds.get((self.scene.name, self.ours), {}).items()
        }
        if not self.theirs:
            return list(ours.values())
        if self.theirs in LIMITS:
            megabytes = (self.scene.size or size) / 1e6
            return [
                ours[number] * megabytes / limits[number][LIMITS[self.theirs]]
                for number in ours
                if number in limits
            ]
        theirs = rounds.get((self.scene.name, self.theirs), {})
        return [ours[number] / getattr(theirs[number], self.figure) for number in ours if number in theirs]


LIMITS = {"best loopback TCP": "tcp", "1 MiB write + fdatasync": "sync"}
COMPARISONS = (
    Comparison("1", PUBLISH, SPEED, OURS, JETSTREAM, 12, 16),
    Comparison("1", PUBLISH, SPEED, OURS, REDIS, 7, 10),
    Comparison("2", PUBLISH, SPEED, DURABLE, REDIS_ALWAYS, 11, 14),
    Comparison("2", PUBLISH, SPEED, DURABLE, JETSTREAM, 4, 5),
    Comparison("3", FLOW, SPEED, OURS, JETSTREAM, 13, 18),
    Comparison("3", FLOW, SPEED, OURS, REDIS, 8, 11),
    Comparison("", FLOW, SPEED, DURABLE, REDIS_ALWAYS, 8, 11),
    Comparison("", FAN_OUT, SPEED, OURS, JETSTREAM, 5, 10),
    Comparison("", FAN_OUT, SPEED, OURS, REDIS, 4, 8),
    Comparison("4", RATE, P50, OURS, JETSTREAM, 1.0, 0.8),
    Comparison("4", RATE, P99, OURS, JETSTREAM, 0.65, 0.5),
    Comparison("4", RATE, P50, OURS, REDIS, 0.8, 0.65),
    Comparison("4", RATE, P99, OURS, REDIS, 0.6, 0.5),
    Comparison("", IDLE, P50, OURS, JETSTREAM, 1.2, None),
    Comparison("5", FLOW, CPU, OURS, JETSTREAM, 0.045, 0.03),
    Comparison("6", PACKED, SPEED, OURS, JETSTREAM, 1.5, 2.2),
    Comparison("6", PACKED, SPEED, OURS, REDIS, 1.5, 2.2),
    Comparison("7", SINGLE, SPEED, OURS, JETSTREAM, 1.3, 2),
    Comparison("7", SINGLE, CPU, OURS, "", 0.8, 0.5),
    Comparison("", BULK, SPEED, OURS, "best loopback TCP", 0.25, 0.4),
    Comparison("", CATCH_UP, SPEED, OURS, "best loopback TCP", 0.25, 0.4),
    Comparison("", LARGE, SPEED, OURS, "best loopback TCP", 0.25, 0.4),
    Comparison("12", LARGE_PUBLISH, SPEED, DURABLE, "1 MiB write + fdatasync", 0.35, 0.5),
    Comparison("12", BULK_PUBLISH, SPEED, DURABLE, "1 MiB write + fdatasync", 0.18, 0.35),
)


def peers_for(scene: Scene) -> set[str]:
    """Return the peers that the goals of this scene compare; with Redis also Kafka, without a goal."""
    peers = {peer for one in COMPARISONS if one.scene.name == scene.name for peer in (one.ours, one.theirs)}
    return {*peers, KAFKA} if REDIS in peers else peers


def judge(
    rounds: Rounds, limits: Limits, size: int, comparisons: Iterable[Comparison] = COMPARISONS
) -> Mapping[Goal, list[float]]:
    """Return the goals whose scene was measured, each with the ratio of every round."""
    scenes = {scene for scene, _ in rounds}
    return {one.goal: one.ratios(rounds, limits, size) for one in comparisons if one.scene.name in scenes}
