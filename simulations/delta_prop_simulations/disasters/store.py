"""What a model sink holds: rows by vector, whole states beneath them, a cursor.

Pure; the fold is the wire's, which has its own oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from delta_prop_wire.algebra import fold
from delta_prop_wire.twins import Identified, without_effect

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from delta_prop_wire.algebra import Key, State
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Operation

Ref: TypeAlias = tuple[str, str]
"""Namespace and vector id."""


class Fact(NamedTuple):
    """One delta, by its canonical key."""

    key: Key
    operation: Operation
    metadata: dict[str, Any] | None
    offset: int
    identified: Identified | None

    @classmethod
    def of(cls, logged: LoggedBatch, row: int) -> Fact:
        """A row of the log."""
        batch = logged.batch
        return cls(
            logged.key(row),
            batch.operation(row),
            batch.metadata(row),
            logged.offset + row,
            Identified.of(logged, row),
        )


@dataclass(slots=True)
class Facts:
    """One vector: the state that it began with, if any, and the deltas since."""

    base: State | None = None
    base_offset: int = -1
    last_offset: int = -1
    rows: dict[Key, Fact] = field(default_factory=dict)

    def begin(self, base: State | None = None, offset: int = -1) -> None:
        """Forget all deltas; go on from a state as of its last delta's offset."""
        self.base, self.base_offset, self.last_offset = base, offset, offset
        self.rows = {}

    def knows(self, fact: Fact) -> bool:
        """Whether the delta is among the rows, or counted in the state."""
        return fact.key in self.rows or fact.offset <= self.base_offset

    def beneath(self, fact: Fact) -> bool:
        """Whether it sorts before the state that the vector began with."""
        return self.base is not None and self.base.key is not None and fact.key < self.base.key

    def add(self, fact: Fact) -> None:
        """One delta more."""
        self.rows[fact.key] = fact
        self.last_offset = max(self.last_offset, fact.offset)

    def state(self) -> State:
        """The fold of all. What sorts before the state has no effect, and is counted."""
        base = self.base
        beneath = 0 if base is None else sum(self.beneath(fact) for fact in self.rows.values())
        above = [fact for fact in self.rows.values() if not self.beneath(fact)]
        none = without_effect((fact.identified for fact in above), whole=base is None)
        state = fold(((fact.key, fact.operation, fact.metadata) for fact in above), base, without_effect=none)
        return replace(state, ignored=state.ignored + beneath) if beneath else state

    def copy(self) -> Facts:
        """One that changes apart from this."""
        return Facts(self.base, self.base_offset, self.last_offset, dict(self.rows))


@dataclass(slots=True)
class Store:
    """All vectors, and how far they reach."""

    log_id: bytes = b""
    epoch: int = 0
    next_offset: int = 0
    lamport: int = 0
    rebuilding: bool = False
    states_below: int = 0
    """What lies below this offset came as states."""
    vectors: dict[Ref, Facts] = field(default_factory=dict)

    def begin(self, log_id: bytes) -> None:
        """Empty, for a log from its beginning."""
        self.log_id, self.next_offset, self.lamport, self.rebuilding = log_id, 0, 0, False
        self.vectors, self.states_below = {}, 0

    def facts(self, ref: Ref) -> Facts:
        """Those of a vector, none to begin with."""
        found = self.vectors.get(ref)
        if found is None:
            found = self.vectors[ref] = Facts()
        return found

    def copy(self) -> Store:
        """One that changes apart from this."""
        vectors = {ref: facts.copy() for ref, facts in self.vectors.items()}
        return replace(self, vectors=vectors)

    def take_over(self, other: Store, changed: Iterable[Ref]) -> None:
        """Be what another one is that differs in these vectors alone; of another log, in all."""
        if self.log_id != other.log_id:
            self.vectors, changed = {}, list(other.vectors)
        self.log_id, self.epoch, self.next_offset = other.log_id, other.epoch, other.next_offset
        self.lamport, self.rebuilding = other.lamport, other.rebuilding
        self.states_below = other.states_below
        for ref in changed:
            self.vectors[ref] = other.vectors[ref].copy()
