"""Each check at rest sees what it is there for: histories that are wrong in one way, and others right."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from delta_prop_simulations.chaos import deliveries
from delta_prop_simulations.chaos.deliveries import ExpectedRows
from delta_prop_simulations.chaos.log_checks import (
    check_causal,
    check_drift,
    check_expected,
    check_outcomes,
    check_sums,
    fold_canonically,
)
from delta_prop_simulations.chaos.log_history import LogHistory
from delta_prop_simulations.chaos.readers import Reader, ReadSession
from delta_prop_simulations.chaos.sinks import DeliveredRow, ModelSink
from delta_prop_simulations.chaos.store import Fact
from delta_prop_simulations.chaos.violation import CHECKS, Violation
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import ABSENT, Delta, Dot, Source, create, delete, scale
from delta_prop_wire.spec import ErrorCode
from tests.simulations.chaos.forged import (
    DURABLE,
    LOGGED,
    MEMORY,
    A,
    B,
    batch,
    one,
    record,
    refused,
    summed,
    sums,
    told,
)

Check = Callable[[], object]
FIRST = Dot(A, 1)
REPLICA = Source.REPLICA
ONE = one("t1")


def causal(*batches: Any) -> Check:
    return lambda: check_causal(record(*batches))


def expecting(*batches: Any) -> Check:
    return lambda: check_expected(record(*batches))


def answered(log: LogHistory, shadow: Any) -> Check:
    return lambda: check_outcomes(log, shadow)


def drifting(*nodes: Any) -> Check:
    return lambda: check_drift([record(*batches, node=f"n{at}") for at, batches in enumerate(nodes)])


def folds(log: LogHistory, **more: Any) -> Check:
    """A sink that holds the fold of all rows but the last, or of all."""

    def check() -> None:
        rows = [(logged, row) for _, logged, row in log.rows()]
        states = fold_canonically(rows[: more.get("rows", len(rows))])
        states.pop(more.pop("gone", None), None)
        more.pop("rows", None)
        given = {"topics": "*", "end": 99, **more}
        wanted = ExpectedRows(**given)
        deliveries.check_states(deliveries.fold_rows(log, wanted, states_of(log)), states, wanted, "s")

    return check


def holds(log: LogHistory, *offsets: int, **more: Any) -> Check:
    """A sink that has these rows."""

    def check() -> None:
        model = ModelSink("s", "plain", Random(1))
        for offset, logged, row in log.rows():
            if offset in offsets:
                ref = (logged.batch.namespaces[row], logged.batch.keys[row])
                model.present.facts(ref).add(Fact.of(logged, row))
        deliveries.check_rows(log, ExpectedRows("*", 99, more.get("excluded", ())), model)

    return check


def brought(log: LogHistory, *rows: tuple[int, Dot]) -> Check:
    def check() -> None:
        model = ModelSink("s", "plain", Random(1))
        model.delivered = [DeliveredRow(1, offset, dot, ("docs", "v"), True, False) for offset, dot in rows]
        deliveries.check_delivered(log, model)

    return check


def reads(log: LogHistory, *readings: Any, topics: str = "*", group: bool = False) -> Check:
    """(rows, first, kept, begin, anew) each."""

    def check() -> None:
        reader = Reader("r", node="n", topics=topics, group=group)
        for rows, first, kept, begin, anew in readings:
            cursor = None if begin is None else Cursor(log.log_id, 1, begin)
            named = [(at, Dot(A, at + 1)) if isinstance(at, int) else at for at in rows]
            reader.sessions.append(ReadSession(cursor, anew, log.log_id, first, kept, named))
        deliveries.check_reader(log, reader)

    return check


class Aside:
    """A record of a quarantine."""

    def __init__(self, offset: int, delta: Delta, dot: Dot = FIRST) -> None:
        self.offset, self.delta = offset, delta
        self.vector = (delta.namespace, delta.vector_id)
        self._dot = dot

    def names(self) -> list[object]:
        return [self._dot]


def over(log: LogHistory, *held: Any, end: int = 99) -> Check:
    wanted = ExpectedRows("*", end, {one.offset for one in held})
    return lambda: deliveries.check_not_overtaken(log, wanted, held, "n")


def aside(*held: Any) -> Check:
    return lambda: deliveries.check_quarantine(held, "s", "n")


POISON = Delta("v", create([1.0]), metadata={"poison": "all"})
OTHERS = Delta("v", create([1.0]), metadata={"poison": "other"})
LATER = Delta("v", scale(2.0))
NAMES = Delta("w", create([1.0]), parents=(Dot(A, 1),))
TWO = record(batch(1, ONE), batch(2, one("t2")))
GONE = record(batch(1, ONE, one("t2", key="x"), Delta("x", delete(), "docs")))
FIVE = record(*(batch(at, one(f"t{at}", key=f"k{at}")) for at in range(1, 6)))

HISTORIES: list[tuple[str | None, Check]] = [
    # what is expected of heads
    (None, expecting(batch(1, ONE), batch(1, one("t2", expect=Dot(A, 1)), origin=B))),
    ("expected", expecting(batch(1, ONE, ONE), batch(1, one("t2", expect=Dot(A, 1)), origin=B))),
    ("expected", expecting(batch(1, one("t2", expect=Dot(B, 1))))),
    (None, expecting(batch(1, one("t2", expect=Dot(B, 1)), source=REPLICA))),
    (None, expecting(batch(1, ONE, one("t2", expect=Dot(A, 1)), one("t3", expect=Dot(A, 2))))),
    ("expected", expecting(batch(1, ONE), batch(2, *[one("t2", expect=Dot(A, 1))] * 2))),
    (
        None,
        expecting(batch(1, one("t1", expect=ABSENT), Delta("v", delete(), "docs"), one("t2", expect=ABSENT))),
    ),
    ("expected", expecting(batch(1, ONE), batch(2, one("t2", expect=ABSENT)))),
    ("expected", expecting(batch(1, *[one("t1", expect=ABSENT)] * 2))),
    # own counters, clocks, parents, Lamport numbers
    (None, causal(batch(1, ONE), batch(2, ONE), batch(1, ONE, origin=B, clock=[Dot(A, 2)]))),
    ("twice", causal(batch(1, ONE, ONE), batch(2, ONE))),
    ("causal", causal(batch(1, ONE), batch(3, ONE))),
    ("causal", causal(batch(1, ONE), batch(1, ONE, origin=B, clock=[Dot(A, 2)]), batch(2, ONE))),
    (None, causal(batch(1, ONE), batch(1, one("t2", parents=(Dot(A, 1),)), origin=B))),
    ("causal", causal(batch(1, ONE), batch(1, one("t2", parents=(Dot(A, 2),)), origin=B))),
    (None, causal(batch(1, one("t1", id=b"i" * 16)), batch(2, one("t2", parents=(b"i" * 16,))))),
    ("causal", causal(batch(1, one("t1", id=b"i" * 16)), batch(2, one("t2", parents=(b"j" * 16,))))),
    ("causal", causal(batch(1, ONE, lamport=9), batch(2, ONE, lamport=9))),
    (None, causal(batch(1, ONE, lamport=9), batch(1, ONE, origin=B, lamport=3, source=REPLICA))),
    # what clients were told
    (None, answered(TWO, told((DURABLE, 0, False)))),
    ("lost", answered(record(batch(1, one("t2"))), told((MEMORY, 0, False)))),
    ("lost", answered(record(lost=[batch(1, ONE)]), told((DURABLE, 0, False)))),
    (None, answered(record(lost=[batch(1, ONE)]), told((LOGGED, 0, False), asked=LOGGED))),
    ("lost", answered(record(lost=[batch(1, ONE)], survives=LOGGED), told((LOGGED, 0, False)))),
    (None, answered(record(lost=[batch(1, ONE)], survives=LOGGED), told((MEMORY, 0, False), asked=MEMORY))),
    ("answer", answered(TWO, told((DURABLE, 1, False)))),
    ("answer", answered(TWO, told((LOGGED, 0, False)))),
    (None, answered(TWO, told((LOGGED, 0, False), asked=LOGGED))),
    (None, answered(TWO, told((DURABLE, 0, False), (DURABLE, 0, True)))),
    ("repeat", answered(TWO, told((DURABLE, None, True)))),
    ("repeat", answered(TWO, told((DURABLE, 0, False), (DURABLE, 1, True)))),
    ("twice", answered(record(batch(1, ONE), batch(2, ONE)), told((DURABLE, 0, False)))),
    ("twice", answered(record(batch(1, ONE), batch(2, ONE)), told())),
    ("refused", answered(TWO, refused(ErrorCode.CONFLICT))),
    (None, answered(TWO, refused(ErrorCode.CONFLICT, doubtful=True))),
    (None, answered(TWO, refused(ErrorCode.CONFLICT, token="t3"))),
    # counters
    (None, lambda: check_sums(sums(4), summed(3, 2), states_of(sums(4)), "n")),
    ("counter", lambda: check_sums(sums(2), summed(3, 2), states_of(sums(2)), "n")),
    ("counter", lambda: check_sums(sums(6), summed(3, 2), states_of(sums(6)), "n")),
    ("counter", lambda: check_sums(sums(6), summed(3, 2), {}, "n")),
    # services beside each other
    (None, drifting([batch(1, ONE)], [batch(1, ONE, source=REPLICA)])),
    ("drift", drifting([batch(1, ONE)], [batch(1, ONE, lamport=7)])),
    ("drift", drifting([batch(1, ONE)], [batch(1, one("t9"))])),
    (None, drifting([batch(1, ONE)], [batch(2, one("t9"))])),
    # sinks
    (None, folds(TWO)),
    ("state", folds(TWO, rows=1)),
    (None, folds(TWO, rows=1, end=1)),
    (None, folds(TWO, rows=1, excluded={1})),
    (None, folds(TWO, rows=1, excused={("docs", "v")})),
    ("state", folds(FIVE, topics="v:k1")),
    (None, folds(FIVE, topics="ns:docs")),
    (None, folds(GONE, gone=("docs", "x"), from_states=True)),
    ("state", folds(GONE, gone=("docs", "x"))),
    ("state", folds(GONE, gone=("docs", "v"), from_states=True)),
    (None, holds(TWO, 0, 1)),
    ("gap", holds(TWO, 1)),
    (None, holds(TWO, 1, excluded={0})),
    (None, brought(TWO, (0, Dot(A, 1)), (1, Dot(A, 2)))),
    ("foreign", brought(TWO, (0, Dot(A, 2)))),
    ("foreign", brought(TWO, (2, Dot(A, 3)))),
    ("foreign", brought(record(lost=[batch(1, ONE)]), (0, Dot(A, 1)))),
    # quarantines
    (None, aside(Aside(1, POISON), Aside(2, LATER), Aside(3, NAMES))),
    ("quarantine", aside(Aside(1, LATER), Aside(2, POISON))),
    ("quarantine", aside(Aside(1, OTHERS))),
    ("quarantine", aside(Aside(1, POISON, Dot(B, 1)), Aside(3, NAMES))),
    (None, over(TWO, Aside(0, ONE), Aside(1, ONE))),
    (None, over(TWO, Aside(1, ONE))),
    (None, over(FIVE, Aside(0, one("t1", key="k1")))),
    ("quarantine", over(TWO, Aside(0, ONE))),
    (None, over(TWO, Aside(0, ONE), end=1)),
    # readers
    (None, reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([3, 4], 3, 5, 3, False))),
    ("subscriber", reads(FIVE, ([0, 2, 1], 0, 3, None, True))),
    ("subscriber", reads(FIVE, ([0, 0, 1], 0, 2, None, True))),
    ("subscriber", reads(FIVE, ([0, 2], 0, 3, None, True))),
    ("subscriber", reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([2, 3, 4], 3, 5, 3, False))),
    ("subscriber", reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, 3, False))),
    (None, reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([2, 3], 2, 4, None, False), group=True)),
    ("subscriber", reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, None, False), group=True)),
    (None, reads(FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, None, True), group=True)),
    (None, reads(FIVE, ([1], 0, 5, None, True), topics="v:k2")),
    ("subscriber", reads(FIVE, ([], 0, 5, None, True), topics="v:k2")),
    ("foreign", reads(FIVE, ([(0, Dot(B, 1))], 0, 1, None, True))),
]


def states_of(log: LogHistory) -> Any:
    return fold_canonically((logged, row) for _, logged, row in log.rows())


@pytest.mark.parametrize("at", range(len(HISTORIES)))
def test_a_wrong_history_is_seen_and_a_right_one_passes(at: int) -> None:
    check, look = HISTORIES[at]
    if check is None:
        look()
    else:
        with pytest.raises(Violation) as caught:
            look()
        assert caught.value.check == check


def test_every_check_at_rest_has_a_wrong_and_a_right_history() -> None:
    seen = {check for check, _ in HISTORIES} - {None}
    elsewhere = {
        "bounds",
        "marks",
        "early",
        "cursor",
        "credit",
        "order",
        "damage",
        "work",
    }  # test_invariants, test_judge, test_work
    of_the_run = {"progress", "hang", "crash"}  # what a run raises by itself
    assert seen | elsewhere | of_the_run == set(CHECKS)


def test_of_equal_ids_on_a_vector_the_first_has_an_effect() -> None:
    twins = [one("a", id=b"i" * 16), one("b", id=b"i" * 16)]
    log = record(batch(1, twins[0]), batch(1, twins[1], origin=B))
    (state,) = states_of(log).values()
    assert (dict(state.metadata), state.ignored) == ({"t": "a"}, 1)


def test_a_late_row_of_another_service_is_forgiven_where_states_took_the_place_of_deltas() -> None:
    early = batch(1, one("b", "x"), origin=B, lamport=2, source=REPLICA)
    assert deliveries.excused_vectors(record(batch(1, one("a", "x"), lamport=5), early)) == {("docs", "x")}
    assert deliveries.excused_vectors(TWO) == set()
