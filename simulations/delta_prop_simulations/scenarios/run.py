"""One run of a scenario with a single service, in virtual time, from the load until the service is idle."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.api.statistics import Statistics
from delta_prop.testing import VirtualNetwork, run_virtual
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.files import processor_s
from delta_prop_simulations.machine import ClockFaults, Machine, ThreadFaults
from delta_prop_simulations.rng import Seed
from delta_prop_simulations.scenarios.measures import Timeline
from delta_prop_simulations.scenarios.offering import Outcomes, Source, Writers
from delta_prop_simulations.scenarios.result import Alternative
from delta_prop_simulations.scenarios.scenario import Scenario, SinkSpec, SourceSpec
from delta_prop_simulations.scenarios.sinks import ConfiguredDistribution, Distribution, SimulatedSink
from delta_prop_simulations.scenarios.site import Site
from delta_prop_simulations.scenarios.sources import DeltaGenerator, arrivals
from delta_prop_simulations.scenarios.verdicts import RunObservation, is_idle, verdicts
from delta_prop_simulations.trace import Trace

if TYPE_CHECKING:
    from delta_prop.directory.recorded_traffic import RecordedTraffic
    from delta_prop_simulations.scenarios.reading import Setup

IDLE_S_MAX = 86_400.0
"""Maximum virtual time from the end of the load until the service is idle."""
_SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The inputs of a run. `distribution_of`: returns the distribution of a sink's call times; `traffic`:
    returns what a source replays, if anything; `on_progress`: called with the virtual time of each sample;
    `checks`: True to check offsets and bounds at every turn of the event loop.
    """

    distribution_of: Callable[[SinkSpec], Distribution] = ConfiguredDistribution
    traffic: Callable[[SourceSpec], RecordedTraffic | None] = lambda _spec: None
    on_progress: Callable[[float], None] = lambda _now_s: None
    checks: bool = False


def run(setup: Setup, inputs: RunInputs | None = None) -> Alternative:
    """Run one alternative until its services are idle. Raises Violation if `inputs.checks` is set."""
    if setup.scenario.machine:
        from delta_prop_simulations.scenarios.cluster_run import run_cluster

        return run_cluster(setup, inputs or RunInputs())
    started_s = processor_s()
    inputs = inputs or RunInputs()
    scenario_run = Run(setup.scenario, inputs)
    horizon_s = setup.scenario.duration + 2 * IDLE_S_MAX
    was_collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a full collection would traverse the entire log; `_sample` collects the young generation
    try:
        run_virtual(
            scenario_run.main, horizon_s=horizon_s, on_turn=scenario_run.check if inputs.checks else None
        )
    finally:
        if was_collecting:
            gc.enable()
    if scenario_run.violation is not None:
        raise scenario_run.violation
    return scenario_run.result(setup, processor_s() - started_s)


