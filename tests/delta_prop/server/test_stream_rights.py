"""A token names the streams that its rights apply to: all that a client does elsewhere is unauthorized."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.client.producer import Producer
from delta_prop.client.subscriber import Subscriber
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, Source, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Ack,
    Credit,
    Decide,
    Decision,
    DeltaFrame,
    Describe,
    Description,
    FindOffsets,
    Get,
    Hello,
    JobPart,
    Nack,
    OriginClaim,
    PartitionStart,
    Request,
    Start,
    StartAt,
    Subscribe,
    Subscription,
)
from delta_prop_wire.message_rules import UNAUTHORIZED_TEXT
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.stream_requests import AlterStream, CreateStream, DeleteStream
from delta_prop_wire.topics import ALL
from tests.delta_prop.server.raw import EARLIEST, opaque_batch
from tests.delta_prop.server.test_server_streams import CLAIM, IN_ORDERS, ask, orders_batch, serving
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.delta_prop.server.test_server_streams import Host

EVERYTHING = {"publish": True, "subscribe": True, "manage": True, "namespaces": '["*"]', "rate": "inf"}
TOKENS = (
    table("scoped", "s", streams='["orders", "web-*"]', **EVERYTHING)
    + table("other", "o", streams='["default"]', **EVERYTHING)
    + table("none", "n", streams="[]", **EVERYTHING)
    + table("forwarder", "f", streams='["orders"]', forward=True, **EVERYTHING)
)
ORDERS_ID, WEB_ID, SECRET_ID, NO_ID = 1, 2, 3, 9
UNNAMED = OriginClaim(16, 0, 0)
OFFSETS = (Start(StartAt.LATEST),)
IN_FIRST = {"stream": ORDERS_ID, "partition": 0}


def run_hosted(main: Callable[[Host], Awaitable[None]]) -> None:
    async def serve() -> None:
        async with serving(SimDisk(1), TokenFile(TOKENS)) as host:
            for name, count in (("orders", 3), ("web-a", 1), ("secret", 1)):
                await host.streams.create(name, count)
            await main(host)

    run_virtual(serve)


@pytest.fixture
def audit(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns the causes of refusals since its last call."""
    caplog.set_level(logging.WARNING, "delta_prop.audit")

    def causes() -> list[str]:
        found = [vars(record)["what"] for record in caplog.records if record.name == "delta_prop.audit"]
        caplog.clear()
        return found

    return causes


