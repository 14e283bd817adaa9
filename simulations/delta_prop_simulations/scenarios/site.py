"""The service of a run, or of one of its machines, with its simulated sinks.

The service is the production code, which is observed from outside. On a machine it is supervised: it is
restarted after a fault. If it cannot start, the error is noted and the start is retried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import numpy as np
from numpy.typing import NDArray

from delta_prop import Propagator
from delta_prop.api.statistics import Statistics
from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client import ForwardLink
from delta_prop.platform.ports import World
from delta_prop.server.service import Service as Server
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from delta_prop_simulations.chaos.histories import LogHistory
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.machine import Ending, Machine
from delta_prop_simulations.scenarios.measures import ForwardingTimes, OffsetTimes
from delta_prop_simulations.scenarios.sinks import PersistentSink, SimulatedSink
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop_simulations.rng import Seed
    from delta_prop_simulations.scenarios.run import RunInputs
    from delta_prop_simulations.scenarios.scenario import Service, SinkSpec

PORT = 7373
RETRY_S = 1.0
_ERRORS_MAX = 20


class Tap:
    """Notes the times at which batches become visible. `other_count`: of services that get them forwarded."""

    def __init__(self, service: str, forwarding_times: ForwardingTimes, other_count: int) -> None:
        self.offset_times = OffsetTimes()
        self._service = service
        self._forwarding_times = forwarding_times
        self._other_count = other_count

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Note that a batch has become visible."""
        now = anyio.current_time()
        self.offset_times.note(logged.offset, now)
        self._forwarding_times.note(self._service, logged, now, self._other_count)

    def note_visible(self) -> None:
        """Do nothing: `offer` has noted the batch."""

    def note_recovered(self) -> None:
        """Do nothing: earlier batches keep their times."""


class Site:
    """A service and its sinks. `ready`: set once sources may offer; `end_requested`: the run sets it to end
    the service. `propagator`: None unless it is open; `final_statistics`: those just before it was closed.
    `check_count`: the number of steps at which the service was checked.
    """

    final_statistics: Statistics

    def __init__(
        self, name: str, spec: Service, sinks: Sequence[SinkSpec], seed: Seed, inputs: RunInputs
    ) -> None:
        self.name, self.spec = name, spec
        self._tap = Tap(name, ForwardingTimes(), 0)
        self.offset_times = self._tap.offset_times
        self.sinks = [
            SimulatedSink(
                sink, inputs.distribution_of(sink), seed.stream(f"sink {sink.name}"), self.offset_times
            )
            for sink in sinks
        ]
        self.ready, self.end_requested = anyio.Event(), anyio.Event()
        self.propagator: Propagator | None = None
        self.check_count = 0
        self._step_checker: StepChecker | None = None

    @property
    def log_bytes_max(self) -> int:
        """The bound of the log, in bytes."""
        return self.spec.settings.log_bytes_max if self.spec.log is None else self.spec.log.bytes_max

    async def process(self, world: World) -> None:
        """Run the service in one process, until `end_requested` is set."""
        async with _open(self.spec, world) as p:
            await _attach(p, self._tap, [(sink.spec, sink) for sink in self.sinks])
            self._step_checker = _step_checker(self.name, self.spec, p)
            self.propagator = p
            self.ready.set()
            try:
                await self.end_requested.wait()
                self.final_statistics = p.statistics()
            finally:
                self.propagator = self._step_checker = None
                p.internals().sinks.remove_target(self._tap)

    def check(self) -> None:
        """Check the invariants now, if the service is open. Raises Violation."""
        if self._step_checker is not None:
            self.check_count += 1
            self._step_checker.check(None)

    def forget(self, statistics: Statistics) -> None:
        """Forget the times of offsets that all sinks have applied."""
        self.offset_times.forget(min(feed.applied_offset for feed in statistics.sinks.values()))


def _open(service: Service, world: World) -> Propagator:
    data = None if service.log is None else "log"
    return Propagator(service.settings, data=data, log=service.log, world=world)


