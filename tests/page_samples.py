"""Samples of docs/operating.md, for tests that compare them with a program's output."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "operating.md"


def sample(command: str) -> list[str]:
    """Return the lines of the block whose first command begins with `command`."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (lines,) = [block.splitlines() for block in blocks if block.startswith(f"$ {command}")]
    return lines


def printed_in(block: list[str]) -> list[str]:
    """Return the printed lines of a block, without the commands."""
    return [line for line in block if not line.startswith("$ ")]


def mask_numbers(line: str) -> str:
    """Mask the numbers of a line, and the blanks that depend on them."""
    return re.sub(r"\s+", " ", re.sub(r"[\d,]*\d", "N", line)).strip()
