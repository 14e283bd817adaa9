"""A start without a checkpoint, of a log whose beginning is gone: what its snapshot tells of that."""

from __future__ import annotations

import logging
from itertools import islice
from typing import TYPE_CHECKING

import anyio.lowlevel

if TYPE_CHECKING:
    from delta_prop.append import Appender
    from delta_prop.ports import Threads
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

FRAMES_A_SLICE = 16


async def take_snapshot(appender: Appender, log: DurableLog, threads: Threads, now: float) -> None:
    """Give the chain heads, dimensions, watermarks and clocks of the newest snapshot; the log's rest follows.

    Ids of what went, and first offsets, are in no snapshot: that is told. Raises LogDamaged, OSError.
    """
    snapshot = await threads.run(log.snapshot)
    if snapshot is None:
        return
    try:
        appender.take_past(snapshot.watermarks, snapshot.lamport, now)
        frames = snapshot.frames()
        while found := await threads.run(lambda: list(islice(frames, FRAMES_A_SLICE))):
            for logged in found:
                appender.vectors.take_states(logged.batch)
                await anyio.lowlevel.checkpoint()
    finally:
        await threads.run(snapshot.close)
    logger.warning(
        "no checkpoint could be used, so the chain begins with the snapshot at offset %d: ids of deltas "
        "before offset %d are not known any more, a repeat of one is taken for new",
        snapshot.offset,
        log.first_offset,
    )
