"""Hosts of a chaos run: a service or a client on a simulated machine, which is restarted after each end.

An exception that leaves a process is a violation, unless a failed call of its disk caused the exception. Then
the process is restarted, as a supervisor would do. A service is the production code with its sinks and links.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.client import ClientSettings, ForwardLink
from delta_prop.delivery.feed_state import FeedState
from delta_prop.hosting.streams import Streams
from delta_prop.platform.ports import World
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from delta_prop_simulations.chaos.neighbours import STREAM, serve_partition
from delta_prop_simulations.chaos.plan import Knobs, NodePlan, SinkPlan
from delta_prop_simulations.chaos.sinks import KINDS, CountedIndex, ModelSink, SinkFaults
from delta_prop_simulations.chaos.violation import Violation
from delta_prop_simulations.disk_faults import SimCrash
from delta_prop_simulations.machine import Ending, Machine, Process
from delta_prop_sinks import CacheSink
from delta_prop_sinks.sink import Sink
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop_simulations.chaos.oracle import Oracle
    from delta_prop_simulations.rng import Seed

    Embedded = Callable[[Propagator, Process], Coroutine[None, None, None]]
    from delta_prop_simulations.chaos.workload import Reader, Writer

RESTART_DELAY_S = 1.0
"""The time after which a supervisor restarts a failed process."""

_FAILURE_SUFFIXES = ("failed", "no room", "short for want of room")


class Host:
    """One machine and the process that runs on it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.is_finished = False
        self.failure_count = 0
        self._not_before_s = 0.0
        self._start_requested = anyio.Event()
        self._ended = anyio.Event()
        machine.on_end = self._note_end

    async def run_process(self, world: World, process: Process) -> None:
        """Run the host's program in one process."""
        raise NotImplementedError

    def on_process_end(self, process: Process) -> None:
        """Called when a process has ended."""

    def is_done(self) -> bool:
        """True if a process that ended by itself must not be restarted."""
        return True

    @property
    def is_up(self) -> bool:
        """True while its process runs."""
        return self.machine.is_up

    async def keep_running(self, tasks: TaskGroup) -> None:
        """Run one process after the other, until the work is done."""
        while not self.is_finished:
            while (wait_s := self._not_before_s - anyio.current_time()) > 0:
                self._start_requested = anyio.Event()
                with anyio.move_on_after(wait_s):
                    await self._start_requested.wait()
            self.machine.restore()
            self._ended = anyio.Event()
            tasks.start_soon(self._run_once)
            await self._ended.wait()

    def kill(self, for_s: float) -> bool:
        """Kill the process with SIGKILL, for at least `for_s` seconds; return True if one ran."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.kill()
        return was_up

    def cut_power(self, for_s: float) -> bool:
        """Cut the machine's power, for at least `for_s` seconds; return True if a process ran."""
        was_up = self.is_up
        self.delay_start(for_s)
        self.machine.cut_power()
        return was_up

    async def wait_ended(self) -> None:
        """Wait until the host's process has ended, if one runs."""
        if (process := self.machine.process) is not None:
            await process.ended.wait()

    def start_now(self) -> None:
        """Start a process now if none runs."""
        self._not_before_s = 0.0
        self._start_requested.set()

    def delay_start(self, for_s: float) -> None:
        """Prevent a start of the process for `for_s` seconds."""
        self._not_before_s = max(self._not_before_s, anyio.current_time() + for_s)

    async def _run_once(self) -> None:
        machine = self.machine
        before = disk_failures(machine)

        async def main(world: World) -> None:
            assert machine.process is not None
            await self.run_process(world, machine.process)

        try:
            ending = await machine.run(main)
        except Violation:
            raise
        except Exception as error:
            if disk_failures(machine) == before or not all(
                _is_disk_error(one) for one in leaf_exceptions(error)
            ):
                raise Violation(
                    "crash", f"{self.name}, process {machine.process_count}: {format_error(error)}"
                ) from error
            self.failure_count += 1
            self.delay_start(RESTART_DELAY_S)
        else:
            if ending is Ending.ENDED and self.is_done():
                self.is_finished = True

    def _note_end(self, process: Process) -> None:
        self.on_process_end(process)
        self._ended.set()


