"""The server: listens, serves each connection, forwards backpressure, and drains before it ends.

It owns every task and every connection; the propagator belongs to the caller, and outlives it.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.abc import TaskStatus

from delta_prop.hosting.streams import Streams
from delta_prop.server.access import Access
from delta_prop.server.answers import partition_closing, server_closing
from delta_prop.server.audit import Audit
from delta_prop.server.connection_handler import ConnectionHandler
from delta_prop.server.connection_reader import ReceiveBudget
from delta_prop.server.count_totals import DeltaCounts, DeltaTotals, JobTotals, Totals
from delta_prop.server.limits import ConnectionLimiter, RateLimiter
from delta_prop.server.partitions import Partitions, ServedPartition, SingleStream
from delta_prop.server.quotas import Limits, QuotaCounts, QuotaName, Quotas
from delta_prop.server.server_context import Counters, JobCounts, ServerContext
from delta_prop.server.server_status import lag_at
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import encode
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Backpressure, Nack

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.platform.ports import Listener, Stream, Tls
    from delta_prop_wire.stamp import LogName

logger = logging.getLogger("delta_prop.server")

CHECK_INTERVAL_S = 0.5
DRAIN_POLL_S = 0.005
"""Poll interval while the server drains."""
_CLOSE_TIMEOUT_S = 1.0


class Address(NamedTuple):
    """The host and port that the server listens on."""

    host: str
    port: int


class Service:
    """The 0xD3 service in front of a propagator, or of the streams of a data directory.

    *Resources*: `run` owns an accepting task, two tasks per connection, and some periodic ones; all end with
    it. *Errors*: OSError if it cannot listen, UsageError if others could connect and no token is required.
    A client can at worst end its own connection.
    """

    def __init__(
        self,
        source: Propagator | Streams,
        settings: ServerSettings | None = None,
        *,
        access: Access | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`source`: serve a propagator, or all streams of a data directory.

        `access`: checks tokens; without it, every client may do everything, on this machine only.
        """
        self.settings = settings or ServerSettings()
        self.address: Address | None = None
        self._source = source
        self._access = access
        self._tls = tls
        self._handlers: dict[int, ConnectionHandler] = {}
        self._stopping, self._all_closed = anyio.Event(), anyio.Event()
        self._context: ServerContext | None = None
        self._connection_limiter = ConnectionLimiter(
            self.settings.connections_max, self.settings.connections_per_host_max
        )
        self._totals = Totals(DeltaTotals(DeltaCounts()), JobTotals(JobCounts()))

    # --- running

    async def run(self, *, task_status: TaskStatus[Address] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or cancellation; reports its address as started once it listens."""
        source = self._source
        streams = source if isinstance(source, Streams) else SingleStream(source)
        world = streams.world
        network = world.network
        if network is None:
            raise UsageError("world: it has no network to listen on: give one that has")
        self._group_threads = world.new_threads()
        access = self._access or Access(world)
        check_exposure(self.settings, access)
        context = ServerContext(
            partitions=Partitions(streams, self.settings, self),
            settings=self.settings,
            access=access,
            rate_limiter=RateLimiter(vector_rate=self.settings.vector_rate),
            audit=Audit(world.clock),
            receive_budget=ReceiveBudget(self.settings.receiving_bytes_max),
            counters=Counters(),
            clock=world.clock,
            quotas=Quotas(Limits.of(asdict(self.settings), "client_")),
        )
        access.on_change = self._check_tokens
        async with AsyncExitStack() as exits:
            listener = await network.listen(self.settings.host, self.settings.port, tls=self._tls)
            exits.push_async_callback(listener.aclose)
            self.address = Address(*listener.address)
            async with anyio.create_task_group() as background:
                await context.partitions.start(background)
                context.bind(context.partitions.default)
                self._context = context
                if isinstance(source, Streams):
                    source.on_close = self._close_partition
                for run_task in (access.run, context.audit.run, self._run_checks):
                    background.start_soon(run_task)
                async with anyio.create_task_group() as serving:
                    accepting = anyio.CancelScope()
                    serving.start_soon(self._accept, listener, serving, accepting)
                    task_status.started(self.address)
                    await self._stopping.wait()
                    accepting.cancel()
                    await listener.aclose()
                    await self._drain()
                background.cancel_scope.cancel()

    def stop(self) -> None:
        """Accept no more deltas, answer those that were accepted, and end."""
        self._stopping.set()

    async def _accept(self, listener: Listener, serving: Any, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                stream = await listener.accept()
                serving.start_soon(self._serve, stream)

    async def _serve(self, stream: Stream) -> None:
        context = self._context
        assert context is not None
        context.counters.connections += 1
        try:
            self._connection_limiter.enter(stream.peer_host)
        except Refused as refused:
            context.counters.connections_refused += 1
            context.audit.record_refusal(stream.peer, None, "CONNECTION", refused)
            await _refuse(stream, refused)
            return
        number = context.counters.connections
        handler = self._handlers[number] = ConnectionHandler(number, stream, context.for_connection())
        try:
            await handler.run()
        except Exception:  # a defect here must end only this connection
            logger.exception("connection %d of %s failed", number, stream.peer)
        finally:
            del self._handlers[number]
            self._connection_limiter.leave(stream.peer_host)
            if not self._handlers:
                self._all_closed.set()

    async def _drain(self) -> None:
        """Answer all connections, deliver the rest of the log, and close them, within `drain_timeout_s`."""
        self._all_closed = anyio.Event()
        deadline = anyio.current_time() + self.settings.drain_timeout_s
        for handler in list(self._handlers.values()):
            handler.drain(deadline)
        if self._handlers:
            with anyio.CancelScope(deadline=deadline):
                ends = await self._wait_visible()
                for handler in list(self._handlers.values()):
                    handler.drain(deadline, ends.get(handler.partition_name, 0))
                if self._handlers:
                    await self._all_closed.wait()
        for handler in list(self._handlers.values()):
            handler.close(Nack.of(0, server_closing()))
        if self._handlers:
            with anyio.move_on_after(_CLOSE_TIMEOUT_S):
                await self._all_closed.wait()
        for handler in list(self._handlers.values()):
            handler.abort()

    async def _wait_visible(self) -> dict[LogName, int]:
        """Wait until all that was accepted is refused, or logged and visible; return the ends of the logs."""
        while any(handler.dispatcher.has_pending_outcomes for handler in self._handlers.values()):  # noqa: ASYNC110 - of many
            await anyio.sleep(DRAIN_POLL_S)
        ends = {}
        for served in self._served():
            log, pipeline = served.partition.log, served.partition.pipeline
            end = log.next_offset  # rows published from now on do not delay the end
            while log.high_watermark < end and pipeline.stop_refusal is None:  # noqa: ASYNC110 - moved by commits and recoveries
                await anyio.sleep(DRAIN_POLL_S)
            ends[served.name] = min(end, log.high_watermark)
        return ends

    async def _close_partition(self, name: LogName) -> None:
        """End the connections that work with a partition, before it closes."""
        assert self._context is not None
        self._totals.deltas.note(self._open_propagators())
        self._totals.jobs.note(self._open_job_counts())
        served = self._context.partitions.forget(name)
        for handler in self._handlers_of(name):
            handler.close(Nack.of(0, partition_closing()))
        with anyio.move_on_after(_CLOSE_TIMEOUT_S):
            while self._handlers_of(name):  # noqa: ASYNC110 - each ends by itself
                await anyio.sleep(DRAIN_POLL_S)
        for handler in self._handlers_of(name):
            handler.abort()
        if served is not None:
            await served.end()

    def _handlers_of(self, name: LogName) -> list[ConnectionHandler]:
        return [handler for handler in self._handlers.values() if handler.partition_name == name]

    def _served(self) -> list[ServedPartition]:
        return [] if self._context is None else self._context.partitions.all()

    def _open_propagators(self) -> list[Propagator]:
        source = self._source
        return [*source.open_partitions().values()] if isinstance(source, Streams) else [source]

    def _open_job_counts(self) -> list[JobCounts]:
        return [served.jobs.counts for served in self._served()]

    # --- periodic tasks

    async def _run_checks(self) -> None:
        context = self._context
        assert context is not None
        now, catalogue = context.clock.now(), context.partitions.streams.catalogue
        while True:
            due = now + CHECK_INTERVAL_S
            await anyio.sleep(CHECK_INTERVAL_S)
            now = context.clock.now()
            self._totals.deltas.settle(self._open_propagators())
            self._totals.jobs.settle(self._open_job_counts())
            used = {handler.partition_name for handler in self._handlers.values()}
            context.partitions.close_unused(used, now)
            if context.partitions.streams.catalogue is not catalogue:
                catalogue = context.partitions.streams.catalogue
                context.quotas.drop_removed(catalogue.streams)
                for handler in self._handlers.values():
                    handler.update_quota()
            for handler in list(self._handlers.values()):
                try:
                    handler.check(now, stalled_s=max(now - due, 0.0))
                except Exception:  # a defect here must end only this connection
                    client = handler.client
                    logger.exception("connection %d of %s failed", client.number, client.address)
                    handler.abort()

    def send_pressure(self, served: ServedPartition, frame: Backpressure) -> None:
        """Send backpressure advice to the producers of a partition."""
        for handler in self._handlers_of(served.name):
            handler.send_pressure(frame)

    def _check_tokens(self) -> None:
        for handler in list(self._handlers.values()):
            handler.check_token()

    # --- for operators

    @property
    def counters(self) -> Counters | None:
        """Counters of its connections; None before it listens."""
        return None if self._context is None else self._context.counters

    @property
    def is_ending(self) -> bool:
        """True once it accepts nothing more."""
        return self._stopping.is_set()

    @property
    def delta_counts(self) -> DeltaCounts:
        """Counts of deltas of all partitions since the start, also of those that have closed."""
        return self._totals.deltas.total(self._open_propagators())

    @property
    def job_counts(self) -> JobCounts | None:
        """Counts of jobs of all partitions, also of those that have closed; None before it listens."""
        if self._context is None:
            return None
        present = self._open_job_counts()
        total = self._totals.jobs.total(present)
        total.active = sum(counts.active for counts in present)
        total.staged_bytes = sum(counts.staged_bytes for counts in present)
        return total

    @property
    def quota_counts(self) -> dict[QuotaName, QuotaCounts]:
        """The use of each quota; empty before it listens."""
        return {} if self._context is None else self._context.quotas.counts

    def connections(self) -> list[dict[str, Any]]:
        """Return a snapshot of each connection."""
        rows = []
        for handler in self._handlers.values():
            row = handler.statistics()
            rows.append(row | lag_at(handler.log, row["processed"]))
        return rows

    async def poll_groups(self) -> None:
        """Read the cursors of groups without a reader."""
        for served in self._served():
            await served.groups.poll_absent(self._group_threads)

    def groups(self) -> list[dict[str, Any]]:
        """Return a snapshot of each group, the absent ones as last read."""
        return [
            {
                "name": name,
                "stream": served.stream,
                "partition": served.name.partition,
                "offset": group.next_offset,
                "has_member": group.has_member,
                "standing_by": group.standing_by,
            }
            | lag_at(served.partition.log, group.next_offset)
            for served in self._served()
            for name, group in served.groups.all_statistics().items()
        ]

    def streams(self) -> list[dict[str, Any]]:
        """Return a snapshot of each stream: its settings."""
        if self._context is None:
            return []
        return [
            {
                "name": stream.name,
                "id": stream.stream,
                "partitions": stream.count,
                "settings": dict(stream.settings),
            }
            for stream in self._context.partitions.describe()
        ]

    def jobs(self) -> list[dict[str, Any]]:
        """Return a snapshot of each job."""
        return [
            job | {"stream": served.stream, "partition": served.name.partition}
            for served in self._served()
            for job in served.jobs.to_json()
        ]


def check_exposure(settings: ServerSettings, access: Access) -> None:
    """Check that others can only connect if tokens are required. Raises UsageError."""
    if access.is_open and not settings.allow_anonymous and not is_loopback(settings.host):
        raise UsageError(
            f"host {settings.host!r}: others can connect, and no tokens are required: give a token file "
            "(--tokens, or access.tokens), or set allow_anonymous = true (--allow-anonymous)"
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine can connect to the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _refuse(stream: Stream, refused: Refused) -> None:
    """Send the refusal, without waiting, and close."""
    with suppress(ConnectionError):
        stream.send_now([encode(Nack.of(0, refused))])
    await stream.aclose()
