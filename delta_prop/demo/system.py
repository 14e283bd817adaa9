"""The demo's access to the system: its temporary folder, the texts, the terminal, Ctrl-C.

No other module of the demo has this access. It writes only in the temporary folder.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import TextIO

import anyio


class PreciseTimer:
    """The time in seconds. The event loop's clock is too coarse: uvloop's has steps of 1 ms."""

    now = staticmethod(time.perf_counter)


FILE_BYTES_MAX = 1024 * 1024
FILES_MAX = 20_000
SCANNED_ENTRIES_MAX = 200_000
"""Files and folders after which a scan ends."""
LINE_BYTES_MAX = 4_096

_PYTHON = frozenset({".py"})
_PROSE = frozenset({".adoc", ".markdown", ".md", ".org", ".rst", ".txt"})


@dataclass(frozen=True, slots=True)
class FileFilter:
    """Selects the files of a tree that have one of the suffixes and are in no skipped folder."""

    suffixes: frozenset[str]
    skipped_folders: frozenset[str]


_TESTS = {"idle_test", "test", "tests"}
_SKIPPED_PACKAGES = {"ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "turtledemo"}
LIBRARY_FILTER = FileFilter(_PYTHON, frozenset({"__pycache__", *_TESTS, *_SKIPPED_PACKAGES}))
USER_FILTER = FileFilter(
    _PYTHON | _PROSE, frozenset({"__pycache__", "build", "dist", "env", "node_modules", "venv"})
)
COPY_FILTER = FileFilter(_PYTHON | _PROSE, frozenset({"__pycache__"}))

ScanResult = dict[str, tuple[int, int]]
"""The result of a scan of a folder: maps each path in it to (modification time in ns, size)."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """Properties of standard input and output.

    `live`: lines can be rewritten. `interactive`: typed lines can be read, too.
    """

    live: bool
    interactive: bool
    color: bool
    columns: int


class Workspace:
    """The temporary folder, and the paths in it.

    `texts`: copies of the texts, which may be edited. `published`: a file with every published delta as one
    JSON line. `store`, `audit`: the files of the sinks of these names. `replica`: the file of the store that
    is killed; `crashed_replica`: a copy of it as it was left, beside a copy of its write-ahead log.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts = root / "texts"
        self.published = root / "published.jsonl"
        self.store = root / "store.db"
        self.audit = root / "audit.jsonl"
        self.replica = root / "replica.db"
        self.crashed_replica = root / "left" / "replica.db"

    def copy_replica(self) -> None:
        """Copy the replica's files as they are; no task may write them meanwhile."""
        self.crashed_replica.parent.mkdir()
        for suffix in ("", "-wal"):
            file = self.replica.with_name(self.replica.name + suffix)
            if file.exists():
                shutil.copyfile(file, self.crashed_replica.with_name(file.name))

    def read_audit(self) -> Iterator[str]:
        """Yield the audit sink's lines, from the first."""
        with self.audit.open(encoding="utf-8") as file:
            yield from file

    def copy(self, path: str, text: str) -> None:
        """Write a text to the folder of texts that may be edited."""
        target = self.texts / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def open_published(self) -> TextIO:
        """Open the file of published lines for appending."""
        return self.published.open("a", encoding="utf-8")

    def read_published(self) -> Iterator[str]:
        """Yield the published lines, from the first."""
        with self.published.open(encoding="utf-8") as file:
            yield from file

    @property
    def free_bytes(self) -> int:
        """Free bytes of the folder's disk."""
        return shutil.disk_usage(self.root).free

    def remove(self) -> None:
        """Delete the folder with its contents."""
        shutil.rmtree(self.root, ignore_errors=True)

    def corrupt_audit(self) -> None:
        """Remove the last line but one of the audit sink's file."""
        lines = list(self.read_audit())
        del lines[-2:-1]
        self.audit.write_text("".join(lines), encoding="utf-8")

    def corrupt_store(self, store: Path, namespace: str, vector_id: str, vector: list[float]) -> None:
        """Change one row of a storage sink's file, bypassing the sink."""
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
    """True if a write failed because the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def create_workspace() -> Workspace:
    """Create a temporary folder."""
    return Workspace(Path(tempfile.mkdtemp(prefix="delta-prop-demo-")).resolve())


def find_standard_library() -> Path:
    """Return the folder of the running interpreter's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def scan(root: Path, file_filter: FileFilter, too_large: list[str] | None = None) -> ScanResult:
    """Return the texts below a folder, in order of folders and names, up to 20,000, without hidden files.

    Files above 1 MiB are skipped; their paths are added to `too_large`.
    """
    texts: ScanResult = {}
    scanned = 0
    for folder_name, folders, files in os.walk(root):
        folders[:] = sorted(
            folder
            for folder in folders
            if folder not in file_filter.skipped_folders and not folder.startswith(".")
        )
        scanned += len(folders) + len(files)
        for name in sorted(files):
            path = Path(folder_name, name)
            if path.suffix.lower() in file_filter.suffixes and not name.startswith("."):
                stat, relative = _stat_file(path), path.relative_to(root).as_posix()
                if stat is None or not relative.isprintable():  # names become ids, which must be printable
                    continue
                if stat[1] <= FILE_BYTES_MAX:
                    texts[relative] = stat
                elif too_large is not None and len(too_large) < FILES_MAX:
                    too_large.append(relative)
                if len(texts) >= FILES_MAX:
                    return texts
        if scanned >= SCANNED_ENTRIES_MAX:
            break
    return texts


