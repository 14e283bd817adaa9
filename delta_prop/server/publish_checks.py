"""Checks the deltas of one connection against its token and the server's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.errors import InvalidDelta, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.platform.ports import Clock
    from delta_prop.server.limits import RateLimiter
    from delta_prop.server.permissions import Permissions
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta


class PublishChecks:
    """The rights and limits of one token."""

    def __init__(
        self, permissions: Permissions, rate_limiter: RateLimiter, clock: Clock, *, clock_entries_max: int
    ) -> None:
        self._permissions = permissions
        self._rate_limiter = rate_limiter
        self._is_limited = rate_limiter.has_limit(permissions)
        self._now = clock.now
        self._clock_entries_max = clock_entries_max
        # the namespaces and the kinds that the token allowed last
        self._last_allowed: tuple[tuple[str, ...] | None, int] = (None, 0)

    def allow_run(self, batches: Sequence[Batch]) -> bool:
        """Return True if the token allows all of these batches, and they need no check of a rate limit."""
        if self._is_limited:
            return False
        names, kinds = self._last_allowed
        try:
            for batch in batches:
                # Consecutive batches often share one table of names.
                if batch.namespace_names is not names or batch.kinds_mask != kinds:
                    names, kinds = batch.namespace_names, batch.kinds_mask
                    self._permissions.check_publish(names, kinds)
        except Refused:
            return False
        self._last_allowed = names, kinds
        return True

    def check_batch(self, batch: Batch, *, is_forwarded: bool) -> None:
        """Check a batch; a forwarded one only for its rate. Raises Refused.

        The rate comes first: a batch out of scope is logged as a no-op record, which must be limited too.
        """
        self._rate_limiter.take(self._permissions, batch, self._now())
        if not is_forwarded:
            self._check_scope(batch.namespace_names, batch.kinds_mask, batch.clock_entry_count)

    def take_rate(self, delta: Delta) -> None:
        """Take a single delta from the rate limits. Raises Refused (RATE_LIMITED)."""
        self._rate_limiter.take_delta(self._permissions, delta, self._now())

    def check_delta(self, delta: Delta) -> None:
        """Check a single delta, except for its rate. Raises Refused."""
        self._check_scope((delta.namespace,), 1 << delta.operation.kind, len(delta.clock))

    def _check_scope(self, namespaces: Sequence[str], kinds_mask: int, clock_entry_count: int) -> None:
        self._permissions.check_publish(namespaces, kinds_mask)
        if clock_entry_count > self._clock_entries_max:
            raise InvalidDelta(
                "clock",
                f"{clock_entry_count} entries: name only what has changed, up to "
                f"{self._clock_entries_max} entries",
            )
