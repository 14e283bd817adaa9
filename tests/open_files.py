"""Helper that lists the files that this process has open, as far as the system reports them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DESCRIPTORS = "/proc/self/fd"


def open_below(folder: Path) -> list[str]:
    """Return the paths of open files in a folder, also of removed files; none if the system reports none."""
    paths = []
    for number in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        with suppress(OSError):  # the file was closed meanwhile
            paths.append(os.readlink(f"{_DESCRIPTORS}/{number}"))
    return [path for path in paths if path.startswith(f"{folder}/")]
