"""Wakers: one waiter, one result, on each backend alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from delta_prop.one_shot import EventOneShot, one_shot_factory
from delta_prop.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.one_shot import OneShot

BACKENDS = ("asyncio", "trio", "event")


def each(backend: str, story: Callable[[Callable[[], OneShot]], object]) -> None:
    async def run() -> None:
        await story(EventOneShot if backend == "event" else one_shot_factory())  # type: ignore[misc]

    library: Literal["asyncio", "trio"] = "trio" if backend == "trio" else "asyncio"
    run_virtual(run, backend=library)


def test_asyncio_has_its_own_and_others_an_event() -> None:
    made: list[OneShot] = []

    async def run() -> None:
        made.append(one_shot_factory()())

    run_virtual(run, backend="asyncio")
    run_virtual(run, backend="trio")
    assert not isinstance(made[0], EventOneShot)
    assert isinstance(made[1], EventOneShot)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_waiter_gets_the_result_whenever_it_comes(backend: str) -> None:
    async def story(make: Callable[[], OneShot]) -> None:
        before, after = make(), make()
        before.set_result("before")
        got: list[object] = []

        async def wait() -> None:
            got.extend((await before, await after))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(1)
            assert not got
            assert not after.done()
            after.set_result("after")
        assert got == ["before", "after"]
        assert after.done()
        assert not after.cancelled()
        assert after.result() == "after"

    each(backend, story)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_waiter_leaves_a_waker_that_is_done(backend: str) -> None:
    async def story(make: Callable[[], OneShot]) -> None:
        waker = make()
        with anyio.move_on_after(1) as scope:
            await waker
        assert scope.cancelled_caught
        assert waker.done()
        assert waker.cancelled()

    each(backend, story)
