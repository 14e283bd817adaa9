"""One connection as its client sees it: requests have numbers, heartbeats their times, silence an end.

Pure: `now` is an argument, bytes come in and go out. What frames mean is for who uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.frames import Heartbeat, Subscribe, Unsubscribe
from delta_prop_wire.state import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop.client.settings import ClientSettings
    from delta_prop_wire.frames import Frame, Request


class Session:
    """A connection that was just made."""

    def __init__(self, settings: ClientSettings, now: float) -> None:
        self.connection = Connection(Role.CLIENT)
        self.round_trip_s: float | None = None
        """What the last heartbeat that was answered took."""
        self._settings = settings
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
        """What came whole. Raises PeerError."""
        while (frame := self.connection.next_event()) is not NEED_BYTES:
            self._heard_at = now
            if isinstance(frame, Heartbeat):
                self._echo_us = frame.sent_us
                if frame.echo_us is not None:
                    self.round_trip_s = max(now - frame.echo_us / 1_000_000, 0.0)
            yield frame

    def patience_s(self, now: float) -> float:
        """How long more the other side may be silent; 0: it is gone."""
        settings = self._settings
        if not self.open:
            return max(self._began + settings.handshake_s_max - now, 0.0)
        return max(self._heard_at + settings.silence_s_max - now, 0.0)


def _us(now: float) -> int:
    return max(round(now * 1_000_000), 0)
