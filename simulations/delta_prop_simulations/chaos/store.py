"""The data of a model sink: for each vector its deltas and the state before them; and a cursor.

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
        """Return the fold of all deltas. Deltas that sort before the base have no effect, but are counted as
        ignored.
        """
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
        """Make this store equal to `other`, which differs only in the changed vectors, or is of
        another log.
        """
        if self.log_id != other.log_id:
            self.vectors, changed = {}, list(other.vectors)
        self.log_id, self.epoch, self.next_offset = other.log_id, other.epoch, other.next_offset
        self.lamport, self.rebuilding = other.lamport, other.rebuilding
        self.states_below = other.states_below
        for ref in changed:
            self.vectors[ref] = other.vectors[ref].copy()
