"""Several callers' calls as one draft: their rows lie side by side, each caller is told of its own.

Values only. What has to be looked at row by row stays with its caller, who sends it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from delta_prop.checks import check_columns, check_deltas, check_parts, is_transform
from delta_prop.ingest.work import DELTA_OVERHEAD_BYTES, Draft, MatrixDraft
from delta_prop.published import Published
from delta_prop.receipt import Receipt
from delta_prop_wire.batch import SPARSE_KINDS
from delta_prop_wire.bounds import NUMBERS_MAX, NUMBERS_MIN, finite, name_is_sound
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Operation, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_columns
from delta_prop_wire.errors import Refused
from delta_prop_wire.forms import encode_row
from delta_prop_wire.names import laid_out
from delta_prop_wire.spec import (
    BATCH_ROWS_MAX,
    DELTA_BYTES_MAX,
    DIMENSION_MAX,
    NAMESPACE_BYTES_MAX,
    VECTOR_ID_BYTES_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from delta_prop_wire.batch import Batch

Call: TypeAlias = Draft | MatrixDraft

ROWS_MAX = 1_000
"""More rows in one draft gain nothing, and those in front would wait for those behind."""
BYTES_MAX = 1 << 20

_KINDS = frozenset({Kind.CREATE, Kind.DENSE, *SPARSE_KINDS})
_F32, _U32 = np.dtype(np.float32), np.dtype(np.uint32)


def may_be_merged(delta: Delta) -> bool:
    """Whether a delta says no more than numbers of one vector; its bounds are looked at later."""
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


def may_be_joined(delta: Delta) -> bool:
    """True if a valid delta names no other one, nor an id, so that it may share a batch with others."""
    return (
        delta.id is None
        and delta.dot is None
        and delta.expect is None
        and not delta.parents
        and not delta.clock
        and delta.source is Source.LOCAL
        and not is_transform(delta)
    )


def draft_in_shape(
    ids: object,
    matrix: object,
    indices: object,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
    ack_level: AckLevel,
) -> MatrixDraft | None:
    """What `columns_draft` makes of columns that come as arrays already; their bounds are looked at later."""
    if not (type(ids) is list and type(matrix) is np.ndarray and _is_table(matrix, _F32, len(ids))):
        return None
    if kind not in _KINDS or type(priority) is not Priority:
        return None
    if (kind in SPARSE_KINDS) is (indices is None):
        return None
    if indices is not None and not (
        type(indices) is np.ndarray and indices.shape == matrix.shape and _is_table(indices, _U32, len(ids))
    ):
        return None
    return MatrixDraft(
        ids, matrix, namespace, kind, Receipt(), priority, ack_level, indices=indices, checked=False
    )


def columns_draft(
    ids: Sequence[str],
    matrix: ArrayLike,
    indices: ArrayLike | None,
    *,
    namespace: str,
    kind: Kind,
    priority: Priority,
    ack_level: AckLevel,
) -> MatrixDraft:
    """What columns say, looked over. Raises InvalidDelta, UsageError."""
    places: NDArray[np.uint32] | None = None
    if indices is None:
        rows = check_columns(ids, matrix, namespace=namespace, kind=kind, priority=priority)
    else:
        rows, places = check_parts(ids, matrix, indices, namespace=namespace, kind=kind, priority=priority)
    return MatrixDraft(ids, rows, namespace, kind, Receipt(), priority, ack_level, indices=places)


def check_call(call: Call) -> None:
    """Look at each row of a call that goes by itself. Raises InvalidDelta, UsageError."""
    if isinstance(call, Draft):
        check_deltas(call.deltas)
    elif not call.checked:
        columns_draft(
            call.keys, call.matrix, call.indices, namespace=call.namespace, kind=call.kind,
            priority=call.priority, ack_level=call.ack_level,
        )  # fmt: skip
        call.checked = True


def _is_table(numbers: NDArray[np.generic], kind: np.dtype[np.generic], rows: int) -> bool:
    return (
        numbers.dtype == kind
        and numbers.ndim == 2
        and len(numbers) == rows
        and 0 < rows <= BATCH_ROWS_MAX
        and numbers.flags.c_contiguous
    )


class Merged:
    """A draft of one call or more, of one kind, namespace, width, lane and level."""

    clock: ClassVar[frozenset[Dot]] = frozenset()
    __slots__ = (
        "_checked", "_indices", "_names", "_values",
        "ack_level", "alone", "count", "keys", "kind", "namespace", "priority", "receipt", "size", "width",
    )  # fmt: skip

    def __init__(self, calls: Sequence[Call]) -> None:
        first = calls[0]
        kind, self.namespace, self.width, self.priority, self.ack_level = likeness(first)
        assert kind is not None, "it says more than numbers"
        self.kind = kind
        self.alone = len(calls) == 1
        self.receipt: Receipt = first.receipt if self.alone else _Receipts(calls)
        keys: list[str] = []
        checked = True
        values: list[memoryview] = []
        indices: list[memoryview] = []
        for call in calls:
            if isinstance(call, Draft):
                delta = call.deltas[0]
                operation, checked = delta.operation, False
                keys.append(delta.vector_id)
                numbers, places = operation.values, operation.indices
                assert numbers is not None
            else:
                checked = checked and call.checked
                keys += call.keys
                numbers, places = call.matrix, call.indices
            values.append(numbers.data)
            if places is not None:
                indices.append(places.data)
        self.keys, self._checked = keys, checked
        self._names: tuple[bytes, bytes] | None = None
        self._values, self._indices = values, indices or None
        self.count = count = len(keys)
        bytes_a_row = (8 if indices else 4) * self.width + DELTA_OVERHEAD_BYTES
        self.size = count * bytes_a_row
        """Bytes, about."""

    def vectors(self) -> list[tuple[str, str]]:
        """(namespace, vector id) of each row."""
        return [(self.namespace, key) for key in self.keys]

    def may_be_sound(self) -> bool:
        """Whether all names and shapes are within the bounds, as `check_deltas` says it of each."""
        if self._checked:
            return True
        self._names = laid_out(self.keys, VECTOR_ID_BYTES_MAX)
        return (
            self._names is not None
            and type(self.namespace) is str
            and name_is_sound(self.namespace, NAMESPACE_BYTES_MAX)
            and NUMBERS_MIN[self.kind] <= self.width <= NUMBERS_MAX[self.kind]
            and 8 * self.width <= DELTA_BYTES_MAX
        )

    def is_sound(self, batch: Batch) -> bool:
        """Whether the numbers are within the bounds too, told of the batch of one that may be."""
        return self._checked or batch.sound or (finite(batch.values) and batch.index_highest < DIMENSION_MAX)

    def encode(self, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int) -> Batch:
        """The batch of all rows under the dots from (origin, base) on; none of them can be a repeat."""
        if self.count == 1 and not clock and self._names is not None:
            return encode_row(
                self._names[0],
                self._values[0],
                None if self._indices is None else self._indices[0],
                width=self.width,
                namespace=self.namespace,
                kind=self.kind,
                origin=origin,
                base=base,
                ack_level=self.ack_level,
                priority=self.priority,
                hybrid_time=hybrid_time,
            )
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
            names=self._names,
        )


class Joined:
    """A draft of several calls of one valid delta each, of one lane and level; else they may differ."""

    clock: ClassVar[frozenset[Dot]] = frozenset()
    __slots__ = ("_deltas", "ack_level", "alone", "count", "priority", "receipt", "size")

    def __init__(self, calls: Sequence[Draft]) -> None:
        self._deltas = [call.deltas[0] for call in calls]
        self.priority, self.ack_level = calls[0].priority, calls[0].ack_level
        self.alone = len(calls) == 1
        self.receipt: Receipt = calls[0].receipt if self.alone else _Receipts(calls)
        self.count = len(calls)
        self.size = sum([call.size for call in calls])
        """Bytes, about."""

    def vectors(self) -> list[tuple[str, str]]:
        """(namespace, vector id) of each row."""
        return [(delta.namespace, delta.vector_id) for delta in self._deltas]

    def may_be_sound(self) -> bool:
        """They were looked at one by one when they were offered, or are now."""
        try:
            check_deltas(self._deltas)
        except Refused:
            return False
        return True

    def is_sound(self, _batch: Batch) -> bool:
        """`may_be_sound` has said all."""
        return True

    def encode(self, *, origin: int, base: int, clock: Sequence[Dot], hybrid_time: int) -> Batch:
        """The batch of all rows under the dots from (origin, base) on; none of them can be a repeat."""
        return encode_batch(
            self._deltas,
            origin=origin,
            base=base,
            clock=clock,
            ack_level=self.ack_level,
            priority=self.priority,
            hybrid_time=hybrid_time,
        )


def merge(calls: Sequence[Call]) -> Merged | Joined:
    """One draft of calls that `groups` has put together."""
    first = likeness(calls[0])
    if first[0] is not None and all(likeness(call) == first for call in calls[1:]):
        return Merged(calls)
    return Joined([call for call in calls if isinstance(call, Draft)])


class _Receipts(Receipt):
    """What becomes of the whole becomes of each call."""

    __slots__ = ("_calls", "_shares")

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self._calls = calls
        self._shares: list[Published] | None = None

    def placed(self, place: Published | None = None) -> None:
        super().placed(place)
        if place is not None:
            self._shares = shares(place, self._calls)
            for call, own in zip(self._calls, self._shares, strict=True):
                call.receipt.placed(own)

    def doubt(self) -> None:
        super().doubt()
        for call in self._calls:
            call.receipt.doubt()

    def acknowledge(self, published: Published) -> None:
        super().acknowledge(published)
        owns = self._shares or shares(published, self._calls)
        for call, own in zip(self._calls, owns, strict=True):
            if not call.receipt.done:
                call.receipt.acknowledge(own)

    def refuse(self, refusal: Refused) -> None:
        """Before it has its place the callers are told nothing: each is sent alone."""
        super().refuse(refusal)
        for call in self._calls if self._shares is not None else ():
            if not call.receipt.done:
                call.receipt.refuse(refusal)


def shares(whole: Published, calls: Iterable[Call]) -> list[Published]:
    """Each call's part of an acknowledgement."""
    offset, dot, level = whole.offset, whole.dot, whole.level
    assert offset is not None
    assert dot is not None
    origin, counter = dot
    found: list[Published] = []
    for call in calls:
        count = call.count
        found.append(Published(offset, Dot(origin, counter), count, level))
        offset += count
        counter += count
    return found


