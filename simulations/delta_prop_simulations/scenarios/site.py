"""One service of a run, with its simulated sinks, from its start until the run ends it.

The service is the production code, which is observed from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.calls.argument_checks import parse_topics
from delta_prop_simulations.chaos.invariants import StepChecker
from delta_prop_simulations.chaos.log_history import LogHistory
from delta_prop_simulations.scenarios.measures import OffsetTimes
from delta_prop_simulations.scenarios.sinks import SimulatedSink
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from delta_prop.api.statistics import Statistics
    from delta_prop.platform.ports import Timer, World
    from delta_prop_simulations.rng import Seed
    from delta_prop_simulations.scenarios.run import RunInputs
    from delta_prop_simulations.scenarios.scenario import Service, SinkSpec
    from delta_prop_wire.batch import LoggedBatch

DATA = "log"


class Site:
    """A service and its sinks. `ready`: set once sources may offer; `end_requested`: set by the run to end
    the service.
    """

    def __init__(
        self,
        name: str,
        spec: Service,
        sinks: tuple[SinkSpec, ...],
        seed: Seed,
        inputs: RunInputs,
    ) -> None:
        self.name, self.spec = name, spec
        self.offset_times = OffsetTimes()
        self.sinks = [
            SimulatedSink(
                sink, inputs.distribution_of(sink), seed.stream(f"sink {sink.name}"), self.offset_times
            )
            for sink in sinks
        ]
        self.ready, self.end_requested = anyio.Event(), anyio.Event()
        self.propagator: Propagator | None = None
        """The propagator while it is open."""
        self.final_statistics: Statistics
        """The statistics just before the propagator was closed."""
        self.check_count = 0
        """The number of steps at which the service was checked."""
        self._sink_specs = sinks
        self._step_checker: StepChecker | None = None

    @property
    def level(self) -> AckLevel:
        """The default ack level of sources."""
        return AckLevel.MEMORY if self.spec.log is None else AckLevel.DURABLE

    @property
    def log_bytes_max(self) -> int:
        """The bound of the log, in bytes."""
        return self.spec.settings.log_bytes_max if self.spec.log is None else self.spec.log.bytes_max

    async def process(self, world: World) -> None:
        """Run the service in one process, until `end_requested` is set."""
        service = self.spec
        data = None if service.log is None else DATA
        async with Propagator(service.settings, data=data, log=service.log, world=world) as p:
            internals = p.internals()
            tap = Tap(self.offset_times, internals.partition.world.clock)
            internals.sinks.add_target(tap, parse_topics("*"))
            for spec, sink in zip(self._sink_specs, self.sinks, strict=True):
                await p.attach(
                    sink,
                    topics=spec.topics,
                    required=spec.required,
                    pacing=spec.pacing,
                    on_log_full=spec.on_log_full,
                    batch_deltas=spec.batch_deltas,
                    linger_ms=spec.linger_ms,
                )
            history = LogHistory(self.name, level=self.level, visible_level=self.level)
            self._step_checker = StepChecker(self.name, internals, history)
            self.propagator = p
            self.ready.set()
            try:
                await self.end_requested.wait()
                self.final_statistics = p.statistics()
            finally:
                self.propagator = self._step_checker = None
                internals.sinks.remove_target(tap)

    def check(self) -> None:
        """Check the invariants now, if the service is open. Raises Violation."""
        if self._step_checker is not None:
            self.check_count += 1
            self._step_checker.check(None)

    def forget(self, statistics: Statistics) -> None:
        """Forget the times of offsets that all sinks have applied."""
        self.offset_times.forget(min(feed.applied_offset for feed in statistics.sinks.values()))


class Tap:
    """A route target that only notes the time at which each batch becomes visible."""

    def __init__(self, offset_times: OffsetTimes, timer: Timer) -> None:
        self._offset_times, self._now = offset_times, timer.now

    def offer(self, logged: LoggedBatch, rows: NDArray[np.intp] | None) -> None:
        """Note that a batch has become visible."""
        self._offset_times.note(logged.offset, self._now())

    def note_visible(self) -> None:
        """Do nothing: `offer` has noted the batch."""

    def note_recovered(self) -> None:
        """Do nothing: earlier batches keep their times."""
