"""Valid frames in random order, from clients that follow no rule, end at most their own connection.

The frames are drawn from a seed, and time is virtual. Checked: the server has no internal error, answers each
request once, obeys the protocol and its credit, serves other clients, and leaves nothing behind.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import Delta, opaque, sparse_add
from delta_prop.api.propagator import Propagator
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Dot, Source
from delta_prop_wire.errors import UsageError
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    Filter,
    Frame,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    PressureLevel,
    Start,
    StartAt,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.message_rules import Role
from delta_prop_wire.slicing import rows_of
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

if TYPE_CHECKING:
    from delta_prop.platform.ports import Stream
    from delta_prop.server.service import Address, Service

U64_MAX = (1 << 64) - 1
OFFSET_MAX = (1 << 63) - 1
TOPICS = ("*", "v:v1", "ns:rows", "ns:nobody", "op:opaque", "op:63", "c:news")


class RandomClient:
    """A client that sends random frames."""

    def __init__(self, stream: Stream, rng: random.Random, log_id: bytes) -> None:
        self._stream = stream
        self._rules = Connection(Role.CLIENT) if rng.random() < 0.7 else None
        """The protocol rules, checked in both directions; None if invalid frames are sent too."""
        self._decoder = Decoder()
        self._rng = rng
        self._log_id = log_id
        self._sequence = 1
        self._next_counter = 1
        self.requested: set[int] = set()
        self.answered: Counter[int] = Counter()
        self.answerable: set[int] = set()
        """Requests that need an answer, unless the connection ends."""
        self.ended = False
        self.delivered = 0
        self._offset_min = 0  # the lowest offset that the next delivery may have
        self.sent: Counter[str] = Counter()
        self.codes: Counter[ErrorCode] = Counter()
        self.origin = ORIGIN + (rng.randrange(4) << 20)

    async def talk(self, steps: int) -> None:
        """Send `steps` groups of random frames and read answers, until the connection ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            with suppress(ConnectionError):
                if self._rng.random() < 0.95:
                    await self._send(self._hello(origins=(OriginClaim(self.origin),)))
                for _ in range(steps):
                    await self._send(*(self._random_frame() for _ in range(self._rng.choice((1, 1, 2, 5)))))
                    await anyio.sleep(self._rng.choice((0, 0, 0.001, 0.1, 1.0)))
                await anyio.sleep(2)
                assert self.ended or self.answerable <= self.answered.keys(), (
                    "every request should have an answer"
                )
                if self._rng.random() < 0.3:  # disconnect in the middle of a frame
                    await self._stream.send([encode(opaque_batch(1, 50))[:200]])
            tasks.cancel_scope.cancel()

    async def _send(self, *frames: Frame) -> None:
        parts: list[bytes] = []
        for frame in frames:
            if self._rules and isinstance(frame, Ack) and self.requested - self.answered.keys():
                continue  # the client and the server would count its credit for different subscriptions
            with suppress(UsageError):
                parts.append(encode(frame) if self._rules is None else self._rules.send(frame))
                self.sent[type(frame).__name__] += 1
                if isinstance(frame, Subscribe | Unsubscribe):
                    self.requested.add(frame.sequence)
                    if not (isinstance(frame, Unsubscribe) and frame.drain):
                        self.answerable.add(frame.sequence)
        await self._stream.send(parts)

    async def _listen(self) -> None:
        buffer = memoryview(bytearray(65_536))
        source = self._rules or self._decoder
        with suppress(ConnectionError):
            while count := await self._stream.receive_into(buffer):
                source.receive(buffer[:count])
                while (frame := source.next_event()) is not NEED_BYTES:
                    self._receive(frame)
        self.ended = True

    def _receive(self, frame: Frame) -> None:
        if isinstance(frame, BatchFrame):
            self._check_offsets([row.offset for row in rows_of(frame)])
        elif isinstance(frame, DeltaFrame):
            self._check_offsets([frame.sequence])
        elif isinstance(frame, Ack | Nack) and frame.correlation_id is not None:
            self.answered[frame.correlation_id] += not _has_more_pages(frame)
            if isinstance(frame, Ack) and frame.subscribed is not None:
                self._offset_min = frame.subscribed.start.next_offset
        if isinstance(frame, Nack):
            self.codes[frame.code] += 1

    def _check_offsets(self, offsets: list[int]) -> None:
        for offset in offsets:
            assert offset >= self._offset_min, "offsets should rise"
            self._offset_min = offset + 1
            self.delivered += 1

    # --- random frames

    def _random_frame(self) -> Frame:
        make_frame = self._rng.choices(
            (
                self._batch,
                self._delta,
                self._hello,
                self._subscribe,
                self._unsubscribe,
                self._ack,
                self._minor_frame,
            ),
            (3, 2, 1, 4, 2, 4, 2),
        )[0]
        return make_frame()

    def _request(self) -> int:
        self._sequence += 1
        return self._sequence

    def _hello(self, **more: Any) -> Subscribe:
        rng = self._rng
        if not more:
            more = {
                "origins": tuple(
                    OriginClaim(self.origin + (rng.randrange(2) << 20), rng.choice((0, 0, 1, 5, 2**32 - 1)))
                    for _ in range(rng.randrange(3))
                ),
                "features": rng.choice(((), ("lz4",), ("zstd", "what"))),
                "token": rng.choice((None, "anything")),
                "source": rng.choice(list(Source)),
            }
        return Subscribe(self._request(), Hello(**more))

    def _subscribe(self) -> Subscribe:
        rng = self._rng
        topics = tuple(Topic.parse(topic) for topic in rng.sample(TOPICS, rng.randint(1, 3)))
        group = rng.choice((None, None, None, "g", "h"))
        request = Subscription(
            rng.randrange(4),
            topics,
            self._start(),
            credit=rng.choice(
                (None, Credit(0, 0), Credit(1, 1), Credit(5, 10_000), Credit(U64_MAX, U64_MAX))
            ),
            group=group,
            batch_deltas_max=rng.choice((1, 100, 65_536)),
            wait_ms_max=rng.choice((0, 10, 60_000)),
            filter=rng.choice(
                (None, None, Filter((Source.LOCAL,)), Filter((), ()), Filter((Source.IMPORT,)))
            ),
            deltas=rng.random() < 0.3,
        )
        return Subscribe(self._request(), request)

    def _start(self) -> Start:
        return self._rng.choice(
            (
                Start(StartAt.LATEST),
                Start(StartAt.LATEST),
                Start(StartAt.EARLIEST),
                Start(StartAt.OFFSET, self._rng.choice((0, 3, OFFSET_MAX))),
                Start(StartAt.TIME, self._rng.choice((0, OFFSET_MAX))),
                Start(StartAt.CURSOR, self._cursor()),
                Start(StartAt.GROUP),
            )
        )

    def _cursor(self) -> Cursor:
        log_id = self._log_id if self._rng.random() < 0.7 else b"another log's id"
        return Cursor(log_id, self._rng.choice((0, 0, 1, 99)), self._rng.choice((0, 5, 50, OFFSET_MAX)))

    def _unsubscribe(self) -> Unsubscribe:
        return Unsubscribe(self._request(), self._rng.randrange(4), drain=self._rng.random() < 0.5)

    def _ack(self) -> Ack:
        rng = self._rng
        return Ack(
            rng.choice((0, 7, OFFSET_MAX)),
            processed=rng.choice((None, 0, 10, OFFSET_MAX)),
            credit=rng.choice((None, Credit(0, 0), Credit(3, 3_000), Credit(U64_MAX, U64_MAX))),
            cursor=self._cursor() if rng.random() < 0.2 else None,
            correlation_id=rng.choice((None, 1, 2)) if self._rules is None else None,
        )

    def _minor_frame(self) -> Frame:
        rng = self._rng
        return rng.choice(
            (
                Heartbeat(rng.choice((0, OFFSET_MAX)), processed=rng.choice((None, 0, OFFSET_MAX))),
                Nack(3, ErrorCode.PROCESSING_FAILED, "never"),
                Backpressure(
                    1, PressureLevel.STOP, rate=rng.choice((None, 1e-300, 1e300)), retry_after_ms=200
                ),
                Backpressure(1, PressureLevel.WARN, rate=rng.choice((0.5, 1e-300, 1e6))),
                Backpressure(2, PressureLevel.OK),
            )
        )

    def _batch(self) -> BatchFrame:
        rng = self._rng
        base = rng.choice(
            (self._next_counter, self._next_counter, self._next_counter, 1, self._next_counter + 3)
        )
        rows = rng.choice((1, 2, 40))
        frame = opaque_batch(
            base,
            rows,
            epoch=rng.choice((1, 1, 1, 2, 3, 0)),
            origin=rng.choice((self.origin, self.origin, self.origin + 1)),
            level=rng.choice((AckLevel.MEMORY, AckLevel.MEMORY, AckLevel.QUORUM)),
        )
        self._next_counter = base + rows
        return frame

    def _delta(self) -> DeltaFrame:
        rng = self._rng
        dot = rng.choice((None, Dot(self.origin, self._next_counter), Dot(self.origin, 1)))
        operation = rng.choice((opaque(b"x"), sparse_add([1], [1.0])))
        id_ = rng.choice((None, b"the same id, ever"[:16]))
        level = rng.choice((None, *AckLevel))
        delta = Delta("v1", operation, rng.choice(("rows", "other")), id=id_, dot=dot)
        return DeltaFrame(
            rng.choice((self._next_counter, 5, 5 if self._rules else 0)), delta, True, ack_level=level
        )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_random_frame_orders_end_only_their_connection(
    backend: Any, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    frame_counts: Counter[str] = Counter()
    codes: Counter[ErrorCode] = Counter()
    for seed in range(200 if full else 2 if backend == "asyncio" else 1):
        run_virtual(lambda seed=seed: run_clients(seed, frame_counts, codes), backend=backend)
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert not errors, f"seed {seed}: {errors[0].getMessage()} {errors[0].exc_text}"
        caplog.clear()
    print(dict(frame_counts), {code.name: count for code, count in codes.items()})
    assert len(frame_counts) == 8
    assert len(codes) >= (
        6 if backend == "asyncio" else 4
    )  # trio has one seed, and schedules tasks in its own order


async def run_clients(seed: int, frame_counts: Counter[str], codes: Counter[ErrorCode]) -> None:
    rng = random.Random(f"odd {seed}")
    conditions = NetworkConditions(
        latency_s=0.001, jitter_s_max=0.01, chunk_bytes_max=rng.choice((7, 300, 60_000))
    )
    network = VirtualNetwork(seed, conditions)
    async with (
        Propagator(world=virtual_world(seed, network=network)) as p,
        serving(p, ServerSettings(port=0)) as (service, address),
    ):
        clients: list[RandomClient] = []

        async def run_client(number: int) -> None:
            async with connected(address, network) as raw:
                client_rng = random.Random(f"{seed} {number}")
                client = RandomClient(raw.stream, client_rng, p.internals().partition.log.log_id)
                clients.append(client)
                await client.talk(rng.randint(1, 40))

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(run_client, number)
            await check_honest_clients(address, network, p)
        for client in clients:
            frame_counts.update(client.sent)
            codes.update(client.codes)
            assert all(count == 1 for count in client.answered.values()), f"seed {seed}: {client.answered}"
            assert client.answered.keys() <= client.requested
        await check_nothing_left(service, p)


def _has_more_pages(frame: Ack | Nack) -> bool:
    return isinstance(frame, Ack) and frame.welcome is not None and frame.more


async def check_honest_clients(address: Address, network: VirtualNetwork, p: Propagator) -> None:
    """Publish and read through well-behaved clients, and check each delivery."""
    origin = ORIGIN + (99 << 20)
    async with connected(address, network) as producer, connected(address, network) as subscriber:
        await subscriber.hello()
        await subscriber.subscribe("ns:honest")
        await producer.hello(origin)
        for number in range(1, 31):
            delta = Delta(f"h{number}", opaque(b"x"), "honest", dot=Dot(origin, number))
            await producer.send(DeltaFrame(number, delta, True))
            await producer.until_acked(number)
            frame = await subscriber.until(BatchFrame)
            assert frame.batch.keys == [f"h{number}"]
            await anyio.sleep(0.3)


async def check_nothing_left(service: Service, p: Propagator) -> None:
    """Check that the disconnected clients leave nothing."""
    await anyio.sleep(20)
    assert service.connections() == []
    context = service._context
    assert context is not None
    assert context.receive_budget.free_bytes == service.settings.receiving_bytes_max
    assert not any(group.has_member for group in context.served.groups.statistics().values())
