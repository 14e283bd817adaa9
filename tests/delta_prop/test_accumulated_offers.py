"""A loop of `offer`: one batch a turn of the event loop, each offer with a fate of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, OfferState, Priority, Propagator, Settings, create, opaque, sparse
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode
from tests.whole_log import read_all

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

ROWS = 5_000


def frames(p: Propagator) -> list[LoggedBatch]:
    return list(read_all(p.internals().log))


def vector(n: int) -> Delta:
    return Delta(f"v{n}", create([float(n), 1.0]))


def text(n: int) -> Delta:
    return Delta(f"v{n}", opaque(b"%d" % n), metadata={"n": n}, topics=("news",))


@pytest.mark.parametrize("make", [vector, text])
def test_loop_of_offers_makes_few_frames(make: object) -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            receipts = [p.offer(make(n)) for n in range(ROWS)]  # type: ignore[operator]
            offsets = [(await one).offset for one in receipts]
            assert offsets == list(range(ROWS))
            dots = [one.result().dot for one in receipts]
            assert [dot.counter for dot in dots if dot] == list(range(1, ROWS + 1))
            logged = frames(p)
            size = sum(one.batch.size for one in logged)
            print(f"{len(logged)} frames, {size / ROWS:.0f} bytes a row")
            assert len(logged) <= ROWS / 500
            assert size <= 100 * ROWS
            assert [key for one in logged for key in one.batch.keys] == [f"v{n}" for n in range(ROWS)]

    run_virtual(main)


def test_refused_offer_leaves_its_neighbours_alone_and_in_order() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            made = [p.offer(vector(n)) for n in range(10)]
            wrong = p.offer(Delta("v3", sparse([7], [1.0])))
            made += [p.offer(text(n)) for n in range(10, 20)]
            with pytest.raises(InvalidDelta):
                p.offer(Delta("", create([1.0])))
            with pytest.raises(Refused) as caught:
                await wrong
            assert caught.value.code is ErrorCode.INVALID_DELTA
            assert [(await one).offset for one in made] == list(range(20))
            keys = [key for one in frames(p) for key in one.batch.keys]
            assert keys == [f"v{n}" for n in range(20)]

    run_virtual(main)


def test_whatever_follows_offers_comes_behind_them() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            for n in range(3):
                p.offer(vector(n))
            assert p.statistics().accepted == 3
            p.offer(vector(3))
            p.offer(vector(4))
            assert p.head("v4") is not None
            p.offer(vector(5))
            p.offer(vector(6))
            late = p.subscribe()
            async with late:
                await p.publish(vector(7))
                assert [(await anext(late)).offset] == [7]
            p.offer(vector(8))
            last = p.offer(vector(9))
            producer = p.producer("one")
            p.offer(vector(10))
            p.offer(vector(11))
            told = producer.offer(vector(12))
            await p.wait_visible(13)
            assert last.state is OfferState.ACKNOWLEDGED
            assert (await told).offset == 12

    run_virtual(main)


def test_offer_that_is_withdrawn_before_its_turn_ends_never_happens() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            first, second, third = [p.offer(vector(n)) for n in range(3)]
            assert second.withdraw()
            await third
            assert first.acknowledged
            assert [key for one in frames(p) for key in one.batch.keys] == ["v0", "v2"]

    run_virtual(main)


def test_priorities_and_levels_keep_the_order_of_the_calls() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            low = Priority.LOW
            made = [
                p.offer(Delta("v", create([1.0, n]), priority=low if n % 2 else Priority.NORMAL))
                for n in range(6)
            ]
            assert [(await one).offset for one in made] == list(range(6))

    run_virtual(main)


def test_full_queue_is_told_by_the_offers_that_find_no_room() -> None:
    async def main() -> None:
        settings = Settings(log_deltas_max=3_000)
        async with Propagator(settings, world=virtual_world()) as p:
            receipts = [p.offer(vector(n)) for n in range(ROWS)]
            await anyio.sleep(1)
            assert all(one.done for one in receipts)

    run_virtual(main)
