"""The server's life: it listens, serves each connection, tells of pressure, and ends without losing a thing.

It owns every task and every connection; the propagator behind it belongs to who made it, and outlives it.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from anyio.abc import TaskStatus

from delta_prop.server.access import Access
from delta_prop.server.audit import Audit
from delta_prop.server.counters import Counters
from delta_prop.server.endings import shutting_down
from delta_prop.server.groups import Groups
from delta_prop.server.hub import Hub
from delta_prop.server.jobs import Jobs
from delta_prop.server.lags import lag_at
from delta_prop.server.limits import Connections, Rates
from delta_prop.server.peer import Peer
from delta_prop.server.room import Room
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import encode
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Backpressure, Level, Nack

if TYPE_CHECKING:
    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.embedded import Propagator
    from delta_prop.ports import Listener, Stream, Tls

logger = logging.getLogger("delta_prop.server")

TICK_S = 0.5
SETTLE_S = 0.005
"""How often the end looks whether what was taken is in the log."""
_LAST_WORD_S_MAX = 1.0


class Address(NamedTuple):
    """Where it listens."""

    host: str
    port: int


class Service:
    """0xD3 in front of a propagator.

    *Resources*: `run` owns a task that accepts, two a connection, and some that watch; all end with it.
    *Errors*: OSError where it cannot listen, UsageError where others could connect and no token is asked for.
    What a client does ends that client's connection at worst.
    """

    def __init__(
        self,
        propagator: Propagator,
        settings: ServerSettings | None = None,
        *,
        access: Access | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`access`: who may do what; None: everybody everything, on this machine alone."""
        self.settings = settings or ServerSettings()
        self.address: Address | None = None
        self._propagator = propagator
        self._access = access
        self._tls = tls
        self._peers: dict[int, Peer] = {}
        self._numbers = 0
        self._stop, self._left = anyio.Event(), anyio.Event()
        self._hub: Hub | None = None
        self._connections = Connections(self.settings.connections_max, self.settings.connections_per_host_max)

    # --- life

    async def run(self, *, task_status: TaskStatus[Address] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, or cancelled; ready once it listens."""
        inside = self._propagator.inside()
        network = inside.world.network
        if network is None:
            raise UsageError("this world has no network to listen on")
        self._group_threads = inside.world.new_threads()
        access = self._access or Access(inside.world)
        check_open_to_others(self.settings, access)
        counters = Counters()
        hub = self._hub = Hub(
            inside=inside,
            settings=self.settings,
            access=access,
            rates=Rates(vector_rate=self.settings.vector_rate),
            audit=Audit(inside.now),
            groups=Groups(inside.disk, inside.log, inside.world),
            room=Room(self.settings.receiving_bytes_max),
            jobs=Jobs(inside, self.settings, counters.jobs),
            now=inside.now,
            counters=counters,
        )
        access.changed = self._check_tokens
        if inside.operating is not None:
            inside.operating.reset_group = hub.groups.reset
        async with AsyncExitStack() as exits:
            listener = await network.listen(self.settings.host, self.settings.port, tls=self._tls)
            exits.push_async_callback(listener.aclose)
            self.address = Address(*listener.address)
            async with anyio.create_task_group() as watching:
                for watch in (access.run, hub.audit.run, hub.groups.run, hub.jobs.run):
                    watching.start_soon(watch)
                watching.start_soon(self._tick)
                watching.start_soon(self._pass_on_pressure)
                async with anyio.create_task_group() as serving:
                    accepting = anyio.CancelScope()
                    serving.start_soon(self._accept, listener, serving, accepting)
                    task_status.started(self.address)
                    await self._stop.wait()
                    accepting.cancel()
                    await listener.aclose()
                    await self._drain()
                watching.cancel_scope.cancel()

    def stop(self) -> None:
        """Take nothing more, answer what was taken, tell all, end."""
        self._stop.set()

    async def _accept(self, listener: Listener, serving: Any, scope: anyio.CancelScope) -> None:
        with scope:
            while True:
                stream = await listener.accept()
                serving.start_soon(self._serve, stream)

    async def _serve(self, stream: Stream) -> None:
        hub = self._hub
        assert hub is not None
        hub.counters.connections += 1
        try:
            self._connections.enter(stream.peer_host)
        except Refused as refused:
            hub.counters.connections_refused += 1
            hub.audit.refused(stream.peer, None, "CONNECTION", refused)
            await _turn_away(stream, refused)
            return
        self._numbers += 1
        peer = self._peers[self._numbers] = Peer(self._numbers, stream, hub)
        try:
            await peer.run()
        except Exception:  # a defect here must end this connection alone
            logger.exception("connection %d of %s failed", peer.number, peer.address)
        finally:
            del self._peers[peer.number]
            self._connections.leave(stream.peer_host)
            if not self._peers:
                self._left.set()

    async def _drain(self) -> None:
        """Have all connections answered, brought what the log has, and ended, for as long as it may take."""
        self._left = anyio.Event()
        until = anyio.current_time() + self.settings.drain_s_max
        for peer in list(self._peers.values()):
            peer.drain(until)
        if self._peers:
            with anyio.CancelScope(deadline=until):
                end = await self._end_of_deliveries()
                for peer in list(self._peers.values()):
                    peer.drain(until, end)
                if self._peers:
                    await self._left.wait()
        for peer in list(self._peers.values()):
            peer.end(Nack.of(0, shutting_down()))
        if self._peers:
            with anyio.move_on_after(_LAST_WORD_S_MAX):
                await self._left.wait()
        for peer in list(self._peers.values()):
            peer.break_off()

    async def _end_of_deliveries(self) -> int:
        """Wait until all that was taken is refused, or logged and may be read; where the log ended then."""
        hub = self._hub
        assert hub is not None
        log, chain = hub.inside.log, hub.inside.chain
        while any(peer.waits_for_outcomes for peer in self._peers.values()):  # noqa: ASYNC110 - of many
            await anyio.sleep(SETTLE_S)
        end = log.next_offset  # what others publish meanwhile is not waited for
        while log.visible < end and chain.stopped is None:  # noqa: ASYNC110 - moved by commits and recoveries
            await anyio.sleep(SETTLE_S)
        return min(end, log.visible)

    # --- watching

    async def _tick(self) -> None:
        hub = self._hub
        assert hub is not None
        now = hub.now()
        while True:
            due = now + TICK_S
            await anyio.sleep(TICK_S)
            now = hub.now()
            for peer in list(self._peers.values()):
                try:
                    peer.tick(now, late_s=max(now - due, 0.0))
                except Exception:  # a defect here, too
                    logger.exception("connection %d of %s failed", peer.number, peer.address)
                    peer.break_off()

    async def _pass_on_pressure(self) -> None:
        hub = self._hub
        assert hub is not None
        told = Level.OK
        async for pressure in self._propagator.pressure_changes():
            hub.level = pressure.level
            if pressure.level or told:
                frame = _frame_of(pressure, hub.running_number())
                for peer in list(self._peers.values()):
                    peer.tell_pressure(frame)
            told = pressure.level

    def _check_tokens(self) -> None:
        for peer in list(self._peers.values()):
            peer.check_token()

    # --- telling operators

    @property
    def counters(self) -> Counters | None:
        """What its connections count; None before it listens."""
        return None if self._hub is None else self._hub.counters

    @property
    def ending(self) -> bool:
        """Whether it takes nothing more."""
        return self._stop.is_set()

    def peers(self) -> list[dict[str, Any]]:
        """A snapshot of each connection."""
        if self._hub is None:
            return []
        log, told = self._hub.inside.log, [peer.statistics() for peer in self._peers.values()]
        return [one | lag_at(log, one["dealt_with"]) for one in told]

    async def look_at_groups(self) -> None:
        """Find out how far groups are that nobody reads for."""
        if self._hub is not None:
            await self._hub.groups.look(self._group_threads)

    def groups(self) -> list[dict[str, Any]]:
        """A snapshot of each group, those that are away as they were looked at last."""
        if self._hub is None:
            return []
        log, places = self._hub.inside.log, self._hub.groups.places()
        return [
            {
                "name": name,
                "offset": one.next_offset,
                "has_member": one.has_member,
                "standing_by": one.standing_by,
            }
            | lag_at(log, one.next_offset)
            for name, one in places.items()
        ]

    def jobs(self) -> list[dict[str, Any]]:
        """A snapshot of each job."""
        return [] if self._hub is None else self._hub.jobs.told()


def check_open_to_others(settings: ServerSettings, access: Access) -> None:
    """Refuse to listen where others can connect and nobody asks who they are. Raises UsageError."""
    if access.is_open and not settings.allow_anonymous and not is_loopback(settings.host):
        raise UsageError(
            f"host {settings.host!r} can be reached by others, and no tokens are asked for: give a file of "
            "tokens (--tokens, or access.tokens), or say allow_anonymous = true (--allow-anonymous)"
        )


def is_loopback(host: str) -> bool:
    """True if only this machine can reach what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _turn_away(stream: Stream, refused: Refused) -> None:
    """Say why not, without waiting for anything, and close."""
    with suppress(ConnectionError):
        stream.send_now([encode(Nack.of(0, refused))])
    await stream.aclose()


def _frame_of(pressure: Pressure, number: int) -> Backpressure:
    return Backpressure(
        number,
        level=pressure.level,
        depth=pressure.depth,
        capacity=pressure.capacity,
        rate=pressure.rate_limit,
        retry_after_ms=pressure.retry_after_ms,
    )
