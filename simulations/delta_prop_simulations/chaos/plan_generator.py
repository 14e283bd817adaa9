"""Draws a plan from a seed, with some kinds of faults: with all of them, no run would get far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from delta_prop_simulations.chaos.plan import (
    PARTITIONS_MAX,
    Knobs,
    NodePlan,
    Plan,
    ReaderPlan,
    SinkPlan,
    StrikePlan,
    WriterPlan,
)
from delta_prop_simulations.rng import Random, Seed

DURATION_S = 20.0

_WITHOUT_REBUILD = ("transactional", "plain")
_MODEL_KINDS = ("transactional", "plain", "volatile", "rebuildable")
_STRIKES_MAX = 9
_DELTAS_RANGE = (80, 160)
"""Minimum and maximum number of deltas of all writers together."""
_LARGE_BYTES = 1 << 24
"""The bound of a log that is larger than all rows of a run."""
_WRITING_S = DURATION_S * 0.8
_LONG_CUT_SHARE = 0.15
"""The share of plans with several services that get a long network cut."""
_PARTITION_SHARE = 0.4
"""The share of plans with one service on disk that serves streams."""
_HOT_INDEX = SinkPlan("index-hot", "index")
_PATIENCE_S = (20.0, 0.3)
"""Timeouts of publishing: one is long enough for a log to be recovered meanwhile, the other is not."""


def draw(number: int) -> Plan:
    """Draw the plan of this seed."""
    seed = Seed(number).child("plan")
    rng = seed.stream("shape")
    in_memory = rng.random() < 0.12
    node_count = 1 if in_memory else rng.choice((1, 1, 1, 2, 2, 3))
    lossy = rng.random() < 0.7  # disks may lose unsynced data
    nodes = tuple(
        _draw_node(seed.child(f"node-{index}"), index, node_count, in_memory=in_memory, lossy=lossy)
        for index in range(node_count)
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
        power_cut_at_end=not in_memory and lossy and rng.random() < 0.7,
    )
    if node_count == 1 and not in_memory:
        plan = _with_partition(plan, seed.stream("partition"))
    cut_rng = seed.stream("apart")
    has_long_cut = node_count > 1 and cut_rng.random() < _LONG_CUT_SHARE
    return _with_long_cut(plan, cut_rng) if has_long_cut else plan


def _with_partition(plan: Plan, rng: Random) -> Plan:
    """Return the plan, for some with the work in a partition of a stream."""
    if rng.random() >= _PARTITION_SHARE:
        return plan
    (node,) = plan.nodes
    return replace(plan, nodes=(replace(node, partition=rng.randrange(PARTITIONS_MAX)),))


def _with_long_cut(plan: Plan, rng: Random) -> Plan:
    """Return the plan with a long cut between its services, while all writers change the same two vectors."""
    at_s, for_s = round(rng.uniform(0.5, 3.0), 3), round(rng.uniform(0.4, 0.9) * _WRITING_S, 3)
    names = [node.name for node in plan.nodes]
    cuts = [StrikePlan(at_s, "cut both", f"{one}>{other}", for_s) for one, other in combinations(names, 2)]
    return replace(
        plan,
        nodes=tuple(replace(node, sinks=(*node.sinks, _HOT_INDEX)) for node in plan.nodes),
        writers=tuple(replace(writer, hot=True) for writer in plan.writers),
        strikes=tuple(sorted([*plan.strikes, *cuts], key=_by_time)),
    )


# --- nodes


def _draw_node(seed: Seed, index: int, node_count: int, *, in_memory: bool, lossy: bool) -> NodePlan:
    names = [f"node-{number}" for number in range(node_count)]
    threads, clock = seed.stream("threads"), seed.stream("clock")
    log = None if in_memory else _draw_log(seed.stream("log"), single_node=node_count == 1, lossy=lossy)
    if log is not None:
        log = {**log, "tombstone_retention_s": seed.stream("tombstones").choice((0.0, 0.0, 2.0, 86_400.0))}
    return NodePlan(
        name=names[index],
        log=log,
        settings=_draw_settings(seed.stream("settings")),
        sinks=_draw_sinks(seed.stream("sinks"), log),
        forward_to=tuple(name for name in names if name != names[index]),
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


def _draw_log(rng: Random, *, single_node: bool, lossy: bool) -> Knobs:
    segment_bytes = rng.choice((2_000, 8_000, 64_000))
    is_tight = single_node and rng.random() < 0.5
    bytes_max = 12 * segment_bytes if is_tight else _LARGE_BYTES
    return {
        "read_level": "durable" if lossy else rng.choice(("durable", "logged")),
        "segment_bytes_max": segment_bytes,
        "segment_s_max": rng.choice((5.0, 3600.0)),
        "bytes_max": bytes_max,
        "retention_bytes": bytes_max // 2,
        "retention_s": rng.choice((10.0, 3600.0)) if is_tight else 1e6,
        "compact": rng.random() < 0.7,
        "checkpoint_frames": rng.choice((7, 40, 20_000)),
        "reserve_bytes": rng.choice((0, 64_000)),
        "free_bytes_min": 0,
    }


def has_tight_retention(log: Knobs) -> bool:
    """True if the log's retention removes rows that a reader may still need."""
    return float(log["bytes_max"]) < _LARGE_BYTES


