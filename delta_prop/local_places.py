"""Judges what can be made at a place of this machine, before anything is made; what it tries leaves nothing.

The one judge of data directories and files, for a start of the service and for a program that embeds it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from delta_prop_broker.log.files.names import FORMAT_PATH
from delta_prop_wire.errors import UsageError

_OWN_IT = "let the user of this process do so, or name another one"


def check_data_directory(path: str) -> None:
    """Check that a data directory can be written to, or made; what is tried leaves nothing behind.

    Raises UsageError.
    """
    place = Path(path).absolute()
    if _is_there(place, path) and not place.is_dir():
        raise UsageError(f"{path!r} is not a directory: name another one for the data, or a new one")
    above = place
    while not _is_there(above, path):
        above = above.parent
    if not above.is_dir():
        raise UsageError(f"{path!r} cannot be made, as '{above}' is not a directory: name another one")
    if not os.path.lexists(place / FORMAT_PATH):
        _try_to_make_in(above, path)
    elif not _may(place, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{path!r} cannot be written to: {_OWN_IT}")


THE_ONE_WRITTEN = "name the one that `publish --data DIR` made"
"""The cure where there is no data directory."""


def check_there(path: str, cure: str = THE_ONE_WRITTEN) -> None:
    """Check that a data directory is there and can be read. Raises UsageError, with this cure where not."""
    place = Path(path)
    if not _is_there(place, path) or not place.is_dir():
        raise UsageError(f"no data directory at {path!r}: {cure}")
    if not _may(place, os.R_OK | os.X_OK):
        raise UsageError(f"{path!r} cannot be read: {_OWN_IT}")


def check_file_place(path: str) -> None:
    """Check that a file can be written there; what is tried leaves nothing behind. Raises UsageError."""
    place = Path(os.path.realpath(path))  # a link may name a file that is to be made
    if not _is_there(place, path):
        if not place.parent.is_dir():
            raise UsageError(f"{path!r}: there is no folder '{place.parent}': make it, or name another")
        _try_to_make_in(place.parent, path)
    elif not place.is_file():
        raise UsageError(f"{path!r} is {_kind_of(place)}: name a file")
    elif not _may(place, os.R_OK | os.W_OK):
        raise UsageError(f"{path!r} cannot be read and written: {_OWN_IT}")


def check_apart(path: str, data: str) -> None:
    """Check that a file is neither a data directory nor above it. Raises UsageError."""
    place, directory = Path(os.path.realpath(path)), Path(os.path.realpath(data))
    if place == directory or place in directory.parents:
        raise UsageError(f"{path!r} is or holds the data directory: name another file")


def _kind_of(place: Path) -> str:
    return "a directory" if place.is_dir() else "a device or pipe"


def _may(place: Path, what: int) -> bool:
    return os.access(place, what, effective_ids=os.access in os.supports_effective_ids)


def _is_there(place: Path, path: str) -> bool:
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{path!r} cannot be used ({error.strerror}): name another one") from None
    return True


def _try_to_make_in(folder: Path, path: str) -> None:
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".delta-prop-", dir=folder))
    except OSError as error:
        cure = _OWN_IT if isinstance(error, PermissionError) else "name another one"
        raise UsageError(f"{path!r}: nothing can be made in '{folder}' ({error.strerror}): {cure}") from None
