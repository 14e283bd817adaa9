"""Checks of the partitions that frames and requests name. Pure.

A connection works with one partition at a time: the one that its hello names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_broker.catalogue.stream import check_partition
from delta_prop_wire.delta import Source, origin_partition
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import PartitionStart
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop.server.permissions import Permissions
    from delta_prop_broker.catalogue.catalogue import Catalogue
    from delta_prop_wire.frames import BatchFrame, Hello, Subscription


def check_stream_rights(rights: Permissions, stream_ids: Iterable[int], streams: Catalogue) -> None:
    """Check that a token may use streams. Raises Unauthorized, Refused (UNKNOWN_STREAM)."""
    if rights.streams is not None:
        for stream_id in stream_ids:
            rights.check_stream(streams.find(stream_id).name)


def check_hello(hello: Hello, streams: Catalogue) -> LogName:
    """Return the partition that a hello names, to which all its origins must belong.

    Raises Refused (UNKNOWN_STREAM, WRONG_PARTITION, BAD_REQUEST).
    """
    name = LogName(hello.stream, hello.partition)
    check_partition(streams.find(name.stream), name.partition)
    for claim in hello.origins:
        streams.find(claim.stream)
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
    for claim in hello.origins:
        check_named(LogName(claim.stream, origin_partition(claim.origin)), claim.origin, name)
    return name


def _bad_claim_error(text: str) -> Refused:
    return Refused(ErrorCode.BAD_REQUEST, text, field="origins")


def check_frame(frame: BatchFrame, served: LogName) -> None:
    """Check that a producer's frame is for its connection's partition. Raises Refused (WRONG_PARTITION)."""
    stamp, origin = frame.stamp, frame.batch.origin
    if stamp is not None:
        check_named(LogName(stamp.stream, stamp.partition), origin, served)
    elif origin_partition(origin) != served.partition:  # the stamp is for the stream of the connection
        check_served(LogName(served.stream, origin_partition(origin)), served)


def check_named(stated: LogName, origin: int, served: LogName) -> None:
    """Check the partition that is named for an origin's delta. Raises Refused (WRONG_PARTITION)."""
    own = origin_partition(origin)
    if stated.partition != own:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {stated.partition}: origin {origin:#018x} belongs to partition {own}: name that one",
            details={"partition": own},
        )
    check_served(stated, served)


def check_served(stated: LogName, served: LogName) -> None:
    """Check that a frame names the partition of its connection. Raises Refused (WRONG_PARTITION)."""
    if stated != served:
        raise Refused(
            ErrorCode.WRONG_PARTITION,
            f"partition {stated.partition} of stream {stated.stream}: this connection works with partition "
            f"{served.partition} of stream {served.stream}: open another connection for each partition",
            details={"stream": served.stream, "partition": served.partition},
        )


def check_acked(stated: LogName, served: LogName) -> None:
    """Check the partition of an Ack, which names that of its connection, or none. Raises Refused."""
    if stated != DEFAULT_LOG:
        check_served(stated, served)


def resolve_partition(request: Subscription, streams: Catalogue, served: LogName) -> Subscription:
    """Return a subscription with the start and the credit that it names for the connection's partition.

    Raises Refused (UNKNOWN_STREAM, WRONG_PARTITION, BAD_REQUEST).
    """
    if not request.partitions and request.stream == DEFAULT_LOG.stream:
        return request
    stream = streams.find(request.stream)
    for each in request.partitions or [PartitionStart(number) for number in range(stream.partitions)]:
        check_partition(stream, each.partition)
        check_served(LogName(request.stream, each.partition), served)
    if len(request.partitions) > 1:
        raise Refused(
            ErrorCode.BAD_REQUEST,
            f"partitions: partition {served.partition} is named twice: name each once",
            field="partitions",
        )
    for each in request.partitions:
        start = request.start if each.start is None else each.start
        credit = request.credit if each.credit is None else each.credit
        request = replace(request, start=start, credit=credit)
    return request