def _draw_settings(rng: Random) -> Knobs:
    return {
        "mailbox_deltas_max": rng.choice((5, 50, 10_000)),
        "batch_deltas": rng.choice((1, 10, 100)),
        "merge_deltas_max": rng.choice((100, 1_000)),
        "queue_deltas_max": rng.choice((50, 100_000)),
        "ids_per_generation": rng.choice((20, 1_000_000)),
        "apply_timeout_s": 3.0,
        "breaker_open_s": 3.0,
        "pending_timeout_s": rng.choice((2.0, 30.0)),
        "close_timeout_s": 3.0,
    }


def _draw_server(rng: Random) -> Knobs:
    """Draw the windows and queues of connections; some are so small that they are always full."""
    return {
        "producer_deltas_credit": rng.choice((3, 20, 20_000)),
        "producer_bytes_credit": rng.choice((2_000, 1 << 23)),
        "subscriber_bytes_max": rng.choice((1_000, 1 << 20)),
        "send_bytes_max": rng.choice((500, 1 << 18)),
    }


def _draw_sinks(rng: Random, log: Knobs | None) -> tuple[SinkPlan, ...]:
    """Draw sinks for this log: none depends on a rebuild if no snapshot replaces the rows it removes."""
    can_rebuild = log is None or log["compact"] or not has_tight_retention(log)
    model_kinds = ("volatile",) if log is None else _MODEL_KINDS if can_rebuild else _WITHOUT_REBUILD
    kinds = [rng.choice(model_kinds) for _ in range(rng.choice((1, 1, 2, 3)))]
    kinds += [kind for kind in ("cache", "index") if can_rebuild and rng.random() < 0.3]
    has_faults = rng.random() < 0.6
    return tuple(
        SinkPlan(
            name=f"{kind}-{index}",
            kind=kind,
            topics=rng.choice(("*", "*", "*", "ns:a")) if kind in _MODEL_KINDS else "*",
            required=rng.random() < 0.8
            or (kind in _WITHOUT_REBUILD and log is not None and has_tight_retention(log)),
            pacing=rng.random() < 0.15,
            faults=_draw_sink_faults(rng) if has_faults and kind in _MODEL_KINDS else {},
        )
        for index, kind in enumerate(kinds)
    )


def _draw_sink_faults(rng: Random) -> dict[str, float]:
    shares = {name: 0.08 for name in ("before", "after", "half_way", "slow") if rng.random() < 0.4}
    if rng.random() < 0.2:
        shares["hang"] = 0.01
    return shares


# --- clients


def _draw_writers(rng: Random, later_rng: Random, nodes: Sequence[NodePlan]) -> tuple[WriterPlan, ...]:
    """Draw the writers. `later_rng`: for fields that were added later, so seeds keep their other draws."""
    writer_count = rng.choice((2, 3, 4))
    delta_count = rng.randint(*_DELTAS_RANGE) // writer_count
    poison = rng.choice((0.0, 0.0, 0.02))
    levels = ("memory", None) if nodes[0].log is None else (None, None, "durable", "logged", "memory")
    return tuple(
        WriterPlan(
            name=f"writer-{number}",
            node=rng.choice(nodes).name,
            embedded=rng.random() < 0.4,
            deltas=delta_count,
            burst=(burst := rng.choice((1, 3, 8))),
            gap_s=round(_WRITING_S * burst / delta_count * rng.choice((0.3, 0.7, 1.0)), 3),
            level=rng.choice(levels),
            poison=poison,
            patience_s=later_rng.choice(_PATIENCE_S),
            offers=later_rng.random() < 0.5,
        )
        for number in range(writer_count)
    )


def _draw_readers(rng: Random, credit_rng: Random, nodes: Sequence[NodePlan]) -> tuple[ReaderPlan, ...]:
    retaining = [node.name for node in nodes if node.log is None or not has_tight_retention(node.log)]
    return tuple(
        ReaderPlan(
            name=f"reader-{number}",
            node=rng.choice(retaining),
            topics=rng.choice(("*", "*", "ns:a")),
            group=rng.random() < 0.6,
            batches=rng.random() < 0.5,
            credit=credit_rng.choice((4, 30, 20_000)),
        )
        for number in range(rng.choice((0, 1, 1, 2)) if retaining else 0)
    )


# --- faults


