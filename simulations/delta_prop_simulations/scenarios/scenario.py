"""A scenario as typed values. An error names the key with its path, and the value with its bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from delta_prop.api.settings import Settings
from delta_prop.calls.argument_checks import parse_topics
from delta_prop.delivery.sink_manager import OnLogFull
from delta_prop_broker.log.settings import LogSettings
from delta_prop_wire.delta import AckLevel, Kind, Priority
from delta_prop_wire.errors import UsageError

CutDirection: TypeAlias = Literal["both", "there", "back"]
FaultKind: TypeAlias = Literal[
    "kill", "power_cut", "disk_slow", "disk_full", "disk_fails", "clock_jumps", "resets", "restart"
]

ENDINGS = frozenset({"kill", "power_cut"})
"""Kinds of faults that end the service without a warning."""
MACHINES_MAX = 10
TIME_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine. `clock_ahead`: its clock's first error; `clock_drift`: seconds gained per second."""

    name: str
    clock_ahead: float = 0.0
    clock_drift: float = 0.0

    def __post_init__(self) -> None:
        check_host(self.name)
        _check_within("clock_ahead", self.clock_ahead, -1e9, 1e9)
        _check_within("clock_drift", self.clock_drift, -0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Cut:
    """A time during which a link is cut: in both directions, or only from the first host (`there`) or to it
    (`back`).
    """

    begin: float
    lasts: float
    direction: CutDirection = "both"

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, TIME_MAX)
        _check_within("for", self.lasts, 0.001, TIME_MAX)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The network path between two hosts. Two machines forward to each other over it, unless `forward` is
    false.

    `latency_ms`: in one direction. `mbit_per_s`: 0 for no limit. `reset_mb_mean`: the mean number of
    megabytes after which a connection breaks; 0 for never. `name`: an alternative of
    the scenario can leave the link out by this name.
    """

    between: tuple[str, ...]
    forward: bool = True
    latency_ms: float = 0.5
    jitter_ms: float = 0.0
    mbit_per_s: float = 0.0
    reset_mb_mean: float = 0.0
    name: str = ""
    cut: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        if len(self.between) != 2 or len(set(self.between)) != 2:
            raise UsageError(f'between = {list(self.between)}: give two hosts, as ["paris", "tokyo"]')
        _check_within("latency_ms", self.latency_ms, 0.001, 60_000.0)
        _check_within("jitter_ms", self.jitter_ms, 0.0, 60_000.0)
        _check_within("mbit_per_s", self.mbit_per_s, 0.0, 1e6)
        _check_within("reset_mb_mean", self.reset_mb_mean, 0.0, 1e6)


@dataclass(frozen=True, slots=True)
class Stall:
    """A time during which a reader reads nothing."""

    begin: float
    lasts: float

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, TIME_MAX)
        _check_within("for", self.lasts, 0.001, TIME_MAX)


@dataclass(frozen=True, slots=True)
class ReaderSpec:
    """A subscriber over the network, on a host of its own. `begin`: when it starts; `per_call_ms`,
    `per_delta_us`: the time that it takes for each batch and for each delta.
    """

    name: str
    machine: str | None = None
    topics: tuple[str, ...] = ("*",)
    begin: float = 0.0
    per_call_ms: float = 1.0
    per_delta_us: float = 10.0
    stall: tuple[Stall, ...] = ()

    def __post_init__(self) -> None:
        parse_topics(self.topics)
        _check_within("from", self.begin, 0.0, TIME_MAX)
        _check_within("per_call_ms", self.per_call_ms, 0.0, 3_600_000.0)
        _check_within("per_delta_us", self.per_delta_us, 0.0, 3_600_000_000.0)


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """A fault of a machine, with its start and duration. The duration of `kill` and `power_cut` is the
    downtime.

    `restart` ends the service gracefully, and starts it again. `by`: the seconds by which the clock jumps.
    `factor`: how many times longer the calls of a slow disk take. `after_ack`: the fault waits for the first
    acknowledgement after `begin`. `name`: an alternative of the scenario can leave the fault
    out by this name.
    """

    begin: float
    what: FaultKind
    machine: str
    name: str = ""
    lasts: float = 1.0
    by: float = 0.0
    factor: float = 10.0
    after_ack: bool = False

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, TIME_MAX)
        _check_within("for", self.lasts, 0.0, TIME_MAX)
        _check_within("by", self.by, -1e9, 1e9)
        _check_within("factor", self.factor, 1.0, 100_000.0)
        if (self.what == "clock_jumps") != (self.by != 0):
            raise UsageError("by: the jump of a clock: give it with clock_jumps, and only there")
        if self.after_ack and self.what == "clock_jumps":
            raise UsageError("after_ack: clock_jumps does not support it: leave it out")


def check_topology(
    machines: Sequence[MachineSpec],
    links: Sequence[LinkSpec],
    faults: Sequence[FaultSpec],
    clients: Sequence[tuple[str, str | None]],
    sinks: Sequence[tuple[str, str | None]],
) -> None:
    """Check that all hosts exist. `clients`, `sinks`: pairs of name and machine. Raises UsageError."""
    names = [machine.name for machine in machines]
    if not names:
        _check_single_service(links, faults, [*clients, *sinks])
        return
    if len(names) > MACHINES_MAX:
        raise UsageError(f"machine: there are {len(names)}: give up to {MACHINES_MAX}")
    client_names = [name for name, _ in clients]
    for name, count in Counter([*names, *client_names]).items():
        check_host(name)
        if count > 1:
            note = "sources and readers are hosts, too"
            raise UsageError(f"machine name {name!r}: used by two hosts ({note}): rename one")
    for name, machine in (*clients, *sinks):
        _check_known(f"{name}: machine", machine, names)
    for index, link in enumerate(links):
        for host in link.between:
            _check_known(f"link[{index}].between", host, [*names, *client_names])
        if not set(link.between) & set(names):
            raise UsageError(f"link[{index}].between: both hosts are clients: give at least one machine")
    for index, fault in enumerate(faults):
        _check_known(f"fault[{index}].machine", fault.machine, names)


def check_host(name: str) -> None:
    """Check that a name can be the host of an address. Raises UsageError."""
    if not (name.isascii() and name.replace("-", "a").replace("_", "a").isalnum() and len(name) <= 40):
        raise UsageError(f"name {name!r:.60}: give 1 to 40 letters, digits, hyphens, underscores")


def _check_single_service(
    links: Sequence[LinkSpec], faults: Sequence[FaultSpec], parts: Sequence[tuple[str, str | None]]
) -> None:
    """Check that nothing names a machine in a scenario without machines. Raises UsageError."""
    if links or faults:
        raise UsageError(f"{'link' if links else 'fault'}: there is no machine: add [[machine]] with a name")
    for name, machine in parts:
        if machine is not None:
            raise UsageError(
                f"{name}: machine = {machine!r}: unknown machine: add [[machine]] with that name"
            )


def _check_known(key: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise UsageError(f"{key} = {name!r}: unknown host: give one of {', '.join(known)}")


Pattern: TypeAlias = Literal["constant", "poisson", "bursty", "diurnal", "replay"]
DistributionName: TypeAlias = Literal["constant", "normal", "lognormal", "exponential", "calibrated"]
EventKind: TypeAlias = Literal["fails", "pauses", "slows", "rejects"]

BATCH_MAX = 1_000
KEYS_MAX = 1_000_000
SINKS_MAX = 100
WRITERS_MAX = 100
DIMENSION_MAX = 4_096
BYTES_MAX = 65_536
RATE_MAX = 10_000_000.0


@dataclass(frozen=True, slots=True)
class Between:
    """An integer that is drawn uniformly from `min` to `max`, both included."""

    min: int
    max: int

    def __post_init__(self) -> None:
        _check_within("min", self.min, 1, BATCH_MAX)
        _check_within("max", self.max, self.min, BATCH_MAX)


@dataclass(frozen=True, slots=True)
class Burst:
    """The pattern `bursty`: traffic for `on` seconds, none for `off` seconds, at `rate` on average."""

    on: float = 2.0
    off: float = 8.0

    def __post_init__(self) -> None:
        _check_within("on", self.on, 0.001, 86_400)
        _check_within("off", self.off, 0.0, 86_400)


@dataclass(frozen=True, slots=True)
class Day:
    """The pattern `diurnal`: the rate is a sine. `low`: the lowest rate, as a share of the peak."""

    period: float = 600.0
    low: float = 0.2

    def __post_init__(self) -> None:
        _check_within("period", self.period, 0.1, 86_400)
        _check_within("low", self.low, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Hot:
    """Hot keys. `share`: their share of the keys; `of`: the share of all deltas that change them."""

    share: float = 0.01
    of: float = 0.5

    def __post_init__(self) -> None:
        _check_within("share", self.share, 0.0, 1.0)
        _check_within("of", self.of, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Mix:
    """The shares of the operations among the deltas; normalized, so their sum need not be 1."""

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
        for operation in fields(self):
            _check_within(operation.name, getattr(self, operation.name), 0.0, 1_000_000.0)
        if not any(self.shares.values()):
            raise UsageError("every share is 0, so there are no deltas: give at least one share above 0")

    @property
    def shares(self) -> dict[Kind, float]:
        """The shares above 0, by operation."""
        by_name = {operation.name: getattr(self, operation.name) for operation in fields(self)}
        return {Kind[name.upper()]: share for name, share in by_name.items() if share}


@dataclass(frozen=True, slots=True)
class Deltas:
    """A source's deltas: number of vectors, dimension, bytes of an opaque delta, operations."""

    keys: int = 10_000
    hot: Hot | None = None
    dimension: int = 16
    size_bytes: int = 200
    mix: Mix = field(default_factory=lambda: Mix(opaque=1.0))

    def __post_init__(self) -> None:
        _check_within("keys", self.keys, 1, KEYS_MAX)
        _check_within("dimension", self.dimension, 1, DIMENSION_MAX)
        _check_within("size_bytes", self.size_bytes, 0, BYTES_MAX)


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source of deltas. `start`, `stop`: in seconds of the run.

    `writers`: the number of named producers that share the load; 0: calls without a producer. `retry`: if
    True, calls are retried after a retryable refusal, else their deltas are dropped and counted. `machine`:
    the machine whose service it publishes to (None: the first one); in a scenario with machines, a source is
    a client on a host of its own.
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
        _check_name(self.name)
        _check_within("rate", self.rate, 0.001, RATE_MAX)
        if isinstance(self.batch, int):
            _check_within("batch", self.batch, 1, BATCH_MAX)
        _check_within("writers", self.writers, 0, WRITERS_MAX)
        _check_within("speed", self.speed, 0.001, 1_000.0)
        _check_within("start", self.start, 0.0, TIME_MAX)
        if self.stop is not None:
            _check_within("stop", self.stop, self.start, TIME_MAX)
        if (self.pattern == "replay") != (self.trace is not None):
            raise UsageError("trace: the file that the pattern replay replays: give both, or neither")


