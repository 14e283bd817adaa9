"""Captures the standard error of Spark's processes, so that users see only the line with the error.

Lines of delta-prop itself are forwarded at once. To capture while the JVM starts is enough, as the JVM
keeps the standard error that it was started with.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import AbstractContextManager

from delta_prop.spark import system

_OWN_PREFIX = "delta_prop: "
_NOISE = re.compile(
    r"WARNING: Using incubator modules|Setting default log level|To adjust logging level|\s+at "
)
_LINES_MAX = 40
_DRAIN_TIMEOUT_S = 2.0


class SparkLog:
    """The captured standard error and its last lines."""

    def __init__(self, *, shown: bool) -> None:
        """Forward every line if `shown`."""
        self._forwards_all = shown
        self._last_lines: deque[str] = deque(maxlen=_LINES_MAX)
        self._errors = system.StderrCapture(self._accept_line)

    def capture(self) -> AbstractContextManager[None]:
        """Capture the standard error of the processes started in the block, until they end."""
        return self._errors.capture()

    def drain(self) -> None:
        """Wait until all lines written so far are processed."""
        self._errors.drain(_DRAIN_TIMEOUT_S)

    def last_line(self) -> str:
        """Return the last line that is not noise."""
        return next((line for line in reversed(self._last_lines) if not _NOISE.match(line)), "")

    def _accept_line(self, line: str) -> bool:
        """Note a line; return True to forward it."""
        if line.strip():
            self._last_lines.append(line)
        return self._forwards_all or line.startswith(_OWN_PREFIX)
