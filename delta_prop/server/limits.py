"""Limits per client: deltas per second by access token and by vector, connections by address.

Pure: `now` is an argument, in seconds of a monotonic clock. Every table is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from math import ceil, inf
from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta

    _Vector = tuple[str, str]

TOKEN_BUCKETS_MAX = 2_000
VECTOR_BUCKETS_MAX = 100_000
CONNECT_RETRY_MS = 1_000
RETRY_AFTER_MS_MAX = 3_600_000
ROUNDING = 1e-6  # deltas: a wait that has just ended must not be refused for a rounding error


class TokenBucket:
    """Fills at `rate` per second up to `burst`; deltas that pass are taken out (or bytes, or requests).

    A batch larger than `burst` passes when the bucket is full, and leaves it in debt, so that the next deltas
    wait longer. In a time t, at most rate * t deltas pass besides one burst, or one batch if that is larger.
    """

    __slots__ = ("_available", "_filled_at", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        assert 0 < rate < inf
        assert burst >= 1
        self.rate = rate
        self.burst = burst
        self._available = float(burst)  # deltas; below 0 after a batch larger than `burst`
        self._filled_at = now

    def available(self, now: float) -> float:
        """Return the deltas that may pass now; below 0 while the bucket is in debt."""
        self._fill(now)
        return self._available

    def wait_s(self, count: float, now: float) -> float:
        """Return the seconds until `count` deltas may pass; 0 if they may pass now."""
        self._fill(now)
        missing = min(count, self.burst) - self._available
        return missing / self.rate if missing > ROUNDING else 0.0

    def take(self, count: float, now: float) -> None:
        """Take out `count` deltas, which `wait_s` allowed at this same time, or which pass later."""
        self._fill(now)
        self._available -= count

    def _fill(self, now: float) -> None:
        if now > self._filled_at:
            self._available = min(self._available + self.rate * (now - self._filled_at), self.burst)
            self._filled_at = now


class BucketCache:
    """Token buckets by key; beyond `keys_max` the least recently used is dropped, and restarts full."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Hashable, rate: float, burst: float, now: float) -> TokenBucket:
        """Return the bucket of a key; if its rate or burst has changed, a new one."""
        bucket = self._buckets.get(key)
        if bucket is None or bucket.rate != rate or bucket.burst != burst:
            bucket = self._buckets[key] = TokenBucket(rate, burst, now)
            if len(self._buckets) > self._keys_max:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket


class RateLimiter:
    """Limits the deltas per second: by token, and by vector.

    All connections of a token share one bucket. Vectors are checked only if they are limited: by the server,
    with one bucket per vector, or by the token, with one bucket per token and vector.
    """

    def __init__(self, *, vector_rate: float = 0.0, vector_buckets_max: int = VECTOR_BUCKETS_MAX) -> None:
        """`vector_rate`: deltas per second that one vector may get; 0 for no limit."""
        self._vector_rate = vector_rate
        self._token_buckets = BucketCache(TOKEN_BUCKETS_MAX)
        self._vector_buckets = BucketCache(vector_buckets_max)

    def has_limit(self, permissions: Permissions) -> bool:
        """Return True if any limit applies to deltas of this token."""
        return permissions.rate != inf or bool(self._vector_rate_of(permissions))

    def take(self, permissions: Permissions, batch: Batch, now: float) -> None:
        """Take the deltas of a batch. Raises Refused (RATE_LIMITED); then none are taken."""
        if self.has_limit(permissions):
            self._take(permissions, batch.count, lambda: zip(batch.namespaces, batch.keys, strict=True), now)

    def take_delta(self, permissions: Permissions, delta: Delta, now: float) -> None:
        """Take a single delta, as `take` does."""
        self._take(permissions, 1, lambda: [(delta.namespace, delta.vector_id)], now)

    def _take(
        self, permissions: Permissions, count: int, vectors: Callable[[], Iterable[_Vector]], now: float
    ) -> None:
        bucket = None
        if permissions.rate != inf:
            bucket = self._token_buckets.get(permissions.name, permissions.rate, permissions.burst, now)
            if wait_s := bucket.wait_s(count, now):
                limit = (
                    f"token {permissions.name!r} may send {permissions.rate:g} deltas/s, "
                    f"{permissions.burst} at once"
                )
                raise _rate_limited_error(limit, count, wait_s)
        if rate := self._vector_rate_of(permissions):
            self._take_vectors(
                None if permissions.vector_rate is None else permissions.name, rate, list(vectors()), now
            )
        if bucket is not None:
            bucket.take(count, now)

    def _vector_rate_of(self, permissions: Permissions) -> float:
        rate = self._vector_rate if permissions.vector_rate is None else permissions.vector_rate
        return 0.0 if rate == inf else rate

    def _take_vectors(self, owner: str | None, rate: float, row_vectors: list[_Vector], now: float) -> None:
        buckets = []
        for vector, count in Counter(row_vectors).items():
            bucket = self._vector_buckets.get((owner, *vector), rate, max(rate, 1.0), now)
            if wait_s := bucket.wait_s(count, now):
                namespace, key = vector
                limit = f"vector {key!r:.80} of namespace {namespace!r:.80} may change {rate:g} times/s"
                raise _rate_limited_error(limit, count, wait_s, row=row_vectors.index(vector))
            buckets.append((bucket, count))
        for bucket, count in buckets:
            bucket.take(count, now)


class ConnectionLimiter:
    """Limits the open connections, in total and per address."""

    def __init__(self, total_max: int, per_host_max: int) -> None:
        self._total_max = total_max
        self._per_host_max = per_host_max
        self._by_host: dict[str, int] = {}
        self.open_count = 0
        self.refused_count = 0

    def enter(self, host: str) -> None:
        """Count a new connection. Raises Refused (RATE_LIMITED) if there are too many."""
        address = address_of(host)
        open_connections = self._by_host.get(address, 0)
        if self.open_count >= self._total_max:
            self.refused_count += 1
            raise _connections_error(
                f"{self.open_count} connections are open; the maximum is {self._total_max}"
            )
        if open_connections >= self._per_host_max:
            self.refused_count += 1
            raise _connections_error(
                f"{open_connections} connections from {address} are open; the maximum is {self._per_host_max}"
            )
        self.open_count += 1
        self._by_host[address] = open_connections + 1

    def leave(self, host: str) -> None:
        """Count the end of a connection that had entered."""
        address = address_of(host)
        remaining = self._by_host.pop(address) - 1
        if remaining:
            self._by_host[address] = remaining
        self.open_count -= 1


@lru_cache(maxsize=4096)
def address_of(host: str) -> str:
    """Return the part of an address that identifies a client.

    That is an IPv4 address, the first 64 bits of an IPv6 address, or else the text itself.
    """
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


def _rate_limited_error(limit: str, count: int, wait_s: float, row: int | None = None) -> Refused:
    wait_ms = min(max(ceil(wait_s * 1000), 1), RETRY_AFTER_MS_MAX)
    text = f"{limit}: send these {count} again in {wait_ms} ms"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=wait_ms, row=row)


def _connections_error(limit: str) -> Refused:
    text = f"{limit}: close some, or raise the server's limit"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=CONNECT_RETRY_MS)
