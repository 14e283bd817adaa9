"""The scenario of a rebuild, for sinks that support it: it takes effect fully or not at all, and then each
later delta takes effect once.

The states are those at an offset below the log's end, so the rest of the log must take effect again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio

from delta_prop_sinks.conformance.fakes import ReferenceModel, lamport_below, rows_of
from delta_prop_sinks.conformance.player import Player
from delta_prop_sinks.conformance.rules import ContractViolation, allow_only
from delta_prop_sinks.conformance.steps import call_and_cancel_at
from delta_prop_sinks.conformance.story import append_rows
from delta_prop_sinks.sink import Rebuildable, TryAgain
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.state_rows import StateRow

CALLS_MAX = 3
"""In each step, the thread port fails in this many of the first calls."""
WAITS_MAX = 3
"""The kit cancels a step at each wait below this number; 0 is before the step begins."""
PIECES = 3
"""The kit passes the states in this many calls of `load_states`, each made twice."""
ATTEMPTS_MAX = 6
"""How often a step may raise TryAgain before it counts as a violation."""
FOREIGN = "not-of-this-log"


async def check_rebuilds(player: Player) -> None:
    """Rebuild the sink, also with failures, cancelled calls and crashes; then deliver later rows again."""
    if not isinstance(player.sink, Rebuildable):
        return
    _add_foreign_vector(player)
    await player.deliver(player.log.deliveries(player.log.delivered_offset), "rebuild")
    for condition in ("nothing", "a failing thread port", "cancelled calls"):
        await player.deliver(append_rows(player, f"tail-{condition.split()[0]}"), "rebuild")
        offset = _third_last_offset(player)
        if condition == "a failing thread port":
            await _rebuild_with_failures(player, offset)
        elif condition == "cancelled calls":
            await _rebuild_with_cancellations(player, offset)
        else:
            await _rebuild_unhindered(player, offset)
        label = "an undisturbed rebuild" if condition == "nothing" else f"a rebuild with {condition}"
        await _check_and_continue(player, offset, f"after {label}")
    for call_count in (1, 2):
        await _crash_during_rebuild(player, call_count)
    await player.deliver(append_rows(player, "tail-last"), "rebuild")
    await player.pause()
    offset = _third_last_offset(player)
    await _rebuild_unhindered(player, offset)
    player.note_rebuilt(offset)
    await player.crash("open() after a rebuild and a crash")
    player.recheck_all()
    await player.check_view("rebuild", "after a rebuild and a crash")


def _add_foreign_vector(player: Player) -> None:
    """Deliver a vector to the sink, which the log then hides: a rebuild must remove it."""
    logged = player.log.append(Delta(FOREIGN, create([9, 9, 9, 9])))
    player.foreign_offset = logged.offset


def _third_last_offset(player: Player) -> int:
    return player.log.batches[-3].offset


def states_at(player: Player, offset: int) -> list[StateRow]:
    """Return every vector's state as of an offset."""
    model, last_offsets = ReferenceModel(), {}
    deliveries = player.log.deliveries(0, offset)
    model.apply(deliveries)
    for delivery in deliveries:
        batch = delivery.batch
        for row in rows_of(delivery):
            last_offsets[batch.namespaces[row], batch.keys[row]] = delivery.first_offset + row
    return [StateRow(*ref, state, last_offsets[ref]) for ref, state in sorted(model.states.items())]


def _steps(player: Player, offset: int) -> list[Callable[[], Awaitable[None]]]:
    """Return the calls of one rebuild; each piece of states is loaded twice."""
    sink = player.sink
    assert isinstance(sink, Rebuildable)
    player.hide_foreign()
    rows = states_at(player, offset)
    size = -(-len(rows) // PIECES)
    pieces = [rows[start : start + size] for start in range(0, len(rows), size) for _ in range(2)]
    lamport = lamport_below(player.log.deliveries(0, offset), offset)
    return [
        partial(sink.begin_rebuild, offset),
        *(partial(sink.load_states, piece) for piece in pieces),
        partial(sink.end_rebuild, offset, lamport),
    ]


async def rebuild_at(player: Player, offset: int) -> None:
    """Rebuild the sink without faults."""
    await _rebuild_unhindered(player, offset)
    player.note_rebuilt(offset)


async def _rebuild_unhindered(player: Player, offset: int) -> None:
    await _begin(player, offset, None)
    player.rebuild_begun = False


async def _begin(player: Player, offset: int, call_count: int | None) -> None:
    """Make the first `call_count` calls of a rebuild, or all. Afterwards no call refers to the sink."""
    player.rebuild_begun = True
    for step in _steps(player, offset)[:call_count]:
        await _retry_until_done(player, step)


async def _retry_until_done(player: Player, step: Callable[[], Awaitable[None]]) -> None:
    for _ in range(ATTEMPTS_MAX):
        if await _attempt(player, step):
            return
        await player.pause()
    raise ContractViolation(
        "rebuild", f"{_name(step)} raised TryAgain {ATTEMPTS_MAX} times in an undisturbed rebuild"
    )


async def _attempt(player: Player, step: Callable[[], Awaitable[None]]) -> bool:
    with suppress(TryAgain), allow_only(TryAgain, rule="rebuild", call=_name(step)):
        await player.call(_name(step), step)
        return True
    return False


async def _rebuild_with_failures(player: Player, offset: int) -> None:
    fault = player.log.fault
    player.rebuild_begun = True
    for step in _steps(player, offset):
        for call in range(1, CALLS_MAX + 1):
            fault.plan(call, after=call % 2 == 0)
            done = await _attempt(player, step)
            fault.clear()
            if done:
                break
        else:
            await _retry_until_done(player, step)
    player.rebuild_begun = False


async def _rebuild_with_cancellations(player: Player, offset: int) -> None:
    """Cancel calls of rebuilds, at each wait; then rebuild without faults."""
    player.rebuild_begun = True
    for wait in range(WAITS_MAX):
        steps = _steps(player, offset)
        for step in (*steps[:2], steps[-1]):
            call = f"{_name(step)}, cancelled,"
            with suppress(TryAgain), allow_only(TryAgain, rule="rebuild", call=call):
                await player.call(_name(step), partial(call_and_cancel_at, wait, step))
            if step is not steps[-1]:
                await _retry_until_done(player, step)
    await _rebuild_unhindered(player, offset)


async def _crash_during_rebuild(player: Player, call_count: int) -> None:
    """Crash during a rebuild: the sink is incomplete, and reports it if its data survives."""
    offset = _third_last_offset(player)
    await _begin(player, offset, call_count)
    await player.crash(f"open() after a crash after call {call_count} of a rebuild")
    await _rebuild_unhindered(player, offset)
    await _check_and_continue(player, offset, "after a crash during a rebuild, and another rebuild")


async def _check_and_continue(player: Player, offset: int, when: str) -> None:
    player.note_rebuilt(offset)
    player.recheck_all()
    await player.check_view("rebuild", when)
    await player.check_foreign(FOREIGN, when)
    await player.deliver(player.log.deliveries(offset, player.log.delivered_offset), "rebuild")
    player.recheck_all()
    await player.check_view("rebuild", f"{when}, and the deltas after it")
    await anyio.lowlevel.checkpoint()


def _name(step: Callable[[], Awaitable[None]]) -> str:
    function = step.func if isinstance(step, partial) else step
    return f"{getattr(function, '__name__', 'a call')}()"
