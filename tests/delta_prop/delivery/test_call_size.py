"""The call size of a failing sink: smaller after each failure, down to one delta; larger after success."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from delta_prop.delivery.sink_invoker import CallSize
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, opaque
from delta_prop_wire.encode import encode_batch
from tests.delta_prop.delivery.support import ORIGIN, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_deliveries(*counts: int) -> list[Delivery]:
    deliveries, offset = [], 0
    for count in counts:
        deltas = [Delta(f"v{offset + row}", opaque(b""), "rows") for row in range(count)]
        batch = encode_batch(deltas, origin=ORIGIN, base=offset + 1)
        deliveries.append(Delivery(LoggedBatch(batch, offset, 1, Source.LOCAL)))
        offset += count
    return deliveries


def row_counts(deliveries: Sequence[Delivery]) -> list[int]:
    return [delivery.count for delivery in deliveries]


def test_all_rows_are_delivered_until_a_call_fails() -> None:
    size, deliveries = CallSize(can_split=True), make_deliveries(3, 5)
    assert size.split(deliveries) == (deliveries, [])
    size.note_failure(deliveries, 0)
    delivered, rest = size.split(deliveries)
    assert (row_counts(delivered), row_counts(rest)) == ([3, 1], [4])
    assert (delivered[-1].next_offset, rest[0].next_offset) == (4, 8)
    assert offsets_of([*delivered, *rest]) == list(range(8))


def test_first_part_of_a_split_ends_at_next_selected_row() -> None:
    size, (all_rows,) = CallSize(can_split=True), make_deliveries(9)
    deliveries = [Delivery(all_rows.logged, np.array([1, 4, 7], np.intp))]
    size.note_failure(deliveries, 1)
    (first,), (rest,) = size.split(deliveries)
    assert (offsets_of([first]), first.next_offset) == ([1], 4)
    assert (offsets_of([rest]), rest.next_offset) == ([4, 7], 9)


def test_call_size_is_applied_rows_then_doubles_on_success() -> None:
    size, deliveries = CallSize(can_split=True), make_deliveries(100)
    size.note_failure(deliveries, 7)
    assert row_counts(size.split(deliveries)[0]) == [7]
    for expected in (14, 28, 56):
        size.note_success(1_000)
        assert row_counts(size.split(deliveries)[0]) == [expected]
    size.note_success(100)
    assert size.split(deliveries) == (deliveries, [])


def test_call_size_without_split_keeps_batches_intact() -> None:
    size, deliveries = CallSize(can_split=False), make_deliveries(3, 5, 2)
    size.note_failure(deliveries, 0)
    assert row_counts(size.split(deliveries)[0]) == [3]
    size.note_failure(deliveries[:1], 0)
    delivered, rest = size.split(deliveries)
    assert (row_counts(delivered), row_counts(rest)) == ([3], [5, 2])
    assert size.split(deliveries[2:]) == (deliveries[2:3], [])


def test_single_failing_delta_is_named_until_a_success() -> None:
    size, deliveries = CallSize(can_split=True), make_deliveries(4)
    delivered = deliveries
    for _ in range(2):
        size.note_failure(delivered, 0)
        assert size.failing is None
        delivered, rest = size.split(deliveries)
    for failures in (1, 2, 3):
        size.note_failure(delivered, 0)
        assert size.failing is not None
        assert (size.failing.offset, size.failing.failures) == (0, failures)
    assert str(size.failing) == (
        "offset 0 (vector 'v0' in namespace 'rows'), delivered alone, has failed 3 times"
    )
    size.note_success(1_000)
    assert size.failing is None
    delivered, rest = size.split(rest)
    size.note_failure(delivered, 1)
    assert size.failing is None
