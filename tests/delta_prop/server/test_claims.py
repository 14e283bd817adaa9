"""Claims of origins over real connections: granted epochs, refused claims, and claims after a lost log."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.client import Producer
from delta_prop.partition.ingest.epochs import CLAIMED_EPOCH_MAX, EPOCH_MAX
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.segments.identity import read_identity, write_identity
from delta_prop_broker.segments.paths import DIRECTORY, IDENTITY
from delta_prop_wire.delta import Dot, Source
from delta_prop_wire.frames import Ack, DeltaFrame, Hello, JobPart, Nack, OriginClaim, OriginGrant, Subscribe
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop.server.service import Address

pytestmark = pytest.mark.anyio
OTHER = ORIGIN + 8
PATH = f"{DIRECTORY}/{IDENTITY}"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


async def claim_epoch(address: Address, epoch: int) -> OriginGrant | Nack:
    """Claim an epoch on a new connection; return the answer."""
    async with connected(address) as client:
        await client.send(Subscribe(1, Hello(origins=(OriginClaim(ORIGIN, epoch),))))
        answer = await client.next()
    if isinstance(answer, Nack):
        return answer
    assert isinstance(answer, Ack)
    assert answer.welcome is not None
    (grant,) = answer.welcome.origins
    return grant


async def claim_until_granted(address: Address, epoch: int) -> int:
    """Claim until the epoch is granted; return it."""
    with anyio.fail_after(60):
        while isinstance(answer := await claim_epoch(address, epoch), Nack):
            assert answer.code is ErrorCode.RATE_LIMITED
            assert answer.retry_after_ms
            await anyio.sleep(answer.retry_after_ms / 1000)
    return answer.epoch


@pytest.mark.parametrize("on_disk", [False, True])
async def test_epoch_unknown_to_fresh_server_is_granted(on_disk: bool, tmp_path: Path) -> None:
    async with Propagator(data=tmp_path if on_disk else None) as p, serving(p) as (_, address):
        assert await claim_epoch(address, 6) == OriginGrant(ORIGIN, 6, 0)
        async with connected(address) as client:
            await client.hello()
            await client.send(Subscribe(2, Hello(origins=(OriginClaim(ORIGIN, 6),))))
            await client.until(Ack)
            await client.send(opaque_batch(1, 2, epoch=6))
            await client.until_acked(2)
            assert await claim_epoch(address, 0) == OriginGrant(ORIGIN, 7, 2)
            await client.send(opaque_batch(3, 1, epoch=6))
            assert (await client.until(Nack)).code is ErrorCode.FENCED
        fenced = await claim_epoch(address, 6)
        assert isinstance(fenced, Nack)
        assert fenced.code is ErrorCode.FENCED


@pytest.mark.parametrize("epoch", [CLAIMED_EPOCH_MAX + 1, EPOCH_MAX])
async def test_claim_near_the_last_epoch_is_refused_and_uses_none(epoch: int) -> None:
    async with Propagator() as p, serving(p) as (_, address):
        answer = await claim_epoch(address, epoch)
        assert isinstance(answer, Nack)
        assert (answer.code, answer.retry_after_ms) == (ErrorCode.BAD_REQUEST, None)
        assert "claim with epoch 0" in answer.text
        assert [await claim_until_granted(address, 0) for _ in range(3)] == [1, 2, 3]


async def test_epoch_beyond_the_reserved_ones_is_granted_soon_and_only_once(tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address):
        first = await claim_epoch(address, 100_000)
        assert isinstance(first, Nack)
        assert first.code is ErrorCode.RATE_LIMITED
        assert await claim_until_granted(address, 100_000) == 100_000
        # After a crash now, only the reserved epochs would be known.
        identity = read_identity(LocalDisk(tmp_path), PATH)
        assert identity is not None
        assert (identity.openings + 1) * 4_096 >= 100_000
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address):
        assert await claim_until_granted(address, 0) > 100_000


async def test_producer_continues_when_its_log_returns_empty(tmp_path: Path) -> None:
    old_disk, new_disk = LocalDisk(tmp_path / "old"), LocalDisk(tmp_path / "new")
    for disk in (old_disk, new_disk):
        async with Propagator(data=disk.root):
            pass
    identity = read_identity(old_disk, PATH)
    assert identity is not None
    write_identity(old_disk, PATH, identity.with_openings(50))
    write_identity(new_disk, PATH, identity)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings, producer = ServerSettings(port=port), Producer(f"127.0.0.1:{port}", name="me")
    await producer.begin()
    try:
        with anyio.fail_after(60):
            async with Propagator(data=old_disk.root) as p, serving(p, settings):
                await producer.publish(Delta("a", opaque(b"1")))
            async with Propagator(data=new_disk.root) as p, serving(p, settings):
                await producer.publish(Delta("a", opaque(b"2")))
                batches = p.internals().partition.log.read(0, rows_max=10, bytes_max=1_000_000)
                assert {logged.batch.epoch for logged in batches} == {51 * 4_096 + 1}
    finally:
        await producer.__aexit__(None, None, None)


@pytest.mark.parametrize(
    "hello",
    [
        Hello(origins=(OriginClaim(0, 0),)),
        Hello(origins=(OriginClaim(ORIGIN, 0), OriginClaim(0, 0))),
        Hello(origins=(OriginClaim(ORIGIN, 0), OriginClaim(ORIGIN, 1))),
        Hello(source=Source.REPLICA, origins=(OriginClaim(ORIGIN, 0),)),
        Hello(job=JobPart("nightly", 0, 1)),
        Hello(job=JobPart("nightly", 0, 1), origins=(OriginClaim(ORIGIN, 0), OriginClaim(ORIGIN + 1, 0))),
    ],
    ids=[
        "origin 0",
        "origin 0 among others",
        "duplicate origin",
        "of a forwarder",
        "a job without origins",
        "a job with two origins",
    ],
)
async def test_hello_with_forbidden_origins_is_refused(hello: Hello, tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address), connected(address) as client:
        await client.send(Subscribe(1, hello))
        answer = await client.next()
    assert isinstance(answer, Nack)
    assert (answer.code, answer.field, answer.correlation_id) == (ErrorCode.BAD_REQUEST, "origins", 1)


@pytest.mark.parametrize(
    "hello",
    [
        Hello(origins=(OriginClaim(0), OriginClaim(ORIGIN, 0, 7))),
        Hello(origins=(OriginClaim(ORIGIN, 0, 7), OriginClaim(0))),
        Hello(origins=(OriginClaim(0, 0, 7),)),
        Hello(origins=(OriginClaim(ORIGIN), OriginClaim(ORIGIN), OriginClaim(OTHER, 0, 7))),
        Hello(source=Source.REPLICA, origins=(OriginClaim(ORIGIN, 0, 7),)),
        Hello(job=JobPart("nightly", 0, 1), origins=(OriginClaim(ORIGIN), OriginClaim(OTHER, 0, 7))),
    ],
    ids=[
        "after origin 0",
        "before origin 0",
        "of origin 0",
        "after a duplicate origin",
        "of a forwarder",
        "of a job",
    ],
)
async def test_unknown_stream_is_reported_before_other_claim_faults(hello: Hello, tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address), connected(address) as client:
        await client.send(Subscribe(1, hello))
        answer = await client.next()
    assert isinstance(answer, Nack)
    assert (answer.code, answer.correlation_id) == (ErrorCode.UNKNOWN_STREAM, 1)
    assert answer.details == {"stream": 7}


async def test_later_hello_cannot_change_the_source(tmp_path: Path) -> None:
    async with Propagator(data=tmp_path) as p, serving(p) as (_, address):
        async with connected(address) as producer:
            await producer.hello(ORIGIN)
            await producer.send(
                Subscribe(2, Hello(source=Source.REPLICA, origins=(OriginClaim(ORIGIN + 1, 0),)))
            )
            answer = await producer.until(Ack)
            assert [grant.origin for grant in answer.welcome.origins] == [ORIGIN + 1]
        async with connected(address) as forwarder:
            await forwarder.hello(source=Source.REPLICA)
            await forwarder.send(Subscribe(2, Hello(origins=(OriginClaim(ORIGIN + 2, 0),))))
            nack = await forwarder.until(Nack)
            assert (nack.code, nack.field, nack.correlation_id) == (ErrorCode.BAD_REQUEST, "origins", 2)


async def test_delta_of_an_origin_claimed_by_another_is_refused() -> None:
    async with (
        Propagator() as p,
        serving(p) as (_, address),
        connected(address) as holder,
        connected(address) as other,
    ):
        await holder.hello(ORIGIN)
        await other.hello(ORIGIN + 1)
        await other.send(DeltaFrame(1, Delta("v", opaque(b"x"), dot=Dot(ORIGIN, 1)), ack_wanted=True))
        nack = await other.until(Nack)
        assert (nack.code, nack.details) == (ErrorCode.UNKNOWN_ORIGIN, {"origin": ORIGIN})


@pytest.mark.parametrize("wrong_epoch", [CLAIMED_EPOCH_MAX + 1, 1])
async def test_hello_with_one_wrong_claim_grants_none(wrong_epoch: int) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as holder:
        await holder.hello(ORIGIN, OTHER)
        async with connected(address) as other:
            await other.hello(OTHER)
            claims = (OriginClaim(ORIGIN, 0), OriginClaim(OTHER, wrong_epoch))
            await other.send(Subscribe(2, Hello(origins=claims)))
            assert (await other.until(Nack)).code in (ErrorCode.BAD_REQUEST, ErrorCode.FENCED)
        await holder.send(opaque_batch(1, 2))
        await holder.until_acked(2)
        assert await claim_until_granted(address, 0) == 2
