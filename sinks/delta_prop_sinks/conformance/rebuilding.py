"""The chapter about being rebuilt, for sinks that can be: whole or not at all, and each delta once behind it.

States are those of the log at some offset in its middle, so the tail that follows must have its effect again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio

from delta_prop_sinks.conformance.rules import NotConforming
from delta_prop_sinks.conformance.steps import cancelled_at
from delta_prop_sinks.conformance.story import grow
from delta_prop_sinks.conformance.world import Shadow, lamport_below, rows_of
from delta_prop_sinks.sink import Rebuilds, TryAgain
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.states import StateRow

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delta_prop_sinks.conformance.player import Player

CALLS_MAX = 3
"""The thread port fails in so many of the first calls of each step."""
WAITS_MAX = 3
PIECES = 3
ATTEMPTS_MAX = 6
FOREIGN = "not-of-this-log"


async def rebuild(player: Player) -> None:
    """Rebuilt in the middle of the log, with failures, cancelled, after a crash; each time with the tail."""
    if not isinstance(player.sink, Rebuilds):
        return
    _add_what_the_states_do_not_have(player)
    await player.deliver(player.log.deliveries(player.log.delivered), "rebuild")
    for what in ("nothing in the way", "a failing thread port", "cancelled calls"):
        await player.deliver(grow(player, f"tail-{what.split()[0]}"), "rebuild")
        offset = _middle(player)
        if what == "a failing thread port":
            await _with_failures(player, offset)
        elif what == "cancelled calls":
            await _with_cancellations(player, offset)
        else:
            await _whole(player, offset)
        await _look_and_go_on(player, offset, f"after a rebuild with {what}")
    for calls in (1, 2):
        await _crash(player, calls)
    await player.deliver(grow(player, "tail-last"), "rebuild")
    await player.pause()
    offset = _middle(player)
    await _whole(player, offset)
    player.rebuilt(offset)
    await player.crash("open() after a rebuild and a crash")
    player.look_at_all()
    await player.look("rebuild", "after a rebuild and a crash")


def _add_what_the_states_do_not_have(player: Player) -> None:
    """A vector that the sink holds and the log, from then on, never had."""
    logged = player.log.append(Delta(FOREIGN, create([9, 9, 9, 9])))
    player.foreign = logged.offset


def _middle(player: Player) -> int:
    """Between two batches: the last few come again."""
    return player.log.batches[-3].offset


def states_at(player: Player, offset: int) -> list[StateRow]:
    """Every vector's state as of an offset."""
    shadow, last = Shadow(), {}
    deliveries = player.log.deliveries(0, offset)
    shadow.apply(deliveries)
    for delivery in deliveries:
        batch = delivery.batch
        for row in rows_of(delivery):
            last[batch.namespaces[row], batch.keys[row]] = delivery.first_offset + row
    return [StateRow(*ref, state, last[ref]) for ref, state in sorted(shadow.states.items())]


def _steps(player: Player, offset: int) -> list[Callable[[], Awaitable[None]]]:
    """The calls of one rebuild; each piece comes twice."""
    sink = player.sink
    assert isinstance(sink, Rebuilds)
    player.hide_foreign()
    rows = states_at(player, offset)
    size = -(-len(rows) // PIECES)
    pieces = [rows[at : at + size] for at in range(0, len(rows), size) for _ in range(2)]
    lamport = lamport_below(player.log.deliveries(0, offset), offset)
    return [
        partial(sink.begin_rebuild, offset),
        *(partial(sink.take_states, piece) for piece in pieces),
        partial(sink.end_rebuild, offset, lamport),
    ]


async def rebuild_at(player: Player, offset: int) -> None:
    """Rebuild the sink, with nothing in the way."""
    await _whole(player, offset)
    player.rebuilt(offset)


async def _whole(player: Player, offset: int) -> None:
    await _begin(player, offset, None)
    player.rebuild_begun = False


async def _begin(player: Player, offset: int, calls: int | None) -> None:
    """The first calls of a rebuild, or all; nothing of these refers to the sink afterwards."""
    player.rebuild_begun = True
    for step in _steps(player, offset)[:calls]:
        await _until_done(player, step)


async def _until_done(player: Player, step: Callable[[], Awaitable[None]]) -> None:
    for _ in range(ATTEMPTS_MAX):
        if await _tried(player, step):
            return
        await player.pause()
    raise NotConforming(
        "rebuild", f"{_name(step)} raised TryAgain {ATTEMPTS_MAX} times with nothing in the way"
    )


async def _tried(player: Player, step: Callable[[], Awaitable[None]]) -> bool:
    try:
        await player.call(_name(step), step)
    except TryAgain:
        return False
    except NotConforming:
        raise
    except Exception as error:
        raise NotConforming("rebuild", f"{_name(step)} raised {error!r:.200}") from error
    return True


async def _with_failures(player: Player, offset: int) -> None:
    fault = player.log.fault
    player.rebuild_begun = True
    for step in _steps(player, offset):
        for call in range(1, CALLS_MAX + 1):
            fault.plan(call, after=call % 2 == 0)
            done = await _tried(player, step)
            fault.mend()
            if done:
                break
        else:
            await _until_done(player, step)
    player.rebuild_begun = False


async def _with_cancellations(player: Player, offset: int) -> None:
    """A call that is cancelled is as good as a rebuild that is broken off: all begins again."""
    player.rebuild_begun = True
    for wait in range(WAITS_MAX):
        steps = _steps(player, offset)
        for step in (*steps[:2], steps[-1]):
            try:
                await player.call(_name(step), partial(cancelled_at, wait, step))
            except TryAgain:
                pass
            except NotConforming:
                raise
            except Exception as error:
                raise NotConforming("rebuild", f"{_name(step)}, cancelled, raised {error!r:.200}") from error
            if step is not steps[-1]:
                await _until_done(player, step)
    await _whole(player, offset)


async def _crash(player: Player, calls: int) -> None:
    """A sink that dies amid a rebuild is not whole, and says so where it remembers anything."""
    offset = _middle(player)
    await _begin(player, offset, calls)
    await player.crash(f"open() after a crash behind call {calls} of a rebuild")
    await _whole(player, offset)
    await _look_and_go_on(player, offset, "after a crash amid a rebuild, and another one")


async def _look_and_go_on(player: Player, offset: int, when: str) -> None:
    player.rebuilt(offset)
    player.look_at_all()
    await player.look("rebuild", when)
    await player.check_foreign(FOREIGN, when)
    await player.deliver(player.log.deliveries(offset, player.log.delivered), "rebuild")
    player.look_at_all()
    await player.look("rebuild", f"{when}, and the deltas behind it")
    await anyio.lowlevel.checkpoint()


def _name(step: Callable[[], Awaitable[None]]) -> str:
    function = step.func if isinstance(step, partial) else step
    return f"{getattr(function, '__name__', 'a call')}()"
