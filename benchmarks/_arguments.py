"""What a benchmark is asked for: read, checked and refused in one line, before anything is measured."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAILED = "something failed, or a goal is far short: by more than three times"


class Arguments(argparse.ArgumentParser):
    """The parser of one benchmark; `failed`: what its exit status 1 means."""

    def __init__(self, bench: str, about: str | None, *, failed: str = FAILED) -> None:
        told = f"exit status: 0; 1: {failed}; 2: an argument was refused; 130: it was interrupted"
        super().__init__(prog=f"./run bench {bench}", description=about, epilog=told)

    def error(self, message: str) -> NoReturn:
        """Refuse in one line."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def whole(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """A whole number within these bounds."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least:,} to {most:,}")
        return value

    return read


def amount(least: float, most: float) -> Callable[[str], float]:
    """A number within these bounds, such as of seconds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is no number from {least:g} to {most:,g}")
        return value

    return read


def named(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Those of the names that are asked for: one of them, or all that have a part, or one of several parts
    with commas between them; nothing: all.
    """

    def read(text: str) -> list[str]:
        if not text:
            return list(names)
        if found := _having(text, names):
            return found
        wanted: set[str] = set()
        for part in text.split(","):
            having = _having(part, names) if part else []
            if not having:
                raise argparse.ArgumentTypeError(f"no name has '{part}': there are {'; '.join(names)}")
            wanted |= set(having)
        return [name for name in names if name in wanted]

    return read


def _having(part: str, names: Sequence[str]) -> list[str]:
    return [part] if part in names else [name for name in names if part in name]


def writable_file(text: str) -> Path:
    """A file that can be written, there or not."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no permission")
    return path


def writable_directory(text: str) -> Path:
    """A directory that is there, and can be written into."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written into: no permission")
    return path


def kept_directory(text: str) -> Path:
    """The same, made where it is not there."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be made: {error.strerror}") from error
    return writable_directory(text)
