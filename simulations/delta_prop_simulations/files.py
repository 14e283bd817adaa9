"""What a simulation touches of the real world: files that it reads and writes, the processor's time.

The only module of the laboratory that does.
"""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

processor_s = time.process_time
"""Seconds of processor time that this process has used."""

_PIECE_BYTES = 1 << 20
_SHIPPED = "delta_prop_simulations.laboratory"


def read_text(path: str) -> str:
    """A file of text. Raises UsageError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: this is no text: give another file") from None


def read_bytes(path: str) -> bytes:
    """A file. Raises UsageError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read: {error.strerror}") from None


def read_pieces(path: str) -> Iterator[bytes]:
    """A file, piece by piece. Raises UsageError."""
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read: {error.strerror}") from None


def write_text(path: str, text: str) -> None:
    """Write a file, or replace what is there. Raises UsageError."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: it cannot be written: {error.strerror}") from None


def from_here(name: str) -> str:
    """The file that an option names: names count from the working directory."""
    return str(Path(name).absolute())


def beside(path: str, name: str) -> str:
    """The file that one at `path` names: names count from its folder."""
    return str(Path(path).parent / name)


def packaged(package: str, name: str) -> str:
    """The text of a file that comes within a package."""
    return (resources.files(package) / name).read_text()


def shipped() -> dict[str, str]:
    """The text of each scenario that comes with the package, by name, in order."""
    return {name: _folder().joinpath(f"{name}.toml").read_text() for name in shipped_names()}


def shipped_names() -> list[str]:
    """The scenarios that come with the package."""
    names = [one.name for one in _folder().iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def _folder() -> Traversable:
    return resources.files(_SHIPPED) / "shipped"
