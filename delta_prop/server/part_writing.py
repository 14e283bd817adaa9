"""Writes the staged batches of several parts to disk together. For the writer thread only.

After a failed write, a part resumes at its last synced position: its file is reopened and truncated there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.server.part_file import DIRECTORY, PartPosition, append, create

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop.calls.receipt import Receipt
    from delta_prop.server.job_files import JobFiles
    from delta_prop.server.staging import Attempt
    from delta_prop_wire.batch import Batch

    Work = tuple[Attempt, Sequence[tuple[Batch, Receipt]]]


class WriteResult(NamedTuple):
    """The result of `write_parts`. `outcomes`: for each part, the end of its synced batches, or the error.

    `free_bytes`: on the disk; None if unknown.
    """

    outcomes: list[PartPosition | OSError]
    free_bytes: int | None


def write_parts(files: JobFiles, work: Sequence[Work]) -> WriteResult:
    """Write and sync the batches of each part; close the files of parts without a connection."""
    outcomes: list[PartPosition | OSError] = []
    for attempt, pending in work:
        outcomes.append(_write(files, attempt, [batch for batch, _ in pending]))
        if attempt.holder is None:
            _close(attempt)
    free_bytes = None
    with suppress(OSError):
        files.prepare()
        free_bytes = files.disk.free_bytes()
    return WriteResult(outcomes, free_bytes)


def close_files(attempts: Iterable[Attempt]) -> None:
    """Close the files of attempts."""
    for attempt in attempts:
        _close(attempt)


def _write(files: JobFiles, attempt: Attempt, batches: Sequence[Batch]) -> PartPosition | OSError:
    position = attempt.synced_position
    if not batches:
        return position or PartPosition()
    is_new = position is None
    try:
        files.prepare()
        if position is None:
            attempt.file, position = create(files.disk, attempt.path, attempt.head)
        elif attempt.file is None:
            attempt.file = files.disk.open(attempt.path)
            attempt.file.truncate(position.byte_offset)
        assert attempt.file is not None
        position = append(attempt.file, position, batches)
        attempt.file.sync()
        if is_new:
            files.disk.sync_directory(DIRECTORY)
    except OSError as error:
        _close(attempt)
        if is_new:  # the name may be lost, as its sync failed: the next write creates the file again
            with suppress(OSError):
                files.disk.remove(attempt.path)
        return error
    return position


def _close(attempt: Attempt) -> None:
    file, attempt.file = attempt.file, None
    if file is not None:
        with suppress(OSError):
            file.close()
