"""The HTTP port: responses, permissions, limits, and malformed or slow clients."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.platform.connection_faults import Misconfigured
from delta_prop.platform.ports import Tls
from delta_prop.server.access import Access
from delta_prop.server.http import CONNECTIONS_MAX, HEAD_BYTES_MAX, HttpPort
from delta_prop.server.server_context import Counters, JobCounts
from delta_prop.testing import VirtualNetwork, run_virtual, virtual_world
from delta_prop.testing.network_path import NetworkConditions
from tests.delta_prop.server.tokens import TokenFile, table

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop.api.statistics import Statistics
    from delta_prop.platform.ports import Stream

PORT = 7374
TOKENS = table("ops", "t-admin", admin=True) + table("r", "t-read", subscribe=True, namespaces='["*"]')


class FakeStatus:
    """A `ServerStatus` whose reason and failure the test sets."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.fails = False

    def unready_reason(self) -> str | None:
        return self.reason

    def status(self) -> dict[str, Any]:
        if self.fails:
            raise ZeroDivisionError
        return {"log_id": "00ff"}

    def sinks(self) -> list[dict[str, Any]]:
        return [{"name": "storage", "lag": 3}]

    def statistics(self) -> Statistics | None:
        return None

    def counters(self) -> Counters | None:
        return None

    def job_counts(self) -> JobCounts | None:
        return None

    def groups(self) -> list[dict[str, Any]]:
        return []

    async def refresh(self) -> None:
        pass

    def jobs(self) -> list[dict[str, Any]]:
        return [{"job": "nightly"}]

    def connections(self) -> list[dict[str, Any]]:
        return []


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