class ClientHost(Host):
    """A producer or a subscriber, which runs on a machine of its own until its work is done."""

    def __init__(
        self, machine: Machine, client: Writer | Reader, address: str, partition: int | None
    ) -> None:
        """`partition`: that of the work, if the node serves streams."""
        super().__init__(machine)
        self.client = client
        self._address = address
        self._log: dict[str, Any] = {} if partition is None else {"stream": STREAM, "partition": partition}

    async def run_process(self, world: World, process: Process) -> None:
        await self.client.run(world, [self._address], **self._log)


def leaf_exceptions(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group at any depth; of another exception, itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaf_exceptions(one)
    else:
        yield error


def format_error(error: BaseException) -> str:
    """Return the errors and their locations as one line, which is the same on every machine."""
    return "; ".join(f"{type(one).__name__}: {one} ({_format_trace(one)})" for one in leaf_exceptions(error))


def _format_trace(error: BaseException) -> str:
    locations: list[str] = []
    trace: Any = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        path = PurePath(code.co_filename)
        locations.append(f"{path.parent.name}/{path.name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return " < ".join(reversed(locations[-4:]))


def _is_disk_error(error: BaseException) -> bool:
    return isinstance(error, OSError | Refused)


def disk_failures(machine: Machine) -> int:
    """Return the number of disk calls that have failed on this machine."""
    return sum(
        count for event, count in machine.disk_fault_counts.items() if event.endswith(_FAILURE_SUFFIXES)
    )


PORT = 7373
CLIENT = ClientSettings(
    connect_timeout_s=3.0,
    handshake_timeout_s=3.0,
    heartbeat_interval_s=1.0,
    peer_timeout_s=4.0,
    delivery_timeout_s=20.0,
)
"""Settings of forward links: timeouts shorter than the defaults, to detect a lost peer sooner."""


class Node(Host):
    """A service and its sinks. `propagator` and `service` are those of the current process."""

    def __init__(
        self, plan: NodePlan, machine: Machine, seed: Seed, oracle: Oracle, embedded: Sequence[Embedded]
    ) -> None:
        super().__init__(machine)
        self.plan = plan
        self.propagator: Propagator | None = None
        self.service: Service | None = None
        self.models = {
            sink.name: ModelSink(
                sink.name,
                sink.kind,
                seed.stream(f"sink {sink.name}"),
                SinkFaults(**sink.faults),  # type: ignore[arg-type]
                topics=sink.topics,
            )
            for sink in plan.sinks
            if sink.kind in KINDS
        }
        self._embedded = embedded
        self._neighbours_rng = seed.stream("neighbours")
        self._is_healed = False
        self._oracle = oracle
        self._previous_ending: str | None = None
        self._stop = anyio.Event()

    async def run_process(self, world: World, process: Process) -> None:
        """Open the service, attach its sinks, and serve until `stop`."""
        self._stop = anyio.Event()
        async with self._open(world) as (propagator, source):
            if process.has_ended:  # killed while the log opened; its successor may serve already
                return
            self._oracle.note_start(self.name, propagator, self._previous_ending)
            self._previous_ending = None
            self.propagator = propagator
            for sink in self.plan.sinks:
                await self.attach(sink, process)
            for other in self.plan.forward_to:
                await self._forward(other, world)
            if self._is_healed:
                self.resume_paused()
            await self._serve(propagator, source, process)
            self.propagator = None

    @asynccontextmanager
    async def _open(self, world: World) -> AsyncIterator[tuple[Propagator, Propagator | Streams]]:
        """Yield the propagator of the work, and what the service serves."""
        settings, log = Settings(**self.plan.settings), _log_settings(self.plan)  # type: ignore[arg-type]
        if self.plan.partition is None or log is None:
            data = None if log is None else "data"
            async with Propagator(settings, data=data, log=log, world=world) as propagator:
                yield propagator, propagator
        else:
            number, rng = self.plan.partition, self._neighbours_rng
            async with serve_partition(number, settings, log, world, rng) as opened:
                yield opened

    async def _serve(self, propagator: Propagator, source: Propagator | Streams, process: Process) -> None:
        service = Service(source, _server_settings(self.name, self.plan.server))
        async with anyio.create_task_group() as tasks:
            await tasks.start(service.run)
            self.service = service
            async with anyio.create_task_group() as writers:
                for embedded in self._embedded:
                    writers.start_soon(embedded, propagator, process)
                await self._stop.wait()
                writers.cancel_scope.cancel()
            self.service = None
            service.stop()

    async def attach(self, plan: SinkPlan, process: Process) -> None:
        """Attach a sink to the running service. Raises the same errors as `Propagator.attach`."""
        assert self.propagator is not None
        sink: Sink
        if plan.kind in KINDS:
            sink = self.models[plan.name].for_process(process)
        else:
            history = self._oracle.histories[self.name]
            sink = (
                CacheSink(name=plan.name)
                if plan.kind == "cache"
                else CountedIndex(plan.name, history, self._oracle.complaints)
            )
        await self.propagator.attach(
            sink, topics=plan.topics, required=plan.required, pacing=plan.pacing, start="resume"
        )

    async def _forward(self, other: str, world: World) -> None:
        assert self.propagator is not None
        link = ForwardLink(f"{other}:{PORT}", name=self.name, settings=CLIENT, world=world)
        await self.propagator.attach(ForwardSink(link, name=f"to-{other}"))

    def is_done(self) -> bool:
        """Return False: a service is always restarted."""
        return False

    def on_process_end(self, process: Process) -> None:
        """Drop the uncommitted data of the model sinks, and note how the process ended."""
        self.propagator = self.service = None
        assert process.ending is not None
        if self._previous_ending is None or process.ending is not Ending.ENDED:
            self._previous_ending = process.ending.value  # a failed start must not hide the kill before it
        self._oracle.note_end(self.name)
        for sink in self.models.values():
            sink.kill()

    def waits_for(self) -> list[str]:
        """Return a line for each piece of unfinished work."""
        propagator = self.propagator
        if propagator is None or self.service is None:
            return [f"{self.name} does not serve"]
        statistics = propagator.statistics()
        pending = [
            f"{self.name}'s sink {name} is {sink.state}, lag {sink.lag}: {sink.reason}"
            for name, sink in statistics.sinks.items()
            if sink.lag or sink.state != "idle"
        ]
        reopening = statistics.reopening
        if reopening is not None and reopening.failed:
            pending.append(f"{self.name} has a failed log: {reopening.last_error}")
        log = propagator.internals().partition.log
        if log.high_watermark < log.next_offset:
            pending.append(f"{self.name}: high watermark {log.high_watermark} of {log.next_offset}")
        queued, waiting = statistics.queue.depth, statistics.pending.pending_runs
        if queued or waiting:
            pending.append(f"{self.name} has {queued} queued, {waiting} pending")
        return pending

    def watermarks(self) -> dict[int, int]:
        """Return the watermark of each origin."""
        if self.propagator is None:
            return {}
        return dict(self.propagator.internals().partition.pipeline.orderer.watermarks)

    def log_end(self) -> int:
        """Return the log's next offset."""
        return 0 if self.propagator is None else self.propagator.statistics().log.next_offset

    # --- faults

    async def reattach(self, sink: str) -> None:
        """Attach a sink again that was detached from the running service."""
        assert self.machine.process is not None
        plan = next(sink_plan for sink_plan in self.plan.sinks if sink_plan.name == sink)
        await self.attach(plan, self.machine.process)

    def resume_paused(self) -> None:
        """Resume all paused sinks if the service runs."""
        if self.propagator is None:
            return
        try:
            for name, sink in self.propagator.statistics().sinks.items():
                if sink.state == FeedState.PAUSED.value:
                    self.propagator.resume(name)
        except SimCrash:  # the read of a lag was the machine's last call, which ends the process
            return

    def heal(self) -> None:
        """Heal the sinks, and resume them now or at the next start."""
        self._is_healed = True
        for model in self.models.values():
            model.heal()
        self.resume_paused()

    def stop(self, for_s: float) -> bool:
        """Stop the service gracefully; returns True if there was one."""
        if self.service is None:
            return False
        self.delay_start(for_s)
        self._stop.set()
        return True


def _log_settings(plan: NodePlan) -> LogSettings | None:
    if plan.log is None:
        return None
    fields: dict[str, Any] = dict(plan.log)
    fields["read_level"] = AckLevel[str(fields.get("read_level", "durable")).upper()]
    return LogSettings(**fields)


def _server_settings(host: str, fields: Knobs) -> ServerSettings:
    return ServerSettings(
        host=host,
        port=PORT,
        allow_anonymous=True,
        handshake_timeout_s=3.0,
        heartbeat_interval_s=1.0,
        peer_timeout_s=4.0,
        send_timeout_s=10.0,
        drain_timeout_s=3.0,
        **fields,  # type: ignore[arg-type]
    )