def read(root: Path, path: str) -> str | None:
    """Return a file's text, None if it is missing, unreadable or not UTF-8."""
    try:
        return (root / path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def resolve_folder(name: str) -> Path | None:
    """Return the named folder; None if it does not exist or cannot be read."""
    root = Path(name).expanduser().resolve()
    return root if root.is_dir() and os.access(root, os.R_OK | os.X_OK) else None


def find_command() -> str:
    """Return a command that starts this program: by name, through a checkout's `run`, or by path."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return "python -m delta_prop"
    if shutil.which("delta-prop") or called.name != "delta-prop":
        return "delta-prop"
    script = called.parent.parent.parent / "run"
    return f"{_relative_path(script)} delta-prop" if os.access(script, os.X_OK) else _relative_path(called)


def detect_terminal() -> Terminal:
    """Detect the terminal of this process."""
    out, is_dumb = sys.stdout, os.environ.get("TERM") == "dumb"
    live = out.isatty() and not is_dumb
    if hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")
    return Terminal(
        live=live,
        # Typed lines are awaited on a file descriptor, which Windows supports for sockets only.
        interactive=live and sys.platform != "win32" and sys.stdin is not None and sys.stdin.isatty(),
        color=live and not os.environ.get("NO_COLOR"),
        columns=shutil.get_terminal_size((80, 24)).columns,
    )


async def read_typed_lines() -> AsyncIterator[str]:
    """Yield lines from the terminal until Ctrl-D, without blocking the event loop."""
    descriptor = sys.stdin.fileno()
    buffered = b""
    while True:
        await anyio.wait_readable(descriptor)
        chunk = os.read(descriptor, LINE_BYTES_MAX)
        if not chunk:
            return
        buffered = (buffered + chunk)[-LINE_BYTES_MAX:]
        while b"\n" in buffered:
            line, _, buffered = buffered.partition(b"\n")
            yield line.decode(errors="replace").strip()


def receive_interrupts() -> AbstractContextManager[AsyncIterator[signal.Signals]]:
    """Return the stream of interrupts: Ctrl-C, a termination request, or a closed terminal."""
    return anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def discard_output() -> None:
    """Discard the output that is still buffered, after its reader has closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _relative_path(path: Path) -> str:
    here = Path.cwd()
    return f"./{path.relative_to(here)}" if path.is_relative_to(here) else str(path)


def _stat_file(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    if not S_ISREG(stat.st_mode):  # reading a pipe or a device might never end
        return None
    return stat.st_mtime_ns, stat.st_size
