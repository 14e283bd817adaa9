"""The demo's contact with the world: its temporary folder, the texts, the terminal, Ctrl-C.

The only module of the demo that touches them. It writes in the temporary folder alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sqlite3
import sys
import sysconfig
import tempfile
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, TextIO

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from contextlib import AbstractContextManager

now = time.perf_counter
"""Seconds, finer than the event loop's clock: a delta's way takes less than one of uvloop's milliseconds."""

FILE_BYTES_MAX = 1024 * 1024
FILES_MAX = 20_000
LOOKED_AT_MAX = 200_000
LINE_BYTES_MAX = 4_096

_PYTHON = frozenset({".py"})
_PROSE = frozenset({".adoc", ".markdown", ".md", ".org", ".rst", ".txt"})


@dataclass(frozen=True, slots=True)
class Kept:
    """Which files of a tree count: those of these kinds, outside folders of these names."""

    suffixes: frozenset[str]
    skipped: frozenset[str]


_TESTS = {"idle_test", "test", "tests"}
_APART = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "turtledemo"}
IN_LIBRARY = Kept(_PYTHON, frozenset({"__pycache__", *_TESTS, *_APART}))
IN_OWN = Kept(_PYTHON | _PROSE, frozenset({"__pycache__", "build", "dist", "env", "node_modules", "venv"}))
IN_COPIES = Kept(_PYTHON | _PROSE, frozenset({"__pycache__"}))

