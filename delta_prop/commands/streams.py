"""`streams`: lists, creates, alters, truncates and deletes streams, and erases vectors from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delta_prop.client.facts import describe, get
from delta_prop.client.request_client import RequestClient
from delta_prop.commands.connect_options import ConnectOptions, source_of
from delta_prop.commands.status import format_value
from delta_prop.commands.stream_arguments import (
    alteration_of,
    creation_of,
    deletion_of,
    erasure_of,
    stream_name_of,
    truncation_of,
)
from delta_prop.directory.readonly_log import open_disk
from delta_prop.hosting.streams import Streams
from delta_prop.platform import system
from delta_prop_broker.catalogue.store import read_catalogue
from delta_prop_broker.catalogue.stream import Stream, StreamSettings
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Description, FactState, StreamChange, StreamDescription
from delta_prop_wire.murmur import partition_of
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)

if TYPE_CHECKING:
    from argparse import Namespace

OK = 0
_TIMEOUT_S = 30.0
_FIX = "start the service or correct the address"
_DONE = {"create": "created", "alter": "altered", "delete": "deleted", "truncate": "truncated"}
_COLUMNS = ("name", "id", "partitions", "settings")


def list_streams(options: Namespace) -> int:
    """Print all streams. Raises Refused, UsageError, LogCorrupted, OSError."""
    source = source_of(options)
    if isinstance(source, str):
        rows = [_to_row(stream) for stream in read_catalogue(open_disk(source)).streams.values()]
    else:
        rows = [_row_of(found) for found in _describe(source).streams]
    if options.json:
        system.put_all(json.dumps(row) for row in rows)
    else:
        system.put(f"{'stream':24}  {'id':>10}  {'partitions':>10}  settings")
        for row in rows:
            name, stream_id, partitions, settings = (format_value(row[name]) for name in _COLUMNS)
            system.put(f"{name:24}  {stream_id:>10}  {partitions:>10}  {settings}")
    return OK


def show(options: Namespace) -> int:
    """Print one stream, of a server with the range of each used partition. Raises as `list_streams`."""
    name = stream_name_of(options)
    source = source_of(options)
    if isinstance(source, str):
        row = _to_row(read_catalogue(open_disk(source)).require(name))
    else:
        found = _describe(source, name, ranges=True).streams[0]
        ranges = [
            {
                "partition": each.partition,
                "start_offset": each.start_offset,
                "next_offset": each.log.next_offset,
            }
            for each in found.partitions
        ]
        row = _row_of(found) | {"never_used": found.count - len(ranges), "ranges": ranges}
    if options.json:
        system.put(json.dumps(row))
        return OK
    partitions = row.pop("ranges", [])
    system.put_all(f"{name:10}  {format_value(value)}" for name, value in row.items())
    if partitions:
        system.put(f"{'partition':>10}  {'start':>14}  {'end':>14}")
        for each in partitions:
            number, start, end = map(format_value, each.values())
            system.put(f"{number:>10}  {start:>14}  {end:>14}")
    return OK


def create(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Create a stream. Raises Refused, UsageError, LogBusy, OSError."""
    return _change(options, creation_of(options))


