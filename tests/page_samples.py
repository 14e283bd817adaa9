"""Samples of a page, to be held beside what the program prints where it takes more than a folder to run."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "operating.md"


def sample(first: str) -> list[str]:
    """The block of commands whose first line begins so, line by line."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [block.splitlines() for block in blocks if block.startswith(f"$ {first}")]
    return found


def printed_in(block: list[str]) -> list[str]:
    """The lines that are printed there, without the commands."""
    return [line for line in block if not line.startswith("$ ")]


def mask_numbers(line: str) -> str:
    """A line without its numbers, and the blanks that depend on them."""
    return re.sub(r"\s+", " ", re.sub(r"[\d,]*\d", "N", line)).strip()
