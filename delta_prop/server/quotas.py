"""Quotas: bytes, rows and requests per second of a token, of each of its client ids, and of a stream.

Pure. Each limit is a token bucket, shared by all connections that it concerns. What exceeds it waits for its
turn: each frame and each delivery is charged when it comes, and passes once the bucket has paid for it. So
nothing is sent twice, order is kept, and connections with a common quota take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from delta_prop.server.limits import RETRY_AFTER_MS_MAX, TokenBucket
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Credit
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.send_queue import SendChunk
    from delta_prop_broker.catalogue.stream import Stream

BURST_S, REQUESTS_BURST_S = 0.1, 0.25
"""Amount that an unused quota lets pass at once, in seconds of its rate; at least one of its unit."""
REQUESTS_BURST_MIN = 4
"""Minimum of that for requests, so that a client with a low quota gets through its first ones."""
CREDIT_S = 0.5
"""The first credit of a producer with a quota, in seconds of its rate; more in flight would only wait."""
TURN_S = 0.02
"""Amount that a delivery reserves, in seconds of the rate: a lower one would make many small deliveries."""
METERS_MAX = 4_000
"""Maximum limits that are remembered while no connection uses them; any other one starts full."""
CONNECTIONS_RETRY_MS = 1_000
_WAIT_S_MIN = 1e-6
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """Amounts per second; infinite for no limit. `in`: what clients send; `out`: what they get."""

    bytes_in_s: float = inf
    bytes_out_s: float = inf
    rows_in_s: float = inf
    rows_out_s: float = inf
    requests_s: float = inf

    @classmethod
    def of(cls, values: Mapping[str, float | None], prefix: str = "") -> Limits:
        """Return the limits in a table, whose names begin with `prefix`; absent, None and 0 are no limit."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: float(values.get(prefix + name) or inf) for name in names})


NO_LIMITS = Limits()
LIMIT_NAMES = tuple([each.name for each in fields(Limits)])


@dataclass(slots=True)
class QuotaCounts:
    """Use of one quota: its `limit` per second, and what has `passed` and was `refused` since the start."""

    limit: float
    passed: int = 0
    refused: int = 0


class QuotaName(NamedTuple):
    """The name of a quota. `scope`: token, client or stream; `owner`: the name of the token or stream.

    `quota`: the name of the limit.
    """

    scope: str
    owner: str
    quota: str


class Meter:
    """One limit of one owner, shared by connections. `counts`: those of all meters of the quota's name."""

    __slots__ = ("__weakref__", "_bucket", "counts", "name", "rate")

    def __init__(self, name: QuotaName, rate: float, counts: QuotaCounts, now: float) -> None:
        is_of_requests = name.quota == "requests_s"
        burst_s, minimum = (REQUESTS_BURST_S, REQUESTS_BURST_MIN) if is_of_requests else (BURST_S, 1)
        self.name = name
        self.rate = rate
        self.counts = counts
        self._bucket = TokenBucket(rate, max(rate * burst_s, minimum), now)

    @property
    def turn(self) -> float:
        """The amount that a delivery reserves."""
        return max(self.rate * TURN_S, 1.0)

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the amount may pass, after all that was charged before."""
        return self._bucket.wait_s(amount, now)

    def charge(self, amount: float, now: float) -> None:
        """Charge an amount, also one that passes later; a negative one is given back."""
        self._bucket.take(amount, now)

    def spare(self, now: float) -> int:
        """Return the amount that nobody has charged."""
        return int(max(self._bucket.available(now), 0.0))


class Turn:
    """The amounts charged to meters for something that waits, and when each of them passes."""

    __slots__ = ("_reserved",)

    def __init__(self) -> None:
        self._reserved: dict[Meter, tuple[float, float]] = {}

    def reserve(self, meter: Meter, amount: float, now: float) -> None:
        """Charge a meter, if it was not charged for this turn."""
        if meter not in self._reserved:
            self._reserved[meter] = amount, now + meter.wait_s(amount, now)
            meter.charge(amount, now)

    def give_back(self, now: float, keep: Collection[Meter] = ()) -> None:
        """Give back what was charged, except to the meters to keep."""
        for meter in [meter for meter in self._reserved if meter not in keep]:
            amount, _ = self._reserved.pop(meter)
            meter.charge(-amount, now)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the amounts have passed all meters."""
        wait_s = max([passes_at for _, passes_at in self._reserved.values()], default=now) - now
        return wait_s if wait_s > _WAIT_S_MIN else 0.0


