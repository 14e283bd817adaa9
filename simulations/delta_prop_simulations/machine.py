"""A simulated machine: a disk, a clock, threads and a network host. It runs one process after the other.

A killed process has no effect any more: its disk is off, its streams are closed, its `Process` has ended.
Its wall clock jumps and drifts; it is computed from elapsed time, so nothing has to advance it. Calls on
threads run on the event loop, one at a time, and take virtual time: a call has its effect at its start or at
its end, as drawn, and the caller cannot tell which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import anyio

from delta_prop.platform.ports import Listener, Stream, Timer, Tls, World
from delta_prop.platform.world import LoopClock
from delta_prop.testing import VirtualNetwork
from delta_prop.testing.world import EPOCH_US, SeededRandomness
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop_simulations.rng import Random, Seed
    from delta_prop_simulations.trace import Trace

_US = 1_000_000
_DRIFT_MAX = 0.5


@dataclass(frozen=True, slots=True)
class ClockFaults:
    """`drift`: seconds that the wall clock gains per second; negative if it loses. `jumps`: pairs of the
    elapsed time of a jump and its size, both in seconds; a negative size is a jump back.
    """

    drift: float = 0.0
    jumps: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not -_DRIFT_MAX <= self.drift <= _DRIFT_MAX:
            raise UsageError(f"drift {self.drift}: out of range: give -{_DRIFT_MAX} to {_DRIFT_MAX}")


class FaultyClock:
    """The clock of one machine. `timer`: elapsed time; `event_counts`: of jumps, and of drifting reads."""

    def __init__(self, timer: Timer, faults: ClockFaults, event_counts: Counter[str]) -> None:
        self.now = timer.now
        self._faults = faults
        self._event_counts = event_counts
        self._jumps_seen = 0

    def wall_us(self) -> int:
        """Return the microseconds since 1970 that this machine's wall clock shows."""
        now = self.now()
        past_jumps = [by_s for at_s, by_s in self._faults.jumps if at_s <= now]
        self._event_counts["clock jumped"] += max(0, len(past_jumps) - self._jumps_seen)
        self._jumps_seen = len(past_jumps)
        if self._faults.drift:
            self._event_counts["clock read while it drifts"] += 1
        return EPOCH_US + round((now * (1 + self._faults.drift) + sum(past_jumps)) * _US)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ThreadFaults:
    """`delay_s_max`: the maximum of a call's delay, which is drawn from 0 on. `early`: the probability that a
    call has its effect before its delay, not after it. `stalls`: the probability that a call stalls;
    `stall_s`: the additional delay of such a call.
    """

    delay_s_max: float = 0.002
    early: float = 0.5
    stall_s: float = 0.5
    stalls: float = 0.0

    def __post_init__(self) -> None:
        for name in ("early", "stalls"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} {getattr(self, name)}: out of range: give 0 to 1")
        if self.delay_s_max < 0 or self.stall_s < 0:
            raise UsageError(
                f"delay_s_max {self.delay_s_max}, stall_s {self.stall_s}: negative: give 0 or more"
            )


class SimThreads:
    """The threads of one process."""

    def __init__(self, rng: Random, host: Machine) -> None:
        self._rng = rng
        self._host = host

    def new_thread(self) -> SimThread:
        """Return one more worker."""
        return SimThread(self)

    @asynccontextmanager
    async def thread(self) -> AsyncIterator[SimThread]:
        """Yield one worker for the duration of the scope."""
        yield self.new_thread()

    def draw_call(self) -> tuple[float, bool]:
        """Draw a call's delay, and True if the effect comes before the delay."""
        rng, faults = self._rng, self._host.thread_faults
        delay_s = rng.uniform(0, faults.delay_s_max)
        if rng.random() < faults.stalls:
            delay_s += faults.stall_s
            self._host.event_counts["thread stalled"] += 1
        is_early = rng.random() < faults.early
        if delay_s:
            self._host.event_counts["thread early" if is_early else "thread late"] += 1
        return delay_s, is_early


