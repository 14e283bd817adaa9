"""A scenario: traffic, a service, sinks and alternatives to all that, as typed values.

What is in here is checked: a key that nobody reads or a value out of its bounds is told with its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from delta_prop.attachments import OnLogFull
from delta_prop.checks import parse_topics
from delta_prop.config import Settings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.laboratory.topology import (
    FaultSpec,
    LinkSpec,
    MachineSpec,
    ReaderSpec,
    check_places,
)
from delta_prop_wire.delta import AckLevel, Kind, Priority
from delta_prop_wire.errors import UsageError

Pattern: TypeAlias = Literal["constant", "poisson", "bursty", "diurnal", "replay"]
LawName: TypeAlias = Literal["constant", "normal", "lognormal", "exponential", "calibrated"]
What: TypeAlias = Literal["fails", "pauses", "slows", "rejects"]

BATCH_MAX = 1_000
KEYS_MAX = 1_000_000
SINKS_MAX = 100
WRITERS_MAX = 100
DIMENSION_MAX = 4_096
BYTES_MAX = 65_536
RATE_MAX = 10_000_000.0


@dataclass(frozen=True, slots=True)
class Between:
    """A whole number drawn evenly, both ends included."""

    min: int
    max: int

    def __post_init__(self) -> None:
        _within("min", self.min, 1, BATCH_MAX)
        _within("max", self.max, self.min, BATCH_MAX)


@dataclass(frozen=True, slots=True)
class Burst:
    """`bursty`: the whole rate in `on` seconds, none in `off` seconds. The mean stays `rate`."""

    on: float = 2.0
    off: float = 8.0

    def __post_init__(self) -> None:
        _within("on", self.on, 0.001, 86_400)
        _within("off", self.off, 0.0, 86_400)


@dataclass(frozen=True, slots=True)
class Day:
    """`diurnal`: the rate goes up and down as a sine of this period, down to `low` of its peak."""

    period: float = 600.0
    low: float = 0.2

    def __post_init__(self) -> None:
        _within("period", self.period, 0.1, 86_400)
        _within("low", self.low, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Hot:
    """Some keys are changed more: this share `of` all deltas goes to a `share` of the keys."""

    share: float = 0.01
    of: float = 0.5

    def __post_init__(self) -> None:
        _within("share", self.share, 0.0, 1.0)
        _within("of", self.of, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Mix:
    """What share of the deltas each operation has; the shares are made to add up to 1."""

    create: float = 0.0
    dense: float = 0.0
    sparse: float = 0.0
    sparse_add: float = 0.0
    scale: float = 0.0
    offset: float = 0.0
    delete: float = 0.0
    metadata: float = 0.0
    opaque: float = 0.0

    def __post_init__(self) -> None:
        for one in fields(self):
            _within(one.name, getattr(self, one.name), 0.0, 1_000_000.0)
        if not any(self.shares.values()):
            raise UsageError("every share is 0, so there is nothing to send: give one above 0")

    @property
    def shares(self) -> dict[Kind, float]:
        """By operation, those that occur."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {Kind[name.upper()]: share for name, share in named.items() if share}


