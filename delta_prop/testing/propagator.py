"""Runs a test in virtual time, with a propagator that is open while the test runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from delta_prop.testing.loop import HORIZON_S, run_virtual
from delta_prop.testing.recorded import RecordedPropagator
from delta_prop.testing.world import virtual_world

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.api.settings import Settings

T = TypeVar("T")


def run_propagator(
    main: Callable[[RecordedPropagator], Awaitable[T]],
    settings: Settings | None = None,
    *,
    seed: int = 0,
    horizon_s: float = HORIZON_S,
) -> T:
    """Run `main(propagator)` in virtual time: an hour takes milliseconds, a hang is an error.

    Randomness, and the order of tasks that could run at the same time, are drawn from `seed`.
    """

    async def run() -> T:
        async with RecordedPropagator(settings, world=virtual_world(seed)) as propagator:
            result = await main(propagator)
        return result  # noqa: RET504 - an `async with` may suppress an exception

    return run_virtual(run, seed=seed, horizon_s=horizon_s)
