"""Access control: checks tokens against a file of their hashes, which may change while the server runs.

If the changed file cannot be used, this is logged, and the tokens read before stay valid. The connections of
a token that is removed, changed or expired are closed within seconds.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from delta_prop.server.permissions import ALL_PERMISSIONS, Permissions, Unauthorized
from delta_prop.server.tokens import (
    FILE_BYTES_MAX,
    TOKEN_CHARS_MAX,
    Token,
    TokenDefaults,
    digest_of,
    parse_tokens,
)
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from delta_prop.platform.ports import World

POLL_INTERVAL_S = 1.0

logger = logging.getLogger("delta_prop")


class Access:
    """Grants the permissions of tokens. Without a token file every client may do everything.

    *Resources*: `run` polls the file, on a thread of its own; it ends by cancellation. *Errors*: if the file
    cannot be read or parsed, the constructor raises UsageError or OSError; `run` only logs this.
    """

    def __init__(
        self,
        world: World,
        read_file: Callable[[], bytes] | None = None,
        defaults: TokenDefaults | None = None,
    ) -> None:
        """`read_file`: returns the token file's bytes, and may block; None if there is no token file.

        `on_change`, if set, is called when a token is no longer valid: the server then checks the permissions
        of each connection with `is_valid`. Raises UsageError, OSError.
        """
        self._clock = world.clock
        self._threads = world.new_threads()
        self._read_file = read_file
        self._defaults = defaults or TokenDefaults()
        self.on_change: Callable[[], None] | None = None
        self._raw = b""
        self._tokens: tuple[Token, ...] = ()
        self._checked_at_us = world.clock.wall_us()
        self._last_error: str | None = None
        if read_file is not None:
            self._raw = read_file()
            self._tokens = _parse(self._raw, self._defaults)

    @property
    def is_open(self) -> bool:
        """True if every client may do everything."""
        return self._read_file is None

    def check(self, token: str | None) -> Permissions:
        """Return a token's permissions. Raises Unauthorized; clients get the same text for every cause."""
        if self._read_file is None:
            return ALL_PERMISSIONS
        if not token:
            raise Unauthorized("no token was given")
        if len(token) > TOKEN_CHARS_MAX:
            raise Unauthorized(f"a token of {len(token)} characters: give up to {TOKEN_CHARS_MAX}")
        digest, permissions = digest_of(token), None
        for known in self._tokens:  # all of them, so that the time taken reveals nothing
            if hmac.compare_digest(known.digest, digest):
                permissions = known.permissions
        if permissions is None:
            raise Unauthorized("the token is unknown")
        if self._is_expired(permissions, self._clock.wall_us()):
            raise Unauthorized(f"token {permissions.name!r} has expired")
        return permissions

    def is_valid(self, permissions: Permissions) -> bool:
        """True if the token that has these permissions is still in the file, unchanged and not expired."""
        if self._read_file is None:
            return True
        if self._is_expired(permissions, self._clock.wall_us()):
            return False
        return any(token.permissions is permissions for token in self._tokens)

    async def reload(self) -> None:
        """Read the file now. If it cannot be used, this is logged once, and the tokens stay."""
        if self._read_file is None:
            return
        try:
            raw = await self._threads.run(self._read_file)
            if raw == self._raw:
                self._last_error = None
            else:
                self._replace_tokens(raw)
        except (OSError, UsageError) as error:
            self._log_error(str(error))

    async def run(self) -> None:
        """Poll the file and the expiry of tokens; end by cancellation."""
        while self._read_file is not None:
            await anyio.sleep(POLL_INTERVAL_S)
            await self.reload()
            self._check_expired()

    def _replace_tokens(self, raw: bytes) -> None:
        removed = {token: token for token in self._tokens}
        # Unchanged tokens keep their objects; `removed` ends with those that are no longer valid.
        tokens = tuple(removed.pop(token, token) for token in _parse(raw, self._defaults))
        self._raw, self._tokens, self._last_error = raw, tokens, None
        logger.info("the token file has changed: %d tokens", len(tokens))
        if removed:
            self._notify_change()

    def _check_expired(self) -> None:
        previous_us, self._checked_at_us = self._checked_at_us, self._clock.wall_us()
        now_us = self._checked_at_us
        if any(
            self._is_expired(token.permissions, now_us)
            and not self._is_expired(token.permissions, previous_us)
            for token in self._tokens
        ):
            self._notify_change()

    def _notify_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _log_error(self, error: str) -> None:
        if error != self._last_error:
            self._last_error = error
            logger.error("the token file cannot be used, so the tokens read before stay valid: %s", error)

    @staticmethod
    def _is_expired(permissions: Permissions, now_us: int) -> bool:
        return permissions.expires_at is not None and permissions.expires_at <= now_us


def _parse(raw: bytes, defaults: TokenDefaults) -> tuple[Token, ...]:
    if len(raw) > FILE_BYTES_MAX:
        raise UsageError(f"the token file is larger than {FILE_BYTES_MAX} bytes: remove some tokens")
    try:
        return parse_tokens(raw.decode(), defaults)
    except UnicodeDecodeError as error:
        raise UsageError(f"the token file is not UTF-8: byte {error.start}: save it as UTF-8") from None