def likeness(call: Call) -> tuple[int | None, str, int, Priority, AckLevel]:
    """The traits of calls that may be columns; of one that says more than numbers the kind is None."""
    if isinstance(call, MatrixDraft):
        return call.kind, call.namespace, call.matrix.shape[1], call.priority, call.ack_level
    delta = call.deltas[0]
    if not may_be_merged(delta):
        return None, "", 0, call.priority, call.ack_level
    values = delta.operation.values
    assert values is not None
    return delta.operation.kind, delta.namespace, len(values), call.priority, call.ack_level


def groups(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """The calls in order, neighbours put together as far as the bounds go: those of columns with what is
    alike, single deltas with what has their lane and level.
    """
    group: list[Call] = []
    columns = False  # some of the group are
    like: tuple[object, ...] = ()
    rows = size = 0
    for call in calls:
        own, count = likeness(call), call.count
        single = isinstance(call, Draft)
        bytes_ = call.size if own[0] is None else count * (8 * own[2] + DELTA_OVERHEAD_BYTES)
        fits = own == like or (single and not columns and own[3:] == like[3:])
        if group and not (fits and rows + count <= ROWS_MAX and size + bytes_ <= BYTES_MAX):
            yield group
            group, columns, rows, size = [], False, 0, 0
        columns = columns or not single
        like = own
        group.append(call)
        rows += count
        size += bytes_
    if group:
        yield group
