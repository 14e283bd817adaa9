"""Progress output: a bar updated in place on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import pytest

from delta_prop.demo.console import (
    PIPE_INTERVAL_S,
    Console,
    blank_unprintable,
    display_width,
    format_size,
    truncate,
)


class Output:
    """Collects what is written."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s


def test_progress_without_terminal_is_occasional_lines() -> None:
    output, clock = Output(), Clock()
    console = Console(output, clock)
    for step in range(1, 101):
        clock.time_s += PIPE_INTERVAL_S / 40
        console.progress(step, 100, "files")
    console.end_progress()
    console.line("done")
    assert output.written == ["  40/100  files\n", "  80/100  files\n", "done\n"]


def test_progress_bar_on_a_terminal_leaves_no_trace() -> None:
    output, clock = Output(), Clock()
    console = Console(output, clock, live=True)
    clock.time_s += 1
    console.progress(1, 2, "files")
    console.progress(1, 2, "too soon")
    console.progress(2, 2, "the last one is shown")
    console.end_progress()
    console.line("done")
    assert output.written == [
        "\r\x1b[K  ##########.......... 1/2  files",
        "\r\x1b[K  #################### 2/2  the last one is shown",
        "\r\x1b[K",
        "done\n",
    ]


def test_prompt_stays_below_later_lines() -> None:
    output = Output()
    console = Console(output, Clock(), live=True)
    console.prompt("search> ")
    console.line("news")
    console.prompt("")
    console.line("end")
    assert output.written == ["search> ", "\r\x1b[Knews\nsearch> ", "\r\x1b[K", "", "end\n"]


def test_table_updates_in_place_only_on_a_terminal() -> None:
    def render_table(**options: bool) -> str:
        output = Output()
        console = Console(output, Clock(), columns=40, **options)
        console.table(["sink  behind", "audit  1"])
        console.table(["sink  behind", "audit  2"])
        console.line("log: between")
        console.table(["sink  behind", "audit  " + 40 * "3"], is_last=True)
        console.table(["another"], is_last=True)
        return "".join(output.written)

    head, up = "\r\x1b[Ksink  behind\n", "\x1b[2A"
    assert render_table(live=True) == (
        f"{head}\r\x1b[Kaudit  1\n{up}{head}\r\x1b[Kaudit  2\nlog: between\n"
        f"{head}\r\x1b[Kaudit  {31 * '3'}…\n\r\x1b[Kanother\n"
    )
    assert render_table() == f"log: between\nsink  behind\naudit  {40 * '3'}\nanother\n"


def test_colors_only_when_enabled() -> None:
    assert Console(Output(), Clock()).style("red", "x") == "x"
    assert Console(Output(), Clock(), color=True).style("red", "x") == "\x1b[31mx\x1b[0m"


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("short", 5, "short"),
        ("longer", 5, "long…"),
        ("日本語", 5, "日本…"),
        ("\x1b[1mlonger\x1b[0m", 5, "\x1b[1mlong…\x1b[0m"),
        ("\x1b[1mshort\x1b[0m", 5, "\x1b[1mshort\x1b[0m"),
    ],
)
def test_truncate_counts_display_width(text: str, columns: int, expected: str) -> None:
    assert truncate(text, columns) == expected
    assert display_width(truncate(text, columns)) <= columns


def test_control_characters_are_blanked() -> None:
    assert blank_unprintable("a\x1b[2Jb\rc\nd") == "a [2Jb c d"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (64, "64 B"), (4_096, "4.1 kB"), (31_400_000, "31.4 MB")]
)
def test_sizes_are_human_readable(count: int, text: str) -> None:
    assert format_size(count) == text
