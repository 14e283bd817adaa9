"""The callback sink: plain and async functions, a delta or a delivery at a time, and their failures."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from delta_prop_sinks import CallbackSink, Delivery, RejectDelta, TryAgain
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from tests.sinks.support import FakeLog


def filled() -> FakeLog:
    log = FakeLog()
    log.append(*(Delta(name, create([1])) for name in "abc"))
    return log


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_delta_in_order_with_its_offset(asynchronous: bool) -> None:
    seen: list[tuple[int, str]] = []

    def plain(offset: int, delta: Delta) -> None:
        seen.append((offset, delta.vector_id))

    async def coroutine(offset: int, delta: Delta) -> None:
        await anyio.lowlevel.checkpoint()
        plain(offset, delta)

    async def main() -> None:
        log = filled()
        sink = CallbackSink(coroutine if asynchronous else plain)
        assert await sink.open(log) is None
        await sink.apply([Delivery(log.batches[0]), Delivery(log.batches[0], np.array([1], np.intp))])
        assert sink.statistics().calls == 4
        await sink.aclose()

    anyio.run(main)
    assert seen == [(0, "a"), (1, "b"), (2, "c"), (1, "b")]


def test_a_delivery_at_a_time() -> None:
    seen: list[Any] = []
    sink = CallbackSink(seen.append, per="delivery")
    deliveries = filled().deliveries()
    anyio.run(sink.apply, deliveries)
    assert seen == deliveries


def test_failures_say_how_far_it_came() -> None:
    def fails(offset: int, delta: Delta) -> None:
        if offset == 1:
            raise ValueError("no room")

    def rejects(offset: int, delta: Delta) -> None:
        raise RejectDelta(offset, "never")

    deliveries = filled().deliveries()
    with pytest.raises(TryAgain, match="ValueError: no room") as caught:
        anyio.run(CallbackSink(fails).apply, deliveries)
    assert caught.value.done_offset == 1
    with pytest.raises(RejectDelta, match="never"):
        anyio.run(CallbackSink(rejects).apply, deliveries)


def test_wrong_use_is_told() -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        CallbackSink(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="per 'row'"):
        CallbackSink(print, per="row")  # type: ignore[arg-type]
