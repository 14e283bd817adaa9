"""The stream and partition of this service: one stream, `default`, of one partition.

Clients that spread over several services use the partition number in an origin as the number of the service.
So a frame of a producer may name any partition, if its origin names the same one. Readers name partition 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_wire.delta import Source, origin_partition
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop_wire.frames import Hello, Subscription

DEFAULT_STREAM = "default"
STREAM_ID = 0
PARTITION = 0


def check_stream(stream: int) -> None:
    """Raise Refused (UNKNOWN_STREAM) unless it is the stream of this service."""
    if stream != STREAM_ID:
        raise Refused(
            ErrorCode.UNKNOWN_STREAM,
            f"stream {stream}: unknown: name stream {STREAM_ID} ({DEFAULT_STREAM}), the only one",
            details={"stream": stream},
        )


def check_claims(hello: Hello) -> None:
    """Raise Refused (UNKNOWN_STREAM, BAD_REQUEST) unless the hello may claim its origins."""
    for claim in hello.origins:
        check_stream(claim.stream)
    origin_count = len(hello.origins)
    if hello.job is not None and origin_count != 1:
        raise _bad_claim_error(f"{origin_count} origins for one part of a job: claim only that of its deltas")
    if hello.source is Source.REPLICA and origin_count:
        raise _bad_claim_error(
            f"{origin_count} origins claimed by a forwarder: they belong to their producers: claim none"
        )
    if any(claim.origin == 0 for claim in hello.origins):
        raise _bad_claim_error("origin 0: it belongs to the log: claim one from 1 on")
    if len({claim.origin for claim in hello.origins}) < origin_count:
        raise _bad_claim_error("an origin is claimed twice: claim each once")


def _bad_claim_error(text: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, text, field="origins")


def check_partition(stream: int, partition: int) -> None:
    """Raise Refused (UNKNOWN_STREAM, WRONG_PARTITION) unless it is the partition of this service."""
    check_stream(stream)
    if partition != PARTITION:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {partition}: unknown: name {PARTITION}, the only one of stream {DEFAULT_STREAM}",
            details={"partition": partition},
        )


def check_origin(origin: int, stream: int, partition: int) -> None:
    """Raise Refused (UNKNOWN_STREAM, WRONG_PARTITION) unless an origin belongs to its frame's partition."""
    check_stream(stream)
    expected = origin_partition(origin)
    if partition != expected:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {partition}: origin {origin:#018x} belongs to partition {expected}: name that one",
            details={"partition": expected},
        )


def resolve_partition(request: Subscription) -> Subscription:
    """Return the subscription with the start and credit that it names for this partition, if any.

    Raises Refused.
    """
    check_stream(request.stream)
    if not request.partitions:
        return request
    for partition in request.partitions:
        check_partition(request.stream, partition.partition)
    if len(request.partitions) > 1:
        raise Refused(
            ErrorCode.BAD_REQUEST, f"partitions: partition {PARTITION} is named twice: name each once"
        )
    (partition,) = request.partitions
    start = request.start if partition.start is None else partition.start
    credit = request.credit if partition.credit is None else partition.credit
    return replace(request, start=start, credit=credit)
