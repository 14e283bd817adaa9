"""The pipeline: ingest, order, log, route as plain calls. Read this first.

A delta that waits for nothing passes in one call: it is admitted, ordered, appended to the log; with a log in
memory also routed to the sinks and acknowledged. State changes only if the log accepts the batch. The queue
before these steps is empty while the log keeps up. Nothing here awaits; `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import (
    claimed_since,
    lost_with_log,
    overlap,
    parent_refused,
    service_closing,
    stopped_for_good,
    superseded_by_hello,
    withdrawn,
)
from delta_prop.partition.ack_tracker import AckTracker
from delta_prop.partition.core.appender import Appender
from delta_prop.partition.duplicate_batches import ack_duplicate, find_offsets, find_outcome
from delta_prop.partition.entries import (
    accepted_ids,
    attach_duplicate,
    convert_to_noop,
    find_fault,
    make_draft_entry,
    make_entry,
    make_gap_noop,
    make_item,
    pending_dependencies,
)
from delta_prop.partition.forwarded_batches import ack_covered, admit, check_numbers, drop_known_rows
from delta_prop.partition.ingest.origins import OWN, Grant
from delta_prop.partition.ingest.work import Draft, MatrixDraft, Sender, SequencedBatch
from delta_prop.partition.order.orderer import Entry, RefusedEntry, Verdict
from delta_prop.partition.order.orphans import Orphans
from delta_prop.partition.order.pending_drafts import PendingDrafts
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import AckLevel, Dot, Priority, Source, make_origin, origin_partition
from delta_prop_wire.errors import Refused
from delta_prop_wire.frame_runs import FrameRun
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode
from delta_prop_wire.validate import common_columns_only

if TYPE_CHECKING:
    from delta_prop.partition.core.coalesced_draft import CoalescedDraft
    from delta_prop.partition.gate import Gate
    from delta_prop.partition.listener import PartitionListener
    from delta_prop.partition.partition import PipelineParts, Ticker
    from delta_prop.partition.storage.committer import Committer
    from delta_prop.platform.ports import Clock
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.frames import OriginClaim

Work: TypeAlias = SequencedBatch | Draft | MatrixDraft


class Pipeline:
    """Everything between an offer and its offset in the log, for one partition."""

    def __init__(
        self,
        log: Log,
        parts: PipelineParts,
        listener: PartitionListener,
        *,
        own_producer_id: int,
        partition: int = 0,
        clock: Clock,
        gate: Gate,
        ticker: Ticker | None = None,
        committer: Committer | None = None,
    ) -> None:
        """Create a pipeline with an empty state.

        `partition`: its number in its stream. `ticker` is woken when work is queued; it calls `pump`.
        """
        queue, orderer, ids, origins, vectors = parts
        self.log = log
        self.queue = queue
        self.orderer = orderer
        self.origins = origins
        self.appender = Appender(
            log,
            watermarks=orderer.watermarks,
            origins=origins,
            vectors=vectors,
            ids=ids,
            clock=clock,
            listener=listener,
        )
        self.stop_refusal: Refused | None = None
        """Refusal of all work while the log has failed, since this state may be ahead of it; else None."""
        self.recoveries = 0
        """Number of times that the state was restored from a log after a failure."""
        self.ack_tracker = AckTracker(log, listener, committer)
        self._gate = gate
        self._ticker = ticker
        self._running = False
        self._now = 0.0
        self._own_origins = tuple(make_origin(own_producer_id, lane, partition) for lane in Priority)
        for origin in self._own_origins:
            origins.hello(origin, OWN, 0.0)
        self._pending_drafts = PendingDrafts()
        self._orphans = Orphans(orderer, ids, self.appender.refused_ids)

    def _wake_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.wake_queue()

    def restore(self, logged: LoggedBatch, now: float) -> None:
        """Replay a batch that the log holds at a start, in log order; it is not routed again."""
        batch = logged.batch
        if not uses_dots(batch):
            self.appender.skip(logged)
            return
        is_known = batch.last <= self.orderer.watermarks.get(batch.origin, 0)
        self.appender.restore(logged, now, is_known=is_known)
        if not is_known:
            self.orderer.note_delivered(batch.origin, batch.last, accepted_ids(batch))

    # --- what callers do

    @property
    def refused(self) -> int:
        """Number of refusals that were reported."""
        return self.ack_tracker.refused

    def check_running(self) -> None:
        """Raise Refused (LOG_FAILED) while the log has failed, since this state may include lost deltas."""
        if self.stop_refusal is not None:
            raise self.stop_refusal.with_traceback(None)

    def when_reached(self, on_outcome: Callable[[Refused | None], None]) -> None:
        """Call `on_outcome(None)` once this state is stored at the log's level, or with the refusal if the
        log fails first. So an answer based on the state never depends on what can be lost.
        """
        self.ack_tracker.when_reached(self.log.next_offset, self.log.ack_level, on_outcome)

    def watermark(self, origin: int) -> int:
        """Return the counter up to which an origin's deltas are processed. Raises Refused (LOG_FAILED)."""
        self.check_running()
        return self.orderer.watermarks.get(origin, 0)

    def hello(self, producer_id: int, owner: str, now: float) -> list[Grant]:
        """Open a producer, with one grant per priority, and fence its former holder. Raises Refused."""
        self.check_running()
        grants = []
        partition = origin_partition(self._own_origins[0])
        origins = [make_origin(producer_id, lane, partition) for lane in Priority]
        self.origins.check_capacity(origins, owner)
        for origin in origins:
            state = self.origins.hello(origin, owner, now, self.orderer.watermarks.get(origin, 0))
            self._refuse_pending(origin, state.epoch)
            grants.append(Grant(origin, state.epoch, self.orderer.watermarks.get(origin, 0)))
        return grants

    def claim(
        self, claims: Sequence[OriginClaim], owner: str, now: float, *, bounded: bool = True
    ) -> list[Grant]:
        """Grant origins to a producer that connects: a claim continues its epoch; epoch 0 requests a new one,
        which fences the former holder. Pending batches are refused, since the producer resends them, maybe
        with other bytes. `bounded`: the limit of origins per owner applies. Raises Refused.
        """
        self.check_running()
        self.origins.check_claims(claims, owner, bounded=bounded)
        grants = []
        for origin, epoch, _ in claims:
            watermark = self.orderer.watermarks.get(origin, 0)
            state = self.origins.claim(origin, epoch, owner, now, watermark)
            state.claims += 1
            self._refuse_pending(origin, state.epoch)
            grants.append(Grant(origin, state.epoch, self.orderer.watermarks.get(origin, 0)))
        return grants

    def _refuse_pending(self, origin: int, epoch: int) -> None:
        pending = self.orderer.take_origin(origin)
        self._refuse_all([RefusedEntry(entry, claimed_since(entry.item, epoch)) for entry in pending])  # type: ignore[arg-type]

    def outcome(self, origin: int, counter: int) -> int | ErrorCode | None:
        """Return a dot's offset, the code of a no-op, None if unknown. Raises Refused (LOG_FAILED)."""
        self.check_running()
        return find_outcome(origin, counter, self.origins.get(origin), self.log)

    def has_delta(self, origin: int, counter: int) -> bool:
        """True if this state includes a delta with this dot, durable or not."""
        if self.orderer.watermarks.get(origin, 0) < counter:
            return False
        return not isinstance(find_outcome(origin, counter, self.origins.get(origin), self.log), ErrorCode)

    def offer(self, work: Work, now: float) -> Receipt:
        """Process work, or queue it while the log is full. Never waits; the receipt gets the outcome."""
        self._now = now
        if self.stop_refusal is not None:
            self._refuse(work, self.stop_refusal)
            return work.receipt
        count, size = work.count, work.size
        if (
            self.queue.depth == 0
            and self.log.is_accepting
            and not self._running
            and self._gate.admits(count, size, now)
        ):
            self._gate.note(count, size, now)
            self._process(work)
        else:
            self._enqueue(work)
        if self.queue.depth:  # also work offered by a callback just now
            self.pump(now)
        if self.queue.depth:
            self._wake_ticker()
        return work.receipt

    @property
    def can_take_coalesced(self) -> bool:
        """True if `offer_coalesced` succeeds, unless the gate or the draft itself prevents it."""
        is_busy = self._running or self.queue.depth or self.orderer.has_pending or self.orderer.has_ready
        # A draft may need pending work.
        return self.log.is_accepting and not (self.stop_refusal or is_busy)

    def offer_coalesced(self, draft: CoalescedDraft, now: float) -> bool:
        """Append a draft of one or more calls, with the effect of `offer` for each, in fewer steps. Return
        False, with nothing changed, if it cannot be appended now, or if one of several calls is refused.
        """
        if not (self.can_take_coalesced and self._gate.admits(draft.count, draft.size, now)):
            return False
        self._now, self._running = now, True
        try:
            is_done = self._append_coalesced(draft)
        finally:
            self._running = False
        if self.queue.depth:  # work offered by a callback just now
            self.pump(now)
            self._wake_ticker()
        return is_done

    def _append_coalesced(self, draft: CoalescedDraft) -> bool:
        try:
            logged = self.appender.append_coalesced(draft, self._own_origins[draft.priority], self._now)
        except Refused as refusal:
            if draft.is_single:
                self._gate.note(draft.count, draft.size, self._now)
                self.ack_tracker.refuse(draft.receipt, refusal)
            return draft.is_single
        self._gate.note(draft.count, draft.size, self._now)
        self._note_run((logged,), draft.receipt)
        return True

    def offer_run(
        self, run: FrameRun, sender: Sender, make_receipt: Callable[[int], Receipt], now: float
    ) -> int:
        """Append the batches of a run, under one receipt; return how many. Has the effect of `offer` for
        each, and stops before the first that needs the checks of `offer`, as one with a clock, parents, ids,
        metadata or topics does. `make_receipt` takes the number of appended batches.
        """
        batches, count, size = run.batches, run.rows, run.size
        first = batches[0]
        state = self.origins.find_writer(first, sender.owner)
        if (
            state is None
            or first.base != self.orderer.watermarks.get(first.origin, 0) + 1
            or self.stop_refusal is not None
            or self.queue.depth
            or self._running
            or not self.log.is_accepting
            or not self._gate.admits(count, size, now)
        ):
            return 0
        self._now, self._running = now, True
        try:
            appended = self.appender.append_run(batches, state, sender.source, now)
            if appended:
                if len(appended) < len(batches):
                    count = sum([logged.count for logged in appended])
                    size = sum([logged.batch.size for logged in appended])
                self._gate.note(count, size, now)
                self._note_run(appended, make_receipt(len(appended)))
        finally:
            self._running = False
        if self.queue.depth:  # work offered by a callback just now
            self.pump(now)
            self._wake_ticker()
        return len(appended)

    def _note_run(self, batches: Sequence[LoggedBatch], receipt: Receipt) -> None:
        batch, last = batches[0].batch, batches[-1].batch
        self.orderer.note_delivered(batch.origin, last.base + last.count - 1)
        self.ack_tracker.note_appended(batches, receipt, min(batch.ack_level, self.log.ack_level))
        if self.orderer.has_ready:
            self._append_released()

    def note_refused(self, ids: Iterable[object], refusal: Refused) -> None:
        """Note the ids of deltas that were refused before they reached the pipeline."""
        self._refuse_orphans(ids, refusal, Source.LOCAL)
        if not self._running:
            self._append_released()

    def pump(self, now: float) -> None:
        """Run queued work while the log has capacity and accepts, and the gate admits."""
        self._now = now
        while not self._running and self.log.is_accepting:
            item = self.queue.peek(now)
            if item is None or self.log.capacity_refusal(item.count, item.size) is not None:
                return
            if not self._gate.admits(item.count, item.size, now):
                return
            self.queue.take(item)
            self._gate.note(item.count, item.size, now)
            self._process(item.payload)  # type: ignore[arg-type]

    def gate_wait_s(self, now: float) -> float | None:
        """Return the seconds to wait for the gate; None: nothing is queued, or a sink must progress first."""
        item = self.queue.peek(now) if self.queue.depth else None
        return None if item is None else self._gate.wait_s(item.count, item.size, now)

    def tick(self, now: float) -> float | None:
        """Refuse work that has waited too long for its dependencies; return when to call again."""
        self._now = now
        self._append_released()  # finds nothing, unless a callback raised in the last round
        self._refuse_all(self.orderer.expire(now))
        self.origins.deactivate_idle(now)
        self.pump(now)
        return self.orderer.next_deadline()

    def stop(self, refusal: Refused, now: float) -> None:
        """Refuse, after a failure of the log, all work that is not appended, until `adopt_state`. Appended
        work is in doubt until then; it is refused permanently if the refusal has no time to retry.
        """
        self.stop_refusal = refusal
        self.ack_tracker.suspend(refusal)
        if refusal.retry_after_ms is None:
            self.ack_tracker.fail(stopped_for_good(refusal))
        self._refuse_waiting(refusal, now)

    def adopt_state(self, restored: Pipeline) -> None:
        """Continue with the state of a pipeline just restored from the log, and settle the receipts in doubt.
        Producers keep their grants and epochs; Lamport numbers and times keep rising.
        """
        previous, current = self.appender, restored.appender
        restored.origins.carry_over(self.origins)
        self.orderer, self.origins, self.appender = restored.orderer, restored.origins, current
        current.continue_from(previous)
        previous.ids.close()
        self._own_origins, self._orphans = restored._own_origins, restored._orphans
        self._pending_drafts.clear()
        self.stop_refusal = None
        self.recoveries += 1
        self.ack_tracker.resume(self.log.next_offset, lost_with_log())

    def skip_to(self, origin: int, last: int, owner: str) -> None:
        """Fill an origin's missing counters up to `last` with one control row, for deltas that were
        acknowledged below durable and that the log's failure lost. Raises Refused.
        """
        self.check_running()
        watermark, state = self.orderer.watermarks.get(origin, 0), self.origins.get(origin)
        if watermark >= last or state is None or state.owner != owner:
            return
        gap = make_gap_noop(origin, state.epoch, watermark, last)
        logged = self.appender.append_noop(gap, self._now)
        self.orderer.note_delivered(origin, last)
        self.ack_tracker.route_when_visible(logged)
        self._append_released()

    def close(self, now: float) -> None:
        """Refuse all queued and pending work, since the service closes."""
        self._refuse_waiting(service_closing(), now)

    def _refuse_waiting(self, refusal: Refused, now: float) -> None:
        while (item := self.queue.next(now)) is not None:
            self._refuse(item.payload, refusal)  # type: ignore[arg-type]
        self._refuse_all([RefusedEntry(entry, refusal) for entry in self.orderer.drain()])

    # --- queue

    def _enqueue(self, work: Work) -> None:
        receipt = work.receipt
        item = make_item(work)
        try:
            refusal = self.log.capacity_refusal(work.count, work.size)
            if refusal is not None:  # queued work does not run either then, so the order is kept
                raise refusal
            self.queue.offer(item, self._now)
        except Refused as refusal:
            self._refuse(work, refusal)
            return
        if isinstance(work, SequencedBatch) and not work.is_forwarded:
            state = self.origins.get(work.batch.origin)
            work.claims = None if state is None else state.claims
        receipt.item = item
        receipt.mark_waiting(OfferState.QUEUED, lambda: convert_to_noop(work) or self.queue.withdraw(item))

    # --- admit

    def _process(self, work: Work) -> None:
        self._running = True  # work offered by a callback below is queued, never nested
        try:
            if isinstance(work, SequencedBatch) and self._is_resent(work):
                self._refuse(work, superseded_by_hello())
            elif not isinstance(work, SequencedBatch):
                self._process_draft(work)
            elif not self._try_fast_path(work):
                self._process_sequenced(work)
        finally:
            self._running = False

    def _is_resent(self, work: SequencedBatch) -> bool:
        """True if the producer has sent hello since the batch was queued, and so resends it."""
        state = None if work.claims is None else self.origins.get(work.batch.origin)
        return state is not None and state.claims != work.claims

    def _try_fast_path(self, work: SequencedBatch) -> bool:
        """Append a valid homogeneous batch that is the next of an origin that has said hello, in fewer steps
        than `_process_sequenced`. Return False, with nothing changed, if it is not such a batch.
        """
        batch, sender = work.batch, work.sender
        if work.final_refusal is not None or work.lamport is not None:
            return False
        if work.is_forwarded or not common_columns_only(batch):
            return False
        state = self.origins.find_writer(batch, sender.owner)
        if state is None or batch.base != self.orderer.watermarks.get(batch.origin, 0) + 1:
            return False
        if batch.base + batch.count - 1 > COUNTER_MAX:
            return False
        appended = self.appender.append_run([batch], state, sender.source, self._now)
        if appended:
            self._note_run(appended, work.receipt)
        return bool(appended)

    def _process_sequenced(self, work: SequencedBatch) -> None:
        """Append a batch, hold it as pending, or refuse it, after all checks."""
        batch, is_forwarded = work.batch, work.is_forwarded
        watermark = self.orderer.watermarks.get(batch.origin, 0)
        try:
            self._admit(work)
            if batch.last <= watermark:
                self.ack_tracker.report(work.receipt, self._required_level(work), self._ack_duplicate(work))
                return
            is_overlap = batch.base <= watermark or (batch.has_gaps and batch.previous < watermark)
            if is_overlap and not is_forwarded:
                raise overlap(batch, watermark)
        except Refused as refusal:
            self._refuse(work, refusal)
            return
        if is_forwarded:
            self._slice_known_rows(work, watermark)
        elif work.final_refusal is None:
            work.final_refusal = find_fault(batch) or self._orphans.find_refusal(work)
        self._order(make_entry(work, watermark))

    def _slice_known_rows(self, work: SequencedBatch, watermark: int) -> None:
        batch, state = work.batch, self.origins.get(work.batch.origin)
        known_count = drop_known_rows(work, watermark)
        if known_count:
            assert state is not None, "a forwarded batch's origin was admitted"
            offsets = find_offsets(batch, state, self.log)
            work.receipt.sliced_offsets += tuple(offsets[row] for row in range(known_count))

    def _admit(self, work: SequencedBatch) -> None:
        batch = work.batch
        check_numbers(work)
        if work.is_forwarded:
            admit(self.origins, work, self.orderer.watermarks.get(batch.origin, 0), self._now)
            return
        is_duplicate = batch.last <= self.orderer.watermarks.get(batch.origin, 0)
        self.origins.require(batch, work.sender.owner, is_duplicate=is_duplicate)
        if batch.is_control:
            raise Refused(ErrorCode.UNAUTHORIZED, "only the service writes control rows: send deltas")

    def _ack_duplicate(self, work: SequencedBatch) -> PublishAck:
        """Return the answer to dots up to the watermark, whoever sends them. Raises Refused."""
        batch, state = work.batch, self.origins.get(work.batch.origin)
        assert state is not None
        if work.is_forwarded:
            published = ack_covered(batch, find_offsets(batch, state, self.log), self.log)
        else:
            published = ack_duplicate(batch, state, self.log)
        self.appender.counters.duplicates += batch.count
        return published

    def _process_draft(self, draft: Draft | MatrixDraft) -> None:
        """Append a draft, or hold it as pending until its parents and earlier drafts are appended."""
        refused = (parent for parent in draft.after if parent.done and not parent.acknowledged)
        refused_parent = next(refused, None)
        if refused_parent is not None:
            self._refuse(draft, parent_refused(refused_parent))
            return
        refusal = self._orphans.find_refusal(draft)
        if refusal is not None:
            self._refuse(draft, refusal)
            self._refuse_orphans(draft.ids or (), refusal, draft.source)
            self._append_released()
            return
        entries = pending_dependencies(draft, Entry)
        blockers: set[Dot | bytes] = {Dot(entry.origin, entry.last) for entry in entries}
        blockers |= self._pending_drafts.find_blockers(draft)
        blockers |= draft.causes
        if not blockers:
            self._append_draft(draft, None)
            return
        self._order(make_draft_entry(draft, self._pending_drafts.next_placeholder_origin(), blockers))

    # --- order

    def _order(self, entry: Entry) -> None:
        if self.orderer.check(entry):
            self._append(entry)
        else:
            self._hold_pending(entry)
        self._append_released()

    def _append_released(self) -> None:
        while (entry := self.orderer.next_ready()) is not None:
            work: Work = entry.item  # type: ignore[assignment]
            if entry.verdict is Verdict.APPEND:
                self._append(entry)
            elif entry.verdict is Verdict.OVERLAP and not work.is_forwarded:
                self._refuse(work, self.orderer.overlap(entry))
            else:
                self._process_sequenced(work)  # type: ignore[arg-type]  # a duplicate, or a forwarded overlap

    def _hold_pending(self, entry: Entry) -> None:
        work: Work = entry.item  # type: ignore[assignment]
        first_copy = self.orderer.find_pending(entry)
        if first_copy is not None:
            assert isinstance(work, SequencedBatch), "a draft has no duplicates"
            refusal = attach_duplicate(work, first_copy, self.orderer.watermarks.get(entry.origin, 0))
            if refusal is not None:
                self._refuse(work, refusal)
            return
        refusals = self.orderer.hold_pending(entry, self._now)
        if refusals:
            self._refuse_all(refusals)
            return
        if not isinstance(work, SequencedBatch):
            self._pending_drafts.add(work, entry)
        if not work.receipt.done:
            work.receipt.item = entry
            work.receipt.mark_waiting(OfferState.PENDING, lambda: self._withdraw(entry))

    def _withdraw(self, entry: Entry) -> bool:
        """Withdraw pending work: a draft or a forwarded batch is removed, a dot stays and becomes a no-op in
        its turn. A forwarded batch stays if another forwarder waits for it too.
        """
        work = entry.item
        if isinstance(work, SequencedBatch) and work.is_forwarded:
            if work.duplicates or not self.orderer.is_pending(entry):
                return False
            self._refuse_all(self.orderer.refuse(entry, withdrawn()))
            return True
        if not self.orderer.withdraw(entry, self._now):
            return False
        convert_to_noop(entry.item)
        self._append_released()
        return True

    # --- log and route

    def _append(self, entry: Entry) -> None:
        work = entry.item
        if not isinstance(work, SequencedBatch):
            if entry.is_withdrawn:
                self._release_draft(entry)
            else:
                self._append_draft(work, entry)  # type: ignore[arg-type]
            return
        try:
            appended, outcome = self.appender.append_sequenced(work, self._now)
        except Refused as refusal:
            self._refuse_all(self.orderer.refuse(entry, refusal))
            return
        is_accepted = isinstance(outcome, PublishAck)
        self.orderer.note_delivered(entry.origin, entry.last, accepted_ids(work.batch) if is_accepted else ())
        for logged in appended:
            self.ack_tracker.route_when_visible(logged)
        self.ack_tracker.report(work.receipt, self._required_level(work), outcome, appended[-1].next_offset)
        if isinstance(outcome, Refused):
            self._refuse_orphans(work.batch.ids or (), outcome, work.sender.source)

    def _append_draft(self, draft: Draft | MatrixDraft, entry: Entry | None) -> None:
        origin = self._own_origins[draft.priority]
        if draft.after and isinstance(draft, Draft):
            draft.add_receipt_parents()
        try:
            logged, published = self.appender.append_draft(draft, origin, self._now)
        except Refused as refusal:
            self._refuse(draft, refusal)
            self._refuse_orphans(draft.ids or (), refusal, draft.source)
            if entry is None:
                self._append_released()
            elif refusal.retryable:
                self._refuse_all(self.orderer.refuse(entry, refusal))
            else:
                self._release_draft(entry)
            return
        if logged is not None:
            self.orderer.note_delivered(origin, logged.batch.last, logged.batch.ids or ())
            self.ack_tracker.route_when_visible(logged)
        self.ack_tracker.report(draft.receipt, draft.ack_level, published)
        if entry is not None:
            self._release_draft(entry)
        elif logged is not None:
            self._append_released()

    def _release_draft(self, entry: Entry) -> None:
        """Remove a draft from pending, and release what waited for it."""
        self._pending_drafts.remove(entry.item, entry)  # type: ignore[arg-type]  # a draft's entry
        self.orderer.note_delivered(entry.origin, entry.last)
        self.orderer.forget(entry.origin)

    def _refuse_orphans(self, ids: Iterable[object], refusal: Refused, source: Source) -> None:
        """Note the ids of refused deltas, and refuse the work that waits for them as its parents."""
        orphans = deque(self._orphans.note_refused(ids, refusal, source))
        while orphans:
            entry, orphaned = orphans.popleft()
            work: Work = entry.item  # type: ignore[assignment]
            self.orderer.withdraw(entry, self._now)
            if isinstance(work, SequencedBatch):
                work.final_refusal = orphaned
                continue
            self._refuse(work, orphaned)
            orphans += self._orphans.note_refused(work.ids or (), orphaned, work.source)

    # --- outcomes

    def _required_level(self, work: SequencedBatch) -> AckLevel:
        """Return the ack level at which the sender is acknowledged; a forwarder sends a batch only once."""
        return self.log.ack_level if work.is_forwarded else work.batch.ack_level

    def _refuse(self, work: Work, refusal: Refused) -> None:
        self.ack_tracker.refuse(work.receipt, refusal)

    def _refuse_all(self, refusals: Iterable[RefusedEntry]) -> None:
        for entry, refusal in refusals:
            work: Work = entry.item  # type: ignore[assignment]
            self._refuse(work, refusal)
            if entry.origin < 0:
                self._pending_drafts.remove(work, entry)  # type: ignore[arg-type]  # a draft's entry
