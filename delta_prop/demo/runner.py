"""Runs the demo from start to end: prepares the workspace, plays the scenes, and cleans up.

Returns an exit status. A user's mistake raises UsageError; Ctrl-C is a regular end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import anyio
from anyio.abc import TaskStatus

from delta_prop.demo import system
from delta_prop.demo.console import Console, Output, blank_unprintable, format_size
from delta_prop.demo.corpus import ParseFailed
from delta_prop.demo.fault_scenes import SLOWDOWN_FACTOR, crash_scene, slow_scene
from delta_prop.demo.scenes import (
    Play,
    answer_query,
    edit_scene,
    end_scene,
    index_scene,
    next_scene,
    publish_changes,
    read_scene,
    search_scene,
    verify_scene,
)
from delta_prop.demo.system import Terminal, Workspace
from delta_prop.demo.verify import Verdict
from delta_prop.demo.wiring import DELTAS_MAX, Wiring, open_wiring
from delta_prop_wire.errors import UsageError

INTERRUPTED = 130
FULL_BYTES = 1_000_000
"""Free bytes below which a folder counts as full."""
POLL_S = 0.5
"""Interval at which the folder is scanned for changed texts."""
_PROMPT = "search> "
_LOGGER = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command.

    `path`: the user's own folder; None: the standard library. `once`: without the interactive scene.
    `corrupt`: the sink in which a fault is planted. `json`: print the results as JSON, too. `keep`: leave the
    temporary folder.
    """

    path: str | None = None
    once: bool = False
    corrupt: str | None = None
    json: bool = False
    keep: bool = False


class _ConsoleHandler(logging.Handler):
    """Shows the service's own log messages on the console."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one message."""
        self._console.line(self._console.style("dim", f"  log: {blank_unprintable(record.getMessage())}"))


class Interrupt:
    """Handles Ctrl-C: cancels the innermost open scope."""

    def __init__(self) -> None:
        self._scopes: list[anyio.CancelScope] = []

    async def wait(self, *, task_status: TaskStatus[None]) -> None:
        """Handle each interrupt, until cancelled."""
        with system.receive_interrupts() as signals:
            task_status.started()
            async for _ in signals:
                for scope in self._scopes[-1:]:
                    scope.cancel()

    @contextmanager
    def scope(self) -> Iterator[anyio.CancelScope]:
        """Open a scope that an interrupt cancels."""
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            try:
                yield scope
            except Exception:
                if not scope.cancel_called:  # after an interrupt, waiting for a sink may raise this
                    raise
            finally:
                self._scopes.pop()


async def run_demo(options: Options, output: Output) -> int:
    """Run the full demo. Raises UsageError."""
    terminal = system.detect_terminal()
    timer = system.PreciseTimer()
    console = Console(output, timer, columns=terminal.columns, live=terminal.live, color=terminal.color)
    folder = system.find_standard_library() if options.path is None else system.resolve_folder(options.path)
    if folder is None:
        raise UsageError(f"--path {options.path}: no folder of that name can be read: name another")
    workspace, interrupt = _create_workspace(), Interrupt()
    status = INTERRUPTED
    handler = _ConsoleHandler(console)
    _LOGGER.addHandler(handler)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(interrupt.wait)
            with interrupt.scope():
                play = Play(
                    console, workspace, folder, options.path is not None, timer, system.find_command()
                )
                status = await _run_all(play, options, terminal, interrupt)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _explain_full_disk(_unwrap(group), workspace) from group
    finally:
        _LOGGER.removeHandler(handler)
        if not options.keep:
            workspace.remove()
    if status == INTERRUPTED:
        console.end_progress()
        console.line("interrupted")
    if options.keep:
        console.line(f"kept: {workspace.root}")
    return status


async def _run_all(play: Play, options: Options, terminal: Terminal, interrupt: Interrupt) -> int:
    console, started = play.console, play.timer.now()
    by_hand = terminal.interactive and not options.once
    texts = "the standard library" if not play.is_own else blank_unprintable(str(play.folder))
    console.line(console.style("bold", f"delta-prop demo: search {texts} while you edit it"))
    _print_title(console, "1 index", "each text becomes a delta; store, index, cache and a listener get it")
    await read_scene(play)
    verdicts: list[Verdict] | None = None
    # An interrupt ends the scenes only; the service then closes in order, as after the last scene.
    async with open_wiring(play.workspace, play.timer) as wiring:
        with interrupt.scope():
            verdicts = await _run_scenes(play, wiring, options, interrupt if by_hand else None)
        if verdicts is not None:
            end_scene(play, wiring, play.timer.now() - started)
    if verdicts is None:
        return INTERRUPTED
    next_scene(play)
    if options.json:
        console.line(json.dumps(play.facts))
    return 0 if all(verdict.is_identical for verdict in verdicts) else 1


