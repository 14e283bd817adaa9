"""What sinks and readers must have got: all that was theirs, in order, and nothing else.

Pure: a recorded log and what somebody got in, a Violation out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from delta_prop_simulations.disasters.history import canonical, told_of
from delta_prop_simulations.disasters.sinks import POISON
from delta_prop_simulations.disasters.violation import Violation, demand
from delta_prop_wire.delta import Source
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from delta_prop.route.quarantine import SetAside
    from delta_prop_simulations.disasters.readers import Reader, Reading
    from delta_prop_simulations.disasters.record import Record
    from delta_prop_simulations.disasters.sinks import ModelSink
    from delta_prop_simulations.disasters.store import Ref
    from delta_prop_wire.algebra import State
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Dot

_SHOWN_MAX = 5


class Wanted(NamedTuple):
    """What one sink should hold: rows of its topics below `end`, but those `without` (quarantine, dropped).

    `forgiven`: vectors of which nobody can say, as a late delta met a state in the place of others.
    `from_states`: it may have been given states, which do not tell for ever of vectors that are not alive.
    """

    topics: str
    end: int
    without: Collection[int] = ()
    forgiven: Collection[Ref] = ()
    from_states: bool = False


def rows_for(record: Record, wanted: Wanted) -> Iterator[tuple[int, LoggedBatch, int]]:
    """The rows that are this sink's."""
    topic = Topic.parse(wanted.topics)
    for offset, logged, row in record.rows():
        if offset >= wanted.end or offset in wanted.without:
            continue
        if wanted.topics == "*" or topic.matches(logged.batch.delta(row, logged.source)):
            yield offset, logged, row


def check_states(should: Mapping[Ref, State], states: Mapping[Ref, State], wanted: Wanted, who: str) -> None:
    """The states are what they should be."""
    for ref in sorted(should.keys() | states.keys()):
        if ref in wanted.forgiven:
            continue
        expected, found = should.get(ref), states.get(ref)
        if wanted.from_states and _is_dead(expected) and _is_dead(found):
            continue
        if expected is None or found is None or _told(expected, wanted) != _told(found, wanted):
            raise Violation("state", f"{who}: {ref} is {found}, and the fold of the log {expected}")


def folded(record: Record, wanted: Wanted, whole: Mapping[Ref, State]) -> Mapping[Ref, State]:
    """The canonical fold of a sink's rows; of all that the log held it is `whole`."""
    if wanted.topics == "*" and wanted.end >= record.next_offset and not wanted.without:
        return whole
    return canonical((logged, row) for _, logged, row in rows_for(record, wanted))


def check_rows(record: Record, wanted: Wanted, model: ModelSink) -> None:
    """It has every row that is its own and did not come within a state."""
    who = f"{record.node}, sink {model.name!r}"
    for offset, logged, row in rows_for(record, wanted):
        if offset < model.present.states_below:
            continue
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        facts = model.present.vectors.get(ref)
        there = facts is not None and (logged.key(row) in facts.rows or offset <= facts.base_offset)
        if not (there or ref in wanted.forgiven):
            raise Violation("gap", f"{who} misses offset {offset} of {ref}")


def check_brought(record: Record, model: ModelSink) -> None:
    """It was brought what the log holds, or held until a crash that its level does not survive."""
    there = {offset: logged.batch.dot(row) for offset, logged, row in record.rows()}
    lost: set[tuple[int, Dot]] = set()
    for offset, logged, row, survives in record.lost():
        if survives > record.visible_level:
            lost.add((offset, logged.batch.dot(row)))
    for one in model.brought:
        if there.get(one.offset) != one.dot and (one.offset, one.dot) not in lost:
            what = f"{record.node}, sink {model.name!r}: {one}; there is {there.get(one.offset)}"
            raise Violation("foreign", what)


