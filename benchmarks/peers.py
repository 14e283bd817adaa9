"""delta-prop serve beside NATS JetStream and Redis Streams: one machine, one run, one harness.

Each round plays every scene against every server in turn, while the others idle. What counts is the ratio
within a round; its median is printed. Clients do as little as they can, the same for all, so that the server
is measured: a publisher and consumers in processes of their own, payloads of 128 B, at most 4,000 of them
unacknowledged, every consumer durable and acknowledging. What a server promises with an acknowledgement
stands beside it: the page cache, or stable storage.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks._measure import Figure, calibration_ns, table, write_json
from benchmarks._peers_nats import JetStream
from benchmarks._peers_ours import Ours, OursDurable
from benchmarks._peers_redis import RedisAlways, RedisEverySecond
from benchmarks._peers_scenes import Measured, Scene, measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchmarks._peers_contract import Peer

PEERS: dict[str, type[Peer]] = {
    "jetstream": JetStream,
    "redis": RedisEverySecond,
    "redis-always": RedisAlways,
    "ours": Ours,
    "ours-durable": OursDurable,
}
PUBLISH, FLOW, FAN_OUT = "publish", "publish to receive", "publish to 3 receivers"
RATE, IDLE = "2,000 a second", "idle to idle"
SCENES = (
    Scene(PUBLISH, consumers=0),
    Scene(FLOW, consumers=1),
    Scene(FAN_OUT, consumers=3),
    Scene(RATE, consumers=1, batch=1, rate=2_000.0),
    Scene(IDLE, consumers=1, batch=1, pause_s=0.01, seconds_max=3.0),
)


class Floor(NamedTuple):
    """What one peer's figure must be, as a multiple of another's of the same round."""

    scene: str
    ours: str
    theirs: str
    least: float | None = None
    most: float | None = None

    @property
    def bound(self) -> str:
        """For people."""
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def met(self, ratio: float) -> bool:
        """Whether a ratio is within the bound."""
        return (self.least is None or ratio >= self.least) and (self.most is None or ratio <= self.most)


FLOORS = (
    Floor(FLOW, "ours", "jetstream", least=4.0),
    Floor(FLOW, "ours", "redis", least=3.0),
    Floor(FLOW, "ours-durable", "redis-always", least=5.0),
    Floor(FAN_OUT, "ours", "jetstream", least=4.0),
    Floor(IDLE, "ours", "jetstream", most=1.2),
)
Rounds = dict[tuple[str, str], dict[int, Measured]]
"""Scene and peer, then the rounds."""


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write. Exit status 1 where a floor is missed or a delta was lost."""
    parser = argparse.ArgumentParser(prog="./run bench peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--scenes", default="", metavar="PART", help="only scenes whose name has this part")
    parser.add_argument("--seconds", type=float, default=1.5, help="how long a measurement publishes at most")
    parser.add_argument("--size", type=int, default=128, help="bytes of a payload")
    parser.add_argument("--window", type=int, default=4_000, help="deltas that may be unacknowledged")
    parser.add_argument(
        "--directory", metavar="DIR", help="keep the servers' data on the disk that DIR is on"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    given = parser.parse_args(arguments)
    names = [name for name in given.peers.split(",") if name]
    unknown = [name for name in names if name not in PEERS]
    if unknown or given.rounds < 1 or given.size < 8 or given.window < 200:
        parser.error(f"unknown peers {unknown}; or give at least 1 round, 8 bytes, a window of 200")
    scenes = [
        scene if scene.timed else replace(scene, seconds_max=given.seconds)
        for scene in SCENES
        if given.scenes in scene.name
    ]
    rounds: Rounds = {}
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="peers-", dir=given.directory)))
        peers = dict(started(names, folder, exits))
        for number in range(given.rounds):
            for scene in scenes:
                for name, peer in peers.items():
                    play(rounds, number, scene, name, peer, size=given.size, window=given.window)
    return report(rounds, peers, given.json)


def started(names: Iterable[str], folder: Path, exits: ExitStack) -> Iterable[tuple[str, Peer]]:
    """Those that are installed, running; each is stopped in the end."""
    for name in names:
        peer = PEERS[name]()
        missing = peer.missing()
        if missing is not None:
            print(f"{peer.name} is left out: {missing} is not installed", file=sys.stderr)
            continue
        (folder / name).mkdir()
        exits.callback(peer.stop)
        try:
            peer.start(folder / name)
        except (OSError, TimeoutError) as error:
            print(f"{peer.name} is left out: {error}", file=sys.stderr)
        else:
            yield name, peer


