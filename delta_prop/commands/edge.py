"""The commands' contact with the world: files of lines, standard input and output, the time.

The only module of the commands that touches them.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import anyio
import anyio.lowlevel

from delta_prop.local_places import THE_ONE_WRITTEN, check_there
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_wire.errors import UsageError
from delta_prop_wire.jsonlines import LINE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from typing import TextIO

    from typing_extensions import Buffer

now = time.perf_counter
"""Seconds, for how long something took."""

pause = time.sleep
"""Wait some seconds; nothing else goes on meanwhile."""

draw = secrets.token_bytes
"""That many random bytes."""


@contextmanager
def repeated(call: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call it again and again in a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every_s):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wall_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def settle_memory() -> None:
    """What is there stays: no collection of garbage looks at it again, which would take tens of ms."""
    gc.collect()
    gc.freeze()


END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNAL = signal.SIGHUP
TOKEN_BYTES_MAX = 1024
SETTINGS_BYTES_MAX = 1024 * 1024
_CHUNK_BYTES = 256 * 1024


def drawn_name() -> str:
    """A producer's name that nobody else has."""
    return f"publish-{secrets.token_hex(8)}"


@contextmanager
def signals() -> Iterator[AsyncIterator[int]]:
    """What the system asks of this process from now on: to end (SIGTERM, SIGINT), to read anew (SIGHUP)."""
    with anyio.open_signal_receiver(*END_SIGNALS, RELOAD_SIGNAL) as received:
        yield received


def end_at_once(number: int) -> NoReturn:
    """End as a process does that does not handle this signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # where it was blocked


def environment() -> Mapping[str, str]:
    """The environment's variables."""
    return os.environ


def read_settings(path: str, what: str = "the configuration") -> tuple[str, str]:
    """A file's text, and the folder that it lies in; `what` it is, for people. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            raw = file.read(SETTINGS_BYTES_MAX + 1)
        if len(raw) <= SETTINGS_BYTES_MAX:
            return raw.decode("utf-8-sig"), str(Path(path).absolute().parent)
        why: str | None = f"it is larger than {SETTINGS_BYTES_MAX:,} bytes"
    except OSError as error:
        why = error.strerror
    except ValueError:  # a name that no file can have, too
        why = "it is not UTF-8"
    raise UsageError(f"{what} {path!r} cannot be read ({why}): name a file in TOML")


def read_token(path: str) -> str:
    """The token in a file: what stands in its first line. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            line = file.readline(TOKEN_BYTES_MAX + 2).strip()
        token = line.decode("ascii")
    except OSError as error:
        raise UsageError(f"the token's file {path!r} cannot be read ({error.strerror})") from None
    except ValueError:
        token = ""
    if not 1 <= len(token) <= TOKEN_BYTES_MAX:
        raise UsageError(f"{path!r} holds no token: put one into its first line, as it was made")
    if " " in token:
        raise UsageError(f"the first line of {path!r} holds more than a token: put the token alone there")
    return token


def file_bytes(path: str) -> bytes:
    """All that a file holds. Raises OSError."""
    return Path(path).read_bytes()


def file_pieces(path: str) -> Iterator[bytes]:
    """All that a file holds, piece by piece. Raises UsageError."""
    try:
        with open(path, "rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                yield piece
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read ({error.strerror}): name a file") from None


def standard_error() -> TextIO:
    """Where people look for what happens."""
    return sys.stderr


def holds_nothing(path: str) -> bool:
    """True if no directory is there, or an empty one. Raises OSError."""
    place = Path(path)
    return not place.is_dir() or not any(place.iterdir())


def is_within(path: str, directory: str) -> bool:
    """True if that lies below the directory, whatever links lead there."""
    with suppress(ValueError):  # no path has a null byte; whoever uses it says so
        return Path(os.path.realpath(directory)) in Path(os.path.realpath(path)).parents
    return False


def missing_directories(path: str) -> list[str]:
    """The directories on the way to `path` that are not there, the deepest first."""
    place = Path(path).absolute()
    return [str(one) for one in (place, *place.parents) if not one.is_dir()]


def remove_content(path: str) -> None:
    """Remove all that lies in a directory. Raises OSError."""
    for one in Path(path).iterdir():
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one)
        else:
            one.unlink()


def existing_disk(path: str, cure: str = THE_ONE_WRITTEN) -> LocalDisk:
    """The disk of a data directory that is there. Raises UsageError, with this cure where it is not."""
    check_there(path, cure)
    return LocalDisk(path)


