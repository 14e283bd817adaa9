"""Requests resent over connections that break have one effect, and always get the first offset.

Checked with single frames and with the client's producer, through a proxy that cuts, splits, delays and
stalls the bytes.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, create, opaque, sparse_add
from delta_prop.api.propagator import Propagator
from delta_prop.client import Producer
from delta_prop.server.service import Address
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Dot, make_origin
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    DeltaFrame,
    Hello,
    Nack,
    OriginClaim,
    Start,
    StartAt,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.delta_prop.server.raw import EARLIEST, ORIGIN, FrameClient, connected, serving
from tests.full_log import read_all
from tests.net.proxy import Proxy, no_faults, proxy_to, random_faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.calls.outcomes import PublishAck
    from delta_prop.calls.receipt import Receipt

pytestmark = pytest.mark.anyio
SINGLES_ORIGIN = make_origin(78, 2)
RESENDS_MAX = 20
FAULTY_CONNECTIONS = 60
"""After this many connections the proxy injects no faults, so that the test ends."""
ANSWER_S_MAX = 0.25


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Request:
    """A frame of `row_count` rows that is sent at least `sends_min` times."""

    make_frame: Callable[[int], BatchFrame | DeltaFrame]
    row_count: int
    sends_min: int
    sends: int = 0
    offsets: dict[int, int] = field(default_factory=dict)  # by row, as first acknowledged
    first_acks: Counter[int] = field(default_factory=Counter)
    code: ErrorCode | None = None  # the code of a refusal, which later answers have to repeat

    @property
    def is_open(self) -> bool:
        return self.sends < self.sends_min or (self.code is None and len(self.offsets) < self.row_count)

    def record_refusal(self, code: ErrorCode) -> None:
        assert not self.offsets
        assert self.code in (None, code), "a later refusal should equal the first one"
        self.code = code

    def record_ack(self, row: int, offset: int, *, duplicate: bool) -> None:
        assert self.code is None, "a refused row should never be accepted"
        assert self.offsets.setdefault(row, offset) == offset, "a later offset should equal the first one"
        self.first_acks[row] += not duplicate
        assert self.first_acks[row] <= 1, "only one answer should report the row as new"


def draw_requests(rng: random.Random, epochs: dict[int, int], count: int) -> list[Request]:
    """Return batches of one origin, single deltas of another one, and deltas that have an id only.

    Some deltas repeat an earlier delta with its id, some have an earlier id and other content.
    """
    drawn: list[Request] = []
    next_counter = dict.fromkeys(epochs, 1)
    identified: list[Delta] = []
    for number in range(count):
        kind = rng.choice(("batch", "batch with ids", "dot", "dot and id", "id", "refused"))
        row_count = rng.randint(1, 4) if kind.startswith("batch") else 1
        origin = ORIGIN if kind.startswith("batch") else SINGLES_ORIGIN
        base = next_counter[origin]
        deltas = []
        for row in range(row_count):
            operation = opaque(b"%d" % number) if rng.random() < 0.5 else create([number, 1.0])
            if kind == "refused":
                operation = sparse_add([1], [1.0])  # the vector does not exist
            delta = Delta(f"{number}-{row}", operation)
            if kind.endswith(("id", "ids")):
                earlier = rng.choice(identified) if identified and rng.random() < 0.3 else None
                if earlier is None:
                    delta = replace(delta, id=rng.randbytes(16))
                else:
                    delta = earlier if rng.random() < 0.7 else replace(delta, id=earlier.id)
                identified.append(delta)
            dot = Dot(origin, base + row) if kind in ("dot", "dot and id", "refused") else None
            deltas.append(replace(delta, dot=dot))
        if kind != "id":
            next_counter[origin] += row_count
        make_frame = frame_of(deltas, kind, origin, base, epochs[origin])
        drawn.append(Request(make_frame, row_count, rng.randint(1, RESENDS_MAX)))
    return drawn


def frame_of(
    deltas: list[Delta], kind: str, origin: int, base: int, epoch: int
) -> Callable[[int], BatchFrame | DeltaFrame]:
    if not kind.startswith("batch"):
        return lambda sequence: DeltaFrame(sequence, deltas[0], ack_wanted=True)
    batch = encode_batch(deltas, origin=origin, base=base, epoch=epoch, ack_level=AckLevel.MEMORY)
    return lambda sequence: BatchFrame(sequence, batch, ack_wanted=True)


class ResendingClient:
    """A client that resends its requests until all of them are answered."""

    def __init__(self, proxy: Proxy, rng: random.Random) -> None:
        self.connections = self.frames = 0
        self._proxy = proxy
        self._rng = rng

    async def send_all(self, epochs: dict[int, int], all_requests: list[Request]) -> None:
        while any(request.is_open for request in all_requests):
            if self.connections > FAULTY_CONNECTIONS:
                self._proxy.draw_faults = no_faults
            grants = await self._run_connection(epochs, all_requests)
            assert not grants or grants == epochs, "a duplicate hello should get the same epoch"

    async def _run_connection(self, epochs: dict[int, int], all_requests: list[Request]) -> dict[int, int]:
        """Run one connection: hello, then the open requests, some twice; return the granted epochs."""
        self.connections += 1
        grants: dict[int, int] = {}
        with suppress(ConnectionError, OSError):
            async with connected(Address(*self._proxy.address)) as client:
                claims = tuple(OriginClaim(origin, epoch) for origin, epoch in epochs.items())
                hello = Subscribe(1, Hello(origins=claims))
                await client.send(*[hello] * self._rng.randint(1, 3))
                stalled = self._rng.random() < 0.1
                if stalled:
                    self._proxy.stall("back")
                rows = await self._send_open(client, all_requests)
                if stalled:
                    await anyio.sleep(0.02)
                    if self._rng.random() < 0.5:
                        self._proxy.cut()
                    self._proxy.resume("back")
                with anyio.move_on_after(ANSWER_S_MAX):
                    await receive_answers(client, rows, grants)
        return grants

    async def _send_open(self, client: FrameClient, all_requests: list[Request]) -> list[tuple[Request, int]]:
        """Send the open requests; return the sent rows by their sequence."""
        rows: list[tuple[Request, int]] = []
        sent_requests: list[Request] = []
        for candidate in all_requests:
            if not candidate.is_open:
                continue
            resent = self._rng.sample(sent_requests, 1) if sent_requests and self._rng.random() < 0.3 else []
            for request in (candidate, *resent):
                await client.send(request.make_frame(len(rows) + 1))
                rows += [(request, row) for row in range(request.row_count)]
                request.sends += 1
                self.frames += 1
            sent_requests.append(candidate)
        return rows


async def receive_answers(
    client: FrameClient, rows: list[tuple[Request, int]], grants: dict[int, int]
) -> None:
    """Read answers until all rows are answered or the connection is closed."""
    last_sequence = 0
    while (last_sequence < len(rows) or not grants) and (frame := await client.next()) is not None:
        if isinstance(frame, Nack):
            rows[frame.sequence - 1][0].record_refusal(frame.code)
            continue
        assert isinstance(frame, Ack), frame
        if frame.welcome is not None:
            grants.update({grant.origin: grant.epoch for grant in frame.welcome.origins})
        for ack_range in frame.ranges:
            for sequence in range(ack_range.first, ack_range.last + 1):
                request, row = rows[sequence - 1]
                request.record_ack(
                    row, ack_range.offset + sequence - ack_range.first, duplicate=ack_range.duplicate
                )
        last_sequence = max(last_sequence, frame.sequence)


@pytest.mark.parametrize("seed", range(3))
async def test_each_delta_has_one_effect_and_one_offset(seed: int, full: bool) -> None:
    rng = random.Random(f"repeats {seed}")
    draw_faults = random_faults(seed, cut_bytes_mean=6_000, delay_s_max=0.004, piece_bytes_max=2_000)
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        proxy_to((address.host, address.port), draw_faults=draw_faults, seed=seed) as proxy,
    ):
        sender = ResendingClient(proxy, rng)
        async with connected(address) as first:
            welcome = (await first.hello(ORIGIN, SINGLES_ORIGIN)).welcome
            assert welcome is not None
            epochs = {grant.origin: grant.epoch for grant in welcome.origins}
        all_requests = draw_requests(rng, epochs, 400 if full else 60)
        await sender.send_all(epochs, all_requests)
        logged = {
            logged_batch.offset + row: logged_batch.batch.keys[row]
            for logged_batch in read_all(p.internals().partition.log)
            if not logged_batch.batch.is_control
            for row in range(logged_batch.count)
        }
    acked_offsets = {offset for request in all_requests for offset in request.offsets.values()}
    print(
        f"seed {seed}: {len(all_requests)} requests in {sender.frames} frames over {sender.connections} "
        f"connections ({proxy.counts['reset']} reset, {proxy.counts['stall']} stalled): {len(logged)} effects"
    )
    assert {request.code for request in all_requests} == {None, ErrorCode.INVALID_DELTA, ErrorCode.ID_REUSED}
    assert acked_offsets == logged.keys()
    assert len(set(logged.values())) == len(logged), "each delta should be in the log once"
    assert max(request.sends for request in all_requests) >= RESENDS_MAX
    assert proxy.counts["reset"] > 5


async def test_duplicate_subscribes_and_unsubscribes_have_one_effect() -> None:
    rng = random.Random("subscriptions")
    draw_faults = random_faults(5, cut_bytes_mean=1_500, delay_s_max=0.002, piece_bytes_max=300)
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        proxy_to((address.host, address.port), draw_faults=draw_faults, seed=5) as proxy,
    ):
        for number in range(60):
            await p.publish(Delta(f"v{number}", opaque(b"x" * 50)))
        keys: list[str] = []
        log = p.internals().partition.log
        start, connections = EARLIEST, 0
        while len(keys) < 60:
            connections += 1
            request = Subscription(1, (Topic.parse("*"),), start)
            with suppress(ConnectionError, OSError), anyio.move_on_after(ANSWER_S_MAX):
                async with connected(Address(*proxy.address)) as client:
                    await client.send(Subscribe(1, Hello()))
                    for sequence in range(2, 2 + rng.randint(1, RESENDS_MAX)):
                        await client.send(Subscribe(sequence, request))
                    while (frame := await client.next()) is not None:
                        if isinstance(frame, BatchFrame):
                            assert frame.sequence == len(keys)
                            keys += frame.batch.keys
                            start = Start(StartAt.CURSOR, Cursor(log.log_id, log.epoch, len(keys)))
                        elif isinstance(frame, Ack) and frame.subscribed is not None:
                            assert frame.correlation_id == 2, "a duplicate request should not be granted"
                            assert frame.subscribed.start.next_offset == len(keys)
                        elif isinstance(frame, Nack):
                            assert (frame.code, frame.correlation_id != 2) == (ErrorCode.BAD_REQUEST, True)
                        if len(keys) == 60:
                            break
        assert keys == [f"v{number}" for number in range(60)]
        assert connections > 3
        async with connected(address) as client:
            await client.hello()
            await client.subscribe()
            await client.send(*(Unsubscribe(sequence, 1) for sequence in range(3, 23)))
            answers: list[tuple[type, int | None]] = []
            while len(answers) < 20:
                frame = await client.next()
                if isinstance(frame, Ack | Nack) and frame.correlation_id is not None:
                    answers.append((type(frame), frame.correlation_id))
            assert answers == [(Ack, 3), *((Nack, sequence) for sequence in range(4, 23))]
            await p.publish(Delta("late", opaque(b"x")))
            resubscribed = await client.subscribe("*", start=Start(StartAt.OFFSET, 60))
            assert resubscribed.subscribed is not None
            assert (await client.until(BatchFrame)).batch.keys == ["late"]


async def test_producer_restarts_get_the_first_offsets(full: bool) -> None:
    run_count, count = (20, 300) if full else (8, 60)
    draw_faults = random_faults(9, cut_bytes_mean=15_000, delay_s_max=0.004, piece_bytes_max=2_000)
    first_offsets: dict[int, int] = {}
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        proxy_to((address.host, address.port), draw_faults=draw_faults, seed=9) as proxy,
    ):
        for run in range(run_count):
            outcomes: dict[int, PublishAck] = {}

            def store_outcome(counter: int) -> Callable[[Receipt], None]:
                return lambda receipt: outcomes.__setitem__(counter, receipt.result())  # noqa: B023 - called in this run

            async with Producer("{}:{}".format(*proxy.address), name="resender") as producer:
                for counter in range(1, count * (run + 1) // run_count + 1):
                    delta = Delta(f"v{counter}", opaque(b"%d" % counter))
                    producer.offer_numbered(counter, delta, store_outcome(counter))
                await producer.flush()
            for counter, ack in outcomes.items():
                offset = ack.duplicates.get(0, ack.offset)
                assert offset is not None
                assert first_offsets.setdefault(counter, offset) == offset
        log = p.internals().partition.log
        logged = [
            key
            for logged_batch in read_all(log)
            if not logged_batch.batch.is_control
            for key in logged_batch.batch.keys
        ]
    print(f"{run_count} runs, {proxy.counts['connection']} connections, {len(logged)} effects")
    assert logged == [f"v{counter}" for counter in range(1, count + 1)]
    assert {logged[offset]: offset for offset in first_offsets.values()} == {
        f"v{counter}": offset for counter, offset in first_offsets.items()
    }
    assert len(first_offsets) == count
    assert proxy.counts["reset"]
