"""A fenced producer stays fenced after any restart, also if the newer epoch was never used."""

from __future__ import annotations

import anyio
import pytest

from delta_prop import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Priority, create
from delta_prop_wire.errors import Refused


@pytest.mark.parametrize("unclean", [False, True])
def test_unused_epoch_is_not_granted_a_second_time(unclean: bool) -> None:
    disk = SimDisk(1)
    delta = Delta("v", create([1.0]))
    granted: list[int] = []

    async def run_service(disk: SimDisk, uses_epoch: bool) -> None:
        async with Propagator(data="x", world=virtual_world(len(granted), disk=disk)) as p:
            await p.publish(delta)  # another producer writes to the log
            stale, fresh = p.producer("me"), p.producer("me")
            with pytest.raises(Refused, match="holds") as caught:
                await stale.publish(delta)
            assert caught.value.code.name == "FENCED"
            granted.append(int(caught.value.details["epoch"]))
            if uses_epoch:
                await fresh.publish(delta)
            if unclean:
                raise _Killed(disk.crash(len(granted)))

    for number in range(6):
        try:
            run_virtual(run_service, disk, number == 3)
        except _Killed as killed:
            disk = killed.disk
    assert granted == sorted(set(granted))


class _Killed(Exception):
    """Ends a process by a power cut; `disk` is what the next process finds."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__("the power is cut")
        self.disk = disk


def test_epochs_of_many_hellos_are_not_reused_after_a_crash() -> None:
    disk = SimDisk(1)
    granted: list[int] = []

    async def run_service(disk: SimDisk, hellos: int) -> None:
        async with Propagator(data="x", world=virtual_world(len(granted), disk=disk)) as p:
            for number in range(hellos):
                granted.append(p.producer("me")._lanes[Priority.NORMAL].epoch)
                if number % 1_000 == 0:
                    await anyio.sleep(2)
            raise _Killed(disk.crash(1))

    for hellos in (6_000, 1):
        with pytest.raises(_Killed) as killed:
            run_virtual(run_service, disk, hellos)
        disk = killed.value.disk
    assert granted == sorted(set(granted))
