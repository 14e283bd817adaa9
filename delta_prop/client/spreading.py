"""Several services behind one client: finds the service of a vector, and joins the outcomes of a call.

Pure. The place of a service is its index in the list of services. A vector's place is a hash of its name and
the number of services, so every client that gives the same services in the same order finds the vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.service_identity import check_log_id
from delta_prop.outcomes import PublishAck
from delta_prop_wire.delta import Dot, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import partition_of, partitions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop.client.addresses import Address
    from delta_prop_wire.delta import Delta

SERVICES_MAX = 64
PLACE_CACHE_MAX = 50_000
"""Maximum number of vectors in the cache of places, and in the full cache before it, which is kept too."""


class Part(NamedTuple):
    """One service's part of a call: the indices of the caller's rows, in order, and their acknowledgement."""

    place: int
    rows: Sequence[int]
    published: PublishAck


@dataclass(frozen=True, slots=True)
class SpreadPublished:
    """An acknowledged call: `count` rows, each in one of the parts. Offsets are those of a service's log."""

    count: int
    parts: tuple[Part, ...]

    def at(self, place: int) -> PublishAck | None:
        """Return the acknowledgement of the service at `place`; None if the call has no part there."""
        return next((part.published for part in self.parts if part.place == place), None)


class SpreadRefused(Refused):
    """A call of which services refused some parts. `acknowledged`: the parts that the others acknowledged."""

    def __init__(
        self, refusal: Refused, place: int, rows: Sequence[int], acknowledged: Sequence[Part]
    ) -> None:
        acked_rows = sum(len(part.rows) for part in acknowledged)
        super().__init__(
            refusal.code,
            f"service {place}: {refusal.message}; {acked_rows} rows were acknowledged by other services",
            retry_after_ms=refusal.retry_after_ms,
            row=None if refusal.row is None else rows[refusal.row],
            field=refusal.field,
            details={**refusal.details, "place": place},
        )
        self.acknowledged = tuple(acknowledged)


class ServiceMap:
    """Maps each vector to one of `count` services; caches recent answers."""

    __slots__ = ("_cache", "_older_cache", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._cache: dict[tuple[str, str], int] = {}
        self._older_cache: dict[tuple[str, str], int] = {}

    def find(self, namespace: str, vector_id: str) -> int:
        """Return the place of a vector."""
        key = (namespace, vector_id)
        place = self._cache.get(key)
        if place is None:
            place = self._older_cache.get(key)
            if place is None:
                place = partition_of(namespace, vector_id, self.count)
            if len(self._cache) >= PLACE_CACHE_MAX:
                self._older_cache, self._cache = self._cache, {}
            self._cache[key] = place
        return place

    def group_rows(self, deltas: Sequence[Delta]) -> list[tuple[int, list[int]]]:
        """Return (place, rows) for each place to which rows go, in order."""
        rows_by_place: dict[int, list[int]] = {}
        for row, delta in enumerate(deltas):
            rows_by_place.setdefault(self.find(delta.namespace, delta.vector_id), []).append(row)
        return sorted(rows_by_place.items())

    def group_columns(self, namespace: str, ids: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Return (place, rows) as `group_rows` does, for vectors of one namespace."""
        places = partitions_of(namespace, ids, self.count)
        return [(int(place), np.flatnonzero(places == place).tolist()) for place in np.unique(places)]


def parse_services(services: Iterable[str | Iterable[str]]) -> list[tuple[Address, ...]]:
    """Return the addresses of each service, in order. Raises UsageError."""
    if isinstance(services, str):
        raise UsageError(f"services {services!r:.80}: not a list: give a list with an entry for each service")
    parsed = [parse_addresses(service) for service in services]
    if not 1 <= len(parsed) <= SERVICES_MAX:
        raise UsageError(
            f"{len(parsed)} services: give 1 to {SERVICES_MAX}, always the same, in the same order"
        )
    addresses = [address for service in parsed for address in service]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(f"address {address}: given twice: give each service one place")
    return parsed


def check_log_ids(log_ids: Sequence[bytes] | None, count: int) -> Sequence[bytes | None]:
    """Return for each service the log id that it must have, None if it may have any. Raises UsageError."""
    if log_ids is None:
        return [None] * count
    if len(log_ids) != count:
        raise UsageError(
            f"{len(log_ids)} log ids for {count} services: give one for each service, in their order"
        )
    for log_id in log_ids:
        check_log_id(log_id)
    return log_ids


def check_distinct_logs(place: int, log_ids: Mapping[int, bytes]) -> None:
    """Check that no other service has the same log. Raises UsageError."""
    for other, log_id in log_ids.items():
        if other != place and log_id == log_ids[place]:
            raise UsageError(
                f"services {other} and {place}: both have log {log_id.hex()}, so they are one: give it once"
            )


def wrong_log(place: int, log_id: bytes, expected: Sequence[bytes | None]) -> UsageError:
    """Return the error for a service with another log than the one that belongs to its place."""
    owner = (
        f"which belongs to service {expected.index(log_id)}"
        if log_id in expected
        else "which belongs to none of these services"
    )
    return UsageError(
        f"service {place}: it has log {log_id.hex()}, {owner}: vectors are found by the order of the "
        "services: give all of them, in the order that they had"
    )


def join_outcomes(outcomes: Sequence[tuple[int, Sequence[int], PublishAck | Refused]]) -> SpreadPublished:
    """Join the outcomes of the parts of a call. Raises Refused, SpreadRefused."""
    parts = tuple(
        Part(place, rows, outcome) for place, rows, outcome in outcomes if isinstance(outcome, PublishAck)
    )
    for place, rows, outcome in outcomes:
        if isinstance(outcome, Refused):
            if len(outcomes) == 1:
                raise outcome
            raise SpreadRefused(outcome, place, rows, parts)
    return SpreadPublished(sum(len(part.rows) for part in parts), parts)


def local_parents(parents: Sequence[Dot | bytes], place: int) -> list[Dot | bytes]:
    """Return the `parents` that belong to one service. Raises UsageError.

    The others are already in the logs of other services, since a caller knows only acknowledged dots.
    """
    for parent in parents:
        if not isinstance(parent, Dot):
            raise UsageError(
                f"parent {parent!r:.60}: an id does not show which service has it: name the parent by its dot"
            )
    return [
        parent for parent in parents if isinstance(parent, Dot) and origin_partition(parent.origin) == place
    ]
