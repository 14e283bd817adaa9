"""The HTTP port: whether the server lives, is ready, and what it tells of itself. It changes nothing.

GET and HEAD alone, without bodies. Every wait has a deadline, every connection bounds; what a client sends
ends its own connection at worst. With tokens, all but health is for an admin's.
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
from delta_prop.server.grants import Unauthorized
from delta_prop.server.limits import Connections
from delta_prop.server.metrics import Metrics
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import MAGIC

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from delta_prop.ports import Network, Stream, Tls, World
    from delta_prop.server.access import Access
    from delta_prop.server.look import Look

UNAUTHORIZED_TEXT = (
    "no token that allows this: send one that does with the header `Authorization: Bearer TOKEN`"
)
REQUEST_S_MAX = 10.0
SEND_S_MAX = 10.0
HEAD_BYTES_MAX = 16 * 1024
CONNECTIONS_MAX = 100
CONNECTIONS_PER_HOST_SHARE = 0.5
"""So that one host, open to the bound, leaves room for whoever asks whether this lives."""
RECEIVE_BYTES = 4 * 1024
JSON = "application/json"

logger = logging.getLogger("delta_prop")


class Answer(NamedTuple):
    """What goes back."""

    status: int
    body: bytes
    type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()


class HttpPort:
    """Answers from what `look` tells at that moment.

    *Resources*: a listener, one task a connection; they end with `run`, by cancellation.
    *Errors*: OSError and UsageError where it cannot listen; nothing that a client does.
    """

    def __init__(
        self,
        network: Network,
        world: World,
        look: Look,
        *,
        access: Access,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: Tls | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """`port` 0: any free one, which `run` tells."""
        self._network = network
        self._clock = world.clock
        self._look = look
        self._metrics = Metrics(look)
        self._threads = world.new_threads()
        self._access = access
        self._audit = Audit(world.clock.now)
        self._host, self._port, self._tls = host, port, tls
        per_host_max = max(int(connections_max * CONNECTIONS_PER_HOST_SHARE), 1)
        self._connections = Connections(connections_max, per_host_max)

    async def run(self, *, task_status: TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready, with host and port, once it listens."""
        listener = await self._network.listen(self._host, self._port, tls=self._tls)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._audit.run)
                task_status.started(listener.address)
                while True:
                    self._take(await listener.accept(), tasks)
        finally:
            await listener.aclose()

    def _take(self, stream: Stream, tasks: TaskGroup) -> None:
        try:
            self._connections.enter(stream.peer_host)
        except Refused as refused:
            self._audit.refused(stream.peer, None, "HTTP", refused)
            tasks.start_soon(stream.aclose)
        else:
            tasks.start_soon(self._serve, stream)

    async def _serve(self, stream: Stream) -> None:
        client = _Client(stream)
        try:
            while await self._exchange(client):
                pass
        except ConnectionError:
            pass
        except Exception:  # a defect here must end this connection alone
            logger.exception("the HTTP connection of %s failed", stream.peer)
        finally:
            self._connections.leave(stream.peer_host)
            await stream.aclose()

    async def _exchange(self, client: _Client) -> bool:
        """One request and its answer; whether another may come. Raises ConnectionError."""
        try:
            request = await client.receive()
        except _BadRequestError as bad:
            await client.send(_mistake(bad.status, str(bad)), self._date(), last=True)
            return False
        if request is None:
            return False
        try:
            answer = await self._answer(request, client.peer)
        except Exception:  # of who tells, or who writes it down
            logger.exception("%s could not be told", request.path)
            answer = _mistake(500, "this could not be told; the server's log says why")
        return await client.send(answer, self._date())

    # --- what there is

    async def _answer(self, request: _Request, peer: str) -> Answer:
        pages = {
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/metrics": self._show_metrics,
            "/api/status": self._show_status,
            "/api/sinks": self._show_sinks,
            "/api/jobs": self._show_jobs,
        }
        page = pages.get(request.path)
        if page is None:
            return _mistake(404, f"nothing is here; there are {', '.join(pages)}")
        if request.method not in ("GET", "HEAD"):
            return _mistake(405, "nothing can be changed here: use GET or HEAD", ("Allow", "GET, HEAD"))
        if page not in (self._health, self._readiness):
            try:
                self._check(request, peer)
            except Unauthorized:
                return _mistake(401, UNAUTHORIZED_TEXT, ("WWW-Authenticate", 'Bearer realm="delta-prop"'))
        return await page(request)

    def _check(self, request: _Request, peer: str) -> None:
        grant = None
        try:
            grant = self._access.check(request.token)
            grant.check_admin()
        except Unauthorized as refused:
            self._audit.refused(peer, grant, f"{request.method} {request.path}", refused)
            raise

    async def _health(self, _: _Request) -> Answer:
        return _json(200, {"alive": True})

    async def _readiness(self, _: _Request) -> Answer:
        reason = self._look.ready()
        if reason is None:
            return _json(200, {"ready": True})
        return _json(503, {"ready": False, "reason": reason})

    async def _show_metrics(self, request: _Request) -> Answer:
        await self._look.refresh()
        scrape = self._metrics.scrape()
        text, type_ = await self._threads.run(lambda: scrape.text(request.accepts))
        return Answer(200, text, type_)

    async def _show_status(self, _: _Request) -> Answer:
        await self._look.refresh()
        return _json(200, self._look.status())

    async def _show_sinks(self, _: _Request) -> Answer:
        return _json(200, self._look.sinks())

    async def _show_jobs(self, _: _Request) -> Answer:
        return _json(200, self._look.jobs())

    def _date(self) -> str:
        return formatdate(self._clock.wall_us() / 1e6, usegmt=True)


