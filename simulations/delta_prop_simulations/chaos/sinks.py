"""Model sinks: fakes whose state may outlive the process, and which fail in all ways that a sink can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import anyio

from delta_prop_simulations.chaos.plan import POISON
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_sinks import IndexSink
from delta_prop_sinks.sink import Delivery, RejectDelta, ResumePoint, Sink, SinkContext, TryAgain
from delta_prop_wire.algebra import Key, VectorState, fold
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot, Operation
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates
from delta_prop_wire.state_rows import StateRow, state_of

if TYPE_CHECKING:
    from delta_prop_simulations.chaos.histories import LogHistory
    from delta_prop_simulations.machine import Process
    from delta_prop_simulations.rng import Random

Ref: TypeAlias = tuple[str, str]
"""Namespace and vector id."""


class Fact(NamedTuple):
    """One delta with its canonical key, by which it is identified."""

    key: Key
    operation: Operation
    metadata: dict[str, Any] | None
    offset: int
    identified: IdentifiedDelta | None

    @classmethod
    def of(cls, logged: LoggedBatch, row: int) -> Fact:
        """Return the fact of one row of the log."""
        batch = logged.batch
        return cls(
            logged.key(row),
            batch.operation(row),
            batch.metadata(row),
            logged.offset + row,
            IdentifiedDelta.of(logged, row),
        )


@dataclass(slots=True)
class Facts:
    """One vector: the state that it started with (its base), if any, and the deltas since then."""

    base: VectorState | None = None
    base_offset: int = -1
    last_offset: int = -1
    rows: dict[Key, Fact] = field(default_factory=dict)

    def begin(self, base: VectorState | None = None, offset: int = -1) -> None:
        """Drop all deltas and start from a state; `offset`: that of the last delta in the state."""
        self.base, self.base_offset, self.last_offset = base, offset, offset
        self.rows = {}

    def has(self, fact: Fact) -> bool:
        """True if the delta is among the rows, or included in the base."""
        return fact.key in self.rows or fact.offset <= self.base_offset

    def is_before_base(self, fact: Fact) -> bool:
        """True if the delta sorts canonically before the last delta of the base."""
        return self.base is not None and self.base.key is not None and fact.key < self.base.key

    def add(self, fact: Fact) -> None:
        """Add one delta."""
        self.rows[fact.key] = fact
        self.last_offset = max(self.last_offset, fact.offset)

    def state(self) -> VectorState:
        """Return the fold of all deltas; those that sort before the base are only counted as ignored."""
        base = self.base
        before_count = 0 if base is None else sum(self.is_before_base(fact) for fact in self.rows.values())
        after = [fact for fact in self.rows.values() if not self.is_before_base(fact)]
        duplicates = find_duplicates((fact.identified for fact in after), complete=base is None)
        changes = ((fact.key, fact.operation, fact.metadata) for fact in after)
        state = fold(changes, base, without_effect=duplicates)
        return replace(state, ignored=state.ignored + before_count) if before_count else state

    def copy(self) -> Facts:
        """Return an independent copy."""
        return Facts(self.base, self.base_offset, self.last_offset, dict(self.rows))


@dataclass(slots=True)
class Store:
    """All vectors. `next_offset`: the offset up to which they are complete."""

    log_id: bytes = b""
    epoch: int = 0
    next_offset: int = 0
    lamport: int = 0
    rebuilding: bool = False
    states_below: int = 0
    """Rows below this offset were loaded as states, not applied as deltas."""
    vectors: dict[Ref, Facts] = field(default_factory=dict)

    def begin(self, log_id: bytes) -> None:
        """Drop all data, and start at offset 0 of a log."""
        self.log_id, self.next_offset, self.lamport, self.rebuilding = log_id, 0, 0, False
        self.vectors, self.states_below = {}, 0

    def facts(self, ref: Ref) -> Facts:
        """Return the facts of a vector; they are created if the vector is new."""
        facts = self.vectors.get(ref)
        if facts is None:
            facts = self.vectors[ref] = Facts()
        return facts

    def copy(self) -> Store:
        """Return an independent copy."""
        vectors = {ref: facts.copy() for ref, facts in self.vectors.items()}
        return replace(self, vectors=vectors)

    def replace_with(self, other: Store, changed: Iterable[Ref]) -> None:
        """Make this store equal to `other`, which has other changed vectors, or another log."""
        if self.log_id != other.log_id:
            self.vectors, changed = {}, list(other.vectors)
        self.log_id, self.epoch, self.next_offset = other.log_id, other.epoch, other.next_offset
        self.lamport, self.rebuilding = other.lamport, other.rebuilding
        self.states_below = other.states_below
        for ref in changed:
            self.vectors[ref] = other.vectors[ref].copy()


Kind: TypeAlias = Literal["transactional", "plain", "volatile", "rebuildable"]
"""transactional: commits data and cursor together; committed data outlives the process. plain: each effect is
durable at once, and the service stores the cursor. volatile: loses all data with the process, and loads it
again from the log. rebuildable: as transactional, and can load states.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)