class Inbound:
    """The quotas for the frames of one connection."""

    def __init__(self, rows: list[Meter], size: list[Meter]) -> None:
        self._rows = rows
        self._size = size
        self._frame = 0, 0  # the rows and bytes of the last frame
        self._turn = Turn()  # of the last frame

    def charge(self, rows: int, size: int, now: float) -> float:
        """Charge a frame of deltas; return the seconds for which it must wait."""
        self._frame, self._turn = (rows, size), Turn()
        self._reserve(now)
        for amount, meters in ((rows, self._rows), (size, self._size)):
            for meter in meters:
                meter.counts.passed += amount
        return self.wait_s(now)

    def wait_s(self, now: float) -> float:
        """Return the seconds for which the last frame must still wait."""
        return self._turn.wait_s(now)

    def hand_over(self, later: Inbound | None, now: float) -> None:
        """Let a frame that still waits follow other quotas; it keeps its turn in those that stay."""
        if not self.wait_s(now):
            return
        self._turn.give_back(now, () if later is None else (*later._rows, *later._size))
        if later is not None:
            later._frame, later._turn = self._frame, self._turn
            later._reserve(now)

    def bound_credit(self, credit: Credit) -> Credit:
        """Return the first credit of the connection: as much as passes in a short time."""
        deltas, size = [
            max(int(min([meter.rate for meter in meters]) * CREDIT_S), 1) if meters else _UNBOUNDED
            for meters in (self._rows, self._size)
        ]
        return Credit(min(credit.deltas, deltas), min(credit.bytes, size))

    def _reserve(self, now: float) -> None:
        for amount, meters in zip(self._frame, (self._rows, self._size), strict=True):
            for meter in meters:
                self._turn.reserve(meter, amount, now)


class Outbound:
    """The quotas for the deliveries of one connection.

    A delivery first reserves a turn, and waits until it is paid for; what it takes in addition is charged
    when it is sent.
    """

    def __init__(self, rows: list[Meter], size: list[Meter]) -> None:
        self._rows = rows
        self._size = size
        self._turn = Turn()  # of the next delivery; empty before it is reserved

    def budget(self, now: float) -> Credit | None:
        """Return what may be sent now, after which `settle` is called; None: nothing yet.

        One frame may exceed it.
        """
        for meter in (*self._rows, *self._size):
            self._turn.reserve(meter, meter.turn, now)
        if self.wait_s(now):
            return None
        rows, size = [
            min((int(meter.turn) + meter.spare(now) for meter in group), default=_UNBOUNDED)
            for group in (self._rows, self._size)
        ]
        return Credit(rows, size)

    @property
    def limits_rows(self) -> bool:
        """True if batches with more rows than the budget are sliced."""
        return bool(self._rows)

    def settle(self, chunk: SendChunk | None, now: float) -> None:
        """Charge what is sent in the turn, in place of what it reserved; None if there is nothing to send."""
        self.close(now)
        rows, size = (0, 0) if chunk is None else (chunk.delta_count, chunk.bytes)
        for amount, meters in ((rows, self._rows), (size, self._size)):
            for meter in meters:
                meter.charge(amount, now)
                meter.counts.passed += amount

    def close(self, now: float) -> None:
        """Give up a reserved turn."""
        self._turn.give_back(now)

    def hand_over(self, later: Outbound | None, now: float) -> None:
        """Let a reserved turn follow other quotas; it keeps its place in those that stay."""
        self._turn.give_back(now, () if later is None else (*later._rows, *later._size))
        if later is not None:
            later._turn = self._turn

    def wait_s(self, now: float) -> float:
        """Return the seconds until the reserved turn; 0 if none waits."""
        return self._turn.wait_s(now)


