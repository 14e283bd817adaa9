"""Repairs of the differences that an audit found: deltas that restate the log, sent through the service.

No sink is changed directly: every sink gets the repair deltas in order with all others, and the log still
explains the contents of each.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeVar

from delta_prop.auditing.differences import Difference
from delta_prop.calls.argument_checks import check_instance, check_path
from delta_prop.client import SyncProducer, SyncReceipt
from delta_prop.directory.readonly_log import DEFAULT_PARTITION, PartitionName
from delta_prop.directory.stored_partitions import find_partition
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import delta_from_line
from delta_prop_wire.spec import ErrorCode

IN_FLIGHT_MAX = 1_000
"""Maximum number of repair deltas in flight."""
REASONS_MAX = 100
"""Maximum number of reasons in a result."""
_DELTAS_FIX = "the deltas that repairs() returns"
T = TypeVar("T")


@dataclass(slots=True)
class RepairResult:
    """Outcome of a repair. `changed`: number of vectors that changed since the audit and were left as they
    are; `refused`: number of deltas refused for another reason. `reasons`: the first hundred reasons of both.
    """

    repaired: int = 0
    changed: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)


def repairs(found: Iterable[Difference]) -> Iterator[Delta]:
    """Yield the deltas that repair the differences of an audit: one for each vector that is not quarantined.

    The delta sets the vector to its state in the log, or deletes it if the log does not have it. Every sink
    applies the delta and ends up correct, even if only one sink was wrong. The delta expects the last delta
    of its vector in the log, or no vector if the log has none. So it is refused if a later delta of the
    vector was published.
    """
    for difference in _check_iterable("found", found, "the differences that audit() returns"):
        check_instance("found", difference, Difference, "audit()")
        delta = repair_delta_of(difference.line())
        if delta is not None:
            yield delta


def _check_iterable(field: str, values: Iterable[T], expected: str) -> Iterable[T]:
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise UsageError(f"{field} {values!r:.60}: give {expected}")
    return values


def repair_delta_of(line: dict[str, object]) -> Delta | None:
    """Return the delta that repairs the difference on a report's line; None if the line names no repair."""
    repair = line.get("repaired_by")
    return None if repair is None else delta_from_line(json.dumps(repair, ensure_ascii=False))


def repair(
    deltas: Iterable[Delta], producer: SyncProducer, *, data: str | PurePath | None = None
) -> RepairResult:
    """Send deltas of a repair through the service, and wait for all outcomes.

    `data`: the directory that was audited: nothing is sent if the service has another log.

    Raises UsageError, Refused, Unreachable.
    """
    check_instance("producer", producer, SyncProducer, "delta_prop.client.SyncProducer(…)")
    deltas, log_id = _check_iterable("deltas", deltas, _DELTAS_FIX), producer.log_id
    data = None if data is None else check_path("data", data)
    if data is not None and log_id is not None and log_id != (expected := log_id_of(data)):
        raise log_mismatch_error("the producer's service", log_id, data, expected)
    result = RepairResult()
    in_flight: deque[tuple[Delta, SyncReceipt]] = deque()
    for delta in deltas:
        in_flight.append((delta, producer.offer(delta)))
        if len(in_flight) > IN_FLIGHT_MAX:
            _wait_outcome(*in_flight.popleft(), result)
    while in_flight:
        _wait_outcome(*in_flight.popleft(), result)
    return result


def log_id_of(data: str, name: PartitionName = DEFAULT_PARTITION) -> bytes:
    """Return the id of a log in a data directory. Raises UsageError, Refused, LogCorrupted, OSError."""
    return find_partition(data, name).read_identity().log_id


def log_mismatch_error(name: str, log_id: bytes, data: str, expected: bytes) -> UsageError:
    """Return the error of a repair through a service of another log; `name`: the name of the service."""
    return UsageError(
        f"{name} has log {log_id.hex()}, but {data!r:.300} has log {expected.hex()}: name the server of that "
        "directory"
    )


async def repair_directory(
    deltas: Iterable[Delta],
    data: str | PurePath,
    *,
    stream: str = DEFAULT_STREAM,
    partition: int | None = None,
) -> RepairResult:
    """Write deltas of a repair into a log of a data directory that no server uses.

    Raises UsageError if the directory holds no log; LogBusy, Refused, OSError.
    """
    from delta_prop.hosting.streams import Streams

    data, deltas = check_path("data", data), _check_iterable("deltas", deltas, _DELTAS_FIX)
    found = find_partition(data, PartitionName(stream, partition))
    found.read_identity()  # otherwise the propagator would create it
    result = RepairResult()
    async with Streams(data=data) as streams:
        propagator = await streams.open(found.stream, found.partition)
        for delta in deltas:
            try:
                await propagator.publish(delta)
            except Refused as refusal:
                _note_refusal(delta, refusal, result)
            else:
                result.repaired += 1
    return result


def _wait_outcome(delta: Delta, receipt: SyncReceipt, result: RepairResult) -> None:
    try:
        receipt.result()
    except Refused as refusal:
        _note_refusal(delta, refusal, result)
    else:
        result.repaired += 1


def _note_refusal(delta: Delta, refusal: Refused, result: RepairResult) -> None:
    if refusal.code is ErrorCode.CONFLICT:
        result.changed += 1
    else:
        result.refused += 1
    if len(result.reasons) < REASONS_MAX:
        result.reasons.append(f"{delta.namespace} {delta.vector_id}: {refusal.message}")
