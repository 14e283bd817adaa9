"""One run of a service whose start is measured: `python -m benchmarks._restart_service OPTIONS` (as JSON).

It prints one line of JSON figures when it is up; then a line on its standard input closes it, or it is
killed. Times are seconds since the parent started the process, by the system's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from delta_prop.api.producer import Producer
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import Receipt
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks import Hnsw, IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Kind, Priority, make_origin, producer_id_of
from delta_prop_wire.encode import encode_vectors

MIB = 1024 * 1024
LANES = len(Priority)
DIMENSION, BATCH_ROWS, K = 16, 1_000, 10
PLAIN_DIMENSION, PLAIN_ROWS, PLAIN_KEYS = 128, 24, 20_000
IN_FLIGHT_BATCHES = 32
WAIT_S = 3_600.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run of the service. `build`: fill the directory instead of measuring a start; `changes`:
    how many vectors each start rewrites; `mib`: the size of a plain log; `starts_before`: the number of
    earlier starts on this directory; `spawned_at`: when the parent started the process, in seconds.
    """

    directory: str
    kind: str  # of directory: "vectors" (rows with ids), or "plain" (frames of one origin, no ids)
    build: bool = False
    vectors: int = 0
    origins: int = 0
    changes: int = 0
    mib: int = 0
    starts_before: int = 0
    spawned_at: float = 0.0

    @property
    def batch_count(self) -> int:
        """The number of batches of vectors in a built directory."""
        return -(-self.vectors // BATCH_ROWS)

    def changed_batches(self, run: int) -> range:
        """Return the batches of vectors that run `run`, counted from 0, rewrites."""
        count = min(-(-self.changes // BATCH_ROWS), self.batch_count)
        first = run * count % max(self.batch_count - count + 1, 1)
        return range(first, first + count)

    def current_rows(self, batch: int) -> tuple[list[str], NDArray[np.float32]]:
        """Return a batch of vectors as it is after all earlier runs."""
        runs = [run for run in range(self.starts_before) if batch in self.changed_batches(run)]
        return self.rows_of_version(batch, runs[-1] + 1 if runs else 0)

    def rows_of_version(self, batch: int, version: int) -> tuple[list[str], NDArray[np.float32]]:
        """Return a batch of vectors as it was built (0), or as run `version - 1` rewrote it."""
        first = batch * BATCH_ROWS
        end = min(first + BATCH_ROWS, self.vectors)
        numbers = np.random.default_rng([batch, version]).random((end - first, DIMENSION), np.float32)
        return [f"vector-{number:08d}" for number in range(first, end)], numbers - np.float32(0.5)


def settings_of(options: RunOptions) -> Settings:
    """Return settings with capacity for all origins."""
    return Settings(origins_max=max(100_000, 2 * options.origins), rate_initial=1e9, rate_max=1e9)


def log_settings() -> LogSettings:
    """Return log settings that retain the full log."""
    return LogSettings(bytes_max=64 << 30, retention_bytes=32 << 30, retention_s=365 * 24 * 3600.0)


def sinks_of(options: RunOptions) -> tuple[StorageSink, IndexSink]:
    """Return the storage and the index sink, which share one copy of the vectors."""
    folder = Path(options.directory)
    resident = ResidentVectors(resident_bytes_max=max(1 << 30, 600 * options.vectors))
    storage = StorageSink(folder / "vectors.db", resident=resident, close_s=300.0, image_rows_min=1_000)
    return storage, IndexSink(resident=resident, hnsw=Hnsw(), path=folder / "graphs")


# --- building


async def build(options: RunOptions) -> None:
    """Fill a directory and close it."""
    async with Propagator(
        settings_of(options), data=Path(options.directory) / "data", log=log_settings()
    ) as propagator:
        if options.kind == "plain":
            producer = propagator.producer("plain")
            await send((producer, frame) for frame in plain_frames(options))
            return
        storage, _ = sinks_of(options)
        await propagator.attach(storage)
        await send(vector_frames(propagator, options))
        end = propagator.statistics().log.next_offset
        await propagator.wait_visible(end, committed=True, timeout_s=WAIT_S)


def vector_frames(propagator: Propagator, options: RunOptions) -> Iterator[tuple[Producer, Batch]]:
    """Yield every vector once, each with an id, spread over all origins."""
    producer_count = max(options.origins // LANES, 1)
    producers = [propagator.producer(f"producer-{number}") for number in range(producer_count)]
    for batch in range(options.batch_count):
        turn, slot = divmod(batch, producer_count * LANES)
        producer, lane = producers[slot // LANES], Priority(slot % LANES)
        keys, rows = options.rows_of_version(batch, 0)
        yield (
            producer,
            encode_vectors(
                keys,
                rows,
                namespace="default",
                origin=make_origin(producer_id_of(producer.name), lane),
                base=turn * BATCH_ROWS + 1,
                kind=Kind.CREATE,
                priority=lane,
                ids=[b"%016d" % (batch * BATCH_ROWS + row) for row in range(len(keys))],
                ack_level=AckLevel.DURABLE,
            ),
        )


def plain_frames(options: RunOptions) -> Iterator[Batch]:
    """Yield frames of about 13 KB from one origin, `mib` MiB in all."""
    rng = np.random.default_rng(1)
    origin = make_origin(producer_id_of("plain"), Priority.NORMAL)
    size, base = 0, 1
    while size < options.mib * MIB:
        keys = [f"key-{number}" for number in rng.integers(PLAIN_KEYS, size=PLAIN_ROWS).tolist()]
        rows = rng.random((PLAIN_ROWS, PLAIN_DIMENSION), np.float32)
        batch = encode_vectors(
            keys, rows, namespace="default", origin=origin, base=base, ack_level=AckLevel.DURABLE
        )
        size, base = size + batch.size, base + PLAIN_ROWS
        yield batch


async def send(frames: Iterable[tuple[Producer, Batch]]) -> None:
    """Send all frames, with up to IN_FLIGHT_BATCHES in flight; return when all are acknowledged."""
    in_flight: deque[Receipt] = deque()
    for producer, frame in frames:
        while len(in_flight) >= IN_FLIGHT_BATCHES:
            await in_flight.popleft().wait()
        in_flight.append(producer.send_frame(frame))
    for receipt in in_flight:
        await receipt.wait()


# --- starting


async def start(options: RunOptions) -> None:
    """Start the service, print how long it took, change vectors, wait for a line on standard input."""
    figures: dict[str, Any] = {"imported_s": time.monotonic() - options.spawned_at}
    started_at = time.monotonic()
    async with Propagator(
        settings_of(options), data=Path(options.directory) / "data", log=log_settings()
    ) as propagator:
        note(figures, "open", options)
        width = PLAIN_DIMENSION if options.kind == "plain" else DIMENSION
        await propagator.publish_many(["probe"], np.zeros((1, width), np.float32), namespace="probe")
        note(figures, "accepted", options)
        figures["accepted_after_open_s"] = time.monotonic() - started_at
        recovery = propagator.recovery
        figures["recovery"] = "" if recovery is None else str(recovery)
        if options.kind == "vectors":
            await search(propagator, options, figures)
        print(json.dumps(figures), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)


async def search(propagator: Propagator, options: RunOptions, figures: dict[str, Any]) -> None:
    """Attach storage and index, search, check; then change vectors while the index still links rows."""
    storage, index = sinks_of(options)
    await propagator.attach(storage)
    note(figures, "storage", options)
    await propagator.attach(index)
    note(figures, "index", options)
    await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=WAIT_S)
    note(figures, "caught_up", options)
    numbers = np.random.default_rng([options.starts_before, 1, 1])
    query = numbers.random(DIMENSION, np.float32) - np.float32(0.5)
    hits = index.search(query, K)
    note(figures, "searched", options)
    figures["cpu_s"] = time.process_time()
    figures["image"], figures["vectors"] = storage.statistics().image, index.statistics().vectors
    graph = index.statistics().hnsw
    figures["graphs"] = "" if graph is None else graph.file
    started_at = time.monotonic()
    index.search(query, K)
    figures["search_s"] = time.monotonic() - started_at
    figures["right"] = [hit.vector_id for hit in hits] == nearest(options, query)
    started_at = time.monotonic()
    for batch in options.changed_batches(options.starts_before):
        keys, rows = options.rows_of_version(batch, options.starts_before + 1)
        await propagator.publish_many(keys, rows, kind=Kind.DENSE, timeout_s=WAIT_S)
    published = time.monotonic()
    await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=WAIT_S)
    figures["changes_s"] = published - started_at
    figures["changes_applied_s"] = time.monotonic() - started_at
    note(figures, "changed", options)


def nearest(options: RunOptions, query: NDArray[np.float32]) -> list[str]:
    """Return the ids that an exact search by cosine must find, computed from the generated vectors."""
    nearest_rows: list[tuple[float, str]] = []  # of each, the negative score and the id
    wide = query.astype(np.float64)
    for batch in range(options.batch_count):
        keys, rows = options.current_rows(batch)
        scores = (rows @ wide) / np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1))
        best = np.argsort(-scores)[:K].tolist()
        nearest_rows = sorted([*nearest_rows, *((-float(scores[row]), keys[row]) for row in best)])[:K]
    return [vector_id for _, vector_id in nearest_rows]


def note(figures: dict[str, Any], step: str, options: RunOptions) -> None:
    """Record the time since the process was started, and its current and peak memory."""
    figures[f"{step}_s"] = time.monotonic() - options.spawned_at
    figures[f"{step}_rss_mb"], figures[f"{step}_peak_mb"] = memory_mb()


def memory_mb() -> tuple[float, float]:
    """Return the resident memory and its peak, MB; 0 where the system has no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def command(options: RunOptions) -> list[str]:
    """Return the command of a process that runs with these options."""
    return [sys.executable, "-m", "benchmarks._restart_service", json.dumps(asdict(options))]


if __name__ == "__main__":
    given = RunOptions(**json.loads(sys.argv[1]))
    anyio.run(build if given.build else start, given)
