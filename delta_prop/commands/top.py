"""`top`, and `status` and `sinks` of a running server: what its HTTP port tells, for eyes or as JSON."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from delta_prop.commands import edge
from delta_prop.commands.look import flat, shown
from delta_prop.commands.screen import Shot, screen, shown_lag
from delta_prop.commands.waiting import NO_HTTP_PORT, Waiting
from delta_prop.commands.web import NotTold, Web
from delta_prop.world import real_world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delta_prop.commands.connecting import Link

OK, FAILED = 0, 1
DRAW_S = 1.0


@asynccontextmanager
async def web_of(link: Link) -> AsyncIterator[Web]:
    """The HTTP port that somebody named; that it is silent is told. Raises UsageError."""
    network = real_world().network
    assert network is not None
    waiting = Waiting(NO_HTTP_PORT)
    async with waiting.told(), Web(network, link) as web:
        waiting.busy = lambda: not web.answered
        yield web


async def status(link: Link, *, as_json: bool) -> int:
    """The server's state; exit status 1 where it is not ready. Raises UsageError, NotTold."""
    async with web_of(link) as web:
        told: dict[str, Any] = await web.get("/api/status")
    if as_json:
        edge.put(json.dumps(told))
    else:
        lines = dict(flat(told))
        width = max(map(len, lines))
        edge.put_all(f"{name:{width}}  {shown(value)}" for name, value in lines.items())
    return OK if told["ready"] else FAILED


async def sinks(link: Link, *, as_json: bool) -> int:
    """Each attached sink, and how far it is. Raises UsageError, NotTold."""
    async with web_of(link) as web:
        told: list[dict[str, Any]] = await web.get("/api/sinks")
    if as_json:
        edge.put_all(map(json.dumps, told))
        return OK
    edge.put(
        f"{'name':24}  {'state':13}  {'offset':>12}  {'lag':>12}  {'lag time':>8}  {'quarantined':>11}  notes"
    )
    for one in told:
        late = shown_lag(one["lag_s"])
        numbers = f"{one['applied']:>12,}  {one['lag']:>12,}  {late:>8}  {one['quarantined']:>11,}"
        progress = one["rebuild"]
        rebuilt = progress and f"{progress['rows_done']:,} of {progress['rows_total']:,} rows are rebuilt"
        notes = "; ".join(filter(None, (rebuilt, one["reason"])))
        edge.put(f"{one['name']:24}  {one['state']:13}  {numbers}  {notes}".rstrip())
    return OK


async def top(link: Link, *, once: bool) -> int:
    """Draw what happens each second, until interrupted; once, a second later, where there is no terminal.

    Raises UsageError; NotTold where it cannot even be asked at the start.
    """
    async with web_of(link) as web:
        shot = await _look(web)
        if once or not edge.Canvas.possible():
            width, _ = edge.terminal_size()
            await anyio.sleep(DRAW_S)  # rates are differences
            lines = screen(await _look(web), shot, name=web.name, width=width, height=1_000)
            edge.put_all(iter(lines))
            return OK
        with edge.Canvas() as canvas:
            before: Shot | None = None
            while True:
                width, height = edge.terminal_size()
                canvas.draw(screen(shot, before, name=web.name, width=width, height=height))
                before, shot = shot, await _next_look(web, canvas)


async def _next_look(web: Web, canvas: edge.Canvas) -> Shot:
    """After a pause. While it cannot be had, the last one stays, with why there is no newer one."""
    while True:
        await anyio.sleep(DRAW_S)
        try:
            return await _look(web)
        except NotTold as failure:
            canvas.note(str(failure))


async def _look(web: Web) -> Shot:
    status, sinks = await web.get("/api/status"), await web.get("/api/sinks")
    return Shot(edge.now(), status, sinks)
