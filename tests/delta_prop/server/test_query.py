"""Requests over the wire: `get`, `find_offsets`, `describe`, unknown requests, and frames of a later
version.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgpack
import numpy as np
import pytest

from delta_prop import Delta, Refused, create, delete, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.client import facts
from delta_prop.client.facts import FactState
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.delta import Dot, Operation, make_origin
from delta_prop_wire.errors import InvalidDelta, UsageError
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    DeltaFrame,
    Describe,
    FindOffsets,
    Get,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    PartitionStart,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.spec import ErrorCode, FrameType
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.topics import ALL
from tests.delta_prop.server.raw import ORIGIN, FrameClient, connected, opaque_batch, serving
from tests.wire.sealing import frame_with_checksum

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


async def send_request(raw: FrameClient, number: int, request: Any) -> Ack | Nack:
    await raw.send(Subscribe(number, request))
    while True:
        frame = await raw.next()
        if isinstance(frame, Ack | Nack) and frame.correlation_id == number:
            return frame


async def test_get_returns_facts_with_the_dot_for_expect(tmp_path: Path) -> None:
    vector = np.arange(20_000, dtype=np.float32)
    async with Propagator() as p, serving(p) as (_, address):
        await p.attach(StorageSink(tmp_path / "v.db"))
        created = await p.publish(Delta("doc-1", create(vector), "docs", metadata={"title": "fox"}))
        await p.publish(Delta("r:1", opaque(b"x" * 100_000), "r"))
        await p.publish(Delta("r:2", opaque(b""), "r"))
        await p.publish(Delta("r:2", delete(), "r"))
        address_text = f"{address.host}:{address.port}"
        vector_fact, opaque_fact, deleted_fact, absent_fact = [
            await anyio.to_thread.run_sync(facts.get, address_text, *names)
            for names in (("doc-1", "docs"), ("r:1",), ("r:2", None), ("r:3",))
        ]
    assert (vector_fact.state, vector_fact.dot, vector_fact.metadata_map) == (
        FactState.VECTOR,
        created.dot,
        {"title": "fox"},
    )
    assert (vector_fact.vector == vector).all()
    assert (opaque_fact.state, opaque_fact.data) == (FactState.OPAQUE, b"x" * 100_000)
    assert (deleted_fact.state, deleted_fact.data) == (FactState.DELETED, b"")
    assert (absent_fact.state, absent_fact.dot, absent_fact.offset) == (FactState.ABSENT, None, 4)


async def test_refused_writer_reads_the_fact_and_retries(tmp_path: Path) -> None:
    async with Propagator() as p, serving(p) as (_, address):
        await p.attach(StorageSink(tmp_path / "v.db"))
        first = await p.publish(Delta("a", opaque(b"1")))
        await p.publish(Delta("a", opaque(b"2")))
        with pytest.raises(Refused) as caught:
            await p.publish(Delta("a", opaque(b"3"), expect=first.dot))
        assert caught.value.code is ErrorCode.CONFLICT
        fact = await anyio.to_thread.run_sync(facts.get, f"{address.host}:{address.port}", "a")
        assert fact.data == b"2"
        await p.publish(Delta("a", opaque(b"3"), expect=fact.dot))


async def test_get_without_a_state_sink_is_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        await raw.hello()
        answer = await send_request(raw, 2, Get("a"))
        assert isinstance(answer, Nack)
        assert (answer.code, answer.sequence) == (ErrorCode.BAD_REQUEST, 0)
        assert isinstance(await send_request(raw, 3, Describe()), Ack)


async def test_find_offsets_and_describe_return_offsets_and_log(tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address):
        await p.publish(Delta("a", opaque(b"1")))
        await anyio.sleep(0.01)
        between = time.time_ns() // 1000
        await p.publish(Delta("a", opaque(b"2")))
        address_text = f"{address.host}:{address.port}"
        response = await anyio.to_thread.run_sync(facts.find_offsets, address_text, [0, between, 1 << 62])
        assert response.offsets == (0, 1, 2)
        description = await anyio.to_thread.run_sync(facts.describe, address_text)
        (stream,) = description.streams
        ((partition, start, log),) = stream.partitions
        assert (stream.name, stream.stream, partition, start) == ("default", 0, 0, 0)
        assert (log, description.requests["get"]) == (response.log, 1)


async def test_requests_may_be_pipelined_after_hello(tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address), connected(address) as raw:
        await raw.send(
            Subscribe(1, Hello(origins=(OriginClaim(ORIGIN),))),
            Subscribe(2, Subscription(1, (ALL,))),
            Subscribe(3, Describe()),
            Heartbeat(1, sent_us=7),
        )
        answers = [await raw.next() for _ in range(4)]
        assert [getattr(answer, "correlation_id", None) for answer in answers] == [1, 2, 3, None]
        assert isinstance(answers[3], Heartbeat)
        assert answers[3].echo_us == 7
        await raw.send(opaque_batch(1))
        assert (await raw.until(BatchFrame)).batch.count == 1


async def test_unknown_request_or_version_keeps_the_connection() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        await raw.hello()
        for number, (request, version, code) in enumerate(
            [("compact", 1, ErrorCode.BAD_REQUEST), ("get", 9, ErrorCode.UNSUPPORTED_VERSION)], 2
        ):
            payload = msgpack.packb({"request": request, "version": version, "later": [1]})
            await raw.stream.send(
                [frame_with_checksum(FrameType.SUBSCRIBE, payload, sequence=number, flags=0x40)]
            )
            nack = await raw.until(Nack)
            assert (nack.correlation_id, nack.code) == (number, code)
        await raw.send(Nack(0, ErrorCode(999), "later"))
        assert isinstance(await send_request(raw, 9, Describe()), Ack)


async def test_hello_of_a_later_version_is_refused_with_the_known_one() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        payload = msgpack.packb({"request": "hello", "version": 2})
        await raw.stream.send([frame_with_checksum(FrameType.SUBSCRIBE, payload)])
        nack = await raw.until(Nack)
        assert (nack.correlation_id, nack.code) == (1, ErrorCode.UNSUPPORTED_VERSION)
        assert nack.details == {"version": 1}
        assert await raw.next() is None


async def test_frame_for_another_partition_is_refused_and_uses_no_dot() -> None:
    elsewhere = make_origin(77, 2, 3)
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        await raw.hello(ORIGIN)
        await raw.send(Subscribe(2, Hello(origins=(OriginClaim(elsewhere),))))
        assert (await raw.until(Nack)).code is ErrorCode.WRONG_PARTITION
        batch = opaque_batch(1).batch
        for number, frame in enumerate(
            [
                BatchFrame(0, batch, Stamp(partition=3)),
                BatchFrame(0, batch, Stamp(stream=7)),
                BatchFrame(0, opaque_batch(1, origin=elsewhere).batch),
                DeltaFrame(0, Delta("a", opaque(b"1"), dot=Dot(ORIGIN, 1)), stream=7),
                DeltaFrame(0, Delta("a", opaque(b"1"), dot=Dot(ORIGIN, 1)), partition=3),
                DeltaFrame(0, Delta("a", opaque(b"1"), dot=Dot(elsewhere, 1))),
                DeltaFrame(0, Delta("a", opaque(b"1")), partition=3),
            ],
            1,
        ):
            await raw.send(replace(frame, sequence=number))
            nack = await raw.until(Nack)
            assert (nack.code, nack.sequence) == (ErrorCode.WRONG_PARTITION, number)
        assert p.statistics().accepted == 0
        await raw.send(BatchFrame(9, batch))
        while p.statistics().accepted < 1:
            await raw.until(Ack)


async def test_hello_cannot_claim_an_origin_of_another_partition() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        claims = (OriginClaim(ORIGIN), OriginClaim(make_origin(77, 2, 3)))
        await raw.send(Subscribe(1, Hello(origins=claims)))
        nack = await raw.until(Nack)
        assert (nack.code, nack.correlation_id) == (ErrorCode.WRONG_PARTITION, 1)


async def test_subscription_may_name_its_partition() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        await raw.hello()
        for number, (fields, code) in enumerate(
            [
                ({"stream": 7}, ErrorCode.UNKNOWN_STREAM),
                ({"partitions": (PartitionStart(1),)}, ErrorCode.WRONG_PARTITION),
                ({"partitions": (PartitionStart(0),) * 2}, ErrorCode.BAD_REQUEST),
            ],
            2,
        ):
            nack = await send_request(raw, number, Subscription(1, (ALL,), **fields))  # type: ignore[arg-type]
            assert isinstance(nack, Nack)
            assert nack.code is code
        for _ in range(3):
            await p.publish(Delta("a", opaque(b"1")))
        partition = PartitionStart(0, Start(StartAt.OFFSET, 1), Credit(1, 1 << 20))
        ack = await send_request(raw, 9, Subscription(1, (ALL,), partitions=(partition,)))
        assert isinstance(ack, Ack)
        assert ack.subscribed is not None
        assert ack.subscribed.start.next_offset == 1
        assert (await raw.until(BatchFrame)).sequence == 1
        nack = await send_request(raw, 10, FindOffsets((Start(StartAt.EARLIEST),), partition=2))
        assert isinstance(nack, Nack)
        assert nack.code is ErrorCode.WRONG_PARTITION


async def test_fact_with_a_quarantined_delta_is_refused(tmp_path: Path) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as raw:
        await p.attach(StorageSink(tmp_path / "v.db"))
        await p.publish(Delta("a", opaque(b"1")), Delta("b", opaque(b"1")))
        await p.publish(Delta("a", Operation(12, data=b"later")))
        await raw.hello()
        answer = await send_request(raw, 2, Get("a", "default"))
        assert isinstance(answer, Nack)
        assert (answer.code, answer.details) == (ErrorCode.PROCESSING_FAILED, {"offset": 2})
        assert isinstance(await send_request(raw, 3, Get("b", "default")), Ack)


@pytest.mark.parametrize("key", ["", "\ud800", "x" * 513])
def test_invalid_names_are_refused_before_connecting(key: str) -> None:
    with pytest.raises(InvalidDelta, match="vector_id"):
        facts.get("127.0.0.1:1", key)
    with pytest.raises(InvalidDelta, match="namespace"):
        facts.get("127.0.0.1:1", "a", key)


@pytest.mark.parametrize("times", [5, [-1], [1 << 63], [1.5], [True], [1] * 65])
def test_invalid_times_are_refused_before_connecting(times: Any) -> None:
    with pytest.raises(UsageError, match="times_us"):
        facts.find_offsets("127.0.0.1:1", times)


def test_zero_timeout_is_refused() -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        facts.describe("127.0.0.1:1", timeout_s=0)
