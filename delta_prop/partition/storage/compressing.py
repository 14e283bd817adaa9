"""Compression of sealed segments on a background thread, in small steps with pauses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from delta_prop_broker.corruption import LogCorrupted

if TYPE_CHECKING:
    from delta_prop.partition.storage.committer import Committer
    from delta_prop.platform.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

POLL_S = 1.0
RETRY_S = 60.0
PAUSE_S = 0.01
"""Seconds between two checks for a segment, after a failure, and between two steps."""


async def compress_sealed(log: DurableLog, world: World, committer: Committer) -> None:
    """Compress until cancelled; return at once if the settings ask for no compression.

    The committer is notified when a commit may have something to remove. A failure is logged, and retried; a
    corrupted segment is logged and left as it is.
    """
    if log.settings.codec is None:
        return
    async with world.background_thread() as threads:
        wait_s = POLL_S
        while True:
            await anyio.sleep(wait_s)
            wait_s = POLL_S
            try:
                while await _compress_next(log, threads):
                    committer.notify()
            except OSError as error:
                wait_s = RETRY_S
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
        # A failed log is recovered in place, so its segments must not be replaced meanwhile.
        while log.failure is None and not done:
            done = await threads.run(compression.step)
            await anyio.sleep(PAUSE_S)
    except LogCorrupted:
        done = True  # a retry would fail on the same corruption
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await threads.run(compression.close)
        log.finish_compression(compression, retry=not done)
    return True
