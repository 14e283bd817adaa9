"""The heads of a namespace's vectors, and checks of many rows at once.

Pure. If the columns of a batch prove nothing, `vector_heads.py` checks each of its rows.
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
"""Shift of the origin's index in the code of a head; the counter is in the bits below."""
COUNTER_MASK = (1 << ORIGIN_SHIFT) - 1
SEVERAL_WRITERS = -2
"""Value of `Namespace.writer` if several origins have written. Before the first write it is None."""
VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
VECTOR_BITS = sum(1 << kind for kind in VECTOR_KINDS)
PARTIAL_BITS = sum(1 << kind for kind in PARTIAL_KINDS)
DELETE_BIT = 1 << Kind.DELETE
IS_PARTIAL = bytes(kind in PARTIAL_KINDS for kind in range(256))
"""Table for `bytes.translate`: for each kind, 1 if it needs a living vector."""
dict_get: Callable[[dict[str, int], str], int | None] = dict.get


class Namespace:
    """The known vectors of one namespace."""

    __slots__ = ("complete", "dead", "dimension", "heads", "widths", "writer")

    def __init__(self, *, complete: bool) -> None:
        self.heads: dict[str, int] = {}  # vector id -> index of the origin << 64 | counter
        self.writer: int | None = None  # index of the only origin of all heads, or SEVERAL_WRITERS
        self.dead: set[str] = set()
        self.dimension = 0
        self.widths: dict[int, int] = {}  # value count -> number of restored states that have it
        self.complete = complete  # False once a head was dropped: a vector without a head may then exist

    def note_writer(self, writer: int) -> None:
        """Note that an origin writes heads."""
        if self.writer != writer:
            self.writer = writer if self.writer is None else SEVERAL_WRITERS


class NamespaceTable:
    """The namespaces that an origin's heterogeneous batches name, and the state that these have in common.

    Valid as long as only heads change.
    """

    __slots__ = ("_dead", "_dimension", "_dimension_min", "_heads", "_is_single_writer", "_named", "_writer")

    def __init__(self, named: Sequence[Namespace], writer: int) -> None:
        """`writer`: index of the origin."""
        self._writer = writer
        self._named: Sequence[Namespace] = named  # empty once the origin is noted as a writer in them
        self._heads = [known.heads for known in named]
        self._is_single_writer = all(known.writer in (None, writer) for known in named)
        self._dead = [known.dead for known in named if known.dead]
        dimensions = {known.dimension for known in named}
        # The common dimension; 0 if dimensions differ, or some namespace has none yet.
        self._dimension = dimensions.pop() if len(dimensions) == 1 else 0
        fixed = [known.dimension for known in named if known.dimension]
        self._dimension_min = min(fixed, default=DIMENSION_MAX)

    def try_append(self, batch: Batch, limit_of: Callable[[int], int]) -> tuple[int, int] | None:
        """Append a batch if its columns prove that all rows apply and change only heads.

        Return the numbers of new heads and of concurrent rows; None, with nothing changed, if the columns do
        not prove it. `limit_of`: as for `find_concurrent_rows`.
        """
        kinds, keys, heads, index = batch.kinds_mask, batch.keys, self._heads, batch.namespace_index
        if (
            kinds & DELETE_BIT
            or (kinds & VECTOR_BITS and batch.dimension != self._dimension)
            or batch.highest_index >= self._dimension_min
            or (self._dead and not all(dead.isdisjoint(keys) for dead in self._dead))
        ):
            return None
        rows = [heads[0]] * batch.count if index is None else list(map(heads.__getitem__, index))
        codes = None if self._is_single_writer else list(map(dict_get, rows, keys))
        if kinds & PARTIAL_BITS:
            partial = batch.kinds.translate(IS_PARTIAL)
            if codes is not None and None in compress(codes, partial):
                return None
            if codes is None and not all(map(contains, compress(rows, partial), compress(keys, partial))):
                return None
        concurrent = 0 if codes is None else len(find_concurrent_rows(codes, self._writer, limit_of))
        for known in self._named:
            known.note_writer(self._writer)
        self._named = ()
        count_before = sum(map(len, heads))
        deque(map(setitem, rows, keys, count(self._writer << ORIGIN_SHIFT | batch.base)), maxlen=0)
        return sum(map(len, heads)) - count_before, concurrent


def can_all_apply(
    known: Namespace | None, batches: Sequence[Batch], kind: int, codes: list[int | None] | None = None
) -> bool:
    """Return True if the columns prove that all rows of a kind apply; if False, they may still apply.

    `codes`: the heads of the rows, if they were looked up.
    """
    dimension = 0 if known is None else known.dimension
    if kind in VECTOR_KINDS:
        width = dimension or batches[0].values_per_row
        return width is not None and {batch.values_per_row for batch in batches} == {width}
    if kind not in PARTIAL_KINDS:
        return True
    if known is None:
        return False
    if kind in SPARSE_KINDS and dimension and max([batch.highest_index for batch in batches]) >= dimension:
        return False
    keys = all_keys(batches)
    if known.dead and not known.dead.isdisjoint(keys):
        return False
    # `__contains__` does not read the value, which would take one more memory access per row. If heads were
    # dropped, a missing head proves nothing, and all rows pass.
    return not known.complete or all(map(known.heads.__contains__, keys) if codes is None else codes)


def find_concurrent_rows(
    codes: Sequence[int | None], writer: int, limit_of: Callable[[int], int]
) -> list[int]:
    """Find the rows whose vector was last changed by a delta of another origin that `writer` has not seen.

    `codes`: the heads of the rows. `limit_of`: returns, for the index of an origin, the code of the last of
    its deltas that the writer has seen.
    """
    lowest = writer << ORIGIN_SHIFT
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
    if most <= limit or least > limit:  # e.g. a job rewrites all vectors that another job wrote
        return [] if most <= limit else rows
    return [row for row, head in zip(rows, heads, strict=True) if head > limit]


def count_first_rows(rows: Sequence[int], batches: Sequence[Batch]) -> int:
    """Count the rows whose vector no earlier batch changes.

    `rows`: ascending row numbers, counted over all batches; of each vector either all rows or none.
    """
    keys, stops = all_keys(batches), [*accumulate([batch.count for batch in batches])]
    first_batches: dict[str, int] = {}
    batch_numbers = [bisect_right(stops, row) for row in rows]
    return sum(
        [
            first_batches.setdefault(keys[row], number) == number
            for row, number in zip(rows, batch_numbers, strict=True)
        ]
    )


def all_keys(batches: Sequence[Batch]) -> list[str]:
    """Return the vector ids of all rows."""
    return batches[0].keys if len(batches) == 1 else [*chain.from_iterable([batch.keys for batch in batches])]
