"""The service inside a program, beside the specification: four configurations, and the sweep of batch sizes.

Each in rounds that take turns; a rate counts until every sink has applied the last delta. Printed at ack
level `logged`, where an acknowledgement means that the page cache has it, and beside it at `durable`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from benchmarks._inside import DIMENSION, KEYS, NUMBERS, UNLINKED_ROWS_MAX, Bench, Sent
from benchmarks._inside_link import Replica
from benchmarks._measure import Figure, calibration_ns, percentile, table, write_json
from delta_prop_sinks import IndexSink, StorageSink
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Mapping

DELAY_MS = 40.0
"""Of the link to the replica that is far away, each way."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One measurement. `claimed`: deltas a second, at so many µs, as the specification has it; `flight`:
    callers that wait for their acknowledgement at once, at level logged and durable, as a service has them.
    """

    name: str
    bench: str
    size: int
    claimed: int
    claimed_us: int | None
    flight: tuple[int, int]


BENCHES: dict[str, tuple[str, ...]] = {
    "single sink": ("callback",),
    "storage": ("storage",),
    "storage + index": ("storage", "linked"),
    "full with replication": ("storage", "linked", "cache", "replica"),
    "geo": ("storage", "far replica"),
}
SCENES = (
    Scene("single sink", "single sink", 100, 500_000, None, (8, 32)),
    Scene("storage + index", "storage + index", 100, 100_000, None, (4, 32)),
    Scene("full with replication", "full with replication", 100, 50_000, None, (4, 32)),
    Scene("geo", "geo", 100, 10_000, None, (4, 32)),
    Scene("batch 1", "storage", 1, 50_000, 175, (8, 64)),
    Scene("batch 10", "storage", 10, 200_000, 200, (4, 64)),
    Scene("batch 100", "storage", 100, 500_000, 500, (2, 32)),
    Scene("batch 1000", "storage", 1_000, 800_000, 2_000, (1, 8)),
)
LEVELS = (AckLevel.LOGGED, AckLevel.DURABLE)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="./run bench pipeline", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that take turns (at least 5)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each measurement in a round")
    parser.add_argument("--only", help="scenes whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="short rounds: the figures swing more")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--uvloop", action="store_true", help="on uvloop, where it is installed")
    given = parser.parse_args()
    if given.rounds < 5 or given.seconds <= 0:
        parser.error("give at least 5 rounds, and seconds above 0")
    seconds = 0.08 if given.quick else given.seconds
    scenes = [one for one in SCENES if given.only is None or given.only in one.name]
    print(
        f"calibration: {calibration_ns():.0f} ns CPU a loop turn; {'uvloop' if given.uvloop else 'asyncio'}"
    )
    print(f"a delta: {NUMBERS} of {DIMENSION} float32, {KEYS} vectors; the log in a directory\n")
    figures = anyio.run(measured, scenes, given.rounds, seconds, backend_options={"use_uvloop": given.uvloop})
    _print(scenes, figures)
    write_json(given.json, figures)
    return 0


async def measured(
    scenes: list[Scene], rounds: int, seconds: float
) -> dict[str, dict[str, dict[str, Figure]]]:
    """All figures by scene and level."""
    found: dict[str, dict[str, list[Sent]]] = {
        scene.name: {level.name.lower(): [] for level in LEVELS} for scene in scenes
    }
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-prop-replica-")))
        benches = {
            name: await stack.enter_async_context(_bench(name, folder, stack))
            for name in dict.fromkeys(scene.bench for scene in scenes)
        }
        for scene in scenes:  # what is done first pays for what all have
            await benches[scene.bench].closed_loop(scene.size, AckLevel.LOGGED, flight=1, seconds=seconds / 4)
        for _ in range(rounds):
            for scene in scenes:
                for level, flight in zip(LEVELS, scene.flight, strict=True):
                    sent = await benches[scene.bench].closed_loop(
                        scene.size, level, flight=flight, seconds=seconds
                    )
                    found[scene.name][level.name.lower()].append(sent)
        for name, bench in benches.items():
            _tell_lag(name, bench)
    return {name: {level: _figures(sent) for level, sent in levels.items()} for name, levels in found.items()}


def _bench(name: str, folder: Path, stack: ExitStack | AsyncExitStack) -> Bench:
    sinks, replica = BENCHES[name], None
    if sinks[-1].endswith("replica"):
        delay_ms = DELAY_MS if sinks[-1].startswith("far") else 0.0
        port = stack.enter_context(Replica(folder / name, delay_ms=delay_ms)).port
        sinks, replica = sinks[:-1], f"127.0.0.1:{port}"
    return Bench(*sinks, replica=replica)


def _figures(rounds: list[Sent]) -> dict[str, Figure]:
    return {
        "rate": Figure.of([one.rate for one in rounds]),
        **{
            f"{name}_{share}_us": Figure.of(
                [percentile(getattr(one, name), share / 100) * 1e6 for one in rounds]
            )
            for name in ("acknowledged", "visible")
            for share in (50, 99)
        },
    }


def _tell_lag(name: str, bench: Bench) -> None:
    """What is behind what was applied: rows of a file, rows of a graph."""
    for sink in bench.sinks.values():
        if isinstance(sink, StorageSink):
            told = sink.statistics()
            print(
                f"{name}: the file is {told.applied_offset - told.committed_offset:,} deltas behind, "
                f"{told.dirty_rows:,} rows are to be written; a flush took {told.last_flush_s * 1000:.0f} ms"
            )
        elif isinstance(sink, IndexSink) and (linked := sink.statistics().linked) is not None:
            print(
                f"{name}: at most {linked.unlinked_rows_highest:,} rows were unlinked at once, the bound is "
                f"{UNLINKED_ROWS_MAX:,}; a search scores them exactly; {linked.links_done:,} were linked"
            )
            assert linked.unlinked_rows_highest <= UNLINKED_ROWS_MAX, "the index broke its bound"


def _print(scenes: list[Scene], figures: Mapping[str, Mapping[str, Mapping[str, Figure]]]) -> None:
    rows = []
    for scene in scenes:
        for level, flight in zip(LEVELS, scene.flight, strict=True):
            one = figures[scene.name][level.name.lower()]
            claimed = f"{scene.claimed:,}" + (f" at {scene.claimed_us:,}" if scene.claimed_us else "")
            rows.append(
                (
                    scene.name,
                    level.name.lower(),
                    f"{flight} × {scene.size}",
                    f"{one['rate'].median:,.0f} ({one['rate'].low:,.0f}-{one['rate'].high:,.0f})",
                    f"{one['rate'].median / scene.claimed:.2f}",
                    *(
                        f"{one[f'{name}_50_us'].median:,.0f} / {one[f'{name}_99_us'].median:,.0f}"
                        for name in ("acknowledged", "visible")
                    ),
                    claimed,
                )
            )
    head = (
        "configuration",
        "acknowledged",
        "in flight",
        "deltas/s, median (rounds)",
        "×",
        "µs until acknowledged, p50 / p99",
        "µs until all sinks have it",
        "specification, at µs",
    )
    print()
    print(table("deltas a second, until every sink has applied the last one", head, rows))
    print(f"geo: a real replica behind a link of {DELAY_MS:.0f} ms each way; × is the rate over the claim")


if __name__ == "__main__":
    sys.exit(main())
