"""One run of a scenario with machines: services that forward to each other, clients, and what strikes them.

It has a time of load, in which all happens that was planned, then one in which everything is healed and all
come to rest. What they hold then decides.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import anyio

from delta_prop.testing import Conditions, VirtualNetwork, run_virtual
from delta_prop_simulations.chance import Seed
from delta_prop_simulations.clock import ClockFaults
from delta_prop_simulations.disasters.violation import Violation
from delta_prop_simulations.files import processor_s
from delta_prop_simulations.laboratory import agreement
from delta_prop_simulations.laboratory.clients import Client
from delta_prop_simulations.laboratory.crossings import Crossings, Tap
from delta_prop_simulations.laboratory.lasting import LastingSink
from delta_prop_simulations.laboratory.measures import Stamps, Timeline
from delta_prop_simulations.laboratory.offering import Outcomes
from delta_prop_simulations.laboratory.readers import Reader
from delta_prop_simulations.laboratory.result import Alternative, SinkResult
from delta_prop_simulations.laboratory.several_verdicts import SeenAt, SeenTogether, verdicts
from delta_prop_simulations.laboratory.sinks import SimulatedSink
from delta_prop_simulations.laboratory.sources import arrivals
from delta_prop_simulations.laboratory.supervised import Supervised
from delta_prop_simulations.laboratory.topology import ENDINGS
from delta_prop_simulations.laboratory.verdicts import LOST_PLACE
from delta_prop_simulations.machine import Machine
from delta_prop_simulations.threads import ThreadFaults
from delta_prop_simulations.trace import Trace

if TYPE_CHECKING:
    from delta_prop import Propagator
    from delta_prop_simulations.disk import SimDisk
    from delta_prop_simulations.disk_faults import Call
    from delta_prop_simulations.laboratory.reading import Setup
    from delta_prop_simulations.laboratory.run import Needs
    from delta_prop_simulations.laboratory.scenario import Scenario, SourceSpec
    from delta_prop_simulations.laboratory.topology import (
        Cut,
        FaultSpec,
        LinkSpec,
        MachineSpec,
        ReaderSpec,
    )

REST_S_MAX = 7200.0
"""Virtual time after the load in which all have to come to rest."""
_LOOK_S = 0.5


def run_several(setup: Setup, needs: Needs) -> Alternative:
    """Run one alternative from its start until all have come to rest. Raises Violation, where checked."""
    began = processor_s()
    one = Together(setup.scenario, needs)
    horizon_s = setup.scenario.duration + 2 * REST_S_MAX
    run_virtual(one.run, horizon_s=horizon_s, on_turn=one.check if needs.checks else None)
    if one.violation is not None:
        raise one.violation
    return one.result(setup, processor_s() - began)


class Together:
    """All machines and clients of a run, and what is measured of them."""

    def __init__(self, scenario: Scenario, needs: Needs) -> None:
        seed = self._seed = Seed(scenario.seed)
        self.scenario, self._needs = scenario, needs
        self.trace = Trace()
        self.outcomes = Outcomes()
        self.timeline = Timeline(scenario.duration)
        self.network = VirtualNetwork(seed.stream("network").getrandbits(32))
        self.crossings = Crossings()
        self.groups = _groups(scenario)
        self._struck = {fault.machine for fault in scenario.fault}
        self.sites: dict[str, Supervised] = {}
        self.clients = [
            (spec, Client(spec, seed.stream(f"source {spec.name} deltas"), self.outcomes, self._note_ack))
            for spec in scenario.source
        ]
        self.readers: list[Reader] = []
        self.agreed_s: float | None = None
        self.violation: Violation | None = None
        self._first_ack: anyio.Event
        self._scope: anyio.CancelScope | None = None
        self._seen: SeenTogether

    def _make_site(self, spec: MachineSpec) -> Supervised:
        scenario, name = self.scenario, spec.name
        own = [fault for fault in scenario.fault if fault.machine == name]
        jumps = [(fault.begin, fault.by) for fault in own if fault.what == "clock_jumps"]
        machine = Machine(
            name,
            self._seed.child(f"machine {name}"),
            self.network,
            self.trace,
            clock=ClockFaults(spec.clock_drift, ((0.0, spec.clock_ahead), *jumps)),
            threads=self._disk_as_it_is(),
        )
        linked = [other for link in scenario.link if (other := _other(scenario, link, name)) is not None]
        (group,) = [group for group in self.groups if name in group]
        tap = Tap(name, Stamps(), self.crossings, len(group) - 1)
        site = Supervised(machine, scenario.service, linked, tap)
        for sink in scenario.sink:
            if sink.machine in (None, name):
                chance = self._seed.stream(f"sink {name} {sink.name}")
                inner = SimulatedSink(sink, self._needs.law(sink), chance, tap.stamps)
                site.sinks[sink.name] = (sink, LastingSink(inner))
        return site

    # --- what goes on at once

    async def run(self) -> None:
        """The load, healing, rest, and a look at what everybody holds."""
        scenario = self.scenario
        self._first_ack = anyio.Event()
        self.sites = {spec.name: self._make_site(spec) for spec in scenario.machine}
        self.readers = [Reader(spec, self._at(spec).tap.stamps) for spec in scenario.reader]
        async with anyio.create_task_group() as services:
            self._scope = services.cancel_scope
            for site in self.sites.values():
                services.start_soon(site.keep_up)
            async with anyio.create_task_group() as clients:
                async with anyio.create_task_group() as load:
                    for link in scenario.link:
                        self._lay(link)
                        for cut in link.cut:
                            load.start_soon(self._cut, link, cut)
                    for fault in scenario.fault:
                        load.start_soon(self._strike, fault)
                    for spec, client in self.clients:
                        clients.start_soon(self._offer, spec, client)
                    for reader in self.readers:
                        clients.start_soon(self._read, reader)
                    await self._watch()
                    load.cancel_scope.cancel()
                self._heal()
                settled = await self._rest()
                clients.cancel_scope.cancel()
            self._seen = self._look_at_rest(settled)
            for site in self.sites.values():
                site.end()

    def check(self, now: float, runnable: int) -> None:
        """What must hold at every step; where it does not, the run ends."""
        if self.violation is None and self._scope is not None:
            try:
                for site in self.sites.values():
                    site.check()
            except Violation as violation:
                self.violation = violation
                self._scope.cancel()

    async def _offer(self, spec: SourceSpec, client: Client) -> None:
        chance = self._seed.stream(f"source {spec.name} arrivals")
        drawn = arrivals(spec, chance, self.scenario.duration, self._needs.traffic(spec))
        host, address = self._host(spec.name), self._at(spec).address
        await host.run(lambda world: client.run(world, address, drawn, spec.ack_level))

    async def _read(self, reader: Reader) -> None:
        host, address = self._host(reader.spec.name), self._at(reader.spec).address
        await host.run(lambda world: reader.run(world, address))

    def _at(self, spec: SourceSpec | ReaderSpec) -> Supervised:
        """The machine that a client speaks to."""
        return self.sites[spec.machine or self.scenario.machine[0].name]

    def _host(self, name: str) -> Machine:
        """Of a client."""
        return Machine(
            name,
            self._seed.child(f"client {name}"),
            self.network,
            self.trace,
            clock=ClockFaults(),
            threads=ThreadFaults(),
        )

    async def _watch(self) -> None:
        for at_s in self.timeline.times():
            await anyio.sleep_until(at_s)
            self._look(at_s)
            self._needs.on_progress(at_s)

    async def _rest(self) -> bool:
        """Until all have come to the end of the log, and those that forward hold the same."""
        with anyio.move_on_after(REST_S_MAX):
            while not self._is_at_rest():  # noqa: ASYNC110 - nobody tells when several services agree
                await anyio.sleep(_LOOK_S)
            return True
        return False

    def _is_at_rest(self) -> bool:
        services = [site.propagator for site in self.sites.values()]
        if any(client.open_calls for _, client in self.clients) or self.outcomes.unsettled:
            return False
        for p in services:
            if p is None or any(
                feed.lag and feed.state != LOST_PLACE for feed in p.statistics().sinks.values()
            ):
                return False
        for reader in self.readers:
            p = self._at(reader.spec).propagator
            if reader.failure is None and (p is None or reader.next_offset < p.inside().log.visible):
                return False
        return all(len({_known(self.sites[name]) for name in group}) == 1 for group in self.groups)

    # --- links and faults

    def _lay(self, link: LinkSpec) -> None:
        conditions = Conditions(
            latency_s=link.latency_ms / 1000,
            jitter_s_max=link.jitter_ms / 1000,
            bytes_per_s=link.mbit_per_s * 125_000 or float("inf"),
            reset_bytes_mean=link.reset_mb_mean * 1e6 or None,
        )
        there, back = link.between
        self.network.set_way(there, back, conditions)
        self.network.set_way(back, there, conditions)

    async def _cut(self, link: LinkSpec, cut: Cut) -> None:
        await anyio.sleep_until(cut.begin)
        there, back = link.between
        ways = {"there": [(there, back)], "back": [(back, there)]}.get(
            cut.way, [(there, back), (back, there)]
        )
        self.trace.note("cut", there, back, cut.way)
        for way in ways:
            self.network.cut(*way)
        await anyio.sleep(cut.lasts)
        for way in ways:
            self.network.heal(*way)

    async def _strike(self, fault: FaultSpec) -> None:
        if fault.what == "clock_jumps":
            return  # the machine was made so
        await anyio.sleep_until(fault.begin)
        if fault.after_ack:
            self._first_ack = anyio.Event()
            await self._first_ack.wait()
        site = self.sites[fault.machine]
        machine = site.machine
        self.trace.note(fault.what, fault.machine)
        if fault.what in ENDINGS:
            site.goes_down()
            (machine.kill if fault.what == "kill" else machine.cut_power)()
            await anyio.sleep(fault.lasts)
            machine.restore()
            site.comes_back()
        elif fault.what == "restart":
            site.restart()
        elif fault.what == "resets":
            self.network.reset(fault.machine)
        elif fault.what == "disk_slow":
            machine.thread_faults = self._disk_as_it_is(fault.factor)
            await anyio.sleep(fault.lasts)
            machine.thread_faults = self._disk_as_it_is()
        else:
            machine.afflict(fault.what, _fills if fault.what == "disk_full" else _fails)
            await anyio.sleep(fault.lasts)
            machine.cure(fault.what)

    def _disk_as_it_is(self, factor: float = 1.0) -> ThreadFaults:
        """How long its calls take; `factor`: so much longer."""
        return ThreadFaults(self.scenario.service.disk_ms_max / 1000 * factor)

    def _heal(self) -> None:
        """Whatever is still wrong is put right."""
        for link in self.scenario.link:
            self.network.heal(*link.between)
            self.network.heal(*reversed(link.between))
        for site in self.sites.values():
            site.machine.cure()
            site.machine.thread_faults = self._disk_as_it_is()
            site.machine.restore()
            site.comes_back()

    def _note_ack(self) -> None:
        self._first_ack.set()

    # --- measuring

    def _look(self, now: float) -> None:
        line, outcomes = self.timeline, self.outcomes
        line.note_rate("", "offered", "deltas/s", now, outcomes.offered)
        line.note_rate("", "acknowledged", "deltas/s", now, outcomes.acknowledged)
        line.note_rate("", "refused", "deltas/s", now, outcomes.codes.total())
        for site in self.sites.values():
            p = site.propagator
            if site.name in self._struck:
                line.note("", f"{site.name} up", "services", now, p is not None)
            if p is not None:
                told = p.statistics()
                line.note("", f"{site.name} holds", "deltas", now, told.log.next_offset)
                line.note("", f"{site.name} queue", "deltas", now, told.queue.depth)
                for name, (_, sink) in site.sinks.items():
                    self._look_at(site, name, sink, now)
                line.note("", f"{site.name} lacks", "deltas", now, self._lacking(p))
                reached = [feed.applied for feed in told.sinks.values()]
                reached += [one.next_offset for one in self.readers if self._at(one.spec) is site]
                site.tap.stamps.forget(min(reached))
        self.trace.note(outcomes.offered, outcomes.acknowledged, outcomes.acks.sum_s)

    def _lacking(self, p: Propagator) -> int:
        """How many deltas others have, of those that are to come here too; void ones among them."""
        own = p.inside().chain.orderer.have
        (group,) = [group for group in self.groups if any(self.sites[one].propagator is p for one in group)]
        furthest = dict(own)
        for name in group:
            other = self.sites[name].propagator
            for origin, counter in {} if other is None else other.inside().chain.orderer.have.items():
                furthest[origin] = max(furthest.get(origin, 0), counter)
        return sum(counter - own.get(origin, 0) for origin, counter in furthest.items())

    def _look_at(self, site: Supervised, name: str, sink: LastingSink, now: float) -> None:
        assert site.propagator is not None
        feed = site.propagator.statistics().sinks[name]
        of = self._sink_name(site, name)
        given = site.tap.stamps.at(feed.applied) if feed.lag else None
        self.timeline.note(of, "lag", "s", now, 0.0 if given is None else now - given)
        self.timeline.note(of, "behind", "deltas", now, feed.lag)
        self.timeline.note_rate(of, "applied", "deltas/s", now, sink.fresh)
        self.trace.note(of, sink.fresh, sink.again, feed.state)

    def _sink_name(self, site: Supervised, name: str) -> str:
        return f"{site.name}/{name}" if len(self.sites) > 1 else name

    def _look_at_rest(self, settled: bool) -> SeenTogether:
        self.agreed_s = anyio.current_time() - self.scenario.duration if settled else None
        sites = {
            name: SeenAt(
                held=None if site.propagator is None else agreement.read(site.propagator),
                statistics=None if site.propagator is None else site.propagator.statistics(),
                site=site,
                acknowledged=[
                    one
                    for spec, client in self.clients
                    if self._at(spec).name == name
                    for one in client.acknowledged
                ],
                readers=[reader for reader in self.readers if self._at(reader.spec).name == name],
            )
            for name, site in self.sites.items()
        }
        for name, seen in sites.items():
            self.trace.note(name, "holds", -1 if seen.held is None else len(seen.held.offsets))
        checked = sum(site.checked for site in self.sites.values())
        return SeenTogether(
            self.scenario,
            sites,
            self.groups,
            self.outcomes,
            settled,
            self.network.struck["cut"] + self.network.struck["reset"],
            checked,
        )

    # --- the result

    def result(self, setup: Setup, cpu_s: float) -> Alternative:
        """What this run has shown."""
        return Alternative(
            name=setup.name,
            what=setup.about,
            sinks=[
                *(self._sink_result(site, name) for site in self.sites.values() for name in site.sinks),
                *self._crossing_results(),
                *self._reader_results(),
            ],
            series=self.timeline.series(),
            totals=self._totals(),
            verdicts=verdicts(self._seen),
            trace=self.trace.digest(),
            virtual_s=self.scenario.duration,
            cpu_s=cpu_s,
            acks=self.outcomes.acks.latency(),
        )

    def _totals(self) -> dict[str, float]:
        outcomes, sites = self.outcomes, self.sites.values()
        totals: dict[str, float] = {
            "offered": outcomes.offered,
            "acknowledged": outcomes.acknowledged,
            "refused": outcomes.refused,
            "given_up": outcomes.given_up,
            **{f"refusals: {code}": count for code, count in sorted(outcomes.codes.items())},
            "service_starts": sum(site.starts for site in sites),
            "service_down_s": sum(site.down_s for site in sites),
            **({"steps_checked": sum(site.checked for site in sites)} if self._needs.checks else {}),
            "client_reconnects": sum(client.reconnects for _, client in self.clients)
            + sum(reader.reconnects for reader in self.readers),
        }
        if self.agreed_s is not None:
            totals["at_rest_after_s"] = self.agreed_s
        return totals

    def _crossing_results(self) -> list[SinkResult]:
        """From service to service, as if each were a sink of the other."""
        duration_s, soon = self.scenario.duration, self.crossings.soon
        return [
            SinkResult(" → ".join(way), took.count, 0, soon[way] / duration_s, took.latency())
            for way, took in sorted(self.crossings.took.items())
        ]

    def _reader_results(self) -> list[SinkResult]:
        duration_s = self.scenario.duration
        return [
            SinkResult(one.spec.name, one.rows, 0, one.soon / duration_s, one.lag.latency())
            for one in self.readers
        ]

    def _sink_result(self, site: Supervised, name: str) -> SinkResult:
        _, sink = site.sinks[name]
        of = self._sink_name(site, name)
        return SinkResult(
            name=of,
            applied=sink.fresh,
            failures=sink.inner.failures,
            within_1s_per_s=sink.inner.soon / self.scenario.duration,
            lag=sink.inner.lag.latency(),
            series=self.timeline.series(of),
        )


def _other(scenario: Scenario, link: LinkSpec, name: str) -> str | None:
    """The machine at the other end of a link over which `name` forwards."""
    machines = {one.name for one in scenario.machine}
    if not link.forward or name not in link.between or not machines.issuperset(link.between):
        return None
    (other,) = set(link.between) - {name}
    return other


def _groups(scenario: Scenario) -> list[list[str]]:
    """The machines that hold the same in the end: those that links join, in order."""
    groups = [{one.name} for one in scenario.machine]
    for link in scenario.link:
        if _other(scenario, link, link.between[0]) is not None:
            joined = [group for group in groups if group & set(link.between)]
            groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return [sorted(group) for group in groups]


def _known(site: Supervised) -> frozenset[tuple[int, int]]:
    """What a service has of each origin."""
    assert site.propagator is not None
    return frozenset(site.propagator.inside().chain.orderer.have.items())


def _fills(disk: SimDisk) -> None:
    """Leave no room on a disk."""
    disk.capacity_bytes = disk.used_bytes


def _fails(disk: SimDisk) -> None:
    """Make every write and sync of a disk fail."""

    def is_one(call: Call) -> bool:
        return call.name in ("write", "sync", "allocate")

    disk.fail(is_one, errno.EIO, times=None)
