"""A loop of `offer`: a few batches per tick, and an outcome per offer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, OfferState, Priority, Propagator, Settings, create, opaque, sparse
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode
from tests.full_log import read_all

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

ROWS = 5_000


def logged_batches(p: Propagator) -> list[LoggedBatch]:
    return list(read_all(p.internals().partition.log))


def vector_delta(n: int) -> Delta:
    return Delta(f"v{n}", create([float(n), 1.0]))


def opaque_delta(n: int) -> Delta:
    return Delta(f"v{n}", opaque(b"%d" % n), metadata={"n": n}, topics=("news",))


@pytest.mark.parametrize("make_row", [vector_delta, opaque_delta])
def test_loop_of_offers_is_appended_in_few_batches(make_row: object) -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            receipts = [p.offer(make_row(n)) for n in range(ROWS)]  # type: ignore[operator]
            offsets = [(await receipt).offset for receipt in receipts]
            assert offsets == list(range(ROWS))
            dots = [receipt.result().dot for receipt in receipts]
            assert [dot.counter for dot in dots if dot] == list(range(1, ROWS + 1))
            batches = logged_batches(p)
            size = sum(logged.batch.size for logged in batches)
            print(f"{len(batches)} frames, {size / ROWS:.0f} bytes a row")
            assert len(batches) <= ROWS / 500
            assert size <= 100 * ROWS
            assert [key for logged in batches for key in logged.batch.keys] == [f"v{n}" for n in range(ROWS)]

    run_virtual(main)


def test_refused_offer_does_not_affect_or_reorder_others() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            receipts = [p.offer(vector_delta(n)) for n in range(10)]
            refused = p.offer(Delta("v3", sparse([7], [1.0])))
            receipts += [p.offer(opaque_delta(n)) for n in range(10, 20)]
            with pytest.raises(InvalidDelta):
                p.offer(Delta("", create([1.0])))
            with pytest.raises(Refused) as caught:
                await refused
            assert caught.value.code is ErrorCode.INVALID_DELTA
            assert [(await receipt).offset for receipt in receipts] == list(range(20))
            keys = [key for logged in logged_batches(p) for key in logged.batch.keys]
            assert keys == [f"v{n}" for n in range(20)]

    run_virtual(main)


def test_later_calls_take_effect_after_earlier_offers() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            for n in range(3):
                p.offer(vector_delta(n))
            assert p.statistics().accepted == 3
            p.offer(vector_delta(3))
            p.offer(vector_delta(4))
            assert p.head("v4") is not None
            p.offer(vector_delta(5))
            p.offer(vector_delta(6))
            subscription = p.subscribe()
            async with subscription:
                await p.publish(vector_delta(7))
                assert [(await anext(subscription)).offset] == [7]
            p.offer(vector_delta(8))
            last = p.offer(vector_delta(9))
            producer = p.producer("one")
            p.offer(vector_delta(10))
            p.offer(vector_delta(11))
            receipt = producer.offer(vector_delta(12))
            await p.wait_visible(13)
            assert last.state is OfferState.ACKNOWLEDGED
            assert (await receipt).offset == 12

    run_virtual(main)


def test_offer_withdrawn_in_its_tick_is_never_appended() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            first, second, third = [p.offer(vector_delta(n)) for n in range(3)]
            assert second.withdraw()
            await third
            assert first.acknowledged
            assert [key for logged in logged_batches(p) for key in logged.batch.keys] == ["v0", "v2"]

    run_virtual(main)


def test_offers_of_two_priorities_keep_call_order() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            low = Priority.LOW
            receipts = [
                p.offer(Delta("v", create([1.0, n]), priority=low if n % 2 else Priority.NORMAL))
                for n in range(6)
            ]
            assert [(await receipt).offset for receipt in receipts] == list(range(6))

    run_virtual(main)


def test_offers_beyond_log_limit_are_all_settled() -> None:
    async def main() -> None:
        settings = Settings(log_deltas_max=3_000)
        async with Propagator(settings, world=virtual_world()) as p:
            receipts = [p.offer(vector_delta(n)) for n in range(ROWS)]
            await anyio.sleep(1)
            assert all(receipt.done for receipt in receipts)

    run_virtual(main)
