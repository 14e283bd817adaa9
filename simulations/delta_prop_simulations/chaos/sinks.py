"""Model sinks: fake targets whose state may outlive the process, and which fail in every way.

Each is as simple as the contract of a sink permits: it stores the rows, and its state is their fold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, get_args

import anyio

from delta_prop_simulations.chaos.store import Fact, Store
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_sinks.sink import RejectDelta, ResumePoint, TryAgain
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.state_rows import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.chaos.store import Ref
    from delta_prop_simulations.rng import Random
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext
    from delta_prop_wire.algebra import VectorState
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Dot
    from delta_prop_wire.state_rows import StateRow

Kind: TypeAlias = Literal["transactional", "plain", "volatile", "rebuildable"]
"""transactional: data and cursor are committed together, and committed data outlives the process. plain: each
effect is durable at once, the service stores the cursor. volatile: all data is lost with the process, and
loaded from the log. rebuildable: transactional, and it loads states."""

KINDS: tuple[Kind, ...] = get_args(Kind)
POISON = "poison"
"""The metadata name of a delta to reject; its value is the sink's name or `all`."""

VIOLATIONS_MAX = 20
_COMMIT_S = 0.5


class Life(Protocol):
    """One process on one machine. The actions of a process after its end have no effect."""

    @property
    def is_over(self) -> bool:
        """True after its end."""
        ...


@dataclass(frozen=True, slots=True)
class SinkFaults:
    """Fault rates, as shares of calls: fails before any effect, after all effects, or half-way; never
    returns, or returns late, by up to `slow_s_max`. `rejects`: it rejects poison.
    """

    before: float = 0.0
    after: float = 0.0
    half_way: float = 0.0
    hang: float = 0.0
    slow: float = 0.0
    slow_s_max: float = 0.5
    rejects: bool = True


class DeliveredRow(NamedTuple):
    """A row that a sink got: in which of its lives, and if it was new to the sink."""

    life: int
    offset: int
    dot: Dot
    ref: Ref
    is_new: bool
    redelivered: bool


