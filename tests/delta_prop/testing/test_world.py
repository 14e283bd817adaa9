"""The virtual `World`: its clock follows the loop, randomness is seeded, threads serve one call at a time."""

from __future__ import annotations

import anyio

from delta_prop.testing import run_virtual, virtual_world
from delta_prop.testing.world import EPOCH_US


def test_clock_follows_the_loop() -> None:
    async def main() -> None:
        clock = virtual_world().clock
        started, wall = clock.now(), clock.wall_us()
        await anyio.sleep(90)
        assert clock.now() - started == 90
        assert wall == EPOCH_US
        assert clock.wall_us() - wall == 90_000_000

    run_virtual(main)
    run_virtual(main, backend="trio")


def test_randomness_depends_on_the_seed() -> None:
    async def main(seed: int) -> tuple[bytes, float]:
        randomness = virtual_world(seed).randomness
        return randomness.bytes(16), randomness.random()

    assert run_virtual(main, 1) == run_virtual(main, 1)
    assert run_virtual(main, 1) != run_virtual(main, 2)


def test_thread_calls_are_serial_and_delayed() -> None:
    async def main() -> list[float]:
        world = virtual_world(3, thread_delay_s_max=2.0)
        threads, ends = world.new_threads(), []
        order: list[int] = []

        async def call(number: int) -> None:
            await threads.run(lambda: order.append(number))
            ends.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            for number in range(10):
                tasks.start_soon(call, number)
        assert order == list(range(10))
        return ends

    ends = run_virtual(main)
    assert ends == sorted(set(ends))
    assert ends == run_virtual(main)


def test_cancelled_caller_waits_for_its_thread_call() -> None:
    async def main() -> None:
        threads = virtual_world(3, thread_delay_s_max=1000.0).new_threads()
        results: list[str] = []
        with anyio.move_on_after(0.001):
            results.append(await threads.run(lambda: results.append("effect") or "result"))
        assert results[0] == "effect"
        assert anyio.current_time() > 1

    run_virtual(main)
