"""Runs one plan: the service under faults, then heals all faults, waits until all work is done, and checks
the result.

The same plan always gives the same run. A run returns its findings and raises none: a hang and an exception
that leaves the service are violations, too.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from delta_prop.testing import NetworkConditions, Stuck, VirtualNetwork, run_virtual
from delta_prop_simulations.chaos.faults import Nemesis
from delta_prop_simulations.chaos.histories import ClientHistory
from delta_prop_simulations.chaos.node import PORT, ClientHost, Host, Node, format_error, leaf_exceptions
from delta_prop_simulations.chaos.oracle import Oracle
from delta_prop_simulations.chaos.plan import NodePlan, Plan
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.chaos.workload import Reader, Writer
from delta_prop_simulations.machine import ClockFaults, Machine, ThreadFaults
from delta_prop_simulations.rng import Seed
from delta_prop_simulations.trace import Trace
from delta_prop_wire.core import core_mode

PROGRESS_S_MAX = 120.0
"""The virtual time within which all work must be processed after healing."""
HORIZON_S = 1_000.0
"""The virtual time after which a run counts as hanging."""
TURNS_PER_CHECK = 4
"""Number of turns of the event loop between two checks of every service by the oracle."""

_POLL_S = 0.02
_POWER_OFF_S = 0.5
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. `vacuous`: why the run tested nothing; None if it tested something.
    `event_counts`: how often each fault, check and other event occurred; `trace`: the hash of the trace,
    `lines`: its last lines; `delta_count`: the number of acknowledged deltas.
    """

    seed: int
    violation: Violation | None
    vacuous: str | None
    event_counts: Counter[str]
    trace: str
    delta_count: int
    virtual_s: float
    lines: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_ok(self) -> bool:
        """True if the run exercised the service and found no violation."""
        return self.violation is None and self.vacuous is None


SEEDS_PER_TWIN = 10
"""Every so many seeds, the twin of the native core runs."""


def run(plan: Plan) -> Outcome:
    """Run the plan and return its outcome."""
    with core_mode.switched(core_mode.name if plan.seed % SEEDS_PER_TWIN else "python"):
        return _run_with_core(plan)


def _run_with_core(plan: Plan) -> Outcome:
    chaos_run = ChaosRun(plan)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        violation = _run(chaos_run)
    finally:
        if was_collecting:
            gc.enable()
    return chaos_run.outcome(violation)


def _run(chaos_run: ChaosRun) -> Violation | None:
    with _capture_logged_errors() as failures:
        try:
            run_virtual(
                chaos_run.main, seed=chaos_run.plan.seed, horizon_s=HORIZON_S, on_turn=chaos_run.note_turn
            )
        except Stuck as error:
            return Violation("hang", str(error))
        except Exception as error:
            violations = [leaf for leaf in leaf_exceptions(error) if isinstance(leaf, Violation)]
            return violations[0] if violations else Violation("crash", format_error(error))
    return Violation("crash", failures[0]) if failures else None


class TurnTimer:
    """The time of the last turn of the event loop, and the number of turns; it outlives the loop."""

    def __init__(self) -> None:
        self.count = 0
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def note(self, now: float) -> None:
        """Note one turn."""
        self._now = now
        self.count += 1


