"""What several services hold at rest: read from their logs, row by row, and compared.

Numbers of the rows alone: which delta each is, and under which canonical key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop_wire.delta import Priority, make_origin, producer_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from delta_prop import Propagator
    from delta_prop_simulations.laboratory.clients import Acknowledged


class Shown(NamedTuple):
    """A delta as a reader got it: its place, and which one it is."""

    offset: int
    origin: int
    counter: int


_ROWS = 50_000
_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A log's rows in its order: offsets, dots, Lamport numbers. `control`: it only fills a place."""

    offsets: NDArray[np.uint64]
    origins: NDArray[np.uint64]
    counters: NDArray[np.uint64]
    lamports: NDArray[np.uint64]
    control: NDArray[np.bool_]

    def keys(self) -> NDArray[np.uint64]:
        """The canonical key of each row, sorted: who has the same ones folds to the same states."""
        order = np.lexsort((self.counters, self.origins, self.lamports))
        return np.stack([self.lamports[order], self.origins[order], self.counters[order]])

    @property
    def deltas(self) -> int:
        """Rows that are delivered."""
        return int((~self.control).sum())


def read(p: Propagator) -> Held:
    """All that a service's log holds. Raises Refused, LogDamaged, OSError."""
    log = p.inside().log
    offset = log.first_offset
    batches = []
    while found := log.read(offset, rows_max=_ROWS, bytes_max=_BYTES):
        batches += found
        offset = found[-1].next_offset

    def column(of: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, np.uint64), *of])

    return Held(
        column(_from(one.offset, one.count) for one in batches),
        column(np.full(one.count, one.batch.origin, np.uint64) for one in batches),
        column(
            _from(one.batch.base, one.count) if one.batch.counters is None else one.batch.counters
            for one in batches
        ),
        column(_from(one.lamport, one.count) for one in batches),
        column(np.full(one.count, one.batch.is_control, np.uint64) for one in batches).astype(bool),
    )


def repeated(held: Held) -> int:
    """Rows whose dot another row has too."""
    dots = np.unique(np.stack([held.origins, held.counters]), axis=1)
    return len(held.origins) - int(dots.shape[1])


def out_of_order(held: Held) -> int:
    """Rows that come before one of their own origin that they depend on."""
    order = np.argsort(held.origins, kind="stable")
    origins, counters = held.origins[order], held.counters[order]
    return int(((origins[1:] == origins[:-1]) & (counters[1:] <= counters[:-1])).sum())


def missing(held: Held, acknowledged: Sequence[Acknowledged]) -> int:
    """Rows that were acknowledged, and do not stand where it was said, or are not their producer's."""
    if not acknowledged:
        return 0
    told = np.concatenate([_from(one.offset, one.count) for one in acknowledged])
    whose = np.concatenate([np.full(one.count, place) for place, one in enumerate(acknowledged)])
    if not len(held.offsets):
        return len(told)
    places = np.minimum(np.searchsorted(held.offsets, told), len(held.offsets) - 1)
    theirs = [_origins(one.producer) for one in acknowledged]
    right = (held.offsets[places] == told) & ~held.control[places]
    own = [int(origin) in theirs[number] for origin, number in zip(held.origins[places], whose, strict=True)]
    return int((~(right & np.array(own, bool))).sum())


def unknown(held: Held, shown: Sequence[Shown]) -> int:
    """Deltas that a reader was shown, and that do not stand at their place: they were taken back."""
    if not shown or not len(held.offsets):
        return len(shown)
    offsets, origins, counters = np.array(shown, np.uint64).T
    places = np.minimum(np.searchsorted(held.offsets, offsets), len(held.offsets) - 1)
    same = (held.offsets[places] == offsets) & (held.origins[places] == origins)
    return int((~(same & (held.counters[places] == counters))).sum())


def told_twice(acknowledged: Sequence[Acknowledged]) -> int:
    """Places in the log that were told for two deltas."""
    if not acknowledged:
        return 0
    told = np.concatenate([_from(one.offset, one.count) for one in acknowledged])
    return len(told) - len(np.unique(told))


def _origins(producer: str) -> set[int]:
    return {make_origin(producer_id_of(producer), lane) for lane in Priority}


def _from(first: int, count: int) -> NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)
