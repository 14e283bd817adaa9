"""Several services behind one client: finds the service of a vector, and joins the outcomes of a call.

Pure. A service's index is its position in the list of services, from 0 on. The index of a vector's service
follows from a hash of the vector's name and from the number of services. So every client that gives the same
services in the same order finds the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.addresses import Address, parse_addresses
from delta_prop.client.service_identity import check_log_id
from delta_prop_wire.delta import Delta, Dot, origin_partition
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.murmur import partition_of, partitions_of

SERVICES_MAX = 64
CACHED_VECTORS_MAX = 50_000
"""Maximum number of vectors in the newer cache of a `ServiceMap`. A full one becomes the older cache."""


class Part(NamedTuple):
    """One service's part of a call. `rows`: indices of the caller's rows, in order; `ack`: theirs."""

    service_index: int
    rows: Sequence[int]
    ack: PublishAck


@dataclass(frozen=True, slots=True)
class SpreadPublished:
    """An acknowledged call: `count` rows, each in one of the parts. Offsets are those of a service's log."""

    count: int
    parts: tuple[Part, ...]

    def ack_of(self, service_index: int) -> PublishAck | None:
        """Return the acknowledgement of one service; None if the call has no part there."""
        return next((part.ack for part in self.parts if part.service_index == service_index), None)


class SpreadRefused(Refused):
    """A call of which some services refused their part. `acknowledged`: the other parts."""

    def __init__(
        self, refusal: Refused, service_index: int, rows: Sequence[int], acknowledged: Sequence[Part]
    ) -> None:
        acked_rows = sum(len(part.rows) for part in acknowledged)
        super().__init__(
            refusal.code,
            f"service {service_index}: {refusal.message}; {acked_rows} rows were acknowledged by other "
            "services",
            retry_after_ms=refusal.retry_after_ms,
            row=None if refusal.row is None else rows[refusal.row],
            field=refusal.field,
            details={**refusal.details, "service_index": service_index},
        )
        self.acknowledged = tuple(acknowledged)


class ServiceMap:
    """Maps each vector to one of `count` services; caches recent results."""

    __slots__ = ("_cache", "_older_cache", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._cache: dict[tuple[str, str], int] = {}
        self._older_cache: dict[tuple[str, str], int] = {}

    def find(self, namespace: str, vector_id: str) -> int:
        """Return the index of a vector's service."""
        key = (namespace, vector_id)
        service_index = self._cache.get(key)
        if service_index is None:
            service_index = self._older_cache.get(key)
            if service_index is None:
                service_index = partition_of(namespace, vector_id, self.count)
            if len(self._cache) >= CACHED_VECTORS_MAX:
                self._older_cache, self._cache = self._cache, {}
            self._cache[key] = service_index
        return service_index

    def group_rows(self, deltas: Sequence[Delta]) -> list[tuple[int, list[int]]]:
        """Return (service index, rows) for each service that has vectors of these rows, in order."""
        rows_by_service: dict[int, list[int]] = {}
        for row, delta in enumerate(deltas):
            rows_by_service.setdefault(self.find(delta.namespace, delta.vector_id), []).append(row)
        return sorted(rows_by_service.items())

    def group_columns(self, namespace: str, ids: Sequence[str]) -> list[tuple[int, list[int]]]:
        """Do the same as `group_rows` for columns: vectors of one namespace."""
        service_indices = partitions_of(namespace, ids, self.count)
        return [
            (int(service_index), np.flatnonzero(service_indices == service_index).tolist())
            for service_index in np.unique(service_indices)
        ]


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
            raise UsageError(f"address {address}: given twice: list each service once")
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


def check_distinct_logs(service_index: int, log_ids: Mapping[int, bytes]) -> None:
    """Check that no other service has the same log. Raises UsageError."""
    for other, log_id in log_ids.items():
        if other != service_index and log_id == log_ids[service_index]:
            raise UsageError(
                f"services {other} and {service_index}: both have log {log_id.hex()}, so they are one: "
                "give it once"
            )


def wrong_log(service_index: int, log_id: bytes, expected: Sequence[bytes | None]) -> UsageError:
    """Return the error for a service whose log is not the one that is expected at its index."""
    owner = (
        f"which belongs to service {expected.index(log_id)}"
        if log_id in expected
        else "which belongs to none of these services"
    )
    return UsageError(
        f"service {service_index}: it has log {log_id.hex()}, {owner}: vectors are found by the order of the "
        "services: give all of them, in the order that they had"
    )


def join_outcomes(outcomes: Sequence[tuple[int, Sequence[int], PublishAck | Refused]]) -> SpreadPublished:
    """Join the outcomes of the parts of a call, each as (service index, rows, outcome).

    Raises Refused if the only part was refused, SpreadRefused if one of several was.
    """
    parts = tuple(
        Part(service_index, rows, outcome)
        for service_index, rows, outcome in outcomes
        if isinstance(outcome, PublishAck)
    )
    for service_index, rows, outcome in outcomes:
        if isinstance(outcome, Refused):
            if len(outcomes) == 1:
                raise outcome
            raise SpreadRefused(outcome, service_index, rows, parts)
    return SpreadPublished(sum(len(part.rows) for part in parts), parts)


def local_parents(parents: Sequence[Dot | bytes], service_index: int) -> list[Dot | bytes]:
    """Return the `parents` that belong to one service. Raises UsageError.

    The others are already in the logs of other services, since a caller knows only acknowledged dots.
    """
    for parent in parents:
        if not isinstance(parent, Dot):
            raise UsageError(
                f"parent {parent!r:.60}: an id does not show which service has it: name the parent by its dot"
            )
    return [
        parent
        for parent in parents
        if isinstance(parent, Dot) and origin_partition(parent.origin) == service_index
    ]
