"""A client's side of one connection: numbers requests, times heartbeats and detects silence.

Pure: `now` is an argument, bytes come in and go out. The session's user interprets the frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop.platform.connection_faults import FIRST_BYTES_MAX, protocol_fault
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.frames import Frame, Heartbeat, Hello, Nack, Request, Subscribe, Unsubscribe
from delta_prop_wire.message_rules import Phase, Role
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.addresses import Address
    from delta_prop.client.settings import ClientSettings

_NO_TOKEN = (
    "this service requires a token, and none was given: give one with token=, at the command line with "
    "--token-file FILE or DELTA_PROP_TOKEN"
)
_BAD_TOKEN = (
    "the token is unknown here, has expired, or does not allow this: give one that does (`delta-prop token "
    "new` makes them; the server's audit log names the fault)"
)


class _Heartbeats:
    """Numbers the heartbeats of both sides, and measures the round trip."""

    def __init__(self) -> None:
        self.round_trip_s: float | None = None
        self._count = 0
        self._echo_us: int | None = None  # the peer's time in its last heartbeat, which the next one returns

    def make(self, now: float, processed: int | None) -> Heartbeat:
        """Return the next heartbeat to send."""
        self._count += 1
        return Heartbeat(self._count, _to_us(now), self._echo_us, processed=processed)

    def on_received(self, beat: Heartbeat, now: float) -> None:
        """Note a heartbeat of the peer."""
        self._echo_us = beat.sent_us
        if beat.echo_us is not None:
            self.round_trip_s = max(now - beat.echo_us / 1_000_000, 0.0)


class Session:
    """The client's state of one connection."""

    def __init__(self, settings: ClientSettings, now: float, address: Address, *, secured: bool) -> None:
        """`secured`: True if the connection uses TLS."""
        self.connection = Connection(Role.CLIENT)
        self._settings = settings
        self._address = address
        self._secured = secured
        self._has_received = False  # the peer has sent a frame
        self._has_token = False
        self._started_at = self._received_at = self._sent_at = now
        self._requests = 0
        self._heartbeats = _Heartbeats()

    @property
    def round_trip_s(self) -> float | None:
        """Round-trip time of the last answered heartbeat."""
        return self._heartbeats.round_trip_s

    @property
    def is_open(self) -> bool:
        """True once the hello was answered."""
        return self.connection.phase is Phase.OPEN

    # --- sending

    def request(self, request: Request) -> tuple[int, bytes]:
        """Encode a request; return its number, which the answer names, and its bytes."""
        self._requests += 1
        if isinstance(request, Hello):
            self._has_token = request.token is not None
        return self._requests, self.connection.send(Subscribe(self._requests, request))

    def unsubscribe(self, subscription: int, *, drain: bool) -> tuple[int, bytes]:
        """Encode the end of a subscription, as `request` does."""
        self._requests += 1
        return self._requests, self.connection.send(Unsubscribe(self._requests, subscription, drain))

    def on_sent(self, now: float) -> None:
        """Note that something was sent."""
        self._sent_at = now

    def make_heartbeat(self, now: float, processed: int | None = None) -> bytes | None:
        """Return a heartbeat if one is due, else None."""
        if not self.is_open or now - self._sent_at < self._settings.heartbeat_interval_s:
            return None
        return self.connection.send(self._heartbeats.make(now, processed))

    def heartbeat_wait_s(self, now: float) -> float:
        """Return the seconds until a heartbeat is due; before the hello is answered, the full interval."""
        if not self.is_open:
            return self._settings.heartbeat_interval_s
        return max(self._sent_at + self._settings.heartbeat_interval_s - now, 0.0)

    # --- receiving

    def frames(self, now: float) -> Iterator[Frame]:
        """Yield complete frames. Raises ProtocolError; Misconfigured if the peer speaks another protocol."""
        if not self._has_received:
            self._check_first_bytes()
        while (frame := self.connection.next_event()) is not NEED_BYTES:
            self._has_received, self._received_at = True, now
            if isinstance(frame, Heartbeat):
                self._heartbeats.on_received(frame, now)
            elif isinstance(frame, Nack) and frame.code is ErrorCode.UNAUTHORIZED:
                frame = replace(frame, text=_BAD_TOKEN if self._has_token else _NO_TOKEN)
            yield frame

    def eof_error(self) -> ConnectionError:
        """Return the error for a peer that has closed its side."""
        before = (
            "" if self._has_received else " before it answered: is it the port that `serve` prints as port=…?"
        )
        return ConnectionError(f"{self._address} closed the connection{before}")

    def silence_left_s(self, now: float) -> float:
        """Return the seconds for which the peer may still be silent; 0: it timed out."""
        settings = self._settings
        if not self.is_open:
            return max(self._started_at + settings.handshake_timeout_s - now, 0.0)
        return max(self._received_at + settings.peer_timeout_s - now, 0.0)

    def _check_first_bytes(self) -> None:
        first = bytes(self.connection.receive_buffer.unread()[:FIRST_BYTES_MAX])
        if first:
            fault = protocol_fault(str(self._address), first, secured=self._secured)
            if fault is not None:
                raise fault


def _to_us(now: float) -> int:
    return max(round(now * 1_000_000), 0)
