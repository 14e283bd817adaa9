"""Repairs of what an audit found: deltas that say again what the log says, sent through the service.

No sink is changed behind the service's back: every sink takes the deltas in order with all others, and the
log still tells why each holds what it holds.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from delta_prop.auditing.differences import Difference
from delta_prop.checks import check_instance, path_of
from delta_prop.client import SyncProducer
from delta_prop.commands.asking import open_directory
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.jsonlines import delta_from_line
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import PurePath

    from delta_prop.client import SyncReceipt
    from delta_prop_wire.delta import Delta

OPEN_MAX = 1_000
"""So many deltas of a repair are sent before the first is answered."""
TOLD_MAX = 100
_DELTAS = "what repairs() gives"
T = TypeVar("T")


@dataclass(slots=True)
class Repaired:
    """The outcome of a repair. `moved_on`: vectors that changed since the audit, left as they are; `refused`:
    why, by vector. Of both the first hundred are named.
    """

    mended: int = 0
    moved_on: int = 0
    refused: int = 0
    told: list[str] = field(default_factory=list)


def repairs(found: Iterable[Difference]) -> Iterator[Delta]:
    """The deltas that mend the differences an audit found, one each.

    A vector that the log has is set again to what the log makes of it, one that it has not, or has deleted,
    is deleted again: also where only one sink held too much, every sink takes the delta and ends up right.
    Each expects the last delta that the log has of its vector (where it has none: the vector not to be
    there), and is refused where that has moved on.
    """
    for one in _many("found", found, "what audit() gives"):
        check_instance("found", one, Difference, "audit()")
        delta = mending_delta(one.line())
        if delta is not None:
            yield delta


def _many(field: str, given: Iterable[T], cure: str) -> Iterable[T]:
    if isinstance(given, str | bytes | dict) or not isinstance(given, Iterable):
        raise UsageError(f"{field} {given!r:.60}: give {cure}")
    return given


def mending_delta(line: dict[str, object]) -> Delta | None:
    """The delta that mends the difference on a line of a report; None where it has none."""
    told = line.get("mended_by")
    return None if told is None else delta_from_line(json.dumps(told, ensure_ascii=False))


def repair(
    deltas: Iterable[Delta], producer: SyncProducer, *, data: str | PurePath | None = None
) -> Repaired:
    """Send deltas of a repair through the service, and wait for the outcome of all.

    `data`: the directory that was audited: nothing is sent where the service has another log, of which these
    deltas tell nothing.

    Raises UsageError, Refused, Unreachable.
    """
    check_instance("producer", producer, SyncProducer, "delta_prop.client.SyncProducer(…)")
    deltas, met = _many("deltas", deltas, _DELTAS), producer.log_id
    data = None if data is None else path_of("data", data)
    if data is not None and met is not None and met != (wanted := log_id_of(data)):
        raise other_log("the producer's service", met, data, wanted)
    repaired = Repaired()
    waiting: deque[tuple[Delta, SyncReceipt]] = deque()
    for delta in deltas:
        waiting.append((delta, producer.offer(delta)))
        if len(waiting) > OPEN_MAX:
            _settle(*waiting.popleft(), repaired)
    while waiting:
        _settle(*waiting.popleft(), repaired)
    return repaired


def log_id_of(data: str) -> bytes:
    """The id of the log in a data directory. Raises UsageError, LogDamaged, OSError."""
    _, identity = open_directory(data)
    return identity.log_id


def other_log(told: str, log_id: bytes, data: str, wanted: bytes) -> UsageError:
    """Make the refusal of a repair through a service of another log; `told`: what the service is called."""
    return UsageError(
        f"{told} has log {log_id.hex()}, {data!r:.300} is log {wanted.hex()}: name the server of that "
        "directory"
    )


async def repair_directory(deltas: Iterable[Delta], data: str | PurePath) -> Repaired:
    """Write deltas of a repair into a data directory that nobody serves.

    Raises UsageError where it holds no log; LogBusy, Refused, OSError.
    """
    from delta_prop.embedded import Propagator

    data, deltas = path_of("data", data), _many("deltas", deltas, _DELTAS)
    open_directory(data)  # or it would be made
    repaired = Repaired()
    async with Propagator(data=data) as propagator:
        for delta in deltas:
            try:
                await propagator.publish(delta)
            except Refused as refusal:
                _note(delta, refusal, repaired)
            else:
                repaired.mended += 1
    return repaired


def _settle(delta: Delta, receipt: SyncReceipt, repaired: Repaired) -> None:
    try:
        receipt.result()
    except Refused as refusal:
        _note(delta, refusal, repaired)
    else:
        repaired.mended += 1


def _note(delta: Delta, refusal: Refused, repaired: Repaired) -> None:
    if refusal.code is ErrorCode.CONFLICT:
        repaired.moved_on += 1
    else:
        repaired.refused += 1
    if len(repaired.told) < TOLD_MAX:
        repaired.told.append(f"{delta.namespace} {delta.vector_id}: {refusal.message}")
