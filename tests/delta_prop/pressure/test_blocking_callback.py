"""A blocking callback or transform delays only its own sink, no other sink and no producer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop import Delta, Propagator, Settings, create, opaque, transform
from delta_prop.sinks import CacheSink, CallbackSink

if TYPE_CHECKING:
    from numpy.typing import NDArray


BLOCK_S = 0.05
ROUNDS, TRIES = 8, 4
"""Rounds per try, and the maximum number of tries; each try compares the medians over all rounds so far."""
DELTAS, INTERVAL_S = 40, 0.005
"""Deltas published in a round, and the interval between them."""
P50_RATIO_MAX = 1.2


def block_thread(offset: int, delta: Delta) -> None:
    """Block the thread, as a callback unaware of event loops does."""
    time.sleep(BLOCK_S)


async def latencies_s(*, blocking: bool) -> list[float]:
    """Return another sink's delays in seconds, with or without a blocking callback next to it."""
    delays_s: list[float] = []
    began: dict[int, float] = {}

    def note(offset: int, _: Delta) -> None:
        delays_s.append(time.perf_counter() - began[offset])

    async with Propagator(Settings(close_timeout_s=0.1)) as p:
        await p.attach(CallbackSink(note, name="quick", nonblocking=True))
        if blocking:
            await p.attach(CallbackSink(block_thread, name="blocks"), required=False)
        first = time.perf_counter() + INTERVAL_S
        for number in range(DELTAS):  # each delta is published at its time, even if earlier ones are late
            began[number] = first + number * INTERVAL_S
            await anyio.sleep(max(began[number] - time.perf_counter(), 0))
            await p.publish(Delta(f"v{number}", opaque(b"x")))
        if blocking:
            assert p.statistics().sinks["blocks"].lag > DELTAS // 4
        await p.wait_visible(DELTAS, sinks=["quick"])
        assert len(delays_s) == DELTAS
    return delays_s


@pytest.mark.alone
def test_blocking_callback_does_not_raise_median_delay_of_another_sink() -> None:
    without, with_blocking = list[float](), list[float]()
    anyio.run(lambda: latencies_s(blocking=True))
    for _ in range(TRIES):
        for _ in range(ROUNDS):
            without += anyio.run(lambda: latencies_s(blocking=False))
            with_blocking += anyio.run(lambda: latencies_s(blocking=True))
        p50, p99 = (np.quantile([without, with_blocking], share, axis=1) for share in (0.5, 0.99))
        print(
            f"another sink, ms, without and with a callback that blocks for {BLOCK_S * 1000:.0f}: "
            f"p50 {p50[0] * 1e3:.3f} {p50[1] * 1e3:.3f}, p99 {p99[0] * 1e3:.3f} {p99[1] * 1e3:.3f}"
        )
        if p50[1] <= P50_RATIO_MAX * p50[0]:
            return
    raise AssertionError(f"p50 is {p50[1] / p50[0]:.2f} times the one without the blocking callback")


@pytest.mark.parametrize("per", ["delta", "delivery"])
def test_loop_runs_while_a_callback_blocks(per: str) -> None:
    released, entered = threading.Event(), threading.Event()

    def wait_for_release(*_: object) -> None:
        entered.set()
        assert released.wait(30)

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(CallbackSink(wait_for_release, name="blocked", per=per))  # type: ignore[arg-type]
            await p.attach(CacheSink())
            first = await p.publish(Delta("v", create([1.0])))
            assert await anyio.to_thread.run_sync(entered.wait, 30)
            await p.wait_visible(first, sinks=["cache"], timeout_s=30)
            statistics = p.statistics().sinks["blocked"]
            assert (statistics.lag, statistics.errors) == (1, 0), "the callback should still block"
            released.set()
            await p.wait_visible(first, timeout_s=30)

    try:
        anyio.run(main)
    finally:
        released.set()


@pytest.mark.parametrize("nonblocking", [False, True])
def test_transform_runs_in_a_thread_unless_nonblocking(nonblocking: bool) -> None:
    ran: list[int] = []

    def double(vector: NDArray[np.float32]) -> NDArray[np.float32]:
        ran.append(threading.get_ident())
        return 2 * vector

    async def main() -> None:
        async with Propagator() as p:
            cache = await p.attach(CacheSink())
            p.register_transform("double", double, reads="cache", nonblocking=nonblocking)
            await p.publish(Delta("v", create([1.0])))
            await p.wait_visible(await p.publish(Delta("v", transform("double"))))
            state = cache.peek("default", "v")
            assert state is not None
            assert state.vector is not None
            assert state.vector.tolist() == [2.0]

    anyio.run(main)
    assert (ran == [threading.get_ident()]) is nonblocking
