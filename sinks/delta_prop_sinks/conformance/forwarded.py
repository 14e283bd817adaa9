"""The chapters about what another service accepted: rows that sort before others of their vectors, and twins.

A vector is the fold of its rows in canonical order, whichever came first here. So a sink that keeps states
folds such a vector again, from the log's history, which may begin with a snapshot's state of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_sinks.conformance.rebuilding import rebuild_at, states_at
from delta_prop_sinks.conformance.story import deliver_new, is_applied
from delta_prop_sinks.conformance.world import BEYOND
from delta_prop_sinks.sink import Rebuilds
from delta_prop_wire.delta import Delta, create, delete, metadata_only, offset, scale, sparse, sparse_add

if TYPE_CHECKING:
    from delta_prop_sinks.conformance.player import Player

WAITS_MAX = 8
_GAP = 100
_IDS = [bytes([number]) * 16 for number in range(1, 3)]


def leave_gap(player: Player) -> int:
    """Have Lamport numbers go on above a gap, in which another service numbered what is still to come; return
    its first number.
    """
    log = player.log
    first = log.lamport + 1
    log.forward(Delta("ahead", create([1, 1, 1, 1])), lamport=log.lamport + _GAP)
    return first


async def late_rows(player: Player) -> None:
    """One by one, together with others, again, amid cancelled calls, and behind a restart."""
    log = player.log
    log.append(*(Delta(f"shared-{i}", create([i, 1, 2, 3]), metadata={"n": i}) for i in range(8)))
    gap = leave_gap(player)
    log.append(*(Delta(f"shared-{i}", scale(2), metadata={"n": None}) for i in range(8)))
    await deliver_new(player)
    log.forward(Delta("shared-0", offset(1)), lamport=gap)
    await deliver_new(player)
    await player.look(
        "forwarded", "after a forwarded row that sorts before one of its vector that came earlier"
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
    first = log.delivered
    await deliver_new(player)
    await player.look("forwarded", "after many forwarded rows, among own ones, that sort before earlier ones")
    await player.deliver(log.deliveries(first))
    await player.look("repeats", "after forwarded rows that sort before earlier ones came again")
    await _ties(player)
    await _twins(player)
    await _cancelled(player)
    await player.reopen("open() after forwarded rows that sort before earlier ones")
    player.look_at_all()
    await player.look("forwarded", "after a restart behind forwarded rows that sort before earlier ones")


async def _ties(player: Player) -> None:
    """Two services gave one Lamport number: then the origin decides, whichever row came first."""
    log, first = player.log, player.log.lamport + 1
    log.forward(Delta("shared-6", offset(1)), lamport=first)
    log.forward(Delta("shared-6", scale(2)), lamport=first, origin=BEYOND)
    log.forward(Delta("shared-7", scale(2)), lamport=first + 1, origin=BEYOND)
    log.forward(Delta("shared-7", offset(1)), lamport=first + 1)
    await deliver_new(player)
    await player.look("forwarded", "after forwarded rows of two origins with the same Lamport number")


async def _twins(player: Player) -> None:
    """A client sent a delta to both services: the copy that sorts first has an effect, the other has none."""
    log = player.log
    gap = leave_gap(player)
    log.append(Delta("shared-4", offset(1), id=_IDS[0]), Delta("shared-5", offset(1), id=_IDS[1]))
    log.append(Delta("shared-4", scale(2)), Delta("shared-5", scale(2)))
    await deliver_new(player)
    log.forward(Delta("shared-4", offset(1), id=_IDS[0]), lamport=log.lamport + 1)
    log.forward(Delta("shared-5", offset(1), id=_IDS[1]), lamport=gap)
    await deliver_new(player)
    await player.look("forwarded", "after forwarded rows with the ids of rows that came earlier")


async def _cancelled(player: Player) -> None:
    log = player.log
    for wait in range(WAITS_MAX):
        gap, start = leave_gap(player), log.next_offset
        log.append(Delta("shared-6", scale(2)), Delta("shared-7", scale(2)))
        log.forward(Delta("shared-6", offset(1)), Delta("shared-7", offset(wait)), lamport=gap)
        await deliver_new_until(player, start)
        deliveries = log.deliveries(start)
        waits = await player.cancel_apply(wait, deliveries)
        left = [one for one in deliveries if not is_applied(player, one)]
        if left:
            await player.deliver(left, "cancellation")
        await player.look("cancellation", f"after forwarded rows, cancelled at wait {wait}, came again")
        if waits < wait:
            break


async def deliver_new_until(player: Player, offset: int) -> None:
    """What the log has below an offset and the sink was never handed."""
    await player.deliver(player.log.deliveries(player.log.delivered, offset))


async def rebuilt_beneath(player: Player) -> None:
    """Rebuilt from a snapshot that lies below such rows, and is all that is left of what came before."""
    if not isinstance(player.sink, Rebuilds):
        return
    log = player.log
    below = leave_gap(player)
    log.append(*(Delta(f"under-{i}", create([i, 1, 2, 3])) for i in range(3)))
    end, behind = log.next_offset, leave_gap(player)
    log.append(*(Delta(f"under-{i}", scale(2)) for i in range(3)))
    log.forward(Delta("under-0", offset(1)), Delta("under-1", sparse_add([0], [1])), lamport=behind)
    log.forward(Delta("under-1", offset(3)), Delta("under-2", scale(5)), lamport=below)  # no effect
    await deliver_new(player)
    await player.look("forwarded", "after forwarded rows that sort before earlier ones")
    log.compact(states_at(player, end), end)
    await rebuild_at(player, end)
    when = "after a rebuild from a snapshot that lies below forwarded rows"
    player.look_at_all()
    await player.look("rebuild", when)
    await player.deliver(log.deliveries(end, log.delivered), "forwarded")
    player.look_at_all()
    await player.look("forwarded", f"{when}, when these had come again")
    log.forward(Delta("under-0", scale(3)), lamport=behind + 10)
    await deliver_new(player)
    await player.look("forwarded", f"{when}, and another one")
    log.tell_all_again()
