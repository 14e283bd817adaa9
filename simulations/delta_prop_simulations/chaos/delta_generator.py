"""Generates the deltas of a writer: all operations, on few vectors; a token identifies each delta. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.histories import ONCE, SUM, TOKEN
from delta_prop_simulations.chaos.plan import POISON
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
    Dot,
    Operation,
    Priority,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)

if TYPE_CHECKING:
    from delta_prop_simulations.rng import Random

NAMESPACES = ("a", "b")
HOT = ("a", "b", "c", "d")
"""Vector ids that all writers share."""
NUMBERS = (0.0, 1.0, -1.5, 3e38)


@dataclass(frozen=True, slots=True)
class TaggedDelta:
    """A delta and its token, which is not in the delta if that adds to a sum; it starts with `SUM` then."""

    delta: Delta
    token: str


class DeltaGenerator:
    """Generates the deltas of one writer."""

    def __init__(self, writer: str, rng: Random, *, poison: float, hot: bool = False) -> None:
        """`poison`: the share that sinks reject; `hot`: every delta changes one of two shared vectors."""
        self._hot = hot
        self._writer = writer
        self._rng = rng
        self._poison = poison
        self._count = 0
        self._live_keys: set[tuple[str, str]] = set()  # as far as this writer knows

    def next(
        self,
        priority: Priority,
        causes: Sequence[Dot] = (),
        heads: Sequence[tuple[str, str, Dot]] = (),
        *,
        with_id: bool,
    ) -> TaggedDelta:
        """Return the next delta. `causes`: dots, one of which it may name as a parent. `heads`: heads, one of
        which it may expect. `with_id`: give the delta an id of its own.
        """
        rng, self._count = self._rng, self._count + 1
        token = f"{self._writer}-{self._count}"
        own_id = _id_of(token) if with_id else None
        draw = rng.random()
        parents = (rng.choice(causes),) if causes and rng.random() < 0.1 else ()
        if self._hot:
            patch: dict[str, object] = {TOKEN: token}
            namespace, key = NAMESPACES[0], rng.choice(HOT[:2])
            operation = self._operation(namespace, key)
            return TaggedDelta(
                Delta(key, operation, namespace, id=own_id, priority=priority, metadata=patch), token
            )
        if draw < 0.35:
            vector = create([rng.choice(NUMBERS), 1.0])
            key = ONCE + token
            return TaggedDelta(
                Delta(key, vector, NAMESPACES[0], id=own_id, parents=parents, priority=priority), key
            )
        if draw < 0.55 and priority is Priority.NORMAL:  # ordered after the vector's first delta
            add_one = sparse_add([0], [1.0])
            return TaggedDelta(Delta(SUM + self._writer, add_one, NAMESPACES[0], id=own_id), f"{SUM}{token}")
        patch = {TOKEN: token}
        if rng.random() < self._poison:
            patch[POISON] = "all"
        namespace, key, expect = rng.choice(NAMESPACES), rng.choice(HOT), None
        if heads and rng.random() < 0.1:
            namespace, key, expect = rng.choice(heads)
            expect = ABSENT if rng.random() < 0.2 else expect
        return TaggedDelta(
            Delta(
                key,
                self._operation(namespace, key),
                namespace,
                id=own_id,
                parents=parents,
                priority=priority,
                metadata=patch,
                expect=expect,
            ),
            token,
        )

    def create_sum(self, *, with_id: bool) -> TaggedDelta:
        """Return the delta that creates the vector to which this writer adds."""
        token = f"{SUM}{self._writer}"
        own_id = _id_of(token) if with_id else None
        return TaggedDelta(Delta(token, create([0.0, 0.0]), NAMESPACES[0], id=own_id), token)

    def forget(self) -> None:
        """Forget which vectors are assumed to exist: after a refusal they may not exist."""
        self._live_keys.clear()

    def _operation(self, namespace: str, key: str) -> Operation:
        """Return an operation that mostly has an effect: partial ones for vectors assumed to exist."""
        rng, ref = self._rng, (namespace, key)
        numbers = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
        full = (create(numbers), dense(numbers), opaque(numbers[0].hex().encode()))
        parts = (
            sparse([1], numbers[:1]),
            sparse_add([0, 1], numbers),
            sparse_add([0], [1.0]),
            scale(-2.0),
            offset(1.0),
            metadata_only(),
        )
        if ref not in self._live_keys and rng.random() < 0.9:
            self._live_keys.add(ref)
            return rng.choice(full)
        if rng.random() < 0.1:
            self._live_keys.discard(ref)
            return delete()
        return rng.choice(parts if rng.random() < 0.7 else full)


def _id_of(token: str) -> bytes:
    return token.encode().rjust(16, b".")[-16:]