class Requests:
    """The quotas for the requests of one connection."""

    def __init__(self, meters: list[Meter]) -> None:
        self._meters = meters

    def take(self, now: float) -> None:
        """Take one request. Raises Refused (QUOTA_EXCEEDED)."""
        for meter in self._meters:
            wait_s = meter.wait_s(1, now)
            if wait_s > 0:
                meter.counts.refused += 1
                raise requests_exceeded(meter.name, meter.rate, wait_s)
        for meter in self._meters:
            meter.charge(1, now)
            meter.counts.passed += 1


@dataclass(frozen=True, slots=True)
class ConnectionQuota:
    """The quotas that concern one connection; None where there are none."""

    inbound: Inbound | None = None
    outbound: Outbound | None = None
    requests: Requests | None = None

    def follow(self, former: ConnectionQuota, now: float) -> None:
        """Take over the frame and the delivery that wait for the former quotas of the connection."""
        if former.inbound is not None:
            former.inbound.hand_over(self.inbound, now)
        if former.outbound is not None:
            former.outbound.hand_over(self.outbound, now)


NO_QUOTA = ConnectionQuota()


@dataclass(slots=True, eq=False)
class Quotas:
    """All quotas of a server. `client_limits`: those of each client id, by token.

    `counts`: by name; those of all client ids of a token are added up.
    """

    client_limits: Limits = NO_LIMITS
    counts: dict[QuotaName, QuotaCounts] = field(default_factory=dict)
    _meters: WeakValueDictionary[tuple[QuotaName, str | None], Meter] = field(
        default_factory=WeakValueDictionary
    )
    _recent: OrderedDict[tuple[QuotaName, str | None], Meter] = field(default_factory=OrderedDict)
    _connections: dict[str, int] = field(default_factory=dict)  # by token, of tokens with a limit of them
    _known_streams: Mapping[str, Stream] | None = None  # those of which `drop_removed` was told last

    def open(self, rights: Permissions, client: str | None, stream: Stream, now: float) -> ConnectionQuota:
        """Return the quotas of a connection, which works with a stream."""
        stream_limits = Limits.of(stream.settings.quotas())
        owners = [
            ("token", rights.name, None, rights.limits),
            ("client", rights.name, client, self.client_limits),
            ("stream", stream.name, str(stream.stream_id), stream_limits),
        ]
        found: dict[str, list[Meter]] = {name: [] for name in LIMIT_NAMES}
        for scope, owner, key, limits in owners:
            if limits != NO_LIMITS:
                for name, meters in found.items():
                    rate = getattr(limits, name)
                    if rate != inf:
                        meters.append(self._meter(QuotaName(scope, owner, name), key, rate, now))
        if not any(found.values()):
            return NO_QUOTA
        rows_in, bytes_in, rows_out, bytes_out, requests = [
            found[name] for name in ("rows_in_s", "bytes_in_s", "rows_out_s", "bytes_out_s", "requests_s")
        ]
        return ConnectionQuota(
            Inbound(rows_in, bytes_in) if rows_in or bytes_in else None,
            Outbound(rows_out, bytes_out) if rows_out or bytes_out else None,
            Requests(requests) if requests else None,
        )

    def enter(self, rights: Permissions) -> None:
        """Count a connection of a token. Raises Refused (QUOTA_EXCEEDED) if there are too many."""
        self._drop_removed_of(rights)
        if rights.connections is None:
            return
        open_count = self._connections.get(rights.name, 0)
        counts = self._counts_of(QuotaName("token", rights.name, "connections"), rights.connections)
        if open_count >= rights.connections:
            counts.refused += 1
            raise Refused(
                ErrorCode.QUOTA_EXCEEDED,
                f"token {rights.name!r} has {open_count} connections; the maximum is {rights.connections} "
                "(connections): close some, or use a token for each program",
                retry_after_ms=CONNECTIONS_RETRY_MS,
            )
        counts.passed += 1
        self._connections[rights.name] = open_count + 1

    def leave(self, rights: Permissions) -> None:
        """Count the end of a connection that had entered."""
        if rights.connections is not None:
            remaining = self._connections.pop(rights.name) - 1
            if remaining:
                self._connections[rights.name] = remaining

    def drop_removed(self, streams: Mapping[str, Stream]) -> None:
        """Forget quotas that no stream has any more, and their counts. `streams`: all that there are."""
        if streams is self._known_streams:
            return
        self._known_streams = streams
        for name in [name for name in self.counts if name.scope == "stream"]:
            stream = streams.get(name.owner)
            if stream is None or not stream.settings.quotas()[name.quota]:
                self._drop(name)

    def _drop_removed_of(self, rights: Permissions) -> None:
        """Forget quotas that a token, whose table has changed, no longer has."""
        limits = {name: getattr(rights.limits, name) for name in LIMIT_NAMES}
        limits["connections"] = inf if rights.connections is None else rights.connections
        for limit_name, limit in limits.items():
            name = QuotaName("token", rights.name, limit_name)
            if limit == inf and name in self.counts:
                self._drop(name)

    def _drop(self, name: QuotaName) -> None:
        del self.counts[name]
        for identity in [identity for identity in self._meters if identity[0] == name]:
            self._recent.pop(identity, None)
            self._meters.pop(identity, None)

    def _meter(self, name: QuotaName, key: str | None, rate: float, now: float) -> Meter:
        """Return the meter of a quota; a new one if its rate has changed."""
        identity = name, key
        meter = self._meters.get(identity)
        if meter is None or meter.rate != rate:
            meter = self._meters[identity] = Meter(name, rate, self._counts_of(name, rate), now)
        self._recent[identity] = meter
        self._recent.move_to_end(identity)
        if len(self._recent) > METERS_MAX:
            self._recent.popitem(last=False)
        return meter

    def _counts_of(self, name: QuotaName, limit: float) -> QuotaCounts:
        counts = self.counts.setdefault(name, QuotaCounts(limit))
        counts.limit = limit
        return counts