VIOLATIONS_MAX = 20
_COMMIT_S = 0.5


@dataclass(frozen=True, slots=True)
class SinkFaults:
    """Fault rates, as shares of calls: a call fails before any effect, after all effects, or half-way; hangs,
    or is slow by up to `slow_s_max`. `rejects`: the sink rejects poison.
    """

    before: float = 0.0
    after: float = 0.0
    half_way: float = 0.0
    hang: float = 0.0
    slow: float = 0.0
    slow_s_max: float = 0.5
    rejects: bool = True


class DeliveredRow(NamedTuple):
    """A row that a sink got. `process_number`: in which process; `is_new`: the sink did not have it yet."""

    process_number: int
    offset: int
    dot: Dot
    ref: Ref
    is_new: bool
    redelivered: bool


class ModelSink:
    """The state of one sink, across all processes of its service."""

    def __init__(
        self, name: str, kind: Kind, rng: Random, faults: SinkFaults | None = None, *, topics: str = "*"
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r}: give one of {', '.join(KINDS)}")
        self.name = name
        self.kind = kind
        self.topics = topics
        self.rng = rng
        self.faults = faults or SinkFaults()
        self.durable = Store()
        """The data that outlives the process."""
        self.present = Store()
        """The data of the current process, including uncommitted data."""
        self.process_count = 0
        self.delivered: list[DeliveredRow] = []
        self.violations: list[Violation] = []
        self.event_counts: Counter[str] = Counter()

    def for_process(self, process: Process) -> Sink:
        """Return a sink object that the new process attaches."""
        self.process_count += 1
        if self.kind == "volatile":
            self.durable = Store()
        self.present = self.durable if self.kind == "plain" else self.durable.copy()
        return {"plain": SinkInstance, "transactional": CommittingSink}.get(self.kind, RebuildableSink)(
            self, process
        )

    def kill(self) -> None:
        """Drop uncommitted data, as a killed process does, and a machine without power."""
        self.present = self.durable

    def heal(self) -> None:
        """Stop all faults; the sink still rejects poison."""
        self.faults = SinkFaults(rejects=self.faults.rejects)

    def states(self) -> dict[Ref, VectorState]:
        """Return the state of each vector."""
        return {ref: facts.state() for ref, facts in self.present.vectors.items()}

    def is_poison(self, logged: LoggedBatch, row: int) -> bool:
        """True if the sink rejects this row."""
        poison = self.faults.rejects and (logged.batch.metadata(row) or {}).get(POISON)
        return poison in (self.name, "all")

    def note_violation(self, check: str, what: str) -> None:
        """Store a violation; if it were raised here, the service would take it for a failed call."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(
                Violation(check, f"sink {self.name!r}, process {self.process_count}: {what}")
            )


@dataclass(slots=True)
class _Progress:
    """The progress of one sink object. `processed_end`: the end of the rows that the service knows as
    processed, in this epoch; `dirty`: the vectors with uncommitted changes.
    """

    epoch: int = 0
    processed_end: int = 0
    is_busy: bool = False
    dirty: set[Ref] = field(default_factory=set)


class SinkInstance:
    """The sink object of one process; this class stores no cursor."""

    keeps_cursor = False

    def __init__(self, model: ModelSink, process: Process) -> None:
        self.name = model.name
        self._model = model
        self._process = process
        self._store = model.present
        self._progress = _Progress()
        self._context: SinkContext

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Open the sink; if its data is of another log, drop them."""
        self._context = context
        self._progress = _Progress(context.epoch)
        store = self._store
        if store.log_id != context.log_id:
            store.begin(context.log_id)
            self._commit()
        if not self.keeps_cursor:
            return None
        cursor = Cursor(context.log_id, store.epoch or context.epoch, store.next_offset)
        return ResumePoint(cursor, store.lamport, rebuilding=store.rebuilding)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all rows in order, unless a fault is drawn."""
        progress = self._progress
        if progress.is_busy:
            self._model.note_violation("order", "called during another call")
        if progress.epoch != self._context.epoch:  # other rows may reuse the offsets of a lost tail
            progress.epoch, progress.processed_end = self._context.epoch, 0
        progress.is_busy = True
        try:
            await self._apply(deliveries)
        finally:
            progress.is_busy = False

    async def aclose(self) -> None:
        """Commit all data."""
        if not self._process.has_ended:
            self._commit()

    def statistics(self) -> int:
        """Return the number of vectors."""
        return len(self._store.vectors)

    async def _apply(self, deliveries: Sequence[Delivery]) -> None:
        failure_offset = await self._fail_before(deliveries)
        for delivery in deliveries:
            logged = delivery.logged
            if not logged.batch.is_control:
                rows = range(logged.count) if delivery.rows is None else delivery.rows.tolist()
                for row in rows:
                    self._check_alive()
                    if self._model.is_poison(logged, row):
                        self._model.event_counts["sink rejected a delta"] += 1
                        self._note_processed(logged.offset + row, redelivered=delivery.redelivered)
                        raise RejectDelta(logged.offset + row, "the delta is poison to this sink")
                    await self._take_row(logged, row, redelivered=delivery.redelivered)
                    if logged.offset + row == failure_offset:
                        self._model.event_counts["sink failed half way"] += 1
                        if delivery.redelivered or self._model.rng.random() < 0.5:
                            raise TryAgain("half-way failure without a done offset")
                        self._note_processed(logged.offset + row + 1, redelivered=False)
                        raise TryAgain("half-way failure", done_offset=logged.offset + row + 1)
            self._advance(delivery)
        await self._fail_after()
        for delivery in deliveries:
            self._note_processed(delivery.next_offset, redelivered=delivery.redelivered)
        if deliveries[0].redelivered or self._model.rng.random() < 0.3:
            self._commit()

    async def _fail_before(self, deliveries: Sequence[Delivery]) -> int | None:
        """Raise if a failure before any effect is drawn. Return the offset of a half-way failure, if any."""
        model, faults, draw = self._model, self._model.faults, self._model.rng.random
        if draw() < faults.slow:
            model.event_counts["sink was slow"] += 1
            await anyio.sleep(faults.slow_s_max * draw())
        if draw() < faults.before:
            model.event_counts["sink failed before the effect"] += 1
            raise TryAgain("failure before any effect") if draw() < 0.7 else RuntimeError("a defect")
        if draw() >= faults.half_way or not deliveries:
            return None
        last = deliveries[int(draw() * len(deliveries))]
        return last.first_offset + int(draw() * (last.next_offset - last.first_offset))

    async def _fail_after(self) -> None:
        model, faults, draw = self._model, self._model.faults, self._model.rng.random
        if draw() < faults.hang:
            model.event_counts["sink hung"] += 1
            await anyio.sleep_forever()
        if draw() < faults.after:
            model.event_counts["sink failed after the effect"] += 1
            raise TryAgain("failure after all effects") if draw() < 0.7 else OSError("a defect")

    async def _take_row(self, logged: LoggedBatch, row: int, *, redelivered: bool) -> None:
        model, store, fact = self._model, self._store, Fact.of(logged, row)
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        if fact.offset < self._progress.processed_end and not redelivered:
            model.note_violation(
                "twice",
                f"duplicate offset {fact.offset}: rows up to {self._progress.processed_end} were processed",
            )
        facts = store.facts(ref)
        is_new = not facts.has(fact)
        if is_new and fact.offset < facts.last_offset:
            model.note_violation(
                "order",
                f"offset {fact.offset} of {ref} came after offset {facts.last_offset} of the same vector",
            )
        if is_new and facts.is_before_base(fact):
            await self._refold(ref, fact)
        elif is_new:
            facts.add(fact)
        store.lamport = max(store.lamport, fact.key[0])
        self._progress.dirty.add(ref)
        model.delivered.append(
            DeliveredRow(model.process_count, fact.offset, logged.batch.dot(row), ref, is_new, redelivered)
        )

    async def _refold(self, ref: Ref, fact: Fact) -> None:
        """Rebuild a vector from the history up to `fact`, which sorts before the vector's first state."""
        self._model.event_counts["sink folded a vector again"] += 1
        rows = [row async for row in self._context.history([ref])]
        self._check_alive()
        facts = self._store.facts(ref)
        facts.begin()
        for logged, row in rows:
            if logged.batch.is_state:
                facts.begin(state_of(logged.batch, row), logged.row_offset(row))
            elif facts.last_offset < logged.offset + row <= fact.offset:
                facts.add(Fact.of(logged, row))

    def _advance(self, delivery: Delivery) -> None:
        if not delivery.redelivered:
            self._store.next_offset = max(self._store.next_offset, delivery.next_offset)

    def _note_processed(self, offset: int, *, redelivered: bool) -> None:
        if not redelivered:
            self._progress.processed_end = max(self._progress.processed_end, offset)
            self._store.next_offset = max(self._store.next_offset, offset)

    def _commit(self) -> None:
        """Note the epoch; the data are already durable."""
        self._store.epoch = self._context.epoch

    def _check_alive(self) -> None:
        if self._process.has_ended:
            raise TryAgain("the process has ended")


