"""Command line arguments of a benchmark: checked before anything is measured, refused in one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

FAILED = "something failed, or a goal is far short (missed by more than a factor of three)"


class Arguments(argparse.ArgumentParser):
    """The parser of one benchmark; `status_1` is the meaning of exit status 1."""

    def __init__(self, bench: str, about: str | None, *, status_1: str = FAILED) -> None:
        statuses = f"exit status: 0; 1: {status_1}; 2: an argument was refused; 130: it was interrupted"
        super().__init__(prog=f"./run bench {bench}", description=about, epilog=statuses)

    def option(
        self, name: str, parse: Callable[[str], Any], default: Any, about: str, *, metavar: str | None = None
    ) -> None:
        """Add an option with a value."""
        self.add_argument(name, type=parse, default=default, help=about, metavar=metavar)

    def add_only(self, names: Sequence[str], about: str) -> None:
        """Add the option `--only PART`, which selects some of `names`."""
        self.option("--only", select_names(names), "", about, metavar="PART")

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def bounded_int(minimum: int, maximum: int = 1_000_000_000) -> Callable[[str], int]:
    """Return an argument type: an integer within these bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is not an integer from {minimum:,} to {maximum:,}")
        return value

    return parse


def bounded_float(minimum: float, maximum: float) -> Callable[[str], float]:
    """Return an argument type: a number within these bounds, such as a number of seconds."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text} is not a number from {minimum:g} to {maximum:,g}")
        return value

    return parse


def select_names(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Return an argument type that selects some of `names`: one exact name, or all that contain the text, or
    any of several texts separated by commas. An empty text selects all.
    """

    def parse(text: str) -> list[str]:
        if not text:
            return list(names)
        if matching_text := _names_containing(text, names):
            return matching_text
        selected: set[str] = set()
        for part in text.split(","):
            matching = _names_containing(part, names) if part else []
            if not matching:
                raise argparse.ArgumentTypeError(f"no name contains '{part}': choose from {'; '.join(names)}")
            selected |= set(matching)
        return [name for name in names if name in selected]

    return parse


def _names_containing(part: str, names: Sequence[str]) -> list[str]:
    return [part] if part in names else [name for name in names if part in name]


def writable_file(text: str) -> Path:
    """Return the path of a file that can be written; it need not exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: no permission")
    return path


def writable_directory(text: str) -> Path:
    """Return the path of an existing directory in which files can be created."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written into: no permission")
    return path


def created_directory(text: str) -> Path:
    """Return the path of a directory that can be written into; create it if it does not exist."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be created: {error.strerror}") from error
    return writable_directory(text)
