"""Quotas that change while connections are open and something waits for them, in virtual time."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.client.producer import Producer
from delta_prop.client.subscriber import Subscriber
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.frames import Ack
from tests.delta_prop.hosting.hosts import keys_in
from tests.delta_prop.server.raw import ORIGIN, opaque_batch
from tests.delta_prop.server.test_quotas_virtual import (
    MB,
    QuotaHost,
    fill,
    limited,
    run_hosted,
    wait_held,
)


def test_changed_quota_of_a_stream_holds_for_open_connections() -> None:
    async def main(host: QuotaHost) -> None:
        for name in ("default", "orders"):
            more = host.client("free", name) | ({} if name == "default" else {"partition": 0})
            async with Producer("server", name="p", **more) as p:
                for limit, expected_s in ((None, 0.0), (100.0, 9.0), (None, 0.0)):
                    await host.streams.alter(name, {"rows_in_s": limit})
                    await anyio.sleep(3)
                    start = anyio.current_time()
                    for number in range(10):
                        await p.publish(*[Delta(f"{number}-{row}", opaque(b"x")) for row in range(100)])
                    assert anyio.current_time() - start == pytest.approx(expected_s, abs=0.2)

    run_hosted(main)


@pytest.mark.parametrize(("limit", "expected_s"), [(None, 0.0), (1_000.0, 0.1), (25.0, 8.0)])
def test_changed_quota_holds_for_a_frame_that_waits(limit: float | None, expected_s: float) -> None:
    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(ORIGIN, token="free")
            await host.streams.alter("default", {"rows_in_s": 1.0})
            await anyio.sleep(1.5)
            for base in (1, 201, 401):
                await raw.send(opaque_batch(base, 200))
            await raw.until_acked(200)
            await wait_held(host)
            await anyio.sleep(5)
            await host.streams.alter("default", {"rows_in_s": limit})
            changed_at = anyio.current_time()
            last = await raw.until_acked(400)
            acked_s = anyio.current_time() - changed_at
            assert acked_s <= 1.1, "the new quota is unused, so that a frame above it passes"
            if last.sequence < 600:
                await raw.until_acked(600)
            assert anyio.current_time() - changed_at - acked_s == pytest.approx(expected_s, abs=0.2)
        keys = [*keys_in(await host.streams.open())]
        assert keys == [f"v{row % 7}" for row in range(1, 601)]

    run_hosted(main)


def test_raised_quota_raises_the_credit_of_open_connections() -> None:
    async def main(host: QuotaHost) -> None:
        await host.streams.alter("default", {"rows_in_s": 1.0})
        async with host.connected() as raw:
            assert (await raw.hello(ORIGIN, token="free")).credit == (1, 8 << 20)
            for limit, more in ((100.0, (49, 0)), (10.0, None), (200.0, (50, 0)), (None, (19_900, 0))):
                await host.streams.alter("default", {"rows_in_s": limit})
                await anyio.sleep(1.5)
                if more is not None:
                    ack = await raw.until(Ack)
                    assert (ack.sequence, ack.credit) == (0, more)

    run_hosted(main)


def test_producer_that_is_stuck_goes_on_once_its_quota_is_removed() -> None:
    async def main(host: QuotaHost) -> None:
        await host.streams.alter("default", {"rows_in_s": 0.1})
        async with (
            Producer("server", name="p", **host.client("free")) as p,
            anyio.create_task_group() as tasks,
        ):
            await p.publish(*[Delta(f"n{number}", opaque(b"x")) for number in range(10)])
            for number in range(10, 1_000):
                tasks.start_soon(p.publish, Delta(f"n{number}", opaque(b"x")))
            await anyio.sleep(15)
            assert p.statistics().acknowledged == 10, "they cost 100 s"
            await host.streams.alter("default", {"rows_in_s": None})
            await anyio.sleep(1.5)
            assert p.statistics().acknowledged == 1_000
        assert keys_in(await host.streams.open()) == [f"n{number}" for number in range(1_000)]

    run_hosted(main)


@pytest.mark.parametrize("limits", [{"rows_in_s": 5.0}, {"rows_in_s": 1_000.0, "bytes_in_s": 1.0 * MB}])
def test_frame_keeps_its_turn_in_a_quota_that_stays(limits: dict[str, float]) -> None:
    tokens, settings, _ = limited("token", rows_in_s=20.0)

    async def main(host: QuotaHost) -> None:
        async with host.connected() as raw:
            await raw.hello(ORIGIN, token="limited")
            await raw.send(opaque_batch(1, 200))
            await raw.until_acked(200)
            start = anyio.current_time()
            await raw.send(opaque_batch(201, 10))
            await wait_held(host)
            for number in range(4):
                await host.streams.alter("default", limits if number % 2 else dict.fromkeys(limits))
                await anyio.sleep(2)
            await raw.until_acked(210)
            assert anyio.current_time() - start == pytest.approx(10.0, abs=0.2), "200 rows of 20 in a second"

    run_hosted(main, tokens, **settings)


@pytest.mark.parametrize(("limit", "expected_rows"), [(None, 1_000), (400.0, 1_000), (5.0, 300)])
def test_changed_quota_holds_for_deliveries_that_wait(limit: float | None, expected_rows: int) -> None:
    async def main(host: QuotaHost) -> None:
        await fill(host, 100, 100)
        former = 100.0 if limit == 5.0 else 0.1
        await host.streams.alter("default", {"rows_out_s": former})
        await anyio.sleep(1.5)
        offsets: list[int] = []

        async def read() -> None:
            async with Subscriber("server", "*", start="earliest", **host.client("free")) as s:
                async for _, _, delta in s:
                    offsets.append(int(delta.vector_id[1:].replace("-", "")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(2)
            before = len(offsets)
            assert 0 < before < 300
            await host.streams.alter("default", {"rows_out_s": limit})
            await anyio.sleep(4.0)
            tasks.cancel_scope.cancel()
        assert offsets == [*range(len(offsets))]
        if limit == 5.0:
            assert before <= len(offsets) <= before + 150, "at the former rate there would be 400 more"
        else:
            assert len(offsets) == expected_rows

    run_hosted(main)


def test_removed_quotas_are_no_longer_counted() -> None:
    tokens, settings, _ = limited("token", rows_in_s=1_000.0)

    async def main(host: QuotaHost) -> None:
        async with Producer("server", name="p", **host.client("limited")) as p:
            for limit, passed in ((100.0, 10), (200.0, 20), (None, None), (200.0, 10), (None, None)):
                await host.streams.alter("default", {"rows_in_s": limit})
                await anyio.sleep(2)
                await p.publish(*[Delta(f"r{row}", opaque(b"x")) for row in range(10)])
                counts = {
                    name.scope: (used.limit, used.passed) for name, used in host.service.quota_counts.items()
                }
                assert counts.pop("token")[0] == 1_000.0
                assert counts == ({} if limit is None else {"stream": (limit, passed)})

    run_hosted(main, tokens, **settings)
