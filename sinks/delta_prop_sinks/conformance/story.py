"""The chapters that a sink is taken through, one after another on one log that grows.

Each begins with rows of its own and ends with a look at what readers see.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import numpy as np

from delta_prop_sinks.conformance.player import check_frozen
from delta_prop_sinks.conformance.rules import NotConforming
from delta_prop_sinks.conformance.steps import Leftovers, cancelled_at, let_go
from delta_prop_sinks.conformance.world import TURNS, rows_of
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop_sinks.conformance.player import Player

WAITS_MAX = 12
"""A call is cancelled at its first waits, up to this many."""

CALLS_MAX = 6
"""The thread port fails in the first calls that something makes, up to this many."""

UNKNOWN_KIND = 40
_WIDTH = 4


async def order(player: Player) -> None:
    """All kinds of rows, control rows and rows for others in between."""
    log, sink = player.log, player.sink
    snapshot = sink.statistics()
    before = repr(snapshot)
    log.append(*(Delta(f"row-{i}", create([i, 1, 2, 3]), metadata={"n": i}) for i in range(12)))
    log.append(Delta("row-0", sparse([1], [7])), Delta("row-0", sparse_add([1, 1], [1, 1])))
    log.append(Delta("row-1", dense([9, 9, 9, 9])), Delta("row-1", scale(2)), Delta("row-1", offset(1)))
    log.void(2)
    log.append(Delta("row-2", delete()), Delta("row-2", sparse([0], [1])), Delta("nobody", scale(2)))
    log.append(Delta("fact", opaque(b"bytes"), namespace="facts"))
    log.append(Delta("row-3", metadata_only(), metadata={"n": None, "é": [1, {"deep": True}]}))
    deliveries = log.deliveries(0)
    await player.deliver(deliveries[:2])
    await player.look("order", "after the first two deliveries")
    await player.deliver(deliveries[2:])
    await player.look("order", "after deliveries of every kind of operation, a control row among them")
    log.append(*(Delta(f"part-{i}", create([i] * _WIDTH)) for i in range(8)), others=(0, 3, 4))
    log.append(Delta("part-1", scale(3)), Delta("part-3", scale(3)), Delta("part-5", scale(3)), others=(1,))
    await deliver_new(player)
    await player.look("order", "after deliveries of which some rows were meant for others")
    log.forward(
        Delta("far-0", create([1] * _WIDTH)), Delta("far-1", create([2] * _WIDTH)), lamport=log.lamport + 500
    )
    log.forward(Delta("far-2", create([3] * _WIDTH)), lamport=20)
    await deliver_new(player)
    await player.look("order", "after forwarded rows, whose Lamport numbers leap and fall back")
    steps = [
        Delta(f"row-{i}", change) for i in (5, 6, 7) for change in (sparse_add([0], [1]), scale(2), offset(1))
    ]
    log.append(*steps, Delta("row-8", sparse_add([0, 1], [1, 1])))
    await deliver_new(player)
    await player.look("order", "after many small changes of the same vectors")
    if repr(snapshot) != before:
        raise NotConforming("name", "what statistics() gave before the first delivery has changed since")
    check_frozen(sink.statistics())


async def repeats(player: Player) -> None:
    """Everything again: whole, in pieces, in cuts that overlap."""
    log = player.log
    steps = log.batches[-1].offset
    seen = await player.seen()
    ways: dict[str, Callable[[], Sequence[Delivery]]] = {
        "after every delivery came again": lambda: log.deliveries(0),
        "after every delivery came again in pieces that overlap": lambda: list(_pieces(log.deliveries(0))),
        "after the last delivery came again": lambda: log.deliveries(steps),
        "after the end of the last delivery came again": lambda: log.deliveries(steps + 1),
    }
    for when, again in ways.items():
        await player.deliver(again())
        await player.look("repeats", when)
        _same(player, "repeats", when, seen, await player.seen())
    seen = await player.seen()
    for delivery in _pieces(log.deliveries(log.next_offset // 2)):
        await player.deliver([delivery])
    await player.look("repeats", "after deliveries came again one by one")
    _same(player, "repeats", "after deliveries came again one by one", seen, await player.seen())


async def resume(player: Player) -> None:
    """Closed and opened: from the sink's own cursor, and from before it."""
    log = player.log
    log.append(Delta("row-9", scale(2)), Delta("row-10", scale(2)))
    log.forward(Delta("far-3", create([4] * _WIDTH)), lamport=30)
    await deliver_new(player)  # not yet written, maybe
    seen = await player.seen()
    await player.close()
    await player.close("aclose() for a second time")
    player.sink = player.make()
    await _find_out_whether_it_outlives(player, seen)
    await player.make_and_open("open() after aclose()")
    player.look_at_all()
    await player.look("resume", f"after a restart from the sink's cursor {player.start}")
    log.append(*(Delta(f"row-{i}", sparse_add([0], [0.5])) for i in range(12) if i != 2))
    log.append(Delta("row-2", create([1] * _WIDTH)), Delta("fact", delete(), namespace="facts"))
    await player.deliver(log.deliveries(player.start if player.outlives else log.delivered))
    await player.look("resume", "after a restart, repeats and new rows")
    await player.deliver(log.deliveries(0))
    await player.look("repeats", "after a restart, when everything came again")


