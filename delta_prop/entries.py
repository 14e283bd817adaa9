"""What the orderer, the queue and whoever repeats a batch have to know of the work in the chain.

Pure: values made from work, and what is noted in it. `pipeline.py` decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from delta_prop.checks import check_batch
from delta_prop.ingest.lanes import Item
from delta_prop.ingest.origins import OWN
from delta_prop.ingest.work import Sequenced
from delta_prop.order.orderer import Entry
from delta_prop.published import State
from delta_prop.refusals import REPEATS_MAX, cut_otherwise, dot_reused, too_many_repeats, withdrawn
from delta_prop.repeats import same_rows
from delta_prop_wire.bounds import clock_is_sound
from delta_prop_wire.delta import Priority, origin_lane
from delta_prop_wire.encode import encode_void
from delta_prop_wire.errors import InvalidDelta
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.ingest.work import Draft, MatrixDraft
    from delta_prop.receipt import Receipt
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import Dot
    from delta_prop_wire.errors import Refused

Waiting = TypeVar("Waiting", Item, Entry)


def entry_of(work: Sequenced, have: int = 0) -> Entry:
    """What the orderer has to know of a batch; `have` is the watermark of its origin.

    A forwarded one may leap from below it: what it leaps over was lost where it comes from.
    """
    batch = work.batch
    previous = batch.previous if batch.leaps else batch.base - 1
    if work.forwards:
        previous = max(previous, min(have, batch.base - 1))
    return Entry(
        origin=batch.origin,
        first=batch.base,
        last=batch.last,
        previous=previous,
        clock=batch.clock if work.void is None else clock_of_refused(batch, work.void),
        # A void takes its place as soon as what its clock names is there: nothing depends on its rows.
        parents=() if work.void else tuple(dict.fromkeys(parent for _, parent in batch.parents)),
        count=batch.count,
        size=batch.size,
        owner=work.session.owner,
        item=work,
        ids=accepted_ids(batch),
    )


def entry_of_draft(draft: Draft | MatrixDraft, origin: int, waits: set[Dot | bytes]) -> Entry:
    """Return the orderer's entry of a draft that waits, under a stand-in for an origin."""
    return Entry(
        origin=origin,
        first=1,
        last=1,
        previous=0,
        parents=tuple(waits),
        count=draft.count,
        size=draft.size,
        owner=OWN,
        item=draft,
        ids=draft.ids or (),
    )


def item_of(work: Sequenced | Draft | MatrixDraft) -> Item:
    """Return the queue's item of work."""
    return Item(
        lane=work.priority,
        count=work.count,
        size=work.size,
        keys=work.vectors(),
        after=named_in(work, Item),
        payload=work,
    )


def accepted_ids(batch: Batch) -> Sequence[bytes]:
    """Return the ids that a batch brings; those of a control row are of refused deltas."""
    return () if batch.is_control else batch.ids or ()


def named_in(work: Sequenced | Draft | MatrixDraft, kind: type[Waiting]) -> tuple[Waiting, ...]:
    """What of the receipts named by `after=` still waits, in the queue (Item) or in pending (Entry)."""
    if isinstance(work, Sequenced):
        return ()
    return tuple(receipt.item for receipt in work.after if isinstance(receipt.item, kind))


def pass_on(told: Receipt, receipt: Receipt) -> None:
    """Settle a repeat as its first copy was."""
    refusal = told.refusal()
    if receipt.done:
        return
    if refusal is not None:
        receipt.refuse(refusal)
    elif told.state is State.ACKNOWLEDGED:
        receipt.acknowledge(told.result())
    else:
        receipt.refuse(withdrawn())


def join(work: Sequenced, parked: Entry, have: int) -> Refused | None:
    """Let the same dots wait for the outcome of their first copy; return the refusal if they cannot.

    One effect, and both are told. `parked` is the first copy's entry, `have` their origin's watermark.
    """
    first = parked.item
    assert isinstance(first, Sequenced)
    if work.batch.last != first.batch.last:
        return cut_otherwise(work.batch, parked, have)
    if work.batch.crc != first.batch.crc:
        same = same_rows(work.batch, first.batch)
        return cut_otherwise(work.batch, parked, have) if same else dot_reused(work.batch)
    if first.repeats >= REPEATS_MAX:
        return too_many_repeats(work.batch)
    first.repeats += 1
    receipt = work.receipt
    receipt.waits(State.PENDING, lambda: False)
    first.receipt.when_done(lambda told: pass_on(told, receipt))
    if work.void is not None and first.void is None:
        first.receipt.withdraw()
    return None


def make_void(work: object) -> bool:
    """Let a batch go on as a void, since its dots must be filled; False for drafts, which have none, and for
    what was forwarded, which comes again.
    """
    if isinstance(work, Sequenced) and not work.forwards:
        work.void = withdrawn()
        return True
    return False


def fault_of(batch: Batch) -> Refused | None:
    """Why a row of it is not sound, None where all are.

    This alone judges the deltas of producers, in whichever frame they came.
    """
    try:
        check_batch(batch)
    except InvalidDelta as refusal:
        return refusal
    return None


def clock_of_refused(batch: Batch, refusal: Refused) -> tuple[Dot, ...]:
    """Return what a void keeps of a refused batch's clock: all of it, or nothing where that is at fault.

    At fault is what breaks the format's bounds, or a server's own that it was refused for.
    """
    if refusal.field == "clock":
        return ()
    few = batch.clock_entries <= CLOCK_ENTRIES_MAX  # else they are not even decoded
    return batch.clock if few and clock_is_sound(batch.clock) else ()


def filler(origin: int, epoch: int, have: int, to: int) -> Batch:
    """A control row that fills an origin's counters above `have` up to `to`, as if they were left out."""
    return encode_void(
        origin=origin,
        base=to,
        count=1,
        code=ErrorCode.DOT_REUSED,
        epoch=epoch,
        previous=have,
        counters=[to],
        priority=Priority(origin_lane(origin)),
    )
