"""Delivery over sockets: catching up by sendfile ranges, takeover in groups, Delta frames."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.platform.sockets import SocketStream
from delta_prop.server.consumer_session import ConsumerSession
from delta_prop_broker.disk import FileRange
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    DeltaFrame,
    Nack,
    Start,
    StartAt,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.raw import FrameClient, connected, serving

if TYPE_CHECKING:
    from delta_prop.server.send_queue import SendChunk
    from delta_prop_wire.frames import Subscribed


@pytest.fixture(params=["asyncio", "asyncio+uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    name, _, uvloop = request.param.partition("+")
    return (name, {"use_uvloop": True}) if uvloop else name


pytestmark = pytest.mark.anyio
LOG = LogSettings(tail_bytes_max=1, compact=False, reserve_bytes=0, free_bytes_min=0)
GROUP = Start(StartAt.GROUP)


async def publish_batches(p: Propagator, batch_count: int, rows_per_batch: int = 10) -> None:
    for number in range(batch_count):
        data = bytes([number % 251]) * 300
        receipt = p.offer(*(Delta(f"v{row}", opaque(data), "rows") for row in range(rows_per_batch)))
    await receipt.wait()


async def receive_offsets(client: FrameClient, count: int) -> list[int]:
    """Receive frames until there are `count` rows; return the offsets of the rows."""
    offsets: list[int] = []
    while len(offsets) < count:
        frame = await client.until(BatchFrame)
        offsets += range(frame.sequence, frame.sequence + frame.batch.count)
    return offsets


async def ack_processed(client: FrameClient, offset: int) -> None:
    """Send `processed`, and wait until the server has handled it: the next frame gets an answer."""
    await client.send(Ack(0, processed=offset), Unsubscribe(9, 77, drain=False))
    assert (await client.until(Nack)).correlation_id == 9


async def test_late_subscriber_gets_file_ranges_then_new_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[FileRange] = []

    def record_ranges(self: ConsumerSession, now: float, bytes_max: int, **more: Any) -> SendChunk | None:
        chunk = take(self, now, bytes_max, **more)
        if chunk is not None and isinstance(chunk.parts, FileRange):
            ranges.append(chunk.parts)
        return chunk

    take = ConsumerSession.take
    monkeypatch.setattr(ConsumerSession, "take", record_ranges)
    async with Propagator(data=tmp_path, log=LOG) as p:
        await publish_batches(p, 300)
        async with serving(p) as (_, address), connected(address) as client:
            await client.hello()
            await client.subscribe()
            assert await receive_offsets(client, 3_000) == list(range(3_000))
            assert sum(file_range.size for file_range in ranges) > 400_000
            await publish_batches(p, 3)
            assert await receive_offsets(client, 30) == list(range(3_000, 3_030))


async def test_unsubscribe_during_a_file_range_leaves_the_frames_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last subscription ends while the socket waits for the client to read a range of a file."""
    subscriptions: list[tuple[ConsumerSession, int]] = []
    sizes: list[int] = []

    def record(self: ConsumerSession, request: Subscription, *more: Any) -> Subscribed:
        granted = subscribe(self, request, *more)
        subscriptions.append((self, granted.subscription))
        return granted

    async def unsubscribe_and_send(self: SocketStream, part: FileRange) -> None:
        sizes.append(part.size)
        if len(sizes) == 1:
            session, number = subscriptions[0]
            session.unsubscribe(number)
        await send_file(self, part)

    send_file, subscribe = SocketStream.send_file, ConsumerSession.subscribe
    monkeypatch.setattr(SocketStream, "send_file", unsubscribe_and_send)
    monkeypatch.setattr(ConsumerSession, "subscribe", record)
    async with Propagator(data=tmp_path, log=LOG) as p:
        await publish_batches(p, 300)
        async with serving(p) as (_, address), connected(address) as client:
            await client.hello()
            await client.subscribe()
            while not sizes:
                await receive_offsets(client, 10)
            await client.send(Subscribe(3, Subscription(2, (Topic.parse("*"),), Start(StartAt.LATEST))))
            while (await client.until(Ack)).correlation_id != 3:
                pass
            await publish_batches(p, 1)
            assert await receive_offsets(client, 10) == list(range(3_000, 3_010))


async def test_group_takeover_loses_nothing(tmp_path: Path) -> None:
    async with Propagator(data=tmp_path, log=LOG) as p, serving(p) as (_, address):
        await publish_batches(p, 20, rows_per_batch=2)
        async with connected(address) as first, connected(address) as second:
            for client in (first, second):
                await client.hello()
            await first.subscribe(start=GROUP, group="g", credit=Credit(5, 1 << 30))
            assert await receive_offsets(first, 6) == list(range(6))
            await ack_processed(first, 4)
            answer = await second.subscribe(start=GROUP, group="g")
            assert answer.subscribed is not None
            assert (answer.subscribed.start.next_offset, answer.subscribed.standby) == (4, True)
            await ack_processed(first, 5)
            await first.stream.aclose()
            while (takeover := await second.until(Ack)).correlation_id is None:
                pass
            assert (takeover.correlation_id, takeover.subscribed) == (
                answer.correlation_id,
                replace(
                    answer.subscribed, start=answer.subscribed.start._replace(next_offset=5), standby=False
                ),
            )
            assert await receive_offsets(second, 35) == list(range(5, 40))


async def test_group_cursor_survives_a_restart(tmp_path: Path) -> None:
    for first_offset in (0, 10):
        async with Propagator(data=tmp_path, log=LOG) as p:
            if not first_offset:
                await publish_batches(p, 2)
            async with serving(p) as (_, address), connected(address) as client:
                await client.hello()
                granted = (await client.subscribe(start=GROUP, group="g")).subscribed
                assert granted is not None
                assert granted.start.next_offset == first_offset
                await receive_offsets(client, 20 - first_offset)
                await ack_processed(client, 10)


async def test_single_delta_frames_carry_lamport_numbers() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await publish_batches(p, 2, rows_per_batch=3)
        await client.hello()
        await client.subscribe("ns:rows", deltas=True)
        frames = [await client.until(DeltaFrame) for _ in range(6)]
        assert [(frame.sequence, frame.lamport) for frame in frames] == [(row, row + 1) for row in range(6)]
