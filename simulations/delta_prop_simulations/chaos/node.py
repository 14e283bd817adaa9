"""A service of a chaos run: the production code on a simulated machine, with its sinks and forward links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.client import ClientSettings, ForwardLink
from delta_prop.delivery.feed_state import FeedState
from delta_prop.server.service import Service
from delta_prop.server.settings import ServerSettings
from delta_prop.sinks import ForwardSink
from delta_prop_simulations.chaos.host import Host
from delta_prop_simulations.chaos.sinks import KINDS, ModelSink, SinkFaults
from delta_prop_simulations.chaos.work import CountedIndex
from delta_prop_simulations.disk_faults import SimCrash
from delta_prop_simulations.machine import Ending
from delta_prop_sinks import CacheSink
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from delta_prop.platform.ports import World
    from delta_prop_simulations.chaos.oracle import Oracle
    from delta_prop_simulations.chaos.plan import Knobs, NodePlan, SinkPlan
    from delta_prop_simulations.machine import Machine, Process
    from delta_prop_simulations.rng import Seed
    from delta_prop_sinks.sink import Sink

    Embedded = Callable[[Propagator, Process], Coroutine[None, None, None]]

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
        self._is_healed = False
        self._oracle = oracle
        self._previous_ending: str | None = None
        self._stop = anyio.Event()

    # --- the process

    async def run_process(self, world: World, process: Process) -> None:
        """Open the service, attach its sinks, and serve until `stop`."""
        self._stop = anyio.Event()
        async with Propagator(
            Settings(**self.plan.settings),  # type: ignore[arg-type]
            data=None if self.plan.log is None else "data",
            log=_log_settings(self.plan),
            world=world,
        ) as propagator:
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
            await self._serve(propagator, process)
            self.propagator = None

    async def _serve(self, propagator: Propagator, process: Process) -> None:
        service = Service(propagator, _server_settings(self.name, self.plan.server))
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
            if process.ending is Ending.POWER_CUT:
                sink.power_cut()
            else:
                sink.kill()

    # --- progress

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
        return (
            {}
            if self.propagator is None
            else dict(self.propagator.internals().partition.pipeline.orderer.watermarks)
        )

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
