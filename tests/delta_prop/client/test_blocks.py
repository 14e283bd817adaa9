"""Offered blocks of columns have the guarantees of offered deltas, whoever assigns the counters."""

from __future__ import annotations

import pytest

from delta_prop.client import SyncProducer
from delta_prop_wire.delta import Delta, Priority, opaque, sparse
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.test_sync_producer import served
from tests.delta_prop.server.jobs import block_of, part_deltas


def names(part: int, count: int, start: int = 0) -> list[str]:
    return [one.vector_id for one in part_deltas(part, count, start)]


def test_block_is_acknowledged_as_one_offer() -> None:
    with served() as service, SyncProducer(service.address, name="x") as p:
        first = p.offer_block(block_of(part_deltas(0, 300)))
        p.offer(*part_deltas(1, 2))
        second = p.offer_block(block_of(part_deltas(2, 3)))
        p.flush()
        assert (first.result().offset, first.result().count) == (0, 300)
        assert second.result().offset == 302
        assert service.keys() == names(0, 300) + names(1, 2) + names(2, 3)
        p.offer_block(block_of(part_deltas(3, 3)))
        service.drop_connections()
        p.flush()
        assert service.keys()[305:] == names(3, 3)


def test_numbered_blocks_may_have_gaps_and_are_deduplicated() -> None:
    with served() as service:
        for new_offsets in ([0, 5], []):
            with SyncProducer(service.address, name="stream") as p:
                receipts = [p.offer_block(block_of(part_deltas(part, 5)), part << 32 | 1) for part in (1, 2)]
                p.flush()
                new = [one.result() for one in receipts if not one.result().duplicates]
                assert [one.offset for one in new] == new_offsets
            assert service.keys() == names(1, 5) + names(2, 5)
        with SyncProducer(service.address, name="stream") as p:
            assert p.watermark() == 2 << 32 | 5
            p.offer_block(block_of(part_deltas(3, 1)), 3 << 32 | 1).result()
        assert service.keys()[10:] == names(3, 1)


def test_partly_stored_block_is_sliced() -> None:
    with served() as service:
        with SyncProducer(service.address, name="stream") as p:
            p.offer_block(block_of(part_deltas(0, 5)), 1).result()
        with SyncProducer(service.address, name="stream") as p:
            p.offer_block(block_of(part_deltas(0, 12)), 1)
            p.offer_block(block_of(part_deltas(0, 3, 12)), 13)
            p.flush()
        assert service.keys() == names(0, 15)


def test_counters_of_blocks_must_rise() -> None:
    with served() as service, SyncProducer(service.address, name="x") as p:
        p.offer_block(block_of(part_deltas(0, 5)), 10)
        for counter in (10, 14, None):
            with pytest.raises(UsageError):
                p.offer_block(block_of(part_deltas(1, 2)), counter)
        p.offer_block(block_of(part_deltas(1, 2)), 15).result()


def test_refused_block_leaves_later_blocks_intact() -> None:
    with served() as service, SyncProducer(service.address, name="x") as p:
        bad = p.offer_block(block_of([*part_deltas(0, 2), Delta("none", sparse([0], [1.0]))]))
        good = p.offer_block(block_of(part_deltas(1, 2)))
        p.flush()
        assert isinstance(bad.outcome, Refused)
        assert (bad.outcome.code, bad.outcome.row) == (ErrorCode.INVALID_DELTA, 2)
        assert good.result().offset == 3  # after a control row
        assert service.keys() == names(1, 2)


def test_blocks_and_deltas_of_two_priorities_are_all_stored() -> None:
    with served() as service, SyncProducer(service.address, name="x") as p:
        p.offer_block(block_of(part_deltas(0, 2)))
        p.offer(Delta("0-0", opaque(b"y")))
        p.offer_block(block_of(part_deltas(1, 2)), priority=Priority.HIGH)
        p.flush()
        assert sorted(service.keys()) == ["0-0", "0-0", "0-1", "1-0", "1-1"]
