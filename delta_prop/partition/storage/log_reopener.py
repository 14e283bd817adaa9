"""In-place recovery of a log whose disk failed, retried with growing backoff until it succeeds.

The service does not continue to write the old files: it recovers the directory as at a start, under the lock
that it holds throughout. If the recovery finds corruption, the log stops for good. The steps:

1. `Committer` sees the error, and `Storage.note_failed` passes it on.
2. `Pipeline.stop` refuses what is not appended; `AckTracker.suspend` holds what is in doubt.
3. `LogReopener` recovers the directory on a thread; the log resumes, and the listener is notified at once.
4. `Partition.rebuild_state` restores the state; `AckTracker.resume` settles what is in doubt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop_broker.log.refusals import log_stopped
from delta_prop_wire.errors import DeltaPropError

if TYPE_CHECKING:
    from delta_prop.partition.storage.storage import Storage
    from delta_prop.platform.ports import Threads, World
    from delta_prop_broker.recovery.recovery import RecoveryReport, RecoveryResult

logger = logging.getLogger("delta_prop")

TRY_S_FIRST, TRY_S_MAX = 0.05, 30.0
"""First and longest backoff before a try. The backoff doubles; half of it is random."""


@dataclass(frozen=True, slots=True)
class ReopeningStatistics:
    """State of a log's recovery. `failed`: True while the log has failed. `tries`: number since a commit.

    `reopened`: number of successful recoveries. `next_try_s`: seconds until the next try; None: the log
    works, a try is under way, or the log has stopped for good.
    """

    failed: bool
    tries: int
    reopened: int
    last_error: str | None
    next_try_s: float | None


class LogReopener:
    """Runs the recovery tries, and notifies the storage of what they bring."""

    def __init__(self, storage: Storage, threads: Threads, world: World) -> None:
        self._log = storage.log
        self._storage = storage
        self._threads = threads
        self._clock = world.clock
        self._rng = world.randomness.fork("reopening")
        self._failure_event = anyio.Event()
        self._tries = self._reopened = 0
        self._last_error: str | None = None
        self._next_at: float | None = None

    def statistics(self) -> ReopeningStatistics:
        """Return a snapshot."""
        return ReopeningStatistics(
            failed=self._log.failure is not None,
            tries=self._tries,
            reopened=self._reopened,
            last_error=self._last_error,
            next_try_s=None if self._next_at is None else max(0.0, self._next_at - self._clock.now()),
        )

    def note_failed(self, error: Exception) -> None:
        """Start the recovery after a failure of the log."""
        self._last_error = str(error)
        self._failure_event.set()

    def note_committed(self) -> None:
        """Reset the tries, since the log commits again: the next failure is a first one."""
        self._tries = 0

    async def run(self) -> None:
        """Recover the log whenever it fails, until cancelled."""
        while True:
            await self._failure_event.wait()
            self._failure_event = anyio.Event()
            while self._log.failure is not None:
                if isinstance(self._log.failure, DeltaPropError):  # corruption, which a retry cannot repair
                    logger.error("the log has stopped for good: %s", self._log.failure)
                    self._storage.note_stopped(log_stopped(self._log.failure))
                    break
                await self._wait()
                if not self._log.is_rearranging:  # a rearrangement ends by itself, since the log has failed
                    await self._try()

    async def _wait(self) -> None:
        backoff_s = min(TRY_S_FIRST * 2 ** min(self._tries, 30), TRY_S_MAX)
        wait_s = backoff_s * (0.5 + 0.5 * self._rng.random())
        self._next_at = self._clock.now() + wait_s
        logger.warning(
            "the log has failed (%s); the service recovers it in %.3g s, try %d",
            self._last_error, wait_s, self._tries + 1,
        )  # fmt: skip
        await anyio.sleep(wait_s)
        self._next_at = None
        self._tries += 1

    async def _try(self) -> None:
        try:
            report = await self._recover()
            await self._storage.rebuild_state()
        except (OSError, DeltaPropError) as error:
            self._last_error = str(error)
            self._log.fail(error)
            return
        self._reopened += 1
        logger.warning("the log was recovered after its failure: %s", report)

    async def _recover(self) -> RecoveryReport:
        recovered: RecoveryResult
        async with self._storage.pause_checkpoints():
            with anyio.CancelScope(shield=True):  # files that a thread has opened must not leak
                recovered = await self._threads.run(self._log.recover_in_place)
                self._log.resume(recovered)
                self._storage.note_recovered(recovered.report)
        return recovered.report