@dataclass(frozen=True, slots=True)
class Event:
    """A fault of a sink, with its start and duration. `fails`: all calls fail. `slows`: calls take `factor`
    times as long. `rejects`: the sink rejects a `share` of the deltas. `pauses`: an operator pauses the sink.
    """

    begin: float
    lasts: float
    what: EventKind
    factor: float = 10.0
    share: float = 0.01

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, TIME_MAX)
        _check_within("for", self.lasts, 0.0, TIME_MAX)
        _check_within("factor", self.factor, 0.001, 1_000_000.0)
        _check_within("share", self.share, 0.0, 1.0)

    def covers(self, now: float) -> bool:
        """True while the fault lasts."""
        return self.begin <= now < self.begin + self.lasts


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """One sink: call times, attach options, faults. `machine`: None if each machine has one."""

    name: str
    per_call_ms: float = 1.0
    per_delta_us: float = 10.0
    noise: float = 0.0
    distribution: DistributionName = "lognormal"
    file: str | None = None
    sink: str | None = None
    capacity_per_s: float = 0.0
    pacing: bool = False
    required: bool = True
    on_log_full: OnLogFull | None = None
    topics: tuple[str, ...] = ("*",)
    batch_deltas: int | None = None
    linger_ms: float | None = None
    faults: tuple[Event, ...] = ()
    machine: str | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_within("per_call_ms", self.per_call_ms, 0.0, 3_600_000.0)
        _check_within("per_delta_us", self.per_delta_us, 0.0, 3_600_000_000.0)
        _check_within("noise", self.noise, 0.0, 10.0)
        _check_within("capacity_per_s", self.capacity_per_s, 0.0, 1e9)
        parse_topics(self.topics)
        if (self.distribution == "calibrated") != (self.file is not None):
            raise UsageError(
                "file: the file that the distribution calibrated draws from: give both, or neither"
            )


