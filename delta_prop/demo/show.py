"""Plays the demo from beginning to end: sets the stage, plays the scenes, clears up whatever happened.

Returns an exit status; a user's mistake is a UsageError, and Ctrl-C an ordinary end.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop.demo import edge
from delta_prop.demo.console import Console, printable, size
from delta_prop.demo.corpus import NotParsed
from delta_prop.demo.ending import end_scene, next_scene, verify_scene
from delta_prop.demo.pressure import SLOWER, crash_scene, slow_scene
from delta_prop.demo.scenes import (
    Play,
    answer,
    edit_scene,
    index_scene,
    publish_changes,
    read_scene,
    search_scene,
)
from delta_prop.demo.watch import POLL_S, changes
from delta_prop.demo.wiring import DELTAS_MAX, wired
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anyio.abc import TaskStatus

    from delta_prop.demo.edge import Place, Terminal
    from delta_prop.demo.verify import Verdict
    from delta_prop.demo.wiring import Wiring

INTERRUPTED = 130
FULL_BYTES = 1_000_000
"""A folder with less room counts as full."""
_PROMPT = "search> "
_LOGGER = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was told. `path`: the user's own folder, None for the standard library."""

    path: str | None = None
    once: bool = False
    spoil: str | None = None
    json: bool = False
    keep: bool = False


