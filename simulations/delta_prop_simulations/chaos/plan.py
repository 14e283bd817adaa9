"""The plan of one run as plain data: drawn from a seed, stored as JSON, shrunk by hand or by search.

Each part of a run draws from a random stream of its own name; so removing one part from a plan leaves the
draws of the other parts unchanged. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from delta_prop_wire.errors import UsageError

Knobs = dict[str, float | int | str | bool]

POISON = "poison"
"""The metadata name of a poisoned delta; its value names the sink that must reject it, or is `all`."""
STRIKES = {
    "kill": "a service's process is killed, and restarted later",
    "power": "a machine loses its power and unsynced data, and is restarted later",
    "last call": "the process or the machine ends at a disk call",
    "write error": "writes fail for a while",
    "sync error": "a sync fails",
    "read error": "reads fail for a while",
    "disk full": "the disk is full for a while",
    "slow disk": "calls on threads take long for a while",
    "cut": "nothing gets through from one host to another for a while",
    "cut both": "nothing gets through between two hosts for a while",
    "reset": "all connections of a host break",
    "slow link": "a network path between two hosts is slow for a while",
    "stop": "a service is stopped gracefully, and restarted later",
    "pause": "a sink is paused for a while",
    "detach": "a sink is detached for a while",
    "rebuild": "a sink is rebuilt",
    "kill writer": "a producer's process is killed, and restarted later",
    "kill reader": "a subscriber's process is killed, and restarted later",
    "stall reader": "a subscriber does not read for a while",
}
"""The kinds of strikes, which are planned faults, with a description."""


@dataclass(frozen=True, slots=True)
class SinkPlan:
    """A sink of a service. `kind`: a kind of model sink, or `cache` or `index` for a real sink."""

    name: str
    kind: str
    topics: str = "*"
    required: bool = True
    pacing: bool = False
    faults: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A service on its machine. `log`, `settings`, `server`: fields of LogSettings, Settings and
    ServerSettings; if `log` is None, the log is in memory. `threads`, `drift`, `jumps`: faults of its
    threads and its clock; a jump is (time, seconds added to the clock). `forward_to`: names of other nodes.
    `partition`: it serves streams, and its work is in this partition of one; None: it serves a propagator.
    """

    name: str
    log: Knobs | None
    settings: Knobs
    sinks: tuple[SinkPlan, ...]
    forward_to: tuple[str, ...] = ()
    threads: dict[str, float] = field(default_factory=dict)
    drift: float = 0.0
    jumps: tuple[tuple[float, float], ...] = ()
    server: Knobs = field(default_factory=dict)
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class WriterPlan:
    """A producer. `embedded`: it runs in the node's process, else in its own. `deltas`: their number;
    `burst`: the number sent at once; `gap_s`: the mean time between bursts. `level`: the requested ack level;
    None: the default. `poison`: the share of deltas that sinks reject. `patience_s`: the maximum wait for an
    acknowledgement. `offers`: it calls `offer` and awaits the receipts, not `publish`; only for an embedded
    writer without counters of its own. `hot`: it changes only two vectors, which all such writers share.
    """

    name: str
    node: str
    embedded: bool
    deltas: int
    burst: int
    gap_s: float
    level: str | None = None
    poison: float = 0.0
    patience_s: float = 20.0
    offers: bool = False
    hot: bool = False


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """A subscriber in its own process. `batches`: it reads whole ones. `credit`: maximum of unread deltas."""

    name: str
    node: str
    topics: str = "*"
    group: bool = False
    batches: bool = True
    credit: int = 20_000


