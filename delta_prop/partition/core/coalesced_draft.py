"""Calls of several callers coalesced into one draft: rows are adjacent, each caller gets its own result.

A call whose rows must be checked one by one is not coalesced; its caller sends it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from delta_prop.calls.argument_checks import check_columns, check_deltas, check_sparse_columns, is_transform
from delta_prop.calls.outcomes import PublishAck
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import DELTA_OVERHEAD_BYTES, Draft, MatrixDraft
from delta_prop_wire.batch import SPARSE_KINDS, Batch
from delta_prop_wire.bounds import NUMBERS_MAX, NUMBERS_MIN, all_finite, name_is_valid
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Operation, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_columns
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import (
    BATCH_ROWS_MAX,
    DELTA_BYTES_MAX,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Call: TypeAlias = Draft | MatrixDraft
"""One caller's deltas: a draft with a single delta, or columns."""

ROWS_MAX = 1_000
"""Maximum rows of one draft: more gain nothing, and the first would wait for the last."""
BYTES_MAX = 1 << 20
"""Maximum approximate size of one draft, in bytes."""

_KINDS = frozenset({Kind.CREATE, Kind.DENSE, *SPARSE_KINDS})
_F32, _U32 = np.dtype(np.float32), np.dtype(np.uint32)


def can_coalesce(delta: Delta) -> bool:
    """True if a delta has nothing but numbers for one vector; its bounds are checked later."""
    if not isinstance(delta, Delta) or not isinstance(delta.operation, Operation):
        return False
    operation = delta.operation
    values, indices = operation.values, operation.indices
    return (
        operation.kind in _KINDS
        and type(values) is np.ndarray
        and values.dtype == _F32
        and values.ndim == 1
        and values.flags.c_contiguous
        and (
            indices is None
            if operation.kind not in SPARSE_KINDS
            else type(indices) is np.ndarray
            and indices.dtype == _U32
            and indices.shape == values.shape
            and indices.flags.c_contiguous
        )
        and delta.metadata is None
        and delta.id is None
        and delta.dot is None
        and delta.expect is None
        and delta.parents == ()
        and delta.clock == ()
        and delta.topics == ()
        and delta.timestamp == 0
        and delta.source is Source.LOCAL
        and type(delta.priority) is Priority
        and not operation.data
    )


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


