"""Helpers for propagator tests: a delta, a gate that blocks a sink, expected refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def make_delta(key: str, **fields: Any) -> Delta:
    return Delta(key, create([1.0, 2.0]), **fields)


async def catch_refusal(call: Awaitable[object]) -> Refused:
    with pytest.raises(Refused) as caught:
        await call
    return caught.value


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
