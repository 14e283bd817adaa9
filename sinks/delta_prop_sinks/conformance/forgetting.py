"""The scenario of deleted vectors whose tombstones a sink removes, for sinks that support it.

Afterwards the log no longer delivers the removed vectors, as a compacted log does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from inspect import isawaitable

from delta_prop_sinks.conformance.fakes import Ref
from delta_prop_sinks.conformance.player import Player
from delta_prop_sinks.conformance.rules import ContractViolation, allow_only
from delta_prop_sinks.conformance.steps import call_and_cancel_at
from delta_prop_sinks.conformance.story import append_rows, deliver_new
from delta_prop_sinks.sink import HoldsTombstones, TryAgain, VectorHolder
from delta_prop_wire.delta import Delta, create, delete, metadata_only

WAITS_MAX = 6
"""The kit cancels `forget` at each wait below this number; 0 is before it begins."""
CALLS_MAX = 3
"""In this many calls of `forget`, another call of the thread port fails."""
ATTEMPTS_MAX = 6
"""Maximum number of attempts without a fault: more count as a violation."""

NAMES = ("expired", "erased", "returned", "remaining", "present")
"""Vectors of one round. All but the last are deleted: the first below the offset `before`. The second and the
third are erased, and the third is written again before that.
"""


async def check_forgetting(player: Player) -> None:
    """Remove tombstones, also with failures, cancelled calls and a crash; check what is left."""
    if not isinstance(player.sink, HoldsTombstones):
        return
    await _check_round(player, "plain")
    for wait in range(WAITS_MAX):
        erased, before = await _delete_vectors(player, f"cut-{wait}")
        await _cancel_forget(player, wait, erased, before)
        when = f"after forget(), cancelled at wait {wait}, and another call"
        await _finish_round(player, f"cut-{wait}", erased, before, when)
    for number in range(1, CALLS_MAX + 1):
        player.log.fault.plan(number, after=number % 2 == 0)
        await _check_round(player, f"fault-{number}")
    await player.deliver(append_rows(player, "after-forget"), "tombstones")
    await player.check_view("tombstones", "after deltas that followed")


async def _cancel_forget(player: Player, wait: int, erased: Sequence[Ref], before: int) -> None:
    """Cancel one call. Afterwards no call refers to the sink."""
    assert isinstance(player.sink, HoldsTombstones)
    forget = partial(call_and_cancel_at, wait, partial(player.sink.forget, erased, before))
    label = f"forget(), cancelled at wait {wait},"
    with suppress(TryAgain), allow_only(TryAgain, rule="tombstones", call=label):
        await player.call("a cancelled forget()", forget, "tombstones")


async def _check_round(player: Player, prefix: str) -> None:
    erased, before = await _delete_vectors(player, prefix)
    await _finish_round(player, prefix, erased, before, "after forget()")


async def _delete_vectors(player: Player, prefix: str) -> tuple[list[Ref], int]:
    """Deliver vectors and their deletes; return what `forget` shall remove: its arguments."""
    log = player.log
    expired, erased, returned, remaining, present = (f"{prefix}-{name}" for name in NAMES)
    log.append(*(Delta(f"{prefix}-{name}", create([1, 2, 3, 4]), metadata={"n": 1}) for name in NAMES))
    log.append(Delta(expired, delete()))
    await deliver_new(player)
    before = log.next_offset
    log.append(*(Delta(vector_id, delete()) for vector_id in (erased, returned, remaining)))
    log.append(Delta(returned, create([5, 6, 7, 8])), Delta(present, metadata_only(), metadata={"n": 2}))
    await deliver_new(player)
    return [("default", erased), ("default", returned), ("default", "never written")], before


async def _finish_round(player: Player, prefix: str, erased: Sequence[Ref], before: int, when: str) -> None:
    """Complete the call, and repeat it; then crash, and check that the erased vector is still unknown."""
    remaining = await _get(player, f"{prefix}-remaining")
    for when_done in (when, f"{when}, which was repeated,"):
        await _forget(player, erased, before)
        await _check_removed(player, prefix, when_done)
        if remaining is not None and await _get(player, f"{prefix}-remaining") is None:
            raise ContractViolation(
                "tombstones",
                f"{when_done} '{prefix}-remaining', not deleted below {before}, had no tombstone",
            )
    for name in ("expired", "erased"):
        for offset in player.log.later_offsets_of(("default", f"{prefix}-{name}"), 0):
            player.log.hide(offset)
    await player.crash(f"open() {when} and a crash")
    await _check_unknown(player, f"{prefix}-erased", f"{when} and a crash,")
    await _forget(player, erased, before)  # the removal of the others need not have been durable
    await _check_removed(player, prefix, f"{when} and a crash,")


async def _check_removed(player: Player, prefix: str, when: str) -> None:
    for name in ("expired", "erased"):
        await _check_unknown(player, f"{prefix}-{name}", when)
    player.recheck_all()
    await player.check_view("tombstones", when)


async def _forget(player: Player, erased: Sequence[Ref], before: int) -> None:
    sink = player.sink
    assert isinstance(sink, HoldsTombstones)
    for _ in range(ATTEMPTS_MAX):
        with suppress(TryAgain), allow_only(TryAgain, rule="tombstones", call="forget()"):
            await player.call("forget()", partial(sink.forget, erased, before), "tombstones")
            player.log.fault.clear()
            player.model.forget(erased, before)
            return
        await player.pause()
    raise ContractViolation("tombstones", f"forget() raised TryAgain {ATTEMPTS_MAX} times without a fault")


async def _get(player: Player, vector_id: str) -> object:
    get = getattr(player.sink, "get", None)
    state = None if get is None else get("default", vector_id)
    return await state if isawaitable(state) else state


async def _check_unknown(player: Player, vector_id: str, when: str) -> None:
    state = await _get(player, vector_id)
    if state is not None:
        raise ContractViolation("tombstones", f"{when} get('default', {vector_id!r}) returned {state!r:.80}")
    if isinstance(player.sink, VectorHolder):
        head = player.sink.head("default", vector_id)
        if head is not None:
            raise ContractViolation("tombstones", f"{when} head('default', {vector_id!r}) returned {head}")