async def _attach(
    p: Propagator, tap: Tap, sinks: Sequence[tuple[SinkSpec, SimulatedSink | PersistentSink]]
) -> None:
    p.internals().sinks.add_target(tap, parse_topics("*"))
    for spec, sink in sinks:
        await p.attach(
            sink,
            topics=spec.topics,
            required=spec.required,
            pacing=spec.pacing,
            on_log_full=spec.on_log_full,
            batch_deltas=spec.batch_deltas,
            linger_ms=spec.linger_ms,
        )


def _step_checker(name: str, service: Service, p: Propagator) -> StepChecker:
    read_level = service.level if service.log is None else service.log.read_level
    history = LogHistory(name, level=service.level, visible_level=read_level)
    return StepChecker(name, p.internals(), history)


class Downtime:
    """The seconds for which a service could not be used, between a fault and the next start."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        if self._since is None:
            self._since = anyio.current_time()

    def end(self) -> None:
        """Note that the service is up."""
        if self._since is not None:
            self.seconds += anyio.current_time() - self._since
            self._since = None


class Switch:
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
        self._is_on = anyio.Event()

    def turn_on(self) -> None:
        """Let the service start."""
        self._is_on.set()

    def restart(self) -> None:
        """End the service gracefully; it starts again at once."""
        self.stop_requested.set()

    def end(self) -> None:
        """End the service gracefully, for good."""
        self.has_ended = True
        self._is_on.set()
        self.stop_requested.set()


class SupervisedSite:
    """A machine and its service. `propagator`: that of the running service; None while no service runs.
    `errors`: those with which the service failed to start, or ended. `check_count`: the number of steps at
    which offsets and bounds were checked.
    """

    def __init__(self, machine: Machine, service: Service, others: Sequence[str], tap: Tap) -> None:
        """`others`: the machines that the service forwards to."""
        self.machine = machine
        self.tap = tap
        self.switch = Switch()
        self.sinks: dict[str, tuple[SinkSpec, PersistentSink]] = {}
        self.propagator: Propagator | None = None
        self.start_count = 0
        self.downtime = Downtime()
        self.errors: list[str] = []
        self.check_count = 0
        self._service = service
        self._others = others
        self._checked_server: tuple[StepChecker, Server] | None = None

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def address(self) -> str:
        return f"{self.name}:{PORT}"

    async def keep_running(self) -> None:
        """Start the service, and restart it, until it is ended by the switch."""
        while not self.switch.has_ended:
            await self.switch.wait_until_on()
            try:
                ending = await self.machine.run(self._serve)
            except Exception as error:
                if not _is_expected(error):
                    raise
                ending = Ending.CRASHED
                if len(self.errors) < _ERRORS_MAX:
                    self.errors.append(_format_error(error))
            self.propagator = self._checked_server = None
            if ending is Ending.CRASHED and not self.switch.has_ended:
                await anyio.sleep(RETRY_S)

    async def _serve(self, world: World) -> None:
        async with _open(self._service, world) as p:
            await _attach(p, self.tap, list(self.sinks.values()))
            for other in self._others:
                link = ForwardLink(f"{other}:{PORT}", name=self.name, world=world)
                await p.attach(ForwardSink(link, name=f"to {other}"))
            server = Server(p, ServerSettings(host="0.0.0.0", port=PORT, allow_anonymous=True))
            async with anyio.create_task_group() as tasks:
                await tasks.start(server.run)
                self.propagator = p
                self._checked_server = _step_checker(self.name, self._service, p), server
                self.start_count += 1
                self.downtime.end()
                await self.switch.stop_requested.wait()
                self.propagator = self._checked_server = None
                server.stop()

    def check(self) -> None:
        """Check the invariants now, if the service runs. Raises Violation."""
        if self._checked_server is not None:
            checker, server = self._checked_server
            self.check_count += 1
            checker.check(server)

    def take_down(self) -> None:
        """Prevent the service from running until it is turned on by the switch."""
        self.switch.turn_off()
        self.propagator = self._checked_server = None
        self.downtime.begin()


def _is_expected(error: BaseException) -> bool:
    """True if a service may end with this error when its disk fails."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_expected(one) for one in error.exceptions)
    return isinstance(error, OSError | DeltaPropError)


def _format_error(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
