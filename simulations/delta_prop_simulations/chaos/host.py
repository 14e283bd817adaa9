"""Keeps a process running on its machine: restarts it after each end, until its work is done.

An exception that leaves a process is a violation, unless a failed call of its disk caused the exception. Then
the process is restarted, as a supervisor would do.
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

    from delta_prop.platform.ports import World
    from delta_prop_simulations.machine import Machine, Process

RESTART_DELAY_S = 1.0
"""The time after which a supervisor restarts a failed process."""

_FAILURE_SUFFIXES = ("failed", "no room", "short for want of room")


class Host:
    """One machine and the process that runs on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.is_finished = False
        self.failure_count = 0
        self._not_before_s = 0.0
        self._start_requested = anyio.Event()
        self._ended = anyio.Event()
        machine.on_end = self._note_end

    # --- overridden by each kind of host

    async def run_process(self, world: World, process: Process) -> None:
        """Run the host's program in one process."""
        raise NotImplementedError

    def on_process_end(self, process: Process) -> None:
        """Called when a process has ended."""

    def is_done(self) -> bool:
        """True if a process that ended by itself must not be restarted."""
        return True

    # --- start and end

    @property
    def is_up(self) -> bool:
        """True while its process runs."""
        return self.machine.is_up

    async def keep_running(self, tasks: TaskGroup) -> None:
        """Run one process after the other, until the work is done."""
        while not self.is_finished:
            while (wait_s := self._not_before_s - anyio.current_time()) > 0:
                self._start_requested = anyio.Event()
                with anyio.move_on_after(wait_s):
                    await self._start_requested.wait()
            self.machine.restore()
            self._ended = anyio.Event()
            tasks.start_soon(self._run_once)
            await self._ended.wait()

    def kill(self, for_s: float) -> bool:
        """Kill the process with SIGKILL, for at least `for_s` seconds; return True if one ran."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.kill()
        return was_up

    def cut_power(self, for_s: float) -> bool:
        """Cut the machine's power, for at least `for_s` seconds; return True if a process ran."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.cut_power()
        return was_up

    async def wait_ended(self) -> None:
        """Wait until the host's process has ended, if one runs."""
        if (process := self.machine.process) is not None:
            await process.ended.wait()

    def start_now(self) -> None:
        """Start a process now if none runs."""
        self._not_before_s = 0.0
        self._start_requested.set()

    def delay_start(self, for_s: float) -> None:
        """Prevent a start of the process for `for_s` seconds."""
        self._not_before_s = max(self._not_before_s, anyio.current_time() + for_s)

    # --- internals

    async def _run_once(self) -> None:
        machine = self.machine
        before = disk_failures(machine)

        async def main(world: World) -> None:
            assert machine.process is not None
            await self.run_process(world, machine.process)

        try:
            ending = await machine.run(main)
        except Violation:
            raise
        except Exception as error:
            if disk_failures(machine) == before or not all(
                _is_disk_error(one) for one in leaf_exceptions(error)
            ):
                raise Violation(
                    "crash", f"{self.name}, process {machine.process_count}: {format_error(error)}"
                ) from error
            self.failure_count += 1
            self.delay_start(RESTART_DELAY_S)
        else:
            if ending is Ending.ENDED and self.is_done():
                self.is_finished = True

    def _note_end(self, process: Process) -> None:
        self.on_process_end(process)
        self._ended.set()


def leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group at any depth; of another exception, itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaf_exceptions(one)
    else:
        yield error


def format_error(error: BaseException) -> str:
    """Return the errors and their locations as one line, which is the same on every machine."""
    return "; ".join(f"{type(one).__name__}: {one} ({_format_trace(one)})" for one in leaf_exceptions(error))


def _format_trace(error: BaseException) -> str:
    locations: list[str] = []
    trace: Any = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        path = PurePath(code.co_filename)
        locations.append(f"{path.parent.name}/{path.name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(locations[-4:]))


def _is_disk_error(error: BaseException) -> bool:
    return isinstance(error, OSError | Refused)


def disk_failures(machine: Machine) -> int:
    """Return the number of disk calls that have failed on this machine."""
    return sum(
        count for event, count in machine.disk_fault_counts.items() if event.endswith(_FAILURE_SUFFIXES)
    )