class CommittingSink(SinkInstance):
    """Commits data and cursor together: at the end of some calls, and every half second."""

    keeps_cursor = True

    async def background(self) -> None:
        """Commit uncommitted data at intervals."""
        while True:
            await anyio.sleep(_COMMIT_S)
            if not self._process.has_ended and self._model.durable.next_offset < self._store.next_offset:
                self._commit()

    def _commit(self) -> None:
        self._check_alive()
        super()._commit()
        self._model.durable.replace_with(self._store, self._progress.dirty)
        self._progress.dirty.clear()
        self._context.committed(self._store.next_offset)


class RebuildableSink(CommittingSink):
    """A committing sink that can load states in place of deltas."""

    async def begin_rebuild(self, offset: int) -> None:
        """Drop all data, durably."""
        await self._fail_before(())
        self._model.event_counts["sink rebuilt"] += 1
        self._store.begin(self._context.log_id)
        self._store.rebuilding = True
        self._progress.processed_end = 0
        self._persist()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """Load full states."""
        await self._fail_before(())
        for row in rows:
            self._store.facts((row.namespace, row.vector_id)).begin(row.state, row.offset)

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Make the loaded states valid, durably."""
        await self._fail_before(())
        store = self._store
        store.rebuilding, store.next_offset, store.lamport = False, offset, lamport
        store.states_below = offset
        self._progress.processed_end = offset
        self._persist()
        self._context.committed(offset)

    def _persist(self) -> None:
        self._check_alive()
        self._store.epoch = self._context.epoch
        self._model.durable = self._store.copy()
        self._progress.dirty.clear()


REFOLDS_MAX = 2
"""Maximum number of times that a call may fold each delta of the vectors that it changes."""


class CountedIndex(IndexSink):
    """An index that notes a violation if a call folds more deltas than `REFOLDS_MAX` permits."""

    def __init__(self, name: str, history: LogHistory, violations: list[Violation]) -> None:
        super().__init__(name=name)
        self._history = history
        self._violations = violations

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply the deliveries as an index does, and check how many deltas the call folds."""
        before = self._count_refolded()
        try:
            await super().apply(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        """Apply the deliveries as an index does, and check how many deltas the call folds."""
        before = self._count_refolded()
        try:
            return super().apply_now(deliveries)
        finally:
            self._check(deliveries, self._count_refolded() - before)

    def _count_refolded(self) -> int:
        return self.resident.statistics().refolded

    def _check(self, deliveries: Sequence[Delivery], folded_count: int) -> None:
        if not folded_count:
            return
        changed_vectors = {
            ref
            for one in deliveries
            if not one.batch.is_control
            for ref in zip(one.batch.namespaces, one.batch.keys, strict=True)
        }
        logged_rows = [
            *self._history.rows(),
            *((offset, logged, row) for offset, logged, row, _ in self._history.lost_rows()),
        ]
        row_count = sum(
            (logged.batch.namespaces[row], logged.batch.keys[row]) in changed_vectors
            for _, logged, row in logged_rows
        )
        if folded_count > REFOLDS_MAX * row_count:
            delivered_count = sum(one.count for one in deliveries)
            self._violations.append(
                Violation(
                    "work",
                    f"{self._history.node}, sink {self.name!r}: a call with {delivered_count} deltas folded "
                    f"{folded_count} deltas, but its vectors have only {row_count}",
                )
            )
