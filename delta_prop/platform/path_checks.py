"""Checks that a local path can be created or used, before anything is created; they leave nothing behind.

The command and the embedding programs share these checks of data directories and files.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from delta_prop_broker.segments.paths import FORMAT_PATH
from delta_prop_wire.errors import UsageError

_PERMISSION_FIX = "grant this process's user access, or give another path"


def check_data_directory(path: str) -> None:
    """Check that a data directory can be written to, or created; the check leaves nothing behind.

    Raises UsageError.
    """
    target = Path(path).absolute()
    if _exists(target, path) and not target.is_dir():
        raise UsageError(f"{path!r} is not a directory: give another path for the data, or a new one")
    ancestor = target
    while not _exists(ancestor, path):
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise UsageError(f"{path!r} cannot be created, as '{ancestor}' is not a directory: give another path")
    if not os.path.lexists(target / FORMAT_PATH):
        _check_can_create_in(ancestor, path)
    elif not _has_access(target, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{path!r} cannot be written to: {_PERMISSION_FIX}")


DATA_DIRECTORY_FIX = "give the one that `publish --data DIR` created"
"""Fix in the error of a missing data directory."""


def check_data_exists(path: str, fix: str = DATA_DIRECTORY_FIX) -> None:
    """Check that a data directory exists and can be read. Raises UsageError, with `fix` if it is missing."""
    target = Path(path)
    if not _exists(target, path) or not target.is_dir():
        raise UsageError(f"no data directory at {path!r}: {fix}")
    if not _has_access(target, os.R_OK | os.X_OK):
        raise UsageError(f"{path!r} cannot be read: {_PERMISSION_FIX}")


def check_file_writable(path: str) -> None:
    """Check that a file can be written there; the check leaves nothing behind. Raises UsageError."""
    target = Path(os.path.realpath(path))  # a link may point to a file that does not exist yet
    if not _exists(target, path):
        if not target.parent.is_dir():
            raise UsageError(
                f"{path!r}: folder '{target.parent}' is missing: create it, or give another path"
            )
        _check_can_create_in(target.parent, path)
    elif not target.is_file():
        raise UsageError(f"{path!r} is {_describe_kind(target)}: give a file")
    elif not _has_access(target, os.R_OK | os.W_OK):
        raise UsageError(f"{path!r} cannot be read and written: {_PERMISSION_FIX}")


def check_outside_data(path: str, data: str) -> None:
    """Check that a path is neither a data directory nor a parent of it. Raises UsageError."""
    target, directory = Path(os.path.realpath(path)), Path(os.path.realpath(data))
    if target == directory or target in directory.parents:
        raise UsageError(f"{path!r} is or holds the data directory: give another file")


def _describe_kind(target: Path) -> str:
    return "a directory" if target.is_dir() else "a device or pipe"


def _has_access(target: Path, mode: int) -> bool:
    return os.access(target, mode, effective_ids=os.access in os.supports_effective_ids)


def _exists(target: Path, path: str) -> bool:
    try:
        target.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"{path!r} cannot be used ({error.strerror}): give another path") from None
    return True


def _check_can_create_in(folder: Path, path: str) -> None:
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".delta-prop-", dir=folder))
    except OSError as error:
        fix = _PERMISSION_FIX if isinstance(error, PermissionError) else "give another path"
        raise UsageError(
            f"{path!r}: nothing can be created in '{folder}' ({error.strerror}): {fix}"
        ) from None
