"""One run of a plan: the service under faults, all made well, progress, the verdict. The same for a plan.

Nothing that the run finds is raised: a hang and an exception out of the service are violations too.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from delta_prop.testing import Conditions, Stuck, VirtualNetwork, run_virtual
from delta_prop_simulations.chance import Seed
from delta_prop_simulations.clock import ClockFaults
from delta_prop_simulations.disasters.clients import ReaderHost, WriterHost
from delta_prop_simulations.disasters.faults import Striker
from delta_prop_simulations.disasters.host import leaves, told
from delta_prop_simulations.disasters.node import Node
from delta_prop_simulations.disasters.oracle import Judge
from delta_prop_simulations.disasters.readers import Reader
from delta_prop_simulations.disasters.shadow import Shadow
from delta_prop_simulations.disasters.violation import Violation
from delta_prop_simulations.disasters.workload import Writer
from delta_prop_simulations.machine import Machine
from delta_prop_simulations.threads import ThreadFaults
from delta_prop_simulations.trace import Trace
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from delta_prop_simulations.disasters.host import Host
    from delta_prop_simulations.disasters.plan import NodePlan, Plan, WriterPlan

PROGRESS_S_MAX = 120.0
"""Within this virtual time all is dealt with, once everything is well."""
HORIZON_S = 1_000.0
TURNS_A_LOOK = 4
"""Each so many turns of the loop the judge looks at every service."""

_LOOK_S = 0.02
_DARK_S = 0.5
_CLOSE_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has shown. `struck`: how often what happened; `lines`: the end of the trace."""

    seed: int
    violation: Violation | None
    vacuous: str | None
    struck: Counter[str]
    trace: str
    deltas: int
    virtual_s: float
    lines: tuple[str, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether it exercised the service, and found nothing."""
        return self.violation is None and self.vacuous is None


def run(plan: Plan) -> Outcome:
    """Run it."""
    story = Story(plan)
    collecting = gc.isenabled()
    gc.disable()
    try:
        violation = _run(story)
    finally:
        if collecting:
            gc.enable()
    return story.outcome(violation)


def _run(story: Story) -> Violation | None:
    with _watching_logs() as failures:
        try:
            run_virtual(story.main, seed=story.plan.seed, horizon_s=HORIZON_S, on_turn=story.turn)
        except Stuck as error:
            return Violation("hang", str(error))
        except Exception as error:
            found = [one for one in leaves(error) if isinstance(one, Violation)]
            return found[0] if found else Violation("crash", told(error))
    return Violation("crash", failures[0]) if failures else None


class Story:
    """The parts of one run."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.trace = Trace(lambda: self._now)
        self.judge = Judge()
        self.shadow = Shadow()
        self.nodes: list[Node] = []
        self.clients: list[Host] = []
        self._seed = Seed(plan.seed)
        self._now = 0.0
        self._turns = 0
        self._writers: list[Writer] = []
        self._readers: list[Reader] = []
        self._network: VirtualNetwork
        self._striker: Striker

    # --- the run

    async def main(self) -> None:
        """From the start to the verdict."""
        self._make()
        hosts = self._hosts
        async with anyio.create_task_group() as tasks:
            for host in hosts:
                tasks.start_soon(host.keep, tasks)
            tasks.start_soon(self._striker.run)
            await anyio.sleep(self.plan.duration_s)
            self._striker.heal()
            await self._settle()
            if self.plan.power_cut_at_end:
                for node in self.nodes:
                    node.cut_power(_DARK_S)
                await anyio.sleep(2 * _DARK_S)
                await self._settle()
            await self._close()
            tasks.cancel_scope.cancel()

    async def _settle(self) -> None:
        """All is dealt with in time, and right."""
        deadline = anyio.current_time() + PROGRESS_S_MAX
        while waits := self._waits():
            if anyio.current_time() > deadline:
                raise Violation("progress", f"{PROGRESS_S_MAX:g} s after all was well: {'; '.join(waits)}")
            await anyio.sleep(_LOOK_S)
        self.trace.note("settled")
        await self.judge.at_rest(self.nodes, self.shadow, self._readers)

    async def _close(self) -> None:
        """All services end as they should."""
        for node in self.nodes:
            node.stop(HORIZON_S)
        with anyio.move_on_after(_CLOSE_S_MAX):
            for node in self.nodes:
                await node.wait_gone()
            return
        up = ", ".join(node.name for node in self.nodes if node.is_up)
        raise Violation("progress", f"{_CLOSE_S_MAX:g} s after it was told to stop: {up} has not")

    def turn(self, now: float, runnable: int) -> None:
        """Once a turn of the loop."""
        self._now = now
        self.trace.turn(now, runnable)
        for node in self.nodes:
            node.machine.look()
        self._turns += 1
        if self._turns % TURNS_A_LOOK == 0:
            self.judge.each_step(self.nodes)

    # --- who waits

    def _waits(self) -> list[str]:
        """Who waits for what; nobody where all is dealt with."""
        waits = [writer.waits_for() for writer in self._writers if not writer.done]
        for node in self.nodes:
            waits += node.waits_for()
        return waits or self._apart() or self._behind()

    def _apart(self) -> list[str]:
        """Services that forward to each other and do not hold the same."""
        held = {node.name: node.holds() for node in self.nodes}
        if len({frozenset(one.items()) for one in held.values()}) > 1:
            return [f"{name} holds {dict(sorted(one.items()))}" for name, one in held.items()]
        return []

    def _behind(self) -> list[str]:
        ends = {node.name: node.end() for node in self.nodes}
        return [
            f"{reader.name} has come to {reader.reached} of {ends[reader.node]}"
            for reader in self._readers
            if reader.reached < ends[reader.node]
        ]

    # --- its parts

    @property
    def _hosts(self) -> list[Host]:
        return [*self.nodes, *self.clients]

    def _make(self) -> None:
        plan, seed = self.plan, self._seed
        conditions = Conditions(**plan.network)  # type: ignore[arg-type]
        self._network = VirtualNetwork(plan.seed, conditions, host="nowhere")
        embedded: dict[str, list[Writer]] = {node.name: [] for node in plan.nodes}
        for told_writer in plan.writers:
            writer = self._writer(told_writer)
            self._writers.append(writer)
            if told_writer.embedded:
                embedded[told_writer.node].append(writer)
            else:
                self.clients.append(WriterHost(self._machine(told_writer.name), writer, told_writer.node))
        for told_reader in plan.readers:
            reader = Reader(
                told_reader.name,
                node=told_reader.node,
                topics=told_reader.topics,
                group=told_reader.group,
                batches=told_reader.batches,
                credit=told_reader.credit,
            )
            self._readers.append(reader)
            self.clients.append(ReaderHost(self._machine(told_reader.name), reader, told_reader.node))
        for told_node in plan.nodes:
            writers = [writer.embedded for writer in embedded[told_node.name]]
            machine = self._machine(told_node.name, told_node)
            self.nodes.append(Node(told_node, machine, seed.child(told_node.name), self.judge, writers))
        hosts = {host.name: host for host in self._hosts}
        self._striker = Striker(plan.strikes, hosts, self._network, self.trace)

    def _machine(self, name: str, plan: NodePlan | None = None) -> Machine:
        return Machine(
            name,
            self._seed.child(name),
            self._network,
            self.trace,
            clock=ClockFaults() if plan is None else ClockFaults(plan.drift, plan.jumps),
            threads=ThreadFaults() if plan is None else ThreadFaults(**plan.threads),
        )

    def _writer(self, plan: WriterPlan) -> Writer:
        return Writer(
            plan.name,
            self._seed.stream(f"writer {plan.name}"),
            self.shadow,
            node=plan.node,
            deltas=plan.deltas,
            burst=plan.burst,
            gap_s=plan.gap_s,
            level=None if plan.level is None else AckLevel[plan.level.upper()],
            poison=plan.poison,
            patience_s=plan.patience_s,
            offers=plan.offers,
            hot=plan.hot,
        )

    # --- what came of it

    def outcome(self, violation: Violation | None) -> Outcome:
        """What it has shown."""
        struck = self._struck()
        for what, count in sorted(struck.items()):
            self.trace.note(what, count)
        deltas = self.shadow.counts["acknowledged"]
        return Outcome(
            seed=self.plan.seed,
            violation=violation,
            vacuous=None if violation else self._vacuous(deltas),
            struck=struck,
            trace=self.trace.digest(),
            deltas=deltas,
            virtual_s=self._now,
            lines=tuple(self.trace.lines),
        )

    def _struck(self) -> Counter[str]:
        struck: Counter[str] = Counter()
        if not self.nodes:
            return struck
        counters: Iterable[tuple[str, Counter[str]]] = (
            ("strike", self._striker.struck),
            ("missed", self._striker.missed),
            ("network", self._network.struck),
            ("check", self.judge.struck),
            ("told", self.shadow.counts),
            *(("disk", node.machine.disk_struck) for node in self.nodes),
            *(("machine", host.machine.struck) for host in self._hosts),
            *(("sink", model.struck) for node in self.nodes for model in node.models.values()),
        )
        for kind, counter in counters:
            for what, count in counter.items():
                struck[f"{kind}: {what}"] += count
        struck["lives"] = sum(host.machine.lives for host in self._hosts)
        struck["starts failed"] = sum(host.failures for host in self._hosts)
        return +struck

    def _vacuous(self, deltas: int) -> str | None:
        if not deltas:
            return "no delta was acknowledged"
        if self.plan.strikes and not self._striker.struck:
            return "nothing that was to strike found anything to strike"
        if not self.judge.struck:
            return "no check looked at anything"
        return None


class _Failures(logging.Handler):
    """Keeps what is logged as an error with an exception: nobody is to see one."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._failures.append(f"{record.getMessage()}: {told(error)}")


@contextmanager
def _watching_logs() -> Iterator[list[str]]:
    """What the service logs as failed while this lasts; nothing of it is printed."""
    failures: list[str] = []
    handler = _Failures(failures)
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
