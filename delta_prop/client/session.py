"""One connection as its client sees it: requests have numbers, heartbeats their times, silence an end.

Pure: `now` is an argument, bytes come in and go out. What frames mean is for who uses it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop.misconfigured import FIRST_BYTES_MAX, no_protocol
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.frames import Heartbeat, Hello, Nack, Subscribe, Unsubscribe
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.addresses import Address
    from delta_prop.client.settings import ClientSettings
    from delta_prop_wire.frames import Frame, Request

_NO_TOKEN = (
    "this service asks for a token, and none was given: give one with token=, at the command line with "
    "--token-file FILE or DELTA_PROP_TOKEN"
)
_NOT_THIS_TOKEN = (
    "the token is unknown here, has expired, or does not allow this: give one that does (`delta-prop token "
    "new` makes them; the server's audit says what was wrong)"
)


class Session:
    """A connection that was just made."""

    def __init__(self, settings: ClientSettings, now: float, address: Address, *, secured: bool) -> None:
        """`secured`: by TLS."""
        self.connection = Connection(Role.CLIENT)
        self.round_trip_s: float | None = None
        """What the last heartbeat that was answered took."""
        self._settings = settings
        self._address = address
        self._secured = secured
        self._greeted = False  # the other side has said something of the protocol
        self._has_token = False
        self._began = self._heard_at = self._said_at = now
        self._requests = 0
        self._beats = 0
        self._echo_us: int | None = None

    @property
    def open(self) -> bool:
        """Whether the hello was answered."""
        return self.connection.phase is Phase.OPEN

    # --- what goes out

    def request(self, request: Request) -> tuple[int, bytes]:
        """The number by which an answer names it, and the bytes of a request."""
        self._requests += 1
        if isinstance(request, Hello):
            self._has_token = request.token is not None
        return self._requests, self.connection.send(Subscribe(self._requests, request))

    def unsubscribe(self, subscription: int, *, drain: bool) -> tuple[int, bytes]:
        """The same of the end of a subscription."""
        self._requests += 1
        return self._requests, self.connection.send(Unsubscribe(self._requests, subscription, drain))

    def said(self, now: float) -> None:
        """Something was sent."""
        self._said_at = now

    def beat(self, now: float, dealt_with: int | None = None) -> bytes | None:
        """A heartbeat, where it is time for one."""
        if not self.open or now - self._said_at < self._settings.heartbeat_s:
            return None
        self._beats += 1
        beat = Heartbeat(self._beats, _us(now), self._echo_us, processed=dealt_with)
        return self.connection.send(beat)

    def beat_wait_s(self, now: float) -> float:
        """How long until it is time for a heartbeat; before the hello is answered there is none."""
        if not self.open:
            return self._settings.heartbeat_s
        return max(self._said_at + self._settings.heartbeat_s - now, 0.0)

    # --- what comes in

    def frames(self, now: float) -> Iterator[Frame]:
        """Yield whole frames. Raises PeerError; Misconfigured where no server of this protocol answers."""
        if not self._greeted:
            self._check_first_bytes()
        while (frame := self.connection.next_event()) is not NEED_BYTES:
            self._greeted, self._heard_at = True, now
            if isinstance(frame, Heartbeat):
                self._echo_us = frame.sent_us
                if frame.echo_us is not None:
                    self.round_trip_s = max(now - frame.echo_us / 1_000_000, 0.0)
            elif isinstance(frame, Nack) and frame.code is ErrorCode.UNAUTHORIZED:
                frame = replace(frame, text=_NOT_THIS_TOKEN if self._has_token else _NO_TOKEN)
            yield frame

    def ended(self) -> ConnectionError:
        """Report that the other side sends no more."""
        before = "" if self._greeted else " before it answered: is it the port that `serve` prints as port=…?"
        return ConnectionError(f"{self._address} ended the connection{before}")

    def patience_s(self, now: float) -> float:
        """How long more the other side may be silent; 0: it is gone."""
        settings = self._settings
        if not self.open:
            return max(self._began + settings.handshake_s_max - now, 0.0)
        return max(self._heard_at + settings.silence_s_max - now, 0.0)

    def _check_first_bytes(self) -> None:
        view, start, end = self.connection.held.held()
        if start < end:
            first = bytes(view[start : min(end, start + FIRST_BYTES_MAX)])
            fault = no_protocol(str(self._address), first, secured=self._secured)
            if fault is not None:
                raise fault


def _us(now: float) -> int:
    return max(round(now * 1_000_000), 0)
