"""The topology of a scenario and its faults: machines, links between them, faults.

Checked values only; `check_places` checks that the hosts they name exist.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from delta_prop.argument_checks import parse_topics
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

CutDirection: TypeAlias = Literal["both", "there", "back"]
FaultKind: TypeAlias = Literal[
    "kill", "power_cut", "disk_slow", "disk_full", "disk_fails", "clock_jumps", "resets", "restart"
]

ENDINGS = frozenset({"kill", "power_cut"})
MACHINES_MAX = 10
_TIME_MAX = 86_400.0


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine with a service. `clock_ahead`, `clock_drift`: the error of its wall clock, in seconds, and in
    seconds gained each second.
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
    """A time in which nothing passes: in both directions, or in one (`there`: from the host named first)."""

    begin: float
    lasts: float
    direction: CutDirection = "both"

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, _TIME_MAX)
        _check_within("for", self.lasts, 0.001, _TIME_MAX)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """The path between two hosts; two machines forward to each other over it, unless `forward` is false.

    `latency_ms`: one way. `mbit_per_s` and `reset_mb_mean` 0: unbounded, and never. `name`: for an
    alternative that leaves it out.
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
    """A time in which a reader takes nothing."""

    begin: float
    lasts: float

    def __post_init__(self) -> None:
        _check_within("from", self.begin, 0.0, _TIME_MAX)
        _check_within("for", self.lasts, 0.001, _TIME_MAX)


@dataclass(frozen=True, slots=True)
class ReaderSpec:
    """A subscriber over the network, on its own host, from a time on. It takes a time for each batch and each
    delta, and reads nothing while it stalls.
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
    """A fault of a machine, with its begin and duration: its downtime after `kill` and `power_cut`.

    `restart` ends the service gracefully, and starts it again. `by`: seconds by which the clock jumps.
    `factor`: of the times of a slow disk's calls. `after_ack`: wait for the first acknowledgement after
    `begin`. `name`: for an alternative that leaves it out.
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
            raise UsageError("by: the jump of a clock (clock_jumps): give both, or neither")
        if self.after_ack and self.what == "clock_jumps":
            raise UsageError("after_ack: clock_jumps does not support it: leave it out")


def check_places(
    machines: Sequence[MachineSpec],
    links: Sequence[LinkSpec],
    faults: Sequence[FaultSpec],
    clients: Sequence[tuple[str, str | None]],
    sinks: Sequence[tuple[str, str | None]],
) -> None:
    """Check that all named hosts exist; `clients` and `sinks`: name and machine. Raises UsageError."""
    names = [one.name for one in machines]
    if not names:
        _check_single_service(links, faults, [*clients, *sinks])
        return
    if len(names) > MACHINES_MAX:
        raise UsageError(f"machine: there are {len(names)}: give up to {MACHINES_MAX}")
    others = [name for name, _ in clients]
    for name, count in Counter([*names, *others]).items():
        check_host(name)
        if count > 1:
            what = "sources and readers are hosts, too"
            raise UsageError(f"machine name {name!r}: used by two hosts ({what}): rename one")
    for name, machine in (*clients, *sinks):
        _check_known(f"{name}: machine", machine, names)
    for place, link in enumerate(links):
        for host in link.between:
            _check_known(f"link[{place}].between", host, [*names, *others])
        if not set(link.between) & set(names):
            raise UsageError(f"link[{place}].between: both hosts are clients: give at least one machine")
    for place, fault in enumerate(faults):
        _check_known(f"fault[{place}].machine", fault.machine, names)


def check_host(name: str) -> None:
    """Check that a name can be part of an address. Raises UsageError."""
    if not (name.isascii() and name.replace("-", "a").replace("_", "a").isalnum() and len(name) <= 40):
        raise UsageError(f"name {name!r:.60}: give 1 to 40 letters, digits, hyphens, underscores")


def _check_single_service(
    links: Sequence[LinkSpec], faults: Sequence[FaultSpec], placed: Sequence[tuple[str, str | None]]
) -> None:
    """Check that nothing names a machine if there are none. Raises UsageError."""
    if links or faults:
        raise UsageError(f"{'link' if links else 'fault'}: there is no machine: add [[machine]] with a name")
    for name, machine in placed:
        if machine is not None:
            raise UsageError(
                f"{name}: machine = {machine!r}: unknown machine: add [[machine]] with that name"
            )


def _check_known(key: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise UsageError(f"{key} = {name!r}: unknown host: give one of {', '.join(known)}")


def _check_within(key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError(f"{key} = {value}: give {least} to {most}")
