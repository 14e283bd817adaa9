"""Calls of a producer while its propagator closes, and after the close."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Priority, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks import CallbackSink
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import Gate, catch_refusal, make_delta

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer


def test_closing_service_refuses_publishes_of_its_producers() -> None:
    refusals: list[tuple[float, Refused]] = []
    gate = Gate()

    async def publish(p: Propagator, producer: Producer) -> None:
        await anyio.sleep(1)  # by then the service is closing, and waits for its sink
        for call in (lambda: producer.publish(make_delta("b")), lambda: p.publish(make_delta("c"))):
            refusals.append((anyio.current_time(), await catch_refusal(call())))
        with pytest.raises(Refused, match="closing"):
            producer.offer(make_delta("d"))

    async def main() -> None:
        async with (
            anyio.create_task_group() as tasks,
            Propagator(Settings(close_timeout_s=8), world=virtual_world()) as p,
        ):
            await p.attach(CallbackSink(gate, name="slow"))
            producer = p.producer("one")
            await producer.publish(make_delta("a"))
            tasks.start_soon(publish, p, producer)
        assert p.statistics().log.next_offset == 1

    run_virtual(main)
    assert [(round(time_s, 3), refusal.code) for time_s, refusal in refusals] == [
        (1, ErrorCode.SHUTTING_DOWN)
    ] * 2


def test_closed_propagator_rejects_calls_of_its_producers() -> None:
    async def check(producer: Producer, message: str) -> None:
        batch = encode_batch([make_delta("b")], origin=producer._lanes[Priority.NORMAL].origin, base=2)
        for call in (
            lambda: producer.offer(make_delta("b")),
            lambda: producer.offer_numbered(2, make_delta("b"), lambda _: None),
            lambda: producer.send_frame(batch),
            producer.resend,
        ):
            with pytest.raises(UsageError, match=message):
                call()
        with pytest.raises(UsageError, match=message):
            await producer.publish(make_delta("b"))
        assert (producer.watermark(), producer.in_flight_batches) == (1, 0)

    async def main() -> None:
        p = Propagator(world=virtual_world())
        async with p:
            producer = p.producer("one")
            await producer.publish(make_delta("a"))
        await check(producer, "the propagator is not open")
        async with p:
            await check(producer, "producer 'one' is of an earlier `async with`")
            assert p.statistics().log.next_offset == 0

    run_virtual(main)
