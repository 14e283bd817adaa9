"""What the edge knows of vectors: the last dot of each, whether it lives, each namespace's dimension.

Pure and bounded. It refuses where it knows; what it no longer knows it lets pass, since the fold of
the log is the truth and ignores an operation that has nothing to work on.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import compress, count, islice
from operator import contains, setitem
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.ingest.expectations import check_expects
from delta_prop.ingest.namespaces import (
    COUNTER_MASK,
    DELETE_BIT,
    IS_PARTIAL,
    ORIGIN_SHIFT,
    PARTIAL_BITS,
    SEVERAL,
    VECTOR_BITS,
    VECTOR_KINDS,
    Namespace,
    Table,
    all_apply,
    firsts,
    get,
    keys_of,
    unseen,
)
from delta_prop_wire.batch import SPARSE_KINDS
from delta_prop_wire.delta import PARTIAL_KINDS, WHOLE_KINDS, Dot, Head, Kind, Source
from delta_prop_wire.errors import InvalidDelta, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from delta_prop_wire.batch import Batch

HEADS_MAX = 2_000_000
_LIFE_KINDS = WHOLE_KINDS | {Kind.DELETE}
_SPARSE_BITS = sum(1 << kind for kind in SPARSE_KINDS)
_TABLES_MAX = 256
_NO_HEADS: dict[str, int] = {}


class SavedVectors(NamedTuple):
    """Origins that have written, in the order of their places; each namespace's dimension and whether all of
    its heads are held; whether those of all namespaces not named are.
    """

    writers: tuple[int, ...]
    namespaces: dict[str, tuple[int, bool]]
    complete: bool


class Vectors:
    """Heads, tombstones and dimensions, moved only by what was appended."""

    def __init__(self, *, heads_max: int = HEADS_MAX) -> None:
        self._heads_max = heads_max
        self._namespaces: dict[str, Namespace] = {}
        self._origins: dict[int, int] = {}
        self._by_place: list[int] = []
        self._count = 0
        self._complete = True
        # They hold until anything moves but heads that go the same way.
        self._tables: dict[tuple[str, ...], Table] = {}
        self._tables_of = -1
        self._looked_up: tuple[Batch, list[int | None]] | None = None
        self._found_heads: tuple[Batch, list[dict[str, int]]] | None = None
        self.conflicts = 0

    @property
    def writers(self) -> int:
        """How many origins have written."""
        return len(self._by_place)

    @property
    def held(self) -> int:
        """How many vectors have a head here."""
        return self._count

    def head(self, namespace: str, vector_id: str) -> Dot | None:
        """The last dot of a vector, None where none is held."""
        known = self._namespaces.get(namespace)
        code = None if known is None else known.heads.get(vector_id)
        return None if code is None else self._dot(code)

    def may_lack(self, namespace: str) -> bool:
        """Whether a vector without a head here may have one all the same."""
        known = self._namespaces.get(namespace)
        return not (self._complete if known is None else known.complete)

    def dimension(self, namespace: str) -> int:
        """The dimension that the namespace's first vector fixed, 0 before it."""
        known = self._namespaces.get(namespace)
        return 0 if known is None else known.dimension

    def note_past(self, dimensions: Mapping[str, int]) -> None:
        """A sink holds vectors of an earlier log: absence proves nothing, and dimensions are fixed.

        Raises UsageError where they are fixed otherwise already.
        """
        for name, dimension in dimensions.items():
            present = self.dimension(name)
            if present and present != dimension:
                raise UsageError(
                    f"namespace {name!r} holds vectors of {dimension} numbers there, but {present} here: "
                    "attach this sink before publishing, or use another namespace"
                )
        self._complete = False
        self._tables.clear()
        for known in self._namespaces.values():
            known.complete = False
        for name, dimension in dimensions.items():
            self._namespace(name).dimension = dimension

    def check(self, batch: Batch, load: Callable[[str, str], Head | None]) -> None:
        """Raise Refused for the first row that cannot apply: dimension, unknown vector, `expect`."""
        expects = () if batch.plain else batch.expects
        try:
            self._check_apply(batch)
        except InvalidDelta as refusal:
            if expects and min(row for row, _ in expects) < (refusal.row or 0):
                check_expects(batch, partial(self._head, load=load), rows=refusal.row)
            raise
        if expects:
            check_expects(batch, partial(self._head, load=load))

    def _check_apply(self, batch: Batch) -> None:
        namespace, kind = batch.namespace, batch.kind
        if namespace is not None and kind is not None:
            apply = all_apply(self._namespaces.get(namespace), (batch,), kind)
        else:
            apply = self._all_fit(batch)
        if not apply:
            self._check_rows(batch)

    def appended(self, batch: Batch, source: Source) -> None:
        """Move heads, tombstones and dimensions."""
        self._looked_up = None
        self._tables.clear()
        if batch.is_control:
            return
        place = self._origins.setdefault(batch.origin, len(self._by_place))
        if place == len(self._by_place):
            self._by_place.append(batch.origin)
        first = place << ORIGIN_SHIFT | batch.base
        counters = batch.counters if batch.leaps else None
        codes: Iterator[int] = (  # `count` counts such large numbers in half the time that a range takes
            count(first)
            if counters is None
            else iter([place << ORIGIN_SHIFT | int(counter) for counter in counters])
        )
        if batch.namespace is not None and batch.kind is not None:
            known = self._namespace(batch.namespace)
            self._append_alike(known, (batch,), batch.kind, codes, source)
            known.note_writer(place)
        else:
            self._append_rows(batch, codes, source)
        if self._count > self._heads_max:
            self._drop_oldest()

    def append_alike(self, batches: Sequence[Batch], source: Source, seen: Callable[[int], int]) -> bool:
        """`check`, `count_conflicts` and `appended` for plain batches of one origin, namespace and kind whose
        counters go on, in one go; whether they could be: else nothing has changed, and each goes by itself.
        """
        first = batches[0]
        namespace, kind, origin = first.namespace, first.kind, first.origin
        known, place = self._namespaces.get(namespace or ""), self._origins.get(origin)
        if known is None or kind is None or place is None:
            return False
        rows = sum([batch.count for batch in batches])
        alone = known.writer == place
        codes = None if alone else list(map(known.heads.get, keys_of(batches)))
        if self._count + rows > self._heads_max or not all_apply(known, batches, kind, codes):
            return False
        if codes is not None:
            others = unseen(codes, place, self._limits(seen))
            self.conflicts += len(others) if len(batches) == 1 or not others else firsts(others, batches)
            known.note_writer(place)
        self._looked_up = None
        self._tables.clear()
        self._append_alike(known, batches, kind, count(place << ORIGIN_SHIFT | first.base), source)
        return True

    def append_mixed(self, batches: Sequence[Batch], seen: Callable[[int], int]) -> int:
        """`check`, `count_conflicts` and `appended` for sound simple batches of one origin whose rows differ,
        up to the first that moves more than heads: how many.
        """
        place = self._origins.get(batches[0].origin)
        if place is None or self._count + sum([batch.count for batch in batches]) > self._heads_max:
            return 0
        self._looked_up = self._found_heads = None
        if self._tables_of != place:
            self._tables, self._tables_of = {}, place
        limits, done = self._limits(seen), 0
        for batch in batches:
            names = batch.namespace_names
            table = self._tables.get(names) or self._make_table(names, place)
            told = None if table is None else table.append(batch, limits)
            if told is None:
                break
            self._count += told[0]
            self.conflicts += told[1]
            done += 1
        return done

    def other_heads(self, batch_origin: int, rows: Iterator[tuple[str, str]]) -> Iterator[tuple[int, Dot]]:
        """(row, head) for each row whose vector was last written by another origin."""
        own = self._origins.get(batch_origin, -1)
        for row, (namespace, vector_id) in enumerate(rows):
            known = self._namespaces.get(namespace)
            code = None if known is None else known.heads.get(vector_id)
            if code is not None and code >> ORIGIN_SHIFT != own:
                yield row, self._dot(code)

    def count_conflicts(self, batch: Batch, seen: Callable[[int], int]) -> None:
        """Count the rows whose vector was last changed by an origin whose change this batch had not seen.

        `seen`: up to which counter of an origin it has. Ask before the batch is appended.
        """
        place = self._origins.get(batch.origin, -1)
        named = [self._namespaces.get(name) for name in batch.namespace_names]
        if all(known is None or known.writer in (None, place) for known in named):
            return
        codes = self._codes(batch)
        rows = unseen(codes, place, self._limits(seen))
        if batch.plain or not rows:
            self.conflicts += len(rows)
            return
        parents = set(batch.parents)
        self.conflicts += sum([(row, self._dot(codes[row] or 0)) not in parents for row in rows])

    def _limits(self, seen: Callable[[int], int]) -> Callable[[int], int]:
        """Of the origin of a place the highest head that has been seen."""
        return lambda place: place << ORIGIN_SHIFT | seen(self._by_place[place])

    def _codes(self, batch: Batch) -> list[int | None]:
        """The head of each row before the batch is appended; looked up once, as till then nothing moves."""
        looked_up = self._looked_up
        if looked_up is not None and looked_up[0] is batch:
            return looked_up[1]
        codes: list[int | None]
        if batch.namespace is not None:
            known = self._namespaces.get(batch.namespace)
            codes = [None] * batch.count if known is None else list(map(known.heads.get, batch.keys))
        else:
            codes = list(map(get, self._heads_of(batch), batch.keys))
        self._looked_up = (batch, codes)
        return codes

    def _heads_of(self, batch: Batch) -> list[dict[str, int]]:
        """Of each row all the heads of its namespace, so that rows are looked up in one call, not a loop."""
        found = self._found_heads
        if found is not None and found[0] is batch:
            return found[1]
        named = {
            name: _NO_HEADS if (known := self._namespaces.get(name)) is None else known.heads
            for name in batch.namespace_names
        }
        rows = list(map(named.__getitem__, batch.namespaces))
        if all(name in self._namespaces for name in named):  # else they are others as soon as it is appended
            self._found_heads = batch, rows
        return rows

    # --- checkpoints

    def saved(self) -> SavedVectors:
        """What is small of it; heads are asked for by namespace with `copied`."""
        return SavedVectors(
            tuple(self._by_place),
            {name: (known.dimension, known.complete) for name, known in self._namespaces.items()},
            self._complete,
        )

    def copied(self, namespace: str, rows: int) -> Iterator[tuple[list[str], list[int | None], bytes]]:
        """The vectors of a namespace that have a head now, so many at a time: the codes of their heads, and
        which are dead, as they are when they are asked for. None: it was dropped meanwhile.

        As long as none comes and none goes they are walked through, in a tenth of the time that it takes to
        look each up.
        """
        known = self._namespaces[namespace]
        keys, names, codes = list(known.heads), iter(known.heads), iter(known.heads.values())
        walks = True
        for first in range(0, len(keys), rows):
            some, found = keys[first : first + rows], list[int | None]()
            if walks:
                try:
                    walks, found = list(islice(names, rows)) == some, list(islice(codes, rows))
                except RuntimeError:  # the table has grown or shrunk
                    walks = False
            if not walks:
                found = list(map(known.heads.get, some))
            dead = bytes(map(known.dead.__contains__, some)) if known.dead else bytes(len(some))
            yield some, found, dead

    def restore(self, saved: SavedVectors, heads: Mapping[str, tuple[dict[str, int], set[str]]]) -> None:
        """Begin with what a checkpoint holds."""
        self._looked_up = self._found_heads = None
        self._tables.clear()
        self._by_place = list(saved.writers)
        self._origins = {origin: place for place, origin in enumerate(self._by_place)}
        self._complete = saved.complete
        for name, (dimension, complete) in saved.namespaces.items():
            known = self._namespaces[name] = Namespace(complete=complete)
            known.dimension = dimension
            known.heads, known.dead = heads.get(name, ({}, set()))
            # Where several have written it may be one here, which would take long to find out.
            if known.heads:
                known.writer = 0 if len(self._by_place) == 1 else SEVERAL
        self._count = sum(len(known.heads) for known in self._namespaces.values())
        if self._count > self._heads_max:
            self._drop_oldest()

    def take_states(self, batch: Batch) -> None:
        """Begin with state rows of a snapshot: heads, tombstones, dimensions: that of most vectors."""
        self._tables.clear()
        for row, (_, origin, counter) in enumerate(batch.state_keys):
            place = self._origins.setdefault(origin, len(self._by_place))
            if place == len(self._by_place):
                self._by_place.append(origin)
            known, vector_id, kind = self._namespace(batch.namespaces[row]), batch.keys[row], batch.kinds[row]
            self._count += vector_id not in known.heads
            known.note_writer(place)
            known.heads[vector_id] = place << ORIGIN_SHIFT | counter
            if kind == Kind.DELETE:
                known.dead.add(vector_id)
            elif kind in VECTOR_KINDS:
                width = int(batch.value_bounds[row + 1] - batch.value_bounds[row])
                known.widths[width] = known.widths.get(width, 0) + 1
                known.dimension = max(known.widths, key=known.widths.__getitem__)
        if self._count > self._heads_max:
            self._drop_oldest()

    # --- helpers

    def _make_table(self, names: tuple[str, ...], place: int) -> Table | None:
        """What these namespaces have in common now; None where one is unknown."""
        named = {name: known for name in names if (known := self._namespaces.get(name)) is not None}
        if len(named) < len(names):  # one twice, too
            return None
        if len(self._tables) >= _TABLES_MAX:
            self._tables.clear()
        table = self._tables[names] = Table([*named.values()], place)
        return table

    def _dot(self, code: int) -> Dot:
        return Dot(self._by_place[code >> ORIGIN_SHIFT], code & COUNTER_MASK)

    def _all_fit(self, batch: Batch) -> bool:
        """The short way for rows of several namespaces or kinds: whether all of them apply, whatever stands
        before them in the batch. Where that is not plain to see, `_check_rows` looks at each.
        """
        kinds, highest, keys = batch.kinds_mask, batch.index_highest, batch.keys
        for name in batch.namespace_names:
            known = self._namespaces.get(name)
            if known is None or (known.dead and not known.dead.isdisjoint(keys)):
                return False
            if kinds & VECTOR_BITS and not 0 < known.dimension == batch.dimension:
                return False
            if kinds & _SPARSE_BITS and 0 < known.dimension <= highest:
                return False
        if kinds & DELETE_BIT or not kinds & PARTIAL_BITS:
            return not kinds & PARTIAL_BITS
        partial = batch.kinds.translate(IS_PARTIAL)
        return all(map(contains, compress(self._heads_of(batch), partial), compress(keys, partial)))

    def _check_rows(self, batch: Batch) -> None:
        """Row by row, as a row may build on one before it in the same batch."""
        alive: dict[tuple[str, str], bool] = {}
        named = {name: self._namespaces.get(name) for name in batch.namespace_names}
        dimensions = {name: 0 if known is None else known.dimension for name, known in named.items()}
        codes = self._codes(batch) if batch.kinds_mask & PARTIAL_BITS else []
        widths = np.diff(batch.value_bounds).tolist() if batch.kinds_mask & VECTOR_BITS else []
        highest, keys = batch.index_highest, batch.keys
        for row, (namespace, kind) in enumerate(zip(batch.namespaces, batch.kinds, strict=True)):
            if kind in VECTOR_KINDS:
                fixed, found = dimensions[namespace], widths[row]
                if found != fixed:
                    if fixed:
                        raise _of_another_dimension(namespace, found, fixed, row)
                    dimensions[namespace] = found
            elif kind in PARTIAL_KINDS:
                lives = alive.get((namespace, keys[row])) if alive else None
                if lives is None:
                    known = named[namespace]
                    lives = codes[row] is not None and known is not None and keys[row] not in known.dead
                    lives = lives or self._lives(known, keys[row])
                if lives is False:
                    raise InvalidDelta(
                        "vector_id",
                        f"{keys[row]!r} in namespace {namespace!r} is unknown or deleted, and "
                        f"{Kind(kind).name.lower()} needs a living vector: create it first",
                        row=row,
                    )
                if kind in SPARSE_KINDS and 0 < dimensions[namespace] <= highest:
                    self._check_indices(batch, row, dimensions[namespace])
            if kind in _LIFE_KINDS:
                alive[namespace, keys[row]] = kind != Kind.DELETE

    def _check_indices(self, batch: Batch, row: int, dimension: int) -> None:
        bounds = batch.index_bounds
        indices = batch.indices[bounds[row] : bounds[row + 1]]
        if len(indices) and int(indices.max()) >= dimension:
            raise InvalidDelta(
                "indices",
                f"{int(indices.max())} is not from 0 to {dimension - 1}, the last of its vector",
                row=row,
            )

    def _lives(self, known: Namespace | None, vector_id: str) -> bool | None:
        """True, False, or None where that is not known."""
        if known is None:
            return False if self._complete else None
        if vector_id in known.heads:
            return vector_id not in known.dead
        return False if known.complete else None

    def _head(self, namespace: str, vector_id: str, load: Callable[[str, str], Head | None]) -> Head | None:
        dot = self.head(namespace, vector_id)
        if dot is None:
            return load(namespace, vector_id) if self.may_lack(namespace) else None
        return Head(dot, vector_id not in self._namespaces[namespace].dead)

    def _append_alike(
        self, known: Namespace, batches: Sequence[Batch], kind: int, codes: Iterator[int], source: Source
    ) -> None:
        before = len(known.heads)
        for batch in batches:  # one by one: a long call would keep the thread that commits from going on
            known.heads.update(zip(batch.keys, codes, strict=False))
        self._count += len(known.heads) - before
        if kind == Kind.DELETE and source is not Source.REPLICA:
            known.dead.update(keys_of(batches))
        elif known.dead and (kind in WHOLE_KINDS or source is Source.REPLICA):
            known.dead.difference_update(keys_of(batches))
        if not known.dimension and kind in VECTOR_KINDS:
            known.dimension = batches[0].row_values or 0

    def _append_rows(self, batch: Batch, codes: Iterator[int], source: Source) -> None:
        named = {name: self._namespace(name) for name in batch.namespace_names}
        place, before = self._origins[batch.origin], sum([len(known.heads) for known in named.values()])
        replica = source is Source.REPLICA
        for known in named.values():
            known.note_writer(place)
        if self._heads_alone(named, batch, replica=replica):
            deque(map(setitem, self._heads_of(batch), batch.keys, codes), maxlen=0)
        else:
            self._append_each(named, batch, codes, replica=replica)
        self._found_heads = None
        self._count += sum([len(known.heads) for known in named.values()]) - before

    def _heads_alone(self, named: dict[str, Namespace], batch: Batch, *, replica: bool) -> bool:
        """Whether heads are all that a mixed batch moves: no tombstone, no dimension."""
        kinds, keys = batch.kinds_mask, batch.keys
        return (
            (replica or not kinds & DELETE_BIT)
            and all(not known.dead or known.dead.isdisjoint(keys) for known in named.values())
            and (not kinds & VECTOR_BITS or all(known.dimension for known in named.values()))
        )

    def _append_each(
        self, named: dict[str, Namespace], batch: Batch, codes: Iterator[int], *, replica: bool
    ) -> None:
        widths = np.diff(batch.value_bounds).tolist() if batch.kinds_mask & VECTOR_BITS else []
        for row, (namespace, vector_id, kind, code) in enumerate(
            zip(batch.namespaces, batch.keys, batch.kinds, codes, strict=False)
        ):
            known = named[namespace]
            known.heads[vector_id] = code
            if kind == Kind.DELETE and not replica:
                known.dead.add(vector_id)
            elif known.dead and (kind in WHOLE_KINDS or replica):
                # A forwarded delete may sort before what is here: its vector may live, so nothing is claimed.
                known.dead.discard(vector_id)
            if not known.dimension and kind in VECTOR_KINDS:
                known.dimension = widths[row]

    def _namespace(self, namespace: str) -> Namespace:
        known = self._namespaces.get(namespace)
        if known is None:
            known = self._namespaces[namespace] = Namespace(complete=self._complete)
        return known

    def _drop_oldest(self) -> None:
        """Make room for a quarter: of the largest namespaces, drop what was first written longest ago."""
        for known in sorted(self._namespaces.values(), key=lambda one: len(one.heads), reverse=True):
            if self._count <= 3 * self._heads_max // 4:
                return
            for vector_id in list(known.heads)[: max(len(known.heads) // 2, 1)]:
                del known.heads[vector_id]
                known.dead.discard(vector_id)
                self._count -= 1
            known.complete = False


def _of_another_dimension(namespace: str, found: int, fixed: int, row: int) -> InvalidDelta:
    return InvalidDelta(
        "vector",
        f"{found} numbers, but namespace {namespace!r} holds vectors of {fixed}: "
        "send that many, or use another namespace",
        row=row,
    )
