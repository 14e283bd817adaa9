"""The log's commits: one at a time, everything appended meanwhile in the next one.

What waits for the disk runs on a thread. A small group that only goes into the page cache is written by the
event loop itself: that takes some microseconds, two changes of thread ten times as many.

While the disk is busy a group gathers, while it is idle nobody waits. Between two commits a group gathers
too, as long as turn after turn of the event loop appends to it: each commit costs the loop two changes of
thread and a round of telling, which a stream of batches would otherwise pay for a few of them at a time.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from delta_prop.turns import Bell
from delta_prop_broker.log.refusals import full_disk
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads
    from delta_prop.turns import Turn
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.parts.commit import Commit

logger = logging.getLogger("delta_prop")

GATHER_BYTES, GATHER_S = 1024 * 1024, 0.003
"""A group that gathers between commits is committed with so many bytes, or after so long, at the latest."""
CACHED_BYTES_MAX = 256 * 1024
"""A group of no more bytes, of which nothing is to be synced, is written by the event loop itself."""
CACHED_S_MAX, ASIDE_S, ASIDE_S_MAX = 0.02, 0.1, 10.0
"""Where such a write took longer, the system held it back: the thread writes for so long from then on. Once
may be chance, as any thread may have to wait for a processor; as long as it goes on, each time is twice as
long as the last.
"""


class Committer:
    """Commits on a thread that it is lent. `on_moved` is called after marks moved, `on_failed` when a commit
    failed: what was not kept by then is not promised any more.
    """

    def __init__(
        self,
        log: DurableLog,
        *,
        on_moved: Callable[[], None],
        on_failed: Callable[[Refused, Exception], None],
        now: Callable[[], float],
        turn: Turn,
    ) -> None:
        """`turn`: in which appends come, where some do; what they leave is committed at its end."""
        self._log = log
        self._on_moved = on_moved
        self._on_failed = on_failed
        self._now = now
        self._turn = turn
        self._sync = False
        self._bell = Bell()
        self._due = False  # at the end of the turn
        self._idle: anyio.Event | None = None  # while somebody waits for that
        self._ended = False
        self._aside_until, self._aside_s = -math.inf, 0.0

    def ring(self) -> None:
        """Something was appended, or is to be removed."""
        if not self._due:
            self._due = self._turn.later(self._commit_now, first=True)
            if not self._due:
                self._bell.ring()

    def sync(self) -> None:
        """Have everything that was appended synced, though no batch asks for it."""
        self._sync = True
        self._bell.ring()

    async def run(self, threads: Threads) -> None:
        """Commit until cancelled; a commit under way is finished first, as its thread is."""
        try:
            while True:
                await self._commit_all(threads)
                self._note_idle()
                await self._bell.wait()
        finally:
            self._ended = True
            self._note_idle()

    async def drain(self) -> None:
        """Commit what is left; return when everything appended is synced, or the log has failed.

        Where `run` was cancelled before, what is left is for the log's own `close`.
        """
        log = self._log
        while log.failure is None and log.synced < log.next_offset and not self._ended:
            self.sync()
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()
            await anyio.lowlevel.checkpoint()

    def _note_idle(self) -> None:
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    async def _commit_all(self, threads: Threads) -> None:
        while True:
            here = self._only_cached()
            commit = self._log.take_commit(sync=self._sync)
            if commit is None:
                return
            self._sync = False
            try:
                if here:
                    self._write_here(commit)
                else:
                    await threads.run(commit.run)
            except OSError as error:
                self._fail(error)
                return
            end = self._finish(commit)
            if end > commit.end:
                await self._gather(end)

    def _commit_now(self) -> None:
        """At the end of a turn: commit what only goes into the page cache, leave all else to the task."""
        self._due = False
        began = self._now()
        try:
            if not self._sync and began >= self._aside_until and self._log.write_cached(CACHED_BYTES_MAX):
                self._note_took(began)
                self._on_moved()
                return
            commit = self._log.take_commit() if self._only_cached() else None
            if commit is None:
                self._bell.ring()
                return
            self._write_here(commit)
        except OSError as error:
            self._fail(error)
        else:
            self._finish(commit)

    def _only_cached(self) -> bool:
        """Whether a commit would be a small copy into the page cache, and the system takes such at once."""
        size = self._log.cached_bytes
        small = size is not None and size <= CACHED_BYTES_MAX
        return small and not self._sync and self._now() >= self._aside_until

    def _write_here(self, commit: Commit) -> None:
        began = self._now()
        commit.run()
        self._note_took(began)

    def _note_took(self, began: float) -> None:
        ended = self._now()
        if ended - began > CACHED_S_MAX:
            again = ended - self._aside_until < self._aside_s
            self._aside_s = min(2 * self._aside_s, ASIDE_S_MAX) if again else ASIDE_S
            self._aside_until = ended + self._aside_s

    def _finish(self, commit: Commit) -> int:
        """The marks move; where the log ended before callers were told of that."""
        self._log.finish_commit(commit)
        end = self._log.next_offset
        self._on_moved()
        return end

    def _fail(self, error: OSError) -> None:
        self._log.fail(error)
        refusal = failed(error)
        logger.error("%s", refusal.message)
        self._on_failed(refusal, error)

    async def _gather(self, end: int) -> None:
        """Wait while more is appended than the log had up to `end`, its end before callers were told.

        Not called where nothing came during the last commit: who waits for each batch is never held up.
        """
        began = self._now()
        while True:
            await anyio.lowlevel.checkpoint()
            before, end = end, self._log.next_offset
            if end == before or self._sync or self._log.unwritten_bytes >= GATHER_BYTES:
                return
            if self._now() - began >= GATHER_S:
                return


def failed(error: Exception) -> Refused:
    """What to tell everybody whose delta has no place in the log and gets none before it is recovered."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log has failed with {error} and takes nothing until it is recovered: make room or mend the "
        "disk, and send again",
        retry_after_ms=1000,
        details=full_disk(error),
    )
