"""Measures the HNSW index under a stream of updates: its freshness, its bound of unindexed rows, its recall.

Open loop: deltas are due at a steady rate, through a propagator with its log in memory. A concurrent searcher
checks that each search finds what was acknowledged and visible before it started. If indexing cannot keep
up, the producer is slowed down, and the share of that time is printed. Vectors are clustered around 1,000
centres, as embeddings are; pure noise has no near neighbours.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from benchmarks._arguments import Arguments, bounded_float, bounded_int, writable_file
from benchmarks._measure import calibration_ns, percentile, table, write_json
from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Sender, SequencedBatch
from delta_prop_sinks import Hit, Hnsw, HnswStatistics, IndexSink
from delta_prop_wire.delta import Delta, Dot, Kind, Operation, Priority, make_origin, sparse_add
from delta_prop_wire.encode import encode_batch, encode_vectors

DIMENSION = 128
CENTRES = 1000
SPREAD = 0.5
NUMBERS = 16
STEP = 0.0625
"""A refinement adds this times a normal number to 16 of 128 values: about 2 % of the vector's length."""
BATCH = 200
PRODUCER = 4711
ORIGIN = make_origin(PRODUCER, Priority.NORMAL)
AHEAD_MAX = 4_000
"""Deltas that may be acknowledged and not visible in the index yet; above that the producer waits."""
CHECKS_A_SECOND = 50
RECALL_QUERIES = 20
RECALLS = 6
K = 10
MIXES = {"refinements": 0.0, "mix, 80 % refinements": 0.2, "replacements": 1.0}
"""By the name of a mix, the share of batches that replace vectors by new random ones; the others refine them.
"""


@dataclass
class Run:
    """The results of one mix. `slowed_s`: seconds from the offers until the producer may go on;
    `checks_skipped`: checks of batches whose vectors had all changed again; `stale`: checks that did not find
    the newest vector; `unindexed_highest`: the most unindexed rows, of `unindexed_max` allowed.
    """

    published: int = 0
    seconds: float = 0.0
    slowed_s: float = 0.0
    cpu_s: float = 0.0
    checks: int = 0
    checks_skipped: int = 0
    stale: int = 0
    latencies_ms: list[float] = field(default_factory=list)
    recalls: list[float] = field(default_factory=list)
    rows_added: int = 0
    rebuilds: int = 0
    unindexed_highest: int = 0
    unindexed_max: int = 0
    tombstones: int = 0
    graph_mb: float = 0.0
    searches_exact: int = 0


