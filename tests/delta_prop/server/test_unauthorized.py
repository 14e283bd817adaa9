"""Every type of frame from every client without permission: one answer, one audit line, a closed connection.
The details are in the audit only. Frames that need no permission, such as heartbeats, are not refused.
"""

from __future__ import annotations

import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.platform.world import real_world
from delta_prop.server.access import Access
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop_wire.delta import Delta, Dot, Source, create, opaque
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    Frame,
    Heartbeat,
    Hello,
    Nack,
    OriginClaim,
    PressureLevel,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.delta_prop.platform.networks import files
from tests.delta_prop.server.raw import EARLIEST, ORIGIN, FrameClient, connected, serving
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.platform.ports import Network
    from delta_prop.server.service import Address

DOCS = '["docs"]'
SOON = "2020-09-13T12:26:50Z"  # 10 s after virtual time begins
TOKENS = (
    table("writer", "s-writer", publish=True, namespaces=DOCS, operations='["opaque"]'),
    table("reader", "s-reader", subscribe=True, namespaces=DOCS),
    table("operator", "s-operator", admin=True),
    table("old", "s-old", publish=True, subscribe=True, namespaces='["*"]', expires="2020-01-01T00:00:00Z"),
    table("brief", "s-brief", publish=True, subscribe=True, namespaces='["*"]', expires=SOON),
    table("both", "s-both", publish=True, subscribe=True, namespaces='["*"]'),
)


def batch(namespace: str = "docs", *, kind: str = "opaque") -> BatchFrame:
    operation = opaque(b"x") if kind == "opaque" else create([1.0])
    rows = [Delta(f"v{number}", operation, namespace) for number in range(2)]
    return BatchFrame(1, encode_batch(rows, origin=ORIGIN, base=1, epoch=1), ack_wanted=True)


def delta(namespace: str = "docs", *, dot: bool = False, kind: str = "opaque") -> DeltaFrame:
    operation = opaque(b"x") if kind == "opaque" else create([1.0])
    return DeltaFrame(1, Delta("v", operation, namespace, dot=Dot(ORIGIN, 1) if dot else None), True)


def hello(**more: Any) -> Subscribe:
    return Subscribe(9, Hello(**more))


def subscribe(topic: str = "ns:docs", **more: Any) -> Subscribe:
    return Subscribe(9, Subscription(1, (Topic.parse(topic),), EARLIEST, **more))


FRAMES: dict[str, Frame] = {
    "batch": batch(),
    "delta": delta(),
    "delta with a dot": delta(dot=True),
    "hello": hello(),
    "hello with origins": hello(origins=(OriginClaim(ORIGIN),)),
    "subscribe": subscribe(),
    "subscribe in a group": subscribe(group="g"),
    "unsubscribe": Unsubscribe(9, 1),
    "ack": Ack(0, processed=1, credit=Credit(1, 1)),
    "nack": Nack(0, ErrorCode.PROCESSING_FAILED, "no"),
    "backpressure": Backpressure(1, PressureLevel.OK),
    "heartbeat": Heartbeat(1),
}


INVALID_TOKENS = (
    ("no token", None, "no token was given"),
    ("unknown token", "s-nobody", "the token is unknown"),
    ("expired", "s-old", "token 'old' has expired"),
)
SCOPES: dict[str, tuple[Frame, str, str]] = {  # the frame, the name of its token, and the cause in the audit
    "batch into another namespace": (batch("mail"), "writer", "may not publish to namespace 'mail'"),
    "delta into another namespace": (delta("mail"), "writer", "may not publish to namespace 'mail'"),
    "delta with a dot into another": (
        delta("mail", dot=True),
        "writer",
        "may not publish to namespace 'mail'",
    ),
    "batch of another operation": (batch(kind="create"), "writer", "may not publish operation 'create'"),
    "delta of another operation": (delta(kind="create"), "writer", "may not publish operation 'create'"),
    "topic of another namespace": (subscribe("ns:mail"), "reader", "may not read namespace 'mail'"),
    "batch by a reader": (batch(), "reader", "may not publish"),
    "delta by a reader": (delta(), "reader", "may not publish"),
    "delta with a dot by a reader": (delta(dot=True), "reader", "may not publish"),
    "hello with origins by a reader": (FRAMES["hello with origins"], "reader", "may not publish"),
    "subscribe by a writer": (subscribe(), "writer", "may not subscribe"),
    "subscribe in a group by a writer": (subscribe(group="g"), "writer", "may not subscribe"),
    "unsubscribe by a writer": (Unsubscribe(9, 1), "writer", "may not subscribe"),
    "ack by a writer": (FRAMES["ack"], "writer", "may not subscribe"),
    "batch by an operator": (batch(), "operator", "may not publish"),
    "delta by an operator": (delta(), "operator", "may not publish"),
    "subscribe by an operator": (subscribe(), "operator", "may not subscribe"),
}


