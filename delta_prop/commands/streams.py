"""`streams`: lists, creates, alters, truncates and deletes streams, and erases vectors from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from delta_prop.client.facts import describe
from delta_prop.client.request_client import RequestClient
from delta_prop.commands.connect_options import ConnectOptions, source_of
from delta_prop.commands.status import format_value
from delta_prop.directory.readonly_log import open_disk
from delta_prop.hosting.streams import Streams
from delta_prop.platform import system
from delta_prop_broker.catalogue.store import read_catalogue
from delta_prop_broker.catalogue.stream import Stream
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Description, StreamChange, StreamDescription
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
    """Print one stream, of a server with the range of each partition. Raises as `list_streams`."""
    source = source_of(options)
    if isinstance(source, str):
        row = _to_row(read_catalogue(open_disk(source)).require(options.name))
    else:
        found = _describe(source, options.name, ranges=True).streams[0]
        ranges = [
            {
                "partition": each.partition,
                "start_offset": each.start_offset,
                "next_offset": each.log.next_offset,
            }
            for each in found.partitions
        ]
        row = _row_of(found) | {"ranges": ranges}
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
    settings = _read_settings(options.set)
    request = CreateStream(options.name, options.partitions, settings, options.if_not_exists, options.dry_run)
    return _change(options, request, "created")


def alter(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Change settings of a stream. Raises Refused, UsageError, LogBusy, OSError."""
    settings = _read_settings(options.set)
    if not settings:
        raise UsageError("nothing to alter: give --set NAME=VALUE, NAME= to reset one")
    return _change(options, AlterStream(options.name, settings, options.dry_run), "altered")


def delete(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Delete a stream with all its rows. Raises Refused, UsageError, LogBusy, OSError."""
    if not (options.yes or options.dry_run):
        raise UsageError(
            f"stream {options.name!r:.80}: all its rows would be deleted for good: give --yes, or --dry-run"
        )
    return _change(options, DeleteStream(options.name, options.dry_run), "deleted")


def truncate(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Remove the rows of a partition below an offset. Raises Refused, UsageError, LogBusy, OSError."""
    request = TruncateStream(options.name, options.before, options.partition, options.dry_run)
    return _change(options, request, "truncated")


def erase(options: Namespace) -> int | Coroutine[Any, Any, int]:
    """Erase a vector from all files. Raises Refused, UsageError, LogBusy, OSError."""
    if not (options.yes or options.dry_run):
        raise UsageError(
            f"vector {options.vector!r:.80}: it would be deleted for good: give --yes, or --dry-run"
        )
    timeout_ms = options.timeout_s * 1000
    request = EraseVector(options.name, options.vector, options.namespace, timeout_ms, options.dry_run)
    return _change(options, request, f"erased vector {options.vector!r}")


def _change(options: Namespace, request: StreamChange, done: str) -> int | Coroutine[Any, Any, int]:
    source = source_of(options)
    if isinstance(source, str):
        return _change_in_directory(options, source, request, done)
    changed = _ask(source, request)
    _report(options, _row_of(changed.streams[0]), done)
    return OK


async def _change_in_directory(options: Namespace, data: str, request: StreamChange, done: str) -> int:
    async with Streams(data=data) as streams:
        match request:
            case CreateStream():
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
                stream = await streams.erase(
                    request.name,
                    request.vector_id,
                    request.namespace,
                    timeout_s=request.timeout_ms / 1000,
                    dry_run=request.dry_run,
                )
    _report(options, _to_row(stream), done)
    return OK


def _report(options: Namespace, row: dict[str, Any], done: str) -> None:
    if options.json:
        system.put(json.dumps(row))
        return
    partitions = f"{row['partitions']} partition{'s' if row['partitions'] > 1 else ''}"
    would = "would be " if options.dry_run else ""
    system.confirm(f"{would}{done}: stream {row['name']!r}, id {row['id']}, {partitions}")


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


def _resolver(source: ConnectOptions, request: StreamChange) -> Callable[[Refused], Description | None]:
    """Return what maps a refusal to a response after an attempt that may have been carried out."""

    def resolve(refused: Refused) -> Description | None:
        if isinstance(request, CreateStream) and refused.code is ErrorCode.BAD_REQUEST:
            with suppress(Refused):
                return _describe(source, request.name)
        if isinstance(request, DeleteStream) and refused.code is ErrorCode.UNKNOWN_STREAM:
            return Description((StreamDescription(request.name, 0, ()),), {})
        return None

    return resolve


# --- values


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


def _read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE: true, false, a number or a word; nothing for None. Raises UsageError."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r:.80}: give NAME=VALUE, such as retention_s=86400")
        settings[name] = _parse_value(value)
    return settings


def _parse_value(text: str) -> bool | int | float | str | None:
    if not text:
        return None
    if text in ("true", "false"):
        return text == "true"
    for parse in (int, float):
        with suppress(ValueError):
            return parse(text)
    return text


VERBS = {
    "list": list_streams,
    "show": show,
    "create": create,
    "alter": alter,
    "delete": delete,
    "truncate": truncate,
    "erase": erase,
}
