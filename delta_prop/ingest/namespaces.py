"""The last changes of a namespace's vectors, and whether rows can be changed in one go.

Pure. What is not plain to see by columns is left to `vectors.py`, which looks at each row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate, chain, compress, count
from operator import contains, setitem
from typing import TYPE_CHECKING

from delta_prop_wire.batch import SPARSE_KINDS
from delta_prop_wire.delta import PARTIAL_KINDS, Kind
from delta_prop_wire.spec import DIMENSION_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_wire.batch import Batch

ORIGIN_SHIFT = 64
"""A head is the place of its origin, shifted by this, and its counter."""
COUNTER_MASK = (1 << ORIGIN_SHIFT) - 1
SEVERAL = -2
"""No place, and not that of an origin that has not written."""
VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
VECTOR_BITS = sum(1 << kind for kind in VECTOR_KINDS)
PARTIAL_BITS = sum(1 << kind for kind in PARTIAL_KINDS)
DELETE_BIT = 1 << Kind.DELETE
IS_PARTIAL = bytes(kind in PARTIAL_KINDS for kind in range(256))
"""For `bytes.translate`: of each kind whether it needs a living vector."""
get: Callable[[dict[str, int], str], int | None] = dict.get


class Namespace:
    """What is known of the vectors of one namespace."""

    __slots__ = ("complete", "dead", "dimension", "heads", "widths", "writer")

    def __init__(self, *, complete: bool) -> None:
        self.heads: dict[str, int] = {}  # vector id -> place of the origin << 64 | counter
        self.writer: int | None = None  # the place of the one origin that all heads are of, or SEVERAL
        self.dead: set[str] = set()
        self.dimension = 0
        self.widths: dict[int, int] = {}  # of the states it began with: how many have so many numbers
        self.complete = complete  # False once a head was dropped: absence then proves nothing

    def note_writer(self, place: int) -> None:
        """Heads of an origin are put in."""
        if self.writer != place:
            self.writer = place if self.writer is None else SEVERAL


class Table:
    """The namespaces of an origin's mixed batches, and what they have in common while heads alone move."""

    __slots__ = ("_alone", "_dead", "_dimension", "_dimension_min", "_heads", "_named", "_place")

    def __init__(self, named: Sequence[Namespace], place: int) -> None:
        """`place`: of the origin."""
        self._place = place
        self._named: Sequence[Namespace] = named  # empty once the origin is noted to write there
        self._heads = [known.heads for known in named]
        self._alone = all(known.writer in (None, place) for known in named)
        self._dead = [known.dead for known in named if known.dead]
        dimensions = {known.dimension for known in named}
        # That of all; 0 where they differ, or some have none yet.
        self._dimension = dimensions.pop() if len(dimensions) == 1 else 0
        fixed = [known.dimension for known in named if known.dimension]
        self._dimension_min = min(fixed, default=DIMENSION_MAX)

    def append(self, batch: Batch, limit_of: Callable[[int], int]) -> tuple[int, int] | None:
        """Move the heads of a batch where it is plain to see that all its rows apply and nothing else moves:
        how many are new, and how many rows conflict; None where it is not. `limit_of`: as for `unseen`.
        """
        kinds, keys, heads, index = batch.kinds_mask, batch.keys, self._heads, batch.namespace_index
        if (
            kinds & DELETE_BIT
            or (kinds & VECTOR_BITS and batch.dimension != self._dimension)
            or batch.index_highest >= self._dimension_min
            or (self._dead and not all(dead.isdisjoint(keys) for dead in self._dead))
        ):
            return None
        rows = [heads[0]] * batch.count if index is None else list(map(heads.__getitem__, index))
        codes = None if self._alone else list(map(get, rows, keys))
        if kinds & PARTIAL_BITS:
            partial = batch.kinds.translate(IS_PARTIAL)
            if codes is not None and None in compress(codes, partial):
                return None
            if codes is None and not all(map(contains, compress(rows, partial), compress(keys, partial))):
                return None
        conflicts = 0 if codes is None else len(unseen(codes, self._place, limit_of))
        for known in self._named:
            known.note_writer(self._place)
        self._named = ()
        before = sum(map(len, heads))
        deque(map(setitem, rows, keys, count(self._place << ORIGIN_SHIFT | batch.base)), maxlen=0)
        return sum(map(len, heads)) - before, conflicts


def all_apply(
    known: Namespace | None, batches: Sequence[Batch], kind: int, codes: list[int | None] | None = None
) -> bool:
    """Whether all rows of a kind can apply, told without looking at each; where not, some may still.

    `codes`: their heads, where these have been looked up.
    """
    dimension = 0 if known is None else known.dimension
    if kind in VECTOR_KINDS:
        width = dimension or batches[0].row_values
        return width is not None and {batch.row_values for batch in batches} == {width}
    if kind not in PARTIAL_KINDS:
        return True
    if known is None:
        return False
    if kind in SPARSE_KINDS and dimension and max([batch.index_highest for batch in batches]) >= dimension:
        return False
    keys = keys_of(batches)
    if known.dead and not known.dead.isdisjoint(keys):
        return False
    # Whether there is a head, not which: that would be looked up somewhere in memory for each row.
    # Where heads were dropped, none proves nothing, and each row would pass.
    return not known.complete or all(map(known.heads.__contains__, keys) if codes is None else codes)


def unseen(codes: Sequence[int | None], place: int, limit_of: Callable[[int], int]) -> list[int]:
    """The rows whose vector was last changed by an origin of another place, above what `limit_of` that place
    gives: by a change that whoever changes them now has not seen.
    """
    lowest = place << ORIGIN_SHIFT
    highest = lowest | COUNTER_MASK
    rows = [row for row, code in enumerate(codes) if code is not None and not lowest <= code <= highest]
    if not rows:
        return rows
    heads: list[int] = [codes[row] for row in rows]  # type: ignore[misc]
    least, most = min(heads), max(heads)
    if least >> ORIGIN_SHIFT != most >> ORIGIN_SHIFT:
        limits = {other: limit_of(other) for other in {head >> ORIGIN_SHIFT for head in heads}}
        return [row for row, head in zip(rows, heads, strict=True) if head > limits[head >> ORIGIN_SHIFT]]
    limit = limit_of(least >> ORIGIN_SHIFT)
    if most <= limit or least > limit:  # what another job wrote and this one writes anew, say
        return [] if most <= limit else rows
    return [row for row, head in zip(rows, heads, strict=True) if head > limit]


def firsts(rows: Sequence[int], batches: Sequence[Batch]) -> int:
    """How many of these rows have a vector that no batch before theirs changes. `rows`: rising, of all the
    batches end to end, and either all rows of a vector or none.
    """
    keys, stops = keys_of(batches), [*accumulate([batch.count for batch in batches])]
    found: dict[str, int] = {}
    places = [bisect_right(stops, row) for row in rows]
    return sum([found.setdefault(keys[row], at) == at for row, at in zip(rows, places, strict=True)])


def keys_of(batches: Sequence[Batch]) -> list[str]:
    """The vector ids of all rows."""
    return batches[0].keys if len(batches) == 1 else [*chain.from_iterable([one.keys for one in batches])]
