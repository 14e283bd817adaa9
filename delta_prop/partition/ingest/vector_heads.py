"""The state of vectors known at ingest: each vector's head, whether it is alive, each namespace's dimension.

Pure and bounded. It refuses only rows that it knows to be wrong, since the fold of the log is authoritative,
and ignores an operation on a missing vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from delta_prop.partition.ingest.expectations import check_expects
from delta_prop.partition.ingest.heads import ALIVE, DEAD, ORIGIN_SHIFT, SavedHeads
from delta_prop_wire.batch import SPARSE_KINDS, Batch
from delta_prop_wire.delta import FULL_KINDS, PARTIAL_KINDS, Dot, Head, Kind, Source
from delta_prop_wire.errors import InvalidDelta, UsageError

HEADS_MAX = 2_000_000
SEVERAL_WRITERS = -2
"""Value of `Namespace.writer` if several origins have written. Before the first write it is None."""
VECTOR_KINDS = frozenset({Kind.CREATE, Kind.DENSE})
VECTOR_BITS = sum(1 << kind for kind in VECTOR_KINDS)
PARTIAL_BITS = sum(1 << kind for kind in PARTIAL_KINDS)
dict_get: Callable[[dict[str, int], str], int | None] = dict.get
_COUNTER_MASK = (1 << ORIGIN_SHIFT) - 1
_LIFE_KINDS = FULL_KINDS | {Kind.DELETE}
_NO_HEADS: dict[str, int] = {}


class SavedVectors(NamedTuple):
    """The state of `VectorHeads`, without the heads.

    `writers`: the origins that have written, by index. `namespaces`: the dimension of each, and whether it
    is complete, i.e. all its heads are stored. `complete`: the same for all other namespaces.
    """

    writers: tuple[int, ...]
    namespaces: dict[str, tuple[int, bool]]
    complete: bool


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


class VectorHeads:
    """Heads, tombstones and dimensions, changed only by appended batches."""

    def __init__(self, *, heads_max: int = HEADS_MAX) -> None:
        self._heads_max = heads_max
        self._namespaces: dict[str, Namespace] = {}
        self._writer_indexes: dict[int, int] = {}
        self._writers: list[int] = []
        self._count = 0
        self._complete = True
        self.concurrent_updates = 0

    @property
    def writer_count(self) -> int:
        """Number of origins that have written."""
        return len(self._writers)

    @property
    def head_count(self) -> int:
        """Number of vectors with a stored head."""
        return self._count

    def head(self, namespace: str, vector_id: str) -> Dot | None:
        """Return the last dot of a vector; None if no head is stored."""
        head = self.stored_head(namespace, vector_id)
        return None if head is None else head.dot

    def stored_head(self, namespace: str, vector_id: str) -> Head | None:
        """Return the head of a vector; None if none is stored."""
        known = self._namespaces.get(namespace)
        code = None if known is None else known.heads.get(vector_id)
        return None if known is None or code is None else Head(self._dot(code), vector_id not in known.dead)

    def is_incomplete(self, namespace: str) -> bool:
        """Return True if a vector without a stored head may exist nevertheless."""
        known = self._namespaces.get(namespace)
        return not (self._complete if known is None else known.complete)

    def dimension(self, namespace: str) -> int:
        """Return the dimension that the namespace's first vector fixed; 0 before that vector."""
        known = self._namespaces.get(namespace)
        return 0 if known is None else known.dimension

    def note_foreign_vectors(self, dimensions: Mapping[str, int]) -> None:
        """Note that a sink has vectors of an earlier log: absence proves nothing, and dimensions are fixed.

        Raises UsageError if a namespace already has another dimension.
        """
        for name, dimension in dimensions.items():
            present = self.dimension(name)
            if present and present != dimension:
                raise UsageError(
                    f"namespace {name!r}: the sink's vectors have {dimension} numbers, the log's {present}: "
                    "attach this sink before publishing, or use another namespace"
                )
        self._forget_absence()
        for name, dimension in dimensions.items():
            self._fix_dimension(name, dimension)

    def forget(self, namespace: str, vector_id: str) -> bool:
        """Drop the head of a vector that is deleted; return False if there is no such head.

        No heads may be copied meanwhile.
        """
        known = self._namespaces.get(namespace)
        if known is None or vector_id not in known.dead:
            return False
        known.dead.discard(vector_id)
        del known.heads[vector_id]
        self._count -= 1
        return True

    def _forget_absence(self) -> None:
        self._complete = False
        for known in self._namespaces.values():
            known.complete = False

    def _fix_dimension(self, namespace: str, dimension: int) -> None:
        self._get_namespace(namespace).dimension = dimension

    def check(self, batch: Batch, load: Callable[[str, str], Head | None]) -> None:
        """Raise Refused for the first row that cannot apply: wrong dimension, unknown vector, or unmet
        `expect`.

        `load`: reads a head that is not stored here.
        """
        expects = {} if batch.homogeneous else batch.expect_by_row
        try:
            self.check_rows(batch)
        except InvalidDelta as refusal:
            if expects and min(expects) < (refusal.row or 0):
                check_expects(batch, partial(self._head_or_load, load=load), rows=refusal.row)
            raise
        if expects:
            check_expects(batch, partial(self._head_or_load, load=load))

    def note_appended(self, batch: Batch, source: Source) -> None:
        """Update heads, tombstones and dimensions."""
        if batch.is_control:
            return
        writer = self._writer_indexes.setdefault(batch.origin, len(self._writers))
        if writer == len(self._writers):
            self._writers.append(batch.origin)
        first = writer << ORIGIN_SHIFT | batch.base
        counters = batch.counters if batch.has_gaps else None
        codes: Iterator[int] = (  # `count` takes half the time of a range for such large numbers
            count(first)
            if counters is None
            else iter([writer << ORIGIN_SHIFT | int(counter) for counter in counters])
        )
        self.write_heads(batch, writer, codes, source)
        while self._count > self._heads_max:
            self._drop_oldest()

    def append_run(self, batches: Sequence[Batch], source: Source, seen: Callable[[int], int]) -> int:
        """Run `check`, `count_concurrent` and `note_appended` for each batch, up to the first refused one.

        Return the number of batches noted. They have only common columns. `seen`: as for `count_concurrent`.
        """
        for number, batch in enumerate(batches):
            try:
                self.check_rows(batch)
            except InvalidDelta:
                return number
            self.count_concurrent(batch, seen)
            self.note_appended(batch, source)
        return len(batches)

    def other_heads(self, batch_origin: int, rows: Iterator[tuple[str, str]]) -> Iterator[tuple[int, Dot]]:
        """Yield (row, head) for each row whose vector was last written by another origin."""
        own = self._writer_indexes.get(batch_origin, -1)
        for row, (namespace, vector_id) in enumerate(rows):
            known = self._namespaces.get(namespace)
            code = None if known is None else known.heads.get(vector_id)
            if code is not None and code >> ORIGIN_SHIFT != own:
                yield row, self._dot(code)

    def count_concurrent(self, batch: Batch, seen: Callable[[int], int]) -> None:
        """Count the rows whose vector was last changed by a delta that this batch's origin had not seen.

        `seen`: returns the highest counter of another origin that this origin had seen. Call
        `count_concurrent` before the batch is appended.
        """
        heads = self._concurrent_heads(batch, seen)
        if batch.homogeneous or not heads:
            self.concurrent_updates += len(heads)
            return
        parents = set(batch.parents)
        self.concurrent_updates += sum([head not in parents for head in heads])

    def _concurrent_heads(self, batch: Batch, seen: Callable[[int], int]) -> list[tuple[int, Dot]]:
        """Return the (row, head) of each row that `count_concurrent` counts unless it names a parent."""
        writer = self._writer_indexes.get(batch.origin, -1)
        named = [self._namespaces.get(name) for name in batch.namespace_names]
        if all(known is None or known.writer in (None, writer) for known in named):
            return []
        codes = self._head_codes(batch)
        rows = find_concurrent_rows(codes, writer, self._limits(seen))
        return [(row, self._dot(codes[row] or 0)) for row in rows]

    def _limits(self, seen: Callable[[int], int]) -> Callable[[int], int]:
        """Return a function from an origin's index to the code of the origin's last seen delta."""
        return lambda writer: writer << ORIGIN_SHIFT | seen(self._writers[writer])

    def _head_codes(self, batch: Batch) -> list[int | None]:
        """Return the code of each row's head before the batch is appended."""
        if batch.namespace is not None:
            known = self._namespaces.get(batch.namespace)
            return [None] * batch.count if known is None else list(map(known.heads.get, batch.keys))
        named = {
            name: _NO_HEADS if (known := self._namespaces.get(name)) is None else known.heads
            for name in batch.namespace_names
        }
        return list(map(dict_get, map(named.__getitem__, batch.namespaces), batch.keys))

    # --- checkpoints

    def save(self) -> SavedVectors:
        """Return the state without the heads; `copy_heads` returns the heads of one namespace."""
        return SavedVectors(
            tuple(self._writers),
            {name: (known.dimension, known.complete) for name, known in self._namespaces.items()},
            self._complete,
        )

    def copy_heads(self, namespace: str, rows: int) -> Iterator[tuple[list[str], list[int | None], bytes]]:
        """Yield the vectors of a namespace that have a head now, `rows` at a time.

        Yields vector ids, the codes of their heads, and which are dead, as of the moment of each yield. A
        code is None if the head was dropped meanwhile. While no head is added or dropped, the table is
        iterated, which is ten times as fast as a lookup of each id.
        """
        known = self._namespaces[namespace]
        keys, names, codes = list(known.heads), iter(known.heads), iter(known.heads.values())
        can_iterate = True
        for first in range(0, len(keys), rows):
            chunk, chunk_codes = keys[first : first + rows], list[int | None]()
            if can_iterate:
                try:
                    can_iterate, chunk_codes = list(islice(names, rows)) == chunk, list(islice(codes, rows))
                except RuntimeError:  # the table has grown or shrunk
                    can_iterate = False
            if not can_iterate:
                chunk_codes = list(map(known.heads.get, chunk))
            dead = bytes(map(known.dead.__contains__, chunk)) if known.dead else bytes(len(chunk))
            yield chunk, chunk_codes, dead

    def restore(self, saved: SavedVectors, heads: Iterable[SavedHeads]) -> None:
        """Restore the state from a checkpoint. Raises ValueError if the heads do not fit it."""
        self._writers = list(saved.writers)
        self._writer_indexes = {origin: index for index, origin in enumerate(self._writers)}
        self._complete = saved.complete
        for name, (dimension, complete) in saved.namespaces.items():
            self._namespaces[name] = Namespace(complete=complete)
            self._namespaces[name].dimension = dimension
        for columns in heads:
            if columns.name in saved.namespaces:
                self._restore_heads(self._namespaces[columns.name], columns)
        self._count = sum(len(known.heads) for known in self._namespaces.values())
        while self._count > self._heads_max:
            self._drop_oldest()

    def _restore_heads(self, known: Namespace, columns: SavedHeads) -> None:
        for key, code, state in columns.rows():
            if code >> ORIGIN_SHIFT >= len(self._writers):
                raise ValueError(f"a head of writer {code >> ORIGIN_SHIFT}, of {len(self._writers)}")
            known.heads[key] = code
            if state == DEAD:
                known.dead.add(key)
            elif state == ALIVE:
                known.dead.discard(key)
        # If several origins have written, it would take long to find out if only one wrote here.
        if known.heads:
            known.writer = 0 if len(self._writers) == 1 else SEVERAL_WRITERS

    def load_states(self, batch: Batch) -> None:
        """Restore from state rows of a snapshot: heads, tombstones, and the most common dimension."""
        for row, (_, origin, counter) in enumerate(batch.state_keys):
            writer = self._writer_indexes.setdefault(origin, len(self._writers))
            if writer == len(self._writers):
                self._writers.append(origin)
            known, vector_id, kind = (
                self._get_namespace(batch.namespaces[row]),
                batch.keys[row],
                batch.kinds[row],
            )
            self._count += vector_id not in known.heads
            known.note_writer(writer)
            known.heads[vector_id] = writer << ORIGIN_SHIFT | counter
            if kind == Kind.DELETE:
                known.dead.add(vector_id)
            elif kind in VECTOR_KINDS:
                width = int(batch.value_bounds[row + 1] - batch.value_bounds[row])
                known.widths[width] = known.widths.get(width, 0) + 1
                known.dimension = max(known.widths, key=known.widths.__getitem__)
        while self._count > self._heads_max:
            self._drop_oldest()

    # --- helpers

    def _dot(self, code: int) -> Dot:
        return Dot(self._writers[code >> ORIGIN_SHIFT], code & _COUNTER_MASK)

    def check_rows(self, batch: Batch) -> None:
        """Check row by row, since a row may depend on an earlier row of the batch. Raises InvalidDelta."""
        if not batch.kinds_mask & PARTIAL_BITS:
            width = batch.values_per_row if batch.kinds_mask & VECTOR_BITS else 0
            widths_after = {self.dimension(name) or width for name in batch.namespace_names}
            if width == 0 or (width is not None and widths_after == {width}):
                return  # rows of the other kinds always apply
        alive: dict[tuple[str, str], bool] = {}
        named = {name: self._namespaces.get(name) for name in batch.namespace_names}
        dimensions = {name: 0 if known is None else known.dimension for name, known in named.items()}
        codes = self._head_codes(batch) if batch.kinds_mask & PARTIAL_BITS else []
        widths = np.diff(batch.value_bounds).tolist() if batch.kinds_mask & VECTOR_BITS else []
        highest, keys = batch.highest_index, batch.keys
        for row, (namespace, kind) in enumerate(zip(batch.namespaces, batch.kinds, strict=True)):
            if kind in VECTOR_KINDS:
                fixed, width = dimensions[namespace], widths[row]
                if width != fixed:
                    if fixed:
                        raise wrong_dimension(namespace, width, fixed, row)
                    dimensions[namespace] = width
            elif kind in PARTIAL_KINDS:
                is_alive = alive.get((namespace, keys[row])) if alive else None
                if is_alive is None:
                    known = named[namespace]
                    is_alive = codes[row] is not None and known is not None and keys[row] not in known.dead
                    is_alive = is_alive or self._is_alive(known, keys[row])
                if is_alive is False:
                    raise missing_vector(namespace, keys[row], Kind(kind), row)
                if kind in SPARSE_KINDS and 0 < dimensions[namespace] <= highest:
                    self._check_indices(batch, row, dimensions[namespace])
            if kind in _LIFE_KINDS:
                alive[namespace, keys[row]] = kind != Kind.DELETE
            elif kind not in PARTIAL_KINDS:  # an unknown operation, which may create its vector
                known = named[namespace]
                alive.setdefault((namespace, keys[row]), known is None or keys[row] not in known.dead)

    def _check_indices(self, batch: Batch, row: int, dimension: int) -> None:
        bounds = batch.index_bounds
        indices = batch.indices[bounds[row] : bounds[row + 1]]
        if len(indices) and int(indices.max()) >= dimension:
            raise wrong_index(int(indices.max()), dimension, row)

    def _is_alive(self, known: Namespace | None, vector_id: str) -> bool | None:
        """Return True if a vector is known to be alive, False if it is known to be missing or deleted, None
        otherwise.
        """
        if known is None:
            return False if self._complete else None
        if vector_id in known.heads:
            return vector_id not in known.dead
        return False if known.complete else None

    def _head_or_load(
        self, namespace: str, vector_id: str, load: Callable[[str, str], Head | None]
    ) -> Head | None:
        head = self.stored_head(namespace, vector_id)
        if head is None and self.is_incomplete(namespace):
            return load(namespace, vector_id)
        return head

    def write_heads(self, batch: Batch, writer: int, codes: Iterator[int], source: Source) -> None:
        """Write the head of each row, its tombstone, and the dimension of its namespace."""
        named = {name: self._get_namespace(name) for name in batch.namespace_names}
        count_before = sum([len(known.heads) for known in named.values()])
        for known in named.values():
            known.note_writer(writer)
        self._write_each_row(named, batch, codes, is_replica=source is Source.REPLICA)
        self._count += sum([len(known.heads) for known in named.values()]) - count_before

    def _write_each_row(
        self, named: dict[str, Namespace], batch: Batch, codes: Iterator[int], *, is_replica: bool
    ) -> None:
        widths = np.diff(batch.value_bounds).tolist() if batch.kinds_mask & VECTOR_BITS else []
        if batch.namespace is not None and batch.kind is not None:
            self._write_uniform(named[batch.namespace], batch, batch.kind, codes, is_replica=is_replica)
            return
        for row, (namespace, vector_id, kind, code) in enumerate(
            zip(batch.namespaces, batch.keys, batch.kinds, codes, strict=False)
        ):
            known = named[namespace]
            known.heads[vector_id] = code
            if kind == Kind.DELETE and not is_replica:
                known.dead.add(vector_id)
            elif known.dead and (kind in FULL_KINDS or is_replica):
                # A forwarded delete may sort before the present head, so the vector may still be alive.
                known.dead.discard(vector_id)
            if not known.dimension and kind in VECTOR_KINDS:
                known.dimension = widths[row]

    def _write_uniform(
        self, known: Namespace, batch: Batch, kind: int, codes: Iterator[int], *, is_replica: bool
    ) -> None:
        """Write rows of one kind and namespace: the same as row by row, in three calls."""
        known.heads.update(zip(batch.keys, codes, strict=False))
        if kind == Kind.DELETE and not is_replica:
            known.dead.update(batch.keys)
        elif known.dead and (kind in FULL_KINDS or is_replica):
            known.dead.difference_update(batch.keys)
        if not known.dimension and kind in VECTOR_KINDS:
            known.dimension = int(batch.value_bounds[1])

    def _get_namespace(self, namespace: str) -> Namespace:
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = Namespace(complete=self._complete)
        return known

    def _drop_oldest(self) -> None:
        """Drop about a quarter of the heads: those written first, in the largest namespaces."""
        for known in sorted(self._namespaces.values(), key=lambda known: len(known.heads), reverse=True):
            if self._count <= 3 * self._heads_max // 4:
                return
            for vector_id in list(known.heads)[: max(len(known.heads) // 2, 1)]:
                del known.heads[vector_id]
                known.dead.discard(vector_id)
                self._count -= 1
            known.complete = False


def wrong_dimension(namespace: str, width: int, fixed: int, row: int) -> InvalidDelta:
    """Return the refusal of a vector with another number of values than its namespace's."""
    return InvalidDelta(
        "vector",
        f"{width} numbers, but namespace {namespace!r} holds vectors of {fixed}: "
        "send that many, or use another namespace",
        row=row,
    )


def wrong_index(index: int, dimension: int, row: int) -> InvalidDelta:
    """Return the refusal of an index outside its vector."""
    return InvalidDelta(
        "indices", f"{index} is outside 0 to {dimension - 1}: send indices within the vector", row=row
    )


def missing_vector(namespace: str, vector_id: str, kind: Kind, row: int) -> InvalidDelta:
    """Return the refusal of a change of a vector that does not exist."""
    return InvalidDelta(
        "vector_id",
        f"{vector_id!r} in namespace {namespace!r} is unknown or deleted, but "
        f"{kind.name.lower()} needs a living vector: create it first",
        row=row,
    )


def find_concurrent_rows(
    codes: Sequence[int | None], writer: int, limit_of: Callable[[int], int]
) -> list[int]:
    """Find the rows whose vector was last changed by a delta of another origin that `writer` has not seen.

    `codes`: the heads of the rows. `limit_of`: returns, for the index of an origin, the code of the last of
    its deltas that the writer has seen.
    """
    lowest = writer << ORIGIN_SHIFT
    highest = lowest | _COUNTER_MASK
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
