"""Model sinks: targets whose state survives the end of a process or does not, and which fail in every way.

Each is as simple as the contract of a sink allows: it keeps the rows themselves, and its state is their fold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, get_args

import anyio

from delta_prop_simulations.disasters.store import Fact, Store
from delta_prop_simulations.disasters.violation import Violation
from delta_prop_sinks.sink import RejectDelta, ResumePoint, TryAgain
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.states import state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_simulations.chance import Random
    from delta_prop_simulations.disasters.store import Ref
    from delta_prop_sinks.sink import Delivery, Sink, SinkContext
    from delta_prop_wire.algebra import State
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Dot
    from delta_prop_wire.states import StateRow

Kind: TypeAlias = Literal["transactional", "plain", "volatile", "rebuildable"]
"""transactional: data and cursor are one, and outlive the process as far as they were committed. plain: each
effect lasts at once, the service keeps the cursor. volatile: all is lost with the process, and made anew.
rebuildable: transactional, and it takes states."""

KINDS: tuple[Kind, ...] = get_args(Kind)
POISON = "poison"
"""Metadata with this name, naming the sink or `all`, is what a sink rejects."""

COMPLAINTS_MAX = 20
_COMMIT_S = 0.5


class Life(Protocol):
    """One process on one machine. What a process does after its end has no effect."""

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class SinkFaults:
    """How often a call fails, each a share of calls: before anything was done, after all was, half way;
    never returns, or only after up to `slow_s_max`. `rejects`: whether it rejects poison.
    """

    before: float = 0.0
    after: float = 0.0
    half_way: float = 0.0
    hang: float = 0.0
    slow: float = 0.0
    slow_s_max: float = 0.5
    rejects: bool = True


class Brought(NamedTuple):
    """A row that a sink was brought: in which of its lives, and whether it was new to it."""

    life: int
    offset: int
    dot: Dot
    ref: Ref
    effect: bool
    late: bool


class ModelSink:
    """What lies behind one sink's name over all lives of its service."""

    def __init__(
        self, name: str, kind: Kind, chance: Random, faults: SinkFaults | None = None, *, topics: str = "*"
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r}: give one of {', '.join(KINDS)}")
        self.name = name
        self.kind = kind
        self.topics = topics
        self.chance = chance
        self.faults = faults or SinkFaults()
        self.durable = Store()
        """What is there after the end of the process."""
        self.present = Store()
        """What the present process has, with what is not committed."""
        self.lives = 0
        self.brought: list[Brought] = []
        self.complaints: list[Violation] = []
        self.struck: Counter[str] = Counter()

    def for_life(self, life: Life) -> Sink:
        """The object that a process attaches."""
        self.lives += 1
        if self.kind == "volatile":
            self.durable = Store()
        self.present = self.durable if self.kind == "plain" else self.durable.copy()
        return {"plain": LivingSink, "transactional": CommittingSink}.get(self.kind, RebuiltSink)(self, life)

    def kill(self) -> None:
        """The process is gone, and what was not committed."""
        self.present = self.durable

    def power_cut(self) -> None:
        """The machine is gone for a while: of what was committed nothing is lost."""
        self.kill()

    def heal(self) -> None:
        """From now on it does all that it is told, but that it goes on rejecting what it rejects."""
        self.faults = SinkFaults(rejects=self.faults.rejects)

    def states(self) -> dict[Ref, State]:
        """What it holds, vector by vector."""
        return {ref: facts.state() for ref, facts in self.present.vectors.items()}

    def rejects(self, logged: LoggedBatch, row: int) -> bool:
        """Whether this row is poison to it."""
        said = self.faults.rejects and (logged.batch.metadata(row) or {}).get(POISON)
        return said in (self.name, "all")

    def complain(self, check: str, what: str) -> None:
        """Keep what a call should not have brought; raised here, the service would call again."""
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(Violation(check, f"sink {self.name!r}, life {self.lives}: {what}"))


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """What a model sink tells of itself."""

    calls: int
    vectors: int
    next_offset: int


@dataclass(slots=True)
class _Given:
    """What is certain between the service and one sink: what was dealt with, in which epoch."""

    epoch: int = 0
    done: int = 0
    busy: bool = False
    calls: int = 0
    dirty: set[Ref] = field(default_factory=set)