Seen = dict[str, tuple[int, int]]
"""What a scan of a folder saw: path below it to (time of change in ns, size)."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """What standard input and output are."""

    live: bool
    interactive: bool
    color: bool
    columns: int


@dataclass(frozen=True, slots=True)
class Place:
    """The temporary folder: `texts` is what may be edited, `published` the lines, `store` the SQLite file."""

    root: Path

    @property
    def texts(self) -> Path:
        """Copies of the texts."""
        return self.root / "texts"

    @property
    def published(self) -> Path:
        """Every published delta as one JSON line."""
        return self.root / "published.jsonl"

    @property
    def store(self) -> Path:
        """The storage sink's file."""
        return self.root / "store.db"

    @property
    def audit(self) -> Path:
        """The audit sink's file: deltas as JSON lines, with their offsets."""
        return self.root / "audit.jsonl"

    @property
    def replica(self) -> Path:
        """The SQLite file of the store that is killed."""
        return self.root / "replica.db"

    @property
    def left(self) -> Path:
        """What the killed store leaves: a copy of its file and write-ahead log."""
        return self.root / "left" / "replica.db"

    def leave_replica(self) -> None:
        """Copy the replica's files as they lie there; nobody may write them meanwhile."""
        self.left.parent.mkdir()
        for suffix in ("", "-wal"):
            file = self.replica.with_name(self.replica.name + suffix)
            if file.exists():
                shutil.copyfile(file, self.left.with_name(file.name))

    def audited(self) -> Iterator[str]:
        """The audit sink's lines, from the first."""
        with self.audit.open(encoding="utf-8") as file:
            yield from file

    def copy(self, path: str, text: str) -> None:
        """Put a text where it may be edited."""
        target = self.texts / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def append_lines(self) -> TextIO:
        """The file of published lines, open for appending."""
        return self.published.open("a", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """The published lines, from the first."""
        with self.published.open(encoding="utf-8") as file:
            yield from file

    @property
    def free_bytes(self) -> int:
        """How much there is room for."""
        return shutil.disk_usage(self.root).free

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def spoil_audit(self) -> None:
        """Lose the last line but one."""
        lines = list(self.audited())
        del lines[-2:-1]
        self.audit.write_text("".join(lines), encoding="utf-8")

    def spoil_store(self, store: Path, namespace: str, vector_id: str, vector: list[float]) -> None:
        """Change one row behind a storage sink's back."""
        connection = sqlite3.connect(store)
        try:
            with connection:
                connection.execute("PRAGMA wal_autocheckpoint = 0")
                connection.execute(
                    "UPDATE vectors SET value = ? WHERE namespace = ? AND vector_id = ?",
                    (array("f", vector).tobytes(), namespace, vector_id),
                )
        finally:
            connection.close()


def is_full(error: OSError) -> bool:
    """Whether something could not be written for want of room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def new_place() -> Place:
    """A temporary folder of its own."""
    return Place(Path(tempfile.mkdtemp(prefix="delta-prop-demo-")).resolve())


def standard_library() -> Path:
    """Where the running interpreter's own modules lie."""
    return Path(sysconfig.get_paths()["stdlib"])


def scan(root: Path, kept: Kept, large: list[str] | None = None) -> Seen:
    """The texts below a folder, in order of path, 20,000 at most; hidden ones left out.

    So are those above 1 MiB, whose paths are added to `large`.
    """
    seen: Seen = {}
    looked_at = 0
    for folder_name, folders, files in os.walk(root):
        folders[:] = sorted(one for one in folders if one not in kept.skipped and not one.startswith("."))
        looked_at += len(folders) + len(files)
        for name in sorted(files):
            path = Path(folder_name, name)
            if path.suffix.lower() in kept.suffixes and not name.startswith("."):
                stat, relative = _stat(path), path.relative_to(root).as_posix()
                if stat is None or not relative.isprintable():  # names become ids, which are text
                    continue
                if stat[1] <= FILE_BYTES_MAX:
                    seen[relative] = stat
                elif large is not None and len(large) < FILES_MAX:
                    large.append(relative)
                if len(seen) >= FILES_MAX:
                    return seen
        if looked_at >= LOOKED_AT_MAX:
            break
    return seen


def read(root: Path, path: str) -> str | None:
    """A file's text, None where it is gone, unreadable or not UTF-8."""
    try:
        return (root / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def folder(name: str) -> Path | None:
    """The folder that somebody named; None where there is none that can be read."""
    root = Path(name).expanduser().resolve()
    return root if root.is_dir() and os.access(root, os.R_OK | os.X_OK) else None


def command() -> str:
    """How to call this program again from here: by name, through a checkout's `run`, as a module, by path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m delta_prop"
    if shutil.which("delta-prop") or called.name != "delta-prop":
        return "delta-prop"
    script = called.parent.parent.parent / "run"
    return f"{_from_here(script)} delta-prop" if os.access(script, os.X_OK) else _from_here(called)


def terminal() -> Terminal:
    """What this process was started with."""
    out, quiet = sys.stdout, os.environ.get("TERM") == "dumb"
    live = out.isatty() and not quiet
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")
    return Terminal(
        live=live,
        # What somebody types is awaited on its file descriptor, which Windows knows for sockets only.
        interactive=live and sys.platform != "win32" and sys.stdin is not None and sys.stdin.isatty(),
        color=live and not os.environ.get("NO_COLOR"),
        columns=shutil.get_terminal_size((80, 24)).columns,
    )


async def typed_lines() -> AsyncIterator[str]:
    """Lines from the terminal, without blocking the loop; ends with Ctrl-D."""
    descriptor = sys.stdin.fileno()
    waiting = b""
    while True:
        await anyio.wait_readable(descriptor)
        chunk = os.read(descriptor, LINE_BYTES_MAX)
        if not chunk:
            return
        waiting = (waiting + chunk)[-LINE_BYTES_MAX:]
        while b"\n" in waiting:
            line, _, waiting = waiting.partition(b"\n")
            yield line.decode(errors="replace").strip()


def interrupts() -> AbstractContextManager[AsyncIterator[signal.Signals]]:
    """Each Ctrl-C, request to end, or closing of the terminal, while the block is open."""
    return anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_writing() -> None:
    """Let what is still buffered for a reader who has gone go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _from_here(path: Path) -> str:
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path)


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):  # a pipe or a device might never end
        return None
    return stat.st_mtime_ns, stat.st_size
