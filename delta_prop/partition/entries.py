"""Makes the orderer's and the queue's entries from work, and settles the duplicates of pending work.

Pure: it makes values from work, and sets fields of it; `pipeline.py` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from delta_prop.calls.argument_checks import check_batch
from delta_prop.calls.outcomes import OfferState
from delta_prop.calls.refusals import (
    DUPLICATES_MAX,
    dot_reused,
    sliced_differently,
    too_many_duplicates,
    withdrawn,
)
from delta_prop.partition.core.appender import noop_clock
from delta_prop.partition.duplicate_batches import same_rows
from delta_prop.partition.ingest.fair_queue import Item
from delta_prop.partition.ingest.origins import OWN
from delta_prop.partition.ingest.work import Draft, MatrixDraft, SequencedBatch
from delta_prop.partition.order.orderer import Entry
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import Dot, Priority, origin_lane
from delta_prop_wire.encode import encode_noop
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt

WaitingT = TypeVar("WaitingT", Item, Entry)


def make_entry(work: SequencedBatch, watermark: int = 0) -> Entry:
    """Return the orderer's entry of a batch; `watermark` is that of its origin.

    A forwarded batch may have a gap below it: what it skips was lost at its source.
    """
    batch = work.batch
    previous = batch.previous if batch.has_gaps else batch.base - 1
    if work.is_forwarded:
        previous = max(previous, min(watermark, batch.base - 1))
    return Entry(
        origin=batch.origin,
        first=batch.base,
        last=batch.last,
        previous=previous,
        clock=batch.clock if work.final_refusal is None else noop_clock(batch, work.final_refusal),
        # A no-op is appended once its clock's dots are there: nothing depends on its rows.
        parents=() if work.final_refusal else tuple(dict.fromkeys(parent for _, parent in batch.parents)),
        count=batch.count,
        size=batch.size,
        owner=work.sender.owner,
        item=work,
        ids=accepted_ids(batch),
    )


def make_draft_entry(draft: Draft | MatrixDraft, origin: int, dependencies: set[Dot | bytes]) -> Entry:
    """Return the orderer's entry of a waiting draft, under a placeholder origin."""
    return Entry(
        origin=origin,
        first=1,
        last=1,
        previous=0,
        parents=tuple(dependencies),
        count=draft.count,
        size=draft.size,
        owner=OWN,
        item=draft,
        ids=draft.ids or (),
    )


def make_item(work: SequencedBatch | Draft | MatrixDraft) -> Item:
    """Return the queue's item of work."""
    return Item(
        lane=work.priority,
        count=work.count,
        size=work.size,
        keys=work.vectors(),
        after=pending_dependencies(work, Item),
        payload=work,
    )


def accepted_ids(batch: Batch) -> Sequence[bytes]:
    """Return the ids that a batch carries; those of a control row belong to refused deltas."""
    return () if batch.is_control else batch.ids or ()


def pending_dependencies(
    work: SequencedBatch | Draft | MatrixDraft, kind: type[WaitingT]
) -> tuple[WaitingT, ...]:
    """Return the work named by `after=` that still waits, in the queue (Item) or in pending (Entry)."""
    if isinstance(work, SequencedBatch):
        return ()
    return tuple(receipt.item for receipt in work.after if isinstance(receipt.item, kind))


def settle_duplicate(original: Receipt, receipt: Receipt) -> None:
    """Settle a duplicate with the outcome of its first copy."""
    refusal = original.refusal()
    if receipt.done:
        return
    if refusal is not None:
        receipt.refuse(refusal)
    elif original.state is OfferState.ACKNOWLEDGED:
        receipt.acknowledge(original.result())
    else:
        receipt.refuse(withdrawn())


def attach_duplicate(work: SequencedBatch, pending: Entry, watermark: int) -> Refused | None:
    """Let a duplicate wait for the outcome of its first copy; return the refusal if it cannot.

    The batch takes effect once, and both receipts are settled. `pending` is the first copy's entry,
    `watermark` that of their origin.
    """
    first_copy = pending.item
    assert isinstance(first_copy, SequencedBatch)
    if work.batch.last != first_copy.batch.last:
        return sliced_differently(work.batch, pending, watermark)
    if work.batch.crc != first_copy.batch.crc:
        same = same_rows(work.batch, first_copy.batch)
        return sliced_differently(work.batch, pending, watermark) if same else dot_reused(work.batch)
    if first_copy.duplicates >= DUPLICATES_MAX:
        return too_many_duplicates(work.batch)
    first_copy.duplicates += 1
    receipt = work.receipt
    receipt.mark_waiting(OfferState.PENDING, lambda: False)
    first_copy.receipt.add_done_callback(lambda original: settle_duplicate(original, receipt))
    if work.final_refusal is not None and first_copy.final_refusal is None:
        first_copy.receipt.withdraw()
    return None


def convert_to_noop(work: object) -> bool:
    """Turn a batch into a no-op, since its dots must be filled; False for a draft, which has no dots, and for
    a forwarded batch, which is sent again.
    """
    if isinstance(work, SequencedBatch) and not work.is_forwarded:
        work.final_refusal = withdrawn()
        return True
    return False


def find_fault(batch: Batch) -> Refused | None:
    """Return the refusal of the first invalid row, None if all are valid.

    Only this function validates the deltas of producers, in whichever frame they came.
    """
    try:
        check_batch(batch)
    except InvalidDelta as refusal:
        return refusal
    return None


def make_gap_noop(origin: int, epoch: int, watermark: int, last: int) -> Batch:
    """Return a control row that fills an origin's counters above `watermark` up to `last`, as left out."""
    return encode_noop(
        origin=origin,
        base=last,
        count=1,
        code=ErrorCode.DOT_REUSED,
        epoch=epoch,
        previous=watermark,
        counters=[last],
        priority=Priority(origin_lane(origin)),
    )
