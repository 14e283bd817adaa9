"""The scenarios that the kit runs against a sink, one after another on one growing log.

Each scenario begins with rows of its own and ends with a check of the readers' view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.conformance.fakes import CALL_TURNS, rows_of
from delta_prop_sinks.conformance.player import Player, check_frozen
from delta_prop_sinks.conformance.rules import ContractViolation, allow_only
from delta_prop_sinks.conformance.steps import Leftovers, call_and_cancel_at, collect_garbage
from delta_prop_sinks.sink import Delivery, HasBackground, RejectDelta, StopSink, TryAgain
from delta_prop_wire.delta import (
    Delta,
    Kind,
    Operation,
    create,
    delete,
    dense,
    metadata_only,
    offset,
    opaque,
    scale,
    sparse,
    sparse_add,
)
from delta_prop_wire.errors import UsageError

WAITS_MAX = 12
"""The kit cancels a call at this many of its first waits."""

CALLS_MAX = 6
"""Of a method's first calls of the thread port, up to this many fail, one in each attempt."""

UNKNOWN_KIND = 40
_WIDTH = 4


async def check_order(player: Player) -> None:
    """Deliver rows of all kinds, with control rows and rows for other sinks in between."""
    log, sink = player.log, player.sink
    snapshot = sink.statistics()
    before = repr(snapshot)
    log.append(*(Delta(f"row-{i}", create([i, 1, 2, 3]), metadata={"n": i}) for i in range(12)))
    log.append(Delta("row-0", sparse([1], [7])), Delta("row-0", sparse_add([1, 1], [1, 1])))
    log.append(Delta("row-1", dense([9, 9, 9, 9])), Delta("row-1", scale(2)), Delta("row-1", offset(1)))
    log.append_noops(2)
    log.append(Delta("row-2", delete()), Delta("row-2", sparse([0], [1])), Delta("nobody", scale(2)))
    log.append(Delta("fact", opaque(b"bytes"), namespace="facts"))
    log.append(Delta("row-3", metadata_only(), metadata={"n": None, "é": [1, {"deep": True}]}))
    deliveries = log.deliveries(0)
    await player.deliver(deliveries[:2])
    await player.check_view("order", "after the first two deliveries")
    await player.deliver(deliveries[2:])
    await player.check_view("order", "after deliveries of every kind of operation, a control row among them")
    log.append(*(Delta(f"part-{i}", create([i] * _WIDTH)) for i in range(8)), others=(0, 3, 4))
    log.append(Delta("part-1", scale(3)), Delta("part-3", scale(3)), Delta("part-5", scale(3)), others=(1,))
    await deliver_and_check(player, "order", "after deliveries of which some rows were for other sinks")
    log.forward(
        Delta("far-0", create([1] * _WIDTH)), Delta("far-1", create([2] * _WIDTH)), lamport=log.lamport + 500
    )
    log.forward(Delta("far-2", create([3] * _WIDTH)), lamport=20)
    await deliver_and_check(player, "order", "after forwarded rows, whose Lamport numbers jump up and down")
    small_changes = [
        Delta(f"row-{i}", change) for i in (5, 6, 7) for change in (sparse_add([0], [1]), scale(2), offset(1))
    ]
    log.append(*small_changes, Delta("row-8", sparse_add([0, 1], [1, 1])))
    await deliver_and_check(player, "order", "after many small changes of the same vectors")
    if repr(snapshot) != before:
        raise ContractViolation("name", "a statistics() snapshot from before the first delivery has changed")
    check_frozen(sink.statistics())


