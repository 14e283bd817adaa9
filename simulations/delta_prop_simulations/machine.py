"""One machine: its disk, clock, threads and place in the network; processes start there, die, come back.

What a killed process still does reaches nothing: its disk is off, its streams are gone, its `life` is over.
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
    from delta_prop_simulations.chance import Seed
    from delta_prop_simulations.clock import ClockFaults
    from delta_prop_simulations.threads import ThreadFaults
    from delta_prop_simulations.trace import Trace


class Ending(Enum):
    """How a life ended."""

    ENDED = "ended"  # by itself
    KILLED = "killed"
    POWER_CUT = "power cut"
    CRASHED = "crashed"  # by a call of its disk, as was told beforehand


class Life:
    """One process from its start to its end."""

    def __init__(self, machine: str, number: int) -> None:
        self.machine = machine
        self.number = number
        self.ending: Ending | None = None
        self.scope = anyio.CancelScope()
        self.gone = anyio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing that it does has any effect any more."""
        return self.ending is not None

    def end(self, ending: Ending) -> None:
        """From now on it is over."""
        self.ending = ending
        self.gone.set()
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
        self.disk_struck = self.disk.struck  # one counter for this disk and all that come out of it
        self._seed = seed
        self._network = network.at(name)
        self._trace = trace
        self._clock = FaultyClock(LoopClock().now, clock, self.struck)
        self.thread_faults = threads
        self.on_end: Callable[[Life], object] = lambda _life: None
        """Told at once when a life is over."""
        self._capacity_bytes = capacity_bytes
        self._chance = seed.stream("machine")
        self._ailments: dict[str, Callable[[SimDisk], None]] = {}
        self._away = False

    # --- processes

    @property
    def is_up(self) -> bool:
        """Whether a process runs here."""
        return self._present() is not None

    def world(self) -> World:
        """The world of the process that starts now."""
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
        """One life. What falls out of a process that was killed is swallowed, and nothing else."""
        assert not self.is_up, f"{self.name}: one process at a time"
        assert not self._away, f"{self.name} has no power"
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
                self.look()
                if not _is_of_dead(error, life):
                    self._finish(life)
                    raise
        if life.ending is None:
            self._finish(life)
        assert life.ending is not None
        return life.ending

    def _finish(self, life: Life) -> None:
        """The process has come to its end; what it did not sync is in the page cache."""
        self._end(life, Ending.ENDED, self.disk.kill())

    # --- disasters

    def kill(self) -> None:
        """Kill -9, now."""
        if (life := self._present()) is not None:
            self._end(life, Ending.KILLED, self.disk.kill())

    def cut_power(self) -> None:
        """The power is off: nobody is told, and what was not synced may be gone. Until `restore`."""
        if (life := self._present()) is not None:
            self._end(life, Ending.POWER_CUT, self.disk.crash())
        elif not self._away:
            self._succeed(self.disk.crash())
            self._network.crash(self.name)
        self._away = True

    def restore(self) -> None:
        """The power is back; a process may be started."""
        if self._away:
            self._away = False
            self._network.restore(self.name)
            self._trace.note(self.name, "has power")

    def look(self) -> None:
        """Once a turn: a call of the disk may have been the last one, of the process or of the machine."""
        if self.disk.is_off and (life := self._present()) is not None:
            found = self.disk.kill() if self._chance.random() < 0.5 else self.disk.crash()
            self._end(life, Ending.CRASHED, found)

    def afflict(self, name: str, ailment: Callable[[SimDisk], None]) -> None:
        """Let something be wrong with the disk until `cure(name)`, whoever works on it meanwhile."""
        self._ailments[name] = ailment
        ailment(self.disk)

    def cure(self, name: str | None = None) -> None:
        """End one of them, or all."""
        if name is None:
            self._ailments.clear()
        else:
            self._ailments.pop(name, None)
        self.disk.heal()
        self.disk.capacity_bytes = self._capacity_bytes
        for ailment in self._ailments.values():
            ailment(self.disk)

    # --- within

    def _present(self) -> Life | None:
        return None if self.life is None or self.life.over else self.life

    def _end(self, life: Life, ending: Ending, found: SimDisk) -> None:
        self._trace.note(self.name, ending.value, life.number, self.disk.calls)
        self.struck[ending.value] += 1
        life.end(ending)
        if ending is Ending.POWER_CUT:
            self._network.crash(self.name)
        else:
            self._network.kill(self.name)
        self._succeed(found)
        self.on_end(life)

    def _succeed(self, found: SimDisk) -> None:
        self.disk.is_off = True
        self.disk = found
        for ailment in self._ailments.values():
            ailment(found)


class _NetworkOfLife:
    """The network as one process sees it, as long as it lives."""

    def __init__(self, network: VirtualNetwork, life: Life) -> None:
        self._network = network
        self._life = life

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Listener:
        """Listen. Raises OSError, UsageError."""
        listener = await self._network.listen(host, port, tls=tls)
        if self._life.over:
            listener.close()
            raise ConnectionError("the process is over")
        return listener

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        """Connect. Raises OSError, TimeoutError, UsageError."""
        stream = await self._network.connect(host, port, tls=tls, timeout_s=timeout_s)
        if self._life.over:
            stream.give_up(told=True)
            raise ConnectionError("the process is over")
        return stream


def _is_of_dead(error: BaseException, life: Life) -> bool:
    """Whether nobody is to hear of it: the process was killed, or its disk ended it."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        return False
    if isinstance(error, BaseExceptionGroup):
        return all(_is_of_dead(one, life) for one in error.exceptions)
    return life.over or isinstance(error, SimCrash)


if TYPE_CHECKING:

    def _conforms(network: _NetworkOfLife) -> Network:
        return network