class LivingSink:
    """The sink of one process. This one keeps no cursor."""

    keeps_cursor = False

    def __init__(self, model: ModelSink, life: Life) -> None:
        self.name = model.name
        self._model = model
        self._life = life
        self._store = model.present
        self._given = _Given()
        self._context: SinkContext

    # --- the contract

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Get ready; data of another log are given up."""
        self._context = context
        self._given = _Given(context.epoch)
        store = self._store
        if store.log_id != context.log_id:
            store.begin(context.log_id)
            self._commit()
        if not self.keeps_cursor:
            return None
        cursor = Cursor(context.log_id, store.epoch or context.epoch, store.next_offset)
        return ResumePoint(cursor, store.lamport, rebuilding=store.rebuilding)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Take all rows in order, or fail as was drawn."""
        given = self._given
        if given.busy:
            self._model.complain("order", "it was called while a call ran")
        if given.epoch != self._context.epoch:  # what came of a tail that was lost may come again, as other
            given.epoch, given.done = self._context.epoch, 0
        given.busy = True
        given.calls += 1
        try:
            await self._apply(deliveries)
        finally:
            given.busy = False

    async def aclose(self) -> None:
        """Commit what there is."""
        if not self._life.over:
            self._commit()

    def statistics(self) -> ModelStatistics:
        """A snapshot of its numbers."""
        return ModelStatistics(self._given.calls, len(self._store.vectors), self._store.next_offset)

    # --- within

    async def _apply(self, deliveries: Sequence[Delivery]) -> None:
        stop = await self._strike(deliveries)
        for delivery in deliveries:
            logged = delivery.logged
            if not logged.batch.is_control:
                rows = range(logged.count) if delivery.rows is None else delivery.rows.tolist()
                for row in rows:
                    self._check_alive()
                    if self._model.rejects(logged, row):
                        self._model.struck["sink rejected a delta"] += 1
                        self._dealt_with(logged.offset + row, late=delivery.late)
                        raise RejectDelta(logged.offset + row, "it is poison to this sink")
                    await self._take(logged, row, late=delivery.late)
                    if logged.offset + row == stop:
                        self._model.struck["sink failed half way"] += 1
                        if delivery.late or self._model.chance.random() < 0.5:
                            raise TryAgain("half of it was done, and this does not say how much")
                        self._dealt_with(logged.offset + row + 1, late=False)
                        raise TryAgain("half of it was done", done_offset=logged.offset + row + 1)
            self._reach(delivery)
        await self._strike_after()
        for delivery in deliveries:
            self._dealt_with(delivery.next_offset, late=delivery.late)
        if deliveries[0].late or self._model.chance.random() < 0.3:
            self._commit()

    async def _strike(self, deliveries: Sequence[Delivery]) -> int | None:
        """Fail before anything is done, if so drawn; else the offset behind which to fail, if any."""
        model, faults, draw = self._model, self._model.faults, self._model.chance.random
        if draw() < faults.slow:
            model.struck["sink was slow"] += 1
            await anyio.sleep(faults.slow_s_max * draw())
        if draw() < faults.before:
            model.struck["sink failed before the effect"] += 1
            raise TryAgain("it failed before it did anything") if draw() < 0.7 else RuntimeError("a defect")
        if draw() >= faults.half_way or not deliveries:
            return None
        last = deliveries[int(draw() * len(deliveries))]
        return last.first_offset + int(draw() * (last.next_offset - last.first_offset))

    async def _strike_after(self) -> None:
        model, faults, draw = self._model, self._model.faults, self._model.chance.random
        if draw() < faults.hang:
            model.struck["sink hung"] += 1
            await anyio.sleep_forever()
        if draw() < faults.after:
            model.struck["sink failed after the effect"] += 1
            raise TryAgain("it was done, and the answer got lost") if draw() < 0.7 else OSError("a defect")

    async def _take(self, logged: LoggedBatch, row: int, *, late: bool) -> None:
        """One row: an effect, or a repeat."""
        model, store, fact = self._model, self._store, Fact.of(logged, row)
        ref = (logged.batch.namespaces[row], logged.batch.keys[row])
        if fact.offset < self._given.done and not late:
            model.complain(
                "twice", f"offset {fact.offset} came again, it was dealt with to {self._given.done}"
            )
        facts = store.facts(ref)
        effect = not facts.knows(fact)
        if effect and fact.offset < facts.last_offset:
            model.complain(
                "order", f"offset {fact.offset} of {ref} came behind {facts.last_offset}, of the same vector"
            )
        if effect and facts.beneath(fact):
            await self._fold_again(ref, fact)
        elif effect:
            facts.add(fact)
        store.lamport = max(store.lamport, fact.key[0])
        self._given.dirty.add(ref)
        model.brought.append(Brought(model.lives, fact.offset, logged.batch.dot(row), ref, effect, late))

    async def _fold_again(self, ref: Ref, fact: Fact) -> None:
        """A delta that sorts before the state that this vector was given: ask the log for all there is."""
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

    def _reach(self, delivery: Delivery) -> None:
        if not delivery.late:
            self._store.next_offset = max(self._store.next_offset, delivery.next_offset)

    def _dealt_with(self, offset: int, *, late: bool) -> None:
        if not late:
            self._given.done = max(self._given.done, offset)
            self._store.next_offset = max(self._store.next_offset, offset)

    def _commit(self) -> None:
        """What each effect already is."""
        self._store.epoch = self._context.epoch

    def _check_alive(self) -> None:
        if self._life.over:
            raise TryAgain("its process is gone")


class CommittingSink(LivingSink):
    """Data and cursor become durable together: at the end of some calls, else within half a second."""

    keeps_cursor = True

    async def background(self) -> None:
        """Commit what stands uncommitted."""
        while True:
            await anyio.sleep(_COMMIT_S)
            if not self._life.over and self._model.durable.next_offset < self._store.next_offset:
                self._commit()

    def _commit(self) -> None:
        self._check_alive()
        super()._commit()
        self._model.durable.take_over(self._store, self._given.dirty)
        self._given.dirty.clear()
        self._context.committed(self._store.next_offset)


class RebuiltSink(CommittingSink):
    """Takes states in place of deltas."""

    async def begin_rebuild(self, offset: int) -> None:
        """Void, durably."""
        await self._strike(())
        self._model.struck["sink rebuilt"] += 1
        self._store.begin(self._context.log_id)
        self._store.rebuilding = True
        self._given.done = 0
        self._keep()

    async def take_states(self, rows: Sequence[StateRow]) -> None:
        """Whole states."""
        await self._strike(())
        for one in rows:
            self._store.facts((one.namespace, one.vector_id)).begin(one.state, one.offset)

    async def end_rebuild(self, offset: int, lamport: int) -> None:
        """They count now."""
        await self._strike(())
        store = self._store
        store.rebuilding, store.next_offset, store.lamport = False, offset, lamport
        store.states_below = offset
        self._given.done = offset
        self._keep()
        self._context.committed(offset)

    def _keep(self) -> None:
        self._check_alive()
        self._store.epoch = self._context.epoch
        self._model.durable = self._store.copy()
        self._given.dirty.clear()
