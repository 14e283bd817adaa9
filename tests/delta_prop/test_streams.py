"""Streams of deltas: what was made of them is done before they are acknowledged; a slow step slows all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop import streams
from delta_prop.client.subscriber import Subscriber
from delta_prop.outcomes import Delivered
from delta_prop.testing import run_virtual
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import UsageError


class Listed:
    """As much of a subscriber as streams use: it hands out a list, and then waits."""

    manual = True

    def __init__(self, count: int, first: int = 0) -> None:
        self.left = list(range(first, first + count))
        self.taken = 0
        self.acked: list[int] = []

    async def __anext__(self) -> Delivered:
        if not self.left:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        self.taken += 1
        offset = self.left.pop(0)
        return Delivered(offset, offset, Delta(f"k{offset}", opaque(b"")))

    def ack(self, offset: int) -> None:
        self.acked.append(offset)


def listed(count: int, first: int = 0, **more: Any) -> tuple[Listed, Any]:
    subscriber = Listed(count, first)
    return subscriber, streams.items(subscriber, **more)  # type: ignore[arg-type]


def story(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    run_virtual(bounded)


async def offset_of(one: Delivered) -> int:
    return one.offset


def test_a_value_is_done_with_when_the_loop_comes_back() -> None:
    async def main() -> None:
        subscriber, source = listed(3)
        seen = []
        async for offset in streams.values(streams.map(source, offset_of, tasks=1)):
            seen.append(offset)
            assert subscriber.acked == list(range(offset))
            if offset == 2:
                break
        assert seen == [0, 1, 2]

    story(main)


def test_what_overtook_is_acknowledged_only_behind_what_came_first() -> None:
    async def main() -> None:
        subscriber, source = listed(3)
        gate = asyncio.Event()

        async def work(one: Delivered) -> int:
            if one.offset == 0:
                await gate.wait()
            return one.offset

        seen = []
        async for offset in streams.values(streams.map(source, work, ordered=False)):
            seen.append(offset)
            if len(seen) == 3:
                break
            assert subscriber.acked == []
            if len(seen) == 2:
                gate.set()
        assert seen == [1, 2, 0]

    story(main)


def test_a_step_that_fails_ends_the_stream_and_acknowledges_nothing_of_it() -> None:
    async def main() -> None:
        subscriber, source = listed(5)

        async def work(one: Delivered) -> int:
            if one.offset == 2:
                raise ValueError("bad")
            return one.offset

        with pytest.raises(ValueError, match="bad"):
            async for _ in streams.values(streams.map(source, work, tasks=1)):
                pass
        assert subscriber.acked == [0, 1]

    story(main)


def test_chunks_are_full_or_in_time_and_done_as_a_whole() -> None:
    async def main() -> None:
        subscriber, source = listed(5)
        began = anyio.current_time()
        seen = []
        async for chunk in streams.values(streams.chunk(streams.map(source, offset_of), 2, within_s=0.5)):
            seen.append((chunk, subscriber.acked[-1:]))
            if len(seen) == 3:
                break
        assert seen == [([0, 1], []), ([2, 3], [1]), ([4], [3])]
        assert anyio.current_time() - began == pytest.approx(0.5)

    story(main)


def test_what_is_left_out_is_done_with() -> None:
    async def main() -> None:
        subscriber, source = listed(4)
        seen = []
        async for one in streams.values(streams.filter(source, lambda one: one.offset % 2 == 1)):
            seen.append(one.offset)
            if one.offset == 3:
                break
        assert seen == [1, 3]
        assert subscriber.acked[-1] == 2

    story(main)


def test_merged_subscriptions_acknowledge_each_its_own() -> None:
    async def main() -> None:
        one, first = listed(3)
        other, second = listed(3, first=100)
        seen = []
        async for offset in streams.values(streams.map(streams.merge(first, second), offset_of)):
            seen.append(offset)
            if len(seen) == 6:
                break
        assert sorted(seen) == [0, 1, 2, 100, 101, 102]
        assert set(one.acked) <= {0, 1, 2}
        assert set(other.acked) <= {100, 101, 102}
        assert one.acked
        assert other.acked

    story(main)


def test_no_more_are_taken_than_may_be_open() -> None:
    async def main() -> None:
        subscriber, source = listed(100, open_max=5)
        gate = asyncio.Event()

        async def work(one: Delivered) -> int:
            await gate.wait()
            return one.offset

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

    story(main)


def test_what_is_given_wrongly_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="manual"):
        streams.items(Subscriber("localhost", "*"))
    _, source = listed(1)
    for wrong in (
        lambda: listed(1, open_max=0),
        lambda: streams.map(source, offset_of, tasks=0),
        lambda: streams.chunk(source, 0),
    ):
        with pytest.raises(UsageError, match="give"):
            wrong()
