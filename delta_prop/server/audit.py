"""The audit log: a line per refusal with peer, token, frame and cause, for the logger `delta_prop.audit`.

Facts are in the record's fields, not in its message. A flood is summarised: the first few refusals of a kind
are written, the others counted. No token is ever written, only its name; text from a client is truncated and
made printable.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.limits import address_of
from delta_prop.server.permissions import Unauthorized
from delta_prop_wire.bounds import INVALID_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.server.permissions import Permissions
    from delta_prop_wire.errors import ProtocolError, Refused
    from delta_prop_wire.spec import ErrorCode

WINDOW_S = 10.0
FLUSH_S = 1.0
LINES_PER_WINDOW = 10
KINDS_MAX = 1_000
"""A kind is an address, token and code. Beyond so many kinds, new ones differ only by code."""
WHAT_CHARS_MAX = 300
NO_TOKEN = "-"

logger = logging.getLogger("delta_prop.audit")


class Audit:
    """Writes refusals. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._windows: dict[tuple[str, str, ErrorCode], _Window] = {}
        self.refusals = 0
        """Number of refusals, written or not."""

    def record_refusal(
        self, peer: str, permissions: Permissions | None, frame: str, why: Refused | ProtocolError
    ) -> None:
        """Write a refusal, or count it if many of its kind were written within the window.

        `peer`: `host:port`; `frame`: the frame's type, or another protocol's request. The cause written is
        the true one, which the peer does not always get.
        """
        now = self._now()
        self.refusals += 1
        token = NO_TOKEN if permissions is None else permissions.name
        window = self._window((address_of(host_of(peer)), token, why.code), now)
        if window.written < LINES_PER_WINDOW:
            window.written += 1
            what = why.cause if isinstance(why, Unauthorized) else why.message
            _write(peer, token, frame, why.code, what)
        else:
            window.suppressed += 1

    async def run(self) -> None:
        """Write the counts of windows that have passed; at the end those of all windows."""
        try:
            while True:
                await anyio.sleep(FLUSH_S)
                self._close_windows(self._now() - WINDOW_S)
        finally:
            self._close_windows(inf)

    def _window(self, key: tuple[str, str, ErrorCode], now: float) -> _Window:
        if key not in self._windows and len(self._windows) >= KINDS_MAX:
            key = ("many addresses", "many", key[2])
        window = self._windows.get(key)
        if window is not None and now - window.started_at >= WINDOW_S:
            self._close_window(key)
            window = None
        if window is None:
            window = self._windows[key] = _Window(now)
        return window

    def _close_windows(self, began_max: float) -> None:
        for key in [key for key, window in self._windows.items() if window.started_at <= began_max]:
            self._close_window(key)

    def _close_window(self, key: tuple[str, str, ErrorCode]) -> None:
        counted = self._windows.pop(key).suppressed
        if counted:
            address, token, code = key
            fields = {"peer": address, "token": token, "code": code.name, "count": counted}
            logger.warning("refused many more", extra=fields)


class _Window:
    """Refusals of one kind since the window began."""

    __slots__ = ("started_at", "suppressed", "written")

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.written = 0
        self.suppressed = 0


def host_of(peer: str) -> str:
    """Return the host of `host:port`; of an IPv6 address without its brackets."""
    host, _, _ = peer.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or peer


def _write(peer: str, token: str, frame: str, code: ErrorCode, what: str) -> None:
    peer, frame, what = (_to_printable(text) for text in (peer, frame, what))
    fields = {"peer": peer, "token": token, "frame": frame, "code": code.name, "what": what}
    logger.warning("refused", extra=fields)


def _to_printable(text: str) -> str:
    """Return the text truncated and without control characters."""
    return INVALID_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text[:WHAT_CHARS_MAX])
