"""The native table of heads: the same answers as `VectorHeads`, from `delta_prop_core`.

Pure and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from delta_prop_core import Heads

from delta_prop.partition.ingest.heads import ORIGIN_SHIFT
from delta_prop.partition.ingest.vector_heads import (
    HEADS_MAX,
    VECTOR_KINDS,
    SavedVectors,
    VectorHeads,
    missing_vector,
    wrong_dimension,
    wrong_index,
)
from delta_prop_wire.delta import Dot, Head, Kind, Source

if TYPE_CHECKING:
    from delta_prop.partition.ingest.heads import SavedHeads
    from delta_prop_wire.batch import Batch


class NativeVectorHeads(VectorHeads):
    """Heads, tombstones and dimensions, in a native table."""

    def __init__(self, *, heads_max: int = HEADS_MAX) -> None:
        super().__init__(heads_max=heads_max)
        self._heads = Heads(heads_max)

    @property
    def writer_count(self) -> int:
        return self._heads.writer_count

    @property
    def head_count(self) -> int:
        return self._heads.count

    def stored_head(self, namespace: str, vector_id: str) -> Head | None:
        head = self._heads.head(namespace, vector_id)
        return None if head is None else Head(Dot(*head[:2]), not head[2])

    def is_incomplete(self, namespace: str) -> bool:
        return not self._heads.namespace(namespace)[1]

    def dimension(self, namespace: str) -> int:
        return self._heads.namespace(namespace)[0]

    def note_appended(self, batch: Batch, source: Source) -> None:
        if not batch.is_control:
            self._heads.note_appended(batch.raw, source is Source.REPLICA)

    def append_run(self, batches: Sequence[Batch], source: Source, seen: Callable[[int], int]) -> int:
        raws = [batch.raw for batch in batches]
        noted, concurrent = self._heads.append_run(raws, source is Source.REPLICA, seen)
        self.concurrent_updates += concurrent
        return noted

    def other_heads(self, batch_origin: int, rows: Iterator[tuple[str, str]]) -> Iterator[tuple[int, Dot]]:
        for row, *dot in self._heads.other_heads(batch_origin, list(rows)):
            yield row, Dot(*dot)

    def check(self, batch: Batch, load: Callable[[str, str], Head | None]) -> None:
        if batch.homogeneous:  # then no row expects anything
            self.check_rows(batch)
        else:
            super().check(batch, load)

    def check_rows(self, batch: Batch) -> None:
        fault = self._heads.check(batch.raw)
        if fault is None:
            return
        row, reason, number, bound = fault
        namespace = batch.namespaces[row]
        if reason == "dimension":
            raise wrong_dimension(namespace, number, bound, row)
        if reason == "index":
            raise wrong_index(number, bound, row)
        raise missing_vector(namespace, batch.keys[row], Kind(batch.kinds[row]), row)

    def _concurrent_heads(self, batch: Batch, seen: Callable[[int], int]) -> list[tuple[int, Dot]]:
        return [(row, Dot(*dot)) for row, *dot in self._heads.concurrent_rows(batch.raw, seen)]

    # --- checkpoints

    def save(self) -> SavedVectors:
        heads = self._heads
        namespaces = {name: (dimension, complete) for name, dimension, complete in heads.namespaces()}
        return SavedVectors(tuple(heads.writers), namespaces, heads.is_complete)

    def copy_heads(self, namespace: str, rows: int) -> Iterator[tuple[list[str], list[int | None], bytes]]:
        """Yield as `VectorHeads` does, except for vectors whose head was dropped meanwhile."""
        first, end = self._heads.head_range(namespace)
        for start in range(first, end, rows):
            keys, writers, counters, dead = self._heads.copy_heads(namespace, start, min(start + rows, end))
            codes: list[int | None] = [
                writer << ORIGIN_SHIFT | counter for writer, counter in zip(writers, counters, strict=True)
            ]
            yield keys, codes, bytes(dead)

    def restore(self, saved: SavedVectors, heads: Iterable[SavedHeads]) -> None:
        self._heads.restore_writers(saved.writers, saved.complete)
        for name, (dimension, complete) in saved.namespaces.items():
            self._heads.set_namespace(name, dimension, complete)
        for columns in heads:
            if columns.name in saved.namespaces:
                self._heads.restore_heads(*columns)
        self._heads.keep_bound()

    def load_states(self, batch: Batch) -> None:
        bounds, namespaces = batch.value_bounds.tolist(), batch.namespaces
        for row, (_, origin, counter) in enumerate(batch.state_keys):
            kind = batch.kinds[row]
            width = bounds[row + 1] - bounds[row] if kind in VECTOR_KINDS else None
            self._heads.load_state(
                namespaces[row], batch.keys[row], (origin, counter), kind == Kind.DELETE, width
            )
        self._heads.keep_bound()

    def forget(self, namespace: str, vector_id: str) -> bool:
        return self._heads.forget(namespace, vector_id)

    def _forget_absence(self) -> None:
        self._heads.make_incomplete()

    def _fix_dimension(self, namespace: str, dimension: int) -> None:
        self._heads.set_namespace(namespace, dimension, None)