class ChaosRun:
    """One run: creates machines, services, clients and faults from the plan, and runs them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._turns = TurnTimer()
        self.trace = Trace(self._turns)
        self.oracle = Oracle()
        self.client_history = ClientHistory()
        self.nodes: list[Node] = []
        self.clients: list[Host] = []
        self._seed = Seed(plan.seed)
        self._writers: list[Writer] = []
        self._readers: list[Reader] = []
        self._network: VirtualNetwork
        self._nemesis: Nemesis

    async def main(self) -> None:
        """Run the plan from the start of all hosts to the last check."""
        self._make_parts()
        hosts = self._hosts
        async with anyio.create_task_group() as tasks:
            for host in hosts:
                tasks.start_soon(host.keep_running, tasks)
            tasks.start_soon(self._nemesis.run)
            await anyio.sleep(self.plan.duration_s)
            self._nemesis.heal()
            await self._check_settled()
            if self.plan.power_cut_at_end:
                for node in self.nodes:
                    node.cut_power(_POWER_OFF_S)
                await anyio.sleep(2 * _POWER_OFF_S)
                await self._check_settled()
            await self._close()
            tasks.cancel_scope.cancel()

    async def _check_settled(self) -> None:
        deadline = anyio.current_time() + PROGRESS_S_MAX
        while pending := self._pending_work():
            if anyio.current_time() > deadline:
                raise Violation("progress", f"{PROGRESS_S_MAX:g} s after healing: {'; '.join(pending)}")
            await anyio.sleep(_POLL_S)
        self.trace.note("settled")
        await self.oracle.check_at_rest(self.nodes, self.client_history, self._readers)

    async def _close(self) -> None:
        for node in self.nodes:
            node.stop(HORIZON_S)
        with anyio.move_on_after(_CLOSE_S_MAX):
            for node in self.nodes:
                await node.wait_ended()
            return
        running = ", ".join(node.name for node in self.nodes if node.is_up)
        raise Violation("progress", f"{_CLOSE_S_MAX:g} s after the stop request, still running: {running}")

    def note_turn(self, now: float, runnable: int) -> None:
        """Note one turn of the event loop, and check the services every few turns."""
        self._turns.note(now)
        self.trace.note_turn(now, runnable)
        for node in self.nodes:
            node.machine.check_disk()
        if self._turns.count % TURNS_PER_CHECK == 0:
            self.oracle.check_step(self.nodes)

    def _pending_work(self) -> list[str]:
        """Return a line for each piece of unfinished work; none once everything is processed."""
        pending = [writer.waits_for() for writer in self._writers if not writer.is_done]
        for node in self.nodes:
            pending += node.waits_for()
        return pending or self._describe_divergence() or self._describe_lag()

    def _describe_divergence(self) -> list[str]:
        """Return a line for each service if their logs hold different deltas, else none."""
        held = {node.name: dict(sorted(node.watermarks().items())) for node in self.nodes}
        is_same = all(watermarks == held[self.nodes[0].name] for watermarks in held.values())
        return [] if is_same else [f"{name} holds {watermarks}" for name, watermarks in held.items()]

    def _describe_lag(self) -> list[str]:
        """Return a line for each reader that has not read its service's log to the end."""
        ends = {node.name: node.log_end() for node in self.nodes}
        return [
            f"{reader.name} has read up to {reader.saved_offset} of {ends[reader.plan.node]}"
            for reader in self._readers
            if reader.saved_offset < ends[reader.plan.node]
        ]

    @property
    def _hosts(self) -> list[Host]:
        return [*self.nodes, *self.clients]

    def _make_parts(self) -> None:
        plan, seed = self.plan, self._seed
        conditions = NetworkConditions(**plan.network)  # type: ignore[arg-type]
        self._network = VirtualNetwork(plan.seed, conditions, host="nowhere")
        embedded: dict[str, list[Writer]] = {node.name: [] for node in plan.nodes}
        for writer_plan in plan.writers:
            writer = Writer(writer_plan, seed.stream(f"writer {writer_plan.name}"), self.client_history)
            self._writers.append(writer)
            if writer_plan.embedded:
                embedded[writer_plan.node].append(writer)
            else:
                self._add_client(writer, writer_plan.node)
        for reader_plan in plan.readers:
            reader = Reader(reader_plan)
            self._readers.append(reader)
            self._add_client(reader, reader_plan.node)
        for node_plan in plan.nodes:
            writers = [writer.run_embedded for writer in embedded[node_plan.name]]
            machine = self._make_machine(node_plan.name, node_plan)
            self.nodes.append(Node(node_plan, machine, seed.child(node_plan.name), self.oracle, writers))
        hosts = {host.name: host for host in self._hosts}
        self._nemesis = Nemesis(plan.strikes, hosts, self._network, self.trace)

    def _make_machine(self, name: str, plan: NodePlan | None = None) -> Machine:
        return Machine(
            name,
            self._seed.child(name),
            self._network,
            self.trace,
            clock=ClockFaults() if plan is None else ClockFaults(plan.drift, plan.jumps),
            threads=ThreadFaults() if plan is None else ThreadFaults(**plan.threads),
        )

    def _add_client(self, client: Writer | Reader, node: str) -> None:
        (partition,) = (one.partition for one in self.plan.nodes if one.name == node)
        machine = self._make_machine(client.name)
        self.clients.append(ClientHost(machine, client, f"{node}:{PORT}", partition))

    def outcome(self, violation: Violation | None) -> Outcome:
        """Return the outcome of the run."""
        event_counts = self._count_events()
        for event, count in sorted(event_counts.items()):
            self.trace.note(event, count)
        delta_count = self.client_history.counts["acknowledged"]
        return Outcome(
            seed=self.plan.seed,
            violation=violation,
            vacuous=None if violation else self._vacuous_reason(delta_count),
            event_counts=event_counts,
            trace=self.trace.digest(),
            delta_count=delta_count,
            virtual_s=self._turns.now(),
            lines=tuple(self.trace.lines),
        )

    def _count_events(self) -> Counter[str]:
        event_counts: Counter[str] = Counter()
        if not self.nodes:
            return event_counts
        counters: Iterable[tuple[str, Counter[str]]] = (
            ("strike", self._nemesis.fault_counts),
            ("missed", self._nemesis.missed_counts),
            ("network", self._network.fault_counts),
            ("check", self.oracle.check_counts),
            ("answered", self.client_history.counts),
            *(("disk", node.machine.disk_fault_counts) for node in self.nodes),
            *(("machine", host.machine.event_counts) for host in self._hosts),
            *(("sink", model.event_counts) for node in self.nodes for model in node.models.values()),
        )
        for kind, counter in counters:
            for event, count in counter.items():
                event_counts[f"{kind}: {event}"] += count
        event_counts["processes started"] = sum(host.machine.process_count for host in self._hosts)
        event_counts["starts failed"] = sum(host.failure_count for host in self._hosts)
        return +event_counts

    def _vacuous_reason(self, delta_count: int) -> str | None:
        if not delta_count:
            return "no delta was acknowledged"
        if self.plan.strikes and not self._nemesis.fault_counts:
            return "no fault found a target"
        if not self.oracle.check_counts:
            return "no check examined anything"
        return None


class _ErrorHandler(logging.Handler):
    """Collects the errors that are logged with an exception; the service must not log any."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._failures.append(f"{record.getMessage()}: {format_error(error)}")


@contextmanager
def _capture_logged_errors() -> Iterator[list[str]]:
    """Yield a list that collects the errors that the service logs in the scope, without output."""
    failures: list[str] = []
    handler = _ErrorHandler(failures)
    loggers = [logging.getLogger(name) for name in ("delta_prop", "asyncio")]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield failures
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate
