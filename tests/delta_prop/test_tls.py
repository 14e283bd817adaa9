"""Secured streams: who is let in, what is told to who is not, and what a full stream below does."""

from __future__ import annotations

import random
import ssl
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop import sockets
from delta_prop.buffers import skip_bytes
from delta_prop.connection_faults import Misconfigured
from delta_prop.ports import Tls
from delta_prop.sockets import SocketNetwork
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual
from delta_prop.tls import TlsStream
from delta_prop.tls_contexts import client_context, server_context
from delta_prop_wire.errors import UsageError
from tests.delta_prop.networks import HOST, LOOPS, Files, files, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delta_prop.ports import Network, Stream

ON_LOOPS = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def made() -> Files:
    """An authority and certificates."""
    return files()


def both(made: Files) -> tuple[Tls, Tls]:
    """Return TLS of a server and a client, both with a certificate."""
    server = Tls(made.server, made.server_key, made.authority)
    return server, Tls(made.client, made.client_key, made.authority)


async def met(
    network: Network, server_tls: Tls | None, client_tls: Tls | None, host: str = HOST
) -> list[str]:
    """Connect a client to a server; return the error messages of both."""
    listener = await network.listen(HOST, 0, tls=server_tls)
    told = ["", ""]

    async def serve() -> None:
        server = await listener.accept()
        try:
            await server.send([b"you are in"])
            await receive_all(server)
        except ConnectionError as error:
            told[1] = str(error)
        await server.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            client = await network.connect(host, listener.address[1], tls=client_tls, timeout_s=2)
        except (OSError, Misconfigured) as error:
            told[0] = str(error)
        else:
            try:
                if client_tls is None:
                    await client.send([b"\xd3 and so on"])
                await receive(client, 10)
            except (ConnectionError, Misconfigured) as error:
                told[0] = str(error)
            await client.aclose()
    await listener.aclose()
    return told


@ON_LOOPS
def test_who_is_let_in(loop: str, made: Files) -> None:
    async def main() -> None:
        network = SocketNetwork()
        server, client = both(made)
        open_server = replace(server, authorities=None)
        assert await met(network, server, client) == ["", ""]
        assert await met(network, open_server, Tls(authorities=made.authority)) == ["", ""]
        assert await met(network, server, client, "localhost") == ["", ""]
        assert await met(network, server, replace(client, server_name="server.example")) == ["", ""]

    anyio.run(main, **LOOPS[loop])


@pytest.mark.parametrize(
    ("case", "at_client", "at_server"),
    [
        ("no certificate of the client", "certificate required", "peer did not return a certificate"),
        ("another name", "certificate is not valid for 'other.example'", "bad certificate"),
        ("unknown authority", "self-signed certificate in certificate chain", "unknown ca"),
        ("a server that does not", "does not speak TLS", ""),
        ("a client that does not", "", "wrong version number"),
    ],
)
def test_who_is_not_let_in_is_told_why(case: str, at_client: str, at_server: str, made: Files) -> None:
    async def main() -> None:
        server, client = both(made)
        server_tls, client_tls = {
            "no certificate of the client": (server, Tls(authorities=made.authority)),
            "another name": (server, replace(client, server_name="other.example")),
            "unknown authority": (server, replace(client, authorities=None)),
            "a server that does not": (None, client),
            "a client that does not": (server, None),
        }[case]
        told = await met(SocketNetwork(), server_tls, client_tls)
        assert at_client in told[0]
        assert at_server in told[1]
        assert "127.0.0.1:" in told[0] + told[1]

    anyio.run(main)


def test_nothing_older_than_1_3_is_spoken(made: Files) -> None:
    async def main() -> None:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.load_verify_locations(made.authority)
        server, _ = both(made)
        async with joined(server_context(server), old) as (one, other), anyio.create_task_group() as tasks:
            tasks.start_soon(fails, one.handshake, "unsupported protocol")
            tasks.start_soon(fails, other.handshake, "protocol version")

    run_virtual(main)