class _Request(NamedTuple):
    """What is looked at of a request. `accepts`: the types of content that the client reads."""

    method: str
    path: str
    token: str | None
    accepts: str


class _BadRequestError(Exception):
    """No request can be made of what came; the answer to it is the last one."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


class _Client:
    """One connection: its bytes on one side, requests and answers on the other."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._wants_head_alone = False
        self.peer = stream.peer

    async def receive(self) -> _Request | None:
        """The next request; None where no other comes. Raises _BadRequestError, ConnectionError."""
        self._wants_head_alone = False
        try:
            with anyio.move_on_after(REQUEST_S_MAX):
                event = await self._next_event()
                if not isinstance(event, h11.Request):
                    return None
                if not isinstance(self._protocol.next_event(), h11.EndOfMessage):
                    raise _BadRequestError(413, "a request has no body here")
                self._wants_head_alone = event.method == b"HEAD"
                return _read(event)
        except h11.RemoteProtocolError as error:
            raise _BadRequestError(error.error_status_hint, str(error)) from None
        if not self._protocol.trailing_data[0]:
            return None  # it had nothing to ask
        raise _BadRequestError(408, f"the request was not whole within {REQUEST_S_MAX:g} s")

    async def send(self, answer: Answer, date: str, *, last: bool = False) -> bool:
        """Send it, whole; whether another request may come. Raises ConnectionError."""
        headers = [
            ("Date", date),
            ("Content-Type", answer.type),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            *answer.headers,
            *([("Connection", "close")] if last else []),
        ]
        protocol = self._protocol
        parts = [protocol.send(h11.Response(status_code=answer.status, headers=headers))]
        if not self._wants_head_alone:
            parts.append(protocol.send(h11.Data(data=answer.body)))
        parts.append(protocol.send(h11.EndOfMessage()))
        with anyio.move_on_after(SEND_S_MAX) as sending:
            await self._stream.send([part for part in parts if part])
        if sending.cancelled_caught or (protocol.our_state, protocol.their_state) != (h11.DONE, h11.DONE):
            return False
        protocol.start_next_cycle()
        return True

    async def _next_event(self) -> object:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            count = await self._stream.receive_into(self._buffer)
            if count and self._buffer[0] == MAGIC and not self._protocol.trailing_data[0]:
                raise _BadRequestError(400, "this is the HTTP port: the protocol 0xD3 has another one")
            self._protocol.receive_data(bytes(self._buffer[:count]))
        return event


def _read(event: h11.Request) -> _Request:
    found: dict[bytes, list[str]] = {}
    for name, value in event.headers:
        found.setdefault(name, []).append(value.decode("latin-1"))
    path = event.target.decode("ascii").partition("?")[0]
    accepts = ",".join(found.get(b"accept", []))
    return _Request(event.method.decode("ascii"), path, _bearer(found.get(b"authorization", [])), accepts)


def _bearer(values: list[str]) -> str | None:
    """The token of the one Authorization header."""
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _json(status: int, value: object, *headers: tuple[str, str]) -> Answer:
    return Answer(status, json.dumps(value).encode() + b"\n", JSON, headers)


def _mistake(status: int, told: str, *headers: tuple[str, str]) -> Answer:
    """What was wrong, as JSON: the status' name, and a sentence."""
    return _json(status, {"code": HTTPStatus(status).name, "error": told}, *headers)
