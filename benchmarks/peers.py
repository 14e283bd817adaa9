"""Compares delta-prop serve with NATS JetStream, Redis Streams and Kafka: one machine, one run, one harness.

Each round measures every scene against every server in turn, while the others idle. The result is the ratio
within a round; its median is printed. Clients are minimal, and the same for all, so that the server is
measured: a publisher and consumers in processes of their own, payloads of 128 B, a bounded number of
unacknowledged payloads, every consumer durable and acknowledging.

A consumer checks the size and the publish time of each payload, so it detects lost, duplicate and reordered
ones. Our consumer also checks that counters have no gap, and our publisher sends some frames twice at the
end. The table names the guarantee of each server's acknowledgement: the page cache, or stable storage. Single
calls come from an asyncio program, one task each, up to 4,000 open: to JetStream and Redis over a raw
connection, to ours through its client, which batches them. The imported modules of each such program are
frozen first, so that the garbage collector scans only the calls. Kafka gets the payloads of one call as one
record batch, after five seconds in which Java compiles its code.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks._arguments import bounded_float, bounded_int, select_names, writable_directory
from benchmarks._limits import limits_mb_s
from benchmarks._measure import Figure, format_number, table
from benchmarks._peers_contract import Peer
from benchmarks._peers_goals import IDLE, OURS, RATE, SCENES, Limits, Rounds, judge, peers_for
from benchmarks._peers_kafka import Kafka
from benchmarks._peers_nats import JetStream
from benchmarks._peers_ours import Ours, OursDurable
from benchmarks._peers_redis import RedisAlways, RedisEverySecond
from benchmarks._peers_scenes import Measurement, Scene, measure
from benchmarks._results import Results, format_figure, options_of

PEERS: dict[str, type[Peer]] = {
    "jetstream": JetStream,
    "redis": RedisEverySecond,
    "redis-always": RedisAlways,
    "kafka": Kafka,
    "ours": Ours,
    "ours-durable": OursDurable,
}
QUICK_SHARES = {True: 0.5, False: 0.7}
"""Share of a scene's seconds that a quick run publishes, by `Scene.is_timed`."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. Return 1 if a delta was lost, or a goal missed by far."""
    given = _parse_arguments(arguments)
    rounds: Rounds = {}
    limits: Limits = {}
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="peers-", dir=given.directory)))
        peers = dict(start_peers(given.peers, folder, exits))
        for turn in range(given.rounds):
            limits[turn] = {} if given.no_limits else limits_mb_s(folder)
            for scene in _scenes(given):
                compared = peers if given.all else peers_for(scene)
                for name in (name for name in peers if name in compared):
                    play(rounds, turn, scene, name, peers[name], size=given.size)
    results = Results("peers")
    report(
        results, rounds, {turn: by_limit for turn, by_limit in limits.items() if by_limit}, peers, given.size
    )
    return results.finish(given.json)


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = options_of("peers", __doc__, rounds=5)
    parser.option("--peers", _peer_names, ",".join(PEERS), f"some of {', '.join(PEERS)}")
    parser.option(
        "--scenes",
        select_names([scene.name for scene in SCENES]),
        "",
        "only scenes whose name contains one of PARTS",
        metavar="PARTS",
    )
    parser.option(
        "--seconds", bounded_float(0.01, 3_600), 1.5, "maximum seconds that a measurement publishes"
    )
    parser.option("--size", bounded_int(8, 65_536), 128, "bytes of a payload, a multiple of 8")
    parser.add_argument(
        "--all", action="store_true", help="measure every scene with every peer, even without a goal"
    )
    parser.add_argument("--no-limits", action="store_true", help="skip the machine's limits")
    parser.option(
        "--directory",
        writable_directory,
        None,
        "store the servers' data on the disk that DIR is on",
        metavar="DIR",
    )
    given = parser.parse_args(arguments)
    if given.size % 8:
        parser.error(f"--size {given.size} is not a multiple of 8")
    return given


def _peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"'{','.join(unknown)}' is not a peer: choose from {', '.join(PEERS)}"
        )
    return names


def _scenes(given: argparse.Namespace) -> list[Scene]:
    """Return the selected scenes with their durations."""
    scenes = []
    for scene in SCENES:
        if scene.name in given.scenes:
            seconds = scene.seconds_max if scene.is_timed else given.seconds
            share = QUICK_SHARES[scene.is_timed] if given.quick else 1.0
            scenes.append(replace(scene, seconds_max=seconds * share))
    return scenes


def start_peers(names: Iterable[str], folder: Path, exits: ExitStack) -> Iterable[tuple[str, Peer]]:
    """Start the peers that are installed; each is stopped at the end."""
    for name in names:
        peer = PEERS[name]()
        missing = peer.missing_program()
        if missing is not None:
            print(f"{peer.name} is skipped: {missing} is not installed", file=sys.stderr)
            continue
        (folder / name).mkdir()
        exits.callback(peer.stop)
        try:
            peer.start(folder / name)
        except (OSError, TimeoutError) as error:
            print(f"{peer.name} is skipped: {error}", file=sys.stderr)
        else:
            yield name, peer