@pytest.mark.parametrize("case", ["missing", "no PEM", "another key", "encrypted", "no key", "none at all"])
def test_certificates_that_cannot_be_used_are_refused(case: str, made: Files, tmp_path: Path) -> None:
    empty, encrypted = tmp_path / "empty.pem", tmp_path / "encrypted.pem"
    empty.write_text("nothing")
    key = serialization.load_pem_private_key(Path(made.server_key).read_bytes(), None)
    form, secret = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    encrypted.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    tls, told = {
        "missing": (Tls(made.server, str(tmp_path / "none.pem")), "none.pem: No such file"),
        "no PEM": (Tls(made.server, made.server_key, str(empty)), "empty.pem"),
        "another key": (Tls(made.server, made.client_key), "key values mismatch"),
        "encrypted": (Tls(made.server, str(encrypted)), "decrypt it"),
        "no key": (Tls(made.server), "PEM"),
        "none at all": (Tls(), "tls without a certificate"),
    }[case]

    async def main() -> None:
        with pytest.raises(UsageError, match=told):
            await SocketNetwork().listen(HOST, 0, tls=tls)

    anyio.run(main)


def test_a_server_that_says_nothing_is_given_up(made: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        listener = await SocketNetwork().listen(HOST, 0)
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.05 s"):
            await SocketNetwork().connect(*listener.address, tls=both(made)[1], timeout_s=0.05)
        await listener.aclose()

    monkeypatch.setattr(sockets, "LINGER_S_MAX", 0.01)
    anyio.run(main)


def test_an_end_that_nobody_announced_is_a_break(made: Files) -> None:
    async def main() -> None:
        server, client = both(made)
        contexts = server_context(server), client_context(client)
        async with joined(*contexts) as (one, other), anyio.create_task_group() as tasks:
            tasks.start_soon(one.send, [b"whole"])
            assert await receive(other, 5) == b"whole"
            tasks.start_soon(one._transport.aclose)
            await fails(partial(receive, other, 1), "eof")

    run_virtual(main)


def test_what_was_not_taken_must_come_next(made: Files) -> None:
    async def main() -> None:
        server, client = both(made)
        async with joined(server_context(server), client_context(client)) as (one, other):
            body = random.Random(2).randbytes(300_000)
            assert other.send_now([body]) == 0  # there was no handshake
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.handshake)
                tasks.start_soon(other.handshake)
            sent = one.send_now([body])
            assert 0 < sent < len(body)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(receives, other, body)
                with pytest.raises(UsageError, match="unsent bytes"):
                    await one.send([body])
                await one.send([body[sent : sent + 10], body[sent + 10 :]])

    run_virtual(main)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 30_000), max_size=3)), max_size=5),
    st.sampled_from([300, 5000, None]),
    st.sampled_from([2000, 20_000, 100_000]),
)
@settings(max_examples=10)
def test_however_it_is_sent_it_arrives(
    made: Files, sends: list[tuple[bool, list[int]]], chunk_bytes_max: int | None, buffer_bytes: int
) -> None:
    async def main() -> None:
        server, client = both(made)
        conditions = NetworkConditions(chunk_bytes_max=chunk_bytes_max, buffer_bytes=buffer_bytes)
        async with joined(server_context(server), client_context(client), conditions) as (one, other):
            body = random.Random(3).randbytes(sum(sum(sizes) for _, sizes in sends))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.handshake)
                await one.handshake()
                tasks.start_soon(receives, other, body)
                at = 0
                for at_once, sizes in sends:
                    parts = []
                    for size in sizes:
                        parts.append(body[at : at + size])
                        at += size
                    if at_once:
                        await one.send(skip_bytes(parts, one.send_now(parts)))
                    else:
                        await one.send(parts)

    run_virtual(main)


async def receives(stream: Stream, body: bytes) -> None:
    assert await receive(stream, len(body), room=7001) == body


async def fails(call: Callable[[], Awaitable[object]], told: str) -> None:
    with pytest.raises((ConnectionError, Misconfigured), match=told):
        await call()


@asynccontextmanager
async def joined(
    server: ssl.SSLContext, client: ssl.SSLContext, conditions: NetworkConditions | None = None
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Both ends of a secured stream in virtual time, the server's first; nothing is said yet."""
    network = VirtualNetwork(1, conditions)
    listener = await network.listen(HOST, 0)
    below = await network.connect(*listener.address)
    yield TlsStream(await listener.accept(), server, None), TlsStream(below, client, HOST)
