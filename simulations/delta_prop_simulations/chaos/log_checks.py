"""Checks each recorded log by itself, against the outcomes of clients, and against the other logs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from delta_prop_simulations.chaos.histories import SUM, ClientHistory, DeltaOutcome, LogHistory, token_of
from delta_prop_simulations.chaos.violation import Violation, require
from delta_prop_wire.algebra import Key, VectorState, fold
from delta_prop_wire.delta import ABSENT, AckLevel, Dot, Source

if TYPE_CHECKING:
    from delta_prop_simulations.chaos.sinks import Ref
    from delta_prop_wire.batch import LoggedBatch


class TokenLocation(NamedTuple):
    """The offset and the dot of a token's delta, in the log or in a tail that the log has lost.

    `survives`: the lowest ack level at which an acknowledged delta must not be in that tail.
    """

    offset: int
    dot: Dot
    survives: AckLevel = AckLevel.MEMORY


def fold_canonically(rows: Iterable[tuple[LoggedBatch, int]]) -> dict[Ref, VectorState]:
    """Fold each vector's deltas in canonical order; of those with one id only the first has an effect."""
    changes: dict[Ref, dict[Key, Any]] = {}
    ids: dict[Ref, dict[Key, bytes]] = {}
    for logged, row in rows:
        batch, key = logged.batch, logged.key(row)
        ref = (batch.namespaces[row], batch.keys[row])
        changes.setdefault(ref, {})[key] = (key, batch.operation(row), batch.metadata(row))
        if batch.ids is not None:
            ids.setdefault(ref, {})[key] = batch.ids[row]
    return {
        ref: fold(by_key.values(), without_effect=_later_duplicates(ids.get(ref, {})))
        for ref, by_key in changes.items()
    }


def comparable_state(state: VectorState) -> tuple[Any, ...]:
    """Return the parts of a state that are equal in two equal states."""
    return (*state.content, state.key, state.ignored)


def check_causal(history: LogHistory) -> None:
    """Check that the log is a linear extension of causality, without duplicate dots or Lamport numbers."""
    watermarks: dict[int, int] = {}
    ids: set[bytes] = set()
    lamport = 0
    for logged in history.batches:
        batch, where = logged.batch, f"{history.node}, offset {logged.offset}"
        watermark = watermarks.get(batch.origin, 0)
        require(
            batch.base > watermark, "twice", f"{where}: duplicate {batch.dot(0)}: {watermark} came before"
        )
        previous = batch.previous if batch.has_gaps else batch.base - 1
        require(
            previous <= watermark,
            "causal",
            f"{where}: {batch.dot(0)} needs counter {previous}, the watermark is {watermark}",
        )
        for cause in batch.clock:
            require(
                watermarks.get(cause.origin, 0) >= cause.counter,
                "causal",
                f"{where}: {batch.dot(0)} depends on {cause}, which is not in the log yet",
            )
        own_dots = {batch.dot(row) for row in range(batch.count)}
        own_ids = set(batch.ids or ())
        for row, parent in batch.parents:
            is_logged = parent in ids or parent in own_ids
            if isinstance(parent, Dot):
                is_logged = watermarks.get(parent.origin, 0) >= parent.counter or parent in own_dots
            require(
                is_logged,
                "causal",
                f"{where}: {batch.dot(row)} depends on {parent!r}, which is not in the log yet",
            )
        if logged.source is not Source.REPLICA:
            require(logged.lamport > lamport, "causal", f"{where}: Lamport {logged.lamport} after {lamport}")
        lamport = max(lamport, logged.lamport + logged.count - 1)
        watermarks[batch.origin] = batch.last
        ids |= own_ids


def check_expected(history: LogHistory) -> None:
    """Check that each `expect` matched the vector's head, except for forwarded rows, checked elsewhere."""
    rows_before: dict[Ref, list[tuple[LoggedBatch, int]]] = {}
    for logged in history.batches:
        batch = logged.batch
        if batch.is_control:
            continue
        expects = {} if logged.source is Source.REPLICA else dict(batch.expects)
        for row, ref in enumerate(zip(batch.namespaces, batch.keys, strict=True)):
            rows = rows_before.setdefault(ref, [])
            if row in expects and not _is_as_expected(rows, expects[row], history.level):
                head = rows[-1][0].batch.dot(rows[-1][1]) if rows else "nothing"
                raise Violation(
                    "expected",
                    f"{history.node}, offset {logged.offset}: {batch.dot(row)} expects {expects[row]} of a "
                    f"vector last changed by {head}",
                )
            rows.append((logged, row))


def _is_as_expected(rows: Sequence[tuple[LoggedBatch, int]], expected: Dot, level: AckLevel) -> bool:
    """True if the head of the vector whose rows in the log are `rows` is the expected one."""
    if expected == ABSENT:
        return not any(state.alive for state in fold_canonically(rows).values())
    if not rows:
        return level is AckLevel.MEMORY  # a previous log in memory, now lost, may have held the head
    logged, row = rows[-1]
    return logged.batch.dot(row) == expected


