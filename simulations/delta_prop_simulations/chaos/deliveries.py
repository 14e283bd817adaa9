"""Checks that sinks and readers received every delta of their topics, in order, and nothing else. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from delta_prop_simulations.chaos.histories import LogHistory
from delta_prop_simulations.chaos.log_checks import comparable_state, fold_canonically
from delta_prop_simulations.chaos.plan import POISON
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from delta_prop.delivery.held_deltas import QuarantinedDelta
    from delta_prop_simulations.chaos.sinks import ModelSink, Ref
    from delta_prop_simulations.chaos.workload import Reader, ReadSession
    from delta_prop_wire.batch import LoggedBatch

_SHOWN_MAX = 5


class ExpectedRows(NamedTuple):
    """The rows that a sink should hold: rows that match `topics` and have an offset below `end` that is not
    in `excluded`.

    `excluded`: quarantined or dropped offsets. `unpredictable_vectors`: vectors whose state is not
    checked, since a late delta met a snapshot in place of earlier deltas. `from_snapshot`: the sink
    may have loaded full states; these omit vectors that were deleted long ago.
    """

    topics: str
    end: int
    excluded: Collection[int] = ()
    unpredictable_vectors: Collection[Ref] = ()
    from_snapshot: bool = False


def rows_for(history: LogHistory, expected: ExpectedRows) -> Iterator[tuple[int, LoggedBatch, int]]:
    """Yield the rows that the sink should hold."""
    topic = Topic.parse(expected.topics)
    for offset, logged, row in history.rows():
        if offset >= expected.end or offset in expected.excluded:
            continue
        if expected.topics == "*" or topic.matches(logged.batch.delta(row, logged.source)):
            yield offset, logged, row


def check_states(
    expected_states: Mapping[Ref, VectorState],
    states: Mapping[Ref, VectorState],
    expected_rows: ExpectedRows,
    who: str,
) -> None:
    """Check that the states are the expected ones. Raises Violation."""
    for ref in sorted(expected_states.keys() | states.keys()):
        if ref in expected_rows.unpredictable_vectors:
            continue
        expected, actual = expected_states.get(ref), states.get(ref)
        if expected_rows.from_snapshot and _is_dead(expected) and _is_dead(actual):
            continue
        if (
            expected is None
            or actual is None
            or _comparable(expected, expected_rows) != _comparable(actual, expected_rows)
        ):
            raise Violation("state", f"{who}: {ref} is {actual}, but the fold of the log is {expected}")


def fold_rows(
    history: LogHistory, expected: ExpectedRows, full_states: Mapping[Ref, VectorState]
) -> Mapping[Ref, VectorState]:
    """Return the canonical fold of a sink's rows. `full_states`: the fold of all rows of the log."""
    if expected.topics == "*" and expected.end >= history.next_offset and not expected.excluded:
        return full_states
    return fold_canonically((logged, row) for _, logged, row in rows_for(history, expected))


def check_rows(history: LogHistory, expected: ExpectedRows, model: ModelSink) -> None:
    """Check that the sink has every row it should, unless a loaded state includes it. Raises Violation."""
    who = f"{history.node}, sink {model.name!r}"
    for offset, logged, row in rows_for(history, expected):
        if offset < model.present.states_below:
            continue
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        facts = model.present.vectors.get(ref)
        is_there = facts is not None and (logged.key(row) in facts.rows or offset <= facts.base_offset)
        if not (is_there or ref in expected.unpredictable_vectors):
            raise Violation("gap", f"{who} lacks offset {offset} of {ref}")


def check_delivered(history: LogHistory, model: ModelSink) -> None:
    """Check that the sink got only rows of the log, or rows whose loss its read level permits."""
    dots = {offset: logged.batch.dot(row) for offset, logged, row in history.rows()}
    lost: set[tuple[int, Dot]] = set()
    for offset, logged, row, survives in history.lost_rows():
        if survives > history.visible_level:
            lost.add((offset, logged.batch.dot(row)))
    for delivered in model.delivered:
        offset, dot = delivered.offset, delivered.dot
        if dots.get(offset) != dot and (offset, dot) not in lost:
            what = f"{history.node}, sink {model.name!r}: {delivered}; the log has {dots.get(offset)}"
            raise Violation("foreign", what)


