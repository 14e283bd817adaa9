"""Checks logs by themselves, against the outcomes that clients received, and against each other.

Pure: takes recorded logs, raises a Violation. It folds the states from the rows itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_simulations.chaos.client_history import SUM, token_of
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_wire.algebra import fold
from delta_prop_wire.delta import ABSENT, AckLevel, Dot, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop_simulations.chaos.client_history import ClientHistory, DeltaOutcome
    from delta_prop_simulations.chaos.log_history import LogHistory
    from delta_prop_simulations.chaos.store import Ref
    from delta_prop_wire.algebra import Key, VectorState
    from delta_prop_wire.batch import LoggedBatch


class TokenLocation(NamedTuple):
    """The offset of a token in the log, or before its loss; `survives`: the level that would have kept it."""

    offset: int
    dot: Dot
    survives: AckLevel = AckLevel.MEMORY


def fold_canonically(rows: Iterable[tuple[LoggedBatch, int]]) -> dict[Ref, VectorState]:
    """Fold each vector's deltas in canonical order; of duplicates by id only the first has an effect."""
    changes: dict[Ref, dict[Key, Any]] = {}
    ids: dict[Ref, dict[Key, bytes]] = {}
    for logged, row in rows:
        batch, key = logged.batch, logged.key(row)
        ref = (batch.namespaces[row], batch.keys[row])
        changes.setdefault(ref, {})[key] = (key, batch.operation(row), batch.metadata(row))
        if batch.ids is not None:
            ids.setdefault(ref, {})[key] = batch.ids[row]
    return {
        ref: fold(those.values(), without_effect=_later_duplicates(ids.get(ref, {})))
        for ref, those in changes.items()
    }


def comparable_state(state: VectorState) -> tuple[Any, ...]:
    """Return the parts of a state that are equal in two equal states."""
    return (*state.content, state.key, state.ignored)


def check_causal(history: LogHistory) -> None:
    """Check that the log is a linear extension of causality, without duplicate dots or Lamport numbers."""
    have: dict[int, int] = {}
    ids: set[bytes] = set()
    lamport = 0
    for logged in history.batches:
        batch, where = logged.batch, f"{history.node}, offset {logged.offset}"
        known = have.get(batch.origin, 0)
        require(batch.base > known, "twice", f"{where}: duplicate {batch.dot(0)}: {known} came before")
        before = batch.previous if batch.has_gaps else batch.base - 1
        require(
            before <= known, "causal", f"{where}: {batch.dot(0)} needs counter {before}, there is {known}"
        )
        for cause in batch.clock:
            require(
                have.get(cause.origin, 0) >= cause.counter,
                "causal",
                f"{where}: {batch.dot(0)} depends on {cause}, which is not in the log yet",
            )
        own = {batch.dot(row) for row in range(batch.count)}
        here = set(batch.ids or ())
        for row, parent in batch.parents:
            there = parent in ids or parent in here
            if isinstance(parent, Dot):
                there = have.get(parent.origin, 0) >= parent.counter or parent in own
            require(
                there, "causal", f"{where}: {batch.dot(row)} depends on {parent!r}, which is not there yet"
            )
        if logged.source is not Source.REPLICA:
            require(logged.lamport > lamport, "causal", f"{where}: Lamport {logged.lamport} after {lamport}")
        lamport = max(lamport, logged.lamport + logged.count - 1)
        have[batch.origin] = batch.last
        ids |= here


def check_expected(history: LogHistory) -> None:
    """Check that `expect` matched the vector's head; forwarded rows were checked by their own service."""
    before: dict[Ref, list[tuple[LoggedBatch, int]]] = {}
    for logged in history.batches:
        batch = logged.batch
        if batch.is_control:
            continue
        expects = {} if logged.source is Source.REPLICA else dict(batch.expects)
        for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            rows = before.setdefault(ref, [])
            if row in expects and not _is_as_expected(rows, expects[row], history.level):
                head = rows[-1][0].batch.dot(rows[-1][1]) if rows else "nothing"
                raise Violation(
                    "expected",
                    f"{history.node}, offset {logged.offset}: {batch.dot(row)} expects {expects[row]} of a "
                    f"vector last changed by {head}",
                )
            rows.append((logged, row))


def _is_as_expected(rows: Sequence[tuple[LoggedBatch, int]], expected: Dot, level: AckLevel) -> bool:
    """True if a vector of which the log has these rows is as expected."""
    if expected == ABSENT:
        return not any(state.alive for state in fold_canonically(rows).values())
    if not rows:
        return level is AckLevel.MEMORY  # a previous log, lost as it was in memory, may have held the head
    logged, row = rows[-1]
    return logged.batch.dot(row) == expected


