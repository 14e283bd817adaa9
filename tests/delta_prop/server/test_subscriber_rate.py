"""Deliveries under a subscriber's Backpressure, in virtual time: an even rate, and a stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.frames import Backpressure, BatchFrame, DeltaFrame, Heartbeat, PressureLevel
from tests.delta_prop.server.raw import connected, serving
from tests.delta_prop.server.session_fakes import (
    EARLIEST,
    FakeService,
    FakeSubscriber,
    expected_rows,
    multi_segment_service,
    subscription,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.delta_prop.server.raw import FrameClient

BURST_S = 0.25
"""The largest burst, as seconds at the full rate."""


def run_in_virtual_time(
    scenario: Callable[[Propagator, FrameClient], Awaitable[None]], *, data: str | None = None
) -> None:
    """Run a scenario with a service, in memory or on disk, and a client after its hello."""

    async def run() -> None:
        network = VirtualNetwork(1)
        world = virtual_world(1, network=network, disk=SimDisk(1))
        async with (
            Propagator(data=data, log=data and LogSettings(compact=False), world=world) as p,
            serving(p) as (_, address),
            connected(address, network) as client,
        ):
            await client.hello()
            await scenario(p, client)

    run_virtual(run)


async def publish(p: Propagator, row_count: int, namespaces: tuple[str, ...] = ("a",)) -> None:
    deltas = [
        Delta(f"v{row}", opaque(b"%d" % row), namespaces[row % len(namespaces)]) for row in range(row_count)
    ]
    for start in range(0, row_count, 2_000):
        await p.publish(*deltas[start : start + 2_000])


async def receive_rows(client: FrameClient, row_count: int) -> list[tuple[float, int]]:
    """Return the time of each frame and its number of rows; check that all rows arrive once, in order."""
    arrived: list[tuple[float, int]] = []
    offsets: list[int] = []
    while len(offsets) < row_count:
        frame = await client.next()
        if isinstance(frame, DeltaFrame):
            new_offsets = [frame.sequence]
        elif isinstance(frame, BatchFrame):
            row_offsets = frame.batch.row_offsets
            count = frame.batch.count
            new_offsets = (
                list(range(frame.sequence, frame.sequence + count))
                if row_offsets is None
                else row_offsets.tolist()
            )
        else:
            assert frame is not None
            continue
        arrived.append((anyio.current_time(), len(new_offsets)))
        offsets += new_offsets
    assert offsets == sorted(set(offsets))
    return arrived


def check_even_rate(arrived: list[tuple[float, int]], rate: float, began: float) -> None:
    """Check that the rate is never exceeded, and that it is reached."""
    for start, _ in arrived:
        burst = sum(rows for time_s, rows in arrived if start <= time_s < start + 0.01)
        assert burst <= rate * (BURST_S + 0.01)
    total = sum(rows for _, rows in arrived)
    assert total / rate * 0.9 - BURST_S <= arrived[-1][0] - began <= total / rate * 1.1


@pytest.mark.parametrize("data", [None, "x"])
@pytest.mark.parametrize("timing", ["catching up", "pushed"])
@pytest.mark.parametrize("frame_kind", ["batches", "deltas", "narrowed"])
def test_deliveries_under_a_rate_are_even(data: str | None, timing: str, frame_kind: str) -> None:
    async def scenario(p: Propagator, client: FrameClient) -> None:
        rate, row_count = 500.0, 3_000
        topics = ("ns:a",) if frame_kind == "narrowed" else ()
        row_namespaces = ("a", "b") if frame_kind == "narrowed" else ("a",)
        if timing == "catching up":
            await publish(p, row_count, row_namespaces)
        await client.send(Backpressure(1, PressureLevel.WARN, rate=rate))
        began = anyio.current_time()
        await client.subscribe(*topics, deltas=frame_kind == "deltas")
        if timing == "pushed":
            await publish(p, row_count, row_namespaces)
        arrived = await receive_rows(client, row_count // len(row_namespaces))
        check_even_rate(arrived, rate, began)

    run_in_virtual_time(scenario, data=data)


def test_low_rate_delivers_row_by_row() -> None:
    async def scenario(p: Propagator, client: FrameClient) -> None:
        await publish(p, 6)
        await client.send(Backpressure(1, PressureLevel.THROTTLE, rate=2.0))
        await client.subscribe()
        arrived = await receive_rows(client, 6)
        assert [rows for _, rows in arrived] == [1] * 6
        assert arrived[-1][0] - arrived[0][0] == pytest.approx(2.5, abs=0.1)

    run_in_virtual_time(scenario)


def test_level_ok_lifts_the_rate() -> None:
    async def scenario(p: Propagator, client: FrameClient) -> None:
        await publish(p, 2_000)
        await client.send(Backpressure(1, PressureLevel.WARN, rate=1.0))
        await client.subscribe()
        await receive_rows(client, 1)
        await client.send(Backpressure(2, PressureLevel.OK, rate=1.0))
        began = anyio.current_time()
        await receive_rows(client, 1_999)
        assert anyio.current_time() - began < 1

    run_in_virtual_time(scenario)


def test_file_ranges_respect_the_rate() -> None:
    service = FakeService.on_disk()
    for _ in range(300):
        service.append_rows(1, data=bytes(3_000))
    service.commit()
    for rows_max, kinds in ((60, {"parts", "range"}), (7, {"parts"})):
        subscriber = FakeSubscriber(service, rows_max=rows_max)
        subscriber.subscribe(subscription(start=EARLIEST))
        subscriber.write_all()
        assert subscriber.received == expected_rows(service)
        assert set(subscriber.chunk_kinds) == kinds


def test_batches_within_the_row_limit_are_not_sliced() -> None:
    service = multi_segment_service()
    subscriber = FakeSubscriber(service, rows_max=5)  # each batch has two rows
    subscriber.subscribe(subscription(start=EARLIEST))
    subscriber.write_all()
    assert subscriber.received == expected_rows(service)
    assert all(
        isinstance(frame, BatchFrame) and frame.batch.row_offsets is None for frame in subscriber.frames
    )


# --- stop


def seconds_until_delivery(*advice: tuple[float, Backpressure]) -> float:
    """Return the seconds from the first advice until the arrival of a delta that is published after it."""
    delays_s: list[float] = []

    async def scenario(p: Propagator, client: FrameClient) -> None:
        await client.subscribe()
        began = anyio.current_time()
        await client.send(advice[0][1])
        await anyio.sleep(0.05)
        await publish(p, 1)

        async def send_advice() -> None:
            for time_s, frame in advice[1:]:
                await anyio.sleep(began + time_s - anyio.current_time())
                await client.send(frame)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_advice)
            tasks.start_soon(send_heartbeats, client)
            with anyio.fail_after(100):
                while not delays_s:
                    try:
                        await client.until(BatchFrame)
                        delays_s.append(anyio.current_time() - began)
                    except TimeoutError:
                        pass
            tasks.cancel_scope.cancel()

    run_in_virtual_time(scenario)
    return delays_s[0]


async def send_heartbeats(client: FrameClient) -> None:
    while True:
        await anyio.sleep(5)
        await client.send(Heartbeat(1))


def stop_advice(**more: Any) -> Backpressure:
    return Backpressure(1, PressureLevel.STOP, **more)


@pytest.mark.parametrize(
    ("advice", "seconds"),
    [
        ([(0, stop_advice(retry_after_ms=3_000))], 3.0),
        ([(0, stop_advice(retry_after_ms=3_000)), (1, Backpressure(2, PressureLevel.OK))], 1.0),
        ([(0, stop_advice(retry_after_ms=3_000)), (1, Backpressure(2, PressureLevel.WARN))], 1.0),
        ([(0, stop_advice(retry_after_ms=3_000)), (2, stop_advice(retry_after_ms=3_000))], 5.0),
        ([(0, stop_advice()), (4, Backpressure(2, PressureLevel.OK))], 4.0),
        ([(0, stop_advice())], 60.0),
        ([(0, stop_advice(retry_after_ms=600_000))], 60.0),
    ],
)
def test_stop_holds_until_another_level_or_its_timeout(
    advice: list[tuple[float, Backpressure]], seconds: float
) -> None:
    assert seconds_until_delivery(*advice) == pytest.approx(seconds, abs=0.4)
