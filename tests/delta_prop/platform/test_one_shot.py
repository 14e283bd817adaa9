"""OneShot: one waiter and one result, on each backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio
import pytest

from delta_prop.platform.one_shot import EventOneShot, one_shot_factory
from delta_prop.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.platform.one_shot import OneShot

BACKENDS = ("asyncio", "trio", "event")


def run_with(backend: str, scenario: Callable[[Callable[[], OneShot]], object]) -> None:
    async def run() -> None:
        await scenario(EventOneShot if backend == "event" else one_shot_factory())  # type: ignore[misc]

    loop_backend: Literal["asyncio", "trio"] = "trio" if backend == "trio" else "asyncio"
    run_virtual(run, backend=loop_backend)


def test_factory_uses_event_one_shot_only_outside_asyncio() -> None:
    one_shots: list[OneShot] = []

    async def run() -> None:
        one_shots.append(one_shot_factory()())

    run_virtual(run, backend="asyncio")
    run_virtual(run, backend="trio")
    assert not isinstance(one_shots[0], EventOneShot)
    assert isinstance(one_shots[1], EventOneShot)


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiter_gets_result_set_before_or_during_the_wait(backend: str) -> None:
    async def scenario(make_one_shot: Callable[[], OneShot]) -> None:
        before, after = make_one_shot(), make_one_shot()
        before.set_result("before")
        received: list[object] = []

        async def wait() -> None:
            received.extend((await before, await after))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(1)
            assert not received
            assert not after.done()
            after.set_result("after")
        assert received == ["before", "after"]
        assert after.done()
        assert not after.cancelled()
        assert after.result() == "after"

    run_with(backend, scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_wait_leaves_the_one_shot_done(backend: str) -> None:
    async def scenario(make_one_shot: Callable[[], OneShot]) -> None:
        one_shot = make_one_shot()
        with anyio.move_on_after(1) as scope:
            await one_shot
        assert scope.cancelled_caught
        assert one_shot.done()
        assert one_shot.cancelled()

    run_with(backend, scenario)