class _Log(logging.Handler):
    """Shows what the service itself has to say, where it happens."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        self._console.line(self._console.style("dim", f"  log: {printable(record.getMessage())}"))


class Interrupt:
    """Ctrl-C ends the innermost scope that is open."""

    def __init__(self) -> None:
        self._scopes: list[anyio.CancelScope] = []

    async def wait(self, *, task_status: TaskStatus[None]) -> None:
        """Pass each interrupt on, until cancelled."""
        with edge.interrupts() as signals:
            task_status.started()
            async for _ in signals:
                for scope in self._scopes[-1:]:
                    scope.cancel()

    @contextmanager
    def scope(self) -> Iterator[anyio.CancelScope]:
        """A part that an interrupt ends."""
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            try:
                yield scope
            except Exception:
                if not scope.cancel_called:  # else whoever waited for a sink was told that it ends
                    raise
            finally:
                self._scopes.pop()


async def show(options: Options, write: Callable[[str], object]) -> int:
    """The whole demo. Raises UsageError."""
    terminal = edge.terminal()
    console = Console(write, edge.now, columns=terminal.columns, live=terminal.live, color=terminal.color)
    folder = edge.standard_library() if options.path is None else edge.folder(options.path)
    if folder is None:
        raise UsageError(f"--path {options.path}: there is no folder of that name that can be read")
    place, interrupt = _new_place(), Interrupt()
    status = INTERRUPTED
    log = _Log(console)
    _LOGGER.addHandler(log)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(interrupt.wait)
            with interrupt.scope():
                play = Play(console, place, folder, options.path is not None, edge.now, edge.command())
                status = await _play(play, options, terminal, interrupt)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _explained(_only(group), place) from group
    finally:
        _LOGGER.removeHandler(log)
        if not options.keep:
            place.remove()
    if status == INTERRUPTED:
        console.progress_done()
        console.line("interrupted")
    if options.keep:
        console.line(f"kept: {place.root}")
    return status


async def _play(play: Play, options: Options, terminal: Terminal, interrupt: Interrupt) -> int:
    console, started = play.console, play.now()
    by_hand = terminal.interactive and not options.once
    what = "the standard library" if not play.own else printable(str(play.folder))
    console.line(console.style("bold", f"delta-prop demo: search {what} while you edit it"))
    _title(console, "1 index", "each text becomes a delta; store, index, cache and a listener get it")
    await read_scene(play)
    verdicts: list[Verdict] | None = None
    # An interrupt ends the scenes, not the service: that ends in order, as it does after the last scene.
    async with wired(play.place, play.now) as wiring:
        with interrupt.scope():
            verdicts = await _scenes(play, wiring, options, interrupt if by_hand else None)
        if verdicts is not None:
            end_scene(play, wiring, play.now() - started)
    if verdicts is None:
        return INTERRUPTED
    next_scene(play)
    if options.json:
        console.line(json.dumps(play.facts))
    return 0 if all(one.identical for one in verdicts) else 1


async def _scenes(play: Play, wiring: Wiring, options: Options, interrupt: Interrupt | None) -> list[Verdict]:
    """All scenes but the first and the last; by hand as well, where there is somebody to interrupt."""
    console = play.console
    await index_scene(play, wiring)
    _title(console, "2 search", "words in, nearest texts out")
    await search_scene(play, wiring)
    _title(console, "3 edit", "two words change a few numbers, so the delta is small")
    await edit_scene(play, wiring)
    _title(console, "4 slow", f"one sink is slowed {SLOWER} x; the others keep their pace")
    await slow_scene(play, wiring)
    _title(console, "5 crash", "a store is killed in the middle of a batch, and comes back")
    await crash_scene(play, wiring)
    if interrupt is not None:
        _title(console, "6 by hand", "edit the texts, search them")
        await _by_hand(play, wiring, interrupt)
    number = 6 if interrupt is None else 7
    _title(console, f"{number} verify", f"each sink against the {wiring.deltas:,} published lines")
    verdicts = await verify_scene(play, wiring, options.spoil)
    _title(console, f"{number + 1} end", "")
    return verdicts


async def _by_hand(play: Play, wiring: Wiring, interrupt: Interrupt) -> None:
    """Watch the folder and answer searches, until an empty line, Ctrl-D or Ctrl-C."""
    console = play.console
    console.line(f"  edit anything below {play.folder if play.own else play.place.texts}")
    console.line("  type words to search; an empty line ends")
    with interrupt.scope():
        async with anyio.create_task_group() as tasks:

            async def watching() -> None:
                await _watch(play, wiring)
                tasks.cancel_scope.cancel()

            tasks.start_soon(watching)
            console.prompt(_PROMPT)
            async for line in edge.typed_lines():
                console.prompt("")
                if not line:
                    break
                answer(play, wiring, line)
                console.prompt(_PROMPT)
            tasks.cancel_scope.cancel()
    console.prompt("")


async def _watch(play: Play, wiring: Wiring) -> None:
    while wiring.deltas < DELTAS_MAX:
        await anyio.sleep(POLL_S)
        seen = play.scan()
        changed = changes(play.seen, seen)
        play.seen = seen
        for path in [*changed.gone, *changed.touched]:
            text = play.read(path)
            if text is None and path in seen:
                continue  # half written, or no text any more
            try:
                deltas = play.library.edit(path, text)
            except NotParsed as error:
                play.console.line(f"  {printable(str(error))}: its documents stay as they were")
                continue
            # Shielded: what is counted as published has to be, line and all.
            with anyio.CancelScope(shield=True):
                await publish_changes(play, wiring, deltas)
    play.console.line(f"  {wiring.deltas:,} deltas are as many as this demo follows; it ends here")


def _title(console: Console, name: str, what: str) -> None:
    console.line()
    console.line(console.style("bold", name) + (f"   {what}" if what else ""))


def _new_place() -> Place:
    try:
        return edge.new_place()
    except OSError as error:
        raise UsageError(f"no temporary folder can be made ({error}): name one with TMPDIR=DIR") from error


def _explained(error: BaseException, place: Place) -> BaseException:
    """What went wrong for want of room is told as that, whoever met it first."""
    if isinstance(error, UsageError | BrokenPipeError) or not isinstance(error, Exception):
        return error
    if place.free_bytes > FULL_BYTES and not (isinstance(error, OSError) and edge.is_full(error)):
        return error
    return UsageError(
        f"{place.root} has room for {size(place.free_bytes)}, which is not enough ({error}): "
        "free some, or name another folder with TMPDIR=DIR"
    )


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception inside; the group where there are more."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
