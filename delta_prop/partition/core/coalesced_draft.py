"""Calls of several callers coalesced into one draft: rows are adjacent, each caller gets its own result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

from delta_prop.calls.argument_checks import check_columns, check_sparse_columns, is_transform
from delta_prop.calls.receipt import Receipt, ReceiptGroup
from delta_prop.partition.ingest.work import Draft, MatrixDraft
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Priority, Source
from delta_prop_wire.encode import encode_rows

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from delta_prop_wire.batch import Batch

Call: TypeAlias = Draft | MatrixDraft
"""One caller's deltas, checked: a draft with a single delta, or columns."""

ROWS_MAX = 1_000
"""Maximum rows of one draft: more gain nothing, and the first would wait for the last."""
BYTES_MAX = 1 << 20
"""Maximum approximate size of one draft, in bytes."""


def can_share_batch(delta: Delta) -> bool:
    """True if a valid delta names no other delta and no id, so that it may share a batch with others."""
    return (
        delta.id is None
        and delta.dot is None
        and delta.expect is None
        and not delta.parents
        and not delta.clock
        and delta.source is Source.LOCAL
        and not is_transform(delta)
    )


def draft_from_columns(
    ids: Sequence[str],
    matrix: ArrayLike,
    indices: ArrayLike | None,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
    ack_level: AckLevel,
) -> MatrixDraft:
    """Return the draft of columns. Raises InvalidDelta, UsageError."""
    pack, numbers = core_mode.core.pack_columns, (matrix, indices)
    packed = pack(ids, matrix, indices, namespace, kind) if type(priority) is Priority else None
    if packed is None:
        if indices is None:
            numbers = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority), None
        else:
            numbers = check_sparse_columns(
                ids, matrix, indices, namespace=namespace, kind=kind, priority=priority
            )
        packed = pack([*ids], numbers[0], numbers[1], namespace, kind)
    rows, index_rows = cast("tuple[NDArray[np.float32], NDArray[np.uint32] | None]", numbers)
    return MatrixDraft(
        ids, rows, namespace, kind, Receipt(), priority, ack_level, indices=index_rows, packed=packed
    )


class CoalescedDraft:
    """A draft of one or more calls of one priority and ack level."""

    clock: ClassVar[frozenset[Dot]] = frozenset()
    __slots__ = ("ack_level", "calls", "count", "priority", "receipt", "size")

    def __init__(self, calls: Sequence[Call], counts: Sequence[int], size: int) -> None:
        """`counts`: the number of rows of each call. `size`: approximate size in bytes."""
        self.calls, self.count, self.size = calls, sum(counts), size
        self.priority, self.ack_level = calls[0].priority, calls[0].ack_level
        self.receipt = calls[0].receipt
        if len(calls) > 1:
            self.receipt = ReceiptGroup([call.receipt for call in calls], counts)

    @property
    def is_single(self) -> bool:
        """True if it has one call."""
        return len(self.calls) == 1

    def halves(self) -> list[CoalescedDraft]:
        """Return two drafts with the first and the other calls."""
        middle = len(self.calls) // 2
        return [
            CoalescedDraft(calls, [call.count for call in calls], sum([call.size for call in calls]))
            for calls in (self.calls[:middle], self.calls[middle:])
        ]

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        return [vector for call in self.calls for vector in call.vectors()]

    def encode(self, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int) -> Batch:
        """Return the batch of all rows with the dots from (origin, base) on; none of them is a duplicate."""
        packed = [call.packed for call in self.calls if call.packed is not None]
        if len(packed) == len(self.calls):
            batch = encode_rows(
                packed,
                origin=origin,
                base=base,
                clock=clock,
                ack_level=self.ack_level,
                priority=self.priority,
                hybrid_time=hybrid_time,
            )
            if batch is not None:
                return batch
        draft = self.calls[0]
        if isinstance(draft, Draft):  # then all are
            draft = replace(draft, deltas=[call.deltas[0] for call in self.calls if isinstance(call, Draft)])
        return draft.encode(None, origin=origin, base=base, clock=clock, hybrid_time=hybrid_time)


def group_calls(calls: Iterable[Call]) -> Iterator[CoalescedDraft]:
    """Group neighbouring calls within the bounds, in order.

    The calls of a group have one priority and ack level. Either each has a single delta, or all have columns
    of one namespace, kind and width.
    """
    group: list[Call] = []
    counts: list[int] = []
    group_key: tuple[object, ...] = ()
    row_count = size = 0
    for call in calls:
        count, call_size, columns_key = 1, call.size, None
        if type(call) is MatrixDraft:
            count, columns_key = call.count, call.packed.key if call.packed else id(call)
        key = call.priority, call.ack_level, columns_key
        fits = key == group_key and row_count + count <= ROWS_MAX and size + call_size <= BYTES_MAX
        if group and not fits:
            yield CoalescedDraft(group, counts, size)
            group, counts, row_count, size = [], [], 0, 0
        group_key = key
        group.append(call)
        counts.append(count)
        row_count += count
        size += call_size
    if group:
        yield CoalescedDraft(group, counts, size)
