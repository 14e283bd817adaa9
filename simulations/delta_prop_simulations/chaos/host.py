"""A process that is kept running on its machine: started again after each end, until it has done its work.

What falls out of a living process is a violation, unless its disk failed it: then it comes again, as a
supervisor would have it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.machine import Ending
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

    from delta_prop.ports import World
    from delta_prop_simulations.machine import Life, Machine

RESTART_DELAY_S = 1.0
"""The time after which a supervisor restarts a failed process."""

_FAILURE_SUFFIXES = ("failed", "no room", "short for want of room")


class Host:
    """One machine and its process. Faults end a life, `start_now` begins one."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.is_finished = False
        self.failures = 0
        self._not_before_s = 0.0
        self._changed = anyio.Event()
        machine.on_end = self._note_end

    # --- overridden by each kind of host

    async def process(self, world: World, life: Life) -> None:
        """Run one life of the process."""
        raise NotImplementedError

    def note_life_over(self, life: Life) -> None:
        """Handle the end of a life."""

    def is_done(self) -> bool:
        """True if a process that ended by itself is not to be restarted."""
        return True

    # --- life

    @property
    def is_up(self) -> bool:
        """True while its process runs."""
        return self.machine.is_up

    async def keep_running(self, tasks: TaskGroup) -> None:
        """Run the process, life after life."""
        while not self.is_finished:
            while (wait_s := self._not_before_s - anyio.current_time()) > 0:
                with anyio.move_on_after(wait_s):
                    await self._changed.wait()
            self.machine.restore()
            over = self._changed = anyio.Event()
            tasks.start_soon(self._run_life)
            await over.wait()
            self._changed = anyio.Event()

    def kill(self, for_s: float) -> bool:
        """Kill the process with SIGKILL; returns True if there was one."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.kill()
        return was_up

    def cut_power(self, for_s: float) -> bool:
        """Cut the machine's power; returns True if there was a process."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.cut_power()
        return was_up

    async def wait_ended(self) -> None:
        """Wait until its process has ended, if one runs."""
        if (life := self.machine.life) is not None:
            await life.ended.wait()

    def start_now(self) -> None:
        """Start the process now if it waits for its start."""
        self._not_before_s = 0.0
        if not self.is_up:
            self._changed.set()

    def delay_start(self, for_s: float) -> None:
        """Prevent a restart of the process for `for_s` seconds."""
        self._not_before_s = max(self._not_before_s, anyio.current_time() + for_s)

    # --- internals

    async def _run_life(self) -> None:
        machine = self.machine
        before = disk_failures(machine)

        async def process(world: World) -> None:
            assert machine.life is not None
            await self.process(world, machine.life)

        try:
            ending = await machine.run(process)
        except Violation:
            raise
        except Exception as error:
            if disk_failures(machine) == before or not all(
                _is_of_disk(one) for one in leaf_exceptions(error)
            ):
                raise Violation(
                    "crash", f"{self.name}, life {machine.lives}: {format_error(error)}"
                ) from error
            self.failures += 1
            self.delay_start(RESTART_DELAY_S)
        else:
            if ending is Ending.ENDED and self.is_done():
                self.is_finished = True

    def _note_end(self, life: Life) -> None:
        self.note_life_over(life)
        self._changed.set()


def leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions in a group, at any depth."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaf_exceptions(one)
    else:
        yield error


def format_error(error: BaseException) -> str:
    """Format the errors and their locations in one line, the same on every machine."""
    return "; ".join(f"{type(one).__name__}: {one} ({_format_trace(one)})" for one in leaf_exceptions(error))


def _format_trace(error: BaseException) -> str:
    places: list[str] = []
    trace: Any = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        path = PurePath(code.co_filename)
        places.append(f"{path.parent.name}/{path.name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(places[-4:]))


def _is_of_disk(error: BaseException) -> bool:
    return isinstance(error, OSError | Refused)


def disk_failures(machine: Machine) -> int:
    """Return the number of calls that its disk has failed."""
    return sum(count for what, count in machine.disk_struck.items() if what.endswith(_FAILURE_SUFFIXES))
