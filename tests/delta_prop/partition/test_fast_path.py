"""The fast path of the pipeline has the same effects as the full path."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Sender
from delta_prop_wire.delta import (
    Delta,
    Dot,
    Operation,
    Source,
    create,
    delete,
    dense,
    offset,
    opaque,
    sparse,
)
from delta_prop_wire.frame_runs import FrameRun
from delta_prop_wire.validate import common_columns_only
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

OPERATIONS: list[Operation] = [
    create([1, 2]),
    create([1, 2]),
    dense([3, 4]),
    sparse([1], [1]),
    sparse([2], [1]),  # beyond the dimension
    create([1, 2, 3]),  # another dimension
    create([float("nan"), 0]),
    offset(1.0),
    delete(),
    opaque(b"x"),
    opaque(b"xyz"),
    opaque(b""),
]
DELTAS = st.builds(
    Delta,
    st.sampled_from(["a", "b", "é", "", "x\n"]),
    st.sampled_from(OPERATIONS),
    st.sampled_from(["default", "default", "default", "other"]),
)
STEP_OF_TWO_PRODUCERS = st.tuples(
    st.sampled_from([0, 1]),  # the sender
    st.sampled_from([1, 1, 1, 1, 2, 0]),  # the distance of its base from the sender's last counter
    st.sampled_from([1, 1, 1, 2]),  # the epoch of the batch
    st.lists(DELTAS, min_size=1, max_size=3),
    st.sampled_from(["", "", "", "clock", "owner", "source"]),
)


class FullPathBench(Bench):
    def __init__(self, log_deltas_max: int = 60) -> None:
        super().__init__(pending_deltas_max=20, log_deltas_max=log_deltas_max)
        self.pipeline._try_fast_path = lambda _: False  # type: ignore[method-assign]


def receipt_outcome(receipt: Receipt) -> object:
    refusal = receipt.refusal()
    if refusal is not None:
        return refusal.code, refusal.message, refusal.row, refusal.field, refusal.retry_after_ms
    return receipt.state, receipt.result() if receipt.acknowledged else None


def send_batches(bench: Bench, steps: list[Any]) -> list[object]:
    """Send the batches; return the outcomes, the log and the final state of the pipeline."""
    origins = [bench.hello("p"), bench.hello("q")]
    next_counters = [1, 1]
    receipts: list[Receipt] = []
    batches: list[Batch] = []
    for sender, step, epoch, deltas, extra in steps:
        base = max(next_counters[sender] + step - 1, 1)
        clock = (Dot(origins[1 - sender], next_counters[1 - sender]),) if extra == "clock" else ()
        batch = batch_of(origins[sender], base, *deltas, epoch=epoch, clock=clock)
        next_counters[sender] = max(next_counters[sender], batch.last + 1)
        batches.append(batch)
        owner = "somebody" if extra == "owner" else None
        receipts.append(bench.send(batch, owner=owner))
        if extra == "source":
            receipts.append(bench.send(batch))  # the batch is a duplicate
    appender, vectors = bench.pipeline.appender, bench.vectors
    log = [(logged.offset, logged.lamport, bytes(logged.batch.body)) for logged in bench.routed]
    heads = {key: vectors.head("default", key) for key in ("a", "b", "é")}
    counters = (
        appender.counters,
        appender.lamport,
        vectors.concurrent_updates,
        vectors.writer_count,
        bench.pipeline.refused,
    )
    first_offsets = [bench.pipeline.outcome(batch.origin, batch.base) for batch in batches]
    refused = bench.log.statistics().refused
    return [
        *map(receipt_outcome, receipts),
        log,
        heads,
        counters,
        first_offsets,
        bench.pipeline.orderer.statistics(),
        refused,
    ]


@given(st.lists(STEP_OF_TWO_PRODUCERS, min_size=1, max_size=30))
def test_fast_path_ends_like_full_path(steps: list[Any]) -> None:
    assert send_batches(Bench(pending_deltas_max=20, log_deltas_max=60), steps) == send_batches(
        FullPathBench(), steps
    )


def test_only_simple_batches_take_the_fast_path() -> None:
    bench, full_path = Bench(), []
    origin = bench.hello("p")
    process = bench.pipeline._process_sequenced
    bench.pipeline._process_sequenced = lambda work: (full_path.append(work.batch.base), process(work))[1]  # type: ignore[method-assign]
    assert bench.send(
        batch_of(origin, 1, Delta("a", create([1, 2])), Delta("b", create([1, 2])))
    ).acknowledged
    assert bench.send(batch_of(origin, 3, Delta("a", sparse([0], [1.0])))).acknowledged
    assert bench.send(batch_of(origin, 4, Delta("c", opaque(b"one")), Delta("d", opaque(b"")))).acknowledged
    assert not full_path
    assert bench.send(batch_of(origin, 6, Delta("a", create([1, 2])), Delta("b", delete()))).acknowledged
    assert bench.send(
        batch_of(origin, 8, Delta("a", offset(1.0)), Delta("a", opaque(b"x"), namespace="other"))
    ).acknowledged
    assert not full_path
    assert bench.send(batch_of(origin, 10, Delta("c", delete()), clock=(Dot(origin, 1),))).acknowledged
    assert bench.send(batch_of(origin, 11, Delta("é", delete()), Delta("d", opaque(b"")))).acknowledged
    assert full_path == [10]


STEP_OF_ONE_PRODUCER = st.tuples(
    st.lists(DELTAS, min_size=1, max_size=3),
    st.sampled_from(["", "", "", "", "", "clock", "resent", "gap"]),
)


@given(
    st.lists(STEP_OF_ONE_PRODUCER, min_size=1, max_size=12), st.integers(5, 60), st.sampled_from([1, 1, 2])
)
def test_batches_offered_as_run_end_like_single_ones(
    steps: list[Any], log_deltas_max: int, epoch: int
) -> None:
    assert offer_batches(steps, log_deltas_max, epoch, as_run=True) == offer_batches(
        steps, log_deltas_max, epoch, as_run=False
    )


def offer_batches(steps: list[Any], log_deltas_max: int, epoch: int, *, as_run: bool) -> list[object]:
    """Offer a producer's batches as runs, or one by one on the full path; return outcomes and final state."""
    run_bench = Bench(pending_deltas_max=20, log_deltas_max=log_deltas_max)
    bench = run_bench if as_run else FullPathBench(log_deltas_max)
    origins = [bench.hello("p"), bench.hello("q")]
    batches, next_counter = [], 1
    for deltas, extra in steps:
        next_counter += extra == "gap"
        clock = (Dot(origins[1], 1),) if extra == "clock" else ()
        base = max(next_counter - 1, 1) if extra == "resent" else next_counter
        batches.append(batch_of(origins[0], base, *deltas, epoch=epoch, clock=clock))
        next_counter = batches[-1].last + 1
    outcomes: list[object] = []
    while batches:
        run = leading_run(batches) if as_run else batches[:1]
        sender, receipts = Sender("p", Source.LOCAL), []

        def receipt(_: int, receipts: list[Receipt] = receipts) -> Receipt:
            receipts.append(Receipt())
            return receipts[-1]

        frames = FrameRun(1, True, run, sum(batch.count for batch in run), sum(batch.size for batch in run))
        taken_count = bench.pipeline.offer_run(frames, sender, receipt, bench.now) if as_run else 0
        assert len(receipts) == (taken_count > 0)
        if taken_count:
            outcomes += row_outcomes(receipts[0])
        for batch in run[taken_count:]:
            outcomes += row_outcomes(bench.send(batch))
        del batches[: len(run)]
    appender, vectors = bench.pipeline.appender, bench.vectors
    log = [(logged.offset, logged.lamport, bytes(logged.batch.body)) for logged in bench.routed]
    heads = {(name, key): vectors.head(name, key) for name in ("default", "other") for key in ("a", "b", "é")}
    state = (appender.counters, appender.lamport, vectors.concurrent_updates, vectors.dimension("default"))
    first_offsets = [bench.pipeline.outcome(origins[0], counter) for counter in range(1, next_counter)]
    return [
        outcomes,
        log,
        heads,
        state,
        first_offsets,
        bench.pipeline.refused,
        bench.log.statistics().refused,
    ]


