"""A simulated machine: its processes end like real ones, and have no effect after their end."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop import Propagator, Settings
from delta_prop.testing import VirtualNetwork, run_virtual
from delta_prop_simulations.chaos.chaos_run import TurnTimer
from delta_prop_simulations.machine import ClockFaults, Ending, FaultyClock, Machine, SimThreads, ThreadFaults
from delta_prop_simulations.rng import Seed
from delta_prop_simulations.trace import Trace
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import World

NO_DELAYS = ThreadFaults(delay_s_max=0)


def make_machine(name: str = "m", *, network: VirtualNetwork | None = None, seed: int = 1) -> Machine:
    return Machine(
        name, Seed(seed), network or VirtualNetwork(seed), Trace(), clock=ClockFaults(), threads=NO_DELAYS
    )


def run_with_machine(scenario: Callable[[Machine], Awaitable[None]], seed: int = 1) -> None:
    async def main() -> None:
        await scenario(make_machine(seed=seed))

    run_virtual(main, seed=seed)


def test_random_streams_depend_only_on_seed_and_name() -> None:
    program = (
        "from delta_prop_simulations.rng import Seed; "
        "print(Seed(7).child('a').child('b').stream('c').getrandbits(64))"
    )
    printed = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        )
        printed.add(run.stdout.decode().strip())
    seed = Seed(7).child("a").child("b")
    assert printed == {str(seed.stream("c").getrandbits(64))}
    assert seed.stream("c").random() != seed.stream("d").random()
    assert Seed(7).stream("c").random() != Seed(8).stream("c").random()


def test_trace_digest_depends_on_events_and_times() -> None:
    turns = TurnTimer()

    def digest_of(*notes: tuple[float, str]) -> str:
        trace = Trace(turns)
        for at, what in notes:
            turns.note(at)
            trace.note(what, 1, b"x", None)
        return trace.digest()

    assert digest_of((0, "a"), (1, "b")) == digest_of((0, "a"), (1, "b"))
    assert (
        len({digest_of((0, "a"), (1, "b")), digest_of((0, "b"), (1, "a")), digest_of((0, "a"), (2, "b"))})
        == 3
    )
    trace = Trace(TurnTimer())
    before = trace.digest()
    trace.note_turn(1.0, 3)
    assert trace.digest() != before
    with pytest.raises(UsageError, match="object in a trace"):
        trace.note(object())
    for number in range(300):
        trace.note(number)
    assert trace.lines[-1] == "0.000000 299"
    assert len(trace.lines) == 200


def test_only_wall_clock_jumps_and_drifts() -> None:
    async def main() -> None:
        machine = make_machine()
        timer = machine.world().clock
        clock = FaultyClock(timer, ClockFaults(drift=0.1, jumps=((10.0, -3600.0),)), machine.event_counts)
        start_us = clock.wall_us()
        await anyio.sleep(5)
        assert clock.wall_us() - start_us == 5_500_000
        assert not machine.event_counts["clock jumped"]
        await anyio.sleep(5)
        assert clock.wall_us() - start_us == 11_000_000 - 3_600_000_000
        assert machine.event_counts["clock jumped"] == 1
        assert clock.now() == anyio.current_time()

    run_virtual(main)
    with pytest.raises(UsageError, match="drift 2"):
        ClockFaults(drift=2)


@pytest.mark.parametrize(("early", "first_effect_at"), [(1.0, 0.0), (0.0, 4.0)])
def test_thread_runs_calls_one_at_a_time_early_or_late(early: float, first_effect_at: float) -> None:
    async def main() -> None:
        machine = make_machine()
        machine.thread_faults = ThreadFaults(delay_s_max=0, early=early, stalls=1.0, stall_s=4.0)
        thread = SimThreads(Seed(1).stream("x"), machine).new_thread()
        effects: list[float] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(thread.run, lambda: effects.append(anyio.current_time()))
        assert effects == [first_effect_at, first_effect_at + 4.0]
        assert anyio.current_time() == 8.0
        assert machine.event_counts["thread stalled"] == 2

    run_virtual(main)


def test_killed_process_leaves_page_cache_without_cleanup() -> None:
    async def scenario(machine: Machine) -> None:
        async def process(world: World) -> None:
            file = world.open_disk("x").open("file", create=True)
            file.write(0, [b"written"])
            try:
                await anyio.sleep(60)
            finally:
                file.write(0, [b"too late"])

        async with anyio.create_task_group() as tasks:
            endings: list[Ending] = []

            async def run_process() -> None:
                endings.append(await machine.run(process))

            tasks.start_soon(run_process)
            await anyio.sleep(1)
            process = machine.process
            machine.kill()
            assert process is not None
            assert process.has_ended
        assert endings == [Ending.KILLED]
        assert machine.disk.peek("file") == b"written"
        assert anyio.current_time() == 1
        assert machine.event_counts["killed"] == 1

    run_with_machine(scenario)


def test_power_cut_loses_unsynced_data_and_stops_machine() -> None:
    async def scenario(machine: Machine) -> None:
        async def process(world: World) -> None:
            disk = world.open_disk("x")
            synced, unsynced = disk.open("synced", create=True), disk.open("unsynced", create=True)
            synced.write(0, [b"kept"])
            synced.sync()
            disk.sync_directory("")
            unsynced.write(0, [b"x" * 100_000])
            await anyio.sleep(60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(machine.run, process)
            await anyio.sleep(1)
            machine.cut_power()
        assert machine.disk.peek("synced") == b"kept"
        assert machine.disk.peek("unsynced") != b"x" * 100_000
        with pytest.raises(AssertionError, match="no power"):
            await machine.run(process)
        machine.restore()

        async def nothing(_world: World) -> None:
            await anyio.lowlevel.checkpoint()

        assert await machine.run(nothing) is Ending.ENDED
        assert machine.process_count == 2

    run_with_machine(scenario)


def test_crash_at_disk_call_ends_the_process() -> None:
    async def scenario(machine: Machine) -> None:
        machine.disk.crash_at(lambda call: call.name == "write")

        async def process(world: World) -> None:
            world.open_disk("x").open("file", create=True).write(0, [b"x"])
            await anyio.sleep(60)

        assert await machine.run(process) is Ending.CRASHED
        assert not machine.disk.is_off

    run_with_machine(scenario)


def test_error_of_a_running_process_is_raised() -> None:
    async def scenario(machine: Machine) -> None:
        async def process(_world: World) -> None:
            await anyio.sleep(1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await machine.run(process)
        assert not machine.is_up

    run_with_machine(scenario)


def test_killed_process_gets_no_stream_and_no_listener() -> None:
    async def main() -> None:
        network = VirtualNetwork(1)
        there, here = make_machine("there", network=network), make_machine("here", network=network)
        failures: list[str] = []

        async def serve(world: World) -> None:
            assert world.network is not None
            await world.network.listen("there", 7)
            await anyio.sleep(60)

        async def use_network_after_kill(world: World) -> None:
            assert world.network is not None
            try:
                await anyio.sleep(60)
            finally:
                with anyio.CancelScope(shield=True):
                    for attempt in (world.network.connect("there", 7), world.network.listen("here", 8)):
                        try:
                            await attempt
                        except ConnectionError as error:
                            failures.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(there.run, serve)
            tasks.start_soon(here.run, use_network_after_kill)
            await anyio.sleep(1)
            here.kill()
            await anyio.sleep(1)
            there.kill()
        assert failures == ["the process has ended"] * 2
        assert not network.connections

    run_virtual(main)


def test_disk_fault_persists_across_processes_until_removed() -> None:
    async def scenario(machine: Machine) -> None:
        machine.add_disk_fault(
            "failing writes", lambda disk: disk.fail(lambda call: call.name == "write", times=None)
        )

        async def process(world: World) -> None:
            file = world.open_disk("x").open("file", create=True)
            with pytest.raises(OSError, match="Input/output error"):
                file.write(0, [b"x"])
            await anyio.sleep(60)

        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(machine.run, process)
                await anyio.sleep(1)
                machine.kill()
        machine.remove_disk_fault("failing writes")
        machine.disk.open("file", create=True).write(0, [b"x"])

    run_with_machine(scenario)


def test_acknowledged_deltas_survive_power_cut() -> None:
    async def scenario(machine: Machine) -> None:
        acknowledged: list[str] = []

        async def serve(world: World) -> None:
            async with Propagator(Settings(), data="data", world=world) as propagator:
                watermark = propagator.producer("p").watermark()
                for number in range(watermark, watermark + 20):
                    await propagator.producer("p").publish(Delta(f"{number}", create([1.0])))
                    acknowledged.append(f"{number}")
                if machine.process_count == 1:
                    await anyio.sleep(60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(machine.run, serve)
            await anyio.sleep(0.02)
            machine.cut_power()
        before = len(acknowledged)
        machine.restore()
        assert await machine.run(serve) is Ending.ENDED
        assert acknowledged[before:][0] in {f"{before}", f"{before + 1}"}

    run_with_machine(scenario)
