"""Start from a snapshot, for a log without a usable checkpoint whose oldest part was removed."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

import anyio.lowlevel

if TYPE_CHECKING:
    from delta_prop.partition.core.appender import Appender
    from delta_prop.platform.ports import Threads
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

FRAMES_PER_SLICE = 16


async def restore_from_snapshot(appender: Appender, log: DurableLog, threads: Threads, now: float) -> None:
    """Restore heads, dimensions, watermarks and clocks of the newest snapshot; the caller replays the rest.

    A snapshot has neither ids nor first offsets of removed deltas, which is logged. Raises LogCorrupted,
    OSError.
    """
    snapshot = await threads.run(log.snapshot)
    if snapshot is None:
        return
    try:
        appender.restore_snapshot(snapshot.watermarks, snapshot.lamport, now)
        frames = snapshot.frames()
        while batches := await threads.run(lambda: list(islice(frames, FRAMES_PER_SLICE))):
            for logged in batches:
                appender.vectors.load_states(logged.batch)
                await anyio.lowlevel.checkpoint()
    finally:
        await threads.run(snapshot.close)
    logger.warning(
        "no checkpoint is usable, so the pipeline starts from the snapshot at offset %d: ids of deltas "
        "before offset %d are forgotten, so a duplicate of one is accepted as new",
        snapshot.offset,
        log.start_offset,
    )
