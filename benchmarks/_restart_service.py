"""One life of a service whose start is measured: `python -m benchmarks._restart_service TERMS` (as JSON).

It prints one line of JSON figures when it is up; then a line on its standard input closes it, or it is
killed. Times are seconds since the parent started the process, by the system's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np

from delta_prop.config import Settings
from delta_prop.embedded import Propagator
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks import IndexSink, Linked, Resident, StorageSink
from delta_prop_wire.delta import AckLevel, Kind, Priority, make_origin, producer_id_of
from delta_prop_wire.encode import encode_vectors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from delta_prop.producer import Producer
    from delta_prop.receipt import Receipt
    from delta_prop_wire.batch import Batch

MIB = 1024 * 1024
LANES = len(Priority)
DIMENSION, BATCH_ROWS, K = 16, 1_000, 10
PLAIN_DIMENSION, PLAIN_ROWS, PLAIN_KEYS = 128, 24, 20_000
FLIGHT_BATCHES = 32
WAIT_S = 3_600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What one process does. `life`: how many starts there were before on this directory."""

    directory: str
    kind: str  # of directory: "vectors" or "plain"
    build: bool = False
    vectors: int = 0
    origins: int = 0
    changes: int = 0
    mib: int = 0
    life: int = 0
    spawned_at: float = 0.0

    @property
    def batches(self) -> int:
        """Of vectors, when the directory is built."""
        return -(-self.vectors // BATCH_ROWS)

    def changed(self, life: int) -> range:
        """The batches of vectors that this life writes anew."""
        count = min(-(-self.changes // BATCH_ROWS), self.batches)
        begin = life * count % max(self.batches - count + 1, 1)
        return range(begin, begin + count)

    def rows(self, batch: int) -> tuple[list[str], NDArray[np.float32]]:
        """A batch of vectors as the last life before this one that wrote it left it."""
        lives = [life for life in range(self.life) if batch in self.changed(life)]
        return self.rows_of(batch, lives[-1] + 1 if lives else 0)

    def rows_of(self, batch: int, version: int) -> tuple[list[str], NDArray[np.float32]]:
        """A batch of vectors as built (0), or as life `version - 1` wrote it."""
        begin = batch * BATCH_ROWS
        end = min(begin + BATCH_ROWS, self.vectors)
        numbers = np.random.default_rng([batch, version]).random((end - begin, DIMENSION), np.float32)
        return [f"vector-{number:08d}" for number in range(begin, end)], numbers - np.float32(0.5)


def settings_of(terms: Terms) -> Settings:
    """Room for all origins."""
    return Settings(
        origins_max=max(100_000, 2 * terms.origins),
        rate_initial=1e9,
        rate_max=1e9,
    )


def log_settings() -> LogSettings:
    """Nothing of the log goes."""
    return LogSettings(bytes_max=64 << 30, keep_bytes_max=32 << 30, keep_s=365 * 24 * 3600.0)


def sinks_of(terms: Terms) -> tuple[StorageSink, IndexSink]:
    """Both read one copy of the vectors."""
    folder = Path(terms.directory)
    resident = Resident(resident_bytes_max=max(1 << 30, 600 * terms.vectors))
    storage = StorageSink(folder / "vectors.db", resident=resident, close_s=300.0, image_rows_min=1_000)
    return storage, IndexSink(resident=resident, linked=Linked(), path=folder / "graphs")


# --- building


async def build(terms: Terms) -> None:
    """Fill a directory, and close it."""
    async with Propagator(
        settings_of(terms), data=Path(terms.directory) / "data", log=log_settings()
    ) as propagator:
        if terms.kind == "plain":
            producer = propagator.producer("plain")
            await send((producer, frame) for frame in plain_frames(terms))
            return
        storage, _ = sinks_of(terms)
        await propagator.attach(storage)
        await send(vector_frames(propagator, terms))
        end = propagator.statistics().log.next_offset
        await propagator.wait_visible(end, committed=True, timeout_s=WAIT_S)


def vector_frames(propagator: Propagator, terms: Terms) -> Iterator[tuple[Producer, Batch]]:
    """Every vector once, each with an id, spread over all origins."""
    names = max(terms.origins // LANES, 1)
    producers = [propagator.producer(f"producer-{number}") for number in range(names)]
    for at in range(terms.batches):
        turn, place = divmod(at, names * LANES)
        producer, lane = producers[place // LANES], Priority(place % LANES)
        keys, rows = terms.rows_of(at, 0)
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
                ids=[b"%016d" % (at * BATCH_ROWS + row) for row in range(len(keys))],
                ack_level=AckLevel.DURABLE,
            ),
        )


def plain_frames(terms: Terms) -> Iterator[Batch]:
    """Frames of about 13 KB from one origin, `mib` of them together."""
    draw = np.random.default_rng(1)
    origin = make_origin(producer_id_of("plain"), Priority.NORMAL)
    size, base = 0, 1
    while size < terms.mib * MIB:
        keys = [f"key-{number}" for number in draw.integers(PLAIN_KEYS, size=PLAIN_ROWS).tolist()]
        rows = draw.random((PLAIN_ROWS, PLAIN_DIMENSION), np.float32)
        batch = encode_vectors(
            keys, rows, namespace="default", origin=origin, base=base, ack_level=AckLevel.DURABLE
        )
        size, base = size + batch.size, base + PLAIN_ROWS
        yield batch


async def send(frames: Iterable[tuple[Producer, Batch]]) -> None:
    """Send all, few of them unacknowledged at a time, until all are acknowledged."""
    flying: deque[Receipt] = deque()
    for producer, frame in frames:
        while len(flying) >= FLIGHT_BATCHES:
            await flying.popleft().wait()
        flying.append(producer.send_frame(frame))
    for receipt in flying:
        await receipt.wait()


# --- starting


async def start(terms: Terms) -> None:
    """Start, tell how long it took, change something, wait for the word to close."""
    told: dict[str, Any] = {"imported_s": time.monotonic() - terms.spawned_at}
    begin = time.monotonic()
    async with Propagator(
        settings_of(terms), data=Path(terms.directory) / "data", log=log_settings()
    ) as propagator:
        note(told, "open", terms)
        width = PLAIN_DIMENSION if terms.kind == "plain" else DIMENSION
        await propagator.publish_many(["probe"], np.zeros((1, width), np.float32), namespace="probe")
        note(told, "accepted", terms)
        told["accepted_after_open_s"] = time.monotonic() - begin
        recovery = propagator.recovery
        told["recovery"] = "" if recovery is None else str(recovery)
        if terms.kind == "vectors":
            await search(propagator, terms, told)
        print(json.dumps(told), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)


async def search(propagator: Propagator, terms: Terms, told: dict[str, Any]) -> None:
    """Attach storage and index, search, check; then change vectors, with the index still linking."""
    storage, index = sinks_of(terms)
    await propagator.attach(storage)
    note(told, "storage", terms)
    await propagator.attach(index)
    note(told, "index", terms)
    await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=WAIT_S)
    note(told, "level", terms)
    query = np.random.default_rng([terms.life, 1, 1]).random(DIMENSION, np.float32) - np.float32(0.5)
    hits = index.search(query, K)
    note(told, "searched", terms)
    told["cpu_s"] = time.process_time()
    told["image"], told["vectors"] = storage.statistics().image, index.statistics().vectors
    linked = index.statistics().linked
    told["graphs"] = "" if linked is None else linked.file
    begin = time.monotonic()
    index.search(query, K)
    told["search_s"] = time.monotonic() - begin
    told["right"] = [hit.vector_id for hit in hits] == nearest(terms, query)
    begin = time.monotonic()
    for batch in terms.changed(terms.life):
        keys, rows = terms.rows_of(batch, terms.life + 1)
        await propagator.publish_many(keys, rows, kind=Kind.DENSE, timeout_s=WAIT_S)
    published = time.monotonic()
    await propagator.wait_visible(propagator.statistics().log.next_offset, timeout_s=WAIT_S)
    told["changes_s"] = published - begin
    told["changes_applied_s"] = time.monotonic() - begin
    note(told, "changed", terms)


def nearest(terms: Terms, query: NDArray[np.float32]) -> list[str]:
    """The ids that an exact search by cosine must give, from the vectors as they were made."""
    found: list[tuple[float, str]] = []
    wide = query.astype(np.float64)
    for batch in range(terms.batches):
        keys, rows = terms.rows(batch)
        scores = (rows @ wide) / np.sqrt(np.square(rows.astype(np.float64)).sum(axis=1))
        best = np.argsort(-scores)[:K].tolist()
        found = sorted([*found, *((-float(scores[row]), keys[row]) for row in best)])[:K]
    return [vector_id for _, vector_id in found]


def note(told: dict[str, Any], what: str, terms: Terms) -> None:
    """How long it took to get here since the process was started, and the memory it takes now."""
    told[f"{what}_s"] = time.monotonic() - terms.spawned_at
    told[f"{what}_rss_mb"], told[f"{what}_peak_mb"] = memory_mb()


def memory_mb() -> tuple[float, float]:
    """What is resident, and the most that ever was, MB; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    told = dict(line.split(":", 1) for line in lines)
    return tuple(int(told[name].split()[0]) / 1000 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def command(terms: Terms) -> list[str]:
    """What runs these terms in a process of its own."""
    return [sys.executable, "-m", "benchmarks._restart_service", json.dumps(asdict(terms))]


if __name__ == "__main__":
    given = Terms(**json.loads(sys.argv[1]))
    anyio.run(build if given.build else start, given)