class Run:
    """A service with its sources and sinks, and the measurements."""

    site: Site

    def __init__(self, scenario: Scenario, inputs: RunInputs) -> None:
        self.scenario, self._inputs = scenario, inputs
        self._seed = Seed(scenario.seed)
        self.trace = Trace()
        self.outcomes = Outcomes()
        self.timeline = Timeline(scenario.duration)
        self.violation: Violation | None = None
        self._is_idle = False
        self._scope: anyio.CancelScope | None = None

    async def main(self) -> None:
        """Run the load, and wait until the service is idle."""
        self.site = Site("service", self.scenario.service, self.scenario.sink, self._seed, self._inputs)
        seed, scenario = self._seed, self.scenario
        machine = Machine(
            self.site.name,
            seed.child("machine"),
            VirtualNetwork(seed.stream("network").getrandbits(32)),
            self.trace,
            clock=ClockFaults(),
            threads=ThreadFaults(delay_s_max=scenario.service.disk_ms_max / 1000),
        )
        async with anyio.create_task_group() as machines:
            machines.start_soon(machine.run, self.site.process)
            await self.site.ready.wait()
            p = self.site.propagator
            assert p is not None
            with anyio.CancelScope() as self._scope:
                await self._load(p)
                await self._wait_until_idle(p)
            self.site.end_requested.set()
        for sink in self.site.sinks:
            self.trace.note(
                sink.name,
                sink.counts.lag.count,
                sink.counts.lag.sum_s,
                sink.counts.failures,
                sink.counts.rejected,
            )

    def check(self, now: float, runnable: int) -> None:
        """Check the invariants now; a violation ends the run."""
        if self._scope is not None and self.violation is None:
            try:
                self.site.check()
            except Violation as violation:
                self.violation = violation
                self._scope.cancel()

    async def _load(self, p: Propagator) -> None:
        async with anyio.create_task_group() as tasks:
            for source in self.scenario.source:
                tasks.start_soon(self._offer, p, source)
            for spec in self.scenario.sink:
                tasks.start_soon(self._pause_and_resume, p, spec)
            await self._sample_loop(p)

    async def _offer(self, p: Propagator, spec: SourceSpec) -> None:
        seed = self._seed.child(f"source {spec.name}")
        level = self.scenario.service.level if spec.ack_level is None else spec.ack_level
        generator = DeltaGenerator(spec, seed.stream("deltas"), level)
        source_arrivals = arrivals(
            spec, seed.stream("arrivals"), self.scenario.duration, self._inputs.traffic(spec)
        )
        source = (Writers if spec.writers else Source)(spec, generator, self.outcomes)
        await source.run(p, source_arrivals, level)

    async def _pause_and_resume(self, p: Propagator, spec: SinkSpec) -> None:
        """Pause and resume a sink at the planned times, as an operator would."""
        pauses = [event for event in spec.faults if event.what == "pauses"]
        for event in sorted(pauses, key=lambda pause: pause.begin):
            await anyio.sleep_until(event.begin)
            p.pause(spec.name)
            await anyio.sleep_until(event.begin + event.lasts)
            p.resume(spec.name)

    async def _sample_loop(self, p: Propagator) -> None:
        for at_s in self.timeline.times():
            await anyio.sleep_until(at_s)
            self._sample(p, at_s)
            self._inputs.on_progress(at_s)

    async def _wait_until_idle(self, p: Propagator) -> None:
        """Wait until every sink has reached the end of the log, or gets nothing until an operator acts."""
        with anyio.move_on_after(IDLE_S_MAX):
            while not is_idle(statistics := p.statistics()):
                await anyio.sleep(_SAMPLE_S)
                self.site.forget(statistics)
                gc.collect(0)
            self._is_idle = True

    def _sample(self, p: Propagator, now: float) -> None:
        gc.collect(0)
        statistics, timeline, outcomes = p.statistics(), self.timeline, self.outcomes
        timeline.note_rate("", "offered", "deltas/s", now, outcomes.offered)
        timeline.note_rate("", "acknowledged", "deltas/s", now, outcomes.acknowledged)
        timeline.note_rate("", "refused", "deltas/s", now, outcomes.codes.total())
        timeline.note("", "queue", "deltas", now, statistics.queue.depth)
        if statistics.pressure.rate_limit is not None:
            timeline.note("", "rate limit", "deltas/s", now, statistics.pressure.rate_limit)
        timeline.note("", "pressure", "level", now, statistics.pressure.level)
        timeline.note("", "log", "bytes", now, statistics.log.bytes)
        memory_bytes = statistics.queue.depth_bytes + statistics.pending.pending_bytes
        memory_bytes += sum(feed.mailbox_bytes for feed in statistics.sinks.values())
        if self.site.spec.log is None:
            memory_bytes += statistics.log.bytes
        timeline.note("", "memory", "bytes", now, memory_bytes)
        for sink in self.site.sinks:
            self._sample_sink(sink, statistics, now)
        self.trace.note(
            statistics.accepted, statistics.queue.depth, outcomes.acks.sum_s, outcomes.codes.total()
        )
        self.site.forget(statistics)

    def _sample_sink(self, sink: SimulatedSink, statistics: Statistics, now: float) -> None:
        feed, timeline = statistics.sinks[sink.name], self.timeline
        appended_at = self.site.offset_times.at(feed.applied_offset) if feed.lag else None
        timeline.note(sink.name, "lag", "s", now, 0.0 if appended_at is None else now - appended_at)
        timeline.note(sink.name, "behind", "deltas", now, feed.lag)
        timeline.note_rate(sink.name, "applied", "deltas/s", now, sink.counts.lag.count)
        timeline.note(sink.name, "mailbox", "deltas", now, feed.mailbox_deltas)
        if feed.pacing:
            capacity = self.site.spec.settings.mailbox_deltas_max
            timeline.note(
                sink.name, "credits", "deltas", now, max(capacity - feed.mailbox_deltas - feed.in_call, 0)
            )
        self.trace.note(sink.name, sink.counts.lag.count, sink.counts.lag.sum_s, feed.state)

    def _peaks(self) -> dict[str, tuple[float, float]]:
        settings, peak = self.site.spec.settings, self.timeline.peak
        mailboxes = {
            f"the mailbox of {sink.name}": (peak("mailbox", sink.name), float(settings.mailbox_deltas_max))
            for sink in self.site.sinks
        }
        return {
            "the queue": (peak("queue"), float(settings.queue_deltas_max)),
            "the log": (peak("log"), float(self.site.log_bytes_max)),
            "memory": (peak("memory"), float(settings.memory_bytes_max(len(self.site.sinks)))),
            **mailboxes,
        }

    def result(self, setup: Setup, cpu_s: float) -> Alternative:
        outcomes = self.outcomes
        observed = RunObservation(
            self.site.sinks, outcomes, self.site.final_statistics, self._peaks(), self._is_idle
        )
        return Alternative(
            name=setup.name,
            what=setup.about,
            sinks=[
                sink.counts.lag.result(
                    sink.name, setup.scenario.duration, sink.counts.failures, self.timeline.series(sink.name)
                )
                for sink in self.site.sinks
            ],
            series=self.timeline.series(),
            totals=self._totals(),
            verdicts=verdicts(observed),
            trace=self.trace.digest(),
            virtual_s=self.scenario.duration,
            cpu_s=cpu_s,
            acks=outcomes.acks.latency(),
        )

    def _totals(self) -> dict[str, float]:
        outcomes = self.outcomes
        return {
            "offered": outcomes.offered,
            "acknowledged": outcomes.acknowledged,
            "refused": outcomes.refused,
            "dropped": outcomes.dropped,
            "retried": outcomes.retried,
            **{f"refusals: {code}": count for code, count in sorted(outcomes.codes.items())},
            "queue_peak_deltas": self.timeline.peak("queue"),
            "log_peak_bytes": self.timeline.peak("log"),
            "memory_peak_bytes": self.timeline.peak("memory"),
            "memory_bound_bytes": self.site.final_statistics.memory_bytes_max,
            **({"steps_checked": self.site.check_count} if self._inputs.checks else {}),
        }
