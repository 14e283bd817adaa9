"""A forwarder's connection, frame by frame: the answer to its hello, accepted frames, refused frames."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from delta_prop import Delta, opaque
from delta_prop.api.propagator import Propagator
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.delta import Source
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.frames import Ack, AckRange, BatchFrame, Nack
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving
from tests.wire.control_batches import control_batch
from tests.wire.duplicate_keys import with_metadata

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def as_forwarded(frame: BatchFrame, lamport: int) -> BatchFrame:
    return BatchFrame(frame.sequence, frame.batch, Stamp(lamport, Source.REPLICA), ack_wanted=True)


async def test_forwarder_hello_gets_all_watermarks_in_pages() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as producer:
        origins = [ORIGIN + (number << 20) for number in range(1, 1_101)]
        await producer.hello(*origins[:1_000])
        await producer.hello(*origins[1_000:])
        for number, origin in enumerate(origins):
            frame = opaque_batch(1, 2, origin=origin)
            await producer.send(replace(frame, sequence=1 + 2 * number))
            if number % 200 == 0:
                await producer.until(Ack)
        while p.statistics().accepted < 2 * len(origins):
            await producer.next()
        async with connected(address) as forwarder:
            first = await forwarder.hello(source=Source.REPLICA, log_id=b"x" * 16)
            second = await forwarder.until(Ack)
            assert first.welcome is not None
            assert second.welcome is not None
            assert (first.more, second.more) == (True, False)
            watermarks = {
                grant.origin: grant.watermark for grant in (*first.welcome.origins, *second.welcome.origins)
            }
            assert {origin: watermarks[origin] for origin in origins} == dict.fromkeys(origins, 2)
            assert second.credit is not None


async def test_forwarded_batches_keep_lamport_and_control_rows() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        noop = encode_noop(origin=ORIGIN, base=4, count=1, code=ErrorCode.INVALID_DELTA)
        await forwarder.send(
            as_forwarded(opaque_batch(1, 3, epoch=9), 100),
            BatchFrame(4, noop, Stamp(103, Source.REPLICA), True),
        )
        await forwarder.until_acked(4)
        (first, second) = p.internals().partition.log.read(0, rows_max=10, bytes_max=1_000_000)
        assert (first.lamport, first.source, second.batch.is_control) == (100, Source.REPLICA, True)
        await p.publish(Delta("a", opaque(b"x")))
        (_, _, own) = p.internals().partition.log.read(0, rows_max=10, bytes_max=1_000_000)
        assert own.lamport == 104


async def test_duplicate_forward_is_acked_as_duplicate() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        for sequence in (1, 4):
            await forwarder.send(as_forwarded(replace(opaque_batch(1, 3), sequence=sequence), 100))
            ack = await forwarder.until_acked(sequence + 2)
        assert ack.ranges == (AckRange(4, 6, 0, True),)
        assert p.statistics().accepted == 3


@pytest.mark.parametrize("is_noop", [False, True])
async def test_partly_duplicate_batch_is_acked_row_by_row(is_noop: bool) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        longer = opaque_batch(1, 3).batch
        if is_noop:
            longer = encode_noop(origin=ORIGIN, base=1, count=3, code=ErrorCode.INVALID_DELTA)
        await forwarder.send(as_forwarded(opaque_batch(1, 2), 100))
        await forwarder.until_acked(2)
        await p.publish(Delta("between", opaque(b"x")))
        await forwarder.send(as_forwarded(BatchFrame(3, longer), 100))
        assert (await forwarder.until_acked(5)).ranges == (AckRange(3, 4, 0, True), AckRange(5, 5, 3))
        assert p.statistics().accepted + p.statistics().noops == 4


@pytest.mark.parametrize(
    "member", [b"\xc4\x01x", b"\xd4\x05x", b"\xd6\xff\0\0\0\0", b"\x91\xc4\x01x", b"\x81\xa1k\xd4\x05x"]
)
@pytest.mark.parametrize("rest", [b"", b"\xa1b\xda\x02\x01" + b"x" * 513], ids=["short", "long"])
async def test_forwarded_invalid_metadata_ends_only_the_connection(
    member: bytes, rest: bytes, tmp_path: Path
) -> None:
    packed = (b"\x82" if rest else b"\x81") + b"\xa1a" + member + rest
    async with Propagator() as p, serving(p) as (_, address):
        storage = StorageSink(tmp_path / "rows.db")
        await p.attach(storage)
        async with connected(address) as forwarder:
            await forwarder.hello(source=Source.REPLICA)
            batch = with_metadata({0: packed}, deltas=[Delta("v", opaque(b"x"), "n")], origin=ORIGIN, base=1)
            await forwarder.send(as_forwarded(BatchFrame(1, batch), 100))
            assert (await forwarder.until(Nack)).code is ErrorCode.BAD_FRAME
        await p.wait_visible(await p.publish(Delta("other", opaque(b"x"), "n")))
        assert await storage.get("n", "v") is None
        assert await storage.get("n", "other") is not None


@pytest.mark.parametrize("row_count", [1, 3])
async def test_forwarder_may_number_its_first_row_zero(row_count: int) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        await forwarder.send(as_forwarded(BatchFrame(0, opaque_batch(1, row_count).batch), 100))
        ranges: list[AckRange] = []
        while not ranges:
            ranges += (await forwarder.until(Ack)).ranges
        assert ranges == [AckRange(0, row_count - 1, 0)]
        await forwarder.send(as_forwarded(BatchFrame(row_count, opaque_batch(row_count + 1).batch), 200))
        assert (await forwarder.until_acked(row_count)).ranges == (AckRange(row_count, row_count, row_count),)
        assert p.statistics().accepted == row_count + 1


async def test_refusal_of_sequence_zero_is_about_the_frame_not_the_connection() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        first = opaque_batch(1, 3).batch
        await forwarder.send(as_forwarded(BatchFrame(0, first), 1 << 40))
        nack = await forwarder.until(Nack)
        assert (nack.sequence, nack.code, nack.frame) == (0, ErrorCode.BAD_REQUEST, True)
        assert not nack.is_about_connection
        await forwarder.send(as_forwarded(BatchFrame(3, first), 100))
        assert (await forwarder.until_acked(5)).ranges == (AckRange(3, 5, 0),)


@pytest.mark.parametrize("source", [Source.LOCAL, Source.REPLICA])
@pytest.mark.parametrize("second_sequence", [1, 2, 3])
async def test_sequence_that_does_not_rise_ends_the_connection(source: Source, second_sequence: int) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        is_forwarder = source is Source.REPLICA
        await client.hello(*(() if is_forwarder else (ORIGIN,)), source=source)
        for sequence, base in ((1, 1), (second_sequence, 4)):
            frame = replace(opaque_batch(base, 3), sequence=sequence)
            await client.send(as_forwarded(frame, 100 + base) if is_forwarder else frame)
        nack = await client.until(Nack)
        assert (nack.sequence, nack.code) == (second_sequence, ErrorCode.BAD_FRAME)
        assert "not above 3" in nack.text
        while await client.next() is not None:
            pass
        assert p.statistics().accepted == 3  # frames that were complete before the violation are accepted


async def test_producer_numbers_its_frames_from_one() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        await client.send(BatchFrame(0, opaque_batch(1).batch))
        nack = await client.until(Nack)
        assert nack.code is ErrorCode.BAD_FRAME
        assert nack.is_about_connection
        assert "number deltas from 1" in nack.text


async def test_lamport_number_far_ahead_is_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        await forwarder.send(as_forwarded(opaque_batch(1, 3), 1 << 40))
        nack = await forwarder.until(Nack)
        assert nack.code is ErrorCode.BAD_REQUEST
        assert p.statistics().accepted == 0


async def test_stamps_are_required_of_forwarders_and_no_one_else() -> None:
    for source, frame in (
        (Source.LOCAL, as_forwarded(opaque_batch(1), 1)),
        (Source.REPLICA, opaque_batch(1)),
    ):
        async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
            await client.hello(*([ORIGIN] if source is Source.LOCAL else []), source=source)
            await client.send(frame)
            nack = await client.until(Nack)
            assert nack.code is ErrorCode.BAD_FRAME
            assert await client.next() is None


@pytest.mark.parametrize("kind", [1, 4, 6])
async def test_control_rows_of_another_type_are_refused(kind: int) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        await forwarder.send(as_forwarded(BatchFrame(1, control_batch(bytes((kind,)))), 100))
        nack = await forwarder.until(Nack)
        assert (nack.sequence, nack.code, nack.is_about_connection) == (1, ErrorCode.INVALID_DELTA, False)
        await forwarder.send(as_forwarded(BatchFrame(2, opaque_batch(1).batch), 100))
        assert (await forwarder.until_acked(2)).ranges == (AckRange(2, 2, 0),)
        assert p.statistics().accepted == 1


@pytest.mark.parametrize("blob", [b"", b"\0\x0e", b"\x07", b"\xff"])
async def test_malformed_control_rows_end_the_connection(blob: bytes) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as forwarder:
        await forwarder.hello(source=Source.REPLICA)
        await forwarder.send(as_forwarded(BatchFrame(1, control_batch(blob)), 100))
        assert (await forwarder.until(Nack)).code is ErrorCode.BAD_FRAME
        assert await forwarder.next() is None
        assert p.statistics().log.next_offset == 0
