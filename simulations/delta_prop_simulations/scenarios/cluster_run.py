"""One run of a scenario with machines: services that forward to each other, clients, and planned faults.

First comes the load, with all planned faults. Then all faults are healed, and the run waits until the
services are idle. The verdicts compare the data that the services then hold.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio

from delta_prop import Propagator
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual
from delta_prop.testing.virtual_streams import Broadcast
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.disk import SimDisk
from delta_prop_simulations.disk_faults import Call
from delta_prop_simulations.files import processor_s
from delta_prop_simulations.machine import ClockFaults, Machine, ThreadFaults
from delta_prop_simulations.rng import Seed
from delta_prop_simulations.scenarios import agreement
from delta_prop_simulations.scenarios.clients import Client, Reader
from delta_prop_simulations.scenarios.cluster_verdicts import ClusterObservation, MachineObservation, verdicts
from delta_prop_simulations.scenarios.measures import ForwardingTimes, Timeline
from delta_prop_simulations.scenarios.offering import Outcomes
from delta_prop_simulations.scenarios.result import Alternative, SinkResult
from delta_prop_simulations.scenarios.scenario import (
    ENDINGS,
    Cut,
    FaultSpec,
    LinkSpec,
    MachineSpec,
    ReaderSpec,
    Scenario,
    SourceSpec,
)
from delta_prop_simulations.scenarios.sinks import PersistentSink, SimulatedSink
from delta_prop_simulations.scenarios.site import SupervisedSite, Tap
from delta_prop_simulations.scenarios.sources import arrivals
from delta_prop_simulations.scenarios.verdicts import CURSOR_INVALIDATED
from delta_prop_simulations.trace import Trace

if TYPE_CHECKING:
    from delta_prop_simulations.scenarios.reading import Setup
    from delta_prop_simulations.scenarios.run import RunInputs

IDLE_S_MAX = 7200.0
"""Maximum virtual time from the end of the load until all services are idle."""
_SAMPLE_S = 0.5


def run_cluster(setup: Setup, inputs: RunInputs) -> Alternative:
    """Run one alternative until all services are idle. Raises Violation if `inputs.checks` is set."""
    started_s = processor_s()
    cluster_run = ClusterRun(setup.scenario, inputs)
    horizon_s = setup.scenario.duration + 2 * IDLE_S_MAX
    run_virtual(cluster_run.run, horizon_s=horizon_s, on_turn=cluster_run.check if inputs.checks else None)
    if cluster_run.violation is not None:
        raise cluster_run.violation
    return cluster_run.result(setup, processor_s() - started_s)


class ClusterRun:
    """All machines and clients of a run, and its measurements."""

    def __init__(self, scenario: Scenario, inputs: RunInputs) -> None:
        seed = self._seed = Seed(scenario.seed)
        self.scenario, self._inputs = scenario, inputs
        self.trace = Trace()
        self.outcomes = Outcomes()
        self.timeline = Timeline(scenario.duration)
        self.network = VirtualNetwork(seed.stream("network").getrandbits(32))
        self.forwarding_times = ForwardingTimes()
        self.groups = _groups(scenario)
        self._faulty_machines = {fault.machine for fault in scenario.fault}
        self.sites: dict[str, SupervisedSite] = {}
        self._acks = Broadcast()
        self.clients = [
            (spec, Client(spec, seed.stream(f"source {spec.name} deltas"), self.outcomes, self._acks))
            for spec in scenario.source
        ]
        self.readers: list[Reader] = []
        self.idle_after_s: float | None = None
        self.violation: Violation | None = None
        self._scope: anyio.CancelScope | None = None
        self._observation: ClusterObservation

    def _make_site(self, spec: MachineSpec) -> SupervisedSite:
        scenario, name = self.scenario, spec.name
        own_faults = [fault for fault in scenario.fault if fault.machine == name]
        jumps = [(fault.begin, fault.by) for fault in own_faults if fault.what == "clock_jumps"]
        machine = Machine(
            name,
            self._seed.child(f"machine {name}"),
            self.network,
            self.trace,
            clock=ClockFaults(spec.clock_drift, ((0.0, spec.clock_ahead), *jumps)),
            threads=self._disk_times(),
        )
        linked = [other for link in scenario.link if (other := _other_end(scenario, link, name)) is not None]
        (group,) = [group for group in self.groups if name in group]
        tap = Tap(name, self.forwarding_times, len(group) - 1)
        site = SupervisedSite(machine, scenario.service, linked, tap)
        for sink in scenario.sink:
            if sink.machine in (None, name):
                rng = self._seed.stream(f"sink {name} {sink.name}")
                inner = SimulatedSink(sink, self._inputs.distribution_of(sink), rng, tap.offset_times)
                site.sinks[sink.name] = (sink, PersistentSink(inner))
        return site

    # --- the run

    async def run(self) -> None:
        """Run the load, heal all faults, wait until all services are idle, and observe the final data."""
        scenario = self.scenario
        self.sites = {spec.name: self._make_site(spec) for spec in scenario.machine}
        self.readers = [Reader(spec, self._site_of(spec).tap.offset_times) for spec in scenario.reader]
        async with anyio.create_task_group() as services:
            self._scope = services.cancel_scope
            for site in self.sites.values():
                services.start_soon(site.keep_running)
            async with anyio.create_task_group() as clients:
                async with anyio.create_task_group() as load:
                    for link in scenario.link:
                        self._connect_link(link)
                        for cut in link.cut:
                            load.start_soon(self._cut, link, cut)
                    for fault in scenario.fault:
                        load.start_soon(self._inject, fault)
                    for spec, client in self.clients:
                        clients.start_soon(self._offer, spec, client)
                    for reader in self.readers:
                        clients.start_soon(self._read, reader)
                    await self._sample_loop()
                    load.cancel_scope.cancel()
                self._heal()
                is_idle = await self._wait_until_idle()
                clients.cancel_scope.cancel()
            self._observation = self._observe(is_idle)
            for site in self.sites.values():
                site.switch.end()

    def check(self, now: float, runnable: int) -> None:
        """Check the invariants of all services now; a violation ends the run."""
        if self.violation is None and self._scope is not None:
            try:
                for site in self.sites.values():
                    site.check()
            except Violation as violation:
                self.violation = violation
                self._scope.cancel()

    async def _offer(self, spec: SourceSpec, client: Client) -> None:
        rng = self._seed.stream(f"source {spec.name} arrivals")
        source_arrivals = arrivals(spec, rng, self.scenario.duration, self._inputs.traffic(spec))
        host, address = self._make_client_host(spec.name), self._site_of(spec).address
        await host.run(lambda world: client.run(world, address, source_arrivals, spec.ack_level))

    async def _read(self, reader: Reader) -> None:
        host, address = self._make_client_host(reader.spec.name), self._site_of(reader.spec).address
        await host.run(lambda world: reader.run(world, address))

    def _site_of(self, spec: SourceSpec | ReaderSpec) -> SupervisedSite:
        return self.sites[spec.machine or self.scenario.machine[0].name]

    def _make_client_host(self, name: str) -> Machine:
        return Machine(
            name,
            self._seed.child(f"client {name}"),
            self.network,
            self.trace,
            clock=ClockFaults(),
            threads=ThreadFaults(),
        )

    async def _sample_loop(self) -> None:
        for at_s in self.timeline.times():
            await anyio.sleep_until(at_s)
            self._sample(at_s)
            self._inputs.on_progress(at_s)

    async def _wait_until_idle(self) -> bool:
        """Wait until all sinks and readers have reached the ends of their logs, and services that forward to
        each other hold the same deltas. Return False if this takes too long.
        """
        with anyio.move_on_after(IDLE_S_MAX):
            while not self._is_idle():  # noqa: ASYNC110 - no event reports that several services agree
                await anyio.sleep(_SAMPLE_S)
            return True
        return False

    def _is_idle(self) -> bool:
        propagators = [site.propagator for site in self.sites.values()]
        if any(client.in_flight_calls for _, client in self.clients) or self.outcomes.unsettled:
            return False
        for p in propagators:
            if p is None or any(
                feed.lag and feed.state != CURSOR_INVALIDATED for feed in p.statistics().sinks.values()
            ):
                return False
        for reader in self.readers:
            p = self._site_of(reader.spec).propagator
            if reader.failure is None and (
                p is None or reader.next_offset < p.internals().partition.log.high_watermark
            ):
                return False
        return all(len({_watermarks_of(self.sites[name]) for name in group}) == 1 for group in self.groups)

    # --- links and faults

    def _connect_link(self, link: LinkSpec) -> None:
        conditions = NetworkConditions(
            latency_s=link.latency_ms / 1000,
            jitter_s_max=link.jitter_ms / 1000,
            bytes_per_s=link.mbit_per_s * 125_000 or float("inf"),
            reset_bytes_mean=link.reset_mb_mean * 1e6 or None,
        )
        first, second = link.between
        self.network.set_path(first, second, conditions)
        self.network.set_path(second, first, conditions)

    async def _cut(self, link: LinkSpec, cut: Cut) -> None:
        await anyio.sleep_until(cut.begin)
        first, second = link.between
        paths = {"there": [(first, second)], "back": [(second, first)]}.get(
            cut.direction, [(first, second), (second, first)]
        )
        self.trace.note("cut", first, second, cut.direction)
        for path in paths:
            self.network.cut(*path)
        await anyio.sleep(cut.lasts)
        for path in paths:
            self.network.heal(*path)

    async def _inject(self, fault: FaultSpec) -> None:
        if fault.what == "clock_jumps":
            return  # `_make_site` has created the machine with its clock jumps
        await anyio.sleep_until(fault.begin)
        if fault.after_ack:
            await self._acks.wait()
        site = self.sites[fault.machine]
        machine = site.machine
        self.trace.note(fault.what, fault.machine)
        if fault.what in ENDINGS:
            site.take_down()
            (machine.kill if fault.what == "kill" else machine.cut_power)()
            await anyio.sleep(fault.lasts)
            machine.restore()
            site.switch.turn_on()
        elif fault.what == "restart":
            site.switch.restart()
        elif fault.what == "resets":
            self.network.reset(fault.machine)
        elif fault.what == "disk_slow":
            machine.thread_faults = self._disk_times(fault.factor)
            await anyio.sleep(fault.lasts)
            machine.thread_faults = self._disk_times()
        else:
            machine.add_disk_fault(fault.what, _fill_disk if fault.what == "disk_full" else _fail_disk)
            await anyio.sleep(fault.lasts)
            machine.remove_disk_fault(fault.what)

    def _disk_times(self, factor: float = 1.0) -> ThreadFaults:
        return ThreadFaults(self.scenario.service.disk_ms_max / 1000 * factor)

    def _heal(self) -> None:
        for link in self.scenario.link:
            self.network.heal(*link.between)
            self.network.heal(*reversed(link.between))
        for site in self.sites.values():
            site.machine.remove_disk_fault()
            site.machine.thread_faults = self._disk_times()
            site.machine.restore()
            site.switch.turn_on()

    # --- measurements

    def _sample(self, now: float) -> None:
        timeline, outcomes = self.timeline, self.outcomes
        timeline.note_rate("", "offered", "deltas/s", now, outcomes.offered)
        timeline.note_rate("", "acknowledged", "deltas/s", now, outcomes.acknowledged)
        timeline.note_rate("", "refused", "deltas/s", now, outcomes.codes.total())
        for site in self.sites.values():
            p = site.propagator
            if site.name in self._faulty_machines:
                timeline.note("", f"{site.name} up", "services", now, p is not None)
            if p is not None:
                statistics = p.statistics()
                timeline.note("", f"{site.name} holds", "deltas", now, statistics.log.next_offset)
                timeline.note("", f"{site.name} queue", "deltas", now, statistics.queue.depth)
                for name, (_, sink) in site.sinks.items():
                    self._sample_sink(site, name, sink, now)
                timeline.note("", f"{site.name} lacks", "deltas", now, self._count_missing(p))
                offsets = [feed.applied_offset for feed in statistics.sinks.values()]
                offsets += [
                    reader.next_offset for reader in self.readers if self._site_of(reader.spec) is site
                ]
                site.tap.offset_times.forget(min(offsets))
        self.trace.note(outcomes.offered, outcomes.acknowledged, outcomes.acks.sum_s)

    def _count_missing(self, p: Propagator) -> int:
        """Count the deltas and no-ops that other services of the group have and this one lacks."""
        own = p.internals().partition.pipeline.orderer.watermarks
        (group,) = [group for group in self.groups if any(self.sites[name].propagator is p for name in group)]
        highest = dict(own)
        for name in group:
            other = self.sites[name].propagator
            for origin, counter in (
                {} if other is None else other.internals().partition.pipeline.orderer.watermarks.items()
            ):
                highest[origin] = max(highest.get(origin, 0), counter)
        return sum(counter - own.get(origin, 0) for origin, counter in highest.items())

    def _sample_sink(self, site: SupervisedSite, name: str, sink: PersistentSink, now: float) -> None:
        assert site.propagator is not None
        feed = site.propagator.statistics().sinks[name]
        sink_name = self._sink_name(site, name)
        appended_at = site.tap.offset_times.at(feed.applied_offset) if feed.lag else None
        self.timeline.note(sink_name, "lag", "s", now, 0.0 if appended_at is None else now - appended_at)
        self.timeline.note(sink_name, "behind", "deltas", now, feed.lag)
        self.timeline.note_rate(sink_name, "applied", "deltas/s", now, sink.new_row_count)
        self.trace.note(sink_name, sink.new_row_count, sink.duplicate_count, feed.state)

    def _sink_name(self, site: SupervisedSite, name: str) -> str:
        return f"{site.name}/{name}" if len(self.sites) > 1 else name

    def _observe(self, is_idle: bool) -> ClusterObservation:
        self.idle_after_s = anyio.current_time() - self.scenario.duration if is_idle else None
        machines = {
            name: MachineObservation(
                log_rows=None if site.propagator is None else agreement.read_log_rows(site.propagator),
                statistics=None if site.propagator is None else site.propagator.statistics(),
                site=site,
                acknowledged=[
                    rows
                    for spec, client in self.clients
                    if self._site_of(spec).name == name
                    for rows in client.acknowledged
                ],
                readers=[reader for reader in self.readers if self._site_of(reader.spec).name == name],
            )
            for name, site in self.sites.items()
        }
        for name, machine in machines.items():
            self.trace.note(name, "holds", -1 if machine.log_rows is None else len(machine.log_rows.offsets))
        check_count = sum(site.check_count for site in self.sites.values())
        return ClusterObservation(
            self.scenario,
            machines,
            self.groups,
            self.outcomes,
            is_idle,
            self.network.fault_counts["cut"] + self.network.fault_counts["reset"],
            check_count,
        )

    # --- the result

    def result(self, setup: Setup, cpu_s: float) -> Alternative:
        duration_s = self.scenario.duration
        return Alternative(
            name=setup.name,
            what=setup.about,
            sinks=[
                *(self._sink_result(site, name) for site in self.sites.values() for name in site.sinks),
                *(  # the forwarding times between services, each target as if it were a sink
                    times.result(" → ".join(path), duration_s)
                    for path, times in sorted(self.forwarding_times.times.items())
                ),
                *(reader.lag.result(reader.spec.name, duration_s) for reader in self.readers),
            ],
            series=self.timeline.series(),
            totals=self._totals(),
            verdicts=verdicts(self._observation),
            trace=self.trace.digest(),
            virtual_s=duration_s,
            cpu_s=cpu_s,
            acks=self.outcomes.acks.latency(),
        )

    def _totals(self) -> dict[str, float]:
        outcomes, sites = self.outcomes, self.sites.values()
        totals: dict[str, float] = {
            "offered": outcomes.offered,
            "acknowledged": outcomes.acknowledged,
            "refused": outcomes.refused,
            "dropped": outcomes.dropped,
            **{f"refusals: {code}": count for code, count in sorted(outcomes.codes.items())},
            "service_starts": sum(site.start_count for site in sites),
            "service_down_s": sum(site.downtime.seconds for site in sites),
            **({"steps_checked": sum(site.check_count for site in sites)} if self._inputs.checks else {}),
            "client_reconnects": sum(client.reconnects for _, client in self.clients)
            + sum(reader.reconnects for reader in self.readers),
        }
        if self.idle_after_s is not None:
            totals["at_rest_after_s"] = self.idle_after_s
        return totals

    def _sink_result(self, site: SupervisedSite, name: str) -> SinkResult:
        _, sink = site.sinks[name]
        sink_name, counts = self._sink_name(site, name), sink.inner.counts
        series = self.timeline.series(sink_name)
        result = counts.lag.result(sink_name, self.scenario.duration, counts.failures, series)
        return replace(result, applied=sink.new_row_count)


def _other_end(scenario: Scenario, link: LinkSpec, name: str) -> str | None:
    """Return the machine at the other end of a link over which `name` forwards."""
    machines = {machine.name for machine in scenario.machine}
    if not link.forward or name not in link.between or not machines.issuperset(link.between):
        return None
    (other,) = set(link.between) - {name}
    return other


def _groups(scenario: Scenario) -> list[list[str]]:
    """Return the groups of machines that links join, which must hold the same rows in the end."""
    groups = [{machine.name} for machine in scenario.machine]
    for link in scenario.link:
        if _other_end(scenario, link, link.between[0]) is not None:
            joined = [group for group in groups if group & set(link.between)]
            groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return [sorted(group) for group in groups]


def _watermarks_of(site: SupervisedSite) -> frozenset[tuple[int, int]]:
    assert site.propagator is not None
    return frozenset(site.propagator.internals().partition.pipeline.orderer.watermarks.items())


def _fill_disk(disk: SimDisk) -> None:
    disk.capacity_bytes = disk.used_bytes


def _fail_disk(disk: SimDisk) -> None:
    def is_write(call: Call) -> bool:
        return call.name in ("write", "sync", "allocate")

    disk.fail(is_write, errno.EIO, times=None)
