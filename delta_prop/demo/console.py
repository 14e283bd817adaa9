"""Terminal output of the demo: lines, a progress bar, and a prompt that other lines do not disturb.

The output, the timer and the properties of the terminal are arguments, so this module reads nothing
itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from delta_prop.platform.ports import Timer

PIPE_INTERVAL_S = 3.0
"""Minimum interval of progress lines if the output is not a terminal."""

_TERMINAL_INTERVAL_S = 0.05
_BAR_CELLS = 20
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
_CLEAR = "\r\x1b[K"


class Output(Protocol):
    """A terminal or pipe that a console writes to."""

    def write(self, text: str, /) -> object:
        """Write a text at once."""


class Console:
    """Writer to one terminal or pipe.

    `live`: it is a terminal, so lines can be rewritten. `color`: styles are supported.
    """

    def __init__(
        self, output: Output, timer: Timer, *, columns: int = 80, live: bool = False, color: bool = False
    ) -> None:
        self.columns = max(columns, 40)
        self._write, self._now = output.write, timer.now
        self._live, self._color = live, color
        self._pending = ""  # a bar or a prompt in the last line
        self._reported_at = timer.now()
        self._table_lines = 0  # lines of an unfinished table above the cursor

    def style(self, name: str, text: str) -> str:
        """Style a text as bold, dim, red, green or cyan, if styles are supported."""
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if self._color else text

    def line(self, text: str = "") -> None:
        """Write one line; a prompt stays below it."""
        self._table_lines = 0  # a line in between ends a table
        if self._pending:
            self._write(f"{_CLEAR}{text}\n{self._pending}")
        else:
            self._write(f"{text}\n")

    def fit(self, text: str) -> str:
        """Truncate a text to one line of the terminal; return it in full if the output is not a terminal."""
        return truncate(text, self.columns - 1) if self._live else text

    def progress(self, done: int, total: int, note: str) -> None:
        """Report progress: a bar on a terminal, else a line every few seconds."""
        now = self._now()
        is_last = done >= total
        if now - self._reported_at < (_TERMINAL_INTERVAL_S if self._live else PIPE_INTERVAL_S) and not (
            is_last and self._live
        ):
            return
        self._reported_at = now
        status = f"{done:,}/{total:,}  {note}"
        if not self._live:
            self._write(f"  {status}\n")
            return
        cells = _BAR_CELLS * done // max(total, 1)
        bar = self.style("cyan", "#" * cells) + self.style("dim", "." * (_BAR_CELLS - cells))
        self._pending = self.fit(f"  {bar} {status}")
        self._write(f"{_CLEAR}{self._pending}")

    def end_progress(self) -> None:
        """Remove the bar."""
        if self._live and self._pending:
            self._write(_CLEAR)
        self._pending = ""
        self._reported_at = self._now()

    def table(self, lines: Sequence[str], *, is_last: bool = False) -> None:
        """Write a table: on a terminal over its previous version; elsewhere only the last version."""
        if self._live:
            up = f"\x1b[{self._table_lines}A" if self._table_lines else ""
            self._write(up + "".join(f"{_CLEAR}{self.fit(line)}\n" for line in lines))
            self._table_lines = 0 if is_last else len(lines)
        elif is_last:
            self._write("".join(f"{line}\n" for line in lines))

    def prompt(self, text: str) -> None:
        """Show a prompt for a line on a terminal; an empty text removes it."""
        if self._pending and not text:
            self._write(_CLEAR)
        self._pending = text
        self._write(text)


def truncate(text: str, columns: int) -> str:
    """Truncate a text that is longer than `columns`, styles not counted; end it with an ellipsis."""
    if display_width(text) <= columns:
        return text
    result, used = "", 0
    for part in _STYLED.split(text):
        if part.startswith("\x1b"):
            result += part
            continue
        for character in part:
            if used + _cells(character) >= columns:
                return result + "…" + ("\x1b[0m" if "\x1b" in text else "")
            result, used = result + character, used + _cells(character)
    return result


def display_width(text: str) -> int:
    """Return the number of columns of a text, styles not counted."""
    return sum(map(_cells, _STYLED.sub("", text)))


def blank_unprintable(text: str) -> str:
    """Replace unprintable characters, such as line ends, by blanks: they might move the cursor."""
    return "".join(character if character.isprintable() else " " for character in text)


def format_size(count: float) -> str:
    """Format a number of bytes for people."""
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} MB"


_STYLED = re.compile(r"(\x1b\[[0-9;]*m)")


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