class SimThread:
    """One worker: runs calls in their order, one at a time."""

    def __init__(self, threads: SimThreads) -> None:
        self._threads = threads
        self._limiter = anyio.CapacityLimiter(1)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result; a cancelled caller waits for its end, as with a thread."""
        with anyio.CancelScope(shield=True):
            async with self._limiter:
                delay_s, is_early = self._threads.draw_call()
                if not is_early:
                    await anyio.sleep(delay_s)
                try:
                    result = function()
                finally:
                    if is_early:
                        await anyio.sleep(delay_s)
        return result


class Ending(Enum):
    """The end of a process."""

    ENDED = "ended"  # by itself
    KILLED = "killed"
    POWER_CUT = "power cut"
    CRASHED = "crashed"  # at a planned call of its disk


class Process:
    """One process from its start to its end."""

    def __init__(self, machine: str, number: int) -> None:
        self.machine = machine
        self.number = number
        self.ending: Ending | None = None
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()

    @property
    def has_ended(self) -> bool:
        """True once the process has ended."""
        return self.ending is not None

    def end(self, ending: Ending) -> None:
        """Mark the process as ended, and cancel it unless it ended by itself."""
        self.ending = ending
        self.ended.set()
        if ending is not Ending.ENDED:
            self.scope.cancel()


class Machine:
    """A simulated machine, which runs one process at a time."""

    def __init__(
        self,
        name: str,
        seed: Seed,
        network: VirtualNetwork,
        trace: Trace,
        *,
        clock: ClockFaults,
        threads: ThreadFaults,
        capacity_bytes: int | None = None,
    ) -> None:
        self.name = name
        self.disk = SimDisk(seed.stream("disk").getrandbits(64), capacity_bytes=capacity_bytes)
        self.process_count = 0
        self.process: Process | None = None
        self.event_counts: Counter[str] = Counter()
        self.disk_fault_counts = (
            self.disk.fault_counts
        )  # one counter for this disk and all disks derived from it
        self._seed = seed
        self._network = network.at(name)
        self._trace = trace
        self._clock = FaultyClock(LoopClock(), clock, self.event_counts)
        self.thread_faults = threads
        self.on_end: Callable[[Process], object] = lambda _process: None
        """Called as soon as a process has ended."""
        self._capacity_bytes = capacity_bytes
        self._rng = seed.stream("machine")
        self._disk_faults: dict[str, Callable[[SimDisk], None]] = {}
        self._is_without_power = False

    @property
    def is_up(self) -> bool:
        """True while a process runs here."""
        return self._running_process() is not None

    def world(self) -> World:
        """Start a process, and return its World."""
        self.process_count += 1
        process = self.process = Process(self.name, self.process_count)
        seed = self._seed.child(f"life {process.number}")
        threads = SimThreads(seed.stream("threads"), self)
        disk = self.disk
        return World(
            clock=self._clock,
            randomness=SeededRandomness(str(seed)),
            new_threads=threads.new_thread,
            own_thread=threads.thread,
            background_thread=threads.thread,
            open_disk=lambda _path: disk,
            network=_ProcessNetwork(self._network, process),
        )

    async def run(self, main: Callable[[World], Awaitable[None]]) -> Ending:
        """Run `main` as one process until it ends. Raises exceptions unless the process was killed."""
        assert not self.is_up, f"{self.name}: a process is running"
        assert not self._is_without_power, f"{self.name} has no power"
        world = self.world()
        process = self.process
        assert process is not None
        self._trace.note(self.name, "starts", process.number)
        with process.scope:
            try:
                await main(world)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                self.check_disk()
                if not _is_from_ended_process(error, process):
                    self._finish(process)
                    raise
        if process.ending is None:
            self._finish(process)
        assert process.ending is not None
        return process.ending

    def _finish(self, process: Process) -> None:
        """Record that a process ended by itself; unsynced data stays in the page cache."""
        self._end(process, Ending.ENDED, self.disk.kill())

    # --- faults

    def kill(self) -> None:
        """Kill the process with SIGKILL now."""
        if (process := self._running_process()) is not None:
            self._end(process, Ending.KILLED, self.disk.kill())

    def cut_power(self) -> None:
        """Cut the power until `restore`: no peer is notified, and unsynced data may be lost."""
        if (process := self._running_process()) is not None:
            self._end(process, Ending.POWER_CUT, self.disk.crash())
        elif not self._is_without_power:
            self._replace_disk(self.disk.crash())
            self._network.crash(self.name)
        self._is_without_power = True

    def restore(self) -> None:
        """Restore the power, so that a process can be started."""
        if self._is_without_power:
            self._is_without_power = False
            self._network.restore(self.name)
            self._trace.note(self.name, "has power")

    def check_disk(self) -> None:
        """End the process if a disk call crashed it. To be called at each turn of the event loop."""
        if self.disk.is_off and (process := self._running_process()) is not None:
            next_disk = self.disk.kill() if self._rng.random() < 0.5 else self.disk.crash()
            self._end(process, Ending.CRASHED, next_disk)

    def add_disk_fault(self, name: str, fault: Callable[[SimDisk], None]) -> None:
        """Inject a disk fault into this process and its successors, until `remove_disk_fault(name)`."""
        self._disk_faults[name] = fault
        fault(self.disk)

    def remove_disk_fault(self, name: str | None = None) -> None:
        """Remove one disk fault; without a name, all."""
        if name is None:
            self._disk_faults.clear()
        else:
            self._disk_faults.pop(name, None)
        self.disk.heal()
        self.disk.capacity_bytes = self._capacity_bytes
        for inject in self._disk_faults.values():
            inject(self.disk)

    def _running_process(self) -> Process | None:
        return None if self.process is None or self.process.has_ended else self.process

    def _end(self, process: Process, ending: Ending, next_disk: SimDisk) -> None:
        self._trace.note(self.name, ending.value, process.number, self.disk.calls)
        self.event_counts[ending.value] += 1
        process.end(ending)
        if ending is Ending.POWER_CUT:
            self._network.crash(self.name)
        else:
            self._network.kill(self.name)
        self._replace_disk(next_disk)
        self.on_end(process)

    def _replace_disk(self, next_disk: SimDisk) -> None:
        self.disk.is_off = True
        self.disk = next_disk
        for inject in self._disk_faults.values():
            inject(next_disk)


class _ProcessNetwork:
    """The network of one process; unusable after the process has ended."""

    def __init__(self, network: VirtualNetwork, process: Process) -> None:
        self._network = network
        self._process = process

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Listener:
        listener = await self._network.listen(host, port, tls=tls)
        if self._process.has_ended:
            listener.close()
            raise ConnectionError("the process has ended")
        return listener

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        stream = await self._network.connect(host, port, tls=tls, timeout_s=timeout_s)
        if self._process.has_ended:
            stream.abort(notify=True)
            raise ConnectionError("the process has ended")
        return stream


def _is_from_ended_process(error: BaseException, process: Process) -> bool:
    """True if the process was killed, or a planned crash of its disk ended it."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    if isinstance(error, BaseExceptionGroup):
        return all(_is_from_ended_process(one, process) for one in error.exceptions)
    return process.has_ended or isinstance(error, SimCrash)
