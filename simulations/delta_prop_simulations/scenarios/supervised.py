"""One machine of a scenario and its supervised service, with its sinks and its links to other machines.

After a fault the service is restarted. If it cannot start, the error is noted and the start is retried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client import ForwardLink
from delta_prop.server.service import Service as Server
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.log_history import LogHistory
from delta_prop_simulations.machine import Ending
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.platform.ports import World
    from delta_prop_simulations.machine import Machine
    from delta_prop_simulations.scenarios.forwarding_times import Tap
    from delta_prop_simulations.scenarios.persistent_sink import PersistentSink
    from delta_prop_simulations.scenarios.scenario import Service, SinkSpec

PORT = 7373
RETRY_S = 1.0
_ERRORS_MAX = 20


class Downtime:
    """The seconds for which a service could not be used, between a fault and the next start."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """Note that the service is down from now on."""
        if self._since is None:
            self._since = anyio.current_time()

    def end(self) -> None:
        """Note that the service is up."""
        if self._since is not None:
            self.seconds += anyio.current_time() - self._since
            self._since = None


class _Switch:
    """The state that a service is requested to have: running, off for a while, or ended for good."""

    def __init__(self) -> None:
        self.has_ended = False
        self.stop_requested = anyio.Event()
        self._is_on = anyio.Event()
        self._is_on.set()

    async def wait_until_on(self) -> None:
        """Wait until the service may run; a stop is then requested anew."""
        await self._is_on.wait()
        self.stop_requested = anyio.Event()

    def turn_off(self) -> None:
        """Prevent the next start."""
        self._is_on = anyio.Event()

    def turn_on(self) -> None:
        """Let the service start."""
        self._is_on.set()

    def end(self) -> None:
        """End the service for good."""
        self.has_ended = True
        self._is_on.set()
        self.stop_requested.set()


class SupervisedSite:
    """A machine and its service. `propagator`: that of the running service; None while no service runs."""

    def __init__(self, machine: Machine, service: Service, others: Sequence[str], tap: Tap) -> None:
        """`others`: the machines that the service forwards to. `tap`: notes the batches that become
        visible.
        """
        self.machine = machine
        self.tap = tap
        self.sinks: dict[str, tuple[SinkSpec, PersistentSink]] = {}
        self.propagator: Propagator | None = None
        self.start_count = 0
        self.downtime = Downtime()
        self.errors: list[str] = []
        """The errors with which the service failed to start, or ended."""
        self._service = service
        self._others = others
        self._switch = _Switch()
        self._checked_server: tuple[StepChecker, Server] | None = None
        self.check_count = 0
        """The number of steps at which offsets and bounds were checked."""

    @property
    def name(self) -> str:
        """The name of the machine."""
        return self.machine.name

    @property
    def address(self) -> str:
        """The address of the service."""
        return f"{self.name}:{PORT}"

    # --- start and end

    async def keep_running(self) -> None:
        """Start the service, and restart it, until `end` is called."""
        while not self._switch.has_ended:
            await self._switch.wait_until_on()
            try:
                ending = await self.machine.run(self._serve)
            except Exception as error:
                if not _is_expected(error):
                    raise
                ending = Ending.CRASHED
                self._note_error(_format_error(error))
            self.propagator = self._checked_server = None
            if ending is Ending.CRASHED and not self._switch.has_ended:
                await anyio.sleep(RETRY_S)

    async def _serve(self, world: World) -> None:
        service = self._service
        data = None if service.log is None else "log"
        async with Propagator(service.settings, data=data, log=service.log, world=world) as p:
            p.internals().sinks.add_target(self.tap, parse_topics("*"))
            for spec, sink in self.sinks.values():
                await p.attach(
                    sink,
                    topics=spec.topics,
                    required=spec.required,
                    pacing=spec.pacing,
                    on_log_full=spec.on_log_full,
                    batch_deltas=spec.batch_deltas,
                    linger_ms=spec.linger_ms,
                )
            for other in self._others:
                link = ForwardLink(f"{other}:{PORT}", name=self.name, world=world)
                await p.attach(ForwardSink(link, name=f"to {other}"))
            server = Server(p, ServerSettings(host="0.0.0.0", port=PORT, allow_anonymous=True))
            async with anyio.create_task_group() as tasks:
                await tasks.start(server.run)
                self._note_started(p, server)
                await self._switch.stop_requested.wait()
                self.propagator = self._checked_server = None
                server.stop()

    def _note_started(self, p: Propagator, server: Server) -> None:
        self.propagator = p
        level = AckLevel.MEMORY if self._service.log is None else AckLevel.DURABLE
        read_level = level if self._service.log is None else self._service.log.read_level
        history = LogHistory(self.name, level=level, visible_level=read_level)
        self._checked_server = StepChecker(self.name, p.internals(), history), server
        self.start_count += 1
        self.downtime.end()

    def check(self) -> None:
        """Check the invariants now, if the service runs. Raises Violation."""
        if self._checked_server is not None:
            checker, server = self._checked_server
            self.check_count += 1
            checker.check(server)

    # --- faults

    def take_down(self) -> None:
        """Prevent the service from running until `bring_back`."""
        self._switch.turn_off()
        self.propagator = self._checked_server = None
        self.downtime.begin()

    def bring_back(self) -> None:
        """Let the service run again."""
        self._switch.turn_on()

    def restart(self) -> None:
        """End the service gracefully; it starts again at once."""
        self._switch.stop_requested.set()

    def end(self) -> None:
        """End the service gracefully, for good."""
        self._switch.end()

    def _note_error(self, error: str) -> None:
        if len(self.errors) < _ERRORS_MAX:
            self.errors.append(error)


def _is_expected(error: BaseException) -> bool:
    """True if a service may end with this error when its disk fails."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expected(one) for one in error.exceptions)
    return isinstance(error, OSError | DeltaPropError)


def _format_error(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
