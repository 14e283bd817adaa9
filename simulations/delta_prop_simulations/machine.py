"""One machine: its disk, clock, threads and network host; processes start there, end, and are restarted.

A killed process has no effect any more: its disk is off, its streams are closed, its `life` is over.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

import anyio

from delta_prop.ports import World
from delta_prop.testing.world import SeededRandomness
from delta_prop.world import LoopClock
from delta_prop_simulations.clock import FaultyClock
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_simulations.threads import SimThreads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.ports import Listener, Network, Stream, Tls
    from delta_prop.testing import VirtualNetwork
    from delta_prop_simulations.clock import ClockFaults
    from delta_prop_simulations.rng import Seed
    from delta_prop_simulations.threads import ThreadFaults
    from delta_prop_simulations.trace import Trace


class Ending(Enum):
    """The ways in which a life ends."""

    ENDED = "ended"  # by itself
    KILLED = "killed"
    POWER_CUT = "power cut"
    CRASHED = "crashed"  # at a call of its disk, as planned


class Life:
    """One process from its start to its end."""

    def __init__(self, machine: str, number: int) -> None:
        self.machine = machine
        self.number = number
        self.ending: Ending | None = None
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()

    @property
    def is_over(self) -> bool:
        """True once the process has no effect any more."""
        return self.ending is not None

    def end(self, ending: Ending) -> None:
        """End the life."""
        self.ending = ending
        self.ended.set()
        if ending is not Ending.ENDED:
            self.scope.cancel()


class Machine:
    """A host. One process at a time."""

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
        self.lives = 0
        self.life: Life | None = None
        self.struck: Counter[str] = Counter()
        self.disk_struck = self.disk.struck  # one counter for this disk and all disks derived from it
        self._seed = seed
        self._network = network.at(name)
        self._trace = trace
        self._clock = FaultyClock(LoopClock().now, clock, self.struck)
        self.thread_faults = threads
        self.on_end: Callable[[Life], object] = lambda _life: None
        """Called at once when a life is over."""
        self._capacity_bytes = capacity_bytes
        self._rng = seed.stream("machine")
        self._disk_faults: dict[str, Callable[[SimDisk], None]] = {}
        self._is_without_power = False

    # --- processes

    @property
    def is_up(self) -> bool:
        """True while a process runs here."""
        return self._current_life() is not None

    def world(self) -> World:
        """Return the world of the process that starts now."""
        self.lives += 1
        life = self.life = Life(self.name, self.lives)
        seed = self._seed.child(f"life {life.number}")
        threads = SimThreads(seed.stream("threads"), lambda: self.thread_faults, self.struck)
        disk = self.disk
        return World(
            clock=self._clock,
            randomness=SeededRandomness(str(seed)),
            new_threads=threads.new_thread,
            own_thread=threads.thread,
            background_thread=threads.thread,
            open_disk=lambda _path: disk,
            network=_NetworkOfLife(self._network, life),
        )

    async def run(self, process: Callable[[World], Awaitable[None]]) -> Ending:
        """Run one life. Exceptions of a killed process are suppressed, all others raised."""
        assert not self.is_up, f"{self.name}: one process at a time"
        assert not self._is_without_power, f"{self.name} has no power"
        world = self.world()
        life = self.life
        assert life is not None
        self._trace.note(self.name, "starts", life.number)
        with life.scope:
            try:
                await process(world)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:
                self.check_disk()
                if not _is_from_dead_life(error, life):
                    self._finish(life)
                    raise
        if life.ending is None:
            self._finish(life)
        assert life.ending is not None
        return life.ending

    def _finish(self, life: Life) -> None:
        """End a life by itself; unsynced data is in the page cache."""
        self._end(life, Ending.ENDED, self.disk.kill())

    # --- faults

    def kill(self) -> None:
        """Kill the process with SIGKILL now."""
        if (life := self._current_life()) is not None:
            self._end(life, Ending.KILLED, self.disk.kill())

    def cut_power(self) -> None:
        """Cut the power until `restore`: no peer is notified, and unsynced data may be lost."""
        if (life := self._current_life()) is not None:
            self._end(life, Ending.POWER_CUT, self.disk.crash())
        elif not self._is_without_power:
            self._replace_disk(self.disk.crash())
            self._network.crash(self.name)
        self._is_without_power = True

    def restore(self) -> None:
        """Restore the power; a process may be started."""
        if self._is_without_power:
            self._is_without_power = False
            self._network.restore(self.name)
            self._trace.note(self.name, "has power")

    def check_disk(self) -> None:
        """Check once a turn if a call of the disk was the last one of the process or of the machine."""
        if self.disk.is_off and (life := self._current_life()) is not None:
            found = self.disk.kill() if self._rng.random() < 0.5 else self.disk.crash()
            self._end(life, Ending.CRASHED, found)

    def add_disk_fault(self, name: str, fault: Callable[[SimDisk], None]) -> None:
        """Inject a disk fault until `remove_disk_fault(name)`, for this process and its successors."""
        self._disk_faults[name] = fault
        fault(self.disk)

    def remove_disk_fault(self, name: str | None = None) -> None:
        """End one disk fault, or all."""
        if name is None:
            self._disk_faults.clear()
        else:
            self._disk_faults.pop(name, None)
        self.disk.heal()
        self.disk.capacity_bytes = self._capacity_bytes
        for inject in self._disk_faults.values():
            inject(self.disk)

    # --- internals

    def _current_life(self) -> Life | None:
        return None if self.life is None or self.life.is_over else self.life

    def _end(self, life: Life, ending: Ending, found: SimDisk) -> None:
        self._trace.note(self.name, ending.value, life.number, self.disk.calls)
        self.struck[ending.value] += 1
        life.end(ending)
        if ending is Ending.POWER_CUT:
            self._network.crash(self.name)
        else:
            self._network.kill(self.name)
        self._replace_disk(found)
        self.on_end(life)

    def _replace_disk(self, found: SimDisk) -> None:
        self.disk.is_off = True
        self.disk = found
        for inject in self._disk_faults.values():
            inject(found)


class _NetworkOfLife:
    """The network as one process sees it, until its end."""

    def __init__(self, network: VirtualNetwork, life: Life) -> None:
        self._network = network
        self._life = life

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Listener:
        """Listen. Raises OSError, UsageError."""
        listener = await self._network.listen(host, port, tls=tls)
        if self._life.is_over:
            listener.close()
            raise ConnectionError("the process is over")
        return listener

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect. Raises OSError, TimeoutError, UsageError."""
        stream = await self._network.connect(host, port, tls=tls, timeout_s=timeout_s)
        if self._life.is_over:
            stream.abort(notify=True)
            raise ConnectionError("the process is over")
        return stream


def _is_from_dead_life(error: BaseException, life: Life) -> bool:
    """True if the error is to be suppressed: the process was killed, or its disk ended it."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    if isinstance(error, BaseExceptionGroup):
        return all(_is_from_dead_life(one, life) for one in error.exceptions)
    return life.is_over or isinstance(error, SimCrash)


if TYPE_CHECKING:

    def _conforms(network: _NetworkOfLife) -> Network:
        return network
