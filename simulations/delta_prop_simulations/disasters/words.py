"""What writers say: deltas of every operation over few vectors, each with a token by which it is known.

Pure; what is drawn comes from the writer's own source of chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.shadow import ONCE, SUM, TOKEN
from delta_prop_simulations.disasters.sinks import POISON
from delta_prop_wire.delta import (
    ABSENT,
    Delta,
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
    from collections.abc import Sequence

    from delta_prop_simulations.chance import Random
    from delta_prop_wire.delta import Dot, Operation

NAMESPACES = ("a", "b")
HOT = ("a", "b", "c", "d")
NUMBERS = (0.0, 1.0, -1.5, 3e38)


@dataclass(frozen=True, slots=True)
class Said:
    """A delta and its token. What a writer adds up has one that begins with `SUM`, which no row has."""

    delta: Delta
    token: str


class Words:
    """Of one writer."""

    def __init__(self, writer: str, chance: Random, *, poison: float, hot: bool = False) -> None:
        """`hot`: all it says is of two vectors, the same ones as everybody's."""
        self._hot = hot
        self._writer = writer
        self._chance = chance
        self._poison = poison
        self._said = 0
        self._living: set[tuple[str, str]] = set()  # as far as this writer knows

    def next(
        self,
        priority: Priority,
        causes: Sequence[Dot] = (),
        heads: Sequence[tuple[str, str, Dot]] = (),
        *,
        identified: bool,
    ) -> Said:
        """One more delta. `causes`: what it may name as parent. `heads`: what it may expect of a vector.
        `identified`: under an id of its own.
        """
        chance, self._said = self._chance, self._said + 1
        token = f"{self._writer}-{self._said}"
        own = _id_of(token) if identified else None
        draw = chance.random()
        parents = (chance.choice(causes),) if causes and chance.random() < 0.1 else ()
        if self._hot:
            patch: dict[str, object] = {TOKEN: token}
            namespace, key = NAMESPACES[0], chance.choice(HOT[:2])
            changed = self._operation(namespace, key)
            return Said(Delta(key, changed, namespace, id=own, priority=priority, metadata=patch), token)
        if draw < 0.35:
            vector = create([chance.choice(NUMBERS), 1.0])
            key = ONCE + token
            return Said(Delta(key, vector, NAMESPACES[0], id=own, parents=parents, priority=priority), key)
        if draw < 0.55 and priority is Priority.NORMAL:  # behind the vector's first delta
            one = sparse_add([0], [1.0])
            return Said(Delta(SUM + self._writer, one, NAMESPACES[0], id=own), f"{SUM}{token}")
        patch = {TOKEN: token}
        if chance.random() < self._poison:
            patch[POISON] = "all"
        namespace, key, expect = chance.choice(NAMESPACES), chance.choice(HOT), None
        if heads and chance.random() < 0.1:
            namespace, key, expect = chance.choice(heads)
            expect = ABSENT if chance.random() < 0.2 else expect
        return Said(
            Delta(
                key,
                self._operation(namespace, key),
                namespace,
                id=own,
                parents=parents,
                priority=priority,
                metadata=patch,
                expect=expect,
            ),
            token,
        )

    def first(self, *, identified: bool) -> Said:
        """The vector to which this writer adds up."""
        token = f"{SUM}{self._writer}"
        own = _id_of(token) if identified else None
        return Said(Delta(token, create([0.0, 0.0]), NAMESPACES[0], id=own), token)

    def forget(self) -> None:
        """Something was refused: what was thought to be there may not be."""
        self._living.clear()

    def _operation(self, namespace: str, key: str) -> Operation:
        """Mostly one that has an effect: part of a vector is changed where there should be one."""
        chance, ref = self._chance, (namespace, key)
        numbers = [chance.choice(NUMBERS), chance.choice(NUMBERS)]
        whole = (create(numbers), dense(numbers), opaque(numbers[0].hex().encode()))
        parts = (
            sparse([1], numbers[:1]),
            sparse_add([0, 1], numbers),
            sparse_add([0], [1.0]),
            scale(-2.0),
            offset(1.0),
            metadata_only(),
        )
        if ref not in self._living and chance.random() < 0.9:
            self._living.add(ref)
            return chance.choice(whole)
        if chance.random() < 0.1:
            self._living.discard(ref)
            return delete()
        return chance.choice(parts if chance.random() < 0.7 else whole)


def _id_of(token: str) -> bytes:
    return token.encode().rjust(16, b".")[-16:]