def play(rounds: Rounds, turn: int, scene: Scene, name: str, peer: Peer, *, size: int) -> None:
    """Measure one scene against one server."""
    # Each measurement has a topic of its own, or its consumers would resume where those of another ended.
    topic = f"t{os.getpid()}x{turn}x" + "".join(letter for letter in scene.name if letter.isalnum())
    try:
        measured = measure(peer, scene, topic, size=size)
    except (RuntimeError, OSError) as error:
        print(f"{turn} {scene.name}: {peer.name}: {error}", file=sys.stderr)
        return
    rounds.setdefault((scene.name, name), {})[turn] = measured
    print(
        f"{turn} {scene.name:36} {peer.name:22} {measured.deltas_a_second:10,.0f}/s  "
        f"p50 {measured.latency_p50_us:7,.0f} p99 {measured.latency_p99_us:7,.0f} µs  "
        f"{measured.server_cpu_us:6.2f} µs CPU a delta  load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )


# --- results


def report(results: Results, rounds: Rounds, limits: Limits, peers: Mapping[str, Peer], size: int) -> None:
    """Add the tables, figures and goals to the results."""
    for scene in SCENES:
        by_peer = {name: rounds[scene.name, name] for name in peers if (scene.name, name) in rounds}
        if by_peer:
            results.tables.append(_table(scene, by_peer, peers))
            _add_figures(results, scene, by_peer)
    if limits:
        for limit in next(iter(limits.values())):
            results.add_figure(f"limit: {limit}", [one[limit] for one in limits.values()], "MB/s")
        results.tables.append(_limit_table(results))
    results.tables += [_format_counters(name, rounds, peers[name]) for name in peers]
    for goal, ratios in judge(rounds, limits, size).items():
        results.add_goal(goal, ratios)
    violations = sum(one.lost + one.twice for by_round in rounds.values() for one in by_round.values())
    if violations:
        results.failures.append(f"{violations} deltas were lost, or came twice")
    results.more["rounds"] = [
        {"scene": scene, "peer": name, "round": turn, **asdict(one)}
        for (scene, name), by_round in rounds.items()
        for turn, one in by_round.items()
    ]
    results.more["limits"] = list(limits.values())


def _add_figures(results: Results, scene: Scene, by_peer: Mapping[str, Mapping[int, Measurement]]) -> None:
    for name, by_round in by_peer.items():
        measurements = list(by_round.values())
        if scene.is_timed:
            for share in ("p50", "p99"):
                took = [getattr(one, f"latency_{share}_us") for one in measurements]
                results.add_figure(f"{scene.name}: {name}: {share}", took, "µs", less=True)
        else:
            rates = [one.deltas_a_second for one in measurements]
            results.add_figure(f"{scene.name}: {name}", rates, "deltas/s")
        if name.startswith(OURS):
            for label, field in (("server CPU", "server_cpu_us"), ("server user CPU", "server_user_us")):
                cpu = [getattr(one, field) for one in measurements]
                results.add_figure(f"{scene.name}: {name}: {label}", cpu, "µs a delta", less=True)


def _table(scene: Scene, by_peer: Mapping[str, Mapping[int, Measurement]], peers: Mapping[str, Peer]) -> str:
    header = [
        "",
        "deltas/s",
        "received p50 µs",
        "p99",
        "acked p50 µs",
        "server CPU µs",
        "of it user",
        "publisher",
        "consumer",
    ]
    fields = (
        *("deltas_a_second", "latency_p50_us", "latency_p99_us", "ack_p50_us"),
        *("server_cpu_us", "server_user_us", "publisher_cpu_us", "consumer_cpu_us"),
    )
    rows = []
    for name, by_round in by_peer.items():
        figures = [_figure_of(by_round.values(), one) for one in fields]
        spreads = [format_figure(asdict(one)) if one.high else "" for one in figures[:3]]
        rows.append((f"{peers[name].name} ({peers[name].durability})", *spreads, *map(_median, figures[3:])))
    sent = "singly" if scene.batch == 1 else f"{scene.batch} a call"
    round_count = max(len(by_round) for by_round in by_peer.values())
    title = f"{scene.name}: {scene.consumers} consumers, {sent}, {round_count} rounds (CPU a delta)"
    if scene in (RATE, IDLE):
        samples = _figure_of(
            (one for by_round in by_peer.values() for one in by_round.values()), "deltas"
        ).low
        title += f", at least {samples:,.0f} samples per round"
    return table(title, header, rows)


def _figure_of(measurements: Iterable[Measurement], field: str) -> Figure:
    return Figure.of([float(getattr(one, field)) for one in measurements])


def _median(figure: Figure) -> str:
    return format_number(figure.median)


def _limit_table(results: Results) -> str:
    rows: Sequence[Sequence[object]] = [
        (name.removeprefix("limit: "), format_figure(one))
        for name, one in results.figures.items()
        if name.startswith("limit: ")
    ]
    return table("limits of the machine, MB/s: loopback TCP, 1 MiB write + fdatasync", ("", "MB/s"), rows)


_COUNTER_LABELS = {
    "delta_prop_accepted_deltas_total": "accepted",
    "delta_prop_duplicate_deltas_total": "duplicates",
    "delta_prop_sent_deltas_total": "delivered",
    "delta_prop_refusals_total": "refused",
}


def _format_counters(name: str, rounds: Rounds, peer: Peer) -> str:
    """Return the totals of a server: published and lost payloads, and its own counters."""
    own = [one for (_, played), by_round in rounds.items() if played == name for one in by_round.values()]
    text = f"{peer.name}: published {sum(one.payloads for one in own):,}"
    text += f", lost {sum(one.lost for one in own)}"
    totals: dict[str, float] = {}
    for one in own:
        for counter, value in one.counters.items():
            label = _COUNTER_LABELS.get(counter.partition("{")[0])
            if label is not None:
                totals[label] = totals.get(label, 0.0) + value
    return ", ".join([text, *(f"{counter} {value:,.0f}" for counter, value in totals.items())])


if __name__ == "__main__":
    sys.exit(main())