def disk_at(path: str) -> LocalDisk:
    """The disk of a data directory, there or not."""
    return LocalDisk(path)


@contextmanager
def new_directory(path: str) -> Iterator[LocalDisk]:
    """The disk of a directory that is there under its name when this ends well, durable, else not at all.

    Raises UsageError where something is there already, or no directory can be made.
    """
    end = Path(path)
    partial = end.absolute().with_name(end.absolute().name + ".partial")  # whatever the name ends with
    try:
        if end.is_symlink() or (end.exists() and not (end.is_dir() and not any(end.iterdir()))):
            raise UsageError(f"{path!r} is there already, and is not empty: name a new directory")
        if partial.exists():
            raise UsageError(f"'{partial}' is there, from a copy that was broken off: remove it first")
        disk = LocalDisk(partial)
        disk.make_directory("")
    except (OSError, ValueError) as error:  # a name that no file can have, too
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path!r:.300} cannot be made ({why}): name a new directory where this user may write"
        ) from None
    try:
        yield disk
        partial.rename(end)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    above = os.open(end.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def lock_holder(data: str, path: str) -> int | None:
    """The process that has a data directory open for writing, None where none has."""
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
    """Open as /dev/null what a caller has closed (`0<&-`, `1>&-`): else the next file opened would take its
    number, and what is printed could end up in the log. Standard output is then for reading alone, so that
    whoever prints there is told that nobody gets it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        pass
    os.close(descriptor)
    if sys.stdout is None:
        reading = os.open(os.devnull, os.O_RDONLY)
        os.dup2(reading, 1)
        os.close(reading)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def put(line: str) -> None:
    """One line to standard output, which a reader gets at once."""
    with _named():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def confirm(line: str) -> None:
    """Print a line that says what was done; nobody misses it where standard output is closed."""
    if not _is_closed():
        put(line)


def check_standard_output() -> None:
    """Check that standard output is not closed, for what is to print later. Raises OSError that names it."""
    if _is_closed():
        with _named():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def _is_closed() -> bool:
    """True if standard output is closed, in whose place `open_standard_streams` put what can only be read."""
    try:
        flags = fcntl.fcntl(sys.stdout.fileno(), fcntl.F_GETFL)
    except OSError:  # a program has put something else in its place
        return False
    return flags & os.O_ACCMODE == os.O_RDONLY


def put_all(lines: Iterator[str]) -> None:
    """Many lines that are there already; nobody waits for the first."""
    for line in lines:  # whose own failures are not those of standard output
        with _named():
            sys.stdout.write(line + "\n")
    flush_standard_output()


def flush_standard_output() -> None:
    """Hand on what was printed. Raises OSError that names standard output."""
    with _named():
        sys.stdout.flush()


@contextmanager
def _named(what: str = "standard output") -> Iterator[None]:
    """Have a failure of the system name what it is about."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, what) from None


def note(line: str) -> None:
    """One line for people, to standard error."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # of a progress line
    print(f"{clear}delta-prop: {line}", file=sys.stderr, flush=True)


class Progress:
    """A line on standard error that is written over ten times a second; nothing where it is no terminal."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._told_at = 0.0

    def tell(self, text: str) -> None:
        """How far it is."""
        if self._live and (at := now()) - self._told_at >= 0.1:
            self._told_at = at
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave an empty line to whoever writes next."""
        if self._live and self._told_at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Input:
    """Files of lines, one behind the other, `-` for standard input; all are opened at once, before any is
    read. Raises UsageError.
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
        """True if lines come from a terminal too."""
        return any(descriptor == 0 and os.isatty(0) for _, descriptor in self._files)

    def close(self) -> None:
        """Let go of the files; standard input stays."""
        while self._files:
            if descriptor := self._files.pop()[1]:
                os.close(descriptor)

    async def lines(self) -> AsyncIterator[bytes]:
        """Each line without its end; of one that is too long as much as shows that.

        Raises OSError that names the file.
        """
        for name, descriptor in self._files:
            waiting, skipping = b"", False
            async for chunk in _chunks(descriptor, "standard input" if name == "-" else name):
                *whole, waiting = (waiting + chunk).split(b"\n")
                for line in whole:
                    if not skipping:
                        yield line
                    skipping = False
                if skipping:
                    waiting = b""
                elif len(waiting) > LINE_BYTES_MAX:
                    yield waiting
                    waiting, skipping = b"", True
            if waiting and not skipping:
                yield waiting


async def _chunks(descriptor: int, name: str) -> AsyncIterator[bytes]:
    """Read a file or pipe by pieces, without blocking the loop on a pipe. Raises OSError that names it."""
    waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    while True:
        if waits:
            try:
                await anyio.wait_readable(descriptor)
            except PermissionError:  # a device that is always ready
                waits = False
        else:
            await anyio.lowlevel.checkpoint()
        with _named(name):
            chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


@contextmanager
def output(name: str | None) -> Iterator[Output]:
    """A new file of that name, or standard output. Raises UsageError where the file is there already."""
    if name is None or name == "-":
        flush_standard_output()
        yield _standard_output()
        return
    with _made(name, name) as descriptor:
        yield Output(descriptor)


@contextmanager
def whole_output(name: str | None) -> Iterator[Output]:
    """The same, of a file that has its name once all is in it, and is gone where that fails."""
    if name is None or name == "-":
        with output(name) as out:
            yield out
        return
    if os.path.lexists(name):
        raise _there_already(name)
    partial = f"{name}.{secrets.token_hex(4)}.partial"
    with _made(partial, name) as descriptor:
        try:
            yield Output(descriptor)
            os.fsync(descriptor)
            os.link(partial, name)  # where another one came meanwhile, that one stays
        except FileExistsError:
            raise _there_already(name) from None
        finally:
            os.unlink(partial)


def remove_empty(path: str) -> None:
    """Remove a directory that has nothing in it; nothing where there is none such."""
    with suppress(OSError, ValueError):
        os.rmdir(path)


@contextmanager
def _made(path: str, told: str) -> Iterator[int]:
    """A new file, and what it is called for people. Raises UsageError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise _there_already(told) from None
    except OSError as error:
        raise UsageError(f"{told!r} cannot be made ({error.strerror}): name another file") from None
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _there_already(name: str) -> UsageError:
    return UsageError(f"{name!r} is there already, and is not overwritten: name a new file")


def _standard_output() -> Output:
    try:
        return _StandardOutput(sys.stdout.fileno())
    except OSError:  # a program has put something else in its place
        return _Replaced()


class Output:
    """Where bytes go, through a buffer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: list[Buffer] = []
        self._bytes = 0

    def write(self, *parts: bytes | memoryview) -> None:
        """Add these. Raises OSError."""
        self._waiting += parts
        self._bytes += sum(map(len, parts))
        if self._bytes >= _CHUNK_BYTES:
            self.flush()

    def sync(self) -> None:
        """Hand on everything, and return when it is on stable storage. Raises OSError."""
        self.flush()
        if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.fsync(self._descriptor)

    def flush(self) -> None:
        """Hand on everything. Raises OSError."""
        raw = memoryview(b"".join(self._waiting))
        self._waiting, self._bytes = [], 0
        while raw:
            raw = raw[os.write(self._descriptor, raw) :]


class _StandardOutput(Output):
    def flush(self) -> None:
        """Hand on everything. Raises OSError that names standard output."""
        with _named():
            super().flush()


class _Replaced(Output):
    """What stands for standard output, and is no file of the system."""

    def __init__(self) -> None:
        super().__init__(-1)

    def sync(self) -> None:
        """Hand on everything."""
        self.flush()

    def flush(self) -> None:
        """Hand on everything."""
        raw = b"".join(self._waiting)
        self._waiting, self._bytes = [], 0
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.buffer.write(raw)
        else:
            sys.stdout.write(raw.decode())
        sys.stdout.flush()


def terminal_size() -> tuple[int, int]:
    """Columns and lines of the terminal, or what is usual where there is none."""
    size = shutil.get_terminal_size((120, 40))
    return size.columns, size.lines


class Canvas:
    """The whole terminal, drawn over again and again; what stood there before comes back at the end."""

    def __enter__(self) -> Canvas:
        self._write("\x1b[?1049h\x1b[?25l")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("\x1b[?25h\x1b[?1049l")

    @staticmethod
    def possible() -> bool:
        """Whether standard output is a terminal that can be drawn on."""
        return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def draw(self, lines: list[str]) -> None:
        """These lines, and nothing else."""
        self._write("\x1b[H" + "\r\n".join(line + "\x1b[K" for line in lines) + "\x1b[J")

    def note(self, line: str) -> None:
        """One line over the last one."""
        columns, height = terminal_size()
        self._write(f"\x1b[{height};1H{line[:columns]}\x1b[K")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