def _draw_strikes(
    rng: Random,
    nodes: Sequence[NodePlan],
    writers: Sequence[WriterPlan],
    readers: Sequence[ReaderPlan],
    *,
    lossy: bool,
) -> tuple[StrikePlan, ...]:
    kinds = [
        kind
        for kind in _DRAWERS
        if (lossy or kind not in _LOSING_DATA)
        and (kind not in _ON_DISK or nodes[0].log is not None)
        and (kind != "detach" or any(node.log is None or not has_tight_retention(node.log) for node in nodes))
        and (kind not in _ON_WRITERS or any(not one.embedded for one in writers))
        and (kind not in _ON_READERS or readers)
        and (kind not in _ON_PATHS or readers or len(nodes) > 1 or any(not one.embedded for one in writers))
    ]
    chosen = [kind for kind in kinds if rng.random() < 0.4]
    drawn = [rng.choice(_ALWAYS_HIT)]  # the other faults may find no target
    drawn += rng.choices(chosen or kinds, k=rng.randint(1, _STRIKES_MAX - 1))
    strikes = [_DRAWERS[kind](rng, kind, nodes, writers, readers) for kind in drawn]
    strikes[0] = replace(strikes[0], at_s=max(strikes[0].at_s, _ALL_UP_S))
    return tuple(sorted(strikes, key=_by_time))


def _by_time(strike: StrikePlan) -> tuple[float, str, str]:
    return strike.at_s, strike.kind, strike.on


def _draw_time(rng: Random) -> float:
    return round(rng.uniform(0.2, DURATION_S * 0.8), 3)


def _draw_duration(rng: Random) -> float:
    return round(rng.choice((0.01, 0.3, 2.0, 6.0)) * rng.uniform(0.5, 1.5), 3)


def _draw_node_strike(rng: Random, kind: str, nodes: Sequence[NodePlan], *_others: object) -> StrikePlan:
    return StrikePlan(
        _draw_time(rng), kind, rng.choice(nodes).name, _draw_duration(rng), float(rng.randint(1, 60))
    )


def _draw_sink_strike(rng: Random, kind: str, nodes: Sequence[NodePlan], *_others: object) -> StrikePlan:
    if kind == "detach":  # the log retains nothing for a detached sink
        nodes = [node for node in nodes if node.log is None or not has_tight_retention(node.log)]
    node = rng.choice(nodes)
    return StrikePlan(
        _draw_time(rng), kind, f"{node.name}/{rng.choice(node.sinks).name}", _draw_duration(rng)
    )


def _draw_path_strike(
    rng: Random,
    kind: str,
    nodes: Sequence[NodePlan],
    writers: Sequence[WriterPlan],
    readers: Sequence[ReaderPlan],
) -> StrikePlan:
    paths = [(one.name, one.node) for one in writers if not one.embedded]
    paths += [(one.name, one.node) for one in readers]
    paths += [(node.name, other) for node in nodes for other in node.forward_to]
    source, target = rng.choice(paths)
    if rng.random() < 0.5:
        source, target = target, source
    return StrikePlan(
        _draw_time(rng), kind, f"{source}>{target}", _draw_duration(rng), rng.uniform(500, 20_000)
    )


def _draw_writer_strike(
    rng: Random, kind: str, _nodes: object, writers: Sequence[WriterPlan], _readers: object
) -> StrikePlan:
    names = [one.name for one in writers if not one.embedded]
    return StrikePlan(_draw_time(rng), kind, rng.choice(names), _draw_duration(rng))


def _draw_reader_strike(
    rng: Random, kind: str, _nodes: object, _writers: object, readers: Sequence[ReaderPlan]
) -> StrikePlan:
    return StrikePlan(_draw_time(rng), kind, rng.choice(readers).name, _draw_duration(rng))


_ON_DISK = {"last call", "write error", "sync error", "read error", "disk full"}
_ALWAYS_HIT = ("kill", "stop")
_ALL_UP_S = 1.0
"""Maximum time of a service's start; a fault that must find its target is injected later."""
_LOSING_DATA = {"power", "last call", "sync error"}
_ON_WRITERS = {"kill writer"}
_ON_READERS = {"kill reader", "stall reader"}
_ON_PATHS = {"cut", "cut both", "slow link"}
_DRAWERS: dict[str, Callable[..., StrikePlan]] = {
    **dict.fromkeys(("kill", "power", "stop", "slow disk", "reset", *sorted(_ON_DISK)), _draw_node_strike),
    **dict.fromkeys(("pause", "detach", "rebuild"), _draw_sink_strike),
    **dict.fromkeys(sorted(_ON_PATHS), _draw_path_strike),
    **dict.fromkeys(sorted(_ON_WRITERS), _draw_writer_strike),
    **dict.fromkeys(sorted(_ON_READERS), _draw_reader_strike),
}


def _draw_network(rng: Random) -> dict[str, float | None]:
    return {
        "latency_s": rng.choice((0.0005, 0.02, 0.15)),
        "jitter_s_max": rng.choice((0.0, 0.01)),
        "chunk_bytes_max": rng.choice((None, None, 100, 1000)),
        "reset_bytes_mean": rng.choice((None, None, 20_000.0)),
    }
