"""Answers requests about streams: their description, and their changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from delta_prop.server.partitions import explain_open_failure
from delta_prop.server.quotas import check_stream_count
from delta_prop_wire.delta import namespace_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Describe,
    Description,
    StreamChange,
    StreamDescription,
)
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.requests import known_requests
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.server_context import ServerContext
    from delta_prop_broker.catalogue.stream import Stream

_PAGE_BYTES_MAX = 60_000
_STREAM_BYTES_MAX, _RANGE_BYTES_MAX = 4_500, 57
"""What a stream without ranges, and a range, take at most in a page."""
_RANGES_PER_PAGE = 900
_RETRY_MS = 1_000


def describe(request: Describe, context: ServerContext, permissions: Permissions) -> list[Description]:
    """Return the pages that describe all streams that the token may use, or one, as far as they are open.

    Raises Refused.
    """
    partitions = context.partitions
    if request.stream is None:
        return _pages(partitions.describe(permissions), context)
    permissions.check_stream(request.stream)
    return _pages([partitions.describe_one(partitions.streams.catalogue.require(request.stream))], context)


async def describe_fully(
    request: Describe, context: ServerContext, permissions: Permissions
) -> list[Description]:
    """Describe them; a stream that is named with the ranges of all used partitions. Raises Refused."""
    if request.stream is None:
        return describe(request, context, permissions)
    permissions.check_stream(request.stream)
    return _pages([await context.partitions.describe_fully(request.stream)], context)


async def change(
    request: StreamChange, context: ServerContext, permissions: Permissions
) -> list[Description]:
    """Carry out a change; return the description of the stream. Raises Refused."""
    permissions.check_manage()
    permissions.check_stream(request.name)
    partitions, streams = context.partitions, context.partitions.streams
    try:
        match request:
            case CreateStream():
                changed = await _create(request, context)
            case AlterStream():
                changed = await streams.alter(request.name, request.settings, dry_run=request.dry_run)
            case DeleteStream():
                changed = await streams.delete(request.name, dry_run=request.dry_run)
            case TruncateStream():
                changed = await streams.truncate(
                    request.name, request.before, request.partition, dry_run=request.dry_run
                )
            case EraseVector():
                changed = await _erase(request, context)
    except UsageError as error:
        raise Refused(ErrorCode.BAD_REQUEST, str(error)) from None
    except OSError as error:
        raise Refused(
            ErrorCode.LOG_FAILED,
            f"the disk fails with {error}: see which streams there are, and try again",
            retry_after_ms=_RETRY_MS,
        ) from None
    return _pages([partitions.describe_one(changed)], context)


async def _create(request: CreateStream, context: ServerContext) -> Stream:
    """Create a stream, within the bounds of their number. Raises Refused, UsageError, OSError."""
    streams, settings = context.partitions.streams, context.settings
    async with context.partitions.creating:
        check_stream_count(
            request.name,
            request.partitions,
            streams.catalogue.streams,
            streams_max=settings.streams_max,
            partitions_max=settings.partitions_max,
        )
        return await streams.create(
            request.name,
            request.partitions,
            settings=request.settings,
            if_not_exists=request.if_not_exists,
            dry_run=request.dry_run,
        )


async def _erase(request: EraseVector, context: ServerContext) -> Stream:
    """Erase a vector. Raises Refused, UsageError, OSError."""
    partitions = context.partitions
    stream = partitions.streams.catalogue.require(request.name)
    namespace = request.namespace or namespace_of(request.vector_id)
    name = LogName(stream.stream_id, partition_of(namespace, request.vector_id, stream.partitions))
    async with explain_open_failure(name):
        await partitions.open(name)  # with its jobs, whose files may have the vector
    return await partitions.streams.erase(
        request.name,
        request.vector_id,
        namespace,
        timeout_s=request.timeout_ms / 1000,
        dry_run=request.dry_run,
    )


def _pages(streams: Iterable[StreamDescription], context: ServerContext) -> list[Description]:
    level, features = context.partition.log.ack_level, tuple(context.features)
    address = context.settings.advertise
    return [Description(tuple(page), known_requests(), features, level, address) for page in _split(streams)]


def _split(streams: Iterable[StreamDescription]) -> Iterator[list[StreamDescription]]:
    """Yield the streams in pages, each small enough for a frame; a stream may continue on the next page."""
    page: list[StreamDescription] = []
    left = _PAGE_BYTES_MAX
    for stream in streams:
        ranges = stream.partitions
        for start in range(0, max(len(ranges), 1), _RANGES_PER_PAGE):
            part = ranges[start : start + _RANGES_PER_PAGE]
            size = _STREAM_BYTES_MAX + _RANGE_BYTES_MAX * len(part)
            if page and size > left:
                yield page
                page, left = [], _PAGE_BYTES_MAX
            page.append(StreamDescription(stream.name, stream.stream, part, stream.count, stream.settings))
            left -= size
    yield page
