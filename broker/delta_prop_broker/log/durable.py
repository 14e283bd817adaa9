"""The log on disk: one partition's frames, numbered, chained and written together.

Synchronous and deterministic. An append only buffers; `take_commit` hands out what the disk has to do, for
a thread that may wait for it, and `finish_commit` moves the marks. Everything else happens on the one
thread that owns the log. The first failure stops it: it then only reads, until it is recovered in place
(`recover_anew`, `go_on`) or opened anew. Here it is opened, recovered and closed; all else is in `parts/`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from delta_prop_broker.log.damage import LogBusy, LogDamaged, naming
from delta_prop_broker.log.files import ahead
from delta_prop_broker.log.files.identity import check_format, write_identity
from delta_prop_broker.log.files.names import DIRECTORY, IDENTITY, LOCK_PATH
from delta_prop_broker.log.files.reserve import Reserve, tells_full_disk
from delta_prop_broker.log.files.times import read_times
from delta_prop_broker.log.parts.appending import Appending
from delta_prop_broker.log.parts.committing import Committing
from delta_prop_broker.log.parts.reading import Reading
from delta_prop_broker.log.parts.recovery import recover

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, Lock
    from delta_prop_broker.log.log_clock import Clock
    from delta_prop_broker.log.parts.recovered import Recovered, RecoveryReport
    from delta_prop_broker.log.settings import LogSettings


class DurableLog(Appending, Committing, Reading):
    """A `Log` in a directory, with group commits."""

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        settings: LogSettings,
        draw: Callable[[int], bytes],
        clock: Clock,
        read_only: bool = False,
    ) -> tuple[DurableLog, RecoveryReport]:
        """Open the log in a data directory, or make it there; recover it if it was not closed.

        `draw` gives random bytes. Read-only takes no lock, changes nothing, asks for no time, and shows what
        is known to be synced. Raises LogBusy, LogDamaged, FormatUnknown, FormatOutdated, UsageError, OSError
        (DiskFull where there is no room, after the reserve was given up).
        """
        lock: Lock | None = None
        if not read_only:
            check_format(disk)  # before a directory that is refused gets so much as a lock
            try:
                with tells_full_disk(disk):
                    disk.make_directory("")
                    lock = disk.lock(LOCK_PATH)
            except BlockingIOError as error:
                raise LogBusy(error.strerror or str(error)) from None
        reserve = Reserve(disk, settings.reserve_bytes)

        def recovering() -> Recovered:
            return recover(disk, DIRECTORY, draw=draw, made_by=settings.made_by, read_only=read_only)

        try:
            with naming(disk.name), tells_full_disk(disk):
                recovered = recovering() if read_only else reserve.use(recovering)
            times = read_times(disk, DIRECTORY, recovered.report.notes)
            log = cls(
                disk, recovered, settings=settings, draw=draw, clock=clock, times=times, lock=lock,
                reserve=reserve,
            )  # fmt: skip
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return log, recovered.report

    def recover_anew(self) -> Recovered:
        """The disk's part of going on after a failure: recover the directory, whose lock is held throughout.

        For a thread; nothing of this log changes. What was synced before the failure must be there. Raises
        LogDamaged, FormatUnknown, OSError: then it may be tried again.
        """
        assert self.failure is not None, "a log that works is not recovered"

        made_by, draw = self.settings.made_by, self._draw
        recovered = self.reserve.use(
            lambda: recover(self._disk, DIRECTORY, draw=draw, made_by=made_by, synced=self.synced)
        )
        if recovered.identity.log_id != self.log_id:
            recovered.close()
            raise LogDamaged(f"{DIRECTORY}/{IDENTITY}", "it names another log than it did")
        return recovered

    def go_on(self, recovered: Recovered) -> None:
        """Take over what `recover_anew` found: marks, segments and epoch are those of a log just opened.

        Who holds the log back stays. Readers may go on where they were, but those beyond `next_offset`.
        """
        times = self.times()
        self._segments.close()
        if self._mark is not None:
            self._mark.close()
        self._take_over(recovered, times)
        self._free.forget()
        self._reopened += 1

    def raise_openings(self, openings: int) -> None:
        """Count openings up to this number, on stable storage when it returns. For a thread, while the log
        works. Raises OSError.
        """
        identity = self._identity.opened_so_often(openings)
        write_identity(self._disk, DIRECTORY, f"{DIRECTORY}/{IDENTITY}", identity)
        self._identity = identity

    def close(self) -> None:
        """Commit what is left, mark the end, let go of the directory; a commit under way must have ended.
        Raises OSError; it is closed then too.
        """
        if self._closed:
            return
        assert self._running is None, "a commit is under way: wait for it"
        try:
            if self._mark is not None and self.failure is None:
                commit = self.take_commit(sync=True)
                if commit is not None:
                    commit.run()
                    self.finish_commit(commit)
                ahead.cut_off(self._segments.last)
                with suppress(OSError):  # The log is whole without it; what it holds is younger then.
                    self.write_times(self.times())
                self._mark.settle_clean(self.synced, self._start)
        except OSError as error:
            self.fail(error)
            raise
        finally:
            self._closed = True
            self._segments.close()
            if self._mark is not None:
                self._mark.close()
            if self._lock is not None:
                self._lock.release()
