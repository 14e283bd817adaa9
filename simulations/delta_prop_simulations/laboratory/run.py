"""One run of a scenario: its service on a machine in virtual time, with sources and simulated sinks.

The run has a time of load, then one in which all come to rest. Here it has one service.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop.testing import VirtualNetwork, run_virtual
from delta_prop_simulations.chance import Seed
from delta_prop_simulations.clock import ClockFaults
from delta_prop_simulations.disasters.violation import Violation
from delta_prop_simulations.files import processor_s
from delta_prop_simulations.laboratory.deltas import Maker
from delta_prop_simulations.laboratory.laws import SpokenLaw
from delta_prop_simulations.laboratory.measures import Timeline
from delta_prop_simulations.laboratory.offering import Outcomes, Source, Writers
from delta_prop_simulations.laboratory.result import Alternative, SinkResult
from delta_prop_simulations.laboratory.site import Site
from delta_prop_simulations.laboratory.sources import arrivals
from delta_prop_simulations.laboratory.verdicts import Seen, at_rest, verdicts
from delta_prop_simulations.machine import Machine
from delta_prop_simulations.threads import ThreadFaults
from delta_prop_simulations.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop import Propagator
    from delta_prop.recorded_traffic import RecordedTraffic
    from delta_prop.statistics import Statistics
    from delta_prop_simulations.laboratory.laws import Law
    from delta_prop_simulations.laboratory.reading import Setup
    from delta_prop_simulations.laboratory.scenario import Scenario, SinkSpec, SourceSpec
    from delta_prop_simulations.laboratory.sinks import SimulatedSink

REST_S_MAX = 86_400.0
"""Virtual time after the load in which all have to come to rest."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run is handed from outside. `law` of a sink; `traffic` that a source replays; `checks`: look at
    all marks and bounds at every turn of the loop, and raise Violation.
    """

    law: Callable[[SinkSpec], Law] = SpokenLaw
    traffic: Callable[[SourceSpec], RecordedTraffic | None] = lambda _spec: None
    on_progress: Callable[[float], None] = lambda _now_s: None
    checks: bool = False


def run(setup: Setup, needs: Needs | None = None) -> Alternative:
    """Run one alternative from its start until all have come to rest. Raises Violation, where checked."""
    if setup.scenario.machine:
        from delta_prop_simulations.laboratory.several import run_several

        return run_several(setup, needs or Needs())
    began = processor_s()
    needs = needs or Needs()
    one = Run(setup.scenario, needs)
    horizon_s = setup.scenario.duration + 2 * REST_S_MAX
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # it would look through the whole log again and again; `_look` collects what is young
    try:
        run_virtual(one.main, horizon_s=horizon_s, on_turn=one.check if needs.checks else None)
    finally:
        if collects:
            gc.enable()
    if one.violation is not None:
        raise one.violation
    return one.result(setup, processor_s() - began)


class Run:
    """A service with its sources and sinks, and what is measured of them."""

    site: Site

    def __init__(self, scenario: Scenario, needs: Needs) -> None:
        self.scenario, self._needs = scenario, needs
        self._seed = Seed(scenario.seed)
        self.trace = Trace()
        self.outcomes = Outcomes()
        self.timeline = Timeline(scenario.duration)
        self.violation: Violation | None = None
        self._settled = False
        self._scope: anyio.CancelScope | None = None

    async def main(self) -> None:
        """All of it."""
        self.site = Site("service", self.scenario.service, self.scenario.sink, self._seed, self._needs.law)
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
            p = self.site.p
            assert p is not None
            with anyio.CancelScope() as self._scope:
                await self._load(p)
                await self._rest(p)
            self.site.over.set()
        for sink in self.site.sinks:
            self.trace.note(sink.name, sink.lag.count, sink.lag.sum_s, sink.failures, sink.rejected)

    def check(self, now: float, runnable: int) -> None:
        """What must hold at every step; where it does not, the run ends."""
        if self._scope is not None and self.violation is None:
            try:
                self.site.check()
            except Violation as violation:
                self.violation = violation
                self._scope.cancel()

    # --- what goes on at once

    async def _load(self, p: Propagator) -> None:
        async with anyio.create_task_group() as tasks:
            for source in self.scenario.source:
                tasks.start_soon(self._offer, p, source)
            for spec in self.scenario.sink:
                tasks.start_soon(self._steer, p, spec)
            await self._watch(p)

    async def _offer(self, p: Propagator, spec: SourceSpec) -> None:
        seed = self._seed.child(f"source {spec.name}")
        level = self.site.level if spec.ack_level is None else spec.ack_level
        maker = Maker(spec, seed.stream("deltas"), level)
        drawn = arrivals(spec, seed.stream("arrivals"), self.scenario.duration, self._needs.traffic(spec))
        source = (Writers if spec.writers else Source)(spec, maker, self.outcomes)
        await source.run(p, drawn, level)

    async def _steer(self, p: Propagator, spec: SinkSpec) -> None:
        """Pause and resume a sink as an operator would."""
        for event in sorted((one for one in spec.at if one.what == "pauses"), key=lambda one: one.begin):
            await anyio.sleep_until(event.begin)
            p.pause(spec.name)
            await anyio.sleep_until(event.begin + event.lasts)
            p.resume(spec.name)

    async def _watch(self, p: Propagator) -> None:
        for at_s in self.timeline.times():
            await anyio.sleep_until(at_s)
            self._look(p, at_s)
            self._needs.on_progress(at_s)

    async def _rest(self, p: Propagator) -> None:
        """Until every sink has come to the end of the log, or stands still for good."""
        with anyio.move_on_after(REST_S_MAX):
            while not at_rest(told := p.statistics()):
                await anyio.sleep(_LOOK_S)
                self.site.forget(told)
                gc.collect(0)
            self._settled = True

    # --- measuring

    def _look(self, p: Propagator, now: float) -> None:
        gc.collect(0)
        told, line, outcomes = p.statistics(), self.timeline, self.outcomes
        line.note_rate("", "offered", "deltas/s", now, outcomes.offered)
        line.note_rate("", "acknowledged", "deltas/s", now, outcomes.acknowledged)
        line.note_rate("", "refused", "deltas/s", now, outcomes.codes.total())
        line.note("", "queue", "deltas", now, told.queue.depth)
        if told.pressure.rate_limit is not None:
            line.note("", "rate limit", "deltas/s", now, told.pressure.rate_limit)
        line.note("", "pressure", "level", now, told.pressure.level)
        line.note("", "log", "bytes", now, told.log.bytes)
        mailboxes = sum(feed.mailbox_bytes for feed in told.sinks.values())
        held = told.queue.depth_bytes + told.pending.pending_bytes + mailboxes
        in_memory = self.site.spec.log is None
        line.note("", "memory", "bytes", now, held + (told.log.bytes if in_memory else 0))
        for sink in self.site.sinks:
            self._look_at(sink, told, now)
        self.trace.note(told.accepted, told.queue.depth, outcomes.acks.sum_s, outcomes.codes.total())
        self.site.forget(told)

    def _look_at(self, sink: SimulatedSink, told: Statistics, now: float) -> None:
        feed, line = told.sinks[sink.name], self.timeline
        given = self.site.stamps.at(feed.applied) if feed.lag else None
        line.note(sink.name, "lag", "s", now, 0.0 if given is None else now - given)
        line.note(sink.name, "behind", "deltas", now, feed.lag)
        line.note_rate(sink.name, "applied", "deltas/s", now, sink.applied)
        line.note(sink.name, "mailbox", "deltas", now, feed.mailbox_deltas)
        if feed.pacing:
            room = self.site.spec.settings.mailbox_deltas_max
            line.note(sink.name, "credits", "deltas", now, max(room - feed.mailbox_deltas - feed.in_hand, 0))
        self.trace.note(sink.name, sink.applied, sink.lag.sum_s, feed.state)

    def _peaks(self) -> dict[str, tuple[float, float]]:
        settings, peak = self.site.spec.settings, self.timeline.peak
        mailboxes = {
            f"the mailbox of {one.name}": (peak("mailbox", one.name), float(settings.mailbox_deltas_max))
            for one in self.site.sinks
        }
        return {
            "the queue": (peak("queue"), float(settings.queue_deltas_max)),
            "the log": (peak("log"), float(self.site.log_bytes_max)),
            "memory": (peak("memory"), float(settings.memory_bytes_max(len(self.site.sinks)))),
            **mailboxes,
        }

    # --- the result

    def result(self, setup: Setup, cpu_s: float) -> Alternative:
        """What this run has shown."""
        outcomes = self.outcomes
        seen = Seen(self.site.sinks, outcomes, self.site.last, self._peaks(), self._settled)
        return Alternative(
            name=setup.name,
            what=setup.about,
            sinks=[self._sink_result(sink) for sink in self.site.sinks],
            series=self.timeline.series(),
            totals=self._totals(),
            verdicts=verdicts(seen),
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
            "given_up": outcomes.given_up,
            "offered_again": outcomes.retried,
            **{f"refusals: {code}": count for code, count in sorted(outcomes.codes.items())},
            "queue_peak_deltas": self.timeline.peak("queue"),
            "log_peak_bytes": self.timeline.peak("log"),
            "memory_peak_bytes": self.timeline.peak("memory"),
            "memory_bound_bytes": self.site.last.memory_bytes_max,
            **({"steps_checked": self.site.checked} if self._needs.checks else {}),
        }

    def _sink_result(self, sink: SimulatedSink) -> SinkResult:
        return SinkResult(
            name=sink.name,
            applied=sink.applied,
            failures=sink.failures,
            within_1s_per_s=sink.soon / self.scenario.duration,
            lag=sink.lag.latency(),
            series=self.timeline.series(sink.name),
        )
