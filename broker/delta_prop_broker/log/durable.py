"""The log on disk: one partition's frames, numbered, chained and written together.

Synchronous and deterministic. An append only buffers; `take_commit` returns the disk's work, for a thread
that may wait for the disk, and `finish_commit` then advances `written` and `synced`. Everything else happens
on the one thread that owns the log. The first failure stops the log: from then on it only reads, until it is
recovered in place (`recover_in_place`, `resume`) or opened again. This module opens, recovers and closes it;
its parts are beside it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.corruption import LogBusy, LogCorrupted, add_directory_to_errors
from delta_prop_broker.log.appending import Appending
from delta_prop_broker.log.committing import Committing
from delta_prop_broker.log.reading import Reading
from delta_prop_broker.recovery.recovery import recover
from delta_prop_broker.recovery.times import read_times
from delta_prop_broker.segments import preallocation
from delta_prop_broker.segments.identity import check_format, write_identity
from delta_prop_broker.segments.paths import DIRECTORY, IDENTITY, LOCK_PATH
from delta_prop_broker.segments.reserve import Reserve, report_full_disk

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log.settings import LogSettings
    from delta_prop_broker.log_clock import Clock
    from delta_prop_broker.recovery.recovery_result import RecoveryReport, RecoveryResult


class DurableLog(Appending, Committing, Reading):
    """A `Log` in a directory, with group commits."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        settings: LogSettings,
        random_bytes: Callable[[int], bytes],
        clock: Clock,
        read_only: bool = False,
    ) -> tuple[DurableLog, RecoveryReport]:
        """Open the log in a data directory, or create it there; recover it if it was not closed.

        `random_bytes(n)` returns n random bytes. A read-only log takes no lock, changes nothing, reads
        no clock, and shows only rows known to be synced. Raises LogBusy, LogCorrupted, FormatUnknown,
        FormatOutdated, UsageError, OSError (DiskFull if there is no space even after the reserve was
        released).
        """
        lock: Lock | None = None
        if not read_only:
            check_format(disk)  # before the lock file is created, so that a refused directory stays unchanged
            try:
                with report_full_disk(disk):
                    disk.make_directory("")
                    lock = disk.lock(LOCK_PATH)
            except BlockingIOError as error:
                raise LogBusy(error.strerror or str(error)) from None
        reserve = Reserve(disk, settings.reserve_bytes)

        def run_recovery() -> RecoveryResult:
            return recover(
                disk, DIRECTORY, random_bytes=random_bytes, made_by=settings.made_by, read_only=read_only
            )

        try:
            with add_directory_to_errors(disk.name), report_full_disk(disk):
                recovered = run_recovery() if read_only else reserve.use(run_recovery)
            times = read_times(disk, DIRECTORY, recovered.report.notes)
            log = cls(
                disk, recovered, settings=settings, random_bytes=random_bytes, clock=clock, times=times,
                lock=lock, reserve=reserve,
            )  # fmt: skip
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return log, recovered.report

    def recover_in_place(self) -> RecoveryResult:
        """Recover the directory after a failure; `resume` then adopts the result.

        For a thread: does not change this log, which holds its lock throughout. Raises OSError, after which
        the caller may retry; LogCorrupted, e.g. if rows that were synced are missing; FormatUnknown.
        """
        assert self.failure is not None, "the log has not failed: recover only a failed log"

        made_by, random_bytes = self.settings.made_by, self._random_bytes
        recovered = self.reserve.use(
            lambda: recover(
                self._disk, DIRECTORY, random_bytes=random_bytes, made_by=made_by, synced=self.synced
            )
        )
        if recovered.identity.log_id != self.log_id:
            recovered.close()
            raise LogCorrupted(f"{DIRECTORY}/{IDENTITY}", "it names another log than before")
        return recovered

    def resume(self, recovered: RecoveryResult) -> None:
        """Adopt the result of `recover_in_place`: offsets, segments and epoch, as when a log is opened.

        Holders stay. Readers continue at their offsets, unless these are beyond `next_offset`.
        """
        times = self.times()
        self._segments.close()
        if self._recovery_point is not None:
            self._recovery_point.close()
        self._adopt_state(recovered, times)
        self._free.forget()
        self._recoveries += 1

    def raise_openings(self, openings: int) -> None:
        """Raise the number of openings to at least `openings`; it is on stable storage when this returns.

        For a thread, while the log has not failed. Raises OSError.
        """
        identity = self._identity.with_openings(openings)
        write_identity(self._disk, f"{DIRECTORY}/{IDENTITY}", identity)
        self._identity = identity

    def close(self) -> None:
        """Commit the remaining batches, mark the log as closed, and release the directory.

        No commit may be under way. Raises OSError; the log is closed then, too.
        """
        if self._closed:
            return
        assert self._running_commit is None, "a commit is under way: wait for it"
        try:
            if self._recovery_point is not None and self.failure is None:
                commit = self.take_commit(sync=True)
                if commit is not None:
                    commit.run()
                    self.finish_commit(commit)
                preallocation.truncate_last(self._segments.last)
                with suppress(OSError):  # Without times, segments only seem younger.
                    self.write_times(self.times())
                self._recovery_point.write_clean(self.synced, self._start)
        except OSError as error:
            self.fail(error)
            raise
        finally:
            self._closed = True
            self._segments.close()
            if self._recovery_point is not None:
                self._recovery_point.close()
            if self._lock is not None:
                self._lock.release()
