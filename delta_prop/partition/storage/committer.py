"""Group commit of the log: one commit at a time; everything appended meanwhile goes into the next one.

Disk waits run on a thread. The event loop itself copies a small commit into the page cache: that takes some
microseconds, and two thread switches would take ten times as long. If the commit syncs, only the wait for the
disk is left to the thread.

While the disk is busy a group accumulates; while it is idle no caller waits. Between two commits a group
lingers, too, as long as each tick of the event loop appends to it. Each commit costs the loop two thread
switches and a round of notifications; without the linger, a stream of batches would pay that for every few.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import anyio
import anyio.lowlevel

from delta_prop.platform.tick_callbacks import TickCallbacks, Wakeup
from delta_prop_broker.log.refusals import disk_full_details
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.platform.ports import Clock, Threads
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.writing import Commit

logger = logging.getLogger("delta_prop")

LINGER_BYTES, LINGER_S = 1024 * 1024, 0.003
"""Maximum bytes, and maximum seconds, for which a group lingers between two commits."""
CACHED_BYTES_MAX = 256 * 1024
"""Maximum size of a commit without a sync that the event loop writes itself."""
CACHED_S_MAX, OFFLOAD_S, OFFLOAD_S_MAX = 0.02, 0.1, 10.0
"""If a write by the event loop took longer than CACHED_S_MAX, the kernel throttled it: for the next OFFLOAD_S
seconds the thread writes. One slow write may be mere scheduling, so this time starts small; while writes stay
slow it doubles, up to OFFLOAD_S_MAX.
"""


class CommitListener(Protocol):
    """Owner of the log, which a committer notifies."""

    def note_moved(self) -> None:
        """Note that the marks have moved."""

    def note_failed(self, refusal: Refused, error: Exception) -> None:
        """Note that a commit has failed: rows that were not stored by then may be lost."""


class Committer:
    """Commits the log, on a thread that `run` gets."""

    def __init__(
        self,
        log: DurableLog,
        listener: CommitListener,
        *,
        clock: Clock,
        tick_callbacks: TickCallbacks,
    ) -> None:
        """Create a committer; `tick_callbacks` commits at the end of a tick the appends made in it."""
        self._log = log
        self._listener = listener
        self._now = clock.now
        self._tick_callbacks = tick_callbacks
        self._sync_requested = False
        self._wakeup = Wakeup()
        self._is_scheduled = False  # True if `_commit_now` is due at the end of the tick
        self._idle_event: anyio.Event | None = None  # not None while `drain` waits
        self._ended = False
        self._offload_until, self._offload_s = -math.inf, 0.0

    def notify(self) -> None:
        """Schedule a commit: rows were appended, or segments are to be removed."""
        if not self._is_scheduled:
            self._is_scheduled = self._tick_callbacks.call_at_end(self._commit_now, first=True)
            if not self._is_scheduled:
                self._wakeup.notify()

    def request_sync(self) -> None:
        """Sync everything that was appended, even if no batch asks for it."""
        self._sync_requested = True
        self._wakeup.notify()

    async def run(self, threads: Threads) -> None:
        """Commit until cancelled; a commit under way is finished first, as no thread can be cancelled."""
        try:
            while True:
                await self._commit_all(threads)
                self._note_idle()
                await self._wakeup.wait()
        finally:
            self._ended = True
            self._note_idle()

    async def drain(self) -> None:
        """Commit what is left; return once everything appended is synced, or the log has failed.

        If `run` was cancelled before, the log's own `close` commits what is left.
        """
        log = self._log
        while log.failure is None and log.synced < log.next_offset and not self._ended:
            self.request_sync()
            if self._idle_event is None:
                self._idle_event = anyio.Event()
            await self._idle_event.wait()
            await anyio.lowlevel.checkpoint()

    def _note_idle(self) -> None:
        if self._idle_event is not None:
            self._idle_event.set()
            self._idle_event = None

    async def _commit_all(self, threads: Threads) -> None:
        while True:
            inline = self._is_cached_only()
            commit = self._log.take_commit(sync=self._sync_requested)
            if commit is None:
                return
            self._sync_requested = False
            try:
                if inline:
                    self._write_inline(commit.run)
                else:
                    await self._run(commit, threads)
            except OSError as error:
                self._fail(error)
                return
            end = self._finish(commit)
            if end > commit.end:
                await self._linger(end)

    def _commit_now(self) -> None:
        """Commit at the end of a tick what only goes into the page cache; leave the rest to the task."""
        self._is_scheduled = False
        began = self._now()
        try:
            if (
                not self._sync_requested
                and began >= self._offload_until
                and self._log.write_to_cache(CACHED_BYTES_MAX)
            ):
                self._note_duration(began)
                self._listener.note_moved()
                return
            commit = self._log.take_commit() if self._is_cached_only() else None
            if commit is None:
                self._wakeup.notify()
                return
            self._write_inline(commit.run)
        except OSError as error:
            self._fail(error)
        else:
            self._finish(commit)

    async def _run(self, commit: Commit, threads: Threads) -> None:
        """Run a commit; if it is small, only its wait for the disk is left to the thread.

        Each system call of a thread may wait for the interpreter as long as the event loop is busy.
        """
        size = commit.cacheable_bytes
        if size is None or size > LINGER_BYTES or self._now() < self._offload_until:
            await threads.run(commit.run)
            return
        self._write_inline(commit.write_to_cache)
        await threads.run(commit.sync)
        commit.conclude()

    def _is_cached_only(self) -> bool:
        """True if a commit would be a small copy into the page cache, which the kernel does not throttle."""
        size = self._log.cacheable_bytes
        small = size is not None and size <= CACHED_BYTES_MAX
        return small and not self._sync_requested and self._now() >= self._offload_until

    def _write_inline(self, write: Callable[[], None]) -> None:
        began = self._now()
        write()
        self._note_duration(began)

    def _note_duration(self, began: float) -> None:
        ended = self._now()
        if ended - began > CACHED_S_MAX:
            is_recurring = ended - self._offload_until < self._offload_s
            self._offload_s = min(2 * self._offload_s, OFFLOAD_S_MAX) if is_recurring else OFFLOAD_S
            self._offload_until = ended + self._offload_s

    def _finish(self, commit: Commit) -> int:
        """Move the marks and notify callers; return the log's end before they were notified."""
        self._log.finish_commit(commit)
        end = self._log.next_offset
        self._listener.note_moved()
        return end

    def _fail(self, error: OSError) -> None:
        self._log.fail(error)
        refusal = log_failed(error)
        logger.error("%s", refusal.message)
        self._listener.note_failed(refusal, error)

    async def _linger(self, end: int) -> None:
        """Wait while the log grows beyond `end`, its end before callers were notified.

        Not called if nothing was appended during the last commit, so a caller that awaits each batch is never
        delayed.
        """
        began = self._now()
        while True:
            await anyio.lowlevel.checkpoint()
            before, end = end, self._log.next_offset
            if end == before or self._sync_requested or self._log.unwritten_bytes >= LINGER_BYTES:
                return
            if self._now() - began >= LINGER_S:
                return


def log_failed(error: Exception) -> Refused:
    """Return the refusal of every delta that is not in the log, until the log is recovered."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log failed with {error} and accepts nothing until it is recovered: free disk space or repair "
        "the disk, and send again",
        retry_after_ms=1000,
        details=disk_full_details(error),
    )
