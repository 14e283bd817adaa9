"""What logs must show for themselves, beside what clients were told, and beside each other.

Pure: a recorded log in, a Violation out. The states are folded here from the rows themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_simulations.disasters.shadow import SUM, token_of
from delta_prop_simulations.disasters.violation import Violation, demand
from delta_prop_wire.algebra import fold
from delta_prop_wire.delta import ABSENT, AckLevel, Dot, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop_simulations.disasters.record import Record
    from delta_prop_simulations.disasters.shadow import Shadow, Told
    from delta_prop_simulations.disasters.store import Ref
    from delta_prop_wire.algebra import Key, State
    from delta_prop_wire.batch import LoggedBatch


class Place(NamedTuple):
    """Where a token stands, or stood before it was lost; `survives`: the level that would have saved it."""

    offset: int
    dot: Dot
    survives: AckLevel = AckLevel.MEMORY


def canonical(rows: Iterable[tuple[LoggedBatch, int]]) -> dict[Ref, State]:
    """Each vector's state: its deltas in canonical order, of those with one id the first."""
    changes: dict[Ref, dict[Key, Any]] = {}
    ids: dict[Ref, dict[Key, bytes]] = {}
    for logged, row in rows:
        batch, key = logged.batch, logged.key(row)
        ref = (batch.namespaces[row], batch.keys[row])
        changes.setdefault(ref, {})[key] = (key, batch.operation(row), batch.metadata(row))
        if batch.ids is not None:
            ids.setdefault(ref, {})[key] = batch.ids[row]
    return {
        ref: fold(those.values(), without_effect=_later(ids.get(ref, {}))) for ref, those in changes.items()
    }


def told_of(state: State) -> tuple[Any, ...]:
    """All that two equal states have in common."""
    return (*state.content, state.key, state.ignored)


def check_causal(record: Record) -> None:
    """The log is a linear extension of causality, and no dot or Lamport number stands twice."""
    have: dict[int, int] = {}
    ids: set[bytes] = set()
    lamport = 0
    for logged in record.batches:
        batch, where = logged.batch, f"{record.node}, offset {logged.offset}"
        known = have.get(batch.origin, 0)
        demand(batch.base > known, "twice", f"{where}: {batch.dot(0)} stands there, {known} came before")
        before = batch.previous if batch.leaps else batch.base - 1
        demand(before <= known, "causal", f"{where}: {batch.dot(0)} needs counter {before}, there is {known}")
        for cause in batch.clock:
            demand(
                have.get(cause.origin, 0) >= cause.counter,
                "causal",
                f"{where}: {batch.dot(0)} has seen {cause}, which is not there yet",
            )
        own = {batch.dot(row) for row in range(batch.count)}
        here = set(batch.ids or ())
        for row, parent in batch.parents:
            there = parent in ids or parent in here
            if isinstance(parent, Dot):
                there = have.get(parent.origin, 0) >= parent.counter or parent in own
            demand(there, "causal", f"{where}: {batch.dot(row)} names {parent!r}, which is not there yet")
        if logged.source is not Source.REPLICA:
            demand(logged.lamport > lamport, "causal", f"{where}: Lamport {logged.lamport} behind {lamport}")
        lamport = max(lamport, logged.lamport + logged.count - 1)
        have[batch.origin] = batch.last
        ids |= here


def check_expected(record: Record) -> None:
    """Who expects a head was taken only where that was the head. What was forwarded was judged elsewhere."""
    before: dict[Ref, list[tuple[LoggedBatch, int]]] = {}
    for logged in record.batches:
        batch = logged.batch
        if batch.is_control:
            continue
        expects = {} if logged.source is Source.REPLICA else dict(batch.expects)
        for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            rows = before.setdefault(ref, [])
            if row in expects and not _is_as_expected(rows, expects[row], record.level):
                head = rows[-1][0].batch.dot(rows[-1][1]) if rows else "nothing"
                raise Violation(
                    "expected",
                    f"{record.node}, offset {logged.offset}: {batch.dot(row)} expects {expects[row]} of a "
                    f"vector last changed by {head}",
                )
            rows.append((logged, row))


def _is_as_expected(rows: Sequence[tuple[LoggedBatch, int]], expected: Dot, level: AckLevel) -> bool:
    """True if a vector of which the log has these rows is as expected."""
    if expected == ABSENT:
        return not any(state.alive for state in canonical(rows).values())
    if not rows:
        return level is AckLevel.MEMORY  # what is not durable may have stood in a log before this one
    logged, row = rows[-1]
    return logged.batch.dot(row) == expected


