"""docs/simulation.md lists every check as the code describes it."""

from __future__ import annotations

from pathlib import Path

from delta_prop_simulations.chaos.violation import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "simulation.md"


def test_page_lists_every_check() -> None:
    text = PAGE.read_text()
    assert [name for name, what in CHECKS.items() if f"| `{name}` | {what} |" not in text] == []
