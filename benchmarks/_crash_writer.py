"""The process that gets killed: a service on a directory, its producers, a JSON line for all it knows.

`python -m benchmarks._crash_writer DIR …` opens DIR/log, prints `{"ready": …}` and waits for a word on
standard input. `go`: it publishes until it is killed and prints each acknowledgement when it has it.
`end`: it brings everything to its sink, closes and prints `{"closed": true}`.

What producer p sends as its line n is a function of p and n (`made`), so a log can be judged from outside.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from delta_prop import compacting
from delta_prop.embedded import Propagator
from delta_prop_broker.log.files.snapshot import SnapshotWriter
from delta_prop_broker.log.parts.commit import Commit
from delta_prop_broker.log.retention.compaction import Compaction
from delta_prop_broker.log.retention.cover import Cover
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks import StorageSink
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Priority,
    create,
    make_origin,
    offset,
    producer_id_of,
    scale,
    sparse_add,
)
from delta_prop_wire.encode import encode_batch

if TYPE_CHECKING:
    from delta_prop.producer import Producer
    from delta_prop.receipt import Published, Receipt

DIMENSION = 16
KEYS = 20
LIFE_S_MAX = 60.0
"""Nobody's child lives longer: what was forgotten by its parent ends by itself."""
_END_S_MAX = 30.0
_OUTPUT = 1
UNDER_WAY = ("a segment began", "compaction", "a snapshot was written")
"""What a death may strike, beside commits; in the order of the bytes of the file that tells."""


def made(name: str, line: int) -> Delta:
    """What this producer sends as this line, from 1 on: its keys are created, then changed by additive steps.

    All numbers are small integers, so that a fold of them is exact in whatever arithmetic.
    """
    key = f"{name}/{line % KEYS}"
    if line <= KEYS:
        return Delta(key, create([float(line)] * DIMENSION))
    step = line // KEYS % 5
    if step == 0:
        return Delta(key, scale(-1.0))
    if step == 1:
        return Delta(key, offset(float(line % 3 - 1)))
    first, second = sorted((line % DIMENSION, (line + 5) % DIMENSION))
    return Delta(key, sparse_add([first, second], [1.0, float(line % 7 - 3)]))


def origin_of(name: str) -> int:
    """The origin under which this producer's lines stand in the log."""
    return make_origin(producer_id_of(name), Priority.NORMAL)


