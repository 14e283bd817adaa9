"""Streams of deltas acknowledge a value after its last step, and take at most `open_max` values at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop import streams
from delta_prop.calls.outcomes import Delivered
from delta_prop.client.subscriber import Subscriber
from delta_prop.testing import run_virtual
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import UsageError


class ListSubscriber:
    """A fake subscriber that yields a list of deltas and then waits."""

    manual = True

    def __init__(self, count: int, first: int = 0) -> None:
        self.remaining = list(range(first, first + count))
        self.taken = 0
        self.acked: list[int] = []

    async def __anext__(self) -> Delivered:
        if not self.remaining:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        self.taken += 1
        offset = self.remaining.pop(0)
        return Delivered(offset, offset, Delta(f"k{offset}", opaque(b"")))

    def ack(self, offset: int) -> None:
        self.acked.append(offset)


def new_source(count: int, first: int = 0, **more: Any) -> tuple[ListSubscriber, Any]:
    subscriber = ListSubscriber(count, first)
    return subscriber, streams.items(subscriber, **more)  # type: ignore[arg-type]


def run_scenario(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    run_virtual(bounded)


async def get_offset(delivered: Delivered) -> int:
    return delivered.offset


def test_value_is_acked_when_the_loop_asks_for_the_next() -> None:
    async def main() -> None:
        subscriber, source = new_source(3)
        values = []
        async for offset in streams.values(streams.map(source, get_offset, tasks=1)):
            values.append(offset)
            assert subscriber.acked == list(range(offset))
            if offset == 2:
                break
        assert values == [0, 1, 2]

    run_scenario(main)


def test_overtaking_value_is_acked_only_after_earlier_ones() -> None:
    async def main() -> None:
        subscriber, source = new_source(3)
        gate = asyncio.Event()

        async def work(delivered: Delivered) -> int:
            if delivered.offset == 0:
                await gate.wait()
            return delivered.offset

        values = []
        async for offset in streams.values(streams.map(source, work, ordered=False)):
            values.append(offset)
            if len(values) == 3:
                break
            assert subscriber.acked == []
            if len(values) == 2:
                gate.set()
        assert values == [1, 2, 0]

    run_scenario(main)


def test_failed_step_ends_the_stream_without_its_ack() -> None:
    async def main() -> None:
        subscriber, source = new_source(5)

        async def work(delivered: Delivered) -> int:
            if delivered.offset == 2:
                raise ValueError("bad")
            return delivered.offset

        with pytest.raises(ValueError, match="bad"):
            async for _ in streams.values(streams.map(source, work, tasks=1)):
                pass
        assert subscriber.acked == [0, 1]

    run_scenario(main)


def test_chunk_ends_when_full_or_late_and_is_acked_as_one() -> None:
    async def main() -> None:
        subscriber, source = new_source(5)
        start_s = anyio.current_time()
        values = []
        async for chunk in streams.values(streams.chunk(streams.map(source, get_offset), 2, within_s=0.5)):
            values.append((chunk, subscriber.acked[-1:]))
            if len(values) == 3:
                break
        assert values == [([0, 1], []), ([2, 3], [1]), ([4], [3])]
        assert anyio.current_time() - start_s == pytest.approx(0.5)

    run_scenario(main)


def test_filtered_values_are_acked() -> None:
    async def main() -> None:
        subscriber, source = new_source(4)
        values = []
        async for delivered in streams.values(
            streams.filter(source, lambda delivered: delivered.offset % 2 == 1)
        ):
            values.append(delivered.offset)
            if delivered.offset == 3:
                break
        assert values == [1, 3]
        assert subscriber.acked[-1] == 2

    run_scenario(main)


def test_merged_subscriptions_ack_their_own_offsets() -> None:
    async def main() -> None:
        first_subscriber, first = new_source(3)
        second_subscriber, second = new_source(3, first=100)
        values = []
        async for offset in streams.values(streams.map(streams.merge(first, second), get_offset)):
            values.append(offset)
            if len(values) == 6:
                break
        assert sorted(values) == [0, 1, 2, 100, 101, 102]
        assert set(first_subscriber.acked) <= {0, 1, 2}
        assert set(second_subscriber.acked) <= {100, 101, 102}
        assert first_subscriber.acked
        assert second_subscriber.acked

    run_scenario(main)


def test_values_taken_are_limited_by_open_max() -> None:
    async def main() -> None:
        subscriber, source = new_source(100, open_max=5)
        gate = asyncio.Event()

        async def work(delivered: Delivered) -> int:
            await gate.wait()
            return delivered.offset

        async def open_gate() -> None:
            await anyio.sleep(10)
            assert subscriber.taken == 5
            gate.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_gate)
            async for offset in streams.values(streams.map(source, work, tasks=50)):
                if offset == 99:
                    break
        assert subscriber.acked[-1] == 98

    run_scenario(main)


def test_wrong_stream_arguments_are_rejected_at_once() -> None:
    with pytest.raises(UsageError, match="manual"):
        streams.items(Subscriber("localhost", "*"))
    _, source = new_source(1)
    for call in (
        lambda: new_source(1, open_max=0),
        lambda: streams.map(source, get_offset, tasks=0),
        lambda: streams.chunk(source, 0),
    ):
        with pytest.raises(UsageError, match="give"):
            call()