def check_outcomes(history: LogHistory, client_history: ClientHistory) -> None:
    """Check the outcomes that clients received from this service. Raises Violation."""
    logged, lost = _locate_tokens(history)
    for token, outcome in client_history.outcomes.items():
        if outcome.node == history.node and not token.startswith(SUM):
            _check_outcome(history, token, outcome, logged.get(token, []), lost.get(token, []))


def check_sums(
    history: LogHistory, client_history: ClientHistory, states: Mapping[Ref, VectorState], who: str
) -> None:
    """Check that each writer's sum has every acknowledged add, and else only adds of unknown outcome."""
    lost = {logged.batch.keys[row] for _, logged, row, _ in history.lost_rows()}
    sums: dict[Ref, list[DeltaOutcome]] = {}
    for token, outcome in client_history.outcomes.items():
        if token.startswith(SUM) and outcome.node == history.node:
            sums.setdefault(outcome.ref, []).append(outcome)
    for ref, (first, *added) in sums.items():
        if ref[1] in lost or not first.acks:
            continue
        acked_count = sum(1 for one in added if one.acks)
        # An add without an outcome, whose call is still being cancelled, counts as unknown.
        count_max = acked_count + sum(
            1 for one in added if not one.acks and (one.is_unknown or one.refused is None)
        )
        vector = states[ref].vector if ref in states else None
        value = None if vector is None else float(vector[0])
        require(
            value is not None and acked_count <= value <= count_max,
            "counter",
            f"{who}: {ref[1]} is {value}; of {len(added)} adds {acked_count} were acknowledged, and at most "
            f"{count_max} can have taken effect",
        )


def check_drift(histories: Iterable[LogHistory]) -> int:
    """Check that all services have the same canonical key for a delta, and that services which hold the same
    deltas hold the same states.

    Returns the number of services that hold the same deltas as another one. Raises Violation.
    """
    keys: dict[Dot, tuple[Key, str]] = {}
    held: dict[frozenset[Dot], tuple[str, dict[Ref, tuple[Any, ...]]]] = {}
    agreeing_count = 0
    for history in histories:
        dots = set()
        for offset, logged, row in history.rows():
            dot = logged.batch.dot(row)
            dots.add(dot)
            key, other = keys.setdefault(dot, (logged.key(row), history.node))
            if key != logged.key(row):
                what = f"{dot} has the key {logged.key(row)} at {history.node} ({offset}), {key} at {other}"
                raise Violation("drift", what)
        states = {
            ref: comparable_state(state)
            for ref, state in fold_canonically((logged, row) for _, logged, row in history.rows()).items()
        }
        node, its_states = held.setdefault(frozenset(dots), (history.node, states))
        if node != history.node:
            agreeing_count += 1
            differing = sorted(
                ref for ref in states.keys() | its_states if states.get(ref) != its_states.get(ref)
            )
            require(
                not differing,
                "drift",
                f"{node} and {history.node} hold the same deltas, but differ in {differing}",
            )
    return agreeing_count


def _locate_tokens(
    history: LogHistory,
) -> tuple[dict[str, list[TokenLocation]], dict[str, list[TokenLocation]]]:
    """Return the locations of each token: those in the log, and the lost ones."""
    present: dict[str, list[TokenLocation]] = {}
    lost: dict[str, list[TokenLocation]] = {}
    for offset, logged, row in history.rows():
        token = token_of(logged.batch, row)
        if token is not None:
            present.setdefault(token, []).append(TokenLocation(offset, logged.batch.dot(row)))
    for offset, logged, row, survives in history.lost_rows():
        token = token_of(logged.batch, row)
        if token is not None:
            lost.setdefault(token, []).append(TokenLocation(offset, logged.batch.dot(row), survives))
    return present, lost


def _check_outcome(
    history: LogHistory,
    token: str,
    outcome: DeltaOutcome,
    present: list[TokenLocation],
    lost: list[TokenLocation],
) -> None:
    what = f"{token} of {outcome.writer} at {history.node}"
    if len(present) > 1:
        raise Violation("twice", f"{what} is at offsets {[one.offset for one in present]}")
    if outcome.refused is not None and not outcome.acks and not outcome.is_unknown:
        require(not present, "refused", f"{what} was refused ({outcome.refused.name}) but is at {present}")
    for ack in outcome.acks:
        may_be_lost = [one for one in lost if ack.level < one.survives]
        require(
            bool(present or may_be_lost), "lost", f"{what}: {ack}, but not in the log; lost copies: {lost}"
        )
        check = "repeat" if ack.duplicate else "answer"
        offsets = [one.offset for one in (*present, *may_be_lost)]
        require(ack.offset in offsets, check, f"{what}: {ack}, but its offsets are {offsets}")
        asked = history.level if outcome.asked_level is None else min(outcome.asked_level, history.level)
        require(
            ack.duplicate or ack.level >= asked, "answer", f"{what}: {ack}, but {asked.name} was requested"
        )


def _later_duplicates(ids: Mapping[Key, bytes]) -> set[Key]:
    first: dict[bytes, Key] = {}
    for key in sorted(ids):
        first.setdefault(ids[key], key)
    return ids.keys() - first.values()