def alter(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Change settings of a stream. Raises Refused, UsageError, LogBusy, OSError."""
    return _change(options, alteration_of(options))


def delete(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Delete a stream with all its rows. Raises Refused, UsageError, LogBusy, OSError."""
    return _change(options, deletion_of(options))


def truncate(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Remove the rows of a partition below an offset. Raises Refused, UsageError, LogBusy, OSError."""
    return _change(options, truncation_of(options))


def erase(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Erase a vector from all files. Raises Refused, UsageError, LogBusy, OSError."""
    return _change(options, erasure_of(options))


def _change(options: Namespace, request: StreamChange) -> int | Coroutine[Any, Any, int]:
    source = source_of(options)
    if isinstance(source, str):
        streams = Streams(data=source)
        _check_directory(source, request)
        return _change_in_directory(options, streams, request)
    existed, found = None, None
    if isinstance(request, CreateStream) and request.if_not_exists:
        existed = _find_id(source, request.name)
    elif isinstance(request, EraseVector):
        found = _ask_whether_known(source, request)
    changed = _row_of(_ask(source, request).streams[0])
    _report(options, request, changed, existed=existed == changed["id"], found=found)
    return OK


def _check_directory(data: str, request: StreamChange) -> None:
    """Check that a directory can have this change before it is opened, which would create it.

    Raises Refused, UsageError, LogCorrupted, OSError.
    """
    if not isinstance(request, CreateStream) or request.dry_run:
        open_disk(data)
    if isinstance(request, CreateStream):
        read_catalogue(system.open_disk_at(data)).create(
            request.name,
            partitions=request.partitions,
            settings=StreamSettings().changed(dict(request.settings)),
            now_us=0,
            if_not_exists=request.if_not_exists,
        )


async def _change_in_directory(options: Namespace, streams: Streams, request: StreamChange) -> int:
    existed, found = False, None
    async with streams:
        match request:
            case CreateStream():
                existed = request.name in streams.catalogue.streams
                stream = await streams.create(
                    request.name,
                    request.partitions,
                    settings=request.settings,
                    if_not_exists=request.if_not_exists,
                    dry_run=request.dry_run,
                )
            case AlterStream():
                stream = await streams.alter(request.name, request.settings, dry_run=request.dry_run)
            case DeleteStream():
                stream = await streams.delete(request.name, dry_run=request.dry_run)
            case TruncateStream():
                stream = await streams.truncate(
                    request.name, request.before, request.partition, dry_run=request.dry_run
                )
            case EraseVector():
                found = await streams.has_vector(request.name, request.vector_id, request.namespace)
                stream = await streams.erase(
                    request.name,
                    request.vector_id,
                    request.namespace,
                    timeout_s=request.timeout_ms / 1000,
                    dry_run=request.dry_run,
                )
    _report(options, request, _to_row(stream), existed=existed, found=found)
    return OK


# --- reports


def _report(
    options: Namespace, request: StreamChange, row: dict[str, Any], *, existed: bool, found: bool | None
) -> None:
    """Print what was done to a stream. `existed`: it was there before; `found`: as `has_vector` has it."""
    if isinstance(request, EraseVector):
        _report_erasure(options, request, row, found)
        return
    if options.json:
        fields = {"existed": existed} if isinstance(request, CreateStream) else {}
        system.put(json.dumps(row | fields))
        return
    stream = f"stream {row['name']!r}, id {row['id']}, {row['partitions']} partition"
    stream += "s" if row["partitions"] > 1 else ""
    if existed:
        system.confirm(f"exists already: {stream}")
    elif request.dry_run:
        system.confirm(f"would {options.streams_verb} {stream}")
    else:
        system.confirm(f"{_DONE[options.streams_verb]}: {stream}")


def _report_erasure(
    options: Namespace, request: EraseVector, row: dict[str, Any], found: bool | None
) -> None:
    stream, vector_id, namespace = row["name"], request.vector_id, request.namespace
    assert namespace is not None
    partition = partition_of(namespace, vector_id, row["partitions"])
    if options.json:
        vector = {"vector_id": vector_id, "namespace": namespace, "partition": partition, "found": found}
        system.put(json.dumps(row | vector))
    else:
        done = "would erase" if request.dry_run else "erased"
        known = "; the log has it" if request.dry_run and found else ""
        system.confirm(
            f"{done} vector {vector_id!r} of namespace {namespace!r}: stream {stream!r}, partition "
            f"{partition}{known}"
        )
    place = f"vector {vector_id!r:.80} in namespace {namespace!r:.80}"
    fix = "give --namespace NAME if it is in another one"
    if found is False:
        action = "would be" if request.dry_run else "was"
        system.note(
            f"the log of stream {stream!r} has no {place}; only what files had left of one {action} removed: "
            f"{fix}"
        )
    elif found is None and (request.dry_run or options.namespace is None):
        system.note(f"it is not known whether stream {stream!r} had {place}: {fix}")


# --- a server


def _describe(source: ConnectOptions, stream: str | None = None, *, ranges: bool = False) -> Description:
    addresses, token, tls = source
    return describe(addresses, stream, ranges=ranges, token=token, tls=tls, timeout_s=_TIMEOUT_S)


def _ask(source: ConnectOptions, request: StreamChange) -> Description:
    client = RequestClient(
        "streams",
        source.token,
        source.tls,
        _TIMEOUT_S + (request.timeout_ms / 1000 if isinstance(request, EraseVector) else 0),
        _FIX,
        resolve_maybe_applied=_resolver(source, request),
    )
    response = client.ask(source.addresses, request)
    assert isinstance(response, Description)
    return response


def _find_id(source: ConnectOptions, stream: str) -> int | None:
    """Return the id of a stream; None if there is none. Raises Unreachable, UsageError."""
    with suppress(Refused):  # if it is another refusal, the change itself is refused as well
        return _describe(source, stream).streams[0].stream
    return None


def _ask_whether_known(source: ConnectOptions, request: EraseVector) -> bool | None:
    """Return True if a service knows a vector, also a deleted one; None if it cannot tell.

    Only a service with a sink that stores the states can. Raises Unreachable, UsageError.
    """
    addresses, token, tls = source
    with suppress(Refused):  # if the stream is unknown, the erasure itself is refused as well
        fact = get(
            addresses,
            request.vector_id,
            request.namespace,
            stream=request.name,
            token=token,
            tls=tls,
            timeout_s=_TIMEOUT_S,
        )
        return fact.state is not FactState.ABSENT
    return None


def _resolver(source: ConnectOptions, request: StreamChange) -> Callable[[Refused], Description | None]:
    """Return what maps a refusal to a response after an attempt that may have been carried out."""

    def resolve(refused: Refused) -> Description | None:
        is_new = isinstance(request, CreateStream) and not request.if_not_exists
        if is_new and refused.code is ErrorCode.BAD_REQUEST:
            with suppress(Refused):
                return _describe(source, request.name)
        if isinstance(request, DeleteStream) and refused.code is ErrorCode.UNKNOWN_STREAM:
            return Description((StreamDescription(request.name, 0, ()),), {})
        return None

    return resolve


# --- rows


def _to_row(stream: Stream) -> dict[str, Any]:
    fields = stream.to_json()
    return {name: fields[name] for name in _COLUMNS}


def _row_of(found: StreamDescription) -> dict[str, Any]:
    return {
        "name": found.name,
        "id": found.stream,
        "partitions": found.count,
        "settings": dict(found.settings),
    }


VERBS = {
    "list": list_streams,
    "show": show,
    "create": create,
    "alter": alter,
    "delete": delete,
    "truncate": truncate,
    "erase": erase,
}