class ModelSink:
    """The state behind one sink's name over all lives of its service."""

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
        """The current process's data, with uncommitted data."""
        self.lives = 0
        self.delivered: list[DeliveredRow] = []
        self.violations: list[Violation] = []
        self.struck: Counter[str] = Counter()

    def for_life(self, life: Life) -> Sink:
        """Return the sink object for a process to attach."""
        self.lives += 1
        if self.kind == "volatile":
            self.durable = Store()
        self.present = self.durable if self.kind == "plain" else self.durable.copy()
        return {"plain": SinkInstance, "transactional": CommittingSink}.get(self.kind, RebuildableSink)(
            self, life
        )

    def kill(self) -> None:
        """Drop uncommitted data, as the process was killed."""
        self.present = self.durable

    def power_cut(self) -> None:
        """Drop uncommitted data, as the machine lost its power; committed data stays."""
        self.kill()

    def heal(self) -> None:
        """Stop all faults; the sink still rejects poison."""
        self.faults = SinkFaults(rejects=self.faults.rejects)

    def states(self) -> dict[Ref, VectorState]:
        """Return its state, by vector."""
        return {ref: facts.state() for ref, facts in self.present.vectors.items()}

    def is_poison(self, logged: LoggedBatch, row: int) -> bool:
        """True if the sink rejects this row."""
        poison = self.faults.rejects and (logged.batch.metadata(row) or {}).get(POISON)
        return poison in (self.name, "all")

    def note_violation(self, check: str, what: str) -> None:
        """Store a violation; if it were raised here, the service would retry the call."""
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(check, f"sink {self.name!r}, life {self.lives}: {what}"))


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The statistics of a model sink."""

    calls: int
    vectors: int
    next_offset: int


@dataclass(slots=True)
class _Progress:
    """The rows that the service and one sink agree on as processed, and their epoch."""

    epoch: int = 0
    processed: int = 0
    is_busy: bool = False
    calls: int = 0
    dirty: set[Ref] = field(default_factory=set)


class SinkInstance:
    """The sink object of one process. This kind stores no cursor."""

    keeps_cursor = False

    def __init__(self, model: ModelSink, life: Life) -> None:
        self.name = model.name
        self._model = model
        self._life = life
        self._store = model.present
        self._progress = _Progress()
        self._context: SinkContext

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Open the sink; drop the data of another log."""
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
        """Apply all rows in order, or fail as drawn."""
        progress = self._progress
        if progress.is_busy:
            self._model.note_violation("order", "called during another call")
        if progress.epoch != self._context.epoch:  # offsets of a lost tail may be reused by other rows
            progress.epoch, progress.processed = self._context.epoch, 0
        progress.is_busy = True
        progress.calls += 1
        try:
            await self._apply(deliveries)
        finally:
            progress.is_busy = False

    async def aclose(self) -> None:
        """Commit all data."""
        if not self._life.is_over:
            self._commit()

    def statistics(self) -> ModelStatistics:
        """Return its current statistics."""
        return ModelStatistics(self._progress.calls, len(self._store.vectors), self._store.next_offset)

    # --- internals

    async def _apply(self, deliveries: Sequence[Delivery]) -> None:
        stop = await self._fail_before(deliveries)
        for delivery in deliveries:
            logged = delivery.logged
            if not logged.batch.is_control:
                rows = range(logged.count) if delivery.rows is None else delivery.rows.tolist()
                for row in rows:
                    self._check_alive()
                    if self._model.is_poison(logged, row):
                        self._model.struck["sink rejected a delta"] += 1
                        self._note_processed(logged.offset + row, redelivered=delivery.redelivered)
                        raise RejectDelta(logged.offset + row, "the delta is poison to this sink")
                    await self._take_row(logged, row, redelivered=delivery.redelivered)
                    if logged.offset + row == stop:
                        self._model.struck["sink failed half way"] += 1
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
        """Fail before any effect, if so drawn; else return the offset after which to fail, if any."""
        model, faults, draw = self._model, self._model.faults, self._model.rng.random
        if draw() < faults.slow:
            model.struck["sink was slow"] += 1
            await anyio.sleep(faults.slow_s_max * draw())
        if draw() < faults.before:
            model.struck["sink failed before the effect"] += 1
            raise TryAgain("failure before any effect") if draw() < 0.7 else RuntimeError("a defect")
        if draw() >= faults.half_way or not deliveries:
            return None
        last = deliveries[int(draw() * len(deliveries))]
        return last.first_offset + int(draw() * (last.next_offset - last.first_offset))

    async def _fail_after(self) -> None:
        model, faults, draw = self._model, self._model.faults, self._model.rng.random
        if draw() < faults.hang:
            model.struck["sink hung"] += 1
            await anyio.sleep_forever()
        if draw() < faults.after:
            model.struck["sink failed after the effect"] += 1
            raise TryAgain("failure after all effects") if draw() < 0.7 else OSError("a defect")

    async def _take_row(self, logged: LoggedBatch, row: int, *, redelivered: bool) -> None:
        """Apply one row, or skip a duplicate."""
        model, store, fact = self._model, self._store, Fact.of(logged, row)
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        if fact.offset < self._progress.processed and not redelivered:
            model.note_violation(
                "twice",
                f"duplicate offset {fact.offset}: rows up to {self._progress.processed} were processed",
            )
        facts = store.facts(ref)
        effect = not facts.has(fact)
        if effect and fact.offset < facts.last_offset:
            model.note_violation(
                "order", f"offset {fact.offset} of {ref} came after {facts.last_offset}, of the same vector"
            )
        if effect and facts.is_below_base(fact):
            await self._refold(ref, fact)
        elif effect:
            facts.add(fact)
        store.lamport = max(store.lamport, fact.key[0])
        self._progress.dirty.add(ref)
        model.delivered.append(
            DeliveredRow(model.lives, fact.offset, logged.batch.dot(row), ref, effect, redelivered)
        )

    async def _refold(self, ref: Ref, fact: Fact) -> None:
        """Rebuild a vector from the log, for a delta that sorts before the vector's initial state."""
        self._model.struck["sink folded a vector again"] += 1
        found = [place async for place in self._context.history([ref])]
        self._check_alive()
        facts = self._store.facts(ref)
        facts.begin()
        for logged, row in found:
            if logged.batch.is_state:
                facts.begin(state_of(logged.batch, row), logged.row_offset(row))
            elif facts.last_offset < logged.offset + row <= fact.offset:
                facts.add(Fact.of(logged, row))

    def _advance(self, delivery: Delivery) -> None:
        if not delivery.redelivered:
            self._store.next_offset = max(self._store.next_offset, delivery.next_offset)

    def _note_processed(self, offset: int, *, redelivered: bool) -> None:
        if not redelivered:
            self._progress.processed = max(self._progress.processed, offset)
            self._store.next_offset = max(self._store.next_offset, offset)

    def _commit(self) -> None:
        """Note the epoch; each effect is durable already."""
        self._store.epoch = self._context.epoch

    def _check_alive(self) -> None:
        if self._life.is_over:
            raise TryAgain("the process has ended")


class CommittingSink(SinkInstance):
    """Commits data and cursor together: at the end of some calls, else within half a second."""

    keeps_cursor = True

    async def background(self) -> None:
        """Commit uncommitted data from time to time."""
        while True:
            await anyio.sleep(_COMMIT_S)
            if not self._life.is_over and self._model.durable.next_offset < self._store.next_offset:
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
        self._model.struck["sink rebuilt"] += 1
        self._store.begin(self._context.log_id)
        self._store.rebuilding = True
        self._progress.processed = 0
        self._persist()

    async def load_states(self, rows: Sequence[StateRow]) -> None:
        """Load full states."""
        await self._fail_before(())
        for one in rows:
            self._store.facts((one.namespace, one.vector_id)).begin(one.state, one.offset)

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """Make the loaded states valid, durably."""
        await self._fail_before(())
        store = self._store
        store.rebuilding, store.next_offset, store.lamport = False, offset, lamport
        store.states_below = offset
        self._progress.processed = offset
        self._persist()
        self._context.committed(offset)

    def _persist(self) -> None:
        self._check_alive()
        self._store.epoch = self._context.epoch
        self._model.durable = self._store.copy()
        self._progress.dirty.clear()
