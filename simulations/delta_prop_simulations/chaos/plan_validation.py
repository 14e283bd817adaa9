"""Checks that a handwritten plan can be run: its names are known, its numbers within bounds.

A drawn plan is always valid. An error in a plan that was edited by hand is reported here in one line;
otherwise the run would report it as a violation of the service. Pure.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.plan import STRIKES
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from delta_prop_simulations.chaos.plan import NodePlan, Plan, ReaderPlan, StrikePlan, WriterPlan

SECONDS_MAX = 600.0
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
