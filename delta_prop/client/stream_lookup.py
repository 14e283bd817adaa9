"""Asks a service for a stream: its id, and its number of partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio

from delta_prop.client.errors import Reconnect
from delta_prop.client.partition_choice import stream_with_id
from delta_prop.client.reconnecting_link import ReconnectingLink
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.frames import Ack, Describe, Description, Frame, Hello, Nack, Response, StreamDescription
from delta_prop_wire.requests import join_pages

if TYPE_CHECKING:
    from delta_prop.client.connector import Connector
    from delta_prop.client.partition_choice import PartitionChoice
    from delta_prop.client.session import Session
    from delta_prop_wire.frames import Welcome
    from delta_prop_wire.stamp import LogName


async def find_partition(choice: PartitionChoice, connector: Connector) -> LogName:
    """Return the partition that a caller has named; asks the service unless it is known. Raises as below."""
    known = choice.known
    if known is not None:
        return known
    assert isinstance(choice.stream, str)
    return choice.resolve(await describe_stream(choice.stream, connector))


async def describe_stream(
    stream: str | int, connector: Connector, *, on_link: Callable[[ReconnectingLink], None] | None = None
) -> StreamDescription:
    """Ask the service of an open connector for a stream, by its name or id.

    `on_link`: gets the link at once, whose `cause` says why it has no connection.
    Raises Refused (UNKNOWN_STREAM, UNAUTHORIZED, a violation of the protocol), Unreachable, UsageError.
    """
    lookup = _Lookup(stream if isinstance(stream, str) else None, connector.token)
    link = ReconnectingLink(connector, lookup)
    if on_link is not None:
        on_link(link)

    async def run() -> None:
        try:
            await link.run()
        except ProtocolError as failure:
            lookup.failure = Refused(failure.code, failure.message)
        except Exception as failure:  # raised below, since the task group would wrap it
            lookup.failure = failure
        lookup.done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await lookup.done.wait()
        tasks.cancel_scope.cancel()
    if lookup.failure is not None:
        raise lookup.failure
    assert isinstance(lookup.found, Description)
    streams = lookup.found.streams
    return streams[0] if isinstance(stream, str) else stream_with_id(streams, stream)


class _Lookup:
    """The user of a link that sends one request. Implements `LinkProtocol`. `stream`: None for all."""

    def __init__(self, stream: str | None, token: str | None) -> None:
        self.done = anyio.Event()
        self.failure: Exception | None = None
        self.found: Response | None = None
        self._pages: list[Response] = []
        self._stream = stream
        self._token = token
        self._request: int | None = None  # its number, once it was sent on this connection

    def hello(self) -> Hello:
        return Hello(token=self._token, client="stream lookup")

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Do nothing: any service may answer."""

    def on_frame(self, frame: Frame, size: int, now: float) -> bool:
        if isinstance(frame, Nack) and self._concerns(frame):
            refusal = frame.refusal()
            if refusal.retry_after_ms is not None:
                raise Reconnect(refusal.retry_after_ms / 1000, refusal)
            raise refusal
        if not isinstance(frame, Ack) or frame.response is None or frame.correlation_id != self._request:
            return False
        self._pages.append(frame.response)
        if not frame.more:
            self.found = join_pages(self._pages)
            self.done.set()
        return True

    def _concerns(self, nack: Nack) -> bool:
        """True if it refuses the hello, the request or the connection."""
        return self._request in (None, nack.correlation_id) or nack.is_about_connection

    def data_to_send(self, session: Session, now: float) -> Sequence[bytes]:
        if self._request is not None:
            return ()
        self._request, raw = session.request(Describe(self._stream))
        return (raw,)

    def on_sent(self) -> None:
        """Do nothing."""

    def wait_s(self, now: float) -> float | None:
        return None

    def processed_offset(self) -> int | None:
        return None

    def on_disconnect(self) -> None:
        self._request = None
        self._pages.clear()
