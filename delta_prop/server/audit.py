"""One line in the log for each refusal: who, with which token, what, why. For the logger `delta_prop.audit`.

Facts stand in the record's fields, not in its message. A flood is summed up: of refusals that are alike the
first few are written, the others counted. No token is ever written, only its name; what a client sent is cut
and made printable.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.grants import Unauthorized
from delta_prop.server.limits import address_of
from delta_prop_wire.bounds import UNFIT

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.server.grants import Grant
    from delta_prop_wire.errors import PeerError, Refused
    from delta_prop_wire.spec import ErrorCode

WINDOW_S = 10.0
FLUSH_S = 1.0
LINES_PER_WINDOW = 10
KINDS_MAX = 1_000
"""Alike are refusals of one address, token and code. Beyond so many kinds new ones differ by code alone."""
WHAT_CHARS_MAX = 300
NO_TOKEN = "-"

logger = logging.getLogger("delta_prop.audit")


class Audit:
    """Writes refusals. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._windows: dict[tuple[str, str, ErrorCode], _Window] = {}
        self.refusals = 0
        """How many there were, written or not."""

    def refused(self, peer: str, grant: Grant | None, frame: str, why: Refused | PeerError) -> None:
        """Write a refusal, or count it where many alike were written just now.

        `peer`: `host:port`; `frame`: the frame's type, or another protocol's request. The cause that is
        written is the true one, which a peer is not always told.
        """
        now = self._now()
        self.refusals += 1
        token = NO_TOKEN if grant is None else grant.name
        window = self._window((address_of(host_of(peer)), token, why.code), now)
        if window.written < LINES_PER_WINDOW:
            window.written += 1
            what = why.cause if isinstance(why, Unauthorized) else why.message
            _write(peer, token, frame, why.code, what)
        else:
            window.counted += 1

    async def run(self) -> None:
        """Write how many were only counted, when their window has passed; at the end all of them."""
        try:
            while True:
                await anyio.sleep(FLUSH_S)
                self._end_windows(self._now() - WINDOW_S)
        finally:
            self._end_windows(inf)

    def _window(self, key: tuple[str, str, ErrorCode], now: float) -> _Window:
        if key not in self._windows and len(self._windows) >= KINDS_MAX:
            key = ("many addresses", "many", key[2])
        window = self._windows.get(key)
        if window is not None and now - window.began >= WINDOW_S:
            self._end(key)
            window = None
        if window is None:
            window = self._windows[key] = _Window(now)
        return window

    def _end_windows(self, began_max: float) -> None:
        for key in [key for key, window in self._windows.items() if window.began <= began_max]:
            self._end(key)

    def _end(self, key: tuple[str, str, ErrorCode]) -> None:
        counted = self._windows.pop(key).counted
        if counted:
            address, token, code = key
            fields = {"peer": address, "token": token, "code": code.name, "count": counted}
            logger.warning("refused many more", extra=fields)


class _Window:
    """What was done about one kind of refusal since the window began."""

    __slots__ = ("began", "counted", "written")

    def __init__(self, began: float) -> None:
        self.began = began
        self.written = 0
        self.counted = 0


def host_of(peer: str) -> str:
    """The host of `host:port`; of an IPv6 address without its brackets."""
    host, _, _ = peer.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or peer


def _write(peer: str, token: str, frame: str, code: ErrorCode, what: str) -> None:
    peer, frame, what = (_printable(text) for text in (peer, frame, what))
    fields = {"peer": peer, "token": token, "frame": frame, "code": code.name, "what": what}
    logger.warning("refused", extra=fields)


def _printable(text: str) -> str:
    """What ends no line and moves no cursor, and is not long."""
    return UNFIT.sub(lambda found: ascii(found[0])[1:-1], text[:WHAT_CHARS_MAX])
