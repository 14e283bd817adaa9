"""Has sealed segments compressed on a background thread, in small steps with rests in between."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from delta_prop_broker.log.damage import LogDamaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.ports import Threads, World
    from delta_prop_broker.log.durable import DurableLog

logger = logging.getLogger("delta_prop")

LOOK_S = 1.0
AGAIN_S = 60.0
REST_S = 0.01
"""How often it looks for a segment, how long it waits after a failure, and between two steps."""


async def compress_sealed(log: DurableLog, world: World, *, ring: Callable[[], None]) -> None:
    """Go on until cancelled; ends at once where the settings ask for no compression.

    `ring` is called when a commit may have something to remove. A failure is told, and tried again; where a
    segment is damaged it is told and left as it is.
    """
    if log.settings.codec is None:
        return
    async with world.background_thread() as threads:
        wait_s = LOOK_S
        while True:
            await anyio.sleep(wait_s)
            wait_s = LOOK_S
            try:
                while await _compress_next(log, threads):
                    ring()
            except OSError as error:
                wait_s = AGAIN_S
                logger.warning("a segment could not be compressed, which is tried again: %s", error)
            except LogDamaged as damage:
                logger.error("a segment is not compressed: %s", damage)


async def _compress_next(log: DurableLog, threads: Threads) -> bool:
    """Compress a segment; whether there was one. Raises LogDamaged, OSError."""
    rewriting = log.take_rewriting()
    if rewriting is None:
        return False
    done = False
    try:
        # A log that has stopped is recovered in place: nothing is exchanged below that.
        while log.failure is None and not done:
            done = await threads.run(rewriting.step)
            await anyio.sleep(REST_S)
    except LogDamaged:
        done = True  # it would be found again
        raise
    finally:
        with anyio.CancelScope(shield=True):
            await threads.run(rewriting.end)
        log.finish_rewriting(rewriting, again=not done)
    return True
