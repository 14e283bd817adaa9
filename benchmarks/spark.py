"""Measures writes from Spark, reads, and replay of a log.

Writes and reads are relative to an upper limit of the same round: Spark's noop sink, Parquet.

Spark (local[2]), its Python workers and the service share two cores. Rows have a vector of 64 float32; all
acknowledgements are durable. Rounds are interleaved; a rate counts the whole job, with its start and its
commit.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._measure import Figure, ratios, table
from benchmarks._peers_ours import OursDurable
from benchmarks._results import Goal, Results, options_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WIDTH = 64
WARM_ROUNDS = 2
ROWS, ROWS_SLOW = 400_000, 50_000
"""Rows per job; ROWS_SLOW: for the slow row-by-row writer."""
REPLAY_ROWS = (1_000_000, 10_000_000)
REPLAY_KEYS, REPLAY_WIDTH, FRAME_ROWS = 100_000, 8, 1_000
GROWTH_MAX = 12.0
"""Maximum factor between the times of the two replays, of which one has ten times the deltas."""
SETTINGS = {"spark.driver.memory": "4g", "spark.driver.extraJavaOptions": "-XX:+UseParallelGC"}
"""As on a cluster: the JVM's full JIT compiler; `session` by default starts quickly, for short commands."""
NOOP, ROW = "Spark's noop sink", "a writer of rows"
DIRECT, STAGED = "direct", "staged, until it is published"
READ, PARQUET = "read from the service", "the same data as Parquet"