def draft_from_arrays(
    ids: object,
    matrix: object,
    indices: object,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
    ack_level: AckLevel,
) -> MatrixDraft | None:
    """Return the draft of columns; None unless they are arrays of the right types. Checks no bounds."""
    if not (type(ids) is list and type(matrix) is np.ndarray and _is_matrix(matrix, _F32, len(ids))):
        return None
    if kind not in _KINDS or type(priority) is not Priority:
        return None
    if (kind in SPARSE_KINDS) is (indices is None):
        return None
    if indices is not None and not (
        type(indices) is np.ndarray and indices.shape == matrix.shape and _is_matrix(indices, _U32, len(ids))
    ):
        return None
    return MatrixDraft(
        ids, matrix, namespace, kind, Receipt(), priority, ack_level, indices=indices, is_checked=False
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
    """Return the draft of checked columns. Raises InvalidDelta, UsageError."""
    index_rows: NDArray[np.uint32] | None = None
    if indices is None:
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
    else:
        rows, index_rows = check_sparse_columns(
            ids, matrix, indices, namespace=namespace, kind=kind, priority=priority
        )
    return MatrixDraft(ids, rows, namespace, kind, Receipt(), priority, ack_level, indices=index_rows)


def check_call(call: Call) -> None:
    """Check each row of a call that is sent alone. Raises InvalidDelta, UsageError."""
    if isinstance(call, Draft):
        check_deltas(call.deltas)
    elif not call.is_checked:
        draft_from_columns(
            call.keys, call.matrix, call.indices, namespace=call.namespace, kind=call.kind,
            priority=call.priority, ack_level=call.ack_level,
        )  # fmt: skip
        call.is_checked = True


def _is_matrix(numbers: NDArray[np.generic], dtype: np.dtype[np.generic], row_count: int) -> bool:
    return (
        numbers.dtype == dtype
        and numbers.ndim == 2
        and len(numbers) == row_count
        and 0 < row_count <= BATCH_ROWS_MAX
        and numbers.flags.c_contiguous
    )


class CoalescedDraft:
    """A draft of one or more calls of one kind, namespace, width, priority and ack level."""

    clock: ClassVar[frozenset[Dot]] = frozenset()
    __slots__ = (
        "_ascii_keys",
        "_indices",
        "_is_checked",
        "_values",
        "ack_level",
        "count",
        "is_single",
        "keys",
        "kind",
        "namespace",
        "priority",
        "receipt",
        "size",
        "width",
    )  # fmt: skip

    def __init__(self, calls: Sequence[Call], key: BatchKey) -> None:
        """`key`: the `batch_key` of each call."""
        first = calls[0]
        kind, self.namespace, self.width, self.priority, self.ack_level = key
        assert kind is not None, "the call holds more than numbers"
        self.kind = kind
        self.is_single = len(calls) == 1
        self.receipt: Receipt = first.receipt if self.is_single else _ReceiptGroup(calls)
        keys: list[str] = []
        is_checked = True
        values: list[memoryview] = []
        indices: list[memoryview] = []
        for call in calls:
            if isinstance(call, Draft):
                delta = call.deltas[0]
                operation, is_checked = delta.operation, False
                keys.append(delta.vector_id)
                call_values, call_indices = operation.values, operation.indices
                assert call_values is not None
            else:
                is_checked = is_checked and call.is_checked
                keys.extend(call.keys)
                call_values, call_indices = call.matrix, call.indices
            values.append(call_values.data)
            if call_indices is not None:
                indices.append(call_indices.data)
        self.keys, self._is_checked = keys, is_checked
        self._ascii_keys: tuple[bytes, bytes] | None = None
        self._values, self._indices = values, indices or None
        self.count = count = len(keys)
        bytes_per_row = (8 if indices else 4) * self.width + DELTA_OVERHEAD_BYTES
        self.size = count * bytes_per_row
        """Approximate size in bytes."""

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        return [(self.namespace, key) for key in self.keys]

    def has_valid_shape(self) -> bool:
        """True if all names and shapes are within the bounds that `check_deltas` checks of each delta."""
        if self._is_checked:
            return True
        self._ascii_keys = core_mode.core.pack_keys(self.keys, VECTOR_ID_BYTES_MAX)
        return (
            self._ascii_keys is not None
            and type(self.namespace) is str
            and name_is_valid(self.namespace, NAMESPACE_BYTES_MAX)
            and NUMBERS_MIN[self.kind] <= self.width <= NUMBERS_MAX[self.kind]
            and 8 * self.width <= DELTA_BYTES_MAX
        )

    def is_valid(self, batch: Batch) -> bool:
        """True if the numbers are within the bounds too; `batch` is the encoded draft."""
        return (
            self._is_checked
            or batch.validated
            or (all_finite(batch.values) and batch.highest_index < DIMENSION_MAX)
        )

    def encode(self, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int) -> Batch:
        """Return the batch of all rows with the dots from (origin, base) on; none of them is a duplicate."""
        return encode_columns(
            self.keys,
            self._values,
            self._indices,
            width=self.width,
            namespace=self.namespace,
            kind=self.kind,
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
            packed_keys=self._ascii_keys,
        )


class JoinedDraft:
    """A draft of calls with one valid delta each, of one priority and ack level; all else may differ."""

    clock: ClassVar[frozenset[Dot]] = frozenset()
    __slots__ = ("_deltas", "ack_level", "count", "is_single", "priority", "receipt", "size")

    def __init__(self, calls: Sequence[Draft]) -> None:
        self._deltas = [call.deltas[0] for call in calls]
        self.priority, self.ack_level = calls[0].priority, calls[0].ack_level
        self.is_single = len(calls) == 1
        self.receipt: Receipt = calls[0].receipt if self.is_single else _ReceiptGroup(calls)
        self.count = len(calls)
        self.size = sum([call.size for call in calls])
        """Approximate size in bytes."""

    def vectors(self) -> list[tuple[str, str]]:
        """Return (namespace, vector id) of each row."""
        return [(delta.namespace, delta.vector_id) for delta in self._deltas]

    def has_valid_shape(self) -> bool:
        """True if each delta passes `check_deltas`."""
        try:
            check_deltas(self._deltas)
        except Refused:
            return False
        return True

    def is_valid(self, _batch: Batch) -> bool:
        """True: `has_valid_shape` has checked everything."""
        return True

    def encode(self, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int) -> Batch:
        """Return the batch of all rows with the dots from (origin, base) on; none of them is a duplicate."""
        return encode_batch(
            self._deltas,
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
        )


def coalesce(calls: Sequence[Call], key: BatchKey | None) -> CoalescedDraft | JoinedDraft:
    """Return one draft of calls that `group_calls` put into one group, with this key."""
    if key is not None and key[0] is not None:
        return CoalescedDraft(calls, key)
    return JoinedDraft([call for call in calls if isinstance(call, Draft)])


class _ReceiptGroup(Receipt):
    """Receipt of a coalesced draft, which passes each outcome on to the receipts of its calls."""

    __slots__ = ("_acks", "_calls")

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self._calls = calls
        self._acks: list[PublishAck] | None = None

    def mark_appended(self, ack: PublishAck | None = None) -> None:
        super().mark_appended(ack)
        if ack is not None:
            self._acks = split_ack(ack, self._calls)
            for call, call_ack in zip(self._calls, self._acks, strict=True):
                call.receipt.mark_appended(call_ack)

    def mark_in_doubt(self) -> None:
        super().mark_in_doubt()
        for call in self._calls:
            call.receipt.mark_in_doubt()

    def acknowledge(self, published: PublishAck) -> None:
        super().acknowledge(published)
        acks = self._acks or split_ack(published, self._calls)
        for call, ack in zip(self._calls, acks, strict=True):
            if not call.receipt.done:
                call.receipt.acknowledge(ack)

    def refuse(self, refusal: Refused) -> None:
        """Refuse each call, if it is appended; otherwise report nothing, since each call is retried alone."""
        super().refuse(refusal)
        for call in self._calls if self._acks is not None else ():
            if not call.receipt.done:
                call.receipt.refuse(refusal)


def split_ack(ack: PublishAck, calls: Iterable[Call]) -> list[PublishAck]:
    """Return each call's part of an acknowledgement."""
    offset, dot, level = ack.offset, ack.dot, ack.level
    assert offset is not None
    assert dot is not None
    origin, counter = dot
    acks: list[PublishAck] = []
    for call in calls:
        count = call.count
        acks.append(PublishAck(offset, Dot(origin, counter), count, level))
        offset += count
        counter += count
    return acks


BatchKey: TypeAlias = tuple[int | None, str, int, Priority, AckLevel]
"""Kind (None: more than numbers), namespace, width, priority and ack level."""


def batch_key(call: Call) -> BatchKey:
    """Return the properties that calls of one draft share; kind None: the call holds more than numbers."""
    if isinstance(call, MatrixDraft):
        return call.kind, call.namespace, call.matrix.shape[1], call.priority, call.ack_level
    delta = call.deltas[0]
    if not can_coalesce(delta):
        return None, "", 0, call.priority, call.ack_level
    values = delta.operation.values
    assert values is not None
    return delta.operation.kind, delta.namespace, len(values), call.priority, call.ack_level


def group_calls(calls: Iterable[Call]) -> Iterator[tuple[list[Call], BatchKey | None]]:
    """Group neighbouring calls within the bounds, in order; yield each group, and its key.

    The calls of a group have one `batch_key`, or they are single deltas of one priority and ack level: then
    the key is None.
    """
    group: list[Call] = []
    has_columns = False  # True once the group holds a column call
    is_mixed = False  # True once the group holds single deltas of several keys; no column call may join then
    group_key: BatchKey | None = None
    row_count = size = 0
    for call in calls:
        key, call_rows = batch_key(call), call.count
        is_single = isinstance(call, Draft)
        call_bytes = call.size if key[0] is None else call_rows * (8 * key[2] + DELTA_OVERHEAD_BYTES)
        has_group_key = key == group_key and not is_mixed
        fits = has_group_key or (
            is_single and not has_columns and group_key is not None and key[3:] == group_key[3:]
        )
        if group and not (fits and row_count + call_rows <= ROWS_MAX and size + call_bytes <= BYTES_MAX):
            yield group, None if is_mixed else group_key
            group, has_columns, is_mixed, row_count, size = [], False, False, 0, 0
        has_columns = has_columns or not is_single
        is_mixed = is_mixed or (bool(group) and key != group_key)
        group_key = key
        group.append(call)
        row_count += call_rows
        size += call_bytes
    if group:
        yield group, None if is_mixed else group_key
