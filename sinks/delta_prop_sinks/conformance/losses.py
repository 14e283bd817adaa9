"""The chapters about what must not be lost: batches in two parts, and crashes at every moment.

Like those of `story.py`, which come before, they are played on one log that grows. A crash in the middle
of a call is a call that is cancelled and a sink that is thrown away: nothing of it runs any further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop_sinks.conformance.story import append_with_gaps, deliver_new, grow, is_applied
from delta_prop_sinks.conformance.world import TURNS
from delta_prop_wire.delta import Delta, create, offset, scale, sparse_add

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks.conformance.player import Player

CRASHES_MAX = 24
"""A sink crashes at each wait of a call, the first ones up to this many; half as many amid late rows."""


async def parts(player: Player) -> None:
    """A batch is cut: its rest comes later, behind late rows of its beginning, a restart or a crash."""
    for gap in (False, True):
        # Where nothing outlives the sink, a crash is what a restart is.
        for between in ("nothing", "a restart", "a crash")[: 3 if player.outlives else 2]:
            aside = await _first_part(player, f"cut-{gap:d}-{between}", gap=gap)
            when = f"after the first part of a batch{' and a late row of it' if gap else ''}"
            if between != "nothing":
                again = player.reopen if between == "a restart" else player.crash
                await again(f"open() {when} and {between}")
                when += f" and {between}, from the sink's cursor {player.start}"
            await player.look("late" if gap else "resume", when)
            if gap:
                await player.deliver(player.log.late(aside), "late")
            await deliver_new(player)
            await player.look("late" if gap else "order", f"{when}, when the rest had come")


async def _first_part(player: Player, prefix: str, *, gap: bool) -> list[int]:
    """Deliver half a batch, and another's beginning is still to come; with a gap, that row comes late."""
    log = player.log
    cut = log.append(
        *(Delta(f"{prefix}-{i}", create([i, 1, 2, 3])) for i in range(6)),
        Delta(f"{prefix}-1", scale(3)),
        Delta(f"{prefix}-0", offset(2)),
    )
    log.append(Delta(f"{prefix}-1", sparse_add([0], [1])), Delta(f"{prefix}-next", create([1, 2, 3, 4])))
    aside = [cut.offset + 1] if gap else []
    log.aside.update(aside)
    await player.deliver(log.deliveries(log.delivered, cut.offset + 4))
    await player.look("order", "after the first part of a batch")
    if gap:
        await _deliver_late(player, aside)
        await player.look("late", "after a late row of a batch of which a part is still to come")
    return aside


async def crash(player: Player) -> None:
    """Thrown away without aclose, at different moments: what it said was durable is there."""
    for when in (
        "apply()",
        "background work and apply()",
        "apply() amid background work",
    ):
        await player.deliver(grow(player, f"lost-{len(when)}"))
        if when == "background work and apply()":
            await player.pause()
            await player.deliver(grow(player, "lost"))
        if when == "apply() amid background work":
            await _until_a_thread_is_busy(player)
            await player.deliver(grow(player, "amid"))
        await _crash_and_look(player, f"a crash behind {when}")
    for wait in range(1, CRASHES_MAX + 1):
        waits = await player.cancel_apply(wait, grow(player, f"lost-at-{wait}"))
        await _crash_and_look(player, f"a crash at wait {wait} of apply()")
        if waits < wait or not player.outlives:  # then all comes again, wherever it was
            break
    await _crash_behind_late_rows(player)
    await _crash_amid_late_rows(player)
    player.look_at_all()
    await player.look("committed", "after many crashes")


async def _crash_and_look(player: Player, what: str, part: str = "committed") -> None:
    await player.crash(f"open() after {what}")
    await player.look(part, f"after {what}, from the sink's cursor {player.start}")
    left = [one for one in player.log.deliveries(player.start) if not is_applied(player, one)]
    if left:
        await player.deliver(left)


async def _crash_behind_late_rows(player: Player) -> None:
    """They come never again, so they are there; beside rows that are written behind, and alone."""
    for part in ("some", "the other"):
        aside = append_with_gaps(player, f"gone-{part}")
        await deliver_new(player)
        if part == "the other":
            await player.pause()
            await player.reopen("open() before late rows")
        await _deliver_late(player, aside)
        await _crash_and_look(player, f"a crash behind {part} late rows", "late")
        await player.deliver(player.log.late(aside), "late")
        await player.look("late", f"after a crash behind {part} late rows, which came late again")


async def _crash_amid_late_rows(player: Player) -> None:
    for wait in range(1, CRASHES_MAX // 2 + 1):
        aside = append_with_gaps(player, f"half-{wait}")
        await deliver_new(player)
        waits = await player.cancel_apply(wait, player.log.late(aside))
        await player.crash(f"open() after a crash at wait {wait} of late rows")
        await _deliver_late(player, aside)
        await player.look("late", f"after a crash at wait {wait} of late rows, which came late again")
        if waits < wait or not player.outlives:
            break


async def _deliver_late(player: Player, aside: Sequence[int]) -> None:
    """Out of the quarantine, which has let go of them then."""
    await player.deliver(player.log.late(aside), "late")
    player.log.aside.difference_update(aside)


async def _until_a_thread_is_busy(player: Player) -> None:
    """Until the sink makes a call on its thread, if it does, which then takes its time."""
    fault = player.log.fault
    fault.begun = anyio.Event()
    fault.turns = 20
    with anyio.move_on_after(player.settings.pause_s):
        await fault.begun.wait()
    fault.turns = TURNS