def requests_exceeded(name: QuotaName, rate: float, wait_s: float) -> Refused:
    """Return the refusal of a request above a quota."""
    owner = f"a client of token {name.owner!r}" if name.scope == "client" else f"{name.scope} {name.owner!r}"
    wait_ms = min(max(ceil(wait_s * 1000), 1), RETRY_AFTER_MS_MAX)
    return Refused(
        ErrorCode.QUOTA_EXCEEDED,
        f"{owner} may send {rate:g} requests/s ({name.quota}): send this one again in {wait_ms} ms",
        retry_after_ms=wait_ms,
    )


def check_stream_count(
    name: str, partitions: int, streams: Mapping[str, Stream], *, streams_max: int, partitions_max: int
) -> None:
    """Check that a service may have a stream. Bounds of 0 do not apply. Raises Refused (BAD_REQUEST).

    The code is not QUOTA_EXCEEDED, after which clients try again: time alone makes no room here.
    """
    if name in streams:
        return
    total = sum([stream.partitions for stream in streams.values()]) + partitions
    if streams_max and len(streams) >= streams_max:
        problem = f"there are {len(streams)} streams; the maximum is {streams_max} (streams_max)"
    elif partitions_max and total > partitions_max:
        problem = (
            f"all streams together would have {total} partitions; the maximum is {partitions_max} "
            "(partitions_max)"
        )
    else:
        return
    raise Refused(
        ErrorCode.BAD_REQUEST, f"stream {name!r:.80}: {problem}: delete a stream, or ask the operator"
    )
