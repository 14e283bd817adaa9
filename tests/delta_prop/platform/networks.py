"""Networks for tests of the network contract: sockets on each event loop, or a virtual network; with or
without TLS.

A setup runs a test in its own event loop, under a deadline.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal

import anyio
import pytest
import trustme
import uvloop

from delta_prop.platform.ports import Listener, Network, Stream, Tls
from delta_prop.platform.sockets import SocketNetwork
from delta_prop.platform.tls import TlsStream
from delta_prop.platform.tls_contexts import client_context, server_context
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

DEADLINE_S = 30.0
HOST = "127.0.0.1"
LOOPS: dict[str, dict[str, Any]] = {
    "asyncio": {"backend": "asyncio"},
    "uvloop": {"backend": "asyncio", "backend_options": {"loop_factory": uvloop.new_event_loop}},
    "trio": {"backend": "trio"},
}


HARSH = NetworkConditions(
    latency_s=0.02, jitter_s_max=0.1, bytes_per_s=2e6, chunk_bytes_max=9000, buffer_bytes=20_000
)


@dataclass(frozen=True)
class NetworkSetup:
    """A network on an event loop, with the TLS settings of both sides."""

    network: Callable[[], Network]
    run_in: Callable[[Callable[[], Awaitable[None]]], None]
    server_tls: Tls | None = None
    client_tls: Tls | None = None

    def run(self, main: Callable[[NetworkSetup, Network], Awaitable[None]]) -> None:
        """Run a test in this setup; it fails after `DEADLINE_S`."""

        async def within_deadline() -> None:
            with anyio.fail_after(DEADLINE_S):
                await main(self, self.network())

        self.run_in(within_deadline)

    @asynccontextmanager
    async def pair(self, network: Network) -> AsyncIterator[tuple[Stream, Stream]]:
        """Yield both ends of a connection, the client's first; close them at the end."""
        listener = await network.listen(HOST, 0, tls=self.server_tls)
        accepted: list[Stream] = []

        async def accept() -> None:
            accepted.append(await listener.accept())
            await accepted[0].send([])  # the handshake

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accept)
            client = await network.connect(*listener.address, tls=self.client_tls)
        await listener.aclose()
        try:
            yield client, accepted[0]
        finally:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.aclose)
                tasks.start_soon(accepted[0].aclose)


@dataclass(frozen=True)
class Files:
    """Paths of PEM files: an authority, and certificates that it signed."""

    authority: str
    server: str
    server_key: str
    client: str
    client_key: str


@cache
def files() -> Files:
    """Create the certificates, once per process."""
    folder = Path(mkdtemp(prefix="delta-prop-tls-"))
    authority = trustme.CA()
    server = authority.issue_cert(HOST, "::1", "localhost", "server.example")
    client = authority.issue_cert("client.example")
    paths = {name: str(folder / f"{name}.pem") for name in Files.__dataclass_fields__}
    authority.cert_pem.write_to_path(paths["authority"])
    for name, certificate in (("server", server), ("client", client)):
        certificate.private_key_pem.write_to_path(paths[f"{name}_key"])
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(paths[name], append=True)
    return Files(**paths)


def plain_setup(loop: str) -> NetworkSetup:
    return NetworkSetup(SocketNetwork, partial(_run_real, loop))


def tls_setup(loop: str) -> NetworkSetup:
    pem = files()
    return NetworkSetup(
        SocketNetwork,
        partial(_run_real, loop),
        Tls(pem.server, pem.server_key, pem.authority),
        Tls(pem.client, pem.client_key, pem.authority),
    )


def fake_setup(backend: Literal["asyncio", "trio"], conditions: NetworkConditions) -> NetworkSetup:
    return NetworkSetup(partial(VirtualNetwork, 1, conditions), partial(run_virtual, backend=backend))


def fake_tls_setup(conditions: NetworkConditions) -> NetworkSetup:
    """Return real TLS over a virtual network, whose own TLS encrypts nothing."""
    tls_over_virtual = tls_setup("asyncio")
    return replace(
        tls_over_virtual,
        network=lambda: SecuredNetwork(VirtualNetwork(1, conditions)),
        run_in=partial(run_virtual, seed=5),
    )


class SecuredNetwork:
    """A network that adds TLS to the streams of another network."""

    def __init__(self, inner: Network) -> None:
        self._inner = inner

    async def listen(self, host: str, port: int, *, tls: Tls | None = None) -> Any:
        listener = await self._inner.listen(host, port)
        return listener if tls is None else SecuredListener(listener, server_context(tls))

    async def connect(
        self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0
    ) -> Stream:
        stream = await self._inner.connect(host, port, timeout_s=timeout_s)
        if tls is None:
            return stream
        tls_stream = TlsStream(stream, client_context(tls), host)
        await tls_stream.handshake()
        return tls_stream


class SecuredListener:
    def __init__(self, inner: Listener, context: ssl.SSLContext) -> None:
        self._inner, self._context = inner, context
        self.address, self.aclose = inner.address, inner.aclose

    async def accept(self) -> Stream:
        return TlsStream(await self._inner.accept(), self._context, None)


def _run_real(loop: str, main: Callable[[], Awaitable[None]]) -> None:
    anyio.run(main, **LOOPS[loop])


SETUPS: dict[str, Callable[[], NetworkSetup]] = {
    **{f"{loop}": partial(plain_setup, loop) for loop in LOOPS},
    **{f"{loop}-tls": partial(tls_setup, loop) for loop in LOOPS},
    "fake": partial(fake_setup, "asyncio", NetworkConditions()),
    "fake-trio": partial(fake_setup, "trio", NetworkConditions()),
    "fake-harsh": partial(fake_setup, "asyncio", HARSH),
    "fake-tls": partial(fake_tls_setup, HARSH),
}


@pytest.fixture(params=SETUPS)
def net_setup(request: pytest.FixtureRequest) -> NetworkSetup:
    """Return each setup of `SETUPS` in turn."""
    return SETUPS[request.param]()


async def receive(stream: Stream, count: int, *, buffer_bytes: int = 65_536) -> bytes:
    """Receive `count` bytes, or fewer at the end of the stream."""
    content = bytearray()
    buffer = memoryview(bytearray(buffer_bytes))
    while len(content) < count:
        received = await stream.receive_into(buffer[: count - len(content)])
        if not received:
            break
        content += buffer[:received]
    return bytes(content)


async def receive_all(stream: Stream) -> bytes:
    """Receive all bytes up to the end of the stream."""
    return await receive(stream, 1 << 40)
