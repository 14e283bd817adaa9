"""Most batches go a short way down the chain; it must do what the long way does, or leave it to that."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.ingest.work import Sender
from delta_prop.receipt import Receipt
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
from delta_prop_wire.heterogeneous import common_columns_only
from tests.delta_prop.chains import Bench, batch_of

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
SENT = st.tuples(
    st.sampled_from([0, 1]),  # who sends
    st.sampled_from([1, 1, 1, 1, 2, 0]),  # how far behind its last counter it begins
    st.sampled_from([1, 1, 1, 2]),  # the epoch
    st.lists(DELTAS, min_size=1, max_size=3),
    st.sampled_from(["", "", "", "clock", "owner", "source"]),
)


class LongWay(Bench):
    def __init__(self, log_deltas_max: int = 60) -> None:
        super().__init__(pending_deltas_max=20, log_deltas_max=log_deltas_max)
        self.chain._try_fast_path = lambda _: False  # type: ignore[method-assign]


def told(receipt: Receipt) -> object:
    refusal = receipt.refusal()
    if refusal is not None:
        return refusal.code, refusal.message, refusal.row, refusal.field, refusal.retry_after_ms
    return receipt.state, receipt.result() if receipt.acknowledged else None


def play(bench: Bench, story: list[Any]) -> list[object]:
    """Everything that can be seen from outside, and what the chain knows in the end."""
    origins = [bench.hello("p"), bench.hello("q")]
    nexts = [1, 1]
    receipts: list[Receipt] = []
    batches: list[Batch] = []
    for who, step, epoch, deltas, extra in story:
        base = max(nexts[who] + step - 1, 1)
        clock = (Dot(origins[1 - who], nexts[1 - who]),) if extra == "clock" else ()
        batch = batch_of(origins[who], base, *deltas, epoch=epoch, clock=clock)
        nexts[who] = max(nexts[who], batch.last + 1)
        batches.append(batch)
        owner = "somebody" if extra == "owner" else None
        receipts.append(bench.send(batch, owner=owner))
        if extra == "source":
            receipts.append(bench.send(batch))  # once more
    appender, vectors = bench.chain.appender, bench.vectors
    log = [(one.offset, one.lamport, bytes(one.batch.body)) for one in bench.routed]
    heads = {key: vectors.head("default", key) for key in ("a", "b", "é")}
    counters = (
        appender.counters,
        appender.lamport,
        vectors.concurrent_updates,
        vectors.writer_count,
        bench.chain.refused,
    )
    firsts = [bench.chain.outcome(batch.origin, batch.base) for batch in batches]
    refused = bench.log.statistics().refused
    return [*map(told, receipts), log, heads, counters, firsts, bench.chain.orderer.statistics(), refused]


@given(st.lists(SENT, min_size=1, max_size=30))
def test_the_short_way_ends_where_the_long_way_does(story: list[Any]) -> None:
    assert play(Bench(pending_deltas_max=20, log_deltas_max=60), story) == play(LongWay(), story)


def test_a_simple_batch_goes_the_short_way_and_others_do_not() -> None:
    bench, ways = Bench(), []
    origin = bench.hello("p")
    long_way = bench.chain._process_sequenced
    bench.chain._process_sequenced = lambda work: (ways.append(work.batch.base), long_way(work))[1]  # type: ignore[method-assign]
    assert bench.send(
        batch_of(origin, 1, Delta("a", create([1, 2])), Delta("b", create([1, 2])))
    ).acknowledged
    assert bench.send(batch_of(origin, 3, Delta("a", sparse([0], [1.0])))).acknowledged
    assert bench.send(batch_of(origin, 4, Delta("c", opaque(b"one")), Delta("d", opaque(b"")))).acknowledged
    assert not ways
    assert bench.send(batch_of(origin, 6, Delta("a", create([1, 2])), Delta("b", delete()))).acknowledged
    assert bench.send(
        batch_of(origin, 8, Delta("a", offset(1.0)), Delta("a", opaque(b"x"), namespace="other"))
    ).acknowledged
    assert not ways
    assert bench.send(batch_of(origin, 10, Delta("c", delete()), clock=(Dot(origin, 1),))).acknowledged
    assert bench.send(batch_of(origin, 11, Delta("é", delete()), Delta("d", opaque(b"")))).acknowledged
    assert ways == [10, 11]


PLAIN = st.tuples(
    st.lists(DELTAS, min_size=1, max_size=3),
    st.sampled_from(["", "", "", "", "", "clock", "again", "gap"]),
)


@given(st.lists(PLAIN, min_size=1, max_size=12), st.integers(5, 60), st.sampled_from([1, 1, 2]))
def test_batches_that_come_together_end_where_single_ones_do(
    story: list[Any], log_deltas_max: int, epoch: int
) -> None:
    assert sent(story, log_deltas_max, epoch, together=True) == sent(
        story, log_deltas_max, epoch, together=False
    )


def sent(story: list[Any], log_deltas_max: int, epoch: int, *, together: bool) -> list[object]:
    """Offer all batches of one producer, in runs or one by one the long way; what can be seen in the end."""
    short = Bench(pending_deltas_max=20, log_deltas_max=log_deltas_max)
    bench = short if together else LongWay(log_deltas_max)
    origins = [bench.hello("p"), bench.hello("q")]
    batches, following = [], 1
    for deltas, extra in story:
        following += extra == "gap"
        clock = (Dot(origins[1], 1),) if extra == "clock" else ()
        base = max(following - 1, 1) if extra == "again" else following
        batches.append(batch_of(origins[0], base, *deltas, epoch=epoch, clock=clock))
        following = batches[-1].last + 1
    outcomes: list[object] = []
    while batches:
        run = going_on(batches) if together else batches[:1]
        session, receipts = Sender("p", Source.LOCAL), []

        def receipt(_: int, receipts: list[Receipt] = receipts) -> Receipt:
            receipts.append(Receipt())
            return receipts[-1]

        taken = bench.chain.offer_run(run, session, receipt, bench.now) if together else 0
        assert len(receipts) == (taken > 0)
        if taken:
            outcomes += rows_of(receipts[0])
        for batch in run[taken:]:
            outcomes += rows_of(bench.send(batch))
        del batches[: len(run)]
    appender, vectors = bench.chain.appender, bench.vectors
    log = [(one.offset, one.lamport, bytes(one.batch.body)) for one in bench.routed]
    heads = {(name, key): vectors.head(name, key) for name in ("default", "other") for key in ("a", "b", "é")}
    state = (appender.counters, appender.lamport, vectors.concurrent_updates, vectors.dimension("default"))
    firsts = [bench.chain.outcome(origins[0], counter) for counter in range(1, following)]
    return [outcomes, log, heads, state, firsts, bench.chain.refused, bench.log.statistics().refused]


def going_on(batches: list[Batch]) -> list[Batch]:
    """The first of these, as far as they are simple and one goes on where the other ends."""
    count = 1
    for before, batch in pairwise(batches):
        if batch.base != before.last + 1 or not common_columns_only(batch):
            break
        count += 1
    return batches[: count if common_columns_only(batches[0]) else 1]


def rows_of(receipt: Receipt) -> list[object]:
    """Return offset and level by row, or a refusal."""
    if not receipt.acknowledged:
        return [told(receipt)]
    result = receipt.result()
    assert result.offset is not None
    firsts = result.duplicates or {row: result.offset + row for row in range(result.count)}
    return [(firsts[row], result.level) for row in range(result.count)]


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
def test_alike_batches_that_come_together_end_where_single_ones_do(
    story: list[Any], log_deltas_max: int
) -> None:
    first = [([Delta(key, create([1, 2])) for key in "abc"], "")]
    pieces = first + [
        ([Delta(key, KINDS[kind][which % len(KINDS[kind])]) for key, which in rows], "")
        for kind, batches in story
        for rows in batches
    ]
    assert sent(pieces, log_deltas_max, 1, together=True) == sent(pieces, log_deltas_max, 1, together=False)


def test_alike_batches_are_noted_in_one_go() -> None:
    bench = Bench()
    origin = bench.hello("p")
    singly = bench.chain.appender._note_each
    ways: list[int] = []
    bench.chain.appender._note_each = lambda *some: (ways.append(len(some[0])), singly(*some))[1]  # type: ignore[method-assign]
    batches = [batch_of(origin, 1 + row, Delta(f"key-{row}", create([1, 2]))) for row in range(4)]
    session = Sender("p", Source.LOCAL)
    assert bench.chain.offer_run(batches[:1], session, lambda _: Receipt(), bench.now) == 1
    assert ways == [1]  # a namespace that nobody has written in
    assert bench.chain.offer_run(batches[1:], session, lambda _: Receipt(), bench.now) == 3
    assert ways == [1]
    heads = [bench.vectors.head("default", f"key-{row}") for row in range(4)]
    assert heads == [Dot(origin, 1 + row) for row in range(4)]
