"""What goes to the disk of parts, together: for the thread that writes, and nobody else.

A part whose write failed goes on behind what was synced last: it is opened anew and cut there first.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.server.part_file import DIRECTORY, Mark, append, begin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from delta_prop.receipt import Receipt
    from delta_prop.server.job_files import JobFiles
    from delta_prop.server.staging import Attempt
    from delta_prop_wire.batch import Batch

    Work = tuple[Attempt, Sequence[tuple[Batch, Receipt]]]


class Written(NamedTuple):
    """What became of each; `free_bytes` that the disk has left, None where it does not say."""

    outcomes: list[Mark | OSError]
    free_bytes: int | None


def write_parts(files: JobFiles, work: Sequence[Work]) -> Written:
    """Write and sync what gathered of each part; close the files of those that nobody stages any more."""
    outcomes: list[Mark | OSError] = []
    for attempt, frames in work:
        outcomes.append(_write(files, attempt, [batch for batch, _ in frames]))
        if attempt.holder is None:
            _close(attempt)
    free_bytes = None
    with suppress(OSError):
        files.prepare()
        free_bytes = files.disk.free_bytes()
    return Written(outcomes, free_bytes)


def close_all(attempts: Iterable[Attempt]) -> None:
    """Let go of their files."""
    for attempt in attempts:
        _close(attempt)


def _write(files: JobFiles, attempt: Attempt, batches: Sequence[Batch]) -> Mark | OSError:
    mark = attempt.mark
    if not batches:
        return mark or Mark()
    new = mark is None
    try:
        files.prepare()
        if mark is None:
            attempt.file, mark = begin(files.disk, attempt.path, attempt.head)
        elif attempt.file is None:
            attempt.file = files.disk.open(attempt.path)
            attempt.file.truncate(mark.position)
        assert attempt.file is not None
        mark = append(attempt.file, mark, batches)
        attempt.file.sync()
        if new:
            files.disk.sync_directory(DIRECTORY)
    except OSError as error:
        _close(attempt)
        if new:  # a name whose sync failed may never be kept: the next try makes it anew
            with suppress(OSError):
                files.disk.remove(attempt.path)
        return error
    return mark


def _close(attempt: Attempt) -> None:
    file, attempt.file = attempt.file, None
    if file is not None:
        with suppress(OSError):
            file.close()
