"""Chance from one number: every concern draws from a source of its own, the same in every process.

A source depends on its name alone, so that one more draw here changes nothing there.
"""

from __future__ import annotations

from random import Random

__all__ = ["Random", "Seed"]


class Seed:
    """A number, and a path of names below it."""

    def __init__(self, number: int, path: str = "") -> None:
        self.number = number
        self.path = path

    def __str__(self) -> str:
        return f"{self.number}/{self.path}"

    def stream(self, name: str) -> Random:
        """The source of one concern; asked twice, it begins anew."""
        return Random(f"{self}/{name}")

    def child(self, name: str) -> Seed:
        """The seed of something that has several concerns."""
        return Seed(self.number, f"{self.path}/{name}" if self.path else name)
