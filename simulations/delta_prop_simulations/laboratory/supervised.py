"""One machine of a scenario: its service through all its lives, with its sinks and its links to others.

A service that is killed is started again once it may be; one that cannot start tries again, and it is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.checks import parse_topics
from delta_prop.client import ForwardLink
from delta_prop.server.service import Service as Server
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from delta_prop_simulations.disasters.invariants import Steps
from delta_prop_simulations.disasters.record import Record
from delta_prop_simulations.machine import Ending
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.ports import World
    from delta_prop_simulations.laboratory.crossings import Tap
    from delta_prop_simulations.laboratory.lasting import LastingSink
    from delta_prop_simulations.laboratory.scenario import Service, SinkSpec
    from delta_prop_simulations.machine import Machine

PORT = 7373
TRY_AGAIN_S = 1.0
_TOLD_MAX = 20


class Supervised:
    """A machine and what runs there. `propagator`: the service that is up, None while none is."""

    def __init__(self, machine: Machine, service: Service, others: Sequence[str], tap: Tap) -> None:
        """`others`: the machines that it forwards to. `tap`: is told what becomes visible."""
        self.machine = machine
        self.name = machine.name
        self.tap = tap
        self.sinks: dict[str, tuple[SinkSpec, LastingSink]] = {}
        self.propagator: Propagator | None = None
        self.starts = 0
        self.down_s = 0.0
        self.told: list[str] = []
        """Why the service could not start, or ended by itself."""
        self._service = service
        self._others = others
        self._may_run = anyio.Event()
        self._may_run.set()
        self._stop = anyio.Event()
        self._over = False
        self._steps: tuple[Steps, Server] | None = None
        self.checked = 0
        """Steps at which marks and bounds were looked at."""
        self._away_since: float | None = None

    @property
    def address(self) -> str:
        """Where its service is reached."""
        return f"{self.name}:{PORT}"

    # --- life

    async def keep_up(self) -> None:
        """Start the service, and start it again, until it is told to end."""
        while not self._over:
            await self._may_run.wait()
            self._stop = anyio.Event()
            try:
                ending = await self.machine.run(self._serve)
            except Exception as error:
                if not _is_told(error):
                    raise
                ending = Ending.CRASHED
                self._note(_reason(error))
            self.propagator = self._steps = None
            if ending is Ending.CRASHED and not self._over:
                await anyio.sleep(TRY_AGAIN_S)

    async def _serve(self, world: World) -> None:
        service = self._service
        data = None if service.log is None else "log"
        async with Propagator(service.settings, data=data, log=service.log, world=world) as p:
            p.inside().sinks.add_outlet(self.tap, parse_topics("*"))
            for spec, sink in self.sinks.values():
                await p.attach(
                    sink,
                    topics=spec.topics,
                    required=spec.required,
                    pacing=spec.pacing,
                    on_log_full=spec.on_log_full,
                    batch_deltas=spec.batch_deltas,
                    linger_ms_max=spec.linger_ms_max,
                )
            for other in self._others:
                link = ForwardLink(f"{other}:{PORT}", name=self.name, world=world)
                await p.attach(ForwardSink(link, name=f"to {other}"))
            server = Server(p, ServerSettings(host="0.0.0.0", port=PORT, allow_anonymous=True))
            async with anyio.create_task_group() as tasks:
                await tasks.start(server.run)
                self._is_up(p, server)
                await self._stop.wait()
                self.propagator = self._steps = None
                server.stop()

    def _is_up(self, p: Propagator, server: Server) -> None:
        self.propagator = p
        level = AckLevel.MEMORY if self._service.log is None else AckLevel.DURABLE
        shown = level if self._service.log is None else self._service.log.level
        record = Record(self.name, level=level, visible_level=shown)
        self._steps = Steps(self.name, p.inside(), record), server
        self.starts += 1
        if self._away_since is not None:
            self.down_s += anyio.current_time() - self._away_since
            self._away_since = None

    def check(self) -> None:
        """What must hold at every step while it is up. Raises Violation."""
        if self._steps is not None:
            steps, server = self._steps
            self.checked += 1
            steps.look(server)

    # --- what befalls it

    def goes_down(self) -> None:
        """No service is to run here until `comes_back`."""
        self._may_run = anyio.Event()
        self.propagator = self._steps = None
        if self._away_since is None:
            self._away_since = anyio.current_time()

    def comes_back(self) -> None:
        """A service may run here again."""
        self._may_run.set()

    def restart(self) -> None:
        """End the service in order; another one is started at once."""
        self._stop.set()

    def end(self) -> None:
        """End the service in order, for good."""
        self._over = True
        self._may_run.set()
        self._stop.set()

    def _note(self, what: str) -> None:
        if len(self.told) < _TOLD_MAX:
            self.told.append(what)


def _is_told(error: BaseException) -> bool:
    """Whether it is what a service may end with, where its disk fails."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_told(one) for one in error.exceptions)
    return isinstance(error, OSError | DeltaPropError)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
