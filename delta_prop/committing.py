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

from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads
    from delta_prop_broker.log.commit import Commit
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

GATHER_BYTES, GATHER_S = 1024 * 1024, 0.003
"""A group that gathers between commits is committed with so many bytes, or after so long, at the latest."""
CACHED_BYTES_MAX = 256 * 1024
"""A group of no more bytes, of which nothing is to be synced, is written by the event loop itself."""
CACHED_S_MAX, ASIDE_S = 0.02, 10.0
"""Where such a write took longer, the system held it back: the thread writes for so long from then on."""


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
    ) -> None:
        self._log = log
        self._on_moved = on_moved
        self._on_failed = on_failed
        self._sync = False
        self._bell = anyio.Event()
        self._idle = anyio.Event()
        self._ended = False
        self._aside_until = -math.inf

    def ring(self) -> None:
        """Something was appended, or is to be removed."""
        self._bell.set()

    def sync(self) -> None:
        """Have everything that was appended synced, though no batch asks for it."""
        self._sync = True
        self.ring()

    async def run(self, threads: Threads) -> None:
        """Commit until cancelled; a commit under way is finished first, as its thread is."""
        try:
            while True:
                self._bell = anyio.Event()
                await self._commit_all(threads)
                self._idle.set()
                await self._bell.wait()
                self._idle = anyio.Event()
        finally:
            self._ended = True
            self._idle.set()

    async def drain(self) -> None:
        """Commit what is left; return when everything appended is synced, or the log has failed.

        Where `run` was cancelled before, what is left is for the log's own `close`.
        """
        log = self._log
        while log.failure is None and log.synced < log.next_offset and not self._ended:
            self._sync = True
            self.ring()
            await self._idle.wait()
            await anyio.lowlevel.checkpoint()

    async def _commit_all(self, threads: Threads) -> None:
        while (commit := self._log.take_commit(sync=self._sync)) is not None:
            self._sync = False
            try:
                if not self._write_cached(commit):
                    await threads.run(commit.run)
            except OSError as error:
                self._log.fail(error)
                refusal = failed(error)
                logger.error("%s", refusal.message)
                self._on_failed(refusal, error)
                return
            self._log.finish_commit(commit)
            end = self._log.next_offset
            self._on_moved()
            if end > commit.end:
                await self._gather(end)

    def _write_cached(self, commit: Commit) -> bool:
        """Run a commit here, where that is a copy into the page cache; whether it was. Raises OSError."""
        size = commit.cached_bytes
        if size is None or size > CACHED_BYTES_MAX:
            return False
        began = anyio.current_time()
        if began < self._aside_until:
            return False
        commit.run()
        ended = anyio.current_time()
        if ended - began > CACHED_S_MAX:
            self._aside_until = ended + ASIDE_S
        return True

    async def _gather(self, end: int) -> None:
        """Wait while more is appended than the log had up to `end`, its end before callers were told.

        Not called where nothing came during the last commit: who waits for each batch is never held up.
        """
        began = anyio.current_time()
        while True:
            await anyio.lowlevel.checkpoint()
            before, end = end, self._log.next_offset
            if end == before or self._sync or self._log.unwritten_bytes >= GATHER_BYTES:
                return
            if anyio.current_time() - began >= GATHER_S:
                return


def failed(error: Exception) -> Refused:
    """What to tell everybody whose delta may be lost with the log."""
    return Refused(
        ErrorCode.LOG_FAILED,
        f"the log has stopped, as the disk failed with {error}: nothing unacknowledged is kept for sure; it "
        "is recovered when the disk is well again, so see to that, and send again",
        retry_after_ms=1000,
    )