class TokenServer:
    """A server with tokens, and the checks of its refusals."""

    def __init__(
        self,
        p: Propagator,
        address: Address,
        network: Network,
        file: TokenFile,
        audit: pytest.LogCaptureFixture,
    ) -> None:
        self.p = p
        self.address = address
        self.network = network
        self.file = file
        self._audit = audit

    def audited(self) -> list[tuple[str, str, str]]:
        """Return token, code and cause of each refusal since the last call."""
        records = [record for record in self._audit.records if record.name == "delta_prop.audit"]
        refusals = [(vars(record)["token"], vars(record)["code"], vars(record)["what"]) for record in records]
        for record in records:
            fields = {
                key: value for key, value in vars(record).items() if key != "pathname"
            }  # the path of this checkout may match by chance
            assert "s-" not in str(fields), "no secret should be written"
        self._audit.clear()
        return refusals

    async def check_refused(self, client: FrameClient, token: str, cause: str) -> None:
        """Check that the client gets one refusal and then the end of the connection."""
        last, frames = None, []
        while (frame := await client.next()) is not None:
            last = frame
            frames.append(frame)
        nacks = [received for received in frames if isinstance(received, Nack)]
        assert len(nacks) == 1
        (nack,) = nacks
        assert nack is last or (isinstance(last, Ack) and last.sequence in (1, 2)), (
            "no frame should come after the refusal"
        )
        assert (nack.code, nack.text) == (ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
        assert (nack.retry_after_ms, nack.row, nack.field, nack.details) == (None, None, None, {})
        assert not any(isinstance(received, BatchFrame | DeltaFrame) for received in frames)
        assert not any(
            received.ranges or received.subscribed for received in frames if isinstance(received, Ack)
        )
        ((name, code, text),) = self.audited()
        assert (name, code) == (token, "UNAUTHORIZED")
        assert cause in text
        assert self.p.statistics().accepted == 1, "a refused frame should have no effect"


def run_scenario(scenario: Callable[[TokenServer], Awaitable[None]], audit: pytest.LogCaptureFixture) -> None:
    """Run a scenario on a server whose log holds one delta for readers."""
    audit.set_level(logging.WARNING, "delta_prop.audit")

    async def run() -> None:
        network = VirtualNetwork(1)
        world, file = virtual_world(1, network=network), TokenFile("".join(TOKENS))
        settings = ServerSettings(port=0)
        async with (
            Propagator(world=world) as p,
            serving(p, settings, access=Access(world, file)) as (_, address),
        ):
            await p.publish(Delta("first", opaque(b"1"), "docs"))
            await scenario(TokenServer(p, address, network, file, audit))

    run_virtual(run)


@pytest.mark.parametrize(
    ("case", "token", "cause"), INVALID_TOKENS, ids=[case for case, _, _ in INVALID_TOKENS]
)
@pytest.mark.parametrize("frame", FRAMES)
def test_hello_with_an_invalid_token_is_refused(
    frame: str, case: str, token: str | None, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: TokenServer) -> None:
        async with connected(server.address, server.network) as client:
            await client.send(hello(token=token), FRAMES[frame])
            await server.check_refused(client, "-", cause)

    run_scenario(scenario, caplog)


@pytest.mark.parametrize("frame", [name for name in FRAMES if not name.startswith("hello")])
def test_frame_without_hello_is_refused(frame: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: TokenServer) -> None:
        async with connected(server.address, server.network) as client:
            await client.send(FRAMES[frame])
            await server.check_refused(client, "-", "")

    run_scenario(scenario, caplog)


@pytest.mark.parametrize("case", SCOPES)
def test_frame_beyond_the_scope_is_refused(case: str, caplog: pytest.LogCaptureFixture) -> None:
    frame, token, cause = SCOPES[case]

    async def scenario(server: TokenServer) -> None:
        async with connected(server.address, server.network) as client:
            await client.hello(*([ORIGIN] if token == "writer" else []), token=f"s-{token}")
            await client.send(frame, Heartbeat(1))
            await server.check_refused(client, token, cause)

    run_scenario(scenario, caplog)


@pytest.mark.parametrize("change", ["expired", "revoked", "changed"])
@pytest.mark.parametrize("frame", ["", *FRAMES])
def test_connection_of_an_ended_token_is_closed(
    frame: str, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: TokenServer) -> None:
        token = "brief" if change == "expired" else "both"
        async with connected(server.address, server.network) as client:
            await client.hello(ORIGIN, token=f"s-{token}")
            if change != "expired":
                narrower = table("both", "s-both", admin=True)
                server.file.content = "".join(TOKENS[:-1]) + (narrower if change == "changed" else "")
            await anyio.sleep(10.6)
            if frame:  # the server closes the connection, and does not read this frame
                with suppress(ConnectionError):
                    await client.send(FRAMES[frame])
            await server.check_refused(client, token, "has expired or was revoked")

    run_scenario(scenario, caplog)


def test_revoked_token_ends_only_its_own_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: TokenServer) -> None:
        async with (
            connected(server.address, server.network) as revoked,
            connected(server.address, server.network) as other,
        ):
            await revoked.hello(token="s-both")
            await other.hello(token="s-reader")
            server.file.content = "".join(TOKENS[:-1])
            await server.check_refused(revoked, "both", "has expired or was revoked")
            await other.send(FRAMES["hello"])
            assert (await other.until(Ack)).correlation_id == 9

    run_scenario(scenario, caplog)