def check_quarantine(quarantined: Sequence[QuarantinedDelta], sink: str, who: str) -> None:
    """Check that every quarantined delta is poison, or depends on one that is. Raises Violation."""
    names: set[object] = set()
    vectors: set[Ref] = set()
    for one in quarantined:
        delta = one.delta
        is_poison = (delta.metadata or {}).get(POISON) in (sink, "all")
        is_dependent = one.vector in vectors or not names.isdisjoint(delta.parents)
        require(
            is_poison or is_dependent,
            "quarantine",
            f"{who}: offset {one.offset} is neither poison nor a dependent",
        )
        vectors.add(one.vector)
        names.update(one.names())


def check_not_overtaken(
    history: LogHistory, expected: ExpectedRows, quarantined: Sequence[QuarantinedDelta], who: str
) -> None:
    """Check that no delta was applied after a quarantined one of the same vector. Raises Violation."""
    first_quarantined: dict[Ref, int] = {}
    for one in quarantined:
        first_quarantined.setdefault(one.vector, one.offset)
    for offset, logged, row in rows_for(history, expected) if first_quarantined else ():
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        if offset > first_quarantined.get(ref, offset):
            what = f"{who}: offset {offset} of {ref} was applied, but {first_quarantined[ref]} is quarantined"
            raise Violation("quarantine", what)


def find_unpredictable_vectors(history: LogHistory) -> set[Ref]:
    """Return the vectors with a forwarded row that sorts canonically before a row at a lower offset.

    If a snapshot has replaced the other rows, such a row has no effect, so a fold of the log does not predict
    the vector's state.
    """
    highest: dict[Ref, tuple[int, int, int]] = {}
    unpredictable_vectors: set[Ref] = set()
    for _, logged, row in history.rows():
        ref, key = (logged.batch.namespaces[row], logged.batch.keys[row]), logged.key(row)
        if key < highest.get(ref, key):
            assert logged.source is Source.REPLICA
            unpredictable_vectors.add(ref)
        highest[ref] = max(highest.get(ref, key), key)
    return unpredictable_vectors


def check_reader(history: LogHistory, reader: Reader) -> int:
    """Check that a reader got each delta of its topics, in order, and no delta below its saved cursor.

    Returns the number of deltas examined. Raises Violation.
    """
    dots = {offset: logged.batch.dot(row) for offset, logged, row in history.rows()}
    lost = {(offset, logged.batch.dot(row)) for offset, logged, row, _ in history.lost_rows()}
    previous: ReadSession | None = None
    received: set[int] = set()
    examined = 0
    for session in reader.sessions:
        who = f"{history.node}, reader {reader.name!r}"
        offsets = [offset for offset, _ in session.rows]
        require(
            offsets == sorted(set(offsets)), "subscriber", f"{who}: out of order: {_format_offsets(offsets)}"
        )
        if session.log_id != history.log_id or session.first is None:
            continue
        for offset, dot in session.rows:
            if dots.get(offset) != dot and (offset, dot) not in lost:
                raise Violation("foreign", f"{who}: {dot} at offset {offset}; the log has {dots.get(offset)}")
        first = _start_of(session, previous, who)
        expected = ExpectedRows(reader.plan.topics, session.saved_end)
        expected_offsets = [offset for offset, _, _ in rows_for(history, expected) if offset >= first]
        # A previous session may have received rows without saving the cursor after them.
        missed = set(expected_offsets).difference(offsets, received)
        received |= set(offsets)
        require(
            not missed,
            "subscriber",
            f"{who}: lacks {_format_offsets(missed)} of {session.first}…{session.saved_end}",
        )
        examined += len(expected_offsets)
        previous = session
    return examined


def _start_of(session: ReadSession, previous: ReadSession | None, who: str) -> int:
    """Return the offset from which on the session must have all rows: its own start, or the saved cursor."""
    first, begin = session.first, session.begin
    assert first is not None
    if begin is not None and begin.log_id == session.log_id:
        duplicates = [offset for offset, _ in session.rows if offset < begin.next_offset]
        require(
            not duplicates,
            "subscriber",
            f"{who}: got {_format_offsets(duplicates)} again, but had saved up to {begin.next_offset}",
        )
        return min(first, begin.next_offset)
    return first if previous is None or session.is_from_start else min(first, previous.saved_end)


def _is_dead(state: VectorState | None) -> bool:
    return state is None or not state.alive


def _comparable(state: VectorState, expected: ExpectedRows) -> tuple[object, ...]:
    """Return the comparable part of a state: `from_snapshot`, it lacks the count dropped with a tombstone."""
    return comparable_state(state)[:-1] if expected.from_snapshot else comparable_state(state)


def _format_offsets(offsets: Sequence[int] | set[int]) -> str:
    shown = sorted(offsets)[:_SHOWN_MAX] if isinstance(offsets, set) else list(offsets)
    return f"{shown} ({len(offsets)} in total)"
