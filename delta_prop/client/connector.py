"""Connects a client to its service: the addresses, TLS, the deadlines, and the network to use."""

from __future__ import annotations

from collections.abc import Iterable

from delta_prop.client.addresses import Address, parse_addresses
from delta_prop.client.arguments import check_connection, settings_or_default
from delta_prop.client.session import Session
from delta_prop.client.settings import ClientSettings
from delta_prop.platform.ports import Network, Stream, Tls, World
from delta_prop_wire.errors import UsageError


class Connector:
    """The addresses of one service, and what it takes to connect to one of them."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: str | None,
        tls: Tls | None,
        settings: ClientSettings | None,
        world: World | None,
    ) -> None:
        """`world`: None for the real one. Raises UsageError."""
        self.settings = settings_or_default(settings)
        check_connection(token, tls, world)
        self.token = token
        self.addresses = parse_addresses(addresses)
        self._tls = tls
        self._given_world = world
        self._network: Network
        self.world: World

    def open(self) -> World:
        """Return the world to live in, which has a network. Raises UsageError."""
        self.world = world = self._given_world or _real_world()
        if world.network is None:
            raise UsageError("world: it has no network to connect over: give one that has")
        self._network = world.network
        return world

    async def connect(self, address: Address) -> Stream:
        """Connect, TLS handshake included. Raises OSError, TimeoutError, Misconfigured."""
        return await self._network.connect(
            address.host, address.port, tls=self._tls, timeout_s=self.settings.connect_timeout_s
        )

    def make_session(self, address: Address) -> Session:
        """Return the client's state of a new connection."""
        return Session(self.settings, self.world.clock.now(), address, secured=self._tls is not None)


def _real_world() -> World:
    from delta_prop.platform.world import real_world

    return real_world()
