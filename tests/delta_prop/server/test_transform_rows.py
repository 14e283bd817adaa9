"""Transforms over real connections: no server applies functions, so every row with a transform is refused."""

from __future__ import annotations

import pytest

from delta_prop import Delta, create, transform
from delta_prop.api.propagator import Propagator
from delta_prop_wire.delta import Dot
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, opaque_batch, serving

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.mark.parametrize("rows_before", [0, 2])
async def test_batch_with_a_transform_is_refused_with_its_row(rows_before: int) -> None:
    rows = [*(Delta(f"v{row}", create([1.0])) for row in range(rows_before)), Delta("v", transform("double"))]
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        batch = encode_batch(rows, origin=ORIGIN, base=1, epoch=1)
        await client.send(BatchFrame(1, batch, ack_wanted=True), opaque_batch(len(rows) + 1))
        nack = await client.until(Nack)
        assert (nack.code, nack.field, nack.row) == (ErrorCode.INVALID_DELTA, "op", rows_before)
        await client.until_acked(len(rows) + 1)
        assert (p.statistics().accepted, p.statistics().noops) == (1, len(rows))


async def test_delta_with_a_transform_is_refused() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        await client.send(DeltaFrame(1, Delta("v", transform("double"), dot=Dot(ORIGIN, 1)), ack_wanted=True))
        nack = await client.until(Nack)
        assert (nack.code, nack.field) == (ErrorCode.INVALID_DELTA, "op")
        assert p.statistics().accepted == 0
