"""Which stream and partition this service is: one stream, `default`, of one partition.

Clients that spread over several services number these by their origins' partitions, so a producer's frame may
name any partition, as long as it is its origin's; whoever reads names partition 0.
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
    """Raise Refused (UNKNOWN_STREAM) unless it is the one that is here."""
    if stream != STREAM_ID:
        raise Refused(
            ErrorCode.UNKNOWN_STREAM,
            f"stream {stream}: this service has stream {STREAM_ID} ({DEFAULT_STREAM}) alone: name that one",
            details={"stream": stream},
        )


def check_claims(hello: Hello) -> None:
    """Raise Refused (UNKNOWN_STREAM, BAD_REQUEST) unless the hello's origins are such as it may claim."""
    origins = len(hello.origins)
    if hello.job is not None and origins != 1:
        raise _bad_claim(f"{origins} origins for one part of a job: claim the one that its deltas have")
    if hello.source is Source.REPLICA and origins:
        raise _bad_claim(f"{origins} origins claimed by a forwarder: they stay their producers', claim none")
    for claim in hello.origins:
        check_stream(claim.stream)
        if claim.origin == 0:
            raise _bad_claim("origin 0 is the log's own: claim one from 1 on")
    if len({claim.origin for claim in hello.origins}) < origins:
        raise _bad_claim("an origin stands twice: claim each once")


def _bad_claim(text: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, text, field="origins")


def check_partition(stream: int, partition: int) -> None:
    """Raise Refused (UNKNOWN_STREAM, WRONG_PARTITION) unless it is the one that is here."""
    check_stream(stream)
    if partition != PARTITION:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {partition}: stream {DEFAULT_STREAM} has partition {PARTITION} alone: name that one",
            details={"partition": partition},
        )


def check_origin(origin: int, stream: int, partition: int) -> None:
    """Raise Refused (UNKNOWN_STREAM, WRONG_PARTITION) unless an origin belongs where its frame says."""
    check_stream(stream)
    wanted = origin_partition(origin)
    if partition != wanted:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {partition}: origin {origin:#018x} belongs to partition {wanted}: name that one",
            details={"partition": wanted},
        )


def only_partition(request: Subscription) -> Subscription:
    """The same subscription, with what it says of this partition in place of what it says of all. Raises
    Refused.
    """
    check_stream(request.stream)
    if not request.partitions:
        return request
    for one in request.partitions:
        check_partition(request.stream, one.partition)
    if len(request.partitions) > 1:
        raise Refused(
            ErrorCode.BAD_REQUEST, f"partitions: partition {PARTITION} stands twice: name each partition once"
        )
    (one,) = request.partitions
    start = request.start if one.start is None else one.start
    credit = request.credit if one.credit is None else one.credit
    return replace(request, start=start, credit=credit)
