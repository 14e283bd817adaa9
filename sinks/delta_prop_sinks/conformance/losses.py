"""The scenarios about durability: batches delivered in two parts, and crashes at every moment.

They run after the scenarios of `story.py`, on the same growing log. To simulate a crash within a call, the
kit cancels the call and drops the sink: none of the sink's code runs any further.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from delta_prop_sinks.conformance.fakes import CALL_TURNS
from delta_prop_sinks.conformance.player import Player
from delta_prop_sinks.conformance.story import (
    append_rows,
    append_with_gaps,
    deliver_and_check,
    deliver_new,
    is_applied,
)
from delta_prop_wire.delta import Delta, create, offset, scale, sparse_add

CRASHES_MAX = 24
"""The kit crashes a sink at this many first waits of a call; half as many for redelivered rows."""


async def check_sliced_batches(player: Player) -> None:
    """Deliver a batch in two parts, with a restart, a crash, or a row from quarantine in between."""
    for has_gap in (False, True):
        # If no data outlives the sink, a crash equals a restart.
        for interruption in ("nothing", "a restart", "a crash")[: 3 if player.is_persistent else 2]:
            quarantined = await _deliver_first_part(
                player, f"cut-{has_gap:d}-{interruption}", has_gap=has_gap
            )
            when = f"after the first part of a batch{' and a redelivered row of it' if has_gap else ''}"
            if interruption != "nothing":
                restart = player.reopen if interruption == "a restart" else player.crash
                await restart(f"open() {when} and {interruption}")
                when += f" and {interruption}, from the sink's cursor {player.start}"
            await player.check_view("released" if has_gap else "resume", when)
            if has_gap:
                await player.deliver(player.log.redeliveries(quarantined), "released")
            await deliver_and_check(
                player, "released" if has_gap else "order", f"{when}, after the rest was delivered"
            )


async def _deliver_first_part(player: Player, prefix: str, *, has_gap: bool) -> list[int]:
    """Deliver half of a batch; return its quarantined rows. `has_gap`: one is quarantined, and released."""
    log = player.log
    sliced = log.append(
        *(Delta(f"{prefix}-{i}", create([i, 1, 2, 3])) for i in range(6)),
        Delta(f"{prefix}-1", scale(3)),
        Delta(f"{prefix}-0", offset(2)),
    )
    log.append(Delta(f"{prefix}-1", sparse_add([0], [1])), Delta(f"{prefix}-next", create([1, 2, 3, 4])))
    quarantined = [sliced.offset + 1] if has_gap else []
    log.quarantined.update(quarantined)
    await player.deliver(log.deliveries(log.delivered_offset, sliced.offset + 4))
    await player.check_view("order", "after the first part of a batch")
    if has_gap:
        await _redeliver(player, quarantined)
        await player.check_view(
            "released", "after a redelivered row of a batch whose second part is still due"
        )
    return quarantined


async def check_crashes(player: Player) -> None:
    """Drop the sink without aclose(), at different moments: rows reported as committed must survive."""
    for when in ("apply()", "background work and apply()", "apply() amid background work"):
        await player.deliver(append_rows(player, f"lost-{len(when)}"))
        if when == "background work and apply()":
            await player.pause()
            await player.deliver(append_rows(player, "lost"))
        if when == "apply() amid background work":
            await _wait_for_busy_thread(player)
            await player.deliver(append_rows(player, "amid"))
        await _crash_and_check(player, f"a crash after {when}")
    for wait in range(1, CRASHES_MAX + 1):
        waits = await player.cancel_apply(wait, append_rows(player, f"lost-at-{wait}"))
        await _crash_and_check(player, f"a crash at wait {wait} of apply()")
        if waits < wait or not player.is_persistent:  # no later wait exists, or no data that could be lost
            break
    await _crash_after_redelivery(player)
    await _crash_during_redelivery(player)
    player.recheck_all()
    await player.check_view("committed", "after many crashes")


async def _crash_and_check(player: Player, crash_name: str, part: str = "committed") -> None:
    await player.crash(f"open() after {crash_name}")
    await player.check_view(part, f"after {crash_name}, from the sink's cursor {player.start}")
    deliveries = player.log.deliveries(player.start)
    remaining = [delivery for delivery in deliveries if not is_applied(player, delivery)]
    if remaining:
        await player.deliver(remaining)


async def _crash_after_redelivery(player: Player) -> None:
    """Crash after rows were released, which must be durable by then: beside unflushed rows, then alone."""
    for which in ("some", "the other"):
        quarantined = append_with_gaps(player, f"gone-{which}")
        await deliver_new(player)
        if which == "the other":
            await player.pause()
            await player.reopen("open() before redelivered rows")
        await _redeliver(player, quarantined)
        await _crash_and_check(player, f"a crash after {which} redelivered rows", "released")
        await player.deliver(player.log.redeliveries(quarantined), "released")
        await player.check_view(
            "released", f"after a crash after {which} redelivered rows and their duplicates"
        )


async def _crash_during_redelivery(player: Player) -> None:
    for wait in range(1, CRASHES_MAX // 2 + 1):
        quarantined = append_with_gaps(player, f"half-{wait}")
        await deliver_new(player)
        waits = await player.cancel_apply(wait, player.log.redeliveries(quarantined))
        await player.crash(f"open() after a crash at wait {wait} of redelivered rows")
        await _redeliver(player, quarantined)
        await player.check_view(
            "released", f"after a crash at wait {wait} of redelivered rows and their duplicates"
        )
        if waits < wait or not player.is_persistent:
            break


async def _redeliver(player: Player, offsets: Sequence[int]) -> None:
    await player.deliver(player.log.redeliveries(offsets), "released")
    player.log.quarantined.difference_update(offsets)


async def _wait_for_busy_thread(player: Player) -> None:
    """Wait until the sink makes a slow call on its thread, if it makes one."""
    fault = player.log.fault
    fault.begun = anyio.Event()
    fault.turns = 20
    with anyio.move_on_after(player.settings.pause_s):
        await fault.begun.wait()
    fault.turns = CALL_TURNS
