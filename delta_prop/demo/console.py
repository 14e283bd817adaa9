"""What the demo shows: lines, a bar that moves on a terminal, and a prompt that other lines do not disturb.

It is handed a function to write with, the time, and what kind of terminal there is; it asks for nothing.
"""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLAIN_S_MIN = 3.0
"""How often, at most, progress is told where no bar can move."""

_LIVE_S_MIN = 0.05
_BAR_CELLS = 20
_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
_CLEAR = "\r\x1b[K"


class Console:
    """Writes to one terminal or pipe. `live`: lines can be rewritten; `color`: styles are welcome."""

    def __init__(
        self,
        write: Callable[[str], object],
        now: Callable[[], float],
        *,
        columns: int = 80,
        live: bool = False,
        color: bool = False,
    ) -> None:
        self.columns = max(columns, 40)
        self._write, self._now = write, now
        self._live, self._color = live, color
        self._pending = ""  # a bar or a prompt that stands in the last line
        self._told_at = now()
        self._table_lines = 0  # of a table that is not at its end yet, above the cursor

    def style(self, name: str, text: str) -> str:
        """A text in bold, dim, red, green or cyan, where that is welcome."""
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if self._color else text

    def line(self, text: str = "") -> None:
        """One line; a prompt stays below it."""
        self._table_lines = 0  # a line between is the end of a table
        if self._pending:
            self._write(f"{_CLEAR}{text}\n{self._pending}")
        else:
            self._write(f"{text}\n")

    def fitting(self, text: str) -> str:
        """A text cut to one line of the terminal; whole where there is none."""
        return cut(text, self.columns - 1) if self._live else text

    def progress(self, done: int, total: int, note: str) -> None:
        """How far something is: a bar on a terminal, else a line every few seconds."""
        now = self._now()
        last = done >= total
        if now - self._told_at < (_LIVE_S_MIN if self._live else PLAIN_S_MIN) and not (last and self._live):
            return
        self._told_at = now
        counted = f"{done:,}/{total:,}  {note}"
        if not self._live:
            self._write(f"  {counted}\n")
            return
        cells = _BAR_CELLS * done // max(total, 1)
        bar = self.style("cyan", "#" * cells) + self.style("dim", "." * (_BAR_CELLS - cells))
        self._pending = self.fitting(f"  {bar} {counted}")
        self._write(f"{_CLEAR}{self._pending}")

    def progress_done(self) -> None:
        """Take the bar away."""
        if self._live and self._pending:
            self._write(_CLEAR)
        self._pending = ""
        self._told_at = self._now()

    def table(self, lines: Sequence[str], *, last: bool = False) -> None:
        """Lines that change in place, on a terminal; elsewhere only their last form is told."""
        if self._live:
            up = f"\x1b[{self._table_lines}A" if self._table_lines else ""
            self._write(up + "".join(f"{_CLEAR}{self.fitting(line)}\n" for line in lines))
            self._table_lines = 0 if last else len(lines)
        elif last:
            self._write("".join(f"{line}\n" for line in lines))

    def prompt(self, text: str) -> None:
        """Ask for a line, on a terminal; empty: ask no more."""
        if self._pending and not text:
            self._write(_CLEAR)
        self._pending = text
        self._write(text)


def cut(text: str, columns: int) -> str:
    """A text that takes no more than `columns`, styles not counted, an ellipsis where it was longer."""
    if width(text) <= columns:
        return text
    kept, used = "", 0
    for part in _STYLED.split(text):
        if part.startswith("\x1b"):
            kept += part
            continue
        for letter in part:
            if used + _cells(letter) >= columns:
                return kept + "…" + ("\x1b[0m" if "\x1b" in text else "")
            kept, used = kept + letter, used + _cells(letter)
    return kept


def width(text: str) -> int:
    """How many columns a text takes, styles not counted."""
    return sum(map(_cells, _STYLED.sub("", text)))


def printable(text: str) -> str:
    """Other people's text on one line, without what would move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} MB"


_STYLED = re.compile(r"(\x1b\[[0-9;]*m)")


def _cells(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
