"""Compaction and compression of sealed segments, in small steps with pauses, on background threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
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

COMPACTION_POLL_S, COMPACTION_RETRY_S, COMPACTION_PAUSE_S = 0.25, 10.0, 0.001
COMPACTION_IDLE_S = 1.0
"""Seconds between two checks while nothing is appended; rows still come of age."""
COMPRESSION_POLL_S, COMPRESSION_RETRY_S, COMPRESSION_PAUSE_S = 1.0, 60.0, 0.01
"""Seconds between two checks for work, after a failure, and between two steps."""


async def compact(log: DurableLog, world: World, committer: Committer) -> None:
    """Compact the log's oldest part into snapshots until cancelled; return at once if no setting asks for it.

    The committer is notified when a commit has segments to remove. A failure is logged, and retried: until
    then the log keeps its oldest part.
    """
    if not log.settings.compact:
        return
    async with world.background_thread() as threads:
        wait_s, end = COMPACTION_POLL_S, log.next_offset
        while True:
            await anyio.sleep(wait_s)
            wait_s = COMPACTION_IDLE_S if log.next_offset == end else COMPACTION_POLL_S
            end = log.next_offset
            compaction = log.take_compaction()
            if compaction is None:
                continue
            try:
                made = await _run_compaction(log, compaction, threads)
            except (OSError, LogCorrupted, Refused) as error:
                wait_s = COMPACTION_RETRY_S
                logger.warning(
                    "the log's oldest part could not be compacted into a snapshot; the service retries, and "
                    "removes nothing of it until then: %s",
                    error,
                )
                continue
            if made and log.retain():
                committer.notify()


async def _run_compaction(log: DurableLog, compaction: Compaction, threads: Threads) -> bool:
    """Run all steps; return True if the snapshot was made. If cancelled, leave no partial snapshot."""
    made = False
    try:
        made = await _run_steps(log, compaction.step, threads, COMPACTION_PAUSE_S)
    finally:
        if not made:
            with anyio.CancelScope(shield=True):
                await threads.run(compaction.abort)
        log.finish_compaction(compaction, made=made)
    return made


async def compress_sealed(log: DurableLog, world: World, committer: Committer) -> None:
    """Compress sealed segments until cancelled; return at once if no setting asks for it.

    The committer is notified when a commit may have something to remove. A failure is logged, and retried; a
    corrupted segment is logged and left as it is.
    """
    if log.settings.codec is None:
        return
    async with world.background_thread() as threads:
        wait_s = COMPRESSION_POLL_S
        while True:
            await anyio.sleep(wait_s)
            wait_s = COMPRESSION_POLL_S
            try:
                while await _compress_next(log, threads):
                    committer.notify()
            except OSError as error:
                wait_s = COMPRESSION_RETRY_S
                logger.warning("a segment could not be compressed; the service retries: %s", error)
            except LogCorrupted as corruption:
                logger.error("a corrupted segment stays uncompressed: %s", corruption)


async def _compress_next(log: DurableLog, threads: Threads) -> bool:
    """Compress one segment; return False if there was none. Raises LogCorrupted, OSError."""
    compression = log.take_compression()
    if compression is None:
        return False
    done = False
    try:
        done = await _run_steps(log, compression.step, threads, COMPRESSION_PAUSE_S)
    except LogCorrupted:
        done = True  # a retry would fail on the same corruption
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await threads.run(compression.close)
        log.finish_compression(compression, retry=not done)
    return True


async def _run_steps(log: DurableLog, step: Callable[[], bool], threads: Threads, pause_s: float) -> bool:
    """Run steps until one is the last; return False if the log failed before.

    A failed log is recovered in place, which removes or replaces what a step would work on.
    """
    done = False
    while log.failure is None and not done:
        done = await threads.run(step)
        await anyio.sleep(pause_s)
    return done
