"""Numbered offers share batches: a refused row affects no other row, and each row keeps its number."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.client.producer import Producer
from delta_prop.testing.network_path import NetworkConditions
from delta_prop_wire.delta import Delta, Dot, Priority, create, make_origin, producer_id_of, sparse
from delta_prop_wire.errors import UsageError
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service
from tests.full_log import read_all

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt

ORIGIN = make_origin(producer_id_of("import"), Priority.NORMAL)


def line(number: int, invalid: frozenset[int]) -> Delta:
    if number in invalid:  # only the service knows the dimension of the vectors
        return Delta(f"v{number % 50}", sparse([9], [1.0]))
    return Delta(f"v{number % 50}", create([float(number), 1.0]))


async def offer_lines(
    site: Site, numbers: range, invalid: frozenset[int], *, wait: bool = True, **more: Any
) -> dict[int, Receipt]:
    receipts: dict[int, Receipt] = {}
    settings = {"world": site.world, "name": "import", "numbered": True} | more
    async with Producer(ADDRESS, **settings) as p:
        for number in numbers:
            p.offer_numbered(
                number, line(number, invalid), lambda receipt, at=number: receipts.update({at: receipt})
            )
        if wait:
            await p.flush()
    return receipts


def logged_counters(site: Site) -> list[tuple[int, bool]]:
    """Return the counter of each row of the import in log order, and True for a no-op."""
    return [
        (logged.batch.counter(row), logged.batch.is_control)
        for logged in read_all(site.propagator.internals().partition.log)
        for row in range(logged.batch.count)
        if logged.batch.origin == ORIGIN
    ]


def test_numbered_offers_share_frames() -> None:
    async def scenario(site: Site) -> None:
        receipts = await offer_lines(site, range(1, 4_001), frozenset())
        assert [receipts[n].result().dot for n in range(1, 4_001)] == [
            Dot(ORIGIN, n) for n in range(1, 4_001)
        ]
        logged = list(read_all(site.propagator.internals().partition.log))
        size = sum(one.batch.size for one in logged)
        print(f"{len(logged)} frames, {size / 4_000:.0f} bytes a row")
        assert len(logged) <= 8
        assert size <= 60 * 4_000

    with_service(scenario)


@pytest.mark.parametrize("invalid", [{1}, {700}, {1, 2, 3}, set(range(100, 900, 100)), set(range(1, 400))])
def test_rows_keep_their_numbers_if_others_are_refused(invalid: set[int]) -> None:
    async def scenario(site: Site) -> None:
        invalid_numbers = frozenset(invalid)
        async with Producer(ADDRESS, world=site.world, name="first") as p:
            await p.publish(Delta("v0", create([0.0, 0.0])))
        receipts = await offer_lines(site, range(1, 1_501), invalid_numbers)
        assert {n for n, one in receipts.items() if not one.acknowledged} == invalid
        assert logged_counters(site) == [(n, n in invalid) for n in range(1, 1_501)], (
            "each row must be logged once and in order"
        )
        offsets = {n: one.result().offset for n, one in receipts.items() if one.acknowledged}
        second_receipts = await offer_lines(site, range(1, 1_600), invalid_numbers)
        assert {
            n: one.result().duplicates.get(0) for n, one in second_receipts.items() if n in offsets
        } == offsets
        assert {n for n, one in second_receipts.items() if not one.acknowledged} == invalid
        frames = [
            one for one in read_all(site.propagator.internals().partition.log) if one.batch.origin == ORIGIN
        ]
        assert len(frames) <= 4 + min(1 << len(invalid) + 1, 2 * 500)

    with_service(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_numbered_lines_have_one_effect_over_a_bad_network(seed: int) -> None:
    conditions = NetworkConditions(latency_s=0.002, jitter_s_max=0.003, reset_bytes_mean=30_000)

    async def scenario(site: Site) -> None:
        rng = random.Random(seed)
        async with Producer(ADDRESS, world=site.world, name="first") as p:
            await p.publish(Delta("v0", create([0.0, 0.0])))
        invalid_numbers = frozenset(n for n in range(1, 601) if rng.random() < 0.02)
        with anyio.move_on_after(rng.uniform(0.005, 0.05)):  # an earlier run, which is cancelled
            await offer_lines(site, range(1, 601), invalid_numbers)
        receipts = await offer_lines(site, range(1, 601), invalid_numbers)
        assert {n for n, one in receipts.items() if not one.acknowledged} == invalid_numbers
        assert logged_counters(site) == [(n, n in invalid_numbers) for n in range(1, 601)]

    with_service(scenario, seed=seed, conditions=conditions)


def test_numbers_may_have_gaps_and_two_priorities() -> None:
    async def scenario(site: Site) -> None:
        receipts: dict[int, Receipt] = {}
        async with Producer(ADDRESS, world=site.world, name="import", numbered=True) as p:
            for number in range(1, 400):
                if number % 7 == 0:
                    continue
                priority = Priority.NORMAL if number % 3 else Priority.LOW
                delta = Delta(f"v{number % 5}", create([1.0]), priority=priority)
                p.offer_numbered(number, delta, lambda receipt, at=number: receipts.update({at: receipt}))  # type: ignore[misc]
            with pytest.raises(UsageError, match="offer_numbered"):
                p.offer(Delta("v", create([1.0])))
        assert all(receipt.acknowledged for receipt in receipts.values())
        assert [n for n, _ in logged_counters(site)] == [n for n in range(1, 400) if n % 7 and n % 3]

    with_service(scenario)