@pytest.mark.parametrize("token", ["writer", "reader", "operator", "both"])
def test_frames_that_need_no_permission_are_accepted_from_every_token(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: TokenServer) -> None:
        async with connected(server.address, server.network) as client:
            await client.hello(token=f"s-{token}")
            await client.send(*(FRAMES[name] for name in ("hello", "nack", "backpressure", "heartbeat")))
            assert (await client.until(Ack)).correlation_id == 9
            assert (await client.until(Heartbeat)).echo_us is None
            assert server.audited() == []

    run_scenario(scenario, caplog)


@pytest.mark.anyio
@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual tls"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_refusals_are_the_same_over_tls(mutual: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "delta_prop.audit")
    certificates, world, file = files(), real_world(), TokenFile("".join(TOKENS))
    network = world.network
    assert network is not None
    server_tls = Tls(certificates.server, certificates.server_key, certificates.authority if mutual else None)
    client_files = (certificates.client, certificates.client_key) if mutual else (None, None)
    client_tls = Tls(*client_files, authorities=certificates.authority)

    async with (
        Propagator(world=world) as p,
        serving(p, ServerSettings(port=0), access=Access(world, file), tls=server_tls) as (_, address),
    ):
        await p.publish(Delta("first", opaque(b"1"), "docs"))
        server = TokenServer(p, address, network, file, caplog)

        async def check_refused(token: str | None, frame: Frame, name: str, cause: str) -> None:
            stream = await network.connect(address.host, address.port, tls=client_tls)
            client = FrameClient(stream)
            await client.send(hello(token=token), frame)
            await server.check_refused(client, name, cause)
            await stream.aclose()

        for _, token, cause in INVALID_TOKENS:
            await check_refused(token, subscribe(), "-", cause)
        for frame, name, cause in (SCOPES["batch by a reader"], SCOPES["topic of another namespace"]):
            await check_refused(f"s-{name}", frame, name, cause)
        if mutual:  # without a certificate, even a valid token is refused
            without_certificate = Tls(authorities=certificates.authority)
            received: list[Frame] = []
            with suppress(ConnectionError, Misconfigured):
                async with aclosing(
                    await network.connect(address.host, address.port, tls=without_certificate)
                ) as stream:
                    client = FrameClient(stream)
                    await client.send(hello(token="s-both"))
                    while (frame := await client.next()) is not None:
                        received.append(frame)
            assert received == []
            assert server.audited() == []


def test_hello_without_forward_permission_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: TokenServer) -> None:
        async with connected(server.address, server.network) as client:
            await client.send(hello(source=Source.REPLICA, token="s-writer"), Heartbeat(1))
            await server.check_refused(client, "writer", "may not forward")

    run_scenario(scenario, caplog)