def check_quarantine(held: Sequence[SetAside], sink: str, who: str) -> None:
    """What is set aside is poison, or stands behind something that is."""
    names: set[object] = set()
    vectors: set[Ref] = set()
    for one in held:
        delta = one.delta
        poison = (delta.metadata or {}).get(POISON) in (sink, "all")
        behind = one.vector in vectors or not names.isdisjoint(delta.parents)
        demand(poison or behind, "quarantine", f"{who}: offset {one.offset} is no poison, nor behind any")
        vectors.add(one.vector)
        names.update(one.names())


def check_held_up(record: Record, wanted: Wanted, held: Sequence[SetAside], who: str) -> None:
    """Nothing of a vector is applied over a delta of it that is set aside."""
    first: dict[Ref, int] = {}
    for one in held:
        first.setdefault(one.vector, one.offset)
    for offset, logged, row in rows_for(record, wanted) if first else ():
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        if offset > first.get(ref, offset):
            what = f"{who}: offset {offset} of {ref} was applied, and {first[ref]} is set aside"
            raise Violation("quarantine", what)


def forgiven(record: Record) -> set[Ref]:
    """Vectors with a forwarded row that sorts before one that came earlier.

    Where a snapshot has taken the earlier ones' place it has no effect, so no fold says what is held.
    """
    highest: dict[Ref, tuple[int, int, int]] = {}
    found: set[Ref] = set()
    for _, logged, row in record.rows():
        ref, key = (logged.batch.namespaces[row], logged.batch.keys[row]), logged.key(row)
        if key < highest.get(ref, key):
            assert logged.source is Source.REPLICA
            found.add(ref)
        highest[ref] = max(highest.get(ref, key), key)
    return found


def check_reader(record: Record, reader: Reader) -> int:
    """It got each delta of its topics in order, went on where it was, and got none again that it had kept.

    How many deltas were looked at.
    """
    there = {offset: logged.batch.dot(row) for offset, logged, row in record.rows()}
    gone = {(offset, logged.batch.dot(row)) for offset, logged, row, _ in record.lost()}
    before: Reading | None = None
    taken: set[int] = set()
    looked = 0
    for reading in reader.readings:
        who = f"{record.node}, reader {reader.name!r}"
        offsets = [offset for offset, _ in reading.rows]
        demand(offsets == sorted(set(offsets)), "subscriber", f"{who}: out of order: {_shown(offsets)}")
        if reading.log_id != record.log_id or reading.first is None:
            continue
        for offset, dot in reading.rows:
            if there.get(offset) != dot and (offset, dot) not in gone:
                raise Violation("foreign", f"{who}: {dot} at offset {offset}; there is {there.get(offset)}")
        first = _goes_on(reading, before, who)
        wanted = Wanted(reader.topics, reading.kept)
        own = [offset for offset, _, _ in rows_for(record, wanted) if offset >= first]
        missed = set(own).difference(
            offsets, taken
        )  # what was taken last may have been said before it was kept
        taken |= set(offsets)
        demand(not missed, "subscriber", f"{who}: misses {_shown(missed)} of {reading.first}…{reading.kept}")
        looked += len(own)
        before = reading
    return looked


def _goes_on(reading: Reading, before: Reading | None, who: str) -> int:
    """From where on the rows are this reading's: where it began, or what was kept before it."""
    first, begin = reading.first, reading.begin
    assert first is not None
    if begin is not None and begin.log_id == reading.log_id:
        again = [offset for offset, _ in reading.rows if offset < begin.next_offset]
        demand(not again, "subscriber", f"{who}: gets {_shown(again)} again, had kept {begin.next_offset}")
        return min(first, begin.next_offset)
    return first if before is None or reading.anew else min(first, before.kept)


def _is_dead(state: State | None) -> bool:
    return state is None or not state.alive


def _told(state: State, wanted: Wanted) -> tuple[object, ...]:
    """All of it, but the count of deltas without effect where that may have ended with a tombstone."""
    return told_of(state)[:-1] if wanted.from_states else told_of(state)


def _shown(offsets: Sequence[int] | set[int]) -> str:
    some = sorted(offsets)[:_SHOWN_MAX] if isinstance(offsets, set) else list(offsets)
    return f"{some} ({len(offsets)} of them)"