async def _run_scenes(
    play: Play, wiring: Wiring, options: Options, interrupt: Interrupt | None
) -> list[Verdict]:
    """Play the scenes that need the service; the interactive one only if `interrupt` is given."""
    console = play.console
    await index_scene(play, wiring)
    _print_title(console, "2 search", "words in, nearest texts out")
    await search_scene(play, wiring)
    _print_title(console, "3 edit", "two words change a few numbers, so the delta is small")
    await edit_scene(play, wiring)
    _print_title(console, "4 slow", f"one sink is slowed {SLOWDOWN_FACTOR} x; the others keep their pace")
    await slow_scene(play, wiring)
    _print_title(console, "5 crash", "a store is killed in the middle of a batch, and comes back")
    await crash_scene(play, wiring)
    if interrupt is not None:
        _print_title(console, "6 by hand", "edit the texts, search them")
        await _run_interactive(play, wiring, interrupt)
    number = 6 if interrupt is None else 7
    _print_title(console, f"{number} verify", f"each sink against the {wiring.delta_count:,} published lines")
    verdicts = await verify_scene(play, wiring, options.corrupt)
    _print_title(console, f"{number + 1} end", "")
    return verdicts


async def _run_interactive(play: Play, wiring: Wiring, interrupt: Interrupt) -> None:
    """Watch the folder and answer searches, until an empty line, Ctrl-D or Ctrl-C."""
    console = play.console
    console.line(f"  edit anything below {play.folder if play.is_own else play.workspace.texts}")
    console.line("  type words to search; an empty line ends")
    with interrupt.scope():
        async with anyio.create_task_group() as tasks:

            async def watch_until_full() -> None:
                await _watch_folder(play, wiring)
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch_until_full)
            console.prompt(_PROMPT)
            async for line in system.read_typed_lines():
                console.prompt("")
                if not line:
                    break
                answer_query(play, wiring, line)
                console.prompt(_PROMPT)
            tasks.cancel_scope.cancel()
    console.prompt("")


async def _watch_folder(play: Play, wiring: Wiring) -> None:
    while wiring.delta_count < DELTAS_MAX:
        await anyio.sleep(POLL_S)
        new_scan = play.scan()
        changes = compare_scans(play.last_scan, new_scan)
        play.last_scan = new_scan
        for path in [*changes.removed, *changes.modified]:
            text = play.read(path)
            if text is None and path in new_scan:
                continue  # the file is half written, or no longer a text
            try:
                deltas = play.library.edit(path, text)
            except ParseFailed as error:
                play.console.line(f"  {blank_unprintable(str(error))}: its documents stay as they were")
                continue
            # An interrupt must wait here: deltas that count as published must be published and recorded.
            with anyio.CancelScope(shield=True):
                await publish_changes(play, wiring, deltas)
    play.console.line(f"  {wiring.delta_count:,} deltas are the maximum of this demo; it ends here")


def _print_title(console: Console, name: str, description: str) -> None:
    console.line()
    console.line(console.style("bold", name) + (f"   {description}" if description else ""))


def _create_workspace() -> Workspace:
    try:
        return system.create_workspace()
    except OSError as error:
        raise UsageError(
            f"temporary folder: it cannot be created ({error}): name one with TMPDIR=DIR"
        ) from error


def _explain_full_disk(error: BaseException, workspace: Workspace) -> BaseException:
    """Return a UsageError in place of an error that a full disk has caused; return other errors unchanged."""
    if isinstance(error, UsageError | BrokenPipeError) or not isinstance(error, Exception):
        return error
    if workspace.free_bytes > FULL_BYTES and not (isinstance(error, OSError) and system.is_full(error)):
        return error
    return UsageError(
        f"{workspace.root} has {format_size(workspace.free_bytes)} free, which is not enough ({error}): "
        "free some, or name another folder with TMPDIR=DIR"
    )


def _unwrap(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the single exception in a group, or the group if it has more than one."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner


class Changes(NamedTuple):
    """Paths that are new or modified, and paths that were removed."""

    modified: list[str]
    removed: list[str]


def compare_scans(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> Changes:
    """Return the changes between two scans, ordered by path."""
    modified = sorted(path for path, stat in after.items() if before.get(path) != stat)
    return Changes(modified, sorted(before.keys() - after.keys()))
