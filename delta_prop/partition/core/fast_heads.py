"""Heads of many rows at once: the fast paths of `VectorHeads`.

Pure. Each leaves a batch whose columns do not prove enough to the general way, which takes row after row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, compress, count
from operator import contains, setitem

from delta_prop.partition.ingest.vector_heads import (
    HEADS_MAX,
    ORIGIN_SHIFT,
    PARTIAL_BITS,
    VECTOR_BITS,
    VECTOR_KINDS,
    Namespace,
    VectorHeads,
    dict_get,
    find_concurrent_rows,
)
from delta_prop_wire.batch import SPARSE_KINDS, Batch
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import FULL_KINDS, PARTIAL_KINDS, Kind, Source
from delta_prop_wire.spec import DIMENSION_MAX

_DELETE_BIT = 1 << Kind.DELETE
_IS_PARTIAL = bytes(kind in PARTIAL_KINDS for kind in range(256))
"""Table for `bytes.translate`: for each kind, 1 if it needs a living vector."""
_TABLES_MAX = 256


class FastVectorHeads(VectorHeads):
    """Heads with the same answers as `VectorHeads`, in fewer steps."""

    def __init__(self, *, heads_max: int = HEADS_MAX) -> None:
        super().__init__(heads_max=heads_max)
        # Tables are valid until a batch changes more than the heads of their namespaces.
        self._tables: dict[tuple[str, ...], NamespaceTable] = {}
        self._tables_key = -1, -1  # writer and number of changes for which they are valid

    def check_rows(self, batch: Batch) -> None:
        """Check all rows at once if they have one kind and namespace; else row by row."""
        namespace, kind = batch.namespace, batch.kind
        if not (
            core_mode.is_fast
            and namespace is not None
            and kind is not None
            and can_all_apply(self._namespaces.get(namespace), (batch,), kind)
        ):
            super().check_rows(batch)

    def write_heads(self, batch: Batch, writer: int, codes: Iterator[int], source: Source) -> None:
        """Write the heads of all rows at once if they have one kind and namespace; else row by row."""
        if not core_mode.is_fast or batch.namespace is None or batch.kind is None:
            super().write_heads(batch, writer, codes, source)
            return
        known = self._get_namespace(batch.namespace)
        self._write_uniform(known, (batch,), batch.kind, codes, source)
        known.note_writer(writer)

    def append_uniform(self, batches: Sequence[Batch], source: Source, seen: Callable[[int], int]) -> bool:
        """Run `check`, `count_concurrent` and `note_appended` for several batches in one pass.

        The batches are homogeneous, of one origin, namespace and kind, with contiguous counters. Return
        False, with nothing changed, if the caller must handle each batch separately. `seen`: as for
        `count_concurrent`.
        """
        first = batches[0]
        namespace, kind, origin = first.namespace, first.kind, first.origin
        known, writer = self._namespaces.get(namespace or ""), self._writer_indexes.get(origin)
        if known is None or kind is None or writer is None:
            return False
        rows = sum([batch.count for batch in batches])
        is_only_writer = known.writer == writer
        codes = None if is_only_writer else list(map(known.heads.get, _all_keys(batches)))
        if self._count + rows > self._heads_max or not can_all_apply(known, batches, kind, codes):
            return False
        if codes is not None:
            others = find_concurrent_rows(codes, writer, self._limits(seen))
            self.concurrent_updates += (
                len(others) if len(batches) == 1 or not others else count_first_rows(others, batches)
            )
            known.note_writer(writer)
        self._changes += 1
        self._write_uniform(known, batches, kind, count(writer << ORIGIN_SHIFT | first.base), source)
        return True

    def append_heterogeneous(self, batches: Sequence[Batch], seen: Callable[[int], int]) -> int:
        """Run `check`, `count_concurrent` and `note_appended` for several heterogeneous batches in one pass.

        The batches are valid, of one origin, with common columns only. Stop before the first batch that
        changes more than heads; return the number of batches before it. `seen`: as for `count_concurrent`.
        """
        writer = self._writer_indexes.get(batches[0].origin)
        if writer is None or self._count + sum([batch.count for batch in batches]) > self._heads_max:
            return 0
        if self._tables_key != (writer, self._changes):
            self._tables, self._tables_key = {}, (writer, self._changes)
        limits, done = self._limits(seen), 0
        for batch in batches:
            names = batch.namespace_names
            table = self._tables.get(names) or self._make_table(names, writer)
            added = None if table is None else table.try_append(batch, limits)
            if added is None:
                break
            self._count += added[0]
            self.concurrent_updates += added[1]
            done += 1
        return done

    def _make_table(self, names: tuple[str, ...], writer: int) -> NamespaceTable | None:
        """Create a table of these namespaces; return None if a name is unknown, or occurs twice."""
        named = {name: known for name in names if (known := self._namespaces.get(name)) is not None}
        if len(named) < len(names):
            return None
        if len(self._tables) >= _TABLES_MAX:
            self._tables.clear()
        table = self._tables[names] = NamespaceTable([*named.values()], writer)
        return table

    def _write_uniform(
        self, known: Namespace, batches: Sequence[Batch], kind: int, codes: Iterator[int], source: Source
    ) -> None:
        count_before = len(known.heads)
        for batch in batches:  # one by one, since a long call would hold the GIL and delay the commit thread
            known.heads.update(zip(batch.keys, codes, strict=False))
        self._count += len(known.heads) - count_before
        if kind == Kind.DELETE and source is not Source.REPLICA:
            known.dead.update(_all_keys(batches))
        elif known.dead and (kind in FULL_KINDS or source is Source.REPLICA):
            known.dead.difference_update(_all_keys(batches))
        if not known.dimension and kind in VECTOR_KINDS:
            known.dimension = batches[0].values_per_row or 0


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
            kinds & _DELETE_BIT
            or (kinds & VECTOR_BITS and batch.dimension != self._dimension)
            or batch.highest_index >= self._dimension_min
            or (self._dead and not all(dead.isdisjoint(keys) for dead in self._dead))
        ):
            return None
        rows = [heads[0]] * batch.count if index is None else list(map(heads.__getitem__, index))
        codes = None if self._is_single_writer else list(map(dict_get, rows, keys))
        if kinds & PARTIAL_BITS:
            partial = batch.kinds.translate(_IS_PARTIAL)
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
    keys = _all_keys(batches)
    if known.dead and not known.dead.isdisjoint(keys):
        return False
    # `__contains__` does not read the value, which would take one more memory access per row. If heads were
    # dropped, a missing head proves nothing, and all rows pass.
    return not known.complete or all(map(known.heads.__contains__, keys) if codes is None else codes)


def count_first_rows(rows: Sequence[int], batches: Sequence[Batch]) -> int:
    """Count the rows whose vector no earlier batch changes.

    `rows`: ascending row numbers, counted over all batches; of each vector either all rows or none.
    """
    keys, stops = _all_keys(batches), [*accumulate([batch.count for batch in batches])]
    first_batches: dict[str, int] = {}
    batch_numbers = [bisect_right(stops, row) for row in rows]
    return sum(
        [
            first_batches.setdefault(keys[row], number) == number
            for row, number in zip(rows, batch_numbers, strict=True)
        ]
    )


def _all_keys(batches: Sequence[Batch]) -> list[str]:
    """Return the vector ids of all rows."""
    return batches[0].keys if len(batches) == 1 else [*chain.from_iterable([batch.keys for batch in batches])]
