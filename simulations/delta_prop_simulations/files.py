"""Reads and writes real files, and measures CPU time. No other module of the simulations does this."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from delta_prop_wire.errors import UsageError

processor_s = time.process_time
"""Returns the seconds of CPU time that this process has used."""

_PIECE_BYTES = 1 << 20
_SHIPPED = "delta_prop_simulations.scenarios.shipped"


def read_text(path: str) -> str:
    """Read a text file. Raises UsageError."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not a text file: give another file") from None


def read_bytes(path: str) -> bytes:
    """Read a file. Raises UsageError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: not readable: {error.strerror}: give a readable file") from None


class FilePieces:
    """A file's content, piece by piece; each iteration reads it anew, and raises UsageError."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[bytes]:
        try:
            with Path(self._path).open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise UsageError(f"{self._path}: not readable: {error.strerror}: give a readable file") from None


def write_text(path: str, text: str) -> None:
    """Write a file, or replace it. Raises UsageError."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: not writable: {error.strerror}: give a writable path") from None


def resolve_here(name: str) -> str:
    """Return the absolute path of a file that an option names."""
    return str(Path(name).absolute())


def resolve_beside(path: str, name: str) -> str:
    """Return the path of `name`, as written in the file at `path`: it is relative to that file's folder."""
    return str(Path(path).parent / name)


def read_packaged(package: str, name: str) -> str:
    """Read a text file that a package includes."""
    return (resources.files(package) / name).read_text()


def read_shipped() -> dict[str, str]:
    """Return the text of each scenario that the package includes, by name, sorted."""
    return {name: read_packaged(_SHIPPED, f"{name}.toml") for name in shipped_names()}


def shipped_names() -> list[str]:
    """Return the names of the scenarios that the package includes, sorted."""
    names = [file.name for file in resources.files(_SHIPPED).iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))
