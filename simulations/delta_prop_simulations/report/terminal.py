"""A result as text for a terminal: verdicts, then numbers, with the alternatives side by side. Pure.

If not all alternatives fit side by side, there are several tables, one below the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from delta_prop_simulations.report.axis import format_value
from delta_prop_simulations.report.numbers import (
    BROKEN,
    LIMITED,
    Row,
    evidence,
    format_promise,
    groups,
    verdicts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_simulations.scenarios.result import Result

WIDTH = 100
CELL_MIN, NAME_MIN = 12, 30
INDENT = "  "


def format_result(result: Result, *, width: int = WIDTH) -> str:
    """Return the result as text. Lines have up to `width` characters, unless a name or the evidence is
    longer.
    """
    lines = [
        f"{result.scenario}, seed {result.seed}, {format_value(result.duration_s, 's')} of virtual time",
        *_table_lines(result, width),
        *_explanations(result),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _table_lines(result: Result, width: int) -> Iterator[str]:
    cell_width = max([CELL_MIN, *(len(text) for text in _cell_texts(result))]) + 2
    columns_max = max((width - NAME_MIN) // cell_width, 1)
    for first in range(0, len(result.alternatives), columns_max):
        part = replace(result, alternatives=result.alternatives[first : first + columns_max])
        yield ""
        yield from _lines_of_one_table(part, cell_width)


def _cell_texts(result: Result) -> Iterator[str]:
    yield from (alternative.name for alternative in result.alternatives)
    for row in _all_rows(result):
        yield from row.cells


def _all_rows(result: Result) -> Iterator[Row]:
    yield from (Row(format_promise(row.name), row.cells) for row in verdicts(result))
    for group in groups(result):
        yield from group.rows


def _lines_of_one_table(result: Result, cell_width: int) -> Iterator[str]:
    name_width = max([NAME_MIN, *(len(INDENT + row.name) for row in _all_rows(result))])
    yield _line("", [alternative.name for alternative in result.alternatives], name_width, cell_width)
    if rows := verdicts(result):
        yield "promises"
        yield from _lines([Row(format_promise(row.name), row.cells) for row in rows], name_width, cell_width)
    for group in groups(result):
        yield group.name
        yield from _lines(group.rows, name_width, cell_width)


def _lines(rows: Sequence[Row], name_width: int, cell_width: int) -> Iterator[str]:
    for row in rows:
        yield _line(INDENT + row.name, row.cells, name_width, cell_width)


def _line(name: str, cells: Sequence[str], name_width: int, cell_width: int) -> str:
    return f"{name:<{name_width}}" + "".join(f"{text:>{cell_width}}" for text in cells)


def _explanations(result: Result) -> Iterator[str]:
    """Yield the evidence for each promise that is broken, or that holds with an exception."""
    for row in verdicts(result):
        for alternative, verdict in zip(result.alternatives, row.cells, strict=True):
            if verdict in (BROKEN, LIMITED):
                yield f"{verdict}: {row.name} by {alternative.name!r}: {evidence(alternative, row.name)}"
