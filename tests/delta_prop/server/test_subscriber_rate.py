"""Deliveries under a subscriber's Backpressure, in virtual time: an even rate, and a stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.embedded import Propagator
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

    from tests.delta_prop.server.raw import Raw

AT_ONCE_S = 0.25
"""The largest burst, in seconds of the rate."""


def in_virtual_time(story: Callable[[Propagator, Raw], Awaitable[None]], *, data: str | None = None) -> None:
    """Run a story with a service, in memory or on disk, and a client after its hello."""

    async def run() -> None:
        network = VirtualNetwork(1)
        world = virtual_world(1, network=network, disk=SimDisk(1))
        async with (
            Propagator(data=data, log=data and LogSettings(compact=False), world=world) as p,
            serving(p) as (_, address),
            connected(address, network) as client,
        ):
            await client.hello()
            await story(p, client)

    run_virtual(run)


async def publish(p: Propagator, rows: int, namespaces: tuple[str, ...] = ("a",)) -> None:
    deltas = [Delta(f"v{row}", opaque(b"%d" % row), namespaces[row % len(namespaces)]) for row in range(rows)]
    for begin in range(0, rows, 2_000):
        await p.publish(*deltas[begin : begin + 2_000])


async def arrivals(client: Raw, rows: int) -> list[tuple[float, int]]:
    """Return each frame's time and number of rows; check that all rows came once, in order."""
    found: list[tuple[float, int]] = []
    offsets: list[int] = []
    while len(offsets) < rows:
        frame = await client.next()
        if isinstance(frame, DeltaFrame):
            new = [frame.sequence]
        elif isinstance(frame, BatchFrame):
            row_offsets = frame.batch.row_offsets
            count = frame.batch.count
            new = (
                list(range(frame.sequence, frame.sequence + count))
                if row_offsets is None
                else row_offsets.tolist()
            )
        else:
            assert frame is not None
            continue
        found.append((anyio.current_time(), len(new)))
        offsets += new
    assert offsets == sorted(set(offsets))
    return found


def check_even_rate(came: list[tuple[float, int]], rate: float, began: float) -> None:
    """Check that the rate is never exceeded, and that it is reached."""
    for start, _ in came:
        at_once = sum(rows for at, rows in came if start <= at < start + 0.01)
        assert at_once <= rate * (AT_ONCE_S + 0.01)
    total = sum(rows for _, rows in came)
    assert total / rate * 0.9 - AT_ONCE_S <= came[-1][0] - began <= total / rate * 1.1


@pytest.mark.parametrize("data", [None, "x"])
@pytest.mark.parametrize("timing", ["catching up", "pushed"])
@pytest.mark.parametrize("shape", ["batches", "deltas", "narrowed"])
def test_deliveries_under_a_rate_are_even(data: str | None, timing: str, shape: str) -> None:
    async def story(p: Propagator, client: Raw) -> None:
        rate, rows = 500.0, 3_000
        topics = ("ns:a",) if shape == "narrowed" else ()
        row_namespaces = ("a", "b") if shape == "narrowed" else ("a",)
        if timing == "catching up":
            await publish(p, rows, row_namespaces)
        await client.send(Backpressure(1, PressureLevel.WARN, rate=rate))
        began = anyio.current_time()
        await client.subscribe(*topics, deltas=shape == "deltas")
        if timing == "pushed":
            await publish(p, rows, row_namespaces)
        came = await arrivals(client, rows // len(row_namespaces))
        check_even_rate(came, rate, began)

    in_virtual_time(story, data=data)


def test_low_rate_delivers_row_by_row() -> None:
    async def story(p: Propagator, client: Raw) -> None:
        await publish(p, 6)
        await client.send(Backpressure(1, PressureLevel.THROTTLE, rate=2.0))
        await client.subscribe()
        came = await arrivals(client, 6)
        assert [rows for _, rows in came] == [1] * 6
        assert came[-1][0] - came[0][0] == pytest.approx(2.5, abs=0.1)

    in_virtual_time(story)


def test_ok_lifts_the_rate() -> None:
    async def story(p: Propagator, client: Raw) -> None:
        await publish(p, 2_000)
        await client.send(Backpressure(1, PressureLevel.WARN, rate=1.0))
        await client.subscribe()
        await arrivals(client, 1)
        await client.send(Backpressure(2, PressureLevel.OK, rate=1.0))
        began = anyio.current_time()
        await arrivals(client, 1_999)
        assert anyio.current_time() - began < 1

    in_virtual_time(story)


def test_file_ranges_respect_the_rate() -> None:
    service = FakeService.on_disk()
    for _ in range(300):
        service.rows(1, data=bytes(3_000))
    service.commit()
    for rows_max, kinds in ((60, {"parts", "range"}), (7, {"parts"})):
        subscriber = FakeSubscriber(service, rows_max=rows_max)
        subscriber.subscribe(subscription(start=EARLIEST))
        subscriber.write_all()
        assert subscriber.got == expected_rows(service)
        assert set(subscriber.kinds) == kinds


def test_batches_within_the_row_limit_are_not_sliced() -> None:
    service = multi_segment_service()
    subscriber = FakeSubscriber(service, rows_max=5)  # each batch has two rows
    subscriber.subscribe(subscription(start=EARLIEST))
    subscriber.write_all()
    assert subscriber.got == expected_rows(service)
    assert all(isinstance(one, BatchFrame) and one.batch.row_offsets is None for one in subscriber.frames)


# --- stop


def first_after(*advice: tuple[float, Backpressure]) -> float:
    """Return the seconds from the first advice until a delta published after it arrives."""
    took: list[float] = []

    async def story(p: Propagator, client: Raw) -> None:
        await client.subscribe()
        began = anyio.current_time()
        await client.send(advice[0][1])
        await anyio.sleep(0.05)
        await publish(p, 1)

        async def say() -> None:
            for at, frame in advice[1:]:
                await anyio.sleep(began + at - anyio.current_time())
                await client.send(frame)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(say)
            tasks.start_soon(beat, client)
            with anyio.fail_after(100):
                while not took:
                    try:
                        await client.until(BatchFrame)
                        took.append(anyio.current_time() - began)
                    except TimeoutError:
                        pass
            tasks.cancel_scope.cancel()

    in_virtual_time(story)
    return took[0]


async def beat(client: Raw) -> None:
    while True:
        await anyio.sleep(5)
        await client.send(Heartbeat(1))


def stop(**more: Any) -> Backpressure:
    return Backpressure(1, PressureLevel.STOP, **more)


@pytest.mark.parametrize(
    ("advice", "seconds"),
    [
        ([(0, stop(retry_after_ms=3_000))], 3.0),
        ([(0, stop(retry_after_ms=3_000)), (1, Backpressure(2, PressureLevel.OK))], 1.0),
        ([(0, stop(retry_after_ms=3_000)), (1, Backpressure(2, PressureLevel.WARN))], 1.0),
        ([(0, stop(retry_after_ms=3_000)), (2, stop(retry_after_ms=3_000))], 5.0),
        ([(0, stop()), (4, Backpressure(2, PressureLevel.OK))], 4.0),
        ([(0, stop())], 60.0),
        ([(0, stop(retry_after_ms=600_000))], 60.0),
    ],
)
def test_stop_holds_until_another_level_or_its_timeout(
    advice: list[tuple[float, Backpressure]], seconds: float
) -> None:
    assert first_after(*advice) == pytest.approx(seconds, abs=0.4)
