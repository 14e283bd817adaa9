"""Compaction of the log's oldest part into snapshots, in small steps on a background thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.partition.storage.committer import Committer
    from delta_prop.platform.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.retention.compaction import Compaction

logger = logging.getLogger("delta_prop")

POLL_S = 0.25
RETRY_S = 10.0
PAUSE_S = 0.001
"""Seconds between two checks for a due snapshot, after a failure, and between two steps."""


async def compact(log: DurableLog, world: World, committer: Committer) -> None:
    """Compact until cancelled; return at once if the settings ask for no compaction.

    The committer is notified when a commit has segments to remove. A failure is logged, and retried: until
    then the log keeps its oldest part.
    """
    if not log.settings.compact:
        return
    async with world.background_thread() as threads:
        wait_s = POLL_S
        while True:
            await anyio.sleep(wait_s)
            wait_s = POLL_S
            compaction = log.take_compaction()
            if compaction is None:
                continue
            try:
                made = await _run(log, compaction, threads)
            except (OSError, LogCorrupted, Refused) as error:
                wait_s = RETRY_S
                logger.warning(
                    "the log's oldest part could not be compacted into a snapshot; the service retries, and "
                    "removes nothing of it until then: %s",
                    error,
                )
                continue
            if made and log.retain():
                committer.notify()


async def _run(log: DurableLog, compaction: Compaction, threads: Threads) -> bool:
    """Run all steps; return True if the snapshot was made. If cancelled, leave no partial snapshot."""
    made = False
    try:
        # A failed log is recovered in place, which removes a partial snapshot.
        while log.failure is None and not made:
            made = await threads.run(compaction.step)
            await anyio.sleep(PAUSE_S)
    finally:
        if not made:
            with anyio.CancelScope(shield=True):
                await threads.run(compaction.abort)
        log.finish_compaction(compaction, made=made)
    return made
