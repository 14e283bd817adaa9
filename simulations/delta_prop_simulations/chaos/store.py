"""The data of a model sink: rows by vector, the full states below them, a cursor.

Pure; it uses the wire's fold, which has its own tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from delta_prop_wire.algebra import fold
from delta_prop_wire.duplicate_ids import IdentifiedDelta, find_duplicates

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from delta_prop_wire.algebra import Key, VectorState
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.delta import Operation

Ref: TypeAlias = tuple[str, str]
"""Namespace and vector id."""


class Fact(NamedTuple):
    """One delta, identified by its canonical key."""

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
    """One vector: the state that it started with, if any, and the deltas since."""

    base: VectorState | None = None
    base_offset: int = -1
    last_offset: int = -1
    rows: dict[Key, Fact] = field(default_factory=dict)

    def begin(self, base: VectorState | None = None, offset: int = -1) -> None:
        """Drop all deltas and start from a state, as of its last delta's offset."""
        self.base, self.base_offset, self.last_offset = base, offset, offset
        self.rows = {}

    def has(self, fact: Fact) -> bool:
        """True if the delta is among the rows, or counted in the state."""
        return fact.key in self.rows or fact.offset <= self.base_offset

    def is_below_base(self, fact: Fact) -> bool:
        """True if the delta sorts before the state that the vector started with."""
        return self.base is not None and self.base.key is not None and fact.key < self.base.key

    def add(self, fact: Fact) -> None:
        """Add one delta."""
        self.rows[fact.key] = fact
        self.last_offset = max(self.last_offset, fact.offset)

    def state(self) -> VectorState:
        """Return the fold of all deltas. Those that sort before the base have no effect, and are counted."""
        base = self.base
        beneath = 0 if base is None else sum(self.is_below_base(fact) for fact in self.rows.values())
        above = [fact for fact in self.rows.values() if not self.is_below_base(fact)]
        none = find_duplicates((fact.identified for fact in above), complete=base is None)
        state = fold(((fact.key, fact.operation, fact.metadata) for fact in above), base, without_effect=none)
        return replace(state, ignored=state.ignored + beneath) if beneath else state

    def copy(self) -> Facts:
        """Return an independent copy."""
        return Facts(self.base, self.base_offset, self.last_offset, dict(self.rows))


@dataclass(slots=True)
class Store:
    """All vectors, and the offset up to which they are complete."""

    log_id: bytes = b""
    epoch: int = 0
    next_offset: int = 0
    lamport: int = 0
    rebuilding: bool = False
    states_below: int = 0
    """Rows below this offset were loaded as states."""
    vectors: dict[Ref, Facts] = field(default_factory=dict)

    def begin(self, log_id: bytes) -> None:
        """Drop all data, to start at the beginning of a log."""
        self.log_id, self.next_offset, self.lamport, self.rebuilding = log_id, 0, 0, False
        self.vectors, self.states_below = {}, 0

    def facts(self, ref: Ref) -> Facts:
        """Return the facts of a vector, empty at first."""
        found = self.vectors.get(ref)
        if found is None:
            found = self.vectors[ref] = Facts()
        return found

    def copy(self) -> Store:
        """Return an independent copy."""
        vectors = {ref: facts.copy() for ref, facts in self.vectors.items()}
        return replace(self, vectors=vectors)

    def replace_with(self, other: Store, changed: Iterable[Ref]) -> None:
        """Become equal to `other`, which differs in the changed vectors only; in all, if of another log."""
        if self.log_id != other.log_id:
            self.vectors, changed = {}, list(other.vectors)
        self.log_id, self.epoch, self.next_offset = other.log_id, other.epoch, other.next_offset
        self.lamport, self.rebuilding = other.lamport, other.rebuilding
        self.states_below = other.states_below
        for ref in changed:
            self.vectors[ref] = other.vectors[ref].copy()