async def _find_out_whether_it_outlives(player: Player, seen: object) -> None:
    """Open the sink once, to learn whether its data is there again."""
    try:
        point = await player.call("open() after aclose()", partial(player.sink.open, player.log))
    except NotConforming:
        raise
    except Exception as error:
        raise NotConforming("open", f"open() after aclose() raised {error!r:.300}") from error
    if point is None:
        player.outlives = await player.seen() == seen and seen != (None, [])
    else:
        player.outlives = point.cursor.next_offset > 0
    await player.close()


async def cancellation(player: Player) -> None:
    """Cancelled at every wait: apply, open, background, aclose."""
    for wait in range(WAITS_MAX):
        deliveries = grow(player, f"cut-{wait}")
        waits = await player.cancel_apply(wait, deliveries)
        if waits < wait:
            await player.deliver(deliveries, "cancellation")
            break
        left = [one for one in deliveries if not is_applied(player, one)]
        if left:
            await player.deliver(left, "cancellation")
        await player.look(
            "cancellation", f"after an apply() that was cancelled at its wait {wait} came again"
        )
    await player.deliver(player.log.deliveries(player.log.delivered // 2), "cancellation")
    await player.look("cancellation", "after cancelled calls of apply() and repeats")
    await _cancelled_backgrounds(player)
    await _cancelled_closings(player)
    await _cancelled_openings(player)


async def _cancelled_backgrounds(player: Player) -> None:
    for wait in range(1, WAITS_MAX // 2 if isinstance(player.sink, HasBackground) else 1):
        await player.stop_background()
        player.start_background(cancel_at=wait)
        await player.deliver(grow(player, f"behind-{wait}"), "cancellation")
        await player.pause()
        await player.stop_background()
        player.start_background()
        await player.deliver(grow(player, f"beyond-{wait}"), "cancellation")
        await player.look("cancellation", f"after a background() that was cancelled at its wait {wait}")


async def _cancelled_closings(player: Player) -> None:
    for wait in range(WAITS_MAX // 2):
        await player.deliver(grow(player, f"shut-{wait}"), "cancellation")
        waits = 0
        close = partial(cancelled_at, wait, player.sink.aclose)
        try:
            waits = (await player.call("a cancelled aclose()", close, "close")).waits
        except TryAgain:
            waits = wait
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming(
                "close", f"aclose(), cancelled at wait {wait}, raised {error!r:.200}"
            ) from error
        await player.close("aclose() after a cancelled one")
        await player.make_and_open("open() after a cancelled aclose()")
        await player.look(
            "cancellation", f"after an aclose() that was cancelled at its wait {wait}, and a restart"
        )
        if waits < wait:
            return


async def _cancelled_openings(player: Player) -> None:
    await player.close()
    for wait in range(WAITS_MAX):
        sink = player.make()
        try:
            result = await player.call(
                "a cancelled open()", partial(cancelled_at, wait, partial(sink.open, player.log)), "open"
            )
        except (StopSink, UsageError):
            continue
        except NotConforming:
            raise
        except Exception as error:
            raise NotConforming("open", f"open(), cancelled at wait {wait}, raised {error!r:.200}") from error
        if result.returned:
            player.sink = sink
            await player.close()
            if result.waits < wait:
                break
    await player.make_and_open("open() after cancelled ones")
    await player.look("cancellation", "after cancelled calls of open()")


async def failures(player: Player) -> None:
    """The thread port fails; the target fails, if the caller can make it; deltas that do not fit."""
    await _failing_threads(player)
    await _failing_target(player)
    await _misfits(player)
    await _failing_backgrounds(player)
    await _failing_closings(player)
    await _failing_openings(player)


async def _failing_threads(player: Player) -> None:
    fault = player.log.fault
    for after in (False, True):
        for at in range(1, CALLS_MAX + 1):
            # Enough for a sink that writes behind to write.
            deliveries = [one for part in "xyz" for one in grow(player, f"fault-{after:d}-{at}-{part}")]
            fault.plan(at, after=after)
            failure = await player.apply(deliveries)
            reached = fault.calls >= at
            fault.mend()
            await _go_on(player, deliveries, failure)
            await player.look(
                "failure", f"after call {at} of the thread port failed and apply() was repeated"
            )
            if not reached:
                break
    await player.reopen("open() after failures of the thread port")
    await player.look("failure", "after failures of the thread port and a restart")


async def _failing_target(player: Player) -> None:
    failing = player.settings.failing
    if failing is None:
        return
    for at in (1, 2, 3, 5):
        deliveries = grow(player, f"target-{at}")
        failing(at)
        failure = await player.apply(deliveries)
        if isinstance(failure, TryAgain):  # it is tried again too early
            deliveries = player.rest(deliveries, failure)
            failure = await player.apply(deliveries) if deliveries else None
        failing(None)
        await _go_on(player, deliveries, failure)
        await player.look(
            "failure", f"after the target failed at its operation {at} and apply() was repeated"
        )


async def _go_on(player: Player, deliveries: Sequence[Delivery], failure: object) -> None:
    """What the delivery loop does after a failure that has passed."""
    if isinstance(failure, StopSink):
        await player.reopen("open() after StopSink")
        deliveries = [one for one in deliveries if not is_applied(player, one)]
    elif isinstance(failure, (TryAgain, RejectDelta)):
        deliveries = player.rest(deliveries, failure)
    else:
        return
    if deliveries:
        await player.deliver(deliveries)


async def _misfits(player: Player) -> None:
    """A wrong dimension, an unknown kind: rejected or not, what stands before and behind is applied."""
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
    player.rejected.clear()
    await deliver_new(player)
    _check_rejected(player)
    await player.look("failure", "after deltas of a wrong dimension and of an unknown kind")
    aside = sorted(log.aside)
    if aside:  # an operator has them tried again
        log.aside.clear()
        await player.deliver(log.late(aside), "late")
        await player.look("late", "after deltas that had been rejected came again, late")


def _check_rejected(player: Player) -> None:
    """A sink may reject what it likes, but not a kind that it has taken, beside a delta that does not fit."""
    taken = {row.delta.operation.kind for row in player.shadow.rows() if row.delta.namespace == "default"}
    for at in player.rejected:
        delta = next(row for row in player.log.rows() if row.offset == at).delta
        if delta.vector_id != "wide" and delta.operation.kind in taken - {UNKNOWN_KIND}:
            raise NotConforming(
                "failure",
                f"apply() raised RejectDelta for offset {at}, a {Kind(delta.operation.kind).name.lower()} "
                "such as it had taken before; the delta beside it is the one that may not fit",
            )


async def _failing_backgrounds(player: Player) -> None:
    if not isinstance(player.sink, HasBackground):
        return
    fault = player.log.fault
    for at in range(1, CALLS_MAX + 1):
        fault.plan(at, after=False)
        deliveries = grow(player, f"worker-{at}")
        failure = await player.apply(deliveries)
        await player.pause()
        reached = fault.calls >= at
        fault.mend()
        await _go_on(player, deliveries, failure)
        await player.deliver(grow(player, f"mended-{at}"))
        await player.look("failure", f"after call {at} of the thread port failed beside background()")
        if not reached:
            return


async def _failing_closings(player: Player) -> None:
    fault = player.log.fault
    for at in range(1, CALLS_MAX + 1):
        await player.deliver(grow(player, f"end-{at}"))
        fault.plan(at, after=False)
        await player.close(f"aclose(), while call {at} of the thread port failed,")
        reached = fault.calls >= at
        fault.mend()
        await player.make_and_open("open() after an aclose() that the thread port had failed")
        await player.look("resume", f"after call {at} of the thread port failed in aclose(), and a restart")
        if not reached:
            return


async def _failing_openings(player: Player) -> None:
    fault = player.log.fault
    await player.close()
    for after in (False, True):
        for at in range(1, CALLS_MAX + 1):
            sink = player.make()
            fault.plan(at, after=after)
            try:
                await player.call("open()", partial(sink.open, player.log), "open")
            except (StopSink, UsageError):
                del sink
                continue
            except NotConforming:
                raise
            except Exception as error:
                raise NotConforming(
                    "open", f"open(), while the thread port failed, raised {error!r:.200}"
                ) from error
            finally:
                fault.mend()
            player.sink = sink
            await player.close()
            break
    await player.make_and_open("open() after failed ones")
    await player.look("open", "after failed calls of open()")


async def late(player: Player) -> None:
    """Rows that were set aside come behind others, once and again, before and after a restart."""
    log = player.log
    log.append(*(Delta(f"late-{i}", create([i] * _WIDTH)) for i in range(4)))
    await deliver_new(player)
    aside = append_with_gaps(player, "late")
    await deliver_new(player)
    await player.look("late", "after rows were set aside and those of other vectors applied")
    await player.deliver(log.late(aside[:1]), "late")
    await player.look("late", "after one row came late")
    await player.deliver(log.late(aside[1:]), "late")
    await player.look("late", "after all rows came late")
    seen = await player.seen()
    log.aside.difference_update(aside)
    await player.deliver(log.late(aside), "late")
    await player.look("late", "after late rows came late again")
    await player.deliver(log.late(aside[2:]), "late")
    await player.deliver(log.deliveries(aside[0]))
    await player.look("late", "after late rows came again with the others")
    _same(player, "late", "after late rows came again", seen, await player.seen())
    await player.deliver(grow(player, "late"))
    await player.look("late", "after new rows behind late ones")
    await _late_blocks(player)
    await player.reopen("open() after late rows")
    await player.look("late", "after late rows and a restart")
    await player.deliver(log.late(aside), "late")
    await player.look("late", "after late rows came again behind a restart")
    again = append_with_gaps(player, "late")
    await deliver_new(player)
    await player.pause()
    await player.deliver(log.late(again), "late")
    log.aside.difference_update(again)
    await player.reopen("open() after rows that came late last")
    await player.look("late", "after a restart behind rows that came late last")
    await player.deliver(log.late(again), "late")
    await player.deliver(log.deliveries(again[0]), "late")
    await player.look("late", "after a restart behind rows that came late last, and repeats")


async def _late_blocks(player: Player) -> None:
    """Many rows of one kind, of which some have come late before."""
    log = player.log
    log.append(*(Delta(f"block-{i}", create([1, 2, 3, 4])) for i in range(12)))
    logged = log.append(*(Delta(f"block-{i}", sparse_add([0, 2], [i, 5])) for i in range(12)))
    aside = [logged.offset + row for row in range(12) if row not in (0, 6)]
    log.aside.update(aside)
    await deliver_new(player)
    await player.deliver(log.late(aside[:4]), "late")
    await player.deliver(log.late(aside), "late")
    await player.look("late", "after many rows of one kind came late, some of them for the second time")
    log.aside.difference_update(aside)


def append_with_gaps(player: Player, prefix: str) -> list[int]:
    """Rows of which some are set aside, as behind a RejectDelta; returns these rows' offsets."""
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
    aside = [first.offset, first.offset + 2, second.offset, third.offset + 1]
    log.aside.update(aside)
    return aside


async def slow(player: Player) -> None:
    """Long pauses between deliveries, background work beside them; then many rows at once."""
    log = player.log
    for at in range(3):
        await player.deliver(grow(player, f"slow-{at}"), "background")
        await player.pause()
        await player.look("background", "after a pause between deliveries")
    for at in range(4):
        log.append(*(Delta(f"many-{i}", create([i, at, 0, 0])) for i in range(50)))
        log.append(*(Delta(f"many-{i}", sparse_add([1, 2], [1, at])) for i in range(50)))
    log.append(*(Delta("one", create([at, 0, 0, 0])) for at in range(20)))
    log.append(*(Delta("one", scale(2)) for _ in range(20)))
    await deliver_new(player)
    await player.look("order", "after hundreds of rows in one call")
    await player.pause()
    await player.look("background", "after hundreds of rows and a pause")


async def closing(player: Player, before: Leftovers) -> None:
    """Closed under load, with work in hand; and nothing is left."""
    fault = player.log.fault
    fault.turns = 20
    await player.deliver(grow(player, "load"))
    await player.pause()
    await player.deliver(grow(player, "load"))
    await player.close("aclose() under load")
    fault.turns = TURNS
    await player.make_and_open("open() after aclose() under load")
    player.look_at_all()
    await player.look("resume", "after aclose() under load and a restart")
    await player.deliver(grow(player, "last"))
    await player.close("the last aclose()")
    await player.close("the last aclose(), a second time,")
    check_frozen(player.sink.statistics())
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    left = before.since()
    if left:  # what nobody refers to any more does not count
        let_go()
        left = before.since()
    if fault.inside:
        left.append("a call on its thread")
    if left:
        raise NotConforming("close", f"aclose() left {', '.join(left[:5])} behind")


# --- helpers


async def deliver_new(player: Player) -> None:
    """Deliver what the log has and the sink was never handed, in one call."""
    new = player.log.deliveries(player.log.delivered)
    await player.deliver(new)


def grow(player: Player, prefix: str) -> list[Delivery]:
    """Append some rows, of new vectors and of old ones; return their deliveries."""
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
    applied = player.shadow.offsets
    return all(delivery.first_offset + row in applied for row in rows_of(delivery))


def _pieces(deliveries: Sequence[Delivery]) -> Iterator[Delivery]:
    """The same rows, a delivery a row, all but the first row of each batch twice."""
    for delivery in deliveries:
        rows = rows_of(delivery)
        for at in range(len(rows)):
            yield Delivery(delivery.logged, np.array(rows[at : at + 2], np.intp))


def _same(player: Player, part: str, when: str, before: object, after: object) -> None:
    if before != after:
        raise NotConforming(part, f"{when}, readers saw {after!r:.200} instead of {before!r:.200}")
