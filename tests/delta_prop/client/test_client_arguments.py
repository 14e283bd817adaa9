"""Wrong arguments of clients: each is reported by name with its fix, without an exception group."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop import AckLevel, Delta, Dot, LogSettings, Propagator, Settings, SyncPropagator, create
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
from delta_prop.platform.ports import Tls
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_sinks import ForwardSink
from delta_prop_wire.errors import InvalidDelta, UsageError
from tests.delta_prop.client.threaded_service import served
from tests.delta_prop.client.virtual_service import ADDRESS, Site, with_service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

UNREACHABLE = "127.0.0.1:9"
MAKERS: dict[str, Callable[..., object]] = {
    "producer": lambda **more: Producer(**({"addresses": UNREACHABLE, "name": "p"} | more)),
    "subscriber": lambda addresses=UNREACHABLE, **more: Subscriber(addresses, "*", **more),
    "sync producer": lambda **more: SyncProducer(**({"addresses": UNREACHABLE, "name": "p"} | more)),
    "forward link": lambda **more: ForwardLink(**({"addresses": UNREACHABLE} | more)),
    "range reader": lambda **more: RangeReader(**({"addresses": UNREACHABLE} | more)),
    "stream producer": lambda **more: StreamProducer(
        **({"addresses": UNREACHABLE, "name": "p", "stream": "orders"} | more)
    ),
    "stream subscriber": lambda addresses=UNREACHABLE, **more: StreamSubscriber(
        addresses, "*", **({"stream": "orders"} | more)
    ),
    "facts.get": lambda **more: facts.get(**({"addresses": UNREACHABLE, "vector_id": "v"} | more)),
    "jobs.decide": lambda **more: jobs.decide(
        **({"addresses": UNREACHABLE, "job": "j", "decision": jobs.Decision.QUERY} | more)
    ),
}
WITHOUT_SETTINGS = {"facts.get", "jobs.decide"}
WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"settings": Settings()}, r"settings: type delta_prop\.api\.settings\.Settings .*ClientSettings\("),
    ({"settings": {"open_timeout_s": 1}}, r"settings: type dict .*ClientSettings\("),
    ({"tls": "ca.pem"}, r"tls: type str .*Tls\("),
    ({"tls": True}, r"tls: type bool .*Tls\("),
    ({"token": 5}, "token: it is of type int: give text"),
    ({"token": b"secret"}, "token: it is of type bytes: give text"),
]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("given", "expected"), WRONG_ARGUMENTS, ids=lambda one: str(one)[:20])
def test_wrong_argument_is_reported_when_a_client_is_made(
    maker: str, given: dict[str, Any], expected: str
) -> None:
    if maker in WITHOUT_SETTINGS and "settings" in given:
        pytest.skip("this entry point has no settings")
    with pytest.raises(UsageError, match=expected) as caught:
        MAKERS[maker](**given)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("maker", "given", "expected"),
    [
        ("producer", {"log_id": "abc"}, "log id 'abc': give 16 bytes"),
        ("subscriber", {"log_id": "abc"}, "log id 'abc': give 16 bytes"),
        ("producer", {"source": "local"}, "source 'local'.*Source.LOCAL"),
        ("sync producer", {"source": 9}, "source 9.*Source.LOCAL"),
        ("subscriber", {"sources": "local"}, "sources .*Source.LOCAL"),
        ("subscriber", {"priorities": ["high"]}, "priorities .*Priority.NORMAL"),
        ("stream producer", {"source": "local"}, "source 'local'.*Source.LOCAL"),
        ("stream producer", {"ack_level": "safe"}, "ack level 'safe'"),
        ("stream producer", {"addresses": 5}, "address 5: give host:port"),
        ("stream subscriber", {"priorities": ["high"]}, "priorities .*Priority.NORMAL"),
        ("stream subscriber", {"credit": 5}, "credit 5: give"),
        ("stream subscriber", {"start": "sometime"}, "start 'sometime': give"),
        ("stream subscriber", {"ack": "never"}, "ack 'never': give auto or manual"),
        ("stream subscriber", {"addresses": []}, "0 addresses: give"),
        ("stream subscriber", {"world": 5}, "world: type int"),
        ("subscriber", {"credit": 5}, "credit 5: give"),
        ("subscriber", {"credit": (5,)}, r"credit \(5,\): give"),
        ("producer", {"addresses": 5}, "address 5: give host:port"),
        ("sync producer", {"addresses": [5]}, "address 5: give host:port"),
        ("producer", {"world": 5}, "world: type int"),
        ("subscriber", {"world": 5}, "world: type int"),
    ],
)
def test_wrong_argument_of_one_client_is_reported(maker: str, given: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        MAKERS[maker](**given)


@pytest.mark.parametrize("stream", ["", "x" * 250, -1, 1 << 32, True, None, b"orders"])
@pytest.mark.parametrize("maker", ["stream producer", "stream subscriber"])
def test_wrong_stream_is_reported(maker: str, stream: object) -> None:
    with pytest.raises(InvalidDelta) as caught:
        MAKERS[maker](stream=stream)
    assert caught.value.field == "stream"


def test_propagator_refuses_settings_of_other_classes() -> None:
    with pytest.raises(UsageError, match=r"settings: type .*ClientSettings .*Settings\("):
        Propagator(ClientSettings())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"log: type .*Settings .*LogSettings\("):
        Propagator(log=Settings())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"settings: type .*ClientSettings .*Settings\("):
        SyncPropagator(ClientSettings())  # type: ignore[arg-type]


@pytest.mark.parametrize("link", ["host:7373", ("host", 7373), None])
def test_forward_sink_refuses_a_link_of_another_type(link: object) -> None:
    with pytest.raises(UsageError, match=r"link .*: give a ForwardLink.*ForwardLink\(\"host:port\"\)"):
        ForwardSink(link)  # type: ignore[arg-type]


# --- failures of tasks


class BrokenNetwork:
    """A network that raises an unexpected error."""

    async def connect(self, host: str, port: int, *, tls: Tls | None = None, timeout_s: float = 10.0) -> None:
        raise ZeroDivisionError("a defect")


@pytest.mark.parametrize("maker", ["producer", "subscriber", "stream producer", "stream subscriber"])
def test_unexpected_error_is_raised_without_a_group(maker: str) -> None:
    async def run() -> None:
        world = replace(virtual_world(), network=BrokenNetwork())  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError, match="a defect"):
            async with MAKERS[maker](world=world):  # type: ignore[attr-defined]
                await anyio.sleep(10)

    run_virtual(run)


# --- ack levels


@pytest.mark.parametrize("level", ["memory", "MEMORY", AckLevel.MEMORY, 0])
def test_ack_level_may_be_given_by_its_name(level: Any) -> None:
    async def scenario(site: Site) -> None:
        delta = Delta("a", create([1.0]))
        async with Producer(ADDRESS, name="p", ack_level=level, world=site.world) as p:
            assert (await p.publish(delta)).level is AckLevel.MEMORY
        p = site.propagator
        assert (await p.publish(delta, ack_level=level)).level is AckLevel.MEMORY
        assert (await p.publish_many(["b"], [[1.0]], ack_level=level)).level is AckLevel.MEMORY
        assert (await p.offer(delta, ack_level=level).wait()).level is AckLevel.MEMORY
        assert (await p.producer("x", ack_level=level).publish(delta)).level is AckLevel.MEMORY

    with_service(scenario)
    with SyncPropagator() as sync:
        assert sync.publish(Delta("a", create([1.0])), ack_level=level).level is AckLevel.MEMORY


def test_log_settings_take_a_level_by_its_name() -> None:
    assert LogSettings(read_level="logged").read_level is AckLevel.LOGGED  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["safe", 7, True, 1.0, None])
def test_invalid_level_is_refused(level: Any) -> None:
    async def scenario(site: Site) -> None:
        delta, expected = Delta("a", create([1.0])), "ack level .*: give memory, logged or durable"
        for call in (
            lambda: Producer(ADDRESS, name="p", ack_level=level),
            lambda: SyncProducer(ADDRESS, name="p", ack_level=level),
            lambda: site.propagator.offer(delta, ack_level=level),
            lambda: site.propagator.producer("x", ack_level=level),
            lambda: LogSettings(read_level=level),
        ):
            if level is None and call.__code__.co_names[0] != "LogSettings":
                continue  # for the other calls, None means the default level
            with pytest.raises(UsageError, match=expected):
                call()

    with_service(scenario)


# --- timeouts


@pytest.mark.parametrize("wrong", [-1, -0.5, float("nan"), "5", True])
def test_invalid_timeout_is_refused_everywhere(wrong: Any) -> None:
    delta = Delta("a", create([1.0]))

    async def scenario(site: Site) -> None:
        p = site.propagator
        own = p.producer("own")
        async with (
            Producer(ADDRESS, name="p", world=site.world) as remote,
            StreamProducer(ADDRESS, name="s", stream="default", world=site.world) as partitioned,
        ):
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: remote.publish(delta, timeout_s=wrong),
                lambda: remote.publish(delta, delta, timeout_s=wrong),
                lambda: remote.publish_many(["b"], [[1.0]], timeout_s=wrong),
                lambda: remote.flush(wrong),
                lambda: partitioned.publish(delta, timeout_s=wrong),
                lambda: partitioned.publish(delta, replace(delta, vector_id="b"), timeout_s=wrong),
                lambda: partitioned.publish_many(["b"], [[1.0]], timeout_s=wrong),
                lambda: partitioned.flush(wrong),
                lambda: p.publish(delta, timeout_s=wrong),
                lambda: p.publish(delta, delta, timeout_s=wrong),
                lambda: p.publish_many(["b"], [[1.0]], timeout_s=wrong),
                lambda: p.wait_visible(0, timeout_s=wrong),
                lambda: p.outcome(Dot(1, 1), timeout_s=wrong),
                lambda: p.reset("x", "earliest", timeout_s=wrong),
                lambda: p.replay("x", timeout_s=wrong),
                lambda: p.drop("x", timeout_s=wrong),
                lambda: own.publish(delta, timeout_s=wrong),
                lambda: own.outcome(1, timeout_s=wrong),
            ]
            for call in calls:
                with pytest.raises(UsageError, match=r"timeout_s .*: give 0 or more seconds"):
                    await call()
            assert not site.keys()

    with_service(scenario)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5", True])
def test_invalid_timeout_is_refused_by_blocking_calls(wrong: Any) -> None:
    delta = Delta("a", create([1.0]))
    with served() as service, SyncProducer(service.address, name="p") as p:
        receipt = p.offer(delta)
        for call in (
            lambda: p.publish(delta, timeout_s=wrong),
            lambda: p.publish_many(["b"], [[1.0]], timeout_s=wrong),
            lambda: p.flush(wrong),
            lambda: p.offer_numbered(9, delta, wrong),
            lambda: receipt.result(wrong),
            lambda: facts.get(service.address, "v", timeout_s=wrong),
            lambda: facts.find_offsets(service.address, [0], timeout_s=wrong),
            lambda: facts.describe(service.address, timeout_s=wrong),
            lambda: jobs.decide(service.address, "j", jobs.Decision.QUERY, timeout_s=wrong),
        ):
            with pytest.raises(UsageError, match=r"timeout_s .*: give"):
                call()
        p.flush()
        assert service.keys() == ["a"]
