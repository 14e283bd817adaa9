"""The audit log: a line per refusal with peer, token, frame and cause, for the logger `delta_prop.audit`.

The details are in the fields of the log record, not in its message. A flood is summarised: the first few
refusals of a kind are written, the others are counted. Of a token only the name is written; text from a
client is truncated and made printable.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.limits import address_of
from delta_prop.server.permissions import Permissions, Unauthorized
from delta_prop_wire.bounds import INVALID_CHARACTERS
from delta_prop_wire.errors import ProtocolError, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.platform.ports import Clock

WINDOW_S = 10.0
"""Refusals with the same address, token and code are counted together for this long."""
FLUSH_S = 1.0
LINES_PER_WINDOW = 10
WINDOWS_MAX = 1_000
"""Maximum number of windows, one per address, token and code; beyond it, refusals share one per code."""
TEXT_CHARS_MAX = 300
NO_TOKEN = "-"

logger = logging.getLogger("delta_prop.audit")


class Audit:
    """Writes refusals."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str, ErrorCode], _Window] = {}
        self.refusals = 0
        """Number of refusals, written or not."""

    def record_refusal(
        self, peer: str, permissions: Permissions | None, frame: str, refusal: Refused | ProtocolError
    ) -> None:
        """Write a refusal, or count it if many with the same address, token and code were
        written within the window.

        `peer`: `host:port`; `frame`: the frame's type, or another protocol's request. The line has
        the true cause, which the peer does not always get.
        """
        now = self._clock.now()
        self.refusals += 1
        token = NO_TOKEN if permissions is None else permissions.name
        window = self._window((address_of(host_of(peer)), token, refusal.code), now)
        if window.written < LINES_PER_WINDOW:
            window.written += 1
            cause = refusal.cause if isinstance(refusal, Unauthorized) else refusal.message
            _write(peer, token, frame, refusal.code, cause)
        else:
            window.suppressed += 1

    async def run(self) -> None:
        """Write the counts of ended windows until cancelled, then the counts of all windows."""
        try:
            while True:
                await anyio.sleep(FLUSH_S)
                self._close_windows(self._clock.now() - WINDOW_S)
        finally:
            self._close_windows(inf)

    def _window(self, key: tuple[str, str, ErrorCode], now: float) -> _Window:
        if key not in self._windows and len(self._windows) >= WINDOWS_MAX:
            key = ("many addresses", "many", key[2])
        window = self._windows.get(key)
        if window is not None and now - window.started_at >= WINDOW_S:
            self._close_window(key)
            window = None
        if window is None:
            window = self._windows[key] = _Window(now)
        return window

    def _close_windows(self, started_max: float) -> None:
        for key in [key for key, window in self._windows.items() if window.started_at <= started_max]:
            self._close_window(key)

    def _close_window(self, key: tuple[str, str, ErrorCode]) -> None:
        suppressed = self._windows.pop(key).suppressed
        if suppressed:
            address, token, code = key
            fields = {"peer": address, "token": token, "code": code.name, "count": suppressed}
            logger.warning("refused many more", extra=fields)


class _Window:
    """Counts of refusals with one address, token and code since the window started."""

    __slots__ = ("started_at", "suppressed", "written")

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.written = 0
        self.suppressed = 0


def host_of(peer: str) -> str:
    """Return the host of `host:port`, without the brackets of an IPv6 address."""
    host, _, _ = peer.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or peer


def _write(peer: str, token: str, frame: str, code: ErrorCode, cause: str) -> None:
    peer, frame, cause = (_to_printable(text) for text in (peer, frame, cause))
    fields = {"peer": peer, "token": token, "frame": frame, "code": code.name, "what": cause}
    logger.warning("refused", extra=fields)


def _to_printable(text: str) -> str:
    """Return the text truncated and without control characters."""
    return INVALID_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text[:TEXT_CHARS_MAX])
