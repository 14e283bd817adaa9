"""Derives random streams from one number: a stream depends only on the number and the stream's name."""

from __future__ import annotations

from random import Random

__all__ = ["Random", "Seed"]


class Seed:
    """A number and a path of names, from which streams are derived."""

    def __init__(self, number: int, path: str = "") -> None:
        self.number = number
        self.path = path

    def __str__(self) -> str:
        return f"{self.number}/{self.path}"

    def stream(self, name: str) -> Random:
        """Return the stream of this name, from its start at each call."""
        return Random(f"{self}/{name}")

    def child(self, name: str) -> Seed:
        """Return the seed of a part that draws from several streams."""
        return Seed(self.number, f"{self.path}/{name}" if self.path else name)
