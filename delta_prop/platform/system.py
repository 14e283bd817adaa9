"""System calls of the commands: files, standard input and output, signals, the time.

No other module of the commands makes them.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import anyio
import anyio.lowlevel

from delta_prop.platform.path_checks import DATA_DIRECTORY_FIX, check_data_exists
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import LINE_BYTES_MAX

if TYPE_CHECKING:
    from typing_extensions import Buffer

now = time.perf_counter
"""Clock in seconds, to measure spans."""

pause = time.sleep
"""Block for some seconds."""

draw = secrets.token_bytes
"""Return the given number of random bytes."""

SWITCH_S_MAX = 0.0005
"""Maximum seconds for which a thread of a command holds the interpreter lock while another waits for it."""


@contextmanager
def call_periodically(call: Callable[[], None], interval_s: float) -> Iterator[None]:
    """Call a function at this interval in a thread, until the block ends."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(interval_s):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wall_us() -> int:
    """Return the microseconds since 1970."""
    return time.time_ns() // 1000


def freeze_heap() -> None:
    """Exempt the present objects from garbage collection, which would stop the loop for tens of ms."""
    gc.collect()
    gc.freeze()


def shorten_switch_interval() -> None:
    """Let threads take turns every 0.5 ms: else a commit waits up to 5 ms for a busy event loop.

    This holds for the whole process, so only a command decides it.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S_MAX))


def raise_open_files_limit() -> int:
    """Let this process open as many files as the system allows it; return that number.

    This holds for the whole process, so only a command decides it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in {resource.RLIM_INFINITY, hard}:
        return soft
    wanted = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, max(soft, OPEN_FILES_MAX))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNAL = signal.SIGHUP
TOKEN_BYTES_MAX = 1024
SETTINGS_BYTES_MAX = 1024 * 1024
_CHUNK_BYTES = 256 * 1024
OPEN_FILES_MAX = 1 << 16
"""As many open files as 30,000 open partitions need."""


def draw_producer_name() -> str:
    """Return a unique producer name."""
    return f"publish-{secrets.token_hex(8)}"


@contextmanager
def receive_signals() -> Iterator[AsyncIterator[int]]:
    """Yield an iterator of received signals: to end (SIGTERM, SIGINT), or to reload (SIGHUP)."""
    with anyio.open_signal_receiver(*END_SIGNALS, RELOAD_SIGNAL) as received:
        yield received


def exit_by_signal(number: int) -> NoReturn:
    """End this process by the default action of a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # if the signal was blocked


def read_environment() -> Mapping[str, str]:
    """Return the environment's variables."""
    return os.environ


def read_settings(path: str, label: str = "the configuration") -> tuple[str, str]:
    """Return a file's text and its folder; `label` names the file in errors. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(SETTINGS_BYTES_MAX + 1)
        if len(raw) <= SETTINGS_BYTES_MAX:
            return raw.decode("utf-8-sig"), str(Path(path).absolute().parent)
        reason: str | None = f"it is larger than {SETTINGS_BYTES_MAX:,} bytes"
    except OSError as error:
        reason = error.strerror
    except ValueError:  # also a name that no file can have
        reason = "it is not UTF-8"
    raise UsageError(f"{label} {path!r} cannot be read ({reason}): name a file in TOML")


def read_token(path: str) -> str:
    """Return the token on the first line of a file. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            line = file.readline(TOKEN_BYTES_MAX + 2).strip()
        token = line.decode("ascii")
    except OSError as error:
        raise UsageError(
            f"token file {path!r}: it cannot be read ({error.strerror}): name a readable file"
        ) from None
    except ValueError:
        token = ""
    if not 1 <= len(token) <= TOKEN_BYTES_MAX:
        raise UsageError(f"token file {path!r}: it holds no token: put the token on its first line")
    if " " in token:
        raise UsageError(
            f"token file {path!r}: its first line holds more than a token: put only the token there"
        )
    return token


def read_file(path: str) -> bytes:
    """Return a file's content. Raises OSError."""
    return Path(path).read_bytes()


