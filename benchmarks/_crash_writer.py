"""The process that gets killed: a service on a directory, with its producers. It prints JSON lines.

`python -m benchmarks._crash_writer DIR …` opens DIR/log, prints `{"ready": …}` and waits for a word on
standard input. `go`: it publishes until it is killed and prints each acknowledgement as it arrives.
`end`: it waits until its sink, if it has one, has every delta, closes and prints `{"closed": true}`.

Line n of producer p is a function of p and n (`make_delta`), so another process can check the log.
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
from typing import Any

import anyio
import anyio.to_thread

from delta_prop.api.producer import Producer
from delta_prop.api.propagator import Propagator
from delta_prop.calls.receipt import PublishAck, Receipt
from delta_prop.partition.storage import background
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.log.writing import Commit
from delta_prop_broker.retention.compaction import Compaction
from delta_prop_broker.retention.snapshot import SnapshotWriter
from delta_prop_broker.retention.snapshot_planner import SnapshotPlanner
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

DIMENSION = 16
KEYS = 20
"""Vectors of each producer."""
RUN_S_MAX = 60.0
"""After this many seconds the process stops publishing and ends, in case its parent does not end it."""
_END_S_MAX = 30.0
_STDOUT = 1
ACTIVITIES = ("a segment began", "compaction", "a snapshot was written")
"""Activities, besides commits, that a kill may interrupt; in the order of their bytes in `--activities`."""


def make_delta(name: str, line: int) -> Delta:
    """Return a producer's delta for a line, from 1 on: the first `KEYS` lines create vectors, later lines
    change them.

    All numbers are small integers, so that a fold of them is exact in any arithmetic.
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
    """Return the origin of a producer's deltas."""
    return make_origin(producer_id_of(name), Priority.NORMAL)


