"""TLS streams: accepted and rejected handshakes, error messages, and transports that accept only a part
of what is sent."""

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

from delta_prop.platform import sockets
from delta_prop.platform.buffers import skip_bytes
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.platform.sockets import SocketNetwork
from delta_prop.platform.tls import TlsStream
from delta_prop.platform.tls_contexts import client_context, server_context
from delta_prop.testing import NetworkConditions, VirtualNetwork, run_virtual
from delta_prop_wire.errors import UsageError
from tests.delta_prop.platform.networks import HOST, LOOPS, Files, files, receive, receive_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from delta_prop.platform.ports import Network, Stream

ON_LOOPS = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def certificates() -> Files:
    """Return an authority and certificates."""
    return files()


def tls_pair(certificates: Files) -> tuple[Tls, Tls]:
    """Return the TLS settings of a server and of a client, both with a certificate."""
    server = Tls(certificates.server, certificates.server_key, certificates.authority)
    return server, Tls(certificates.client, certificates.client_key, certificates.authority)


async def connect_pair(
    network: Network, server_tls: Tls | None, client_tls: Tls | None, host: str = HOST
) -> list[str]:
    """Connect a client to a server; return the error messages of both."""
    listener = await network.listen(HOST, 0, tls=server_tls)
    errors = ["", ""]

    async def serve() -> None:
        server = await listener.accept()
        try:
            await server.send([b"you are in"])
            await receive_all(server)
        except ConnectionError as error:
            errors[1] = str(error)
        await server.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        try:
            client = await network.connect(host, listener.address[1], tls=client_tls, timeout_s=2)
        except (OSError, Misconfigured) as error:
            errors[0] = str(error)
        else:
            try:
                if client_tls is None:
                    await client.send([b"\xd3 and so on"])
                await receive(client, 10)
            except (ConnectionError, Misconfigured) as error:
                errors[0] = str(error)
            await client.aclose()
    await listener.aclose()
    return errors


@ON_LOOPS
def test_valid_certificates_are_accepted(loop: str, certificates: Files) -> None:
    async def main() -> None:
        network = SocketNetwork()
        server, client = tls_pair(certificates)
        server_without_client_check = replace(server, authorities=None)
        assert await connect_pair(network, server, client) == ["", ""]
        assert await connect_pair(
            network, server_without_client_check, Tls(authorities=certificates.authority)
        ) == ["", ""]
        assert await connect_pair(network, server, client, "localhost") == ["", ""]
        assert await connect_pair(network, server, replace(client, server_name="server.example")) == ["", ""]

    anyio.run(main, **LOOPS[loop])


@pytest.mark.parametrize(
    ("case", "at_client", "at_server"),
    [
        ("no client certificate", "certificate required", "peer did not return a certificate"),
        ("another name", "certificate is not valid for 'other.example'", "bad certificate"),
        ("unknown authority", "self-signed certificate in certificate chain", "unknown ca"),
        ("a server without TLS", "does not speak TLS", ""),
        ("a client without TLS", "", "wrong version number"),
    ],
)
def test_failed_handshake_names_its_cause(
    case: str, at_client: str, at_server: str, certificates: Files
) -> None:
    async def main() -> None:
        server, client = tls_pair(certificates)
        server_tls, client_tls = {
            "no client certificate": (server, Tls(authorities=certificates.authority)),
            "another name": (server, replace(client, server_name="other.example")),
            "unknown authority": (server, replace(client, authorities=None)),
            "a server without TLS": (None, client),
            "a client without TLS": (server, None),
        }[case]
        errors = await connect_pair(SocketNetwork(), server_tls, client_tls)
        assert at_client in errors[0]
        assert at_server in errors[1]
        assert "127.0.0.1:" in errors[0] + errors[1]

    anyio.run(main)