class FileChunks:
    """A file's content in chunks, read anew by each iteration, which raises UsageError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        try:
            with open(self._path, "rb") as file:
                while piece := file.read(_CHUNK_BYTES):
                    yield piece
        except OSError as error:
            raise UsageError(f"{self._path!r} cannot be read ({error.strerror}): name a file") from None


def standard_error() -> TextIO:
    """Return standard error."""
    return sys.stderr


def is_absent_or_empty(path: str) -> bool:
    """True if the directory is absent or empty. Raises OSError."""
    directory = Path(path)
    return not directory.is_dir() or not any(directory.iterdir())


def is_within(path: str, directory: str) -> bool:
    """True if the path is inside the directory, after symbolic links are resolved."""
    with suppress(ValueError):  # no path has a null byte; opening it reports that
        return Path(os.path.realpath(directory)) in Path(os.path.realpath(path)).parents
    return False


def find_missing_directories(path: str) -> list[str]:
    """Return the missing directories on the path, the deepest first."""
    absolute = Path(path).absolute()
    return [str(directory) for directory in (absolute, *absolute.parents) if not directory.is_dir()]


def remove_content(path: str) -> None:
    """Remove the content of a directory. Raises OSError."""
    for entry in Path(path).iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def open_existing_disk(path: str, fix: str = DATA_DIRECTORY_FIX) -> LocalDisk:
    """Return the disk of an existing data directory. Raises UsageError that names `fix`."""
    check_data_exists(path, fix)
    return LocalDisk(path)


def open_disk_at(path: str) -> LocalDisk:
    """Return the disk of a data directory that may not exist."""
    return LocalDisk(path)


@contextmanager
def create_directory(path: str) -> Iterator[LocalDisk]:
    """Create a directory atomically: it gets its name, durably, if the block succeeds; else it is removed.

    Raises UsageError if the name is taken, or the directory cannot be created.
    """
    target = Path(path)
    # The path is made absolute, as it may end in `.` or `..`.
    partial = target.absolute().with_name(target.absolute().name + ".partial")
    try:
        if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise UsageError(f"{path!r} exists and is not empty: name a new directory")
        if partial.exists():
            raise UsageError(f"'{partial}' exists, from an interrupted copy: remove it first")
        disk = LocalDisk(partial)
        disk.make_directory("")
    except (OSError, ValueError) as error:  # also a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path!r:.300} cannot be created ({reason}): name a new directory where this user may write"
        ) from None
    try:
        yield disk
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    parent = os.open(target.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def find_lock_holder(data: str, path: str) -> int | None:
    """Return the id of the process that has a data directory open for writing; None if there is none."""
    try:
        with open(Path(data, path), "rb") as file:
            text = file.read(32).strip()
            if not text.isdigit():
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(text)
    except FileNotFoundError:
        pass
    return None


def open_standard_streams() -> None:
    """Open the standard streams that the caller has closed (`0<&-`, `1>&-`) as /dev/null.

    Otherwise the next opened file would take the descriptor, and printed lines could end up in the log.
    Standard output becomes read-only, so that printing fails.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the system returns the lowest free number
        pass
    os.close(descriptor)
    if sys.stdout is None:
        read_only = os.open(os.devnull, os.O_RDONLY)
        os.dup2(read_only, 1)
        os.close(read_only)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def put(line: str) -> None:
    """Print one line and flush it."""
    with _name_in_error():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def confirm(line: str) -> None:
    """Print a line that confirms an action, unless standard output is closed."""
    if not _is_closed():
        put(line)


def check_standard_output() -> None:
    """Check early that standard output is not closed. Raises OSError that names it."""
    if _is_closed():
        with _name_in_error():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _is_closed() -> bool:
    """True if the caller has closed standard output, so that `open_standard_streams` made it read-only."""
    try:
        flags = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    except OSError:  # a program has replaced sys.stdout
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY


def put_all(lines: Iterator[str]) -> None:
    """Print lines; flush after the last one only, as they come without waiting."""
    for line in lines:  # errors of the iterator do not name standard output
        with _name_in_error():
            sys.stdout.write(line + "\n")
    flush_standard_output()


def flush_standard_output() -> None:
    """Flush standard output. Raises OSError that names it."""
    with _name_in_error():
        sys.stdout.flush()


@contextmanager
def _name_in_error(name: str = "standard output") -> Iterator[None]:
    """Add `name` to an OSError that the block raises."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def note(line: str) -> None:
    """Print one line for people on standard error."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # clears a progress line
    print(f"{clear}delta-prop: {line}", file=sys.stderr, flush=True)