async def check_duplicates(player: Player) -> None:
    """Redeliver all rows: in the same deliveries, in parts, in overlapping parts."""
    log = player.log
    last_start = log.batches[-1].offset
    view = await player.read_view()
    cases: dict[str, Callable[[], Sequence[Delivery]]] = {
        "after every delivery was redelivered": lambda: log.deliveries(0),
        "after every delivery was redelivered in overlapping parts": lambda: list(_pieces(log.deliveries(0))),
        "after the last delivery was redelivered": lambda: log.deliveries(last_start),
        "after the end of the last delivery was redelivered": lambda: log.deliveries(last_start + 1),
    }
    for when, redeliver in cases.items():
        await player.deliver(redeliver())
        await player.check_view("redelivery", when)
        _check_unchanged(player, "redelivery", when, view, await player.read_view())
    view = await player.read_view()
    for delivery in _pieces(log.deliveries(log.next_offset // 2)):
        await player.deliver([delivery])
    await player.check_view("redelivery", "after deliveries were redelivered one by one")
    _check_unchanged(
        player, "redelivery", "after deliveries were redelivered one by one", view, await player.read_view()
    )


async def check_resume(player: Player) -> None:
    """Close and reopen the sink; deliver from its cursor, and then from the start of the log."""
    log = player.log
    log.append(Delta("row-9", scale(2)), Delta("row-10", scale(2)))
    log.forward(Delta("far-3", create([4] * _WIDTH)), lamport=30)
    await deliver_new(player)  # a write-behind sink may not have written them yet
    view = await player.read_view()
    await player.close()
    await player.close("aclose() for a second time")
    player.sink = player.make()
    await _detect_persistence(player, view)
    await player.make_and_open("open() after aclose()")
    player.recheck_all()
    await player.check_view("resume", f"after a restart from the sink's cursor {player.start}")
    log.append(*(Delta(f"row-{i}", sparse_add([0], [0.5])) for i in range(12) if i != 2))
    log.append(Delta("row-2", create([1] * _WIDTH)), Delta("fact", delete(), namespace="facts"))
    await player.deliver(log.deliveries(player.start if player.is_persistent else log.delivered_offset))
    await player.check_view("resume", "after a restart, duplicates and new rows")
    await player.deliver(log.deliveries(0))
    await player.check_view("redelivery", "after a restart and a redelivery of everything")


async def _detect_persistence(player: Player, view: object) -> None:
    """Open the sink once, to learn whether its data survives a restart."""
    with allow_only(rule="open", call="open() after aclose()"):
        point = await player.call("open() after aclose()", partial(player.sink.open, player.log))
    if point is None:
        player.is_persistent = await player.read_view() == view and view != (None, [])
    else:
        player.is_persistent = point.cursor.next_offset > 0
    await player.close()


async def check_cancellation(player: Player) -> None:
    """Cancel apply, open, background and aclose at every wait."""
    for wait in range(WAITS_MAX):
        deliveries = append_rows(player, f"cut-{wait}")
        waits = await player.cancel_apply(wait, deliveries)
        if waits < wait:
            await player.deliver(deliveries, "cancellation")
            break
        remaining = [delivery for delivery in deliveries if not is_applied(player, delivery)]
        if remaining:
            await player.deliver(remaining, "cancellation")
        await player.check_view(
            "cancellation", f"after an apply() that was cancelled at its wait {wait} was repeated"
        )
    await player.deliver(player.log.deliveries(player.log.delivered_offset // 2), "cancellation")
    await player.check_view("cancellation", "after cancelled calls of apply() and duplicates")
    await _cancel_background(player)
    await _cancel_aclose(player)
    await _cancel_open(player)


async def _cancel_background(player: Player) -> None:
    for wait in range(1, WAITS_MAX // 2 if isinstance(player.sink, HasBackground) else 1):
        await player.stop_background()
        player.start_background(cancel_at=wait)
        await player.deliver(append_rows(player, f"behind-{wait}"), "cancellation")
        await player.pause()
        await player.stop_background()
        player.start_background()
        await player.deliver(append_rows(player, f"beyond-{wait}"), "cancellation")
        await player.check_view("cancellation", f"after a background() that was cancelled at its wait {wait}")


async def _cancel_aclose(player: Player) -> None:
    for wait in range(WAITS_MAX // 2):
        await player.deliver(append_rows(player, f"shut-{wait}"), "cancellation")
        waits, close = wait, partial(call_and_cancel_at, wait, player.sink.aclose)
        label = f"aclose(), cancelled at wait {wait},"
        with suppress(TryAgain), allow_only(TryAgain, rule="close", call=label):
            waits = (await player.call("a cancelled aclose()", close, "close")).waits
        await player.close("aclose() after a cancelled one")
        await player.make_and_open("open() after a cancelled aclose()")
        await player.check_view(
            "cancellation", f"after an aclose() that was cancelled at its wait {wait}, and a restart"
        )
        if waits < wait:
            return


async def _cancel_open(player: Player) -> None:
    await player.close()
    for wait in range(WAITS_MAX):
        sink = player.make()
        result, open_sink = None, partial(call_and_cancel_at, wait, partial(sink.open, player.log))
        label = f"open(), cancelled at wait {wait},"
        with suppress(StopSink, UsageError), allow_only(StopSink, UsageError, rule="open", call=label):
            result = await player.call("a cancelled open()", open_sink, "open")
        if result is not None and result.returned:
            player.sink = sink
            await player.close()
            if result.waits < wait:
                break
    await player.make_and_open("open() after cancelled ones")
    await player.check_view("cancellation", "after cancelled calls of open()")


async def check_failures(player: Player) -> None:
    """Make the thread port fail, and the target if the caller can; deliver deltas that do not fit."""
    await _deliver_with_failing_thread(player)
    await _deliver_with_failing_target(player)
    await _deliver_misfits(player)
    await _run_background_with_failing_thread(player)
    await _close_with_failing_thread(player)
    await _open_with_failing_thread(player)


async def _deliver_with_failing_thread(player: Player) -> None:
    fault = player.log.fault
    for after in (False, True):
        for number in range(1, CALLS_MAX + 1):
            # These are enough rows for a write-behind sink to write.
            deliveries = []
            for letter in "xyz":
                deliveries += append_rows(player, f"fault-{after:d}-{number}-{letter}")
            fault.plan(number, after=after)
            failure = await player.apply(deliveries)
            was_called = fault.call_count >= number
            fault.clear()
            await _resume_delivery(player, deliveries, failure)
            await player.check_view(
                "failure", f"after call {number} of the thread port failed and apply() was repeated"
            )
            if not was_called:
                break
    await player.reopen("open() after failures of the thread port")
    await player.check_view("failure", "after failures of the thread port and a restart")


async def _deliver_with_failing_target(player: Player) -> None:
    failing = player.settings.failing
    if failing is None:
        return
    for number in (1, 2, 3, 5):
        deliveries = append_rows(player, f"target-{number}")
        failing(number)
        failure = await player.apply(deliveries)
        if isinstance(failure, TryAgain):  # the delivery loop retries before the target is repaired
            deliveries = player.remaining(deliveries, failure)
            failure = await player.apply(deliveries) if deliveries else None
        failing(None)
        await _resume_delivery(player, deliveries, failure)
        await player.check_view(
            "failure", f"after the target failed at its operation {number} and apply() was repeated"
        )


async def _resume_delivery(player: Player, deliveries: Sequence[Delivery], failure: object) -> None:
    """Deliver the remaining rows, as the delivery loop does once a failure has passed."""
    if isinstance(failure, StopSink):
        await player.reopen("open() after StopSink")
        deliveries = [delivery for delivery in deliveries if not is_applied(player, delivery)]
    elif isinstance(failure, (TryAgain, RejectDelta)):
        deliveries = player.remaining(deliveries, failure)
    else:
        return
    if deliveries:
        await player.deliver(deliveries)


async def _deliver_misfits(player: Player) -> None:
    """Deliver a wrong dimension and an unknown kind: if they are rejected, other rows are still applied."""
    log = player.log
    log.append(
        Delta("fit-0", create([1] * _WIDTH)),
        Delta("fit-1", create([1] * _WIDTH)),
        Delta("wide", create([1] * 5)),
    )
    log.append(Delta("wide", sparse([0], [2])), Delta("fit-0", scale(2)))
    log.append(
        Delta("fit-1", scale(3)),
        Delta("fit-2", create([4] * _WIDTH)),
        Delta("fit-2", Operation(UNKNOWN_KIND, data=b"of a later version")),
        Delta("fit-2", scale(5)),
        Delta("fit-0", scale(2)),
    )
    player.rejected_offsets.clear()
    await deliver_new(player)
    _check_rejected(player)
    await player.check_view("failure", "after deltas of a wrong dimension and of an unknown kind")
    quarantined = sorted(log.quarantined)
    if quarantined:  # an operator releases them
        log.quarantined.clear()
        await player.deliver(log.redeliveries(quarantined), "released")
        await player.check_view("released", "after rejected deltas were released from quarantine")


def _check_rejected(player: Player) -> None:
    """Check rejections: a sink may reject any kind, but not a kind of which it has applied other deltas."""
    applied = {row.delta.operation.kind for row in player.model.rows() if row.delta.namespace == "default"}
    for rejected in player.rejected_offsets:
        delta = next(row for row in player.log.rows() if row.offset == rejected).delta
        if delta.vector_id != "wide" and delta.operation.kind in applied - {UNKNOWN_KIND}:
            raise ContractViolation(
                "failure",
                f"apply() raised RejectDelta for offset {rejected}, a "
                f"{Kind(delta.operation.kind).name.lower()}, of which it had applied others; the delta that "
                "may not fit is next to it",
            )


async def _run_background_with_failing_thread(player: Player) -> None:
    if not isinstance(player.sink, HasBackground):
        return
    fault = player.log.fault
    for number in range(1, CALLS_MAX + 1):
        fault.plan(number, after=False)
        deliveries = append_rows(player, f"worker-{number}")
        failure = await player.apply(deliveries)
        await player.pause()
        was_called = fault.call_count >= number
        fault.clear()
        await _resume_delivery(player, deliveries, failure)
        await player.deliver(append_rows(player, f"repaired-{number}"))
        await player.check_view(
            "failure", f"after call {number} of the thread port failed beside background()"
        )
        if not was_called:
            return


async def _close_with_failing_thread(player: Player) -> None:
    fault = player.log.fault
    for number in range(1, CALLS_MAX + 1):
        await player.deliver(append_rows(player, f"end-{number}"))
        fault.plan(number, after=False)
        await player.close(f"aclose(), while call {number} of the thread port failed,")
        was_called = fault.call_count >= number
        fault.clear()
        await player.make_and_open("open() after an aclose() in which the thread port failed")
        await player.check_view(
            "resume", f"after call {number} of the thread port failed in aclose(), and a restart"
        )
        if not was_called:
            return


async def _open_with_failing_thread(player: Player) -> None:
    fault = player.log.fault
    await player.close()
    for after in (False, True):
        for number in range(1, CALLS_MAX + 1):
            sink = player.make()
            fault.plan(number, after=after)
            try:
                label = "open(), while the thread port failed,"
                with allow_only(StopSink, UsageError, rule="open", call=label):
                    await player.call("open()", partial(sink.open, player.log), "open")
            except (StopSink, UsageError):
                del sink
                continue
            finally:
                fault.clear()
            player.sink = sink
            await player.close()
            break
    await player.make_and_open("open() after failed ones")
    await player.check_view("open", "after failed calls of open()")


async def check_released_rows(player: Player) -> None:
    """Release quarantined rows after later ones, once and repeatedly, before and after a restart."""
    log = player.log
    log.append(*(Delta(f"late-{i}", create([i] * _WIDTH)) for i in range(4)))
    await deliver_new(player)
    quarantined = append_with_gaps(player, "late")
    await deliver_and_check(
        player, "released", "after rows were quarantined and those of other vectors applied"
    )
    await player.deliver(log.redeliveries(quarantined[:1]), "released")
    await player.check_view("released", "after one row was released from quarantine")
    await player.deliver(log.redeliveries(quarantined[1:]), "released")
    await player.check_view("released", "after all rows were released from quarantine")
    view = await player.read_view()
    log.quarantined.difference_update(quarantined)
    await player.deliver(log.redeliveries(quarantined), "released")
    await player.check_view("released", "after released rows were redelivered")
    await player.deliver(log.redeliveries(quarantined[2:]), "released")
    await player.deliver(log.deliveries(quarantined[0]))
    await player.check_view("released", "after released rows were redelivered with the others")
    _check_unchanged(
        player, "released", "after released rows were redelivered", view, await player.read_view()
    )
    await player.deliver(append_rows(player, "late"))
    await player.check_view("released", "after new rows after released ones")
    await _release_many_rows(player)
    await player.reopen("open() after released rows")
    await player.check_view("released", "after released rows and a restart")
    await player.deliver(log.redeliveries(quarantined), "released")
    await player.check_view("released", "after released rows were redelivered after a restart")
    quarantined_later = append_with_gaps(player, "late")
    await deliver_new(player)
    await player.pause()
    await player.deliver(log.redeliveries(quarantined_later), "released")
    log.quarantined.difference_update(quarantined_later)
    await player.reopen("open() directly after released rows")
    await player.check_view("released", "after a restart directly after released rows")
    await player.deliver(log.redeliveries(quarantined_later), "released")
    await player.deliver(log.deliveries(quarantined_later[0]), "released")
    await player.check_view("released", "after a restart directly after released rows, and duplicates")


async def _release_many_rows(player: Player) -> None:
    log = player.log
    log.append(*(Delta(f"block-{i}", create([1, 2, 3, 4])) for i in range(12)))
    logged = log.append(*(Delta(f"block-{i}", sparse_add([0, 2], [i, 5])) for i in range(12)))
    quarantined = [logged.offset + row for row in range(12) if row not in (0, 6)]
    log.quarantined.update(quarantined)
    await deliver_new(player)
    await player.deliver(log.redeliveries(quarantined[:4]), "released")
    await player.deliver(log.redeliveries(quarantined), "released")
    await player.check_view("released", "after many rows of one kind were released, some of them twice")
    log.quarantined.difference_update(quarantined)


def append_with_gaps(player: Player, prefix: str) -> list[int]:
    """Append rows and quarantine some of them, as after a RejectDelta; return the offsets of the latter."""
    log = player.log
    first = log.append(
        Delta(f"{prefix}-0", sparse([0], [7])),
        Delta(f"{prefix}-1", scale(2)),
        Delta(f"{prefix}-0", scale(3)),
        Delta(f"{prefix}-2", offset(1)),
    )
    second = log.append(
        Delta(f"{prefix}-new-{first.offset}", create([5] * _WIDTH)), Delta(f"{prefix}-1", offset(1))
    )
    third = log.append(
        Delta(f"{prefix}-2", scale(2)), Delta(f"{prefix}-0", offset(2)), Delta(f"{prefix}-3", scale(2))
    )
    log.append(Delta(f"{prefix}-3", offset(1)), Delta("row-0", offset(1)))
    quarantined = [first.offset, first.offset + 2, second.offset, third.offset + 1]
    log.quarantined.update(quarantined)
    return quarantined


async def check_slow_calls(player: Player) -> None:
    """Pause for long between deliveries, so that background work runs; then deliver many rows at once."""
    log = player.log
    for number in range(3):
        await player.deliver(append_rows(player, f"slow-{number}"), "background")
        await player.pause()
        await player.check_view("background", "after a pause between deliveries")
    for number in range(4):
        log.append(*(Delta(f"many-{i}", create([i, number, 0, 0])) for i in range(50)))
        log.append(*(Delta(f"many-{i}", sparse_add([1, 2], [1, number])) for i in range(50)))
    log.append(*(Delta("one", create([number, 0, 0, 0])) for number in range(20)))
    log.append(*(Delta("one", scale(2)) for _ in range(20)))
    await deliver_and_check(player, "order", "after hundreds of rows in one call")
    await player.pause()
    await player.check_view("background", "after hundreds of rows and a pause")


async def check_closing(player: Player, before: Leftovers) -> None:
    """Close the sink under load, with work in progress; check that nothing is left open."""
    fault = player.log.fault
    fault.turns = 20
    await player.deliver(append_rows(player, "load"))
    await player.pause()
    await player.deliver(append_rows(player, "load"))
    await player.close("aclose() under load")
    fault.turns = CALL_TURNS
    await player.make_and_open("open() after aclose() under load")
    player.recheck_all()
    await player.check_view("resume", "after aclose() under load and a restart")
    await player.deliver(append_rows(player, "last"))
    await player.close("the last aclose()")
    await player.close("the last aclose(), a second time,")
    check_frozen(player.sink.statistics())
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    leftovers = before.since()
    if leftovers:  # unreferenced objects do not count
        collect_garbage()
        leftovers = before.since()
    if fault.running_calls:
        leftovers.append("a call on its thread")
    if leftovers:
        raise ContractViolation("close", f"aclose() left {', '.join(leftovers[:5])} open")


async def deliver_new(player: Player) -> None:
    """Deliver the rows that the sink has not received yet, in one call."""
    await player.deliver(player.log.deliveries(player.log.delivered_offset))


async def deliver_and_check(player: Player, rule: str, when: str) -> None:
    """Deliver the new rows in one call; check the readers' view."""
    await deliver_new(player)
    await player.check_view(rule, when)


def append_rows(player: Player, prefix: str) -> list[Delivery]:
    """Append some rows of new and old vectors; return their deliveries."""
    log, start = player.log, player.log.next_offset
    log.append(
        Delta(f"{prefix}-a", create([1, 2, 3, 4])),
        Delta(f"{prefix}-b", create([5, 6, 7, 8])),
        Delta(f"{prefix}-a", sparse_add([0, 3], [1, 1])),
    )
    log.append(Delta("row-0", sparse_add([2], [1])), Delta(f"{prefix}-b", scale(2)))
    log.append(Delta("row-1", offset(1)), Delta(f"{prefix}-a", scale(3)))
    log.append(Delta("alone", create([1, 1]), namespace=f"{prefix}-space"))
    return log.deliveries(start)


def is_applied(player: Player, delivery: Delivery) -> bool:
    """True if the sink has applied all rows of a delivery, as far as the kit knows."""
    applied = player.model.offsets
    return all(delivery.first_offset + row in applied for row in rows_of(delivery))


def _pieces(deliveries: Sequence[Delivery]) -> Iterator[Delivery]:
    """Yield one delivery per row, of that row and the next row of its batch."""
    for delivery in deliveries:
        rows = rows_of(delivery)
        for index in range(len(rows)):
            yield Delivery(delivery.logged, np.array(rows[index : index + 2], np.intp))


def _check_unchanged(player: Player, part: str, when: str, before: object, after: object) -> None:
    if before != after:
        raise ContractViolation(part, f"{when}, readers saw {after!r:.200} instead of {before!r:.200}")
