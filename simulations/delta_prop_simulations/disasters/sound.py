"""Whether a plan that somebody has written can be carried out: names that are there, numbers in their bounds.

What a drawn plan holds is sound; one changed by hand is told here, in one line, and not by the run as a
violation of the service's. Pure.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.plan import STRIKES
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from delta_prop_simulations.disasters.plan import NodePlan, Plan, ReaderPlan, StrikePlan, WriterPlan

SECONDS_MAX = 600.0
NODES_MAX, CLIENTS_MAX, STRIKES_MAX = 8, 32, 1_000
DELTAS_MAX, BURST_MAX = 10_000, 1_000
KINDS = ("transactional", "plain", "volatile", "rebuildable", "cache", "index")
LEVELS = (None, "memory", "logged", "durable")


def check_plan(plan: Plan) -> None:
    """Raise UsageError, which names the place, the value and its bound."""
    _number("duration_s", plan.duration_s, 0.1, SECONDS_MAX)
    _count("nodes", plan.nodes, 1, NODES_MAX)
    _count("writers", plan.writers, 1, CLIENTS_MAX)
    _count("readers", plan.readers, 0, CLIENTS_MAX)
    _count("strikes", plan.strikes, 0, STRIKES_MAX)
    nodes = [node.name for node in plan.nodes]
    hosts = [*nodes, *(one.name for one in plan.writers), *(one.name for one in plan.readers)]
    for name in hosts:
        if hosts.count(name) > 1:
            raise UsageError(f"two hosts of the plan are called {name!r}: give each a name of its own")
    for place, node in enumerate(plan.nodes):
        _check_node(f"nodes[{place}]", node, nodes)
    for place, writer in enumerate(plan.writers):
        _check_writer(f"writers[{place}]", writer, nodes)
    for place, reader in enumerate(plan.readers):
        _check_reader(f"readers[{place}]", reader, nodes)
    for place, strike in enumerate(plan.strikes):
        _check_strike(f"strikes[{place}]", strike, hosts, plan.duration_s)


def _check_node(place: str, node: NodePlan, nodes: Sequence[str]) -> None:
    for other in node.forward_to:
        _known(f"{place}.forward_to", other, [name for name in nodes if name != node.name])
    for number, sink in enumerate(node.sinks):
        _known(f"{place}.sinks[{number}].kind", sink.kind, KINDS)
    for at_s, by_s in node.jumps:
        _number(f"{place}.jumps", at_s, 0.0, SECONDS_MAX)
        _number(f"{place}.jumps", by_s, -1e6, 1e6)
    _number(f"{place}.drift", node.drift, -1.0, 1_000.0)


def _check_writer(place: str, writer: WriterPlan, nodes: Sequence[str]) -> None:
    _known(f"{place}.node", writer.node, nodes)
    _known(f"{place}.level", writer.level, LEVELS)
    _number(f"{place}.deltas", writer.deltas, 1, DELTAS_MAX)
    _number(f"{place}.burst", writer.burst, 1, BURST_MAX)
    _number(f"{place}.gap_s", writer.gap_s, 1e-6, SECONDS_MAX)
    _number(f"{place}.poison", writer.poison, 0.0, 1.0)
    _number(f"{place}.patience_s", writer.patience_s, 0.01, SECONDS_MAX)


def _check_reader(place: str, reader: ReaderPlan, nodes: Sequence[str]) -> None:
    _known(f"{place}.node", reader.node, nodes)
    _number(f"{place}.credit", reader.credit, 1, 1_000_000)


def _check_strike(place: str, strike: StrikePlan, hosts: Sequence[str], duration_s: float) -> None:
    _known(f"{place}.kind", strike.kind, STRIKES)
    _number(f"{place}.at_s", strike.at_s, 0.0, duration_s)
    _number(f"{place}.for_s", strike.for_s, 0.0, SECONDS_MAX)
    for host in strike.on.partition("/")[0].split(">"):
        _known(f"{place}.on", host, hosts)


def _number(place: str, value: object, least: float, most: float) -> None:
    sound = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not sound or not least <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{place} = {value!r}: give {least:g} to {most:g}")


def _count(place: str, parts: Sequence[object], least: int, most: int) -> None:
    if not least <= len(parts) <= most:
        raise UsageError(f"{place}: there are {len(parts)}; give {least} to {most}")


def _known(place: str, name: object, names: Collection[object]) -> None:
    if name not in names:
        raise UsageError(f"{place} = {name!r}: give one of {', '.join(map(str, names))}")
