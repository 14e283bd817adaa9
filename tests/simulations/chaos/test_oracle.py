"""Each check at rest finds its violation in a synthetic history, and passes the correct one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from delta_prop_broker.log.memory import MemoryLog
from delta_prop_simulations.chaos import deliveries
from delta_prop_simulations.chaos.deliveries import ExpectedRows
from delta_prop_simulations.chaos.histories import LogHistory
from delta_prop_simulations.chaos.log_checks import (
    check_causal,
    check_drift,
    check_expected,
    check_outcomes,
    check_sums,
    fold_canonically,
)
from delta_prop_simulations.chaos.oracle import check_log
from delta_prop_simulations.chaos.plan import ReaderPlan
from delta_prop_simulations.chaos.sinks import DeliveredRow, Fact, ModelSink
from delta_prop_simulations.chaos.violation import CHECKS, Violation
from delta_prop_simulations.chaos.workload import Reader, ReadSession
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import ABSENT, Delta, Dot, Source, create, delete, scale
from delta_prop_wire.spec import ErrorCode
from tests.simulations.chaos.synthetic_histories import (
    DURABLE,
    LOGGED,
    MEMORY,
    A,
    B,
    acknowledged_client,
    batch,
    delta_of,
    log_of,
    log_of_sums,
    refused_client,
    summing_client,
)

Check = Callable[[], object]
CORRECT, WRONG = True, False
FIRST_DOT = Dot(A, 1)
REPLICA = Source.REPLICA
DELTA_1 = delta_of("t1")


def check_causality(*batches: Any) -> Check:
    return lambda: check_causal(log_of(*batches))


def check_expectations(*batches: Any) -> Check:
    return lambda: check_expected(log_of(*batches))


def check_answers(log: LogHistory, history: Any) -> Check:
    return lambda: check_outcomes(log, history)


class StoredLog(MemoryLog):
    """A log that fails to read the row at `unreadable`, and returns nothing for the one at `missing`."""

    unreadable: int | None = None
    missing: int | None = None

    def read(self, offset: int, *, rows_max: int, bytes_max: int) -> list[LoggedBatch]:
        if offset == self.unreadable:
            raise OSError("the disk")
        if offset == self.missing:
            return []
        return super().read(offset, rows_max=1, bytes_max=bytes_max)


def check_stored(
    history: LogHistory, *batches: LoggedBatch, unreadable: int | None = None, missing: int | None = None
) -> Check:
    """Check a log that holds these batches when it is read."""

    def check() -> None:
        log = StoredLog(history.log_id)
        for logged in batches:
            log.append(logged.batch, lamport=logged.lamport, source=logged.source)
        log.unreadable, log.missing = unreadable, missing
        internals: Any = SimpleNamespace(partition=SimpleNamespace(log=log))
        assert check_log(history, internals) == len(batches)

    return check


def check_drifting(*logs: Any) -> Check:
    return lambda: check_drift([log_of(*batches, node=f"n{number}") for number, batches in enumerate(logs)])


def check_folded(log: LogHistory, **options: Any) -> Check:
    """Check a sink that holds the fold of all rows, or of the first `rows`."""

    def check() -> None:
        rows = [(logged, row) for _, logged, row in log.rows()]
        states = fold_canonically(rows[: options.get("rows", len(rows))])
        states.pop(options.pop("removed", None), None)
        options.pop("rows", None)
        arguments = {"topics": "*", "end": 99, **options}
        expected = ExpectedRows(**arguments)
        deliveries.check_states(deliveries.fold_rows(log, expected, states_of(log)), states, expected, "s")

    return check


def check_rows_held(log: LogHistory, *offsets: int, **options: Any) -> Check:
    """Check a sink that holds the rows at these offsets."""

    def check() -> None:
        model = ModelSink("s", "plain", Random(1))
        for offset, logged, row in log.rows():
            if offset in offsets:
                ref = (logged.batch.namespaces[row], logged.batch.keys[row])
                model.present.facts(ref).add(Fact.of(logged, row))
        deliveries.check_rows(log, ExpectedRows("*", 99, options.get("excluded", ())), model)

    return check


def check_delivered(log: LogHistory, *rows: tuple[int, Dot]) -> Check:
    def check() -> None:
        model = ModelSink("s", "plain", Random(1))
        model.delivered = [DeliveredRow(1, offset, dot, ("docs", "v"), True, False) for offset, dot in rows]
        deliveries.check_delivered(log, model)

    return check


def check_reads(log: LogHistory, *readings: Any, topics: str = "*", group: bool = False) -> Check:
    """Check the sessions of a reader, each given as (rows, first, saved_end, start, is_from_start)."""

    def check() -> None:
        reader = Reader(ReaderPlan("r", "n", topics=topics, group=group))
        for rows, first, saved_end, start, is_from_start in readings:
            cursor = None if start is None else Cursor(log.log_id, 1, start)
            with_dots = [(row, Dot(A, row + 1)) if isinstance(row, int) else row for row in rows]
            reader.sessions.append(
                ReadSession(cursor, is_from_start, log.log_id, first, saved_end, with_dots)
            )
        deliveries.check_reader(log, reader)

    return check


class QuarantinedRow:
    """A record of a quarantine."""

    def __init__(self, offset: int, delta: Delta, dot: Dot = FIRST_DOT) -> None:
        self.offset, self.delta = offset, delta
        self.vector = (delta.namespace, delta.vector_id)
        self._dot = dot

    def names(self) -> list[object]:
        return [self._dot]


def check_overtaking(log: LogHistory, *quarantined: Any, end: int = 99) -> Check:
    expected = ExpectedRows("*", end, {row.offset for row in quarantined})
    return lambda: deliveries.check_not_overtaken(log, expected, quarantined, "n")


def check_quarantined(*rows: Any) -> Check:
    return lambda: deliveries.check_quarantine(rows, "s", "n")


POISON = Delta("v", create([1.0]), metadata={"poison": "all"})
POISON_OF_ANOTHER_SINK = Delta("v", create([1.0]), metadata={"poison": "other"})
CHANGE_OF_SAME_VECTOR = Delta("v", scale(2.0))
CHILD_OF_FIRST = Delta("w", create([1.0]), parents=(Dot(A, 1),))
LOG_OF_TWO = log_of(batch(1, DELTA_1), batch(2, delta_of("t2")))
THIRD_BATCH = log_of(batch(1, DELTA_1), batch(2, delta_of("t2")), batch(3, delta_of("t3"))).batches[-1]
LOG_WITH_DELETED = log_of(batch(1, DELTA_1, delta_of("t2", key="x"), Delta("x", delete(), "docs")))
LOG_OF_FIVE = log_of(*(batch(number, delta_of(f"t{number}", key=f"k{number}")) for number in range(1, 6)))

HISTORIES: list[tuple[str, bool, Check]] = [
    # expected heads
    (
        "expected",
        CORRECT,
        check_expectations(batch(1, DELTA_1), batch(1, delta_of("t2", expect=Dot(A, 1)), origin=B)),
    ),
    (
        "expected",
        WRONG,
        check_expectations(batch(1, DELTA_1, DELTA_1), batch(1, delta_of("t2", expect=Dot(A, 1)), origin=B)),
    ),
    ("expected", WRONG, check_expectations(batch(1, delta_of("t2", expect=Dot(B, 1))))),
    ("expected", CORRECT, check_expectations(batch(1, delta_of("t2", expect=Dot(B, 1)), source=REPLICA))),
    (
        "expected",
        CORRECT,
        check_expectations(
            batch(1, DELTA_1, delta_of("t2", expect=Dot(A, 1)), delta_of("t3", expect=Dot(A, 2)))
        ),
    ),
    (
        "expected",
        WRONG,
        check_expectations(batch(1, DELTA_1), batch(2, *[delta_of("t2", expect=Dot(A, 1))] * 2)),
    ),
    (
        "expected",
        CORRECT,
        check_expectations(
            batch(
                1, delta_of("t1", expect=ABSENT), Delta("v", delete(), "docs"), delta_of("t2", expect=ABSENT)
            )
        ),
    ),
    ("expected", WRONG, check_expectations(batch(1, DELTA_1), batch(2, delta_of("t2", expect=ABSENT)))),
    ("expected", WRONG, check_expectations(batch(1, *[delta_of("t1", expect=ABSENT)] * 2))),
    # own counters, clocks, parents, Lamport numbers
    (
        "causal",
        CORRECT,
        check_causality(batch(1, DELTA_1), batch(2, DELTA_1), batch(1, DELTA_1, origin=B, clock=[Dot(A, 2)])),
    ),
    ("twice", WRONG, check_causality(batch(1, DELTA_1, DELTA_1), batch(2, DELTA_1))),
    ("twice", CORRECT, check_causality(batch(1, DELTA_1, DELTA_1), batch(3, DELTA_1))),
    ("causal", WRONG, check_causality(batch(1, DELTA_1), batch(3, DELTA_1))),
    (
        "causal",
        WRONG,
        check_causality(batch(1, DELTA_1), batch(1, DELTA_1, origin=B, clock=[Dot(A, 2)]), batch(2, DELTA_1)),
    ),
    (
        "causal",
        CORRECT,
        check_causality(batch(1, DELTA_1), batch(1, delta_of("t2", parents=(Dot(A, 1),)), origin=B)),
    ),
    (
        "causal",
        WRONG,
        check_causality(batch(1, DELTA_1), batch(1, delta_of("t2", parents=(Dot(A, 2),)), origin=B)),
    ),
    (
        "causal",
        CORRECT,
        check_causality(
            batch(1, delta_of("t1", id=b"i" * 16)), batch(2, delta_of("t2", parents=(b"i" * 16,)))
        ),
    ),
    (
        "causal",
        WRONG,
        check_causality(
            batch(1, delta_of("t1", id=b"i" * 16)), batch(2, delta_of("t2", parents=(b"j" * 16,)))
        ),
    ),
    ("causal", WRONG, check_causality(batch(1, DELTA_1, lamport=9), batch(2, DELTA_1, lamport=9))),
    (
        "causal",
        CORRECT,
        check_causality(batch(1, DELTA_1, lamport=9), batch(1, DELTA_1, origin=B, lamport=3, source=REPLICA)),
    ),
    # outcomes that clients got
    ("answer", CORRECT, check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, 0, False)))),
    ("lost", WRONG, check_answers(log_of(batch(1, delta_of("t2"))), acknowledged_client((MEMORY, 0, False)))),
    (
        "lost",
        WRONG,
        check_answers(log_of(lost=[batch(1, DELTA_1)]), acknowledged_client((DURABLE, 0, False))),
    ),
    (
        "lost",
        CORRECT,
        check_answers(
            log_of(lost=[batch(1, DELTA_1)]), acknowledged_client((LOGGED, 0, False), requested_level=LOGGED)
        ),
    ),
    (
        "lost",
        WRONG,
        check_answers(
            log_of(lost=[batch(1, DELTA_1)], survives=LOGGED), acknowledged_client((LOGGED, 0, False))
        ),
    ),
    (
        "lost",
        CORRECT,
        check_answers(
            log_of(lost=[batch(1, DELTA_1)], survives=LOGGED),
            acknowledged_client((MEMORY, 0, False), requested_level=MEMORY),
        ),
    ),
    ("answer", WRONG, check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, 1, False)))),
    ("answer", WRONG, check_answers(LOG_OF_TWO, acknowledged_client((LOGGED, 0, False)))),
    (
        "answer",
        CORRECT,
        check_answers(LOG_OF_TWO, acknowledged_client((LOGGED, 0, False), requested_level=LOGGED)),
    ),
    (
        "repeat",
        CORRECT,
        check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, 0, False), (DURABLE, 0, True))),
    ),
    ("repeat", WRONG, check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, None, True)))),
    (
        "repeat",
        WRONG,
        check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, 0, False), (DURABLE, 1, True))),
    ),
    (
        "twice",
        WRONG,
        check_answers(log_of(batch(1, DELTA_1), batch(2, DELTA_1)), acknowledged_client((DURABLE, 0, False))),
    ),
    ("twice", WRONG, check_answers(log_of(batch(1, DELTA_1), batch(2, DELTA_1)), acknowledged_client())),
    ("twice", CORRECT, check_answers(LOG_OF_TWO, acknowledged_client((DURABLE, 0, False)))),
    ("refused", WRONG, check_answers(LOG_OF_TWO, refused_client(ErrorCode.CONFLICT))),
    ("refused", CORRECT, check_answers(LOG_OF_TWO, refused_client(ErrorCode.CONFLICT, after_unknown=True))),
    ("refused", CORRECT, check_answers(LOG_OF_TWO, refused_client(ErrorCode.CONFLICT, token="t3"))),
    # the log itself
    ("corruption", CORRECT, check_stored(LOG_OF_TWO, *LOG_OF_TWO.batches)),
    (
        "corruption",
        WRONG,
        check_stored(LOG_OF_TWO, *log_of(batch(1, DELTA_1), batch(2, delta_of("t3"))).batches),
    ),
    (
        "corruption",
        WRONG,
        check_stored(LOG_OF_TWO, *log_of(batch(1, DELTA_1), batch(2, delta_of("t2"), lamport=9)).batches),
    ),
    ("corruption", WRONG, check_stored(LOG_OF_TWO, LOG_OF_TWO.batches[0])),
    ("corruption", WRONG, check_stored(LOG_OF_TWO, *LOG_OF_TWO.batches, THIRD_BATCH)),
    ("corruption", WRONG, check_stored(LOG_OF_TWO, *LOG_OF_TWO.batches, unreadable=1)),
    ("corruption", WRONG, check_stored(LOG_OF_TWO, *LOG_OF_TWO.batches, missing=1)),
    # counters
    (
        "counter",
        CORRECT,
        lambda: check_sums(log_of_sums(4), summing_client(3, 2), states_of(log_of_sums(4)), "n"),
    ),
    (
        "counter",
        WRONG,
        lambda: check_sums(log_of_sums(2), summing_client(3, 2), states_of(log_of_sums(2)), "n"),
    ),
    (
        "counter",
        WRONG,
        lambda: check_sums(log_of_sums(6), summing_client(3, 2), states_of(log_of_sums(6)), "n"),
    ),
    ("counter", WRONG, lambda: check_sums(log_of_sums(6), summing_client(3, 2), {}, "n")),
    # several services
    ("drift", CORRECT, check_drifting([batch(1, DELTA_1)], [batch(1, DELTA_1, source=REPLICA)])),
    ("drift", WRONG, check_drifting([batch(1, DELTA_1)], [batch(1, DELTA_1, lamport=7)])),
    ("drift", WRONG, check_drifting([batch(1, DELTA_1)], [batch(1, delta_of("t9"))])),
    ("drift", CORRECT, check_drifting([batch(1, DELTA_1)], [batch(2, delta_of("t9"))])),
    # fold of a sink
    ("state", CORRECT, check_folded(LOG_OF_TWO)),
    ("state", WRONG, check_folded(LOG_OF_TWO, rows=1)),
    ("state", CORRECT, check_folded(LOG_OF_TWO, rows=1, end=1)),
    ("state", CORRECT, check_folded(LOG_OF_TWO, rows=1, excluded={1})),
    ("state", CORRECT, check_folded(LOG_OF_TWO, rows=1, unpredictable_vectors={("docs", "v")})),
    ("state", WRONG, check_folded(LOG_OF_FIVE, topics="v:k1")),
    ("state", CORRECT, check_folded(LOG_OF_FIVE, topics="ns:docs")),
    ("state", CORRECT, check_folded(LOG_WITH_DELETED, removed=("docs", "x"), from_snapshot=True)),
    ("state", WRONG, check_folded(LOG_WITH_DELETED, removed=("docs", "x"))),
    ("state", WRONG, check_folded(LOG_WITH_DELETED, removed=("docs", "v"), from_snapshot=True)),
    ("gap", CORRECT, check_rows_held(LOG_OF_TWO, 0, 1)),
    ("gap", WRONG, check_rows_held(LOG_OF_TWO, 1)),
    ("gap", CORRECT, check_rows_held(LOG_OF_TWO, 1, excluded={0})),
    ("foreign", CORRECT, check_delivered(LOG_OF_TWO, (0, Dot(A, 1)), (1, Dot(A, 2)))),
    ("foreign", WRONG, check_delivered(LOG_OF_TWO, (0, Dot(A, 2)))),
    ("foreign", WRONG, check_delivered(LOG_OF_TWO, (2, Dot(A, 3)))),
    ("foreign", WRONG, check_delivered(log_of(lost=[batch(1, DELTA_1)]), (0, Dot(A, 1)))),
    # quarantines
    (
        "quarantine",
        CORRECT,
        check_quarantined(
            QuarantinedRow(1, POISON),
            QuarantinedRow(2, CHANGE_OF_SAME_VECTOR),
            QuarantinedRow(3, CHILD_OF_FIRST),
        ),
    ),
    (
        "quarantine",
        WRONG,
        check_quarantined(QuarantinedRow(1, CHANGE_OF_SAME_VECTOR), QuarantinedRow(2, POISON)),
    ),
    ("quarantine", WRONG, check_quarantined(QuarantinedRow(1, POISON_OF_ANOTHER_SINK))),
    (
        "quarantine",
        WRONG,
        check_quarantined(QuarantinedRow(1, POISON, Dot(B, 1)), QuarantinedRow(3, CHILD_OF_FIRST)),
    ),
    (
        "quarantine",
        CORRECT,
        check_overtaking(LOG_OF_TWO, QuarantinedRow(0, DELTA_1), QuarantinedRow(1, DELTA_1)),
    ),
    ("quarantine", CORRECT, check_overtaking(LOG_OF_TWO, QuarantinedRow(1, DELTA_1))),
    ("quarantine", CORRECT, check_overtaking(LOG_OF_FIVE, QuarantinedRow(0, delta_of("t1", key="k1")))),
    ("quarantine", WRONG, check_overtaking(LOG_OF_TWO, QuarantinedRow(0, DELTA_1))),
    ("quarantine", CORRECT, check_overtaking(LOG_OF_TWO, QuarantinedRow(0, DELTA_1), end=1)),
    # readers
    (
        "subscriber",
        CORRECT,
        check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([3, 4], 3, 5, 3, False)),
    ),
    ("subscriber", WRONG, check_reads(LOG_OF_FIVE, ([0, 2, 1], 0, 3, None, True))),
    ("subscriber", WRONG, check_reads(LOG_OF_FIVE, ([0, 0, 1], 0, 2, None, True))),
    ("subscriber", WRONG, check_reads(LOG_OF_FIVE, ([0, 2], 0, 3, None, True))),
    (
        "subscriber",
        WRONG,
        check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([2, 3, 4], 3, 5, 3, False)),
    ),
    ("subscriber", WRONG, check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, 3, False))),
    (
        "subscriber",
        CORRECT,
        check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([2, 3], 2, 4, None, False), group=True),
    ),
    (
        "subscriber",
        WRONG,
        check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, None, False), group=True),
    ),
    (
        "subscriber",
        CORRECT,
        check_reads(LOG_OF_FIVE, ([0, 1, 2], 0, 3, None, True), ([4], 4, 5, None, True), group=True),
    ),
    ("subscriber", CORRECT, check_reads(LOG_OF_FIVE, ([1], 0, 5, None, True), topics="v:k2")),
    ("subscriber", WRONG, check_reads(LOG_OF_FIVE, ([], 0, 5, None, True), topics="v:k2")),
    ("foreign", CORRECT, check_reads(LOG_OF_FIVE, ([(0, Dot(A, 1))], 0, 1, None, True))),
    ("foreign", WRONG, check_reads(LOG_OF_FIVE, ([(0, Dot(B, 1))], 0, 1, None, True))),
]


def states_of(log: LogHistory) -> Any:
    return fold_canonically((logged, row) for _, logged, row in log.rows())


@pytest.mark.parametrize("number", range(len(HISTORIES)))
def test_wrong_history_is_found_and_correct_history_passes(number: int) -> None:
    check, is_correct, run_check = HISTORIES[number]
    if is_correct:
        run_check()
    else:
        with pytest.raises(Violation) as caught:
            run_check()
        assert caught.value.check == check


def test_every_check_at_rest_has_a_wrong_and_a_correct_history() -> None:
    correct, wrong = (
        {
            (check, run_check.__qualname__)
            for check, is_correct, run_check in HISTORIES
            if is_correct is expected
        }
        for expected in (CORRECT, WRONG)
    )
    assert correct == wrong, "each check should find a wrong history and pass a correct one"
    tested_elsewhere = {"bounds", "marks", "early", "cursor", "credit"}  # in test_invariants
    tested_elsewhere |= {"order", "work"}  # in test_sinks and test_work
    raised_by_the_run = {"progress", "hang", "crash"}  # raised by the run itself
    assert {check for check, _ in wrong} | tested_elsewhere | raised_by_the_run == set(CHECKS)


def test_first_of_duplicate_ids_on_a_vector_has_effect() -> None:
    duplicates = [delta_of("a", id=b"i" * 16), delta_of("b", id=b"i" * 16)]
    log = log_of(batch(1, duplicates[0]), batch(1, duplicates[1], origin=B))
    (state,) = states_of(log).values()
    assert (dict(state.metadata), state.ignored) == ({"t": "a"}, 1)


def test_late_foreign_row_is_excused_after_loaded_states() -> None:
    early = batch(1, delta_of("b", "x"), origin=B, lamport=2, source=REPLICA)
    assert deliveries.find_unpredictable_vectors(log_of(batch(1, delta_of("a", "x"), lamport=5), early)) == {
        ("docs", "x")
    }
    assert deliveries.find_unpredictable_vectors(LOG_OF_TWO) == set()