def leading_run(batches: list[Batch]) -> list[Batch]:
    """Return the leading batches that are contiguous and have only common columns."""
    count = 1
    for previous, batch in pairwise(batches):
        if batch.base != previous.last + 1 or not common_columns_only(batch):
            break
        count += 1
    return batches[: count if common_columns_only(batches[0]) else 1]


def row_outcomes(receipt: Receipt) -> list[object]:
    """Return offset and level by row, or a refusal."""
    if not receipt.acknowledged:
        return [receipt_outcome(receipt)]
    result = receipt.result()
    assert result.offset is not None
    first_offsets = result.duplicates or {row: result.offset + row for row in range(result.count)}
    return [(first_offsets[row], result.level) for row in range(result.count)]


ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=3)
KINDS: dict[str, list[Operation]] = {
    "create": [create([1, 2]), create([1, 2]), create([1, 2]), create([1, 2, 3])],
    "dense": [dense([3, 4]), dense([3, 4]), dense([3, 4]), dense([3])],
    "sparse": [sparse([1], [1]), sparse([0], [1]), sparse([0], [1]), sparse([2], [1])],
    "offset": [offset(1.0)],
    "delete": [delete()],
    "opaque": [opaque(b"x")],
}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(KINDS)), st.lists(ROWS, min_size=2, max_size=4)),
        min_size=1,
        max_size=6,
    ),
    st.integers(5, 60),
)
def test_batches_of_one_kind_offered_as_run_end_like_single_ones(
    steps: list[Any], log_deltas_max: int
) -> None:
    creates = [([Delta(key, create([1, 2])) for key in "abc"], "")]
    batch_steps = creates + [
        ([Delta(key, KINDS[kind][index % len(KINDS[kind])]) for key, index in rows], "")
        for kind, batches in steps
        for rows in batches
    ]
    assert offer_batches(batch_steps, log_deltas_max, 1, as_run=True) == offer_batches(
        batch_steps, log_deltas_max, 1, as_run=False
    )