FORBIDDEN: dict[str, tuple[Hello, Request | None, str]] = {
    "hello": (Hello(stream=SECRET_ID), None, "may not use stream 'secret'"),
    "hello for an unknown stream": (Hello(stream=NO_ID), None, "stream 9: unknown"),
    "hello with an origin elsewhere": (
        Hello(stream=ORDERS_ID, origins=(OriginClaim(16, 0, SECRET_ID),)),
        None,
        "may not use stream 'secret'",
    ),
    "hello with an origin in no stream": (
        Hello(stream=ORDERS_ID, origins=(OriginClaim(16, 0, NO_ID),)),
        None,
        "stream 9: unknown",
    ),
    "hello with an origin in default": (Hello(origins=(UNNAMED,)), None, "may not use stream 'default'"),
    "hello for a job in default": (
        Hello(origins=(UNNAMED,), job=JobPart("j", 0, 1)),
        None,
        "may not use stream 'default'",
    ),
    "hello of a forwarder": (Hello(source=Source.REPLICA, token="f"), None, "may not use stream 'default'"),
    "later hello": (Hello(**IN_FIRST), Hello(), "may not use stream 'default'"),
    "later hello elsewhere": (Hello(), Hello(stream=SECRET_ID), "may not use stream 'secret'"),
    "subscription in default": (Hello(), Subscription(1, (ALL,)), "may not use stream 'default'"),
    "subscription elsewhere": (
        Hello(**IN_FIRST),
        Subscription(1, (ALL,), stream=SECRET_ID),
        "may not use stream 'secret'",
    ),
    "subscription to a partition of default": (
        Hello(**IN_FIRST),
        Subscription(1, (ALL,), partitions=(PartitionStart(0),)),
        "may not use stream 'default'",
    ),
    "subscription in no stream": (Hello(), Subscription(1, (ALL,), stream=NO_ID), "use stream 'default'"),
    "get": (Hello(), Get("v1", "rows"), "may not use stream 'default'"),
    "decide": (Hello(), Decide("j", Decision.QUERY), "may not use stream 'default'"),
    "offsets": (Hello(**IN_FIRST), FindOffsets(OFFSETS), "may not use stream 'default'"),
    "offsets elsewhere": (Hello(), FindOffsets(OFFSETS, SECRET_ID), "may not use stream 'secret'"),
    "offsets in no stream": (Hello(), FindOffsets(OFFSETS, NO_ID), "stream 9: unknown"),
    "describe": (Hello(), Describe("secret"), "may not use stream 'secret'"),
    "describe fully": (Hello(), Describe("secret", ranges=True), "may not use stream 'secret'"),
    "describe an unknown one": (Hello(), Describe("nosuch"), "may not use stream 'nosuch'"),
    "create": (Hello(), CreateStream("rows"), "may not use stream 'rows'"),
    "create the present one": (
        Hello(),
        CreateStream("secret", if_not_exists=True),
        "may not use stream 'secret'",
    ),
    "alter": (Hello(), AlterStream("secret", {}), "may not use stream 'secret'"),
    "delete": (Hello(), DeleteStream("secret"), "may not use stream 'secret'"),
    "delete in a dry run": (Hello(), DeleteStream("secret", dry_run=True), "may not use stream 'secret'"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_request_outside_the_streams_of_the_token_is_unauthorized(
    case: str, audit: Callable[[], list[str]]
) -> None:
    hello, request, cause = FORBIDDEN[case]

    async def main(host: Host) -> None:
        async with host.connected() as raw:
            answer = await ask(raw, replace(hello, token=hello.token or "s"), 1)
            if request is not None:
                assert isinstance(answer, Ack), answer
                answer = await ask(raw, request)
            assert isinstance(answer, Nack)
            number = 1 if request is None else 2
            expected = Nack(0, ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT, correlation_id=number)
            assert answer == expected
            assert await raw.next() is None
            (found,) = audit()
            assert cause in found
        assert [*host.streams.catalogue.streams] == ["default", "orders", "secret", "web-a"]
        assert [*host.streams.open_partitions()] in ([(0, 0)], [(0, 0), (1, 0)])

    run_hosted(main)


def test_delta_on_a_connection_that_only_asks_is_unauthorized(audit: Callable[[], list[str]]) -> None:
    async def main(host: Host) -> None:
        for frame in (opaque_batch(1), DeltaFrame(1, Delta("v", opaque(b"x")), ack_wanted=True)):
            async with host.connected() as raw:
                welcome = (await raw.hello(token="s")).welcome
                assert welcome is not None
                assert welcome.log is None, "the client learns nothing of the default stream"
                await raw.send(frame)
                nack = await raw.until(Nack)
                assert (nack.code, nack.text) == (ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT)
                assert await raw.next() is None
            assert len(audit()) == 1
        assert (await host.streams.open()).internals().partition.log.next_offset == 0

    run_hosted(main)


def test_rights_apply_in_the_streams_of_the_token() -> None:
    async def main(host: Host) -> None:
        async with host.connected() as raw:
            await raw.hello(token="s")
            claimed = await ask(raw, Hello(origins=(CLAIM,), **IN_ORDERS), 2)
            assert isinstance(claimed, Ack)
            assert claimed.credit is not None
            assert claimed.credit.deltas > 1_000, "the first hello that may publish brings the credit"
            await raw.send(*[orders_batch(1 + 100 * number, 100) for number in range(20)])
            await raw.until_acked(2_000)
            partitions = (PartitionStart(2, start=EARLIEST, credit=Credit(5, 1_000)),)
            granted = await ask(raw, Subscription(1, (ALL,), stream=ORDERS_ID, partitions=partitions), 3)
            assert isinstance(granted, Ack)
            found = await ask(raw, FindOffsets(OFFSETS, WEB_ID), 4)
            assert isinstance(found, Ack)
            for number, request in enumerate(
                [
                    CreateStream("web-b", 2),
                    AlterStream("web-b", {}),
                    DeleteStream("web-b"),
                    Describe("orders"),
                ],
                5,
            ):
                assert isinstance(await ask(raw, request, number), Ack)

    run_hosted(main)


async def described_names(host: Host, token: str) -> list[str]:
    async with host.connected() as raw:
        await raw.hello(token=token)
        answer = await ask(raw, Describe())
        assert isinstance(answer, Ack)
        assert isinstance(answer.response, Description)
        return [stream.name for stream in answer.response.streams]


def test_description_lists_only_the_streams_of_the_token() -> None:
    async def main(host: Host) -> None:
        assert await described_names(host, "s") == ["orders", "web-a"]
        assert await described_names(host, "o") == ["default"]
        assert await described_names(host, "n") == []

    run_hosted(main)


def test_refusal_for_an_unknown_stream_names_no_others() -> None:
    async def main(host: Host) -> None:
        async with host.connected() as raw:
            await raw.hello(token="s")
            for number, request in enumerate(
                [
                    Describe("web-x"),
                    Describe("web-x", ranges=True),
                    AlterStream("web-x", {}),
                    DeleteStream("web-x"),
                ],
                2,
            ):
                nack = await ask(raw, request, number)
                assert isinstance(nack, Nack)
                assert nack.code is ErrorCode.UNKNOWN_STREAM
                assert nack.details == {"name": "web-x"}
                assert "secret" not in nack.text
                assert "orders" not in nack.text

    run_hosted(main)


def test_client_finds_its_stream_with_a_token_for_only_that_stream() -> None:
    async def main(host: Host) -> None:
        more: dict[str, Any] = {"stream": "web-a", "token": "s", "world": host.world}
        async with Producer("server", name="p", **more) as p:
            await p.publish(Delta("a", opaque(b"x")))
        async with Subscriber("server", "*", start="earliest", **more) as s:
            assert (await anext(s)).delta.vector_id == "a"
        with pytest.raises(Refused) as refused:
            async with Producer("server", name="p", **more | {"stream": "secret"}):
                pass
        assert refused.value.code is ErrorCode.UNAUTHORIZED

    run_hosted(main)


def test_frame_for_another_stream_is_refused_as_always() -> None:
    async def main(host: Host) -> None:
        async with host.connected() as raw:
            await raw.send(Subscribe(1, Hello(origins=(CLAIM,), token="s", **IN_ORDERS)))
            await raw.until(Ack)
            await raw.send(replace(orders_batch(1), stamp=Stamp(stream=SECRET_ID, partition=2)))
            nack = await raw.until(Nack)
            assert nack.code is ErrorCode.WRONG_PARTITION
            await raw.send(replace(orders_batch(1), sequence=2))
            await raw.until_acked(2)

    run_hosted(main)
