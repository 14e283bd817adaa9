"""Who may connect: tokens against a file of their hashes, which may change while the server runs.

A new file that cannot be used changes nothing and is told; a token that is taken out, changed or expired
ends its connections within seconds.
"""

from __future__ import annotations

import hmac
import logging
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.grants import EVERYTHING, Grant, Unauthorized
from delta_prop.server.tokens import FILE_BYTES_MAX, TOKEN_CHARS_MAX, Usual, digest_of, parse_tokens
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import World
    from delta_prop.server.tokens import Token

LOOK_AGAIN_S = 1.0

logger = logging.getLogger("delta_prop")


class Access:
    """Grants what tokens say. Without a file of tokens everybody may do everything.

    *Resources*: `run` owns the looking at the file, on a thread of its own; it ends by cancellation.
    *Errors*: a file that cannot be read or parsed is refused at the start (UsageError), later only told.
    """

    def __init__(
        self, world: World, read: Callable[[], bytes] | None = None, usual: Usual | None = None
    ) -> None:
        """`read`: the file's bytes, from a call that may block; None: no tokens.

        `changed`, where it is set, is called when some token holds no more: whoever has connections asks
        `still_holds` for each. Raises UsageError, OSError.
        """
        self._clock = world.clock
        self._threads = world.new_threads()
        self._read = read
        self._usual = usual or Usual()
        self.changed: Callable[[], None] | None = None
        self._raw = b""
        self._tokens: tuple[Token, ...] = ()
        self._looked_at_us = world.clock.wall_us()
        self._trouble: str | None = None
        if read is not None:
            self._raw = read()
            self._tokens = _parse(self._raw, self._usual)

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything."""
        return self._read is None

    def check(self, token: str | None) -> Grant:
        """What a token may do. Raises Unauthorized, the same whatever was wrong."""
        if self._read is None:
            return EVERYTHING
        if not token:
            raise Unauthorized("no token was given")
        if len(token) > TOKEN_CHARS_MAX:
            raise Unauthorized(f"a token of {len(token)} characters: {TOKEN_CHARS_MAX} at most")
        given, found = digest_of(token), None
        for one in self._tokens:  # every one, so that the time taken tells nothing
            if hmac.compare_digest(one.digest, given):
                found = one.grant
        if found is None:
            raise Unauthorized("the token is unknown")
        if self._expired(found, self._clock.wall_us()):
            raise Unauthorized(f"token {found.name!r} has expired")
        return found

    def still_holds(self, grant: Grant) -> bool:
        """Whether the token that `check` gave this for is still there, unchanged, and has not expired."""
        if self._read is None:
            return True
        if self._expired(grant, self._clock.wall_us()):
            return False
        return any(one.grant is grant for one in self._tokens)

    async def reload(self) -> None:
        """Look at the file now. Trouble is told, once, and changes nothing."""
        if self._read is None:
            return
        try:
            raw = await self._threads.run(self._read)
            if raw == self._raw:
                self._trouble = None
            else:
                self._take(raw)
        except (OSError, UsageError) as error:
            self._tell(str(error))

    async def run(self) -> None:
        """Look at the file again and again, and for tokens that expire; end by cancellation."""
        while self._read is not None:
            await anyio.sleep(LOOK_AGAIN_S)
            await self.reload()
            self._note_expired()

    def _take(self, raw: bytes) -> None:
        before = {one: one for one in self._tokens}
        tokens = tuple(before.pop(one, one) for one in _parse(raw, self._usual))  # the same object goes on
        self._raw, self._tokens, self._trouble = raw, tokens, None
        logger.info("the file of tokens has changed: %d tokens", len(tokens))
        if before:
            self._call_changed()

    def _note_expired(self) -> None:
        before, self._looked_at_us = self._looked_at_us, self._clock.wall_us()
        grants = [one.grant for one in self._tokens]
        expired = [one.name for one in grants if self._expired(one, self._looked_at_us)]
        if any(not self._expired(one, before) for one in grants if one.name in expired):
            self._call_changed()

    def _call_changed(self) -> None:
        if self.changed is not None:
            self.changed()

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            logger.error("the file of tokens cannot be used, so those read before hold on: %s", trouble)

    @staticmethod
    def _expired(grant: Grant, now_us: int) -> bool:
        return grant.expires_at is not None and grant.expires_at <= now_us


def _parse(raw: bytes, usual: Usual) -> tuple[Token, ...]:
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError(f"the file of tokens is larger than {FILE_BYTES_MAX} bytes")
    try:
        return parse_tokens(raw.decode(), usual)
    except UnicodeDecodeError as error:
        raise UsageError(f"the file of tokens is not UTF-8: byte {error.start}") from None
