"""A duplicate key in metadata, over real connections: refused for producers, accepted from forwarders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop import Delta, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.sinks import StorageSink
from delta_prop_wire.delta import Source, create
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving
from tests.wire.duplicate_keys import DEEP, FLAT, with_metadata

if TYPE_CHECKING:
    from pathlib import Path

    from delta_prop_wire.batch import Batch

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


def batch_with_duplicate_key(base: int, count: int, row: int, *, packed: bytes = FLAT) -> Batch:
    return with_metadata({row: packed}, count, origin=ORIGIN, base=base)


@pytest.mark.parametrize("packed", [FLAT, DEEP])
async def test_batch_with_duplicate_key_is_refused_with_its_row(packed: bytes) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        await client.send(
            opaque_batch(1, 2),
            BatchFrame(3, batch_with_duplicate_key(3, 3, 1, packed=packed), ack_wanted=True),
            opaque_batch(6),
        )
        nack = await client.until(Nack)
        assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, "metadata", 1)
        await client.until_acked(6)
        assert (p.statistics().accepted, p.statistics().noops) == (3, 3)


async def test_only_the_invalid_frame_among_many_is_refused() -> None:
    """The fast paths for many frames and for known row templates refuse the frame, too."""
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        deltas = [Delta("v0", create([0.0]), "n")]
        frames = [
            BatchFrame(base, with_metadata(packed, deltas=deltas, origin=ORIGIN, base=base))
            for base in range(1, 41)
            for packed in [{0: FLAT} if base == 30 else {}]
        ]
        await client.send(*frames, opaque_batch(41))
        assert (await client.until(Nack)).code is ErrorCode.INVALID_DELTA
        await client.until_acked(41)
        assert (p.statistics().accepted, p.statistics().noops) == (40, 1)


async def test_forwarded_duplicate_key_is_accepted_and_last_value_wins(tmp_path: Path) -> None:
    batch = batch_with_duplicate_key(1, 2, 0)
    async with Propagator(data=tmp_path / "log") as p, serving(p) as (_, address):
        storage = StorageSink(tmp_path / "rows.db")
        await p.attach(storage)
        async with connected(address) as forwarder:
            await forwarder.hello(source=Source.REPLICA)
            await forwarder.send(BatchFrame(1, batch, Stamp(100, Source.REPLICA), ack_wanted=True))
            await forwarder.until_acked(2)
        await p.wait_visible(await p.publish(Delta("other", opaque(b"x"))))
        for deltas in (False, True):
            async with connected(address) as client:
                await client.hello()
                await client.subscribe("ns:n", deltas=deltas)
                frame = await client.until(DeltaFrame if deltas else BatchFrame)
                metadata = frame.delta.metadata if deltas else frame.batch.metadata(0)
                assert metadata == {"a": 2, "b": 3}
        row = await storage.get("n", "v0")
        assert row is not None
        assert row.metadata == {"a": 2, "b": 3}
