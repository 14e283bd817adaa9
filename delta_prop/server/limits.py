"""Bounds on what one client may take: deltas a second by token and by vector, connections by address.

Pure: `now` is an argument, in seconds of a monotonic clock. Every table is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from math import ceil, inf
from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from delta_prop.server.grants import Grant
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Delta

    _Vector = tuple[str, str]

TOKENS_KEPT_MAX = 2_000
VECTORS_KEPT_MAX = 100_000
CONNECT_AGAIN_MS = 1_000
RETRY_AFTER_MS_MAX = 3_600_000
ROUNDING = 1e-6  # deltas: a wait that has just passed must not be refused for its rounding


class TokenBucket:
    """Fills at `rate` a second up to `burst`; what goes is taken out.

    More than `burst` at once goes when the bucket is full, and leaves it in debt: those behind wait the
    longer. So in any time t at most rate * t and one burst go, or one batch if that is more.
    """

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        assert 0 < rate < inf
        assert burst >= 1
        self.rate = rate
        self.burst = burst
        self._level = float(burst)
        self._at = now

    def wait_s(self, count: int, now: float) -> float:
        """How long until so many may go; 0: now."""
        self._fill(now)
        missing = min(count, self.burst) - self._level
        return missing / self.rate if missing > ROUNDING else 0.0

    def take(self, count: int, now: float) -> None:
        """So many go, that `wait_s` let in at this same moment."""
        self._fill(now)
        self._level -= count

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._level + self.rate * (now - self._at), self.burst)
            self._at = now


class Buckets:
    """Token buckets by key; beyond `keys_max` the one longest unused goes, and would come back full."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def get(self, key: Hashable, rate: float, burst: float, now: float) -> TokenBucket:
        """The bucket of a key; another one where its rate or burst is another now."""
        bucket = self._buckets.get(key)
        if bucket is None or bucket.rate != rate or bucket.burst != burst:
            bucket = self._buckets[key] = TokenBucket(rate, burst, now)
            if len(self._buckets) > self._keys_max:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(key)
        return bucket


class Rates:
    """Who may send how much now: each token at its rate, each vector at its own.

    A token's connections share one bucket. Vectors are looked at only where there is a bound for them: the
    server's, one bucket a vector, or a token's own, one bucket for that token and vector.
    """

    def __init__(self, *, vector_rate: float = 0.0, vectors_kept_max: int = VECTORS_KEPT_MAX) -> None:
        """`vector_rate`: deltas a second that one vector may get; 0: no bound."""
        self._vector_rate = vector_rate
        self._tokens = Buckets(TOKENS_KEPT_MAX)
        self._vectors = Buckets(vectors_kept_max)

    def bounds(self, grant: Grant) -> bool:
        """Whether there is any bound that deltas of this token are held to."""
        return grant.rate != inf or bool(self._rate_of_vectors(grant))

    def take(self, grant: Grant, batch: Batch, now: float) -> None:
        """A batch goes, as a whole. Raises Refused (RATE_LIMITED); then nothing is taken."""
        if self.bounds(grant):
            self._take(grant, batch.count, lambda: zip(batch.namespaces, batch.keys, strict=True), now)

    def take_delta(self, grant: Grant, delta: Delta, now: float) -> None:
        """The same for a delta by itself."""
        self._take(grant, 1, lambda: [(delta.namespace, delta.vector_id)], now)

    def _take(self, grant: Grant, count: int, vectors: Callable[[], Iterable[_Vector]], now: float) -> None:
        own = None
        if grant.rate != inf:
            own = self._tokens.get(grant.name, grant.rate, grant.burst, now)
            if wait_s := own.wait_s(count, now):
                told = f"token {grant.name!r} may send {grant.rate:g} deltas/s, {grant.burst} at once"
                raise _limited(told, count, wait_s)
        if rate := self._rate_of_vectors(grant):
            self._take_vectors(None if grant.vector_rate is None else grant.name, rate, list(vectors()), now)
        if own is not None:
            own.take(count, now)

    def _rate_of_vectors(self, grant: Grant) -> float:
        rate = self._vector_rate if grant.vector_rate is None else grant.vector_rate
        return 0.0 if rate == inf else rate

    def _take_vectors(self, owner: str | None, rate: float, rows: list[_Vector], now: float) -> None:
        taken = []
        for vector, count in Counter(rows).items():
            bucket = self._vectors.get((owner, *vector), rate, max(rate, 1.0), now)
            if wait_s := bucket.wait_s(count, now):
                namespace, key = vector
                told = f"vector {key!r:.80} of namespace {namespace!r:.80} may change {rate:g} times/s"
                raise _limited(told, count, wait_s, row=rows.index(vector))
            taken.append((bucket, count))
        for bucket, count in taken:
            bucket.take(count, now)


class Connections:
    """How many are open, in all and from each address."""

    def __init__(self, total_max: int, per_host_max: int) -> None:
        self._total_max = total_max
        self._per_host_max = per_host_max
        self._by_host: dict[str, int] = {}
        self.open = 0
        self.refused = 0

    def enter(self, host: str) -> None:
        """One more. Raises Refused (RATE_LIMITED) where there are too many."""
        address = address_of(host)
        held = self._by_host.get(address, 0)
        if self.open >= self._total_max:
            self.refused += 1
            raise _crowded(f"{self.open} connections are open: {self._total_max} at most")
        if held >= self._per_host_max:
            self.refused += 1
            raise _crowded(f"{held} connections from {address} are open: {self._per_host_max} at most")
        self.open += 1
        self._by_host[address] = held + 1

    def leave(self, host: str) -> None:
        """One that had entered is gone."""
        address = address_of(host)
        left = self._by_host.pop(address) - 1
        if left:
            self._by_host[address] = left
        self.open -= 1


@lru_cache(maxsize=4096)
def address_of(host: str) -> str:
    """What one client has one of: an IPv4 address, the first 64 bits of an IPv6 one, else the text itself."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


def _limited(told: str, count: int, wait_s: float, row: int | None = None) -> Refused:
    wait_ms = min(max(ceil(wait_s * 1000), 1), RETRY_AFTER_MS_MAX)
    text = f"{told}: send these {count} again in {wait_ms} ms"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=wait_ms, row=row)


def _crowded(told: str) -> Refused:
    text = f"{told}; close some, or raise the bound of the server"
    return Refused(ErrorCode.RATE_LIMITED, text, retry_after_ms=CONNECT_AGAIN_MS)