def main(arguments: list[str]) -> int:
    """Run the service once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._crash_writer", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--first-lines", required=True, help="JSON: each producer's name and its first line")
    parser.add_argument("--level", choices=("memory", "logged", "durable"), default="durable")
    parser.add_argument("--storage", action="store_true", help="attach a SQLite file, DIR/vectors.db")
    parser.add_argument("--segment-bytes", type=int, default=256 * 1024)
    parser.add_argument(
        "--retention-bytes", type=int, help="retain this much and compact the rest; default: compact nothing"
    )
    parser.add_argument("--activities", type=Path, help="a file that holds the current activities")
    parser.add_argument("--window", type=int, default=8, help="batches that a producer has in flight")
    parser.add_argument("--seed", type=int, default=0)
    anyio.run(_run, parser.parse_args(arguments))
    return 0


async def _run(given: argparse.Namespace) -> None:
    first_lines: dict[str, int] = json.loads(given.first_lines)
    level = AckLevel[given.level.upper()]
    settings = LogSettings(
        read_level=max(level, AckLevel.LOGGED),
        segment_bytes_max=given.segment_bytes,
        free_bytes_min=1024 * 1024,
        compact=given.retention_bytes is not None,
        retention_bytes=given.retention_bytes or LogSettings().retention_bytes,
    )
    if given.activities is not None:
        record_activities(given.activities)
    background.COMPACTION_POLL_S = 0.005
    started = time.perf_counter()
    async with Propagator(data=given.directory / "log", log=settings) as propagator:
        opened = time.perf_counter()
        sinks: list[str] = []
        if given.storage:
            sinks = ["storage"]
            await propagator.attach(StorageSink(given.directory / "vectors.db", flush_s=0.02))
        producers = {name: propagator.producer(name) for name in first_lines}
        statistics, recovery = propagator.statistics().log, propagator.recovery
        assert recovery is not None
        print_json(
            ready=True,
            open_s=opened - started,
            attach_s=time.perf_counter() - opened,
            next_offset=statistics.next_offset,
            first_offset=statistics.start_offset,
            watermarks={name: producer.watermark() for name, producer in producers.items()},
            created=recovery.created,
            cut_bytes=recovery.truncated_tail.bytes if recovery.truncated_tail else 0,
        )
        word = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        if word.strip() == "go":
            with anyio.move_on_after(RUN_S_MAX):
                async with anyio.create_task_group() as tasks:
                    for number, (name, line) in enumerate(first_lines.items()):
                        rng = random.Random(given.seed * 1000 + number)
                        _print_stored_lines(propagator, producers[name], line)
                        tasks.start_soon(_publish, producers[name], level, given.window, rng)
        else:
            end = propagator.statistics().log.next_offset
            await propagator.wait_visible(end, sinks=sinks, committed=True, timeout_s=_END_S_MAX)
    print_json(closed=True)


def record_activities(path: Path) -> None:
    """Record in a file which of `ACTIVITIES` are in progress: one byte each, 1 or 0.

    The file is memory-mapped, so that it is correct whenever the process is stopped.
    """
    path.write_bytes(bytes(len(ACTIVITIES)))
    with path.open("r+b") as file:
        flags = mmap.mmap(file.fileno(), len(ACTIVITIES))

    def flag_during_calls(slot: int, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            flags[slot] = 1
            try:
                return original(*arguments, **options)
            finally:
                flags[slot] = 0

        setattr(owner, name, wrapped)

    def set_flag_at_call(slot: int, value: int, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            flags[slot] = value
            return original(*arguments, **options)

        setattr(owner, name, wrapped)

    flag_during_calls(0, Commit, "_create")
    set_flag_at_call(1, 1, Compaction, "__init__")
    set_flag_at_call(1, 0, SnapshotPlanner, "finish")
    set_flag_at_call(2, 1, SnapshotWriter, "__init__")
    set_flag_at_call(2, 0, SnapshotPlanner, "finish")


def _print_stored_lines(propagator: Propagator, producer: Producer, line: int) -> None:
    """Print acknowledgements of the lines, from `line` on, that the log already has; send nothing."""
    state = propagator._partition.pipeline.origins.get(origin_of(producer.name))
    assert state is not None
    for stored_line in range(line, producer.watermark() + 1):
        _write(_format_ack(producer.name, stored_line, state.first_offset(stored_line), duplicate=True))


async def _publish(producer: Producer, level: AckLevel, window: int, rng: random.Random) -> None:
    """Send line after line, in batches of 1 to 5; a line's delta is the same in any batching."""
    in_flight: deque[tuple[int, Receipt]] = deque()
    origin = origin_of(producer.name)
    epoch = producer._lanes[Priority.NORMAL].epoch
    line = producer.watermark() + 1
    while True:
        while len(in_flight) < window:
            count = rng.randint(1, 5)
            deltas = [make_delta(producer.name, number) for number in range(line, line + count)]
            batch = encode_batch(deltas, origin=origin, base=line, epoch=epoch, ack_level=level)
            in_flight.append((line, producer.send_frame(batch)))
            line += count
        first_line, receipt = in_flight.popleft()
        _print_acks(producer.name, first_line, await receipt.wait())


def _print_acks(name: str, first_line: int, ack: PublishAck) -> None:
    lines = []
    next_new = ack.offset or 0
    for row in range(ack.count):
        duplicate = row in ack.duplicates
        acked_offset = ack.duplicates[row] if duplicate else next_new
        next_new += not duplicate
        lines.append(_format_ack(name, first_line + row, acked_offset, duplicate=duplicate))
    _write("".join(lines))


def _format_ack(name: str, line: int, acked_offset: int | None, *, duplicate: bool) -> str:
    return json.dumps({"producer": name, "line": line, "offset": acked_offset, "duplicate": duplicate}) + "\n"


def print_json(**fields: object) -> None:
    """Print one JSON line, unbuffered."""
    _write(json.dumps(fields) + "\n")


def _write(text: str) -> None:
    raw = text.encode()
    while raw:
        raw = raw[os.write(_STDOUT, raw) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
