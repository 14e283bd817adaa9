"""Answers requests about streams: their description, and their changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import (
    Describe,
    Description,
    StreamChange,
    StreamDescription,
)
from delta_prop_wire.requests import known_requests
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stream_requests import AlterStream, CreateStream, DeleteStream, TruncateStream

if TYPE_CHECKING:
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.server_context import ServerContext

_PAGE_BYTES_MAX = 60_000
_STREAM_BYTES_MAX, _RANGE_BYTES_MAX = 4_500, 57
"""What a stream without ranges, and a range, take at most in a page."""
_RANGES_PER_PAGE = 900
_RETRY_MS = 1_000


def describe(request: Describe, context: ServerContext) -> list[Description]:
    """Return the pages that describe all streams, or one, as far as they are open. Raises Refused."""
    partitions = context.partitions
    if request.stream is None:
        return _pages(partitions.describe(), context)
    return _pages([partitions.describe_one(partitions.streams.catalogue.require(request.stream))], context)


async def describe_fully(request: Describe, context: ServerContext) -> list[Description]:
    """Describe them after opening all partitions of the stream, if one is named. Raises Refused."""
    if request.stream is not None:
        await context.partitions.open_all(request.stream)
    return describe(request, context)


async def change(
    request: StreamChange, context: ServerContext, permissions: Permissions
) -> list[Description]:
    """Carry out a change; return the description of the stream. Raises Refused."""
    permissions.check_manage()
    partitions, streams = context.partitions, context.partitions.streams
    try:
        match request:
            case CreateStream():
                changed = await streams.create(
                    request.name,
                    request.partitions,
                    settings=request.settings,
                    if_not_exists=request.if_not_exists,
                    dry_run=request.dry_run,
                )
            case AlterStream():
                changed = await streams.alter(request.name, request.settings, dry_run=request.dry_run)
            case DeleteStream():
                changed = await streams.delete(request.name, dry_run=request.dry_run)
            case TruncateStream():
                raise UsageError("truncate_stream: unsupported here: alter retention_bytes instead")
    except UsageError as error:
        raise Refused(ErrorCode.BAD_REQUEST, str(error)) from None
    except OSError as error:
        raise Refused(
            ErrorCode.LOG_FAILED,
            f"the disk fails with {error}: see which streams there are, and try again",
            retry_after_ms=_RETRY_MS,
        ) from None
    return _pages([partitions.describe_one(changed)], context)


def _pages(streams: Iterable[StreamDescription], context: ServerContext) -> list[Description]:
    level, features = context.partition.log.ack_level, tuple(context.features)
    return [Description(tuple(page), known_requests(), features, level) for page in _split(streams)]


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