def play(rounds: Rounds, number: int, scene: Scene, name: str, peer: Peer, *, size: int, window: int) -> None:
    """One scene against one server."""
    topic = f"t{os.getpid()}x{len(rounds)}x{number}"
    try:
        measured = measure(peer, scene, topic, size=size, window=window)
    except (RuntimeError, OSError) as error:
        print(f"{number} {scene.name}: {peer.name}: {error}", file=sys.stderr)
        return
    rounds.setdefault((scene.name, name), {})[number] = measured
    print(
        f"{number} {scene.name:24} {peer.name:24} {measured.deltas_a_second:10,.0f}/s  "
        f"p50 {measured.latency_p50_us:7,.0f} µs  {measured.server_cpu_us:6.2f} µs CPU a delta  "
        f"load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )


# --- printing


def report(rounds: Rounds, peers: Mapping[str, Peer], path: str | None) -> int:
    """Print what was measured and what is met; the exit status."""
    print(f"calibration: {calibration_ns():.0f} ns CPU a loop turn; load {os.getloadavg()[0]:.1f}\n")
    for scene in SCENES:
        found = {name: rounds[scene.name, name] for name in peers if (scene.name, name) in rounds}
        if found:
            print(_table(scene, found, peers))
    for name in peers:
        print(_counted(name, rounds, peers[name]))
    judged = [(floor, ratios(rounds, floor)) for floor in FLOORS]
    for floor, ratio in judged:
        if ratio is not None:
            word = "met" if floor.met(ratio.median) else "SHORT"
            print(f"{floor.scene}: {floor.ours} / {floor.theirs}: {ratio}, wanted {floor.bound}: {word}")
    lost = sum(one.lost + one.twice for some in rounds.values() for one in some.values())
    if lost:
        print(f"{lost} deltas were lost, or came twice")
    write_json(
        path,
        {
            "rounds": [
                {"scene": scene, "peer": name, "round": number, **asdict(one)}
                for (scene, name), some in rounds.items()
                for number, one in some.items()
            ],
            "floors": [
                {**floor._asdict(), "ratio": None if ratio is None else asdict(ratio)}
                for floor, ratio in judged
            ],
        },
    )
    return int(bool(lost) or not all(ratio is None or floor.met(ratio.median) for floor, ratio in judged))


def ratios(rounds: Rounds, floor: Floor) -> Figure | None:
    """One peer's figure over the other's, round by round; None where none has both."""
    ours, theirs = (rounds.get((floor.scene, name), {}) for name in (floor.ours, floor.theirs))
    figure = _time_of if floor.most is not None else _rate_of
    found = [figure(ours[number]) / figure(theirs[number]) for number in ours if number in theirs]
    return Figure.of(found) if found else None


def _rate_of(measured: Measured) -> float:
    return measured.deltas_a_second


def _time_of(measured: Measured) -> float:
    return measured.latency_p50_us


def _table(scene: Scene, found: Mapping[str, Mapping[int, Measured]], peers: Mapping[str, Peer]) -> str:
    rows = []
    for name, by_round in found.items():
        some = list(by_round.values())
        rate, p50, p99, ack, server, client = (
            Figure.of([getattr(one, field) for one in some])
            for field in (
                *("deltas_a_second", "latency_p50_us", "latency_p99_us"),
                *("ack_p50_us", "server_cpu_us", "publisher_cpu_us"),
            )
        )
        rows.append(
            (
                f"{peers[name].name} ({peers[name].durability})",
                f"{rate.median:,.0f} ({rate.low:,.0f}-{rate.high:,.0f})",
                f"{p50.median:,.0f} ({p50.low:,.0f}-{p50.high:,.0f})",
                f"{p99.median:,.0f}",
                f"{ack.median:,.0f}",
                f"{server.median:.2f}",
                f"{client.median:.2f}",
            )
        )
    head = ("", "deltas/s", "received p50 µs", "p99", "acked p50 µs", "server CPU µs", "publisher CPU µs")
    sent = "singly" if scene.batch == 1 else f"{scene.batch} a call"
    return table(f"{scene.name}, {scene.consumers} consumers, {sent} (CPU a delta)", head, rows)


def _counted(name: str, rounds: Rounds, peer: Peer) -> str:
    """What went through a server in all, and what it says itself."""
    some = [one for (_, other), by_round in rounds.items() if other == name for one in by_round.values()]
    text = f"{peer.name}: published {sum(one.deltas for one in some):,}, lost {sum(one.lost for one in some)}"
    totals: dict[str, float] = {}
    for one in some:
        for counter, value in one.counters.items():
            totals[counter] = totals.get(counter, 0.0) + value
    return ", ".join([text, *(f"{counter} {value:,.0f}" for counter, value in totals.items())])


if __name__ == "__main__":
    sys.exit(main())
