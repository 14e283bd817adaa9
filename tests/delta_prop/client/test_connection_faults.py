"""Connections that cannot work as configured: each client reports the fault at once, by name, with a fix."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
import trustme

from delta_prop.cli import main
from delta_prop.client import (
    ClientSettings,
    ForwardLink,
    Producer,
    StreamProducer,
    StreamSubscriber,
    Subscriber,
    SyncProducer,
    facts,
    jobs,
)
from delta_prop.client.ranges import RangeReader
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service
from tests.delta_prop.commands.server_thread import HOST, served
from tests.delta_prop.platform.networks import files
from tests.delta_prop.server.tokens import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from delta_prop.client import forwarding

SOON_S = 5.0
"""An error within this time counts as reported at once; after a temporary fault, clients retry for 30 s."""
TOKEN = "let-me-in"


@dataclass(frozen=True)
class Target:
    """An address with TLS and token, and parts of the expected message."""

    address: str
    expected: tuple[str, ...]
    tls: Tls | None = None
    token: str | None = None


# --- faults


@contextmanager
def plain_to_tls(data: Path) -> Iterator[Target]:
    with served(data, tls=server_tls()) as addresses:
        yield Target(addresses.protocol_address, ("speaks TLS", "--tls"))


@contextmanager
def plain_to_http(data: Path) -> Iterator[Target]:
    with served(data) as addresses:
        yield Target(addresses.http_address, ("is an HTTP port", "port=…"))


@contextmanager
def plain_to_https(data: Path) -> Iterator[Target]:
    with served(data, tls=server_tls()) as addresses:
        yield Target(addresses.http_address, ("speaks TLS", "--tls"))


@contextmanager
def tls_to_plain(data: Path) -> Iterator[Target]:
    with served(data) as addresses:
        yield Target(
            addresses.protocol_address, ("does not speak TLS", "without --tls"), tls_with_authority()
        )


@contextmanager
def tls_to_http(data: Path) -> Iterator[Target]:
    with served(data) as addresses:
        yield Target(
            addresses.http_address, ("does not speak TLS, but plain HTTP", "port=…"), tls_with_authority()
        )


@contextmanager
def tls_to_https(data: Path) -> Iterator[Target]:
    with served(data, tls=server_tls()) as addresses:
        yield Target(addresses.http_address, ("is an HTTP port", "port=…"), tls_with_authority())


@contextmanager
def another_authority(data: Path) -> Iterator[Target]:
    other_authority = data.parent / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other_authority))
    with served(data, tls=server_tls()) as addresses:
        yield Target(
            addresses.protocol_address, ("authority", "--tls-ca"), Tls(authorities=str(other_authority))
        )


@contextmanager
def certificate_expired(data: Path) -> Iterator[Target]:
    authority, yesterday = trustme.CA(), datetime.now(UTC) - timedelta(days=1)
    certificate = authority.issue_cert(HOST, not_after=yesterday)
    paths = [str(data.parent / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    with served(data, tls=Tls(paths[0], paths[1])) as addresses:
        yield Target(
            addresses.protocol_address, ("certificate has expired", "renew"), Tls(authorities=paths[2])
        )


@contextmanager
def another_name(data: Path) -> Iterator[Target]:
    with served(data, tls=server_tls()) as addresses:
        tls = replace(tls_with_authority(), server_name="other.example")
        yield Target(addresses.protocol_address, ("other.example", "--tls-name"), tls)


@contextmanager
def no_certificate(data: Path) -> Iterator[Target]:
    made_files = files()
    with served(data, tls=Tls(made_files.server, made_files.server_key, made_files.authority)) as addresses:
        yield Target(
            addresses.protocol_address, ("certificate required", "--tls-certificate"), tls_with_authority()
        )


@contextmanager
def no_token(data: Path) -> Iterator[Target]:
    with served(data, tokens=tokens()) as addresses:
        yield Target(addresses.protocol_address, ("requires a token", "--token-file"))


@contextmanager
def wrong_token(data: Path) -> Iterator[Target]:
    with served(data, tokens=tokens()) as addresses:
        yield Target(
            addresses.protocol_address, ("unknown", "expired", "delta-prop token new"), token="another"
        )


@contextmanager
def no_such_host(data: Path) -> Iterator[Target]:
    yield Target("no-such-host.invalid:7373", ("no-such-host.invalid", "correct the name"))


@contextmanager
def another_program(data: Path) -> Iterator[Target]:
    """Yield a target that answers like an SSH server."""
    with closing(socket.create_server((HOST, 0))) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n")
                    connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield Target(f"{HOST}:{listener.getsockname()[1]}", ("SSH-2.0", "port=…"))
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


FAULTS = [
    plain_to_tls, plain_to_http, plain_to_https, tls_to_plain, tls_to_http, tls_to_https,
    another_authority, certificate_expired, another_name, no_certificate, no_token, wrong_token,
    no_such_host, another_program,
]  # fmt: skip


def server_tls() -> Tls:
    return Tls(files().server, files().server_key)


def tls_with_authority() -> Tls:
    return Tls(authorities=files().authority)


def tokens() -> bytes:
    return table("all", TOKEN, publish=True, subscribe=True, forward=True, namespaces='["*"]').encode()


# --- clients


def producer(target: Target) -> None:
    async def run() -> None:
        async with Producer(target.address, name="p", token=target.token, tls=target.tls):
            pass

    anyio.run(run)


def subscriber(target: Target) -> None:
    async def run() -> None:
        async with Subscriber(target.address, "*", token=target.token, tls=target.tls):
            pass

    anyio.run(run)


def sync_producer(target: Target) -> None:
    with SyncProducer(target.address, name="p", token=target.token, tls=target.tls):
        pass


def stream_producer(target: Target) -> None:
    async def run() -> None:
        async with StreamProducer(
            target.address, name="p", stream="default", token=target.token, tls=target.tls
        ):
            pass

    anyio.run(run)


def stream_subscriber(target: Target) -> None:
    async def run() -> None:
        async with StreamSubscriber(
            target.address, "*", stream="default", token=target.token, tls=target.tls
        ):
            pass

    anyio.run(run)


def forward_link(target: Target) -> None:
    async def run() -> None:
        link: forwarding.ForwardLink = ForwardLink(target.address, token=target.token, tls=target.tls)
        link.begin(bytes(16))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run)
            try:
                await link.wait_for_watermarks()
            except (Refused, OSError) as error:
                errors.append(error)
            tasks.cancel_scope.cancel()

    errors: list[Exception] = []
    anyio.run(run)
    raise errors[0]


def get(target: Target) -> None:
    facts.get(target.address, "doc-1", token=target.token, tls=target.tls)


def ranges(target: Target) -> None:
    RangeReader(target.address, token=target.token, tls=target.tls).bounds()


def decide(target: Target) -> None:
    jobs.decide(target.address, "job", jobs.Decision.QUERY, token=target.token, tls=target.tls)


CLIENTS = [
    producer, subscriber, sync_producer, stream_producer, stream_subscriber, forward_link, get, ranges,
    decide,
]  # fmt: skip


def prompt_error(call: Callable[[], object]) -> str:
    """Return the error message of a call; check that the call fails at once."""
    began = time.monotonic()
    with pytest.raises((DeltaPropError, OSError)) as caught:
        call()
    assert time.monotonic() - began < SOON_S, caught.value
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_misconfigured_clients_report_at_once_with_the_fix(fault: object, tmp_path: Path) -> None:
    with fault(tmp_path / "facts") as target:  # type: ignore[operator]
        for client in CLIENTS:
            message = prompt_error(lambda client=client: client(target))  # type: ignore[misc]
            for part in target.expected:
                assert part in message, (client.__name__, message)


CALLS = [
    ["publish", "LINES", "--to"],
    ["subscribe", "--from"],
    ["trace", "record", "--to", "OUT", "--from"],
    ["jobs", "show", "nightly", "--to"],
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_misconfigured_commands_report_in_one_line(
    fault: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lines").write_text('{"vector_id": "a", "op": "create", "vector": [1]}\n')
    with fault(tmp_path / "facts") as target:  # type: ignore[operator]
        if target.token is not None:
            monkeypatch.setenv("DELTA_PROP_TOKEN", target.token)
        for number, call in enumerate(CALLS):
            names = {"LINES": str(tmp_path / "lines"), "OUT": str(tmp_path / f"out-{number}")}
            began = time.monotonic()
            status = main([*(names.get(one, one) for one in call), target.address, *options(target.tls)])
            assert time.monotonic() - began < SOON_S, call
            assert status in (1, 2), call
            (line,) = capsys.readouterr().err.splitlines()
            for part in target.expected:
                assert part in line, (call, line)


def options(tls: Tls | None) -> list[str]:
    if tls is None:
        return []
    values = {"--tls-ca": tls.authorities, "--tls-name": tls.server_name}
    return [part for name, value in values.items() if value is not None for part in (name, value)]


WEB_FAULTS = [
    (plain_to_https, ("speaks TLS", "--tls")),
    (tls_to_http, ("does not speak TLS", "without --tls")),
    (another_program, ("SSH-2.0", "http=…")),
    (no_such_host, ("correct the name",)),
]


@pytest.mark.parametrize(("fault", "parts"), WEB_FAULTS, ids=lambda one: getattr(one, "__name__", ""))
def test_http_requests_report_the_fault_with_its_fix(
    fault: object, parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fault(tmp_path / "facts") as target:  # type: ignore[operator]
        began = time.monotonic()
        assert main(["status", "--http", target.address, *options(target.tls)]) in (1, 2)
        assert time.monotonic() - began < SOON_S
    (line,) = capsys.readouterr().err.splitlines()
    for part in parts:
        assert part in line, line


def test_http_request_to_the_protocol_port_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(tmp_path / "facts") as addresses:
        assert main(["status", "--http", addresses.protocol_address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "http=…" in line
    assert "0xD3" in line


def test_client_with_one_wrong_address_of_two_connects(tmp_path: Path) -> None:
    with served(tmp_path / "facts") as addresses:
        wrong_first = [addresses.http_address, addresses.protocol_address]

        async def run() -> None:
            async with Producer(wrong_first, name="p"), Subscriber(wrong_first, "*"):
                pass

        anyio.run(run)
        with SyncProducer(wrong_first, name="p"):
            pass
        assert facts.describe(wrong_first).streams
        assert RangeReader(wrong_first).bounds().end_offset == 0


def test_client_waits_for_a_server_that_starts_late(tmp_path: Path) -> None:
    with closing(socket.create_server((HOST, 0))) as free:
        port = free.getsockname()[1]
    errors: list[BaseException] = []

    def connect() -> None:
        try:
            with SyncProducer(f"{HOST}:{port}", name="p") as p:
                assert p.statistics() is not None
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.3)
    with served(tmp_path / "facts", port=port):
        thread.join(20)
    assert not thread.is_alive()
    assert not errors


def test_refused_token_keeps_its_error_code(tmp_path: Path) -> None:
    with wrong_token(tmp_path / "facts") as target:
        with pytest.raises(Refused) as caught:
            get(target)
        assert caught.value.code is ErrorCode.UNAUTHORIZED


def test_permanent_fault_is_a_usage_error(tmp_path: Path) -> None:
    with plain_to_http(tmp_path / "facts") as target, pytest.raises(UsageError):
        sync_producer(target)


def test_connected_client_survives_a_wrong_server(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(site: Site) -> None:
        async with Producer(ADDRESS, name="p", world=site.world) as p, anyio.create_task_group() as tasks:
            await p.publish(Delta("a", create([1.0])))
            await site.stop()
            wrong_server = await site.network.listen("server", 7373, tls=Tls("cert.pem", "key.pem"))
            await anyio.sleep(20)  # within `reconnect_timeout_s`
            await wrong_server.aclose()
            await tasks.start(site.run)
            assert (await p.publish(Delta("b", create([1.0])))).offset == 0  # the log was in memory
            tasks.cancel_scope.cancel()

    with_service(scenario)
    warnings = [one for one in caplog.records if "speaks TLS" in one.getMessage()]
    assert [one.levelname for one in warnings].count("WARNING") == 1


def test_reconnect_to_a_wrong_server_ends_with_its_fault() -> None:
    async def scenario(site: Site) -> None:
        settings = ClientSettings(reconnect_timeout_s=30)
        async with Subscriber(ADDRESS, "*", world=site.world, settings=settings) as subscriber:
            await site.stop()
            wrong_server = await site.network.listen("server", 7373, tls=Tls("cert.pem", "key.pem"))
            with pytest.raises(Misconfigured, match="speaks TLS"):
                await subscriber.next_batch()
            await wrong_server.aclose()

    with_service(scenario)


def test_forward_link_to_a_wrong_server_fails_at_once() -> None:
    async def scenario(site: Site) -> None:
        await site.stop()
        await site.network.listen("server", 7373, tls=Tls("cert.pem", "key.pem"))
        link = ForwardLink(ADDRESS, world=site.world)
        link.begin(bytes(16))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(link.run)
            began = anyio.current_time()
            with pytest.raises(ConnectionError, match="speaks TLS"):
                await link.forward([])
            assert anyio.current_time() - began < 1
            tasks.cancel_scope.cancel()

    with_service(scenario)
