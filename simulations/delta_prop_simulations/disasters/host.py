"""A process that is kept running on its machine: started again after each end, until it has done its work.

What falls out of a living process is a violation, unless its disk failed it: then it comes again, as a
supervisor would have it.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop_simulations.disasters.violation import Violation
from delta_prop_simulations.machine import Ending
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

    from delta_prop.ports import World
    from delta_prop_simulations.machine import Life, Machine

AGAIN_S = 1.0
"""When a supervisor starts a process again that has failed."""

_TROUBLES = ("failed", "no room", "short for want of room")


class Host:
    """One machine and its process. Disasters end a life, `hurry` begins one."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.finished = False
        self.failures = 0
        self._not_before_s = 0.0
        self._changed = anyio.Event()
        machine.on_end = self._note_end

    # --- what a kind of host says

    async def process(self, world: World, life: Life) -> None:
        """One life of the process."""
        raise NotImplementedError

    def over(self, life: Life) -> None:
        """A life is over."""

    def has_done_all(self) -> bool:
        """Whether a process that came to its end by itself is not to be started again."""
        return True

    # --- life

    @property
    def is_up(self) -> bool:
        """Whether its process runs."""
        return self.machine.is_up

    async def keep(self, tasks: TaskGroup) -> None:
        """Have the process run, life after life."""
        while not self.finished:
            while (wait_s := self._not_before_s - anyio.current_time()) > 0:
                with anyio.move_on_after(wait_s):
                    await self._changed.wait()
            self.machine.restore()
            over = self._changed = anyio.Event()
            tasks.start_soon(self._live)
            await over.wait()
            self._changed = anyio.Event()

    def kill(self, for_s: float) -> bool:
        """Kill -9; whether there was a process."""
        was_up = self.is_up
        self.rest(for_s)
        self.machine.kill()
        return was_up

    def cut_power(self, for_s: float) -> bool:
        """Have the machine lose its power; whether there was a process."""
        was_up = self.is_up
        self.rest(for_s)
        self.machine.cut_power()
        return was_up

    async def wait_gone(self) -> None:
        """Wait until its process has ended, if one runs."""
        if (life := self.machine.life) is not None:
            await life.gone.wait()

    def hurry(self) -> None:
        """Start now what waits to be started."""
        self._not_before_s = 0.0
        if not self.is_up:
            self._changed.set()

    def rest(self, for_s: float) -> None:
        """When its process has ended it is not started again so soon."""
        self._not_before_s = max(self._not_before_s, anyio.current_time() + for_s)

    # --- within

    async def _live(self) -> None:
        machine = self.machine
        before = troubles(machine)

        async def process(world: World) -> None:
            assert machine.life is not None
            await self.process(world, machine.life)

        try:
            ending = await machine.run(process)
        except Violation:
            raise
        except Exception as error:
            if troubles(machine) == before or not all(_is_of_disk(one) for one in leaves(error)):
                raise Violation("crash", f"{self.name}, life {machine.lives}: {told(error)}") from error
            self.failures += 1
            self.rest(AGAIN_S)
        else:
            if ending is Ending.ENDED and self.has_done_all():
                self.finished = True

    def _note_end(self, life: Life) -> None:
        self.over(life)
        self._changed.set()


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def told(error: BaseException) -> str:
    """What failed and where, in one line, the same on every machine."""
    return "; ".join(f"{type(one).__name__}: {one} ({_place(one)})" for one in leaves(error))


def _place(error: BaseException) -> str:
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


def troubles(machine: Machine) -> int:
    """How often its disk has failed a call."""
    return sum(count for what, count in machine.disk_struck.items() if what.endswith(_TROUBLES))