class Vectors:
    """The expected value of every vector, and a generator of changes in numbered batches.

    `turn`: the number of the newest batch; `last_turn`: for each vector, that of the last batch which changed
    it.
    """

    def __init__(self, count: int, seed: int = 1) -> None:
        self.random = np.random.default_rng(seed)
        self.centres = self.random.standard_normal((CENTRES, DIMENSION)).astype(np.float32)
        self.names = [f"vector-{number}" for number in range(count)]
        self.rows = self.draw_vectors(count)
        self.last_turn: NDArray[np.int64] = np.zeros(count, np.int64)
        self.turn = 0
        self._refinements = [self._refinement() for _ in range(20_000)]

    def draw_vectors(self, count: int) -> NDArray[np.float32]:
        """Return new vectors around the centres."""
        chosen = self.centres[self.random.integers(0, CENTRES, count)]
        return chosen + np.float32(SPREAD) * self.random.standard_normal((count, DIMENSION), np.float32)

    def _refinement(self) -> tuple[Operation, NDArray[np.intp], NDArray[np.float32]]:
        indices = np.sort(self.random.choice(DIMENSION, NUMBERS, replace=False))
        values = np.float32(STEP) * self.random.standard_normal(NUMBERS, np.float32)
        return sparse_add(indices, values), indices, values

    def _choose(self) -> NDArray[np.intp]:
        self.turn += 1
        chosen = self.random.choice(len(self.names), BATCH, replace=False, shuffle=False)
        self.last_turn[chosen] = self.turn
        return chosen

    def refine(self) -> tuple[NDArray[np.intp], list[Delta]]:
        """Return a batch of small additions."""
        chosen, deltas = self._choose(), []
        for slot, number in zip(
            chosen.tolist(), self.random.integers(0, 20_000, BATCH).tolist(), strict=True
        ):
            operation, indices, values = self._refinements[number]
            deltas.append(Delta(self.names[slot], operation))
            self.rows[slot, indices] += values
        return chosen, deltas

    def replace(self) -> tuple[NDArray[np.intp], list[str]]:
        """Return a batch of complete vectors."""
        chosen = self._choose()
        self.rows[chosen] = self.draw_vectors(BATCH)
        return chosen, [self.names[slot] for slot in chosen.tolist()]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; return 1 if a search was stale or recall too low."""
    parser = Arguments("index", __doc__, status_1="a search was stale, or recall@10 was below 0.95")
    parser.option("--vectors", bounded_int(1_000, 10_000_000), 100_000, "vectors of 128 numbers")
    parser.add_argument("--seconds", type=bounded_float(1, 86_400), default=60.0, help="duration of each mix")
    parser.option("--rate", bounded_int(BATCH, 10_000_000), 20_000, "updates a second")
    parser.add_argument(
        "--quick", action="store_true", help="a short run: up to 10,000 vectors, up to 5 seconds"
    )
    parser.add_argument("--mix", choices=list(MIXES), action="append", help="only this one (may be repeated)")
    parser.option(
        "--unindexed-rows-max",
        bounded_int(2 * BATCH),
        Hnsw().unindexed_rows_max,
        "bound of rows that wait to be indexed",
    )
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write the figures to FILE")
    given = parser.parse_args(arguments)
    if given.quick:
        given.vectors, given.seconds = min(given.vectors, 10_000), min(given.seconds, 5.0)
    print(
        f"calibration: {calibration_ns():.0f} ns of CPU per turn of its loop; ack level memory; log in memory"
    )
    runs = {
        name: anyio.run(_measure, name, given.vectors, given.seconds, given.rate, given.unindexed_rows_max)
        for name in given.mix or MIXES
    }
    _print(runs, given.vectors, given.rate)
    write_json(given.json, runs)
    failed = [name for name, run in runs.items() if run.stale or min(run.recalls) < 0.95 or not run.checks]
    if failed:
        print(f"FAILED: {', '.join(failed)}: a search was stale, or recall@10 was below 0.95")
    return 1 if failed else 0


class Stream:
    """A producer that offers encoded batches, as from the network, and a searcher of its last batch."""

    def __init__(self, propagator: Propagator, vectors: Vectors) -> None:
        self.propagator, self.vectors = propagator, vectors
        self.last: tuple[Receipt, int, NDArray[np.intp], int] | None = None
        self.ended = False
        self._sender = Sender("bench")
        self._next = 1
        propagator._partition.pipeline.hello(PRODUCER, "bench", 0.0)

    async def produce(
        self, index: IndexSink, replaced_share: float, seconds: float, rate: int, run: Run
    ) -> None:
        """Publish batches when they are due; wait while the index lags too far."""
        started_at = time.perf_counter()
        rng = np.random.default_rng(2)
        while (now := time.perf_counter()) - started_at < seconds:
            due = started_at + run.published / rate
            if due > now:
                await anyio.sleep(due - now)
            base, receipt = self._next, Receipt()
            if rng.random() < replaced_share:
                chosen, keys = self.vectors.replace()
                batch = encode_vectors(
                    keys,
                    self.vectors.rows[chosen],
                    namespace="default",
                    origin=ORIGIN,
                    base=base,
                    kind=Kind.DENSE,
                )
            else:
                chosen, deltas = self.vectors.refine()
                batch = encode_batch(deltas, origin=ORIGIN, base=base)
            offered_at = time.perf_counter()
            self.propagator._partition.pipeline.offer(
                SequencedBatch(batch, self._sender, receipt), time.monotonic()
            )
            ack = await receipt.wait()
            self._next += BATCH
            self.last = receipt, base, chosen, self.vectors.turn
            run.published += BATCH
            await self.propagator.wait_visible(max(0, ack.next_offset - AHEAD_MAX), timeout_s=60)
            run.unindexed_highest = max(run.unindexed_highest, index.backlog().rows)
            run.slowed_s += time.perf_counter() - offered_at
        run.seconds = time.perf_counter() - started_at
        await self.propagator.wait_visible(ack, timeout_s=60)
        self.ended = True

    async def search(self, index: IndexSink, seconds: float, run: Run) -> None:
        """Check repeatedly that a search finds a visible vector; measure recall a few times."""
        recall_at = time.perf_counter() + seconds / RECALLS
        while not self.ended:
            await anyio.sleep(1 / CHECKS_A_SECOND)
            if self.last is None:
                continue
            receipt, base, chosen, turn = self.last
            await self.propagator.wait_visible(receipt, sinks=[index.name], timeout_s=60)
            untouched = (self.vectors.last_turn[chosen] == turn).nonzero()[0]
            if not len(untouched):
                run.checks_skipped += 1
                continue
            row = int(untouched[turn % len(untouched)])
            slot = int(chosen[row])
            hit = _search_timed(index, self.vectors.rows[slot], run)[0]
            run.checks += 1
            expected = Dot(ORIGIN, base + row)
            run.stale += (hit.vector_id, hit.dot) != (self.vectors.names[slot], expected)
            _search_timed(index, self.vectors.draw_vectors(1)[0], run)
            if time.perf_counter() > recall_at:
                run.recalls.append(_recall(index, self.vectors, RECALL_QUERIES))
                recall_at += seconds / RECALLS


async def _measure(name: str, count: int, seconds: float, rate: int, unindexed_rows_max: int) -> Run:
    vectors, run = Vectors(count), Run()
    settings = Hnsw(unindexed_rows_max=unindexed_rows_max, graph_rows_min=min(5_000, unindexed_rows_max // 2))
    index = IndexSink(hnsw=settings)
    async with Propagator(Settings(linger_ms=1.0)) as propagator:
        await propagator.attach(index)
        started_at = time.perf_counter()
        for at in range(0, count, 1000):
            ack = await propagator.publish_many(vectors.names[at : at + 1000], vectors.rows[at : at + 1000])
            await propagator.wait_visible(max(0, ack.next_offset - AHEAD_MAX), timeout_s=60)
        await propagator.wait_visible(ack, timeout_s=60)
        while index.backlog().rows:  # noqa: ASYNC110 - the index has no event for this
            await anyio.sleep(0.05)
        took_s = time.perf_counter() - started_at
        print(f"{name}: {count:,} vectors were published and indexed in {took_s:.1f} s")
        begin_cpu, before = time.process_time(), _graph_statistics(index)
        stream = Stream(propagator, vectors)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.search, index, seconds, run)
            await stream.produce(index, MIXES[name], seconds, rate, run)
        run.cpu_s = time.process_time() - begin_cpu
        after = _graph_statistics(index)
        run.recalls.append(_recall(index, vectors, 5 * RECALL_QUERIES))
        run.rows_added, run.rebuilds = (
            after.added_rows - before.added_rows,
            after.rebuilds - before.rebuilds,
        )
        run.unindexed_max = after.unindexed_rows_max
        if after.unindexed_rows_highest > settings.unindexed_rows_max:
            raise SystemExit(f"FAILED: {after.unindexed_rows_highest} rows were unindexed, above the bound")
        run.tombstones, run.graph_mb = after.tombstones, after.bytes / 1e6
        run.searches_exact = after.searches_exact - before.searches_exact
    return run


def _graph_statistics(index: IndexSink) -> HnswStatistics:
    graphs = index.statistics().hnsw
    assert graphs is not None
    return graphs


def _search_timed(index: IndexSink, query: NDArray[np.float32], run: Run) -> list[Hit]:
    started_at = time.perf_counter()
    hits = index.search(query, K)
    run.latencies_ms.append((time.perf_counter() - started_at) * 1000)
    return hits


def _recall(index: IndexSink, vectors: Vectors, queries: int) -> float:
    """Return the share of the exact `K` nearest vectors that the index finds, between two deliveries."""
    table = index.resident.tables["default"]
    assert table.matrix is not None
    rows = table.matrix[: table.used]
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    targets = vectors.draw_vectors(queries)
    exact = np.argpartition(-(targets @ rows.T), K, axis=1)[:, :K]
    hit_count = 0
    for query, slots in zip(targets, exact.tolist(), strict=True):
        found_ids = {hit.vector_id for hit in index.search(query, K)}
        hit_count += len(found_ids & {table.slots.id(slot) for slot in slots})
    return hit_count / (K * queries)


def _print(runs: dict[str, Run], count: int, rate: int) -> None:
    print()
    rows = [
        (
            name,
            f"{run.published / run.seconds:,.0f}",
            f"{run.slowed_s / run.seconds:.0%}",
            f"{run.rows_added / run.seconds:,.0f}",
            f"{run.unindexed_highest:,} of {run.unindexed_max:,}",
            run.rebuilds,
            f"{min(run.recalls):.3f} / {run.recalls[-1]:.3f}",
            f"{percentile(run.latencies_ms, 0.5):.1f} / {percentile(run.latencies_ms, 0.99):.1f}",
            f"{run.checks:,}, {run.stale}",
            f"{run.cpu_s / run.seconds:.2f}",
        )
        for name, run in runs.items()
    ]
    header = (
        "updates", "achieved/s", "producer waited", "indexed/s", "unindexed, most", "rebuilds",
        "recall@10 lowest/end", "search ms p50/p99", "checked, stale", "CPUs",
    )  # fmt: skip
    print(table(f"{rate:,} updates per second due, {count:,} vectors of {DIMENSION}, cosine", header, rows))
    print(
        f"a refinement changes 16 numbers by about 2 % of the vector's length; a replacement is near any of "
        f"{CENTRES} centres.\n"
        f"Producer, service, searcher and indexing share this process. The lowest recall is of "
        f"{RECALL_QUERIES} queries, the recall at the end of {5 * RECALL_QUERIES}."
    )


if __name__ == "__main__":
    sys.exit(main())
