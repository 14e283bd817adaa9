"""`top`, `status` and `sinks` of a running server: shows the responses of its HTTP port as text or JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.commands.connect_options import connect_options_of
from delta_prop.commands.http_client import HttpClient, NoAnswer
from delta_prop.commands.screen import StatusSample, format_lag, render
from delta_prop.commands.status import flatten, format_value
from delta_prop.commands.tables import Table, are_of_several, describe_closed, find_closed, select_rows
from delta_prop.commands.wait_reporter import NO_HTTP_PORT, WaitReporter
from delta_prop.platform import system
from delta_prop.platform.world import real_world
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

OK, FAILED = 0, 1
DRAW_S = 1.0


@asynccontextmanager
async def _open_http_client(options: Namespace) -> AsyncIterator[HttpClient]:
    """Open a client of the given HTTP port; report while the port is silent. Raises UsageError."""
    network = real_world().network
    assert network is not None
    wait_reporter = WaitReporter(NO_HTTP_PORT)
    async with wait_reporter.report(), HttpClient(network, connect_options_of(options)) as http_client:
        wait_reporter.is_waiting = lambda: not http_client.has_answered
        yield http_client


async def fetch(options: Namespace, path: str) -> Any:
    """Return the JSON at a path of the given HTTP port. Raises UsageError, NoAnswer."""
    async with _open_http_client(options) as http_client:
        return await http_client.get(path)


async def fetch_rows(options: Namespace, path: str, key: str | None = None) -> list[Mapping[str, Any]]:
    """Return the rows at a path, or at its `key`, of the partitions that the options name.

    Notes which of these are not open, so that the server has no rows of them. Raises UsageError, NoAnswer.
    """
    async with _open_http_client(options) as http_client:
        content = await http_client.get(path)
        status = await http_client.get("/api/status")
    _check_place(status, options)
    closed = find_closed(status["streams"], options)
    if closed:
        system.note(describe_closed(closed))
    return select_rows(content if key is None else content[key], options)


def _check_place(status: Mapping[str, Any], options: Namespace) -> None:
    """Check that the server has what the options name, if it has opened its streams. Raises UsageError."""
    if options.stream is None and options.partition is None:
        return
    counts = {stream["name"]: stream["partitions"] for stream in status["streams"]}
    name = options.stream or DEFAULT_STREAM
    if not counts:
        return
    if name not in counts:
        raise UsageError(f"stream {name!r:.80}: unknown: give one of {', '.join(list(counts)[:10])}")
    if options.partition is not None and options.partition >= counts[name]:
        raise UsageError(
            f"partition {options.partition}: stream {name!r} has {counts[name]}: name 0 to {counts[name] - 1}"
        )


async def show_server_status(options: Namespace) -> int:
    """Print the server's state; return exit status 1 if it is not ready. Raises UsageError, NoAnswer."""
    status = await fetch(options, "/api/status")
    partitions: list[Mapping[str, Any]] = [
        open_one | {"stream": stream["name"], "state": "open"}
        for stream in status["streams"]
        for open_one in stream["open"]
    ]
    _check_place(status, options)
    closed = find_closed(status["streams"], options)
    if closed:
        system.note(describe_closed(closed))
    if options.stream is not None or options.partition is not None:
        rows = [*select_rows(partitions, options), *closed]
        rows.sort(key=lambda row: (row["stream"], row["partition"]))
        if options.json:
            system.put_all(map(json.dumps, rows))
        else:
            _put_partitions(rows)
    elif options.json:
        system.put(json.dumps(status))
    else:
        lines = dict(flatten(status))
        width = max(map(len, lines))
        system.put_all(f"{name:{width}}  {format_value(value)}" for name, value in lines.items())
        if are_of_several(partitions):
            _put_partitions(partitions)
    return OK if status["ready"] else FAILED


def _put_partitions(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print open partitions, and the names of closed ones."""
    table = Table(has_partitions=True)
    table.put_head(f"{'state':6}  {'start':>12}  {'next':>12}  {'bytes':>14}  {'accepted':>12}  log_id")
    for row in rows:
        numbers = ""
        if row["state"] == "open":
            numbers = (
                f"{row['start_offset']:>12,}  {row['next_offset']:>12,}  {row['bytes']:>14,}  "
                f"{row['accepted']:>12,}  {row['log_id']}"
            )
        table.put(row, f"{row['state']:6}  {numbers}")


async def show_server_sinks(options: Namespace) -> int:
    """Print each attached sink and its progress. Raises UsageError, NoAnswer."""
    sinks = await fetch_rows(options, "/api/sinks")
    if options.json:
        system.put_all(map(json.dumps, sinks))
        return OK
    table = Table(has_partitions=are_of_several(sinks))
    table.put_head(
        f"{'name':24}  {'state':13}  {'offset':>12}  {'lag':>12}  {'lag time':>8}  {'quarantined':>11}  notes"
    )
    for sink in sinks:
        lag = format_lag(sink["lag_s"])
        numbers = f"{sink['applied_offset']:>12,}  {sink['lag']:>12,}  {lag:>8}  {sink['quarantined']:>11,}"
        progress = sink["rebuild"]
        rebuilt = progress and f"{progress['rows_done']:,} of {progress['rows_total']:,} rows rebuilt"
        notes = "; ".join(filter(None, (rebuilt, sink["reason"])))
        table.put(sink, f"{sink['name']:24}  {sink['state']:13}  {numbers}  {notes}")
    return OK


async def show_top(options: Namespace) -> int:
    """Redraw a server's state each second until interrupted; without a terminal, draw once after a second.

    Raises UsageError; NoAnswer if the server does not answer at the start.
    """
    async with _open_http_client(options) as http_client:
        sample = await _poll(http_client)
        if options.once or not system.Canvas.is_possible():
            width, _ = system.read_terminal_size()
            await anyio.sleep(DRAW_S)  # rates are differences
            lines = render(await _poll(http_client), sample, name=http_client.name, width=width, height=1_000)
            system.put_all(iter(lines))
            return OK
        with system.Canvas() as canvas:
            before: StatusSample | None = None
            while True:
                width, height = system.read_terminal_size()
                canvas.draw(render(sample, before, name=http_client.name, width=width, height=height))
                before, sample = sample, await _poll_next(http_client, canvas)


async def _poll_next(http_client: HttpClient, canvas: system.Canvas) -> StatusSample:
    """Return the next sample after a pause; while there is none, keep the last screen and note the reason."""
    while True:
        await anyio.sleep(DRAW_S)
        try:
            return await _poll(http_client)
        except NoAnswer as failure:
            canvas.note(str(failure))


async def _poll(http_client: HttpClient) -> StatusSample:
    status, sinks = await http_client.get("/api/status"), await http_client.get("/api/sinks")
    return StatusSample(system.now(), status, sinks)
