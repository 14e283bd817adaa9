"""The scenarios about rows of another service: rows that sort before earlier rows of a vector, duplicate ids.

A vector is the fold of its rows in canonical order, in whatever order they arrived. So a sink that stores
states refolds such a vector from the log's history, which may begin with a state from a snapshot.
"""

from __future__ import annotations

from delta_prop_sinks.conformance.fakes import THIRD_ORIGIN
from delta_prop_sinks.conformance.player import Player
from delta_prop_sinks.conformance.rebuilding import rebuild_at, states_at
from delta_prop_sinks.conformance.story import deliver_and_check, deliver_new, is_applied
from delta_prop_sinks.sink import Rebuildable
from delta_prop_wire.delta import Delta, create, delete, metadata_only, offset, scale, sparse, sparse_add

WAITS_MAX = 8
"""The kit cancels a call at this many of its first waits."""
_GAP = 100
"""The size of a gap in the Lamport numbers, for rows that arrive later."""
_IDS = [bytes([number]) * 16 for number in range(1, 3)]


def leave_gap(player: Player) -> int:
    """Leave a gap in the Lamport numbers, for rows that arrive later; return its first number."""
    log = player.log
    first = log.lamport + 1
    log.forward(Delta("ahead", create([1, 1, 1, 1])), lamport=log.lamport + _GAP)
    return first


async def check_out_of_order_rows(player: Player) -> None:
    """Deliver forwarded rows that sort before earlier ones, also twice, cancelled, and after a restart."""
    log = player.log
    log.append(*(Delta(f"shared-{i}", create([i, 1, 2, 3]), metadata={"n": i}) for i in range(8)))
    gap = leave_gap(player)
    log.append(*(Delta(f"shared-{i}", scale(2), metadata={"n": None}) for i in range(8)))
    await deliver_new(player)
    log.forward(Delta("shared-0", offset(1)), lamport=gap)
    await deliver_and_check(
        player, "forwarded", "after a forwarded row that sorts before an earlier one of its vector"
    )
    log.forward(
        Delta("shared-0", sparse([1], [5])),
        Delta("shared-1", metadata_only(), metadata={"n": 7, "m": 8}),
        Delta("shared-0", scale(3)),
        Delta("shared-2", delete()),
        lamport=gap + 1,
    )
    log.append(Delta("shared-0", offset(1)), Delta("shared-3", offset(1)))
    log.forward(*(Delta(f"shared-{i}", sparse_add([0, 3], [1, i])) for i in range(8)), lamport=gap + 5)
    log.append(Delta("shared-0", sparse_add([2], [1])), Delta("shared-new", create([1, 2, 3, 4])))
    start = log.delivered_offset
    await deliver_and_check(
        player, "forwarded", "after many forwarded rows, among own ones, that sort before earlier ones"
    )
    await player.deliver(log.deliveries(start))
    await player.check_view(
        "redelivery", "after forwarded rows that sort before earlier ones were redelivered"
    )
    await _deliver_ties(player)
    await _deliver_duplicate_ids(player)
    await _cancel_calls(player)
    await player.reopen("open() after forwarded rows that sort before earlier ones")
    player.recheck_all()
    await player.check_view("forwarded", "after a restart after forwarded rows that sort before earlier ones")


async def _deliver_ties(player: Player) -> None:
    """Forward rows of two services with equal Lamport numbers: their order is that of their origins."""
    log, lamport = player.log, player.log.lamport + 1
    log.forward(Delta("shared-6", offset(1)), lamport=lamport)
    log.forward(Delta("shared-6", scale(2)), lamport=lamport, origin=THIRD_ORIGIN)
    log.forward(Delta("shared-7", scale(2)), lamport=lamport + 1, origin=THIRD_ORIGIN)
    log.forward(Delta("shared-7", offset(1)), lamport=lamport + 1)
    await deliver_and_check(
        player, "forwarded", "after forwarded rows of two origins with equal Lamport numbers"
    )


async def _deliver_duplicate_ids(player: Player) -> None:
    """Forward copies of own deltas, as if a client sent both: only the copy that sorts first takes effect."""
    log = player.log
    gap = leave_gap(player)
    log.append(Delta("shared-4", offset(1), id=_IDS[0]), Delta("shared-5", offset(1), id=_IDS[1]))
    log.append(Delta("shared-4", scale(2)), Delta("shared-5", scale(2)))
    await deliver_new(player)
    log.forward(Delta("shared-4", offset(1), id=_IDS[0]), lamport=log.lamport + 1)
    log.forward(Delta("shared-5", offset(1), id=_IDS[1]), lamport=gap)
    await deliver_and_check(
        player, "forwarded", "after forwarded rows with the ids of rows that came earlier"
    )


async def _cancel_calls(player: Player) -> None:
    log = player.log
    for wait_number in range(WAITS_MAX):
        gap, start = leave_gap(player), log.next_offset
        log.append(Delta("shared-6", scale(2)), Delta("shared-7", scale(2)))
        log.forward(Delta("shared-6", offset(1)), Delta("shared-7", offset(wait_number)), lamport=gap)
        await deliver_new_until(player, start)
        deliveries = log.deliveries(start)
        waits = await player.cancel_apply(wait_number, deliveries)
        remaining = [delivery for delivery in deliveries if not is_applied(player, delivery)]
        if remaining:
            await player.deliver(remaining, "cancellation")
        when = f"after redelivered forwarded rows, cancelled at wait {wait_number}"
        await player.check_view("cancellation", when)
        if waits < wait_number:
            break


async def deliver_new_until(player: Player, end: int) -> None:
    """Deliver the rows below an offset that the sink has not received yet."""
    await player.deliver(player.log.deliveries(player.log.delivered_offset, end))


async def check_rebuild_before_forwarded_rows(player: Player) -> None:
    """Rebuild from a snapshot, which replaces the log below it; then deliver the forwarded rows above it."""
    if not isinstance(player.sink, Rebuildable):
        return
    log = player.log
    lower_gap = leave_gap(player)
    log.append(*(Delta(f"under-{i}", create([i, 1, 2, 3])) for i in range(3)))
    end, upper_gap = log.next_offset, leave_gap(player)
    log.append(*(Delta(f"under-{i}", scale(2)) for i in range(3)))
    log.forward(Delta("under-0", offset(1)), Delta("under-1", sparse_add([0], [1])), lamport=upper_gap)
    log.forward(Delta("under-1", offset(3)), Delta("under-2", scale(5)), lamport=lower_gap)  # no effect
    await deliver_and_check(player, "forwarded", "after forwarded rows that sort before earlier ones")
    log.compact(states_at(player, end), end)
    await rebuild_at(player, end)
    when = "after a rebuild from a snapshot that lies below forwarded rows"
    player.recheck_all()
    await player.check_view("rebuild", when)
    await player.deliver(log.deliveries(end, log.delivered_offset), "forwarded")
    player.recheck_all()
    await player.check_view("forwarded", f"{when}, after these were redelivered")
    log.forward(Delta("under-0", scale(3)), lamport=upper_gap + 10)
    await deliver_and_check(player, "forwarded", f"{when}, and another one")
    log.undo_compact()
