"""Client for a server's HTTP port: sends requests one at a time over one connection, and reconnects once.

It accepts only JSON objects and lists of bounded size, and every request has a deadline.
"""

from __future__ import annotations

import json
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio
import h11

from delta_prop.client.addresses import Address
from delta_prop.platform.connection_faults import FIRST_BYTES_MAX, http_fault
from delta_prop.server.settings import HTTP_PORT
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop.commands.connect_options import ConnectOptions
    from delta_prop.platform.ports import Network, Stream

TIMEOUT_S = 10.0
BODY_BYTES_MAX = 64 * 1024 * 1024
_CHUNK_BYTES = 64 * 1024


class NoAnswer(DeltaPropError):
    """A server did not answer, or not with the expected JSON; the message names the reason and the fix."""


class HttpClient:
    """The HTTP port of one server. *Resources*: one connection, closed at the end of the `async with`."""

    def __init__(
        self, network: Network, connect_options: ConnectOptions, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Use the only address in `connect_options`. Raises UsageError if it is not an address."""
        self._network = network
        (text,) = connect_options.addresses
        self._address = Address.parse(text, HTTP_PORT)
        self._tls = connect_options.tls
        self.name = str(self._address)
        self._has_token = connect_options.token is not None
        self._headers = [("Host", self.name), ("Accept", "application/json")]
        if connect_options.token is not None:
            self._headers.append(("Authorization", f"Bearer {connect_options.token}"))
        self.has_answered = False
        """True once the server has answered with HTTP."""
        self._timeout_s = timeout_s
        self._stream: Stream | None = None
        self._connection_answered = False  # with HTTP, on this connection
        self._connection = h11.Connection(h11.CLIENT)

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def get(self, path: str) -> Any:
        """Return the JSON at a path. Raises NoAnswer, Misconfigured."""
        try:
            with anyio.fail_after(self._timeout_s):
                try:
                    status, body = await self._request(path)
                except ConnectionError:
                    if self._stream is None:  # connecting failed
                        raise
                    await self._close()  # the server may have closed it while it was idle
                    status, body = await self._request(path)
        except TimeoutError:
            await self._close()
            raise NoAnswer(
                f"{self.name} did not answer within {self._timeout_s:g} s: check that it is not "
                "overloaded, and is the HTTP port that `serve` prints as http=…"
            ) from None
        except (OSError, h11.RemoteProtocolError) as error:
            await self._close()
            raise NoAnswer(
                f"{self.name} cannot be queried ({error}): name the HTTP port that `serve` prints as http=…"
            ) from None
        return _parse_body(self.name, path, status, body, has_token=self._has_token)

    async def _request(self, path: str) -> tuple[int, bytes]:
        if self._stream is None:
            self._connection = h11.Connection(h11.CLIENT)
            self._connection_answered = False
            self._stream = await self._network.connect(
                self._address.host, self._address.port, tls=self._tls, timeout_s=self._timeout_s
            )
        request = h11.Request(method="GET", target=path, headers=self._headers)
        request_parts = self._connection.send(request), self._connection.send(h11.EndOfMessage())
        await self._stream.send([part for part in request_parts if part])
        status, parts, size = 0, list[bytes](), 0
        while True:
            event = await self._next_event(self._stream)
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > BODY_BYTES_MAX:
                    raise h11.RemoteProtocolError(f"its response exceeds {BODY_BYTES_MAX} bytes")
                parts.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
        if self._connection.our_state is h11.DONE and self._connection.their_state is h11.DONE:
            self._connection.start_next_cycle()
        else:
            await self._close()
        return status, b"".join(parts)

    async def _next_event(self, stream: Stream) -> Any:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            buffer = bytearray(_CHUNK_BYTES)
            count = await stream.receive_into(memoryview(buffer))
            if count == 0:
                raise ConnectionError("it ended the connection")
            if not self._connection_answered:
                first = bytes(buffer[: min(count, FIRST_BYTES_MAX)])
                fault = http_fault(self.name, first, secured=self._tls is not None)
                if fault is not None:
                    raise fault
                self._connection_answered = self.has_answered = True
            self._connection.receive_data(bytes(buffer[:count]))
        return event

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):
                await stream.aclose()


def _parse_body(name: str, path: str, status: int, body: bytes, *, has_token: bool) -> Any:
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if status in (401, 403):
        fix = "give --token-file FILE"
        if has_token:
            fix = "the given one is unknown there or not an admin's: make one with `token new NAME --admin`"
        raise NoAnswer(f"{name} shows {path} only to an admin's token: {fix}")
    if status != 200 or not isinstance(content, dict | list):
        error = content.get("error") if isinstance(content, dict) else None
        raise NoAnswer(f"{name} answers {path} with status {status}{f': {error}' if error else ''}")
    return content
