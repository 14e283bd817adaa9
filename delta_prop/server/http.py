"""The HTTP port: health, readiness, metrics and status of the server, all read-only.

GET and HEAD only, without bodies. Every wait has a deadline, and connections are limited; a client can at
worst end its own connection. If tokens are required, all pages except health and readiness need one with the
right `admin`.
"""

from __future__ import annotations

import json
import logging
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

import anyio
import h11

from delta_prop.server.audit import Audit
from delta_prop.server.limits import ConnectionLimiter
from delta_prop.server.metrics import Metrics
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import MAGIC

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from delta_prop.platform.ports import Network, Stream, Tls, World
    from delta_prop.server.access import Access
    from delta_prop.server.server_status import ServerStatus

UNAUTHORIZED_TEXT = (
    "no token that allows this: send one that does in the header `Authorization: Bearer TOKEN`"
)
REQUEST_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0
HEAD_BYTES_MAX = 16 * 1024
CONNECTIONS_MAX = 100
CONNECTIONS_PER_HOST_SHARE = 0.5
"""Share of the connections that one host may have; the rest stays for the health checks of others."""
RECEIVE_BYTES = 4 * 1024
JSON = "application/json"

logger = logging.getLogger("delta_prop")


class HttpResponse(NamedTuple):
    """A response to send."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class HttpPort:
    """Serves the pages over HTTP; it reads the `ServerStatus` at each request.

    *Resources*: a listener, one task per connection; they end with `run`, by cancellation.
    *Errors*: OSError and UsageError if it cannot listen; none for anything that a client does.
    """

    def __init__(
        self,
        network: Network,
        world: World,
        view: ServerStatus,
        *,
        access: Access,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`port`: 0 for any free port, which `run` reports."""
        self._network = network
        self._clock = world.clock
        self._view = view
        self._metrics = Metrics(view)
        self._threads = world.new_threads()
        self._access = access
        self._audit = Audit(world.clock)
        self._host, self._port, self._tls = host, port, tls
        per_host_max = max(int(connections_max * CONNECTIONS_PER_HOST_SHARE), 1)
        self._connections = ConnectionLimiter(connections_max, per_host_max)

    async def run(self, *, task_status: TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; reports the host and port as started once it listens."""
        listener = await self._network.listen(self._host, self._port, tls=self._tls)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._audit.run)
                task_status.started(listener.address)
                while True:
                    self._accept(await listener.accept(), tasks)
        finally:
            await listener.aclose()

    def _accept(self, stream: Stream, tasks: TaskGroup) -> None:
        try:
            self._connections.enter(stream.peer_host)
        except Refused as refused:
            self._audit.record_refusal(stream.peer, None, "HTTP", refused)
            tasks.start_soon(stream.aclose)
        else:
            tasks.start_soon(self._serve, stream)

    async def _serve(self, stream: Stream) -> None:
        client = _HttpConnection(stream)
        try:
            while await self._exchange(client):
                pass
        except ConnectionError:
            pass
        except Exception:  # a defect here must end only this connection
            logger.exception("the HTTP connection of %s failed", stream.peer)
        finally:
            self._connections.leave(stream.peer_host)
            await stream.aclose()

    async def _exchange(self, client: _HttpConnection) -> bool:
        """Handle one request; return True if another may come. Raises ConnectionError."""
        try:
            request = await client.receive()
        except _BadRequestError as error:
            await client.send(_error_response(error.status, str(error)), self._date(), is_last=True)
            return False
        if request is None:
            return False
        try:
            response = await self._respond(request, client.peer)
        except Exception:  # of the view, or of encoding its response
            logger.exception("%s failed", request.path)
            response = _error_response(500, "the request failed: see the server's log")
        return await client.send(response, self._date())

    # --- pages

    async def _respond(self, request: _Request, peer: str) -> HttpResponse:
        pages = {
            "/healthz": self._show_health,
            "/readyz": self._show_readiness,
            "/metrics": self._show_metrics,
            "/api/status": self._show_status,
            "/api/sinks": self._show_sinks,
            "/api/jobs": self._show_jobs,
        }
        page = pages.get(request.path)
        if page is None:
            return _error_response(
                404, f"path {request.path!r:.80}: not found: use one of {', '.join(pages)}"
            )
        if request.method not in ("GET", "HEAD"):
            return _error_response(
                405,
                f"method {request.method!r:.20}: nothing can be changed here: use GET or HEAD",
                ("Allow", "GET, HEAD"),
            )
        if page not in (self._show_health, self._show_readiness):
            try:
                self._check_admin(request, peer)
            except Unauthorized:
                return _error_response(
                    401, UNAUTHORIZED_TEXT, ("WWW-Authenticate", 'Bearer realm="delta-prop"')
                )
        return await page(request)

    def _check_admin(self, request: _Request, peer: str) -> None:
        permissions = None
        try:
            permissions = self._access.check(request.token)
            permissions.check_admin()
        except Unauthorized as refused:
            self._audit.record_refusal(peer, permissions, f"{request.method} {request.path}", refused)
            raise

    async def _show_health(self, _: _Request) -> HttpResponse:
        return _json_response(200, {"alive": True})

    async def _show_readiness(self, _: _Request) -> HttpResponse:
        reason = self._view.unready_reason()
        if reason is None:
            return _json_response(200, {"ready": True})
        return _json_response(503, {"ready": False, "reason": reason})

    async def _show_metrics(self, request: _Request) -> HttpResponse:
        await self._view.refresh()
        scrape = self._metrics.scrape()
        body, content_type = await self._threads.run(lambda: scrape.text(request.accepts))
        return HttpResponse(200, body, content_type)

    async def _show_status(self, _: _Request) -> HttpResponse:
        await self._view.refresh()
        return _json_response(200, self._view.status())

    async def _show_sinks(self, _: _Request) -> HttpResponse:
        return _json_response(200, self._view.sinks())

    async def _show_jobs(self, _: _Request) -> HttpResponse:
        return _json_response(200, self._view.jobs())

    def _date(self) -> str:
        return formatdate(self._clock.wall_us() / 1e6, usegmt=True)


class _Request(NamedTuple):
    """The parts of a request that are used. `accepts`: the content types that the client accepts."""

    method: str
    path: str
    token: str | None
    accepts: str


class _BadRequestError(Exception):
    """The received bytes are not a valid request; the response to them is the last one."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _HttpConnection:
    """One connection: bytes on one side, requests and responses on the other."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._is_head_request = False
        self.peer = stream.peer

    async def receive(self) -> _Request | None:
        """Return the next request; None if none comes. Raises _BadRequestError, ConnectionError."""
        self._is_head_request = False
        try:
            with anyio.move_on_after(REQUEST_TIMEOUT_S):
                event = await self._next_event()
                if not isinstance(event, h11.Request):
                    return None
                if not isinstance(self._protocol.next_event(), h11.EndOfMessage):
                    raise _BadRequestError(413, "this request has a body: send it without one")
                self._is_head_request = event.method == b"HEAD"
                return _parse_request(event)
        except h11.RemoteProtocolError as error:
            raise _BadRequestError(error.error_status_hint, str(error)) from None
        if not self._protocol.trailing_data[0]:
            return None  # the client sent nothing
        raise _BadRequestError(408, f"the request was not complete within {REQUEST_TIMEOUT_S:g} s: retry")

    async def send(self, response: HttpResponse, date: str, *, is_last: bool = False) -> bool:
        """Send a complete response; return True if another request may come. Raises ConnectionError."""
        headers = [
            ("Date", date),
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
            *([("Connection", "close")] if is_last else []),
        ]
        protocol = self._protocol
        parts = [protocol.send(h11.Response(status_code=response.status, headers=headers))]
        if not self._is_head_request:
            parts.append(protocol.send(h11.Data(data=response.body)))
        parts.append(protocol.send(h11.EndOfMessage()))
        with anyio.move_on_after(SEND_TIMEOUT_S) as send_scope:
            await self._stream.send([part for part in parts if part])
        if send_scope.cancelled_caught or (protocol.our_state, protocol.their_state) != (h11.DONE, h11.DONE):
            return False
        protocol.start_next_cycle()
        return True

    async def _next_event(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            count = await self._stream.receive_into(self._buffer)
            if count and self._buffer[0] == MAGIC and not self._protocol.trailing_data[0]:
                raise _BadRequestError(400, "this is the HTTP port: use the other port for protocol 0xD3")
            self._protocol.receive_data(bytes(self._buffer[:count]))
        return event


def _parse_request(event: h11.Request) -> _Request:
    headers: dict[bytes, list[str]] = {}
    for name, value in event.headers:
        headers.setdefault(name, []).append(value.decode("latin-1"))
    path = event.target.decode("ascii").partition("?")[0]
    accepts = ",".join(headers.get(b"accept", []))
    return _Request(
        event.method.decode("ascii"), path, _bearer_token(headers.get(b"authorization", [])), accepts
    )


def _bearer_token(values: list[str]) -> str | None:
    """Return the token of the Authorization header; None unless there is exactly one."""
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _json_response(status: int, value: object, *headers: tuple[str, str]) -> HttpResponse:
    return HttpResponse(status, json.dumps(value).encode() + b"\n", JSON, headers)


def _error_response(status: int, message: str, *headers: tuple[str, str]) -> HttpResponse:
    """Return an error as JSON: the name of the status, and a message."""
    return _json_response(status, {"code": HTTPStatus(status).name, "error": message}, *headers)
