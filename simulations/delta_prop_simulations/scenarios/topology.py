"""The machines of a scenario, the links between hosts, readers, and faults, as typed and checked values.

`check_topology` checks that all hosts that they name exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from delta_prop.calls.argument_checks import parse_topics
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

CutDirection: TypeAlias = Literal["both", "there", "back"]
FaultKind: TypeAlias = Literal[
    "kill", "power_cut", "disk_slow", "disk_full", "disk_fails", "clock_jumps", "resets", "restart"
]

ENDINGS = frozenset({"kill", "power_cut"})
"""Kinds of faults that end the service without a warning."""
MACHINES_MAX = 10
_TIME_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine with a service. `clock_ahead`: the error of its wall clock at the start, in seconds;
    `clock_drift`: the seconds that the clock gains per second.
    """

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
        _check_within("from", self.begin, 0.0, _TIME_MAX)
        _check_within("for", self.lasts, 0.001, _TIME_MAX)


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
        _check_within("from", self.begin, 0.0, _TIME_MAX)
        _check_within("for", self.lasts, 0.001, _TIME_MAX)


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
        _check_within("from", self.begin, 0.0, _TIME_MAX)
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
        _check_within("from", self.begin, 0.0, _TIME_MAX)
        _check_within("for", self.lasts, 0.0, _TIME_MAX)
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
    """Check that all named hosts exist. `clients`, `sinks`: pairs of a name and a machine. Raises
    UsageError.
    """
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


def _check_within(key: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise UsageError(f"{key} = {value}: give {minimum} to {maximum}")
