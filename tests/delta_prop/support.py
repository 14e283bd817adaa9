"""Helpers for propagator tests: deltas, batches under dots, a gate that blocks a sink, expected refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop import Propagator
    from delta_prop.calls.receipt import Receipt
    from delta_prop.partition.ingest.origins import Grant
    from delta_prop.partition.ingest.work import SequencedBatch


def make_delta(key: str, **fields: Any) -> Delta:
    return Delta(key, create([1.0, 2.0]), **fields)


async def catch_refusal(call: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as caught:
        await call
    return caught.value


def claim_origins(p: Propagator, producer: int, name: str) -> list[Grant]:
    """Claim a producer's origins, as its connection would; return the grants, one per priority."""
    partition = p.internals().partition
    return partition.pipeline.hello(producer, name, partition.world.clock.now())


def offer_now(p: Propagator, work: SequencedBatch) -> Receipt:
    """Offer a batch under dots to the pipeline, as a connection would; return its receipt."""
    partition = p.internals().partition
    return partition.pipeline.offer(work, partition.world.clock.now())


class Gate:
    """A sink's function that waits until the test opens the gate."""

    def __init__(self) -> None:
        self.opened = anyio.Event()
        self.seen: list[int] = []

    async def __call__(self, offset: int, _delta: Delta) -> None:
        await self.opened.wait()
        self.seen.append(offset)


async def expect_refusal(call: Callable[[], Awaitable[object]], message: str) -> None:
    assert message in (await catch_refusal(call())).message
