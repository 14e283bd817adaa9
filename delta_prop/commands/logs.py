"""A server's own log on standard error: JSON lines for programs, text for eyes.

Nobody who logs waits: a thread writes, behind a bounded queue. What does not fit there is lost, and counted
in a line of its own.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from delta_prop.commands.places import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from delta_prop.configuration.shape import LogFormat, LogLevel

LINES_MAX = 10_000
CLOSE_S_MAX = 2.0
"""How long the end waits for a reader of the log."""

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
OURS = "delta_prop"


@contextmanager
def logging_to(stream: TextIO, *, level: LogLevel, format_: LogFormat) -> Iterator[None]:
    """Write what this program logs there, and warnings of others, until this ends."""
    as_text = format_ == "text" or (format_ == "auto" and stream.isatty())
    handler = LineHandler(stream)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root, ours = logging.getLogger(), logging.getLogger(OURS)
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(level.upper())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(before)
        root.removeHandler(handler)
        handler.close()


class LineHandler(logging.Handler):
    """Hands lines to a thread that writes them."""

    def __init__(self, stream: TextIO, *, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(lines_max)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits, never raises."""
        try:
            if self._lost and self._offer(self.format(_lost(self._lost))):
                self._lost = 0
            if not self._offer(self.format(record)):
                self._lost += 1
        except Exception:  # a message whose arguments do not fit it
            self.handleError(record)

    def close(self) -> None:
        """Write what waits, as far as somebody reads it."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S_MAX)
        self._thread.join(CLOSE_S_MAX)
        super().close()

    def _offer(self, line: str) -> bool:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return False
        return True

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError, ValueError):  # nobody reads it any more
                self._stream.write(line + "\n")
                self._stream.flush()


class JsonFormatter(logging.Formatter):
    """One JSON object a record; what a record has beyond a message stands beside it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= {name: value for name, value in _fields(record).items() if name not in told}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


class TextFormatter(logging.Formatter):
    """Time, level and message, then `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and a traceback below it where there is one."""
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        level = f"{record.levelname.lower():7}"
        line = f"{_time(record)} {level} {printable(record.getMessage() + fields)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _ORDINARY}


def _time(record: logging.LogRecord) -> str:
    made = datetime.fromtimestamp(record.created, UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _lost(lines: int) -> logging.LogRecord:
    message = "lines of this log were lost: nobody read it fast enough"
    return logging.makeLogRecord(
        {"name": OURS, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message, "lines": lines}
    )
