"""One service of a run on its machine, with its simulated sinks, from its start until the run lets it go.

The service is the production code; what it does is looked at from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.checks import parse_topics
from delta_prop_simulations.disasters.invariants import Steps
from delta_prop_simulations.disasters.record import Record
from delta_prop_simulations.laboratory.measures import Stamps
from delta_prop_simulations.laboratory.sinks import SimulatedSink
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from delta_prop.ports import World
    from delta_prop.statistics import Statistics
    from delta_prop_simulations.chance import Seed
    from delta_prop_simulations.laboratory.laws import Law
    from delta_prop_simulations.laboratory.scenario import Service, SinkSpec
    from delta_prop_wire.batch import LoggedBatch

DATA = "log"


class Site:
    """A service and its sinks. `ready` once sources may offer; `over` is set by who ends the run."""

    def __init__(
        self,
        name: str,
        spec: Service,
        sinks: tuple[SinkSpec, ...],
        seed: Seed,
        law: Callable[[SinkSpec], Law],
    ) -> None:
        self.name, self.spec = name, spec
        self.stamps = Stamps()
        self.sinks = [
            SimulatedSink(one, law(one), seed.stream(f"sink {one.name}"), self.stamps) for one in sinks
        ]
        self.ready, self.over = anyio.Event(), anyio.Event()
        self.p: Propagator | None = None
        """While it is open."""
        self.last: Statistics
        """As it closed."""
        self.checked = 0
        """Steps at which everything was looked at."""
        self._specs = sinks
        self._steps: Steps | None = None

    @property
    def level(self) -> AckLevel:
        """What an acknowledgement promises where nobody asks for less."""
        return AckLevel.MEMORY if self.spec.log is None else AckLevel.DURABLE

    @property
    def log_bytes_max(self) -> int:
        """The bound of its log."""
        return self.spec.settings.log_bytes_max if self.spec.log is None else self.spec.log.bytes_max

    async def process(self, world: World) -> None:
        """One life of the service."""
        spec = self.spec
        data = None if spec.log is None else DATA
        async with Propagator(spec.settings, data=data, log=spec.log, world=world) as p:
            inside = p.inside()
            tap = Tap(self.stamps, inside.now)
            inside.sinks.add_outlet(tap, parse_topics("*"))
            for one, sink in zip(self._specs, self.sinks, strict=True):
                await p.attach(
                    sink,
                    topics=one.topics,
                    required=one.required,
                    pacing=one.pacing,
                    on_log_full=one.on_log_full,
                    batch_deltas=one.batch_deltas,
                    linger_ms_max=one.linger_ms_max,
                )
            record = Record(self.name, level=self.level, visible_level=self.level)
            self._steps = Steps(self.name, inside, record)
            self.p = p
            self.ready.set()
            try:
                await self.over.wait()
                self.last = p.statistics()
            finally:
                self.p = self._steps = None
                inside.sinks.remove_outlet(tap)

    def check(self) -> None:
        """What must hold at every step while it is open. Raises Violation."""
        if self._steps is not None:
            self.checked += 1
            self._steps.look(None)

    def forget(self, told: Statistics) -> None:
        """Keep no time of what all sinks have applied."""
        self.stamps.forget(min(feed.applied for feed in told.sinks.values()))


class Tap:
    """Notes when each batch may be read; an outlet that keeps nothing."""

    def __init__(self, stamps: Stamps, now: Callable[[], float]) -> None:
        self._stamps, self._now = stamps, now

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """A batch has become visible."""
        self._stamps.note(logged.offset, self._now())

    def note_visible(self) -> None:
        """Told in `offer`."""

    def note_recovered(self) -> None:
        """What came before keeps its time."""