@dataclass(frozen=True, slots=True)
class Deltas:
    """What is sent: over how many vectors, how large, doing what."""

    keys: int = 10_000
    hot: Hot | None = None
    dimension: int = 16
    size_bytes: int = 200
    mix: Mix = field(default_factory=lambda: Mix(opaque=1.0))

    def __post_init__(self) -> None:
        _within("keys", self.keys, 1, KEYS_MAX)
        _within("dimension", self.dimension, 1, DIMENSION_MAX)
        _within("size_bytes", self.size_bytes, 0, BYTES_MAX)


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source of deltas. Times in seconds of the run.

    `writers`: named producers that share its load; 0: calls that have no name. `retry`: what is refused and
    may pass is offered again when the refusal says, else it is given up and counted. `machine`: whose
    service it publishes to; where there are machines it is a client on a host of its own (None: the first).
    """

    name: str
    pattern: Pattern = "poisson"
    rate: float = 1_000.0
    batch: int | Between = 100
    priority: Priority = Priority.NORMAL
    ack_level: AckLevel | None = None
    namespace: str = "default"
    writers: int = 0
    retry: bool = True
    burst: Burst = field(default_factory=Burst)
    day: Day = field(default_factory=Day)
    trace: str | None = None
    speed: float = 1.0
    deltas: Deltas = field(default_factory=Deltas)
    start: float = 0.0
    stop: float | None = None
    machine: str | None = None

    def __post_init__(self) -> None:
        _named(self.name)
        _within("rate", self.rate, 0.001, RATE_MAX)
        if isinstance(self.batch, int):
            _within("batch", self.batch, 1, BATCH_MAX)
        _within("writers", self.writers, 0, WRITERS_MAX)
        _within("speed", self.speed, 0.001, 1_000.0)
        _within("start", self.start, 0.0, 86_400.0)
        if self.stop is not None:
            _within("stop", self.stop, self.start, 86_400.0)
        if (self.pattern == "replay") != (self.trace is not None):
            raise UsageError("trace: it is the file that the pattern replay replays; give both, or neither")


@dataclass(frozen=True, slots=True)
class Event:
    """What befalls a sink, from a time on, for so long. `slows`: calls take `factor` times as long.

    `rejects`: a `share` of the deltas that come for the first time. `pauses`: as an operator does it.
    """

    begin: float
    lasts: float
    what: What
    factor: float = 10.0
    share: float = 0.01

    def __post_init__(self) -> None:
        _within("from", self.begin, 0.0, 86_400.0)
        _within("for", self.lasts, 0.0, 86_400.0)
        _within("factor", self.factor, 0.001, 1_000_000.0)
        _within("share", self.share, 0.0, 1.0)

    def covers(self, now: float) -> bool:
        """Whether it goes on at a time."""
        return self.begin <= now < self.begin + self.lasts


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """One sink: how long its calls take, how it is attached, what befalls it. `machine` None: one on each."""

    name: str
    per_call_ms: float = 1.0
    per_delta_us: float = 10.0
    noise: float = 0.0
    law: LawName = "lognormal"
    file: str | None = None
    sink: str | None = None
    capacity_per_s: float = 0.0
    pacing: bool = False
    required: bool = True
    on_log_full: OnLogFull | None = None
    topics: tuple[str, ...] = ("*",)
    batch_deltas: int | None = None
    linger_ms_max: float | None = None
    at: tuple[Event, ...] = ()
    machine: str | None = None

    def __post_init__(self) -> None:
        _named(self.name)
        _within("per_call_ms", self.per_call_ms, 0.0, 3_600_000.0)
        _within("per_delta_us", self.per_delta_us, 0.0, 3_600_000_000.0)
        _within("noise", self.noise, 0.0, 10.0)
        _within("capacity_per_s", self.capacity_per_s, 0.0, 1e9)
        parse_topics(self.topics)
        if (self.law == "calibrated") != (self.file is not None):
            raise UsageError("file: it holds what the law calibrated draws from; give both, or neither")


@dataclass(frozen=True, slots=True)
class AlternativeSpec:
    """Another way to set things up: these values in place of the scenario's, and these tables left out."""

    name: str
    about: str = ""
    set: dict[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """The service's limits; `log` None is a log in memory. A call of the disk takes up to `disk_ms_max`."""

    settings: Settings = field(default_factory=Settings)
    log: LogSettings | None = None
    disk_ms_max: float = 2.0

    def __post_init__(self) -> None:
        _within("service.disk_ms_max", self.disk_ms_max, 0.0, 60_000.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything of one run. `base`: what this is called beside its alternatives."""

    name: str
    about: str = ""
    duration: float = 60.0
    seed: int = 1
    base: str = "as written"
    service: Service = field(default_factory=Service)
    source: tuple[SourceSpec, ...] = ()
    sink: tuple[SinkSpec, ...] = ()
    machine: tuple[MachineSpec, ...] = ()
    link: tuple[LinkSpec, ...] = ()
    fault: tuple[FaultSpec, ...] = ()
    reader: tuple[ReaderSpec, ...] = ()

    def __post_init__(self) -> None:
        _within("duration", self.duration, 0.1, 86_400.0)
        _within("seed", self.seed, 0, 2**63)
        for what, specs in (("source", self.source), ("sink", self.sink)):
            names = [one.name for one in specs]
            if len(set(names)) < len(names):
                raise UsageError(f"{what}: two are named {max(names, key=names.count)!r}: rename one")
            if not 1 <= len(names) <= SINKS_MAX:
                raise UsageError(f"{what}: there are {len(names)}; give 1 to {SINKS_MAX} of [[{what}]]")
        clients = [(one.name, one.machine) for one in self.source]
        clients += [(one.name, one.machine) for one in self.reader]
        sinks = [(one.name, one.machine) for one in self.sink]
        if self.reader and not self.machine:
            raise UsageError("reader: there is no machine to read from; add [[machine]] with a name")
        check_places(self.machine, self.link, self.fault, clients, sinks)


def _named(name: str) -> None:
    if not (name and name.isprintable() and "." not in name and len(name) <= 60):
        raise UsageError(f"name {name!r:.70}: give 1 to 60 characters, without dots")


def _within(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError(f"{key} = {value}: give {least} to {most}")