def check_told(record: Record, shadow: Shadow) -> None:
    """What clients were told of this service is so."""
    here, lost = _places(record)
    for token, told in shadow.told.items():
        if told.node == record.node and not token.startswith(SUM):
            _check_one(record, token, told, here.get(token, []), lost.get(token, []))


def check_sums(record: Record, shadow: Shadow, states: Mapping[Ref, State], who: str) -> None:
    """Each writer's own vector holds what it was told it added, and at most what nobody could tell."""
    lost = {logged.batch.keys[row] for _, logged, row, _ in record.lost()}
    sums: dict[Ref, list[Told]] = {}
    for token, told in shadow.told.items():
        if token.startswith(SUM) and told.node == record.node:
            sums.setdefault(told.ref, []).append(told)
    for ref, (first, *added) in sums.items():
        if ref[1] in lost or not first.acks:
            continue
        least = sum(1 for one in added if one.acks)
        # Whoever was told nothing yet, as its call is still being given up, cannot tell either.
        most = least + sum(1 for one in added if not one.acks and (one.doubtful or one.refused is None))
        vector = states[ref].vector if ref in states else None
        holds = None if vector is None else float(vector[0])
        demand(
            holds is not None and least <= holds <= most,
            "counter",
            f"{who}: {ref[1]} holds {holds}; of {len(added)}, {least} were acknowledged, {most} may be there",
        )


def check_drift(records: Iterable[Record]) -> int:
    """Services give a delta the same key, and those with the same deltas hold the same. How many do."""
    keys: dict[Dot, tuple[Key, str]] = {}
    held: dict[frozenset[Dot], tuple[str, dict[Ref, tuple[Any, ...]]]] = {}
    same = 0
    for record in records:
        dots = set()
        for offset, logged, row in record.rows():
            dot = logged.batch.dot(row)
            dots.add(dot)
            key, other = keys.setdefault(dot, (logged.key(row), record.node))
            if key != logged.key(row):
                what = f"{dot} has the key {logged.key(row)} at {record.node} ({offset}), {key} at {other}"
                raise Violation("drift", what)
        states = {ref: told_of(one) for ref, one in canonical((b, r) for _, b, r in record.rows()).items()}
        node, theirs = held.setdefault(frozenset(dots), (record.node, states))
        if node != record.node:
            same += 1
            differs = sorted(ref for ref in states.keys() | theirs if states.get(ref) != theirs.get(ref))
            demand(
                not differs, "drift", f"{node} and {record.node} hold the same deltas and differ in {differs}"
            )
    return same


def _places(record: Record) -> tuple[dict[str, list[Place]], dict[str, list[Place]]]:
    here: dict[str, list[Place]] = {}
    lost: dict[str, list[Place]] = {}
    for offset, logged, row in record.rows():
        token = token_of(logged.batch, row)
        if token is not None:
            here.setdefault(token, []).append(Place(offset, logged.batch.dot(row)))
    for offset, logged, row, survives in record.lost():
        token = token_of(logged.batch, row)
        if token is not None:
            lost.setdefault(token, []).append(Place(offset, logged.batch.dot(row), survives))
    return here, lost


def _check_one(record: Record, token: str, told: Told, here: list[Place], lost: list[Place]) -> None:
    what = f"{token} of {told.writer} at {record.node}"
    if len(here) > 1:
        raise Violation("twice", f"{what} stands at offsets {[one.offset for one in here]}")
    if told.refused is not None and not told.acks and not told.doubtful:
        demand(not here, "refused", f"{what} was refused ({told.refused.name}) and stands at {here}")
    for ack in told.acks:
        could_go = [one for one in lost if ack.level < one.survives]
        demand(bool(here or could_go), "lost", f"{what}, {ack}, is not there; lost with others: {lost}")
        check = "repeat" if ack.duplicate else "answer"
        places = [one.offset for one in (*here, *could_go)]
        demand(ack.offset in places, check, f"{what}, {ack}, stands at {places}")
        asked = record.level if told.asked is None else min(told.asked, record.level)
        demand(
            ack.duplicate or ack.level >= asked, "answer", f"{what}: {ack}, and {asked.name} was asked for"
        )


def _later(ids: Mapping[Key, bytes]) -> set[Key]:
    first: dict[bytes, Key] = {}
    for key in sorted(ids):
        first.setdefault(ids[key], key)
    return ids.keys() - first.values()
