"""A server that shuts down first delivers the rest of its log to its subscribers and its sinks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.client import ClientSettings, Producer, Subscriber
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Ack, BatchFrame, Credit, Heartbeat, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.process import served
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.server.raw import FrameClient

RUNS = 3


async def read_to_the_end(reader: FrameClient, *, credit_per_frame: int = 0) -> tuple[list[int], Nack]:
    """Return the offsets of all rows and the final refusal.

    `credit_per_frame`: deltas of credit that are granted after each frame.
    """
    offsets: list[int] = []
    while not isinstance(frame := await reader.next(), Nack):
        assert frame is not None, "the connection should end with a refusal"
        if isinstance(frame, BatchFrame):
            offsets += range(frame.sequence, frame.sequence + frame.batch.count)
            if credit_per_frame:
                await reader.send(Ack(credit=Credit(credit_per_frame, 1 << 20)))
        else:
            assert isinstance(frame, Ack | Heartbeat)
    return offsets, frame


@pytest.mark.parametrize("level", [AckLevel.MEMORY, AckLevel.DURABLE])
def test_readers_get_rows_committed_after_shutdown_began(level: AckLevel) -> None:
    async def run() -> None:
        network = VirtualNetwork(1)
        world = virtual_world(1, network=network, disk=SimDisk(1), thread_delay_s_max=0.2)
        async with (
            Propagator(data="x", log=LogSettings(compact=False), world=world) as p,
            serving(p) as (service, address),
            connected(address, network) as producer,
            connected(address, network) as reads_all,
            connected(address, network) as granting,
            connected(address, network) as reads_none,
        ):
            await producer.hello(ORIGIN)
            for reader in (reads_all, granting, reads_none):
                await reader.hello()
            await reads_all.subscribe()
            await granting.subscribe(credit=Credit(1, 1 << 20))
            await reads_none.subscribe("ns:nothing of that")
            await producer.send(*(opaque_batch(base, 10, level=level) for base in range(1, 400, 10)))
            while p.internals().partition.log.next_offset < 400:  # noqa: ASYNC110 - an append has no event
                await anyio.sleep(0.001)
            assert p.internals().partition.log.high_watermark < 400
            service.stop()
            for reader, credit_per_frame, row_count in (
                (reads_all, 0, 400),
                (granting, 10, 400),
                (reads_none, 0, 0),
            ):
                offsets, nack = await read_to_the_end(reader, credit_per_frame=credit_per_frame)
                assert offsets == list(range(row_count))
                assert (nack.code, nack.sequence, nack.correlation_id) == (ErrorCode.SHUTTING_DOWN, 0, None)
            assert (await producer.until_acked(400)).sequence == 400

    run_virtual(run)


def test_stalled_reader_and_gap_cannot_exceed_drain_timeout() -> None:
    async def run() -> None:
        network = VirtualNetwork(1)
        world = virtual_world(1, network=network, disk=SimDisk(1))
        settings = ServerSettings(port=0, drain_timeout_s=3.0)
        async with (
            Propagator(data="x", log=LogSettings(compact=False), world=world) as p,
            serving(p, settings) as (service, address),
            connected(address, network) as producer,
            connected(address, network) as reader,
            connected(address, network) as idle,
        ):
            await producer.hello(ORIGIN)
            await reader.hello()
            await reader.subscribe()
            await idle.hello()
            await idle.subscribe(credit=Credit(0, 0))
            await producer.send(opaque_batch(1, 5), opaque_batch(7, 5))  # counter 6 is missing
            await producer.until_acked(5)
            began = anyio.current_time()
            service.stop()
            offsets, nack = await read_to_the_end(reader)
            assert (offsets, nack.code) == (list(range(5)), ErrorCode.SHUTTING_DOWN)
            assert (await idle.until(Nack)).code is ErrorCode.SHUTTING_DOWN
            assert anyio.current_time() - began <= 3.0 + 1.0

    run_virtual(run)


def test_slow_reader_gets_everything_that_is_in_socket_buffers() -> None:
    batch_count, batch_rows = 25, 60

    async def run() -> None:
        async with (
            Propagator() as p,
            serving(p) as (service, address),
            connected(address) as producer,
            connected(address) as reader,
        ):
            await producer.hello(ORIGIN)
            await reader.hello()
            await reader.subscribe()
            for base in range(1, batch_count * batch_rows, batch_rows):
                deltas = [Delta(f"v{row}", opaque(bytes(2_000))) for row in range(batch_rows)]
                await producer.send(
                    BatchFrame(base, encode_batch(deltas, origin=ORIGIN, base=base), ack_wanted=True)
                )
            await producer.until_acked(batch_count * batch_rows)
            service.stop()
            row_count = 0
            while not isinstance(frame := await reader.next(), Nack):
                assert frame is not None, (
                    f"the connection should end with a refusal, not after {row_count} rows"
                )
                if isinstance(frame, BatchFrame):
                    row_count += frame.batch.count
                    await anyio.sleep(0.1)  # 2.5 s in all
                    # If the server had closed its socket, a reset would answer this, and the rest be lost.
                    await reader.send(Ack(processed=row_count))
            assert row_count == batch_count * batch_rows

    anyio.run(run)


def test_sigterm_delivers_everything_logged(tmp_path: Path) -> None:
    for number in range(RUNS):
        data, lines = tmp_path / f"data {number}", tmp_path / f"{number}.jsonl"
        config = tmp_path / f"{number}.toml"
        config.write_text(f'[[sinks]]\nkind = "jsonlines"\npath = "{lines}"\n')
        offsets = anyio.run(_read_during_shutdown, data, config)
        status = subprocess.run(
            [sys.executable, "-m", "delta_prop", "status", "--data", str(data), "--json"],
            check=True,
            capture_output=True,
        )
        end = json.loads(status.stdout)["next_offset"]
        print(
            f"run {number}: {end} rows logged, {len(offsets)} read, {lines.read_text().count(chr(10))} lines"
        )
        assert end > 100
        assert offsets == list(range(end))
        assert lines.read_text().count("\n") == end


async def _read_during_shutdown(data: Path, config: Path) -> list[int]:
    """Return the offsets that a subscriber got from a server that is shut down while a producer floods it."""
    offsets_read: list[int] = []

    async def follow(subscriber: Subscriber) -> None:
        async for offset, _, _ in subscriber:
            offsets_read.append(offset)

    async def flood(producer: Producer) -> None:
        number = 0
        while True:
            for _ in range(20):
                try:
                    producer.offer(Delta(f"v{number % 50}", opaque(bytes(200))))
                except Refused:  # the server is shutting down
                    await anyio.sleep(0.01)
                number += 1
            await anyio.sleep(0.001)

    with served(data, "--config", str(config)) as server:
        address = f"127.0.0.1:{server.port}"
        client = Producer(address, name="flood", settings=ClientSettings(close_timeout_s=0.1))
        with suppress(Refused):  # some deltas are refused at the shutdown
            async with (
                Subscriber(address, "*", start="earliest") as subscriber,
                client as producer,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(follow, subscriber)
                tasks.start_soon(flood, producer)
                with anyio.fail_after(30):
                    while len(offsets_read) < 500:  # noqa: ASYNC110 - polled until a deadline
                        await anyio.sleep(0.01)
                    server.process.send_signal(signal.SIGTERM)
                    assert await anyio.to_thread.run_sync(server.process.wait) == 0
                    while len(offsets_read) < subscriber.received:  # noqa: ASYNC110 - received rows are still queued
                        await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()
    return offsets_read
