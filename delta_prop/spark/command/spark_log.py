"""What Spark's own processes write to standard error: kept from people, who get one line of what went wrong.

Our own lines go on at once. The JVM has what was standard error when it was started, and keeps it.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from delta_prop.spark import edge

if TYPE_CHECKING:
    from collections.abc import Iterator

_OURS = "delta_prop: "
_NOISE = re.compile(
    r"WARNING: Using incubator modules|Setting default log level|To adjust logging level|\s+at "
)
_KEPT = 40
_DRAIN_S_MAX = 2.0


class SparkLog:
    """What comes, and the last lines of it."""

    def __init__(self, *, shown: bool) -> None:
        """`shown`: all of it goes on."""
        self._shown = shown
        self._last: deque[str] = deque(maxlen=_KEPT)
        self._errors = edge.Errors(self._take)

    @contextmanager
    def of_what_starts(self) -> Iterator[None]:
        """Take the standard error of the processes that are started meanwhile, for as long as they live."""
        with self._errors.taken():
            yield

    def drain(self) -> None:
        """Have all that was written until now gone on."""
        self._errors.drain(_DRAIN_S_MAX)

    def last(self) -> str:
        """The last line that says something."""
        return next((line for line in reversed(self._last) if not _NOISE.match(line)), "")

    def _take(self, line: str) -> bool:
        """Whether a line goes on."""
        if line.strip():
            self._last.append(line)
        return self._shown or line.startswith(_OURS)
