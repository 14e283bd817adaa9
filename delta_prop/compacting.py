"""Has the log's oldest part made into snapshots on a background thread, in small steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from delta_prop_broker.log.damage import LogDamaged
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.retention.compaction import Compaction

logger = logging.getLogger("delta_prop")

LOOK_S = 0.25
AGAIN_S = 10.0
REST_S = 0.001
"""How often it looks whether a snapshot is due, how long it waits after a failure, and between two steps."""


async def compact(log: DurableLog, world: World, *, ring: Callable[[], None]) -> None:
    """Go on until cancelled; ends at once where the settings ask for no compaction.

    `ring` is called when a commit has segments to remove. A failure is told, and tried again: until then the
    log keeps what it has.
    """
    if not log.settings.compact:
        return
    async with world.background_thread() as threads:
        wait_s = LOOK_S
        while True:
            await anyio.sleep(wait_s)
            wait_s = LOOK_S
            compaction = log.take_compaction()
            if compaction is None:
                continue
            try:
                made = await _run(log, compaction, threads)
            except (OSError, LogDamaged, Refused) as error:
                wait_s = AGAIN_S
                logger.warning(
                    "the log's oldest part could not be made into a snapshot, which is tried again; "
                    "until then nothing of it goes: %s",
                    error,
                )
                continue
            if made and log.retain():
                ring()


async def _run(log: DurableLog, compaction: Compaction, threads: Threads) -> bool:
    """Step to the end; whether the snapshot is there. Cancelled, it leaves nothing behind."""
    made = False
    try:
        # A log that has stopped is recovered in place, which removes what is half done.
        while log.failure is None and not made:
            made = await threads.run(compaction.step)
            await anyio.sleep(REST_S)
    finally:
        if not made:
            with anyio.CancelScope(shield=True):
                await threads.run(compaction.abort)
        log.finish_compaction(compaction, made=made)
    return made
