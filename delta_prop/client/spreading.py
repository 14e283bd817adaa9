"""Several services behind one client: which vector is where, and what a call says that went to some of them.

Pure. A vector's place is a hash of its name and the number of services, so whoever gives the same services in
the same order finds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.known_service import check_log_id
from delta_prop.published import Published
from delta_prop_wire.delta import Dot, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import place_of, places_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from delta_prop.client.addresses import Address
    from delta_prop_wire.delta import Delta

SERVICES_MAX = 64
KNOWN_PLACES_MAX = 50_000
"""Of so many vectors the place is remembered, and of as many before them."""


class Part(NamedTuple):
    """What one service has of a call: the caller's rows, in order, and their acknowledgement."""

    place: int
    rows: Sequence[int]
    published: Published


@dataclass(frozen=True, slots=True)
class SpreadPublished:
    """An acknowledged call: `count` rows, each in one of the parts. Offsets are those of a service's log."""

    count: int
    parts: tuple[Part, ...]

    def at(self, place: int) -> Published | None:
        """What the service at a place has of it; None: nothing."""
        return next((part.published for part in self.parts if part.place == place), None)


class SpreadRefused(Refused):
    """A call of which some services have refused their part. `acknowledged`: what others have of it."""

    def __init__(
        self, refusal: Refused, place: int, rows: Sequence[int], acknowledged: Sequence[Part]
    ) -> None:
        kept = sum(len(part.rows) for part in acknowledged)
        super().__init__(
            refusal.code,
            f"service {place}: {refusal.message}; {kept} rows were acknowledged by other services",
            retry_after_ms=refusal.retry_after_ms,
            row=None if refusal.row is None else rows[refusal.row],
            field=refusal.field,
            details={**refusal.details, "place": place},
        )
        self.acknowledged = tuple(acknowledged)


class Places:
    """Which vector is at which of so many services; those asked for lately are remembered."""

    __slots__ = ("_before", "_known", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._known: dict[tuple[str, str], int] = {}
        self._before: dict[tuple[str, str], int] = {}

    def of(self, namespace: str, vector_id: str) -> int:
        """The place of one vector."""
        key = (namespace, vector_id)
        place = self._known.get(key)
        if place is None:
            place = self._before.get(key)
            if place is None:
                place = place_of(namespace, vector_id, self.count)
            if len(self._known) >= KNOWN_PLACES_MAX:
                self._before, self._known = self._known, {}
            self._known[key] = place
        return place

    def cut(self, deltas: Sequence[Delta]) -> list[tuple[int, list[int]]]:
        """The rows that go to each place, in order."""
        found: dict[int, list[int]] = {}
        for row, delta in enumerate(deltas):
            found.setdefault(self.of(delta.namespace, delta.vector_id), []).append(row)
        return sorted(found.items())

    def cut_columns(self, namespace: str, ids: Sequence[str]) -> list[tuple[int, list[int]]]:
        """The same for the vectors of a namespace."""
        places = places_of(namespace, ids, self.count)
        return [(int(place), np.flatnonzero(places == place).tolist()) for place in np.unique(places)]


def parse_services(services: Iterable[str | Iterable[str]]) -> list[tuple[Address, ...]]:
    """The addresses of each service, in order. Raises UsageError."""
    if isinstance(services, str):
        raise UsageError(f"services {services!r:.80} is one text: give a list, an entry for each service")
    found = [parse_addresses(one) for one in services]
    if not 1 <= len(found) <= SERVICES_MAX:
        raise UsageError(
            f"{len(found)} services: give 1 to {SERVICES_MAX}, always the same, in the same order"
        )
    addresses = [address for one in found for address in one]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(f"{address} is given twice: each service has one place")
    return found


def check_log_ids(log_ids: Sequence[bytes] | None, count: int) -> Sequence[bytes | None]:
    """For each service the log that it must have, None where it may be any. Raises UsageError."""
    if log_ids is None:
        return [None] * count
    if len(log_ids) != count:
        raise UsageError(
            f"{len(log_ids)} log ids for {count} services: all services that there are take part"
        )
    for one in log_ids:
        check_log_id(one)
    return log_ids


def check_told(place: int, told: Mapping[int, bytes]) -> None:
    """Whether no other service has told the same log. Raises UsageError."""
    for other, log_id in told.items():
        if other != place and log_id == told[place]:
            raise UsageError(f"services {other} and {place} are one: both have log {log_id.hex()}")


def misplaced(place: int, told: bytes, wanted: Sequence[bytes | None]) -> UsageError:
    """Why a service that has another log than its place is for is not written to."""
    where = f"it is service {wanted.index(told)}" if told in wanted else "it is none of these services"
    return UsageError(
        f"service {place} has log {told.hex()}: {where}; a vector is found by the order of the services, so "
        "give all of them, in the order that they had"
    )


def joined(outcomes: Sequence[tuple[int, Sequence[int], Published | Refused]]) -> SpreadPublished:
    """The outcome of a call from those of its parts. Raises Refused, SpreadRefused."""
    parts = tuple(Part(place, rows, one) for place, rows, one in outcomes if isinstance(one, Published))
    for place, rows, one in outcomes:
        if isinstance(one, Refused):
            if len(outcomes) == 1:
                raise one
            raise SpreadRefused(one, place, rows, parts)
    return SpreadPublished(sum(len(part.rows) for part in parts), parts)


def near(parents: Sequence[Dot | bytes], place: int) -> list[Dot | bytes]:
    """Of what must come first, what is at this place; the rest has its place at another service already,
    as whoever knows a dot was told it. Raises UsageError.
    """
    for one in parents:
        if not isinstance(one, Dot):
            raise UsageError(
                f"parent {one!r:.60} is an id, which does not tell who has it: name it by its dot"
            )
    return [one for one in parents if isinstance(one, Dot) and origin_partition(one.origin) == place]
