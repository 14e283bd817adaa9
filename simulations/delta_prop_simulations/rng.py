"""Random streams from one number: every concern draws from its own stream, the same in every process.

A stream depends on its name only, so that an additional draw of one concern changes no other.
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
        """Return the stream of one concern; a second call returns it from its start."""
        return Random(f"{self}/{name}")

    def child(self, name: str) -> Seed:
        """Return the seed of a part with several concerns."""
        return Seed(self.number, f"{self.path}/{name}" if self.path else name)