def main() -> int:
    """Measure, print, write; return the exit status."""
    parser = options_of("spark", __doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of a job; default: {ROWS:,}")
    parser.add_argument("--only", choices=("write", "read", "replay"), help="only this part")
    given = parser.parse_args()
    if given.rounds < 1 or given.rows < 1_000:
        parser.error("--rounds or --rows is too small: set at least 1 round and 1,000 rows")
    from delta_prop.spark.data_source.sessions import session
    from delta_prop.spark.data_source.source import register
    from delta_prop_wire.errors import UsageError

    try:
        spark = session("bench", master="local[2]", settings=SETTINGS)
    except UsageError as error:
        print(f"./run bench spark: {error}", file=sys.stderr)
        return 2
    register(spark)
    results = Results("spark")
    rounds, rows = (2, 50_000) if given.quick else (given.rounds, given.rows)
    with tempfile.TemporaryDirectory(prefix="delta-prop-spark-") as name:
        folder = Path(name)
        if given.only in (None, "write", "read"):
            with OursDurable().running(folder) as server:
                url = f"127.0.0.1:{server.port}"
                if given.only != "read":
                    writes(results, spark, url, rounds=rounds, rows=rows)
                if given.only != "write":
                    reads(results, spark, url, str(folder / "parquet"), rounds=rounds, rows=rows)
        if given.only in (None, "replay"):
            replays(results, spark, folder, 1 if given.quick else min(rounds, 3), quick=given.quick)
    spark.stop()
    return results.finish(given.json)


def make_rows(spark: SparkSession, rows: int) -> DataFrame:
    """Return rows with a vector. The job that writes them generates them, so every method has that cost."""
    from pyspark.sql import functions as f

    numbers = f.transform(f.sequence(f.lit(1), f.lit(WIDTH)), lambda n: (f.col("id") * n % 997).cast("float"))
    return spark.range(rows, numPartitions=2).select(
        f.concat(f.lit("vector-"), f.col("id").cast("string")).alias("vector_id"), numbers.alias("vector")
    )


def writes(results: Results, spark: SparkSession, url: str, *, rounds: int, rows: int) -> None:
    """Write the same rows by each method, under a new producer name each time."""
    from benchmarks._spark_rows import PlainRows

    spark.dataSource.register(PlainRows)
    slow_rows = min(rows, ROWS_SLOW)
    frame, slow_frame, turn = make_rows(spark, rows), make_rows(spark, slow_rows), iter(range(10_000))

    def ours(**options: str) -> None:
        write = frame.write.format("delta_prop").option("url", url).option("namespace", "bench")
        write.options(producer=f"bench-{next(turn)}", **options).mode("append").save()

    def plain() -> None:
        write = (
            slow_frame.write.format("plain_rows").option("url", url).option("producer", f"rows-{next(turn)}")
        )
        write.mode("append").save()

    methods: dict[str, Callable[[], None]] = {
        NOOP: lambda: frame.write.format("noop").mode("overwrite").save(),
        ROW: plain,
        DIRECT: lambda: ours(staged="false"),
        STAGED: ours,
    }
    rates = measure(methods, rounds, dict.fromkeys(methods, rows) | {ROW: slow_rows})
    of_noop = ratios(rates[DIRECT], rates[NOOP])
    of_rows = ratios(rates[DIRECT], rates[ROW])
    results.add_goal(Goal("spark 4", "write, direct: of Spark's noop sink", 0.2), of_noop)
    results.add_goal(Goal("spark 4", "write, direct: of a writer of rows", 4.0), of_rows)
    report_rates(results, f"writing {rows:,} rows, which each job makes itself", rates, NOOP)


def reads(results: Results, spark: SparkSession, url: str, parquet: str, *, rounds: int, rows: int) -> None:
    """Read the same rows from the service's log and from a file."""
    make_rows(spark, rows).write.parquet(parquet)
    write = spark.read.parquet(parquet).write.format("delta_prop").option("url", url)
    write.options(producer="to-read", namespace="read", staged="false").mode("append").save()
    read = spark.read.format("delta_prop").options(url=url, topics="ns:read", partitions="2")
    columns = ["vector_id", "vector"]
    methods: dict[str, Callable[[], None]] = {
        PARQUET: lambda: (
            spark.read.parquet(parquet).select(columns).write.format("noop").mode("overwrite").save()
        ),
        READ: lambda: read.load().select(columns).write.format("noop").mode("overwrite").save(),
    }
    count = read.load().count()
    if count != rows:
        results.failures.append(f"{count:,} rows were read of {rows:,}")
    rates = measure(methods, rounds, dict.fromkeys(methods, rows))
    shares = ratios(rates[READ], rates[PARQUET])
    results.add_goal(Goal("spark 4", "read: of the same data as Parquet", 0.5), shares)
    report_rates(results, f"reading {rows:,} rows", rates, PARQUET)


def replays(results: Results, spark: SparkSession, folder: Path, rounds: int, *, quick: bool) -> None:
    """Replay the state of every vector from the log's files, with logs of two sizes."""
    from delta_prop.spark.jobs.replaying import replay

    sizes = (100_000, 1_000_000) if quick else REPLAY_ROWS
    for size in sizes:
        build_log(folder / str(size), size)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(rounds + 1):
        for size in sizes:
            started_at = time.perf_counter()
            vectors = replay(spark, str(folder / str(size))).count()
            if turn:
                seconds[size].append(time.perf_counter() - started_at)
            if vectors != REPLAY_KEYS:
                results.failures.append(f"replay of {size:,}: {vectors:,} vectors of {REPLAY_KEYS:,}")
    rows = [
        (f"{size:,}", results.add_figure(f"replay of {size:,}", taken, "s", less=True))
        for size, taken in seconds.items()
    ]
    growth = ratios(*reversed(seconds.values()))
    results.add_goal(Goal("spark 7", "replay: ten times the deltas", GROWTH_MAX, less=True), growth)
    results.tables.append(table("replay of a log", ("deltas", "s"), rows))


def build_log(data: Path, size: int) -> None:
    """Write a log of vectors that change repeatedly."""
    import anyio
    import numpy as np

    from delta_prop.api.propagator import Propagator
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_wire.delta import AckLevel

    names = [f"vector-{number}" for number in range(REPLAY_KEYS)]
    numbers = np.random.default_rng(1).random((FRAME_ROWS, REPLAY_WIDTH), np.float32)

    async def build() -> None:
        settings = LogSettings(read_level=AckLevel.LOGGED, compact=False)
        async with Propagator(data=data, log=settings) as propagator:
            for at in range(0, size, FRAME_ROWS):
                first = at % REPLAY_KEYS
                await propagator.publish_many(names[first : first + FRAME_ROWS], numbers + np.float32(at % 7))

    anyio.run(build)


def measure(
    methods: dict[str, Callable[[], None]], rounds: int, rows: dict[str, int]
) -> dict[str, list[float]]:
    """Measure rows per second of each method, round by round, after warm-up rounds."""
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(WARM_ROUNDS + rounds):
        for name, method in methods.items():
            started_at = time.perf_counter()
            method()
            if turn >= WARM_ROUNDS:
                rates[name].append(rows[name] / (time.perf_counter() - started_at))
    return rates


def report_rates(results: Results, what: str, rates: dict[str, list[float]], limit: str) -> None:
    """Add a table: the rate of each method, also relative to the limit of its round."""
    rows = []
    for name, rounds in rates.items():
        rate = results.add_figure(f"{what}: {name}", rounds, "rows/s")
        share = Figure.of(ratios(rounds, rates[limit])).median
        rows.append((name, rate, f"{share:.0%}"))
    results.tables.append(table(what, ("", "rows/s", f"of {limit}"), rows))


if __name__ == "__main__":
    sys.exit(main())