def test_tls_older_than_1_3_is_rejected(certificates: Files) -> None:
    async def main() -> None:
        old_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old_context.maximum_version = ssl.TLSVersion.TLSv1_2
        old_context.load_verify_locations(certificates.authority)
        server, _ = tls_pair(certificates)
        async with (
            secured_pair(server_context(server), old_context) as (server_stream, client_stream),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(expect_failure, server_stream.handshake, "unsupported protocol")
            tasks.start_soon(expect_failure, client_stream.handshake, "protocol version")

    run_virtual(main)


@pytest.mark.parametrize("case", ["missing", "no PEM", "another key", "encrypted", "no key", "none at all"])
def test_unusable_certificates_are_rejected(case: str, certificates: Files, tmp_path: Path) -> None:
    empty, encrypted = tmp_path / "empty.pem", tmp_path / "encrypted.pem"
    empty.write_text("nothing")
    key = serialization.load_pem_private_key(Path(certificates.server_key).read_bytes(), None)
    key_format, encryption = (
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    encrypted.write_bytes(key.private_bytes(serialization.Encoding.PEM, key_format, encryption))
    tls, message = {
        "missing": (Tls(certificates.server, str(tmp_path / "none.pem")), "none.pem: No such file"),
        "no PEM": (Tls(certificates.server, certificates.server_key, str(empty)), "empty.pem"),
        "another key": (Tls(certificates.server, certificates.client_key), "key values mismatch"),
        "encrypted": (Tls(certificates.server, str(encrypted)), "decrypt it"),
        "no key": (Tls(certificates.server), "PEM"),
        "none at all": (Tls(), "tls without a certificate"),
    }[case]

    async def main() -> None:
        with pytest.raises(UsageError, match=message):
            await SocketNetwork().listen(HOST, 0, tls=tls)

    anyio.run(main)


def test_silent_server_times_out(certificates: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        listener = await SocketNetwork().listen(HOST, 0)
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.05 s"):
            await SocketNetwork().connect(*listener.address, tls=tls_pair(certificates)[1], timeout_s=0.05)
        await listener.aclose()

    monkeypatch.setattr(sockets, "LINGER_S_MAX", 0.01)
    anyio.run(main)


def test_unannounced_end_of_stream_raises(certificates: Files) -> None:
    async def main() -> None:
        server, client = tls_pair(certificates)
        contexts = server_context(server), client_context(client)
        async with (
            secured_pair(*contexts) as (server_stream, client_stream),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(server_stream.send, [b"whole"])
            assert await receive(client_stream, 5) == b"whole"
            tasks.start_soon(server_stream._transport.aclose)
            await expect_failure(partial(receive, client_stream, 1), "eof")

    run_virtual(main)


def test_send_must_continue_with_unsent_bytes(certificates: Files) -> None:
    async def main() -> None:
        server, client = tls_pair(certificates)
        async with secured_pair(server_context(server), client_context(client)) as (
            server_stream,
            client_stream,
        ):
            body = random.Random(2).randbytes(300_000)
            assert client_stream.send_now([body]) == 0  # no handshake yet
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server_stream.handshake)
                tasks.start_soon(client_stream.handshake)
            sent = server_stream.send_now([body])
            assert 0 < sent < len(body)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(expect_bytes, client_stream, body)
                with pytest.raises(UsageError, match="unsent bytes"):
                    await server_stream.send([body])
                await server_stream.send([body[sent : sent + 10], body[sent + 10 :]])

    run_virtual(main)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 30_000), max_size=3)), max_size=5),
    st.sampled_from([300, 5000, None]),
    st.sampled_from([2000, 20_000, 100_000]),
)
@settings(max_examples=10)
def test_any_mix_of_sends_arrives_complete(
    certificates: Files, sends: list[tuple[bool, list[int]]], chunk_bytes_max: int | None, buffer_bytes: int
) -> None:
    async def main() -> None:
        server, client = tls_pair(certificates)
        conditions = NetworkConditions(chunk_bytes_max=chunk_bytes_max, buffer_bytes=buffer_bytes)
        async with secured_pair(server_context(server), client_context(client), conditions) as (
            server_stream,
            client_stream,
        ):
            body = random.Random(3).randbytes(sum(sum(sizes) for _, sizes in sends))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client_stream.handshake)
                await server_stream.handshake()
                tasks.start_soon(expect_bytes, client_stream, body)
                position = 0
                for use_send_now, sizes in sends:
                    parts = []
                    for size in sizes:
                        parts.append(body[position : position + size])
                        position += size
                    if use_send_now:
                        await server_stream.send(skip_bytes(parts, server_stream.send_now(parts)))
                    else:
                        await server_stream.send(parts)

    run_virtual(main)


async def expect_bytes(stream: Stream, body: bytes) -> None:
    assert await receive(stream, len(body), buffer_bytes=7001) == body


async def expect_failure(call: Callable[[], Awaitable[object]], message: str) -> None:
    with pytest.raises((ConnectionError, Misconfigured), match=message):
        await call()


@asynccontextmanager
async def secured_pair(
    server: ssl.SSLContext, client: ssl.SSLContext, conditions: NetworkConditions | None = None
) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Yield both ends of a TLS stream in virtual time, the server's first, before the handshake."""
    network = VirtualNetwork(1, conditions)
    listener = await network.listen(HOST, 0)
    transport = await network.connect(*listener.address)
    yield TlsStream(await listener.accept(), server, None), TlsStream(transport, client, HOST)