def main(arguments: list[str]) -> int:
    """One life."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._crash_writer", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--begin", required=True, help="JSON: each producer's name and the line it begins with"
    )
    parser.add_argument("--level", choices=("memory", "logged", "durable"), default="durable")
    parser.add_argument("--storage", action="store_true", help="attach a SQLite file, DIR/vectors.db")
    parser.add_argument("--segment-bytes", type=int, default=256 * 1024)
    parser.add_argument("--keep-bytes", type=int, help="compact what is beyond that; without it, nothing")
    parser.add_argument("--under-way", type=Path, help="a file that says what is being done just now")
    parser.add_argument("--window", type=int, default=8, help="batches that a producer has in flight")
    parser.add_argument("--seed", type=int, default=0)
    anyio.run(_live, parser.parse_args(arguments))
    return 0


async def _live(given: argparse.Namespace) -> None:
    begin: dict[str, int] = json.loads(given.begin)
    level = AckLevel[given.level.upper()]
    settings = LogSettings(
        level=max(level, AckLevel.LOGGED),
        segment_bytes_max=given.segment_bytes,
        free_bytes_min=1024 * 1024,
        compact=given.keep_bytes is not None,
        keep_bytes_max=given.keep_bytes or LogSettings().keep_bytes_max,
    )
    if given.under_way is not None:
        tell_what_is_under_way(given.under_way)
    compacting.LOOK_S = 0.005
    started = time.perf_counter()
    async with Propagator(data=given.directory / "log", log=settings) as propagator:
        opened = time.perf_counter()
        sinks: list[str] = []
        if given.storage:
            sinks = ["storage"]
            await propagator.attach(StorageSink(given.directory / "vectors.db", flush_s=0.02))
        producers = {name: propagator.producer(name) for name in begin}
        statistics, recovery = propagator.statistics().log, propagator.recovery
        assert recovery is not None
        say(
            ready=True,
            open_s=opened - started,
            attach_s=time.perf_counter() - opened,
            next_offset=statistics.next_offset,
            first_offset=statistics.first_offset,
            watermarks={name: producer.watermark() for name, producer in producers.items()},
            created=recovery.created,
            cut_bytes=recovery.cut.bytes if recovery.cut else 0,
        )
        word = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        if word.strip() == "go":
            with anyio.move_on_after(LIFE_S_MAX):
                async with anyio.create_task_group() as tasks:
                    for number, (name, line) in enumerate(begin.items()):
                        draw = random.Random(given.seed * 1000 + number)
                        _repeat(propagator, producers[name], line)
                        tasks.start_soon(_publish, producers[name], level, given.window, draw)
        else:
            end = propagator.statistics().log.next_offset
            await propagator.wait_visible(end, sinks=sinks, committed=True, timeout_s=_END_S_MAX)
    say(closed=True)


def tell_what_is_under_way(path: Path) -> None:
    """Keep in a file, one byte each, whether something of `UNDER_WAY` is being done just now.

    It is mapped, so that it is right whenever the process is stopped.
    """
    path.write_bytes(bytes(len(UNDER_WAY)))
    with path.open("r+b") as file:
        told = mmap.mmap(file.fileno(), len(UNDER_WAY))

    def tells(place: int, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            told[place] = 1
            try:
                return original(*arguments, **options)
            finally:
                told[place] = 0

        setattr(owner, name, wrapped)

    def marks(place: int, value: int, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            told[place] = value
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    tells(0, Commit, "_create")
    marks(1, 1, Compaction, "__init__")
    marks(1, 0, Cover, "done")
    marks(2, 1, SnapshotWriter, "__init__")
    marks(2, 0, Cover, "done")


def _repeat(propagator: Propagator, producer: Producer, line: int) -> None:
    """What has its place already is answered from what the service knows of it, and not sent."""
    state = propagator._chain.origins.get(origin_of(producer.name))
    assert state is not None
    for at in range(line, producer.watermark() + 1):
        _write(_ack(producer.name, at, state.first_offset(at), duplicate=True))


async def _publish(producer: Producer, level: AckLevel, window: int, draw: random.Random) -> None:
    """Send line after line, in batches of 1 to 5; a line is the same in whatever batch it travels."""
    flying: deque[tuple[int, Receipt]] = deque()
    origin = origin_of(producer.name)
    epoch = producer._lanes[Priority.NORMAL].epoch
    line = producer.watermark() + 1
    while True:
        while len(flying) < window:
            count = draw.randint(1, 5)
            deltas = [made(producer.name, at) for at in range(line, line + count)]
            batch = encode_batch(deltas, origin=origin, base=line, epoch=epoch, ack_level=level)
            flying.append((line, producer.send_frame(batch)))
            line += count
        first, receipt = flying.popleft()
        _acknowledged(producer.name, first, await receipt.wait())


def _acknowledged(name: str, first: int, published: Published) -> None:
    lines = []
    fresh = published.offset or 0
    for row in range(published.count):
        duplicate = row in published.duplicates
        at = published.duplicates[row] if duplicate else fresh
        fresh += not duplicate
        lines.append(_ack(name, first + row, at, duplicate=duplicate))
    _write("".join(lines))


def _ack(name: str, line: int, at: int | None, *, duplicate: bool) -> str:
    return json.dumps({"producer": name, "line": line, "offset": at, "duplicate": duplicate}) + "\n"


def say(**what: object) -> None:
    """Print one JSON line at once."""
    _write(json.dumps(what) + "\n")


def _write(text: str) -> None:
    raw = text.encode()
    while raw:
        raw = raw[os.write(_OUTPUT, raw) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