class Client:
    """A client that sends raw bytes and reads responses."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.bytes = b""

    async def send(self, raw: bytes) -> None:
        await self.stream.send([raw])

    async def receive_more(self) -> bool:
        buffer = bytearray(4096)
        try:
            count = await self.stream.receive_into(memoryview(buffer))
        except ConnectionError:
            return False
        self.bytes += buffer[:count]
        return count > 0

    async def response(self, *, has_body: bool = True) -> Response:
        while b"\r\n\r\n" not in self.bytes:
            assert await self.receive_more(), self.bytes
        head, _, self.bytes = self.bytes.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        size = int(headers["content-length"]) if has_body else 0
        while len(self.bytes) < size:
            assert await self.receive_more()
        content, self.bytes = self.bytes[:size], self.bytes[size:]
        return Response(int(first.split()[1]), headers, content)

    async def is_closed(self) -> bool:
        return not await self.receive_more()


class HttpSite:
    """An HTTP port in virtual time, and its clients."""

    def __init__(self, network: VirtualNetwork) -> None:
        self.network = network
        self.view = FakeStatus()
        self.port: HttpPort

    async def client(self, host: str = "10.0.0.1") -> Client:
        return Client(await self.network.at(host).connect("127.0.0.1", PORT))

    async def request(self, method: str, path: str, **headers: str) -> Response:
        client = await self.client()
        lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", "Host: here", *lines, "", ""])
        await client.send(head.encode("latin-1"))
        response = await client.response(has_body=method != "HEAD")
        await client.stream.aclose()
        return response


def serve_http(
    main: Callable[[HttpSite], Awaitable[None]],
    *,
    tokens: str | None = None,
    backend: Literal["asyncio", "trio"] = "asyncio",
    conditions: NetworkConditions | None = None,
    connections_max: int = CONNECTIONS_MAX,
) -> None:
    async def run() -> None:
        network = VirtualNetwork(conditions=conditions)
        site, world = HttpSite(network), virtual_world()
        access = Access(world, None if tokens is None else TokenFile(tokens))
        port = HttpPort(network, world, site.view, access=access, port=PORT, connections_max=connections_max)
        site.port = port
        async with anyio.create_task_group() as tasks:
            assert await tasks.start(port.run) == ("127.0.0.1", PORT)
            await main(site)
            tasks.cancel_scope.cancel()
        assert port._connections.open_count == 0
        with pytest.raises(ConnectionRefusedError):
            await network.connect("127.0.0.1", PORT)

    run_virtual(run, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_path_responds(backend: Literal["asyncio", "trio"]) -> None:
    async def main(site: HttpSite) -> None:
        assert (await site.request("GET", "/healthz")).json == {"alive": True}
        assert (await site.request("GET", "/readyz")).json == {"ready": True}
        assert (await site.request("GET", "/api/status")).json == {"log_id": "00ff"}
        assert (await site.request("GET", "/api/sinks?x=1")).json == [{"name": "storage", "lag": 3}]
        metrics = await site.request("GET", "/metrics")
        assert metrics.status == 200
        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"\ndelta_prop_ready 1.0\n" in metrics.body
        assert metrics.headers["date"] == "Sun, 13 Sep 2020 12:26:40 GMT"
        assert metrics.headers["cache-control"] == "no-store"

    serve_http(main, backend=backend)


def test_metrics_have_the_openmetrics_format_on_request() -> None:
    async def main(site: HttpSite) -> None:
        response = await site.request("GET", "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert response.body.endswith(b"# EOF\n")

    serve_http(main)


def test_unready_server_gives_its_reason_and_stays_healthy() -> None:
    async def main(site: HttpSite) -> None:
        site.view.reason = "it is starting"
        response = await site.request("GET", "/readyz")
        assert (response.status, response.json) == (503, {"ready": False, "reason": "it is starting"})
        assert (await site.request("GET", "/healthz")).status == 200
        assert b"\ndelta_prop_ready 0.0\n" in (await site.request("GET", "/metrics")).body

    serve_http(main)


def test_head_returns_the_size_without_a_body() -> None:
    async def main(site: HttpSite) -> None:
        full = await site.request("GET", "/readyz")
        client = await site.client()
        await client.send(b"HEAD /readyz HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        for _ in range(2):
            response = await client.response(has_body=False)
            assert response.headers["content-length"] == str(len(full.body))
        assert client.bytes == b""
        await client.send(b"HELLO\r\n\r\n")
        assert (await client.response()).json["code"] == "BAD_REQUEST", (
            "the error response to another method should have a body"
        )

    serve_http(main)


def test_connection_serves_several_requests() -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        for _ in range(3):
            await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.response()).status == 200
            await anyio.sleep(9)
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
        assert [(await client.response()).status for _ in range(2)] == [200, 404]
        await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await client.response()).headers["connection"] == "close"
        assert await client.is_closed()
        old = await site.client()
        await old.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await old.response()).status == 200
        assert await old.is_closed()

    serve_http(main)


# --- access


@pytest.mark.parametrize("path", ["/metrics", "/api/status", "/api/sinks"])
def test_pages_except_health_and_readiness_need_admin_if_there_are_tokens(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(site: HttpSite) -> None:
        assert (await site.request("GET", path, Authorization="Bearer t-admin")).status == 200
        assert (await site.request("GET", path, Authorization="bearer  t-admin ")).status == 200
        assert (await site.request("GET", "/healthz")).status == 200
        assert (await site.request("GET", "/readyz")).status == 200
        wrong_headers = ["Bearer t-read", "Bearer wrong", "Basic dDp0", "t-admin", "Bearer", "Bearer \xff"]
        responses = [await site.request("GET", path, Authorization=header) for header in wrong_headers]
        responses.append(await site.request("GET", path))
        client = await site.client()
        duplicate_header = b"Authorization: Bearer t-admin\r\n" * 2
        await client.send(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n" + duplicate_header + b"\r\n")
        responses.append(await client.response())
        assert {(response.status, response.body) for response in responses} == {(401, responses[0].body)}
        assert responses[0].json["code"] == "UNAUTHORIZED"
        assert responses[0].json["error"].endswith("in the header `Authorization: Bearer TOKEN`")
        assert responses[0].headers["www-authenticate"].startswith("Bearer")
        assert (await site.request("HEAD", path)).status == 401

    caplog.set_level(logging.WARNING, "delta_prop.audit")
    serve_http(main, tokens=TOKENS)
    records = [vars(record) for record in caplog.records]
    assert len(records) == 9
    assert records[0]["peer"].startswith("10.0.0.1:")
    audited = [(line["token"], line["frame"], line["code"], line["what"]) for line in records]
    assert audited[0] == ("r", f"GET {path}", "UNAUTHORIZED", "the token lacks the right admin")
    assert audited[1] == ("-", f"GET {path}", "UNAUTHORIZED", "the token is unknown")
    assert audited[-1] == ("-", f"HEAD {path}", "UNAUTHORIZED", "no token was given")


# --- failures


def test_client_errors_are_json() -> None:
    async def main(site: HttpSite) -> None:
        nowhere = await site.request("GET", "/metric")
        assert nowhere.status == 404
        assert nowhere.json["code"] == "NOT_FOUND"
        assert "/api/status" in nowhere.json["error"]
        assert (await site.request("GET", "http://x/healthz")).status == 404
        for method in ("POST", "DELETE", "OPTIONS"):
            refused = await site.request(method, "/api/sinks", Content_Length="0")
            assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")

    serve_http(main)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"HELLO\r\n\r\n", 400),
        (b"\xd3\x01\x06\x00\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"GET /" + b"a" * 2 * HEAD_BYTES_MAX + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * HEAD_BYTES_MAX, 431),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 413),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
    ],
)
def test_malformed_request_gets_one_response_then_close(raw: bytes, status: int) -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        await client.send(raw)
        response = await client.response()
        assert response.status == status
        assert response.headers["connection"] == "close"
        assert response.json["error"]
        assert await client.is_closed()
        assert (await site.request("GET", "/healthz")).status == 200

    serve_http(main)


def test_silent_client_is_closed_and_partial_request_gets_408() -> None:
    async def main(site: HttpSite) -> None:
        silent, partial, closed = await site.client(), await site.client(), await site.client()
        await partial.send(b"GET /healthz HT")
        await closed.send(b"GET /he")
        await closed.stream.aclose()
        began = anyio.current_time()
        assert await silent.is_closed()
        assert anyio.current_time() - began == pytest.approx(10, abs=0.01)
        response = await partial.response()
        assert (response.status, response.json["code"]) == (408, "REQUEST_TIMEOUT")
        assert await partial.is_closed()

    serve_http(main)


def test_connection_that_sends_one_byte_per_second_is_closed() -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        for letter in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            try:
                await client.send(bytes([letter]))
            except ConnectionError:
                break
            await anyio.sleep(1)
        else:
            pytest.fail("the slow connection should be closed")
        assert 10 < anyio.current_time() < 13

    serve_http(main)


def test_client_that_reads_nothing_is_closed() -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        await client.send(b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        await anyio.sleep(9)
        assert site.port._connections.open_count == 1
        await anyio.sleep(3)
        assert site.port._connections.open_count == 0

    serve_http(main, conditions=NetworkConditions(buffer_bytes=4096))


def test_flood_of_wrong_tokens_is_summarized(caplog: pytest.LogCaptureFixture) -> None:
    async def main(site: HttpSite) -> None:
        for _ in range(30):
            await site.request("GET", "/metrics", Authorization="Bearer wrong")
        assert len(caplog.records) == 10
        await anyio.sleep(12)
        assert getattr(caplog.records[-1], "count", None) == 20

    caplog.set_level(logging.WARNING, "delta_prop.audit")
    serve_http(main, tokens=TOKENS)


def test_connections_of_one_host_do_not_block_others() -> None:
    async def main(site: HttpSite) -> None:
        crowd = [await site.client("10.0.0.9") for _ in range(8)]
        await anyio.sleep(0.1)
        assert [await client.is_closed() for client in crowd[4:]] == [True] * 4
        assert (await site.request("GET", "/healthz")).status == 200
        others = [await site.client(f"10.0.1.{i}") for i in range(5)]
        await anyio.sleep(0.1)
        assert await others[-1].is_closed()
        await anyio.sleep(10)
        assert (await site.request("GET", "/healthz")).status == 200

    serve_http(main, connections_max=8)


def test_failing_status_view_gives_a_500_response(caplog: pytest.LogCaptureFixture) -> None:
    async def main(site: HttpSite) -> None:
        site.view.fails = True
        response = await site.request("GET", "/api/status")
        assert (response.status, response.json["code"]) == (500, "INTERNAL_SERVER_ERROR")
        assert "ZeroDivision" not in response.json["error"]
        site.view.fails = False
        assert (await site.request("GET", "/api/status")).status == 200

    serve_http(main)
    assert "/api/status failed" in caplog.text
    caplog.clear()


def test_requests_survive_resets_and_small_chunks() -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        await client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        site.network.reset()
        for _ in range(3):
            assert (await site.request("GET", "/healthz")).status == 200

    serve_http(main, conditions=NetworkConditions(chunk_bytes_max=3))


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"GET ", b"/metrics", b" HTTP/1.1", b"\r\n"])))
def test_arbitrary_bytes_end_only_their_connection(parts: list[bytes]) -> None:
    async def main(site: HttpSite) -> None:
        client = await site.client()
        try:
            for part in parts:
                await client.send(part)
        except ConnectionError:
            pass
        await anyio.sleep(11)
        assert (await site.request("GET", "/healthz")).status == 200

    serve_http(main)


def test_port_with_a_certificate_serves_https_only() -> None:
    async def run() -> None:
        network, world = VirtualNetwork(), virtual_world()
        tls = Tls(certificate="server.pem", key="server.key")
        port = HttpPort(network, world, FakeStatus(), access=Access(world), port=PORT, tls=tls)
        async with anyio.create_task_group() as tasks:
            await tasks.start(port.run)
            with pytest.raises(Misconfigured):
                await network.connect("127.0.0.1", PORT)
            client = Client(await network.connect("127.0.0.1", PORT, tls=Tls()))
            await client.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.response()).status == 200
            tasks.cancel_scope.cancel()

    run_virtual(run)
