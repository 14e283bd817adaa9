"""Compare-and-set over real connections: as deltas, as batches, and as many frames sent together."""

from __future__ import annotations

import pytest

from delta_prop import ABSENT, Delta, create, delete, offset
from delta_prop.api.propagator import Propagator
from delta_prop_wire.delta import Dot
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame, DeltaFrame, Nack
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.server.raw import ORIGIN, connected, serving

pytestmark = pytest.mark.anyio

CREATE = create([1.0, 2.0])


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


def frame(base: int, *deltas: Delta) -> BatchFrame:
    return BatchFrame(base, encode_batch(deltas, origin=ORIGIN, base=base), ack_wanted=True)


async def test_rows_of_a_batch_are_checked_one_by_one() -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        first = Dot(ORIGIN, 1)
        await client.send(
            frame(1, Delta("v", CREATE, expect=ABSENT), Delta("v", offset(1.0), expect=first)),
            frame(3, *[Delta("v", offset(1.0), expect=Dot(ORIGIN, 2))] * 2),
        )
        nack = await client.until(Nack)
        assert (nack.code, nack.row, nack.field) == (ErrorCode.CONFLICT, 1, "expect")
        assert p.head("v") == Dot(ORIGIN, 2)


@pytest.mark.parametrize("as_batch", [True, False])
async def test_concurrent_create_if_absent_succeeds_once(as_batch: bool) -> None:
    async with Propagator() as p, serving(p) as (_, address), connected(address) as client:
        await client.hello(ORIGIN)
        deltas = [Delta("v", CREATE, expect=ABSENT, dot=Dot(ORIGIN, counter)) for counter in range(1, 21)]
        deltas.append(Delta("v", delete(), dot=Dot(ORIGIN, 21)))
        deltas.append(Delta("v", CREATE, expect=ABSENT, dot=Dot(ORIGIN, 22)))
        frames = [
            frame(counter, delta) if as_batch else DeltaFrame(counter, delta, ack_wanted=True)
            for counter, delta in enumerate(deltas, 1)
        ]
        await client.send(*frames)
        codes = [(await client.until(Nack)).code for _ in range(19)]
        assert codes == [ErrorCode.CONFLICT] * 19
        await client.until_acked(22)
        assert (p.statistics().accepted, p.head("v")) == (3, Dot(ORIGIN, 22))