def check_outcomes(history: LogHistory, client_history: ClientHistory) -> None:
    """Check the outcomes that clients received from this service. Raises Violation."""
    here, lost = _locate_tokens(history)
    for token, outcome in client_history.outcomes.items():
        if outcome.node == history.node and not token.startswith(SUM):
            _check_one(history, token, outcome, here.get(token, []), lost.get(token, []))


def check_sums(
    history: LogHistory, client_history: ClientHistory, states: Mapping[Ref, VectorState], who: str
) -> None:
    """Check that each writer's sum counts every acknowledged add, and at most those of unknown outcome."""
    lost = {logged.batch.keys[row] for _, logged, row, _ in history.lost_rows()}
    sums: dict[Ref, list[DeltaOutcome]] = {}
    for token, outcome in client_history.outcomes.items():
        if token.startswith(SUM) and outcome.node == history.node:
            sums.setdefault(outcome.ref, []).append(outcome)
    for ref, (first, *added) in sums.items():
        if ref[1] in lost or not first.acks:
            continue
        least = sum(1 for one in added if one.acks)
        # A client that has no outcome yet, as its call is still being cancelled, counts as unknown.
        most = least + sum(1 for one in added if not one.acks and (one.is_unknown or one.refused is None))
        vector = states[ref].vector if ref in states else None
        holds = None if vector is None else float(vector[0])
        require(
            holds is not None and least <= holds <= most,
            "counter",
            f"{who}: {ref[1]} holds {holds}; of {len(added)}, {least} were acknowledged, {most} may be there",
        )


def check_drift(histories: Iterable[LogHistory]) -> int:
    """Check that services give a delta the same key, and agree if they hold the same deltas.

    Returns the number of services that hold the same deltas as another one. Raises Violation.
    """
    keys: dict[Dot, tuple[Key, str]] = {}
    held: dict[frozenset[Dot], tuple[str, dict[Ref, tuple[Any, ...]]]] = {}
    same = 0
    for record in histories:
        dots = set()
        for offset, logged, row in record.rows():
            dot = logged.batch.dot(row)
            dots.add(dot)
            key, other = keys.setdefault(dot, (logged.key(row), record.node))
            if key != logged.key(row):
                what = f"{dot} has the key {logged.key(row)} at {record.node} ({offset}), {key} at {other}"
                raise Violation("drift", what)
        states = {
            ref: comparable_state(one)
            for ref, one in fold_canonically((b, r) for _, b, r in record.rows()).items()
        }
        node, theirs = held.setdefault(frozenset(dots), (record.node, states))
        if node != record.node:
            same += 1
            differs = sorted(ref for ref in states.keys() | theirs if states.get(ref) != theirs.get(ref))
            require(
                not differs, "drift", f"{node} and {record.node} hold the same deltas and differ in {differs}"
            )
    return same


def _locate_tokens(
    history: LogHistory,
) -> tuple[dict[str, list[TokenLocation]], dict[str, list[TokenLocation]]]:
    here: dict[str, list[TokenLocation]] = {}
    lost: dict[str, list[TokenLocation]] = {}
    for offset, logged, row in history.rows():
        token = token_of(logged.batch, row)
        if token is not None:
            here.setdefault(token, []).append(TokenLocation(offset, logged.batch.dot(row)))
    for offset, logged, row, survives in history.lost_rows():
        token = token_of(logged.batch, row)
        if token is not None:
            lost.setdefault(token, []).append(TokenLocation(offset, logged.batch.dot(row), survives))
    return here, lost


def _check_one(
    history: LogHistory,
    token: str,
    outcome: DeltaOutcome,
    here: list[TokenLocation],
    lost: list[TokenLocation],
) -> None:
    what = f"{token} of {outcome.writer} at {history.node}"
    if len(here) > 1:
        raise Violation("twice", f"{what} is at offsets {[one.offset for one in here]}")
    if outcome.refused is not None and not outcome.acks and not outcome.is_unknown:
        require(not here, "refused", f"{what} was refused ({outcome.refused.name}) but is at {here}")
    for ack in outcome.acks:
        could_go = [one for one in lost if ack.level < one.survives]
        require(bool(here or could_go), "lost", f"{what}, {ack}, is not in the log; lost copies: {lost}")
        check = "repeat" if ack.duplicate else "answer"
        places = [one.offset for one in (*here, *could_go)]
        require(ack.offset in places, check, f"{what}, {ack}, is at {places}")
        asked = history.level if outcome.asked_level is None else min(outcome.asked_level, history.level)
        require(
            ack.duplicate or ack.level >= asked, "answer", f"{what}: {ack}, but {asked.name} was asked for"
        )


def _later_duplicates(ids: Mapping[Key, bytes]) -> set[Key]:
    first: dict[bytes, Key] = {}
    for key in sorted(ids):
        first.setdefault(ids[key], key)
    return ids.keys() - first.values()
