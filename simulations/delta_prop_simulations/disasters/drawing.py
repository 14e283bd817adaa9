"""A plan drawn from a seed. Each run leaves some faults out altogether: where all strike, none gets far.

Sizes are such that a run takes about half a second of a processor, and half a minute of virtual time.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from delta_prop_simulations.chance import Seed
from delta_prop_simulations.disasters.plan import (
    NodePlan,
    Plan,
    ReaderPlan,
    SinkPlan,
    StrikePlan,
    WriterPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.disasters.plan import Knobs

DURATION_S = 20.0

_STAYING = ("transactional", "plain")
_MODELS = ("transactional", "plain", "volatile", "rebuildable")
_STRIKES_MAX = 9
_DELTAS = (80, 160)
_ROOMY_BYTES = 1 << 24
_WRITING_S = DURATION_S * 0.8
_APART_SHARE = 0.15
"""Of the plans with several services."""
_HOT_INDEX = SinkPlan("index-hot", "index")
_PATIENCE_S = (20.0, 0.3)
"""So long that a log comes back meanwhile, or not."""


def draw(number: int) -> Plan:
    """The plan of this seed."""
    seed = Seed(number).child("plan")
    shape = seed.stream("shape")
    in_memory = shape.random() < 0.12
    count = 1 if in_memory else shape.choice((1, 1, 1, 2, 2, 3))
    lossy = shape.random() < 0.7  # whether a disk may lose what it was not told to sync
    nodes = tuple(
        _draw_node(seed.child(f"node-{place}"), place, count, in_memory=in_memory, lossy=lossy)
        for place in range(count)
    )
    writers = _draw_writers(seed.stream("writers"), seed.stream("manners of writers"), nodes)
    readers = _draw_readers(seed.stream("readers"), seed.stream("credit of readers"), nodes)
    plan = Plan(
        seed=number,
        nodes=nodes,
        writers=writers,
        readers=readers,
        strikes=_draw_strikes(seed.stream("strikes"), nodes, writers, readers, lossy=lossy),
        network=_draw_network(seed.stream("network")),
        duration_s=DURATION_S,
        power_cut_at_end=not in_memory and lossy and shape.random() < 0.7,
    )
    apart = seed.stream("apart")
    return _apart(plan, apart) if count > 1 and apart.random() < _APART_SHARE else plan


def _apart(plan: Plan, chance: Random) -> Plan:
    """The same with services that a long cut keeps apart, while everybody changes the same two vectors."""
    at_s, for_s = round(chance.uniform(0.5, 3.0), 3), round(chance.uniform(0.4, 0.9) * _WRITING_S, 3)
    names = [node.name for node in plan.nodes]
    cuts = [StrikePlan(at_s, "cut both", f"{one}>{other}", for_s) for one, other in combinations(names, 2)]
    return replace(
        plan,
        nodes=tuple(replace(node, sinks=(*node.sinks, _HOT_INDEX)) for node in plan.nodes),
        writers=tuple(replace(writer, hot=True) for writer in plan.writers),
        strikes=tuple(sorted([*plan.strikes, *cuts], key=_by_time)),
    )


# --- nodes


def _draw_node(seed: Seed, place: int, count: int, *, in_memory: bool, lossy: bool) -> NodePlan:
    names = [f"node-{number}" for number in range(count)]
    threads, clock = seed.stream("threads"), seed.stream("clock")
    log = None if in_memory else _draw_log(seed.stream("log"), alone=count == 1, lossy=lossy)
    return NodePlan(
        name=names[place],
        log=log,
        settings=_draw_settings(seed.stream("settings")),
        sinks=_draw_sinks(seed.stream("sinks"), log),
        forward_to=tuple(name for name in names if name != names[place]),
        threads={
            "delay_s_max": threads.choice((0.0, 0.001, 0.01)),
            "early": threads.choice((0.0, 0.5, 1.0)),
            "stalls": threads.choice((0.0, 0.0, 0.02)),
        },
        drift=clock.choice((0.0, 0.0, 0.01, -0.01)),
        jumps=tuple(
            (clock.uniform(0, DURATION_S), clock.choice((-3600.0, 3600.0, -1.0, 30.0)))
            for _ in range(clock.choice((0, 0, 1, 2)))
        ),
        server=_draw_server(seed.stream("server")),
    )


def _draw_log(chance: Random, *, alone: bool, lossy: bool) -> Knobs:
    segment = chance.choice((2_000, 8_000, 64_000))
    tight = alone and chance.random() < 0.5
    bytes_max = 12 * segment if tight else _ROOMY_BYTES
    return {
        "level": "durable" if lossy else chance.choice(("durable", "logged")),
        "segment_bytes_max": segment,
        "segment_s_max": chance.choice((5.0, 3600.0)),
        "bytes_max": bytes_max,
        "keep_bytes_max": bytes_max // 2,
        "keep_s": chance.choice((10.0, 3600.0)) if tight else 1e6,
        "compact": chance.random() < 0.7,
        "checkpoint_frames": chance.choice((7, 40, 20_000)),
        "reserve_bytes": chance.choice((0, 64_000)),
        "free_bytes_min": 0,
    }


def squeezed(log: Knobs) -> bool:
    """Whether it lets go of what somebody might still want."""
    return float(log["bytes_max"]) < _ROOMY_BYTES


def _draw_settings(chance: Random) -> Knobs:
    return {
        "mailbox_deltas_max": chance.choice((5, 50, 10_000)),
        "batch_deltas": chance.choice((1, 10, 100)),
        "merge_deltas_max": chance.choice((100, 1_000)),
        "queue_deltas_max": chance.choice((50, 100_000)),
        "id_generation": chance.choice((20, 1_000_000)),
        "apply_s_max": 3.0,
        "breaker_probe_s": 3.0,
        "pending_time_s_max": chance.choice((2.0, 30.0)),
        "close_timeout_s": 3.0,
    }


def _draw_server(chance: Random) -> Knobs:
    """Windows and queues of connections, some so small that they are always full."""
    return {
        "producer_deltas_credit": chance.choice((3, 20, 20_000)),
        "producer_bytes_credit": chance.choice((2_000, 1 << 23)),
        "outlet_bytes_max": chance.choice((1_000, 1 << 20)),
        "send_bytes_max": chance.choice((500, 1 << 18)),
    }


def _draw_sinks(chance: Random, log: Knobs | None) -> tuple[SinkPlan, ...]:
    """Sinks that can live beside this log: what it lets go is gone for those that cannot be rebuilt."""
    rebuilt = log is None or log["compact"] or not squeezed(log)
    models = ("volatile",) if log is None else _MODELS if rebuilt else ("transactional", "plain")
    kinds = [chance.choice(models) for _ in range(chance.choice((1, 1, 2, 3)))]
    kinds += [kind for kind in ("cache", "index") if rebuilt and chance.random() < 0.3]
    failing = chance.random() < 0.6
    return tuple(
        SinkPlan(
            name=f"{kind}-{place}",
            kind=kind,
            topics=chance.choice(("*", "*", "*", "ns:a")) if kind in _MODELS else "*",
            required=chance.random() < 0.8 or (kind in _STAYING and log is not None and squeezed(log)),
            pacing=chance.random() < 0.15,
            faults=_draw_sink_faults(chance) if failing and kind in _MODELS else {},
        )
        for place, kind in enumerate(kinds)
    )


def _draw_sink_faults(chance: Random) -> dict[str, float]:
    shares = {name: 0.08 for name in ("before", "after", "half_way", "slow") if chance.random() < 0.4}
    if chance.random() < 0.2:
        shares["hang"] = 0.01
    return shares


# --- clients


def _draw_writers(chance: Random, manner: Random, nodes: Sequence[NodePlan]) -> tuple[WriterPlan, ...]:
    count = chance.choice((2, 3, 4))
    deltas = chance.randint(*_DELTAS) // count
    poison = chance.choice((0.0, 0.0, 0.02))
    levels = ("memory", None) if nodes[0].log is None else (None, None, "durable", "logged", "memory")
    return tuple(
        WriterPlan(
            name=f"writer-{number}",
            node=chance.choice(nodes).name,
            embedded=chance.random() < 0.4,
            deltas=deltas,
            burst=(burst := chance.choice((1, 3, 8))),
            gap_s=round(_WRITING_S * burst / deltas * chance.choice((0.3, 0.7, 1.0)), 3),
            level=chance.choice(levels),
            poison=poison,
            patience_s=manner.choice(_PATIENCE_S),
            offers=manner.random() < 0.5,
        )
        for number in range(count)
    )


def _draw_readers(chance: Random, credit: Random, nodes: Sequence[NodePlan]) -> tuple[ReaderPlan, ...]:
    kept = [node.name for node in nodes if node.log is None or not squeezed(node.log)]
    return tuple(
        ReaderPlan(
            name=f"reader-{number}",
            node=chance.choice(kept),
            topics=chance.choice(("*", "*", "ns:a")),
            group=chance.random() < 0.6,
            batches=chance.random() < 0.5,
            credit=credit.choice((4, 30, 20_000)),
        )
        for number in range(chance.choice((0, 1, 1, 2)) if kept else 0)
    )


# --- what strikes


def _draw_strikes(
    chance: Random,
    nodes: Sequence[NodePlan],
    writers: Sequence[WriterPlan],
    readers: Sequence[ReaderPlan],
    *,
    lossy: bool,
) -> tuple[StrikePlan, ...]:
    kinds = [
        kind
        for kind in _DRAWN
        if (lossy or kind not in _LOSING)
        and (kind not in _ON_DISK or nodes[0].log is not None)
        and (kind != "detach" or any(node.log is None or not squeezed(node.log) for node in nodes))
        and (kind not in _ON_WRITERS or any(not one.embedded for one in writers))
        and (kind not in _ON_READERS or readers)
        and (kind not in _ON_WAYS or readers or len(nodes) > 1 or any(not one.embedded for one in writers))
    ]
    chosen = [kind for kind in kinds if chance.random() < 0.4]
    struck = [chance.choice(_SURE)]  # the others may find nothing to strike
    struck += chance.choices(chosen or kinds, k=chance.randint(1, _STRIKES_MAX - 1))
    strikes = [_DRAWN[kind](chance, kind, nodes, writers, readers) for kind in struck]
    strikes[0] = replace(strikes[0], at_s=max(strikes[0].at_s, _ALL_UP_S))
    return tuple(sorted(strikes, key=_by_time))


def _by_time(strike: StrikePlan) -> tuple[float, str, str]:
    return strike.at_s, strike.kind, strike.on


def _when(chance: Random) -> float:
    return round(chance.uniform(0.2, DURATION_S * 0.8), 3)


def _how_long(chance: Random) -> float:
    return round(chance.choice((0.01, 0.3, 2.0, 6.0)) * chance.uniform(0.5, 1.5), 3)


def _on_node(chance: Random, kind: str, nodes: Sequence[NodePlan], *_others: object) -> StrikePlan:
    return StrikePlan(
        _when(chance), kind, chance.choice(nodes).name, _how_long(chance), float(chance.randint(1, 60))
    )


def _on_sink(chance: Random, kind: str, nodes: Sequence[NodePlan], *_others: object) -> StrikePlan:
    if kind == "detach":  # for one that is detached nothing is kept
        nodes = [node for node in nodes if node.log is None or not squeezed(node.log)]
    node = chance.choice(nodes)
    return StrikePlan(_when(chance), kind, f"{node.name}/{chance.choice(node.sinks).name}", _how_long(chance))


def _on_way(
    chance: Random,
    kind: str,
    nodes: Sequence[NodePlan],
    writers: Sequence[WriterPlan],
    readers: Sequence[ReaderPlan],
) -> StrikePlan:
    ways = [(one.name, one.node) for one in writers if not one.embedded]
    ways += [(one.name, one.node) for one in readers]
    ways += [(node.name, other) for node in nodes for other in node.forward_to]
    here, there = chance.choice(ways)
    if chance.random() < 0.5:
        here, there = there, here
    return StrikePlan(_when(chance), kind, f"{here}>{there}", _how_long(chance), chance.uniform(500, 20_000))


def _on_writer(
    chance: Random, kind: str, _nodes: object, writers: Sequence[WriterPlan], _readers: object
) -> StrikePlan:
    names = [one.name for one in writers if not one.embedded]
    return StrikePlan(_when(chance), kind, chance.choice(names), _how_long(chance))


def _on_reader(
    chance: Random, kind: str, _nodes: object, _writers: object, readers: Sequence[ReaderPlan]
) -> StrikePlan:
    return StrikePlan(_when(chance), kind, chance.choice(readers).name, _how_long(chance))


_ON_DISK = {"last call", "write error", "sync error", "read error", "disk full"}
_SURE = ("kill", "stop")
_ALL_UP_S = 1.0
"""A service may take that long to start; what is sure to strike strikes later."""
_LOSING = {"power", "last call", "sync error"}
_ON_WRITERS = {"kill writer"}
_ON_READERS = {"kill reader", "stall reader"}
_ON_WAYS = {"cut", "cut both", "slow link"}
_DRAWN: dict[str, Callable[..., StrikePlan]] = {
    **dict.fromkeys(("kill", "power", "stop", "slow disk", "reset", *sorted(_ON_DISK)), _on_node),
    **dict.fromkeys(("pause", "detach", "rebuild"), _on_sink),
    **dict.fromkeys(sorted(_ON_WAYS), _on_way),
    **dict.fromkeys(sorted(_ON_WRITERS), _on_writer),
    **dict.fromkeys(sorted(_ON_READERS), _on_reader),
}


def _draw_network(chance: Random) -> dict[str, float | None]:
    return {
        "latency_s": chance.choice((0.0005, 0.02, 0.15)),
        "jitter_s_max": chance.choice((0.0, 0.01)),
        "chunk_bytes_max": chance.choice((None, None, 100, 1000)),
        "reset_bytes_mean": chance.choice((None, None, 20_000.0)),
    }