@dataclass(frozen=True, slots=True)
class StrikePlan:
    """A strike, which is a planned fault: its time, kind, target (a host, or `node/sink`, or `host>host`) and
    duration.

    `amount`: of `last call`, the number of disk calls before it; of `slow disk`, the length of the stalls (60
    is the longest); of `slow link`, the bytes per second. Other kinds have none.
    """

    at_s: float
    kind: str
    on: str
    for_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `network`: fields of NetworkConditions. `power_cut_at_end`: after the checks at rest, the
    power of all machines is cut, and everything is checked once more.
    """

    seed: int
    nodes: tuple[NodePlan, ...]
    writers: tuple[WriterPlan, ...]
    readers: tuple[ReaderPlan, ...] = ()
    strikes: tuple[StrikePlan, ...] = ()
    network: dict[str, float | None] = field(default_factory=dict)
    duration_s: float = 30.0
    power_cut_at_end: bool = True

    def to_json(self) -> str:
        """Return the plan as JSON text, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises UsageError."""
        try:
            fields = json.loads(text)
            nodes = tuple(_node(one) for one in fields.pop("nodes"))
            writers = tuple(WriterPlan(**one) for one in fields.pop("writers"))
            readers = tuple(ReaderPlan(**one) for one in fields.pop("readers"))
            strikes = tuple(StrikePlan(**one) for one in fields.pop("strikes"))
            return cls(nodes=nodes, writers=writers, readers=readers, strikes=strikes, **fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"the plan is not valid: {error!r:.200}: write it as `Plan.to_json` does"
            ) from None


def _node(data: Mapping[str, Any]) -> NodePlan:
    fields = dict(data)
    fields["sinks"] = tuple(SinkPlan(**sink) for sink in fields["sinks"])
    fields["forward_to"] = tuple(fields["forward_to"])
    fields["jumps"] = tuple((at_s, by_s) for at_s, by_s in fields["jumps"])
    return NodePlan(**fields)


SECONDS_MAX = 600.0
PARTITIONS_MAX = 3
NODES_MAX, CLIENTS_MAX, STRIKES_MAX = 8, 32, 1_000
DELTAS_MAX, BURST_MAX = 10_000, 1_000
KINDS = ("transactional", "plain", "volatile", "rebuildable", "cache", "index")
LEVELS = (None, "memory", "logged", "durable")


def check_plan(plan: Plan) -> None:
    """Raise a UsageError that names the field, the value and its bound, unless the plan is valid."""
    _check_number("duration_s", plan.duration_s, 0.1, SECONDS_MAX)
    _check_count("nodes", plan.nodes, 1, NODES_MAX)
    _check_count("writers", plan.writers, 1, CLIENTS_MAX)
    _check_count("readers", plan.readers, 0, CLIENTS_MAX)
    _check_count("strikes", plan.strikes, 0, STRIKES_MAX)
    nodes = [node.name for node in plan.nodes]
    hosts = [*nodes, *(one.name for one in plan.writers), *(one.name for one in plan.readers)]
    for name in hosts:
        if hosts.count(name) > 1:
            raise UsageError(f"host name {name!r}: used for two hosts: give each host its own name")
    for index, node in enumerate(plan.nodes):
        _check_node(f"nodes[{index}]", node, nodes)
    for index, writer in enumerate(plan.writers):
        _check_writer(f"writers[{index}]", writer, nodes)
    for index, reader in enumerate(plan.readers):
        _check_reader(f"readers[{index}]", reader, nodes)
    for index, strike in enumerate(plan.strikes):
        _check_strike(f"strikes[{index}]", strike, hosts, plan.duration_s)


def _check_node(path: str, node: NodePlan, nodes: Sequence[str]) -> None:
    for other in node.forward_to:
        _check_known(f"{path}.forward_to", other, [name for name in nodes if name != node.name])
    for index, sink in enumerate(node.sinks):
        _check_known(f"{path}.sinks[{index}].kind", sink.kind, KINDS)
    for at_s, by_s in node.jumps:
        _check_number(f"{path}.jumps", at_s, 0.0, SECONDS_MAX)
        _check_number(f"{path}.jumps", by_s, -1e6, 1e6)
    _check_number(f"{path}.drift", node.drift, -1.0, 1_000.0)
    if node.partition is not None:
        _check_number(f"{path}.partition", node.partition, 0, PARTITIONS_MAX - 1)
        if node.log is None or len(nodes) > 1:
            raise UsageError(f"{path}.partition: the only node, with a log, may serve streams: leave it out")


def _check_writer(path: str, writer: WriterPlan, nodes: Sequence[str]) -> None:
    _check_known(f"{path}.node", writer.node, nodes)
    _check_known(f"{path}.level", writer.level, LEVELS)
    _check_number(f"{path}.deltas", writer.deltas, 1, DELTAS_MAX)
    _check_number(f"{path}.burst", writer.burst, 1, BURST_MAX)
    _check_number(f"{path}.gap_s", writer.gap_s, 1e-6, SECONDS_MAX)
    _check_number(f"{path}.poison", writer.poison, 0.0, 1.0)
    _check_number(f"{path}.patience_s", writer.patience_s, 0.01, SECONDS_MAX)


def _check_reader(path: str, reader: ReaderPlan, nodes: Sequence[str]) -> None:
    _check_known(f"{path}.node", reader.node, nodes)
    _check_number(f"{path}.credit", reader.credit, 1, 1_000_000)


def _check_strike(path: str, strike: StrikePlan, hosts: Sequence[str], duration_s: float) -> None:
    _check_known(f"{path}.kind", strike.kind, STRIKES)
    _check_number(f"{path}.at_s", strike.at_s, 0.0, duration_s)
    _check_number(f"{path}.for_s", strike.for_s, 0.0, SECONDS_MAX)
    for host in strike.on.partition("/")[0].split(">"):
        _check_known(f"{path}.on", host, hosts)


def _check_number(path: str, value: object, minimum: float, maximum: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not is_number or not minimum <= value <= maximum:  # type: ignore[operator]
        raise UsageError(f"{path} = {value!r}: give {minimum:g} to {maximum:g}")


def _check_count(path: str, parts: Sequence[object], minimum: int, maximum: int) -> None:
    if not minimum <= len(parts) <= maximum:
        raise UsageError(f"{path}: there are {len(parts)}: give {minimum} to {maximum}")


def _check_known(path: str, name: object, names: Collection[object]) -> None:
    if name not in names:
        raise UsageError(f"{path} = {name!r}: give one of {', '.join(map(str, names))}")