class Progress:
    """A progress line on standard error, redrawn up to ten times per second; silent without a terminal."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._reported_at = 0.0

    def report(self, text: str) -> None:
        """Draw the text, unless less than 0.1 s has passed since the last one."""
        if self._is_live and (time_s := now()) - self._reported_at >= 0.1:
            self._reported_at = time_s
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line for the next writer."""
        if self._is_live and self._reported_at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Input:
    """Lines of several files in order, `-` for standard input; all are opened before any is read.

    Raises UsageError.
    """

    def __init__(self, names: list[str]) -> None:
        self._files: list[tuple[str, int]] = []
        for name in names:
            try:
                self._files.append((name, descriptor := 0 if name == "-" else os.open(name, os.O_RDONLY)))
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    raise IsADirectoryError(0, "it is a directory")
            except OSError as error:
                self.close()
                raise UsageError(
                    f"{name!r} cannot be read ({error.strerror}): name files of JSON lines, or - for "
                    "standard input"
                ) from None

    @property
    def is_typed(self) -> bool:
        """True if standard input is one of the files and a terminal."""
        return any(descriptor == 0 and os.isatty(0) for _, descriptor in self._files)

    def close(self) -> None:
        """Close the files, but not standard input."""
        while self._files:
            if descriptor := self._files.pop()[1]:
                os.close(descriptor)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield each line without its newline. Of a line longer than LINE_BYTES_MAX, yield a prefix that is
        also longer, so that the line is refused.

        Raises OSError that names the file.
        """
        for name, descriptor in self._files:
            partial, is_skipping = b"", False
            async for chunk in _read_chunks(descriptor, "standard input" if name == "-" else name):
                *complete, partial = (partial + chunk).split(b"\n")
                for line in complete:
                    if not is_skipping:
                        yield line
                    is_skipping = False
                if is_skipping:
                    partial = b""
                elif len(partial) > LINE_BYTES_MAX:
                    yield partial
                    partial, is_skipping = b"", True
            if partial and not is_skipping:
                yield partial


async def _read_chunks(descriptor: int, name: str) -> AsyncIterator[bytes]:
    """Read a file or pipe in chunks, without blocking the event loop. Raises OSError that names it."""
    must_wait = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    while True:
        if must_wait:
            try:
                await anyio.wait_readable(descriptor)
            except PermissionError:  # a device that is always ready
                must_wait = False
        else:
            await anyio.lowlevel.checkpoint()
        with _name_in_error(name):
            chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


@contextmanager
def open_output(name: str | None) -> Iterator[Output]:
    """Open a new file, or standard output. Raises UsageError if the file exists."""
    if name is None or name == "-":
        flush_standard_output()
        yield _open_standard_output()
        return
    with _create_file(name, name) as descriptor:
        yield Output(descriptor)


@contextmanager
def open_atomic_output(name: str | None) -> Iterator[Output]:
    """Open standard output, or a new file that gets its name if the block succeeds, and else is removed."""
    if name is None or name == "-":
        with open_output(name) as out:
            yield out
        return
    if os.path.lexists(name):
        raise _exists_error(name)
    partial = f"{name}.{secrets.token_hex(4)}.partial"
    with _create_file(partial, name) as descriptor:
        try:
            yield Output(descriptor)
            os.fsync(descriptor)
            os.link(partial, name)  # fails if another process has created it meanwhile
        except FileExistsError:
            raise _exists_error(name) from None
        finally:
            os.unlink(partial)


def remove_empty_directory(path: str) -> None:
    """Remove an empty directory; do nothing if it is absent or not empty."""
    with suppress(OSError, ValueError):
        os.rmdir(path)


@contextmanager
def _create_file(path: str, shown_name: str) -> Iterator[int]:
    """Create a new file; errors call it `shown_name`. Raises UsageError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise _exists_error(shown_name) from None
    except OSError as error:
        raise UsageError(f"{shown_name!r} cannot be created ({error.strerror}): name another file") from None
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exists_error(name: str) -> UsageError:
    return UsageError(f"{name!r} exists and is not overwritten: name a new file")


def _open_standard_output() -> Output:
    try:
        return _StandardOutput(sys.stdout.fileno())
    except OSError:  # a program has replaced sys.stdout
        return _ReplacedOutput()


class Output:
    """Buffered output to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffered: list[Buffer] = []
        self._bytes = 0

    def write(self, *parts: bytes | memoryview) -> None:
        """Add bytes to the buffer. Raises OSError."""
        self._buffered += parts
        self._bytes += sum(map(len, parts))
        if self._bytes >= _CHUNK_BYTES:
            self.flush()

    def sync(self) -> None:
        """Flush, and sync a regular file to stable storage. Raises OSError."""
        self.flush()
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.fsync(self._descriptor)

    def flush(self) -> None:
        """Write the buffer to the descriptor. Raises OSError."""
        raw = memoryview(b"".join(self._buffered))
        self._buffered, self._bytes = [], 0
        while raw:
            raw = raw[os.write(self._descriptor, raw) :]


class _StandardOutput(Output):
    """Buffered output to standard output."""

    def flush(self) -> None:
        """Write the buffer to the descriptor. Raises OSError that names standard output."""
        with _name_in_error():
            super().flush()


class _ReplacedOutput(Output):
    """Output to a replaced sys.stdout without a descriptor."""

    def __init__(self) -> None:
        super().__init__(-1)

    def sync(self) -> None:
        """Flush, as there is nothing to sync."""
        self.flush()

    def flush(self) -> None:
        """Write the buffer to sys.stdout."""
        raw = b"".join(self._buffered)
        self._buffered, self._bytes = [], 0
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.buffer.write(raw)
        else:
            sys.stdout.write(raw.decode())
        sys.stdout.flush()


def read_terminal_size() -> tuple[int, int]:
    """Return the terminal's columns and lines, 120 and 40 without a terminal."""
    size = shutil.get_terminal_size((120, 40))
    return size.columns, size.lines


class Canvas:
    """The full terminal, redrawn repeatedly; its previous content is restored at the end."""

    def __enter__(self) -> Canvas:
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    @staticmethod
    def is_possible() -> bool:
        """True if standard output is a terminal that can be drawn on."""
        return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def draw(self, lines: list[str]) -> None:
        """Draw these lines and clear the rest."""
        self._write("\x1b[H" + "\r\n".join(line + "\x1b[K" for line in lines) + "\x1b[J")

    def note(self, line: str) -> None:
        """Draw one line over the bottom line."""
        columns, height = read_terminal_size()
        self._write(f"\x1b[{height};1H{line[:columns]}\x1b[K")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
