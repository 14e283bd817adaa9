"""Writes a server's own log to standard error: JSON lines for programs, text for people.

Logging never waits: a thread writes from a bounded queue. Lines that do not fit are dropped, and a later line
reports their number.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

from delta_prop.directory.log_positions import escape_unprintable

if TYPE_CHECKING:
    from delta_prop.configuration.schema import LogFormat, LogLevel

LINES_MAX = 10_000
CLOSE_TIMEOUT_S = 2.0
"""Maximum seconds to wait, when the server ends, until the stream's reader has taken the queued lines."""

_RECORD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
LOGGER_NAME = "delta_prop"


@contextmanager
def write_logs_to(stream: TextIO, *, level: LogLevel, format_: LogFormat) -> Iterator[None]:
    """Write this program's log records, and warnings of others, to `stream` until the block ends."""
    as_text = format_ == "text" or (format_ == "auto" and stream.isatty())
    handler = LineHandler(stream)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root, package_logger = logging.getLogger(), logging.getLogger(LOGGER_NAME)
    previous_level = package_logger.level
    root.addHandler(handler)
    package_logger.setLevel(level.upper())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        package_logger.setLevel(previous_level)
        root.removeHandler(handler)
        handler.close()


class LineHandler(logging.Handler):
    """Log handler that hands lines to a writer thread."""

    def __init__(self, stream: TextIO, *, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(lines_max)
        self._lost_lines = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Enqueue a record; never waits, never raises."""
        try:
            if self._lost_lines and self._enqueue(self.format(_lost_record(self._lost_lines))):
                self._lost_lines = 0
            if not self._enqueue(self.format(record)):
                self._lost_lines += 1
        except Exception:  # a message whose arguments do not fit it
            self.handleError(record)

    def close(self) -> None:
        """Write the queued lines, as long as the stream's reader takes them in time."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(CLOSE_TIMEOUT_S)
        super().close()

    def _enqueue(self, line: str) -> bool:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            return False
        return True

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with suppress(OSError, ValueError):  # the stream's reader has closed it
                self._stream.write(line + "\n")
                self._stream.flush()


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object with its extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in _extra_fields(record).items() if name not in fields}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record as time, level and message, then `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if the record has one."""
        fields = "".join(f" {name}={value}" for name, value in _extra_fields(record).items())
        level = f"{record.levelname.lower():7}"
        line = f"{_format_time(record)} {level} {escape_unprintable(record.getMessage() + fields)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _RECORD_FIELDS}


def _format_time(record: logging.LogRecord) -> str:
    created = datetime.fromtimestamp(record.created, UTC)
    return created.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _lost_record(lines: int) -> logging.LogRecord:
    message = "lines of this log were dropped: standard error is read too slowly"
    fields = {"name": LOGGER_NAME, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
    return logging.makeLogRecord(fields | {"lines": lines})