@dataclass(frozen=True, slots=True)
class AlternativeSpec:
    """An alternative of a scenario: values that replace its own, and tables to leave out."""

    name: str
    about: str = ""
    set: dict[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """The service's settings. `log`: None for a log in memory. A disk call takes up to `disk_ms_max`."""

    settings: Settings = field(default_factory=Settings)
    log: LogSettings | None = None
    disk_ms_max: float = 2.0

    def __post_init__(self) -> None:
        _check_within("service.disk_ms_max", self.disk_ms_max, 0.0, 60_000.0)

    @property
    def level(self) -> AckLevel:
        """The default ack level of sources."""
        return AckLevel.MEMORY if self.log is None else AckLevel.DURABLE


@dataclass(frozen=True, slots=True)
class Scenario:
    """All parts of one run. `base`: the name of the scenario as written, to tell it from its alternatives."""

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
        _check_within("duration", self.duration, 0.1, TIME_MAX)
        _check_within("seed", self.seed, 0, 2**63)
        for table, specs in (("source", self.source), ("sink", self.sink)):
            names = [spec.name for spec in specs]
            if len(set(names)) < len(names):
                raise UsageError(f"{table} name {max(names, key=names.count)!r}: used twice: rename one")
            if not 1 <= len(names) <= SINKS_MAX:
                raise UsageError(f"{table}: there are {len(names)}: give 1 to {SINKS_MAX} of [[{table}]]")
        clients = [(source.name, source.machine) for source in self.source]
        clients += [(reader.name, reader.machine) for reader in self.reader]
        sinks = [(sink.name, sink.machine) for sink in self.sink]
        if self.reader and not self.machine:
            raise UsageError("reader: there is no machine to read from: add [[machine]] with a name")
        check_topology(self.machine, self.link, self.fault, clients, sinks)


def _check_name(name: str) -> None:
    if not (name and name.isprintable() and "." not in name and len(name) <= 60):
        raise UsageError(f"name {name!r:.70}: give 1 to 60 characters, without dots")


def _check_within(key: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise UsageError(f"{key} = {value}: give {minimum} to {maximum}")
