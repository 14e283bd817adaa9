"""Host restarts its process after each end, and never runs two at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop.testing import VirtualNetwork, run_virtual
from delta_prop_simulations.chaos.node import Host
from delta_prop_simulations.machine import ClockFaults, Machine, ThreadFaults
from delta_prop_simulations.rng import Seed
from delta_prop_simulations.trace import Trace

if TYPE_CHECKING:
    from delta_prop.platform.ports import World
    from delta_prop_simulations.machine import Process


class SleepingHost(Host):
    """A host whose process runs until it is killed."""

    async def run_process(self, world: World, process: Process) -> None:
        del world, process
        await anyio.sleep_forever()


@pytest.mark.parametrize("turns", range(8))
def test_request_to_start_at_the_end_of_a_delay_starts_one_process(turns: int) -> None:
    async def main() -> None:
        machine = Machine(
            "m", Seed(1), VirtualNetwork(1), Trace(), clock=ClockFaults(), threads=ThreadFaults(delay_s_max=0)
        )
        host = SleepingHost(machine)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(host.keep_running, tasks)
            await anyio.sleep_until(1)
            assert host.kill(for_s=4)
            await anyio.sleep_until(5)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            host.start_now()
            await anyio.sleep(1)
            assert (machine.process_count, host.is_up) == (2, True)
            tasks.cancel_scope.cancel()

    run_virtual(main, seed=1)
