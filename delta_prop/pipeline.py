"""The chain: ingest, order, log, route as plain calls. Read this first.

A delta goes down once, without waiting anywhere: it is admitted, ordered, given its place in the log,
handed to the sinks' mailboxes, acknowledged. State moves only when the log has taken the batch.
In front stands one queue, empty while the log keeps up. Nothing here awaits; `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from delta_prop.append import Appender
from delta_prop.entries import (
    accepted_ids,
    entry_of,
    entry_of_draft,
    fault_of,
    filler,
    item_of,
    join,
    make_void,
    named_in,
)
from delta_prop.forwarded import admit, check_numbers, covered, cut_at
from delta_prop.gate import OpenGate
from delta_prop.ingest.lanes import Lanes
from delta_prop.ingest.origins import OWN, Grant, Origins
from delta_prop.ingest.work import Draft, MatrixDraft, Sequenced
from delta_prop.order.orderer import Entry, Orderer, Refusal, Verdict
from delta_prop.orphans import Orphans
from delta_prop.receipt import Published, Receipt, State
from delta_prop.refusals import (
    claimed_since,
    closing,
    lost,
    overlap,
    parent_refused,
    said_hello_again,
    stopped_for_good,
    withdrawn,
)
from delta_prop.repeats import answer_repeat, outcome_of, places_of
from delta_prop.reporting import Reporter
from delta_prop.settling import Settling
from delta_prop.standing import Standing
from delta_prop_wire.control_rows import uses_dots
from delta_prop_wire.delta import Dot, Priority, Source, make_origin
from delta_prop_wire.errors import Refused
from delta_prop_wire.mixed import is_simple
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from delta_prop.gate import Gate
    from delta_prop.ingest.seen_ids import SeenIds
    from delta_prop.ingest.vectors import Vectors
    from delta_prop.ingest.work import Session
    from delta_prop.merged import Joined, Merged
    from delta_prop_broker.log.contract import Log
    from delta_prop_wire.batch import Batch, LoggedBatch
    from delta_prop_wire.delta import AckLevel, Head
    from delta_prop_wire.frames import OriginClaim

Work: TypeAlias = Sequenced | Draft | MatrixDraft


class Chain:
    """Everything between an offer and its place in the log, for one partition.

    `route` is called with each batch that got its place, before its receipt is settled; `on_queued` when
    one is left to wait, so that somebody calls `pump`.
    """

    def __init__(
        self,
        log: Log,
        *,
        own_producer_id: int,
        lanes: Lanes,
        orderer: Orderer,
        ids: SeenIds,
        route: Callable[[LoggedBatch], None],
        wall_us: Callable[[], int],
        origins: Origins,
        vectors: Vectors,
        load_head: Callable[[str, str], Head | None],
        gate: Gate | None = None,
        on_placed: Callable[[], None] | None = None,
        on_queued: Callable[[], None] = lambda: None,
    ) -> None:
        self.log = log
        self.lanes = lanes
        self.orderer = orderer
        self.origins = origins
        self.appender = Appender(
            log,
            watermarks=orderer.have,
            origins=origins,
            vectors=vectors,
            ids=ids,
            wall_us=wall_us,
            load_head=load_head,
        )
        self.stopped: Refused | None = None
        """Why nothing is taken at present: the log has failed, and this state may be ahead of it."""
        self.rebuilt = 0
        """How often the state was read back from a log that had failed."""
        self.settling = Settling(log, route, on_placed or (lambda: None))
        self._reporter = Reporter(self.settling)
        self._gate: Gate = gate or OpenGate()
        self._on_queued = on_queued
        self._running = False
        self._now = 0.0
        self._own_origins = tuple(make_origin(own_producer_id, lane) for lane in Priority)
        for origin in self._own_origins:
            origins.hello(origin, OWN, 0.0)
        self._standing = Standing()
        self._orphans = Orphans(orderer, ids, self.appender.refused_ids)

    def restore(self, logged: LoggedBatch, now: float) -> None:
        """Take in a batch of the log as it was found at start, in its order; nobody is shown it again."""
        batch = logged.batch
        if not uses_dots(batch):
            self.appender.pass_over(logged)
            return
        known = batch.last <= self.orderer.have.get(batch.origin, 0)
        self.appender.restore(logged, now, known=known)
        if not known:
            self.orderer.delivered(batch.origin, batch.last, accepted_ids(batch))

    # --- what callers do

    @property
    def refused(self) -> int:
        """How many refusals were reported."""
        return self._reporter.refused

    def check_running(self) -> None:
        """Raise Refused (LOG_FAILED) while the log has failed: this state counts what may not be kept."""
        if self.stopped is not None:
            raise self.stopped.with_traceback(None)

    def when_kept(self, tell: Callable[[Refused | None], None]) -> None:
        """Call `tell(None)` once all that this state counts is kept at the log's level, with why not if the
        log fails first: so that an answer which rests on the state rests on nothing that can be lost.
        """
        self.settling.when_kept(self.log.next_offset, self.log.level, tell)

    def watermark(self, origin: int) -> int:
        """The counter up to which an origin's deltas are dealt with. Raises Refused (LOG_FAILED)."""
        self.check_running()
        return self.orderer.have.get(origin, 0)

    def hello(self, producer_id: int, owner: str, now: float) -> list[Grant]:
        """Open a producer: one grant a lane. Its former holder is fenced. Raises Refused."""
        self.check_running()
        grants = []
        granted = [make_origin(producer_id, lane) for lane in Priority]
        self.origins.check_room(granted, owner)
        for origin in granted:
            state = self.origins.hello(origin, owner, now, self.orderer.have.get(origin, 0))
            self._refuse_pending(origin, state.epoch)
            grants.append(Grant(origin, state.epoch, self.orderer.have.get(origin, 0)))
        return grants

    def claim(
        self, claims: Sequence[OriginClaim], owner: str, now: float, *, bounded: bool = True
    ) -> list[Grant]:
        """A hello over the network, for single origins: the epoch that each claim holds goes on, 0 asks for a
        new one, which fences who held it. What is pending comes again, perhaps as other bytes where the log
        has lost what was before. `bounded`: this owner may have so many only. Raises Refused.
        """
        self.check_running()
        self.origins.check_claims(claims, owner, bounded=bounded)
        grants = []
        for origin, epoch, _ in claims:
            watermark = self.orderer.have.get(origin, 0)
            state = self.origins.claim(origin, epoch, owner, now, watermark)
            state.claims += 1
            self._refuse_pending(origin, state.epoch)
            grants.append(Grant(origin, state.epoch, self.orderer.have.get(origin, 0)))
        return grants

    def _refuse_pending(self, origin: int, epoch: int) -> None:
        pending = self.orderer.take_origin(origin)
        self._refuse_all([Refusal(one, claimed_since(one.item, epoch)) for one in pending])  # type: ignore[arg-type]

    def outcome(self, origin: int, counter: int) -> int | ErrorCode | None:
        """Return a dot's offset, the code of a void one, None if not known. Raises Refused (LOG_FAILED)."""
        self.check_running()
        return outcome_of(origin, counter, self.origins.get(origin), self.log)

    def holds(self, origin: int, counter: int) -> bool:
        """True if this state counts a delta with this dot, kept or not."""
        if self.orderer.have.get(origin, 0) < counter:
            return False
        return not isinstance(outcome_of(origin, counter, self.origins.get(origin), self.log), ErrorCode)

    def offer(self, work: Work, now: float) -> Receipt:
        """Send work down the chain, or queue it while the log wants no more. Never waits.

        The outcome, a refusal too, stands in the receipt.
        """
        self._now = now
        if self.stopped is not None:
            self._refuse(work, self.stopped)
            return work.receipt
        count, size = work.count, work.size
        if (
            self.lanes.depth == 0
            and self.log.accepting
            and not self._running
            and self._gate.admits(count, size, now)
        ):
            self._gate.note(count, size, now)
            self._run(work)
        else:
            self._enqueue(work)
        if self.lanes.depth:  # also what was offered from within a callback just now
            self.pump(now)
        if self.lanes.depth:
            self._on_queued()
        return work.receipt

    @property
    def takes_merged(self) -> bool:
        """True if nothing stands in the way of `offer_merged`, but for the gate and the draft itself."""
        behind = self.orderer.any_pending or self.orderer.any_ready  # it might have to wait behind that
        return not (self.stopped or self._running or self.lanes.depth or behind) and self.log.accepting

    def offer_merged(self, draft: Merged | Joined, now: float) -> bool:
        """Append the draft of one call or more: what `offer` does for each of them, in fewer steps. False,
        and nothing has happened, where something is in its way, or some of several calls are refused.
        """
        admitted = self.takes_merged and self._gate.admits(draft.count, draft.size, now)
        if not (admitted and draft.may_be_sound()):
            return False
        self._now, self._running = now, True
        try:
            taken = self._append_merged(draft)
        finally:
            self._running = False
        if self.lanes.depth:  # what was offered from within a callback just now
            self.pump(now)
            self._on_queued()
        return taken

    def _append_merged(self, draft: Merged | Joined) -> bool:
        try:
            logged = self.appender.merged(draft, self._own_origins[draft.priority], self._now)
        except Refused as refusal:
            if draft.alone:
                self._gate.note(draft.count, draft.size, self._now)
                self._reporter.refuse(draft.receipt, refusal)
            return draft.alone
        if logged is None:
            return False
        self._gate.note(draft.count, draft.size, self._now)
        self._note_run((logged,), draft.receipt)
        return True

    def offer_run(
        self, batches: Sequence[Batch], session: Session, receipt_of: Callable[[int], Receipt], now: float
    ) -> int:
        """Append plain batches of one origin whose counters go on, all under one receipt, and say how many.

        It does what `offer` does for each, in one go. The first for which anything is otherwise, and all
        behind it, are left to that. `receipt_of` makes the receipt for so many of them.
        """
        self._now, first = now, batches[0]
        state = self.origins.writer(first, session.owner)
        have = self.orderer.have.get(first.origin, 0)
        if self.stopped is not None or state is None or first.base != have + 1:
            return 0
        if self.lanes.depth or self._running or not self.log.accepting:
            return 0
        rows, size = sum([batch.count for batch in batches]), sum([batch.size for batch in batches])
        if not self._gate.admits(rows, size, now):
            return 0
        self._running = True
        try:
            placed = self.appender.run(batches, state, session.source, now)
            if placed:
                if len(placed) < len(batches):
                    rows, size = sum([one.count for one in placed]), sum([one.batch.size for one in placed])
                self._gate.note(rows, size, now)
                self._note_run(placed, receipt_of(len(placed)))
        finally:
            self._running = False
        if self.lanes.depth:  # what was offered from within a callback just now
            self.pump(now)
            self._on_queued()
        return len(placed)

    def _note_run(self, placed: Sequence[LoggedBatch], receipt: Receipt) -> None:
        batch, last = placed[0].batch, placed[-1].batch
        self.orderer.delivered(batch.origin, last.base + last.count - 1)
        self.settling.placed_run(placed)
        self._reporter.report_run(placed, receipt, self.appender.kept_as(batch.ack_level))
        if self.orderer.any_ready:
            self._append_released()

    def note_refused(self, ids: Iterable[object], refusal: Refused) -> None:
        """Note the ids of deltas that were refused before they came here."""
        self._refuse_orphans(ids, refusal, Source.LOCAL)
        if not self._running:
            self._append_released()

    def pump(self, now: float) -> None:
        """Run what is queued for as long as the log has room and accepts, and the gate admits."""
        self._now = now
        while not self._running and self.log.accepting:
            item = self.lanes.peek(now)
            if item is None or self.log.full(item.count, item.size) is not None:
                return
            if not self._gate.admits(item.count, item.size, now):
                return
            self.lanes.take(item)
            self._gate.note(item.count, item.size, now)
            self._run(item.payload)  # type: ignore[arg-type]

    def gate_wait_s(self, now: float) -> float | None:
        """When the gate may admit what is next in the queue; None: nothing waits, or a sink is waited for."""
        item = self.lanes.peek(now) if self.lanes.depth else None
        return None if item is None else self._gate.wait_s(item.count, item.size, now)

    def tick(self, now: float) -> float | None:
        """Refuse what has waited too long for its causes; return when to call again."""
        self._now = now
        self._append_released()  # nothing is left, unless a caller's callback broke off the last round
        self._refuse_all(self.orderer.expire(now))
        self.origins.set_idle_aside(now)
        self.pump(now)
        return self.orderer.next_deadline()

    def stop(self, refusal: Refused, now: float) -> None:
        """The log has failed: refuse what has no place in it, and all that comes, until `take_over`. What has
        its place is in doubt until then; for good where the refusal names no time to try again.
        """
        self.stopped = refusal
        self.settling.suspend(refusal)
        if refusal.retry_after_ms is None:
            self.settling.fail(stopped_for_good(refusal))
        self._refuse_waiting(refusal, now)

    def take_over(self, restored: Chain) -> None:
        """Go on with the state of a chain that was made and restored from the log just now; tell what was in
        doubt.

        Who had said hello stays known, under the same epochs. Lamport numbers and times go on rising.
        """
        before, now = self.appender, restored.appender
        restored.origins.carry_over(self.origins)
        self.orderer, self.origins, self.appender = restored.orderer, restored.origins, now
        now.go_on_from(before)
        before.ids.close()
        self._own_origins, self._orphans = restored._own_origins, restored._orphans
        self._standing.clear()
        self.stopped = None
        self.rebuilt += 1
        self.settling.resume(self.log.next_offset, lost())

    def leap(self, origin: int, to: int, owner: str) -> None:
        """Fill what is missing up to a counter with one control row. Raises Refused.

        Those deltas were acknowledged at a level that the log's failure did not spare, and are gone.
        """
        self.check_running()
        have, state = self.orderer.have.get(origin, 0), self.origins.get(origin)
        if have >= to or state is None or state.owner != owner:
            return
        gap = filler(origin, state.epoch, have, to)
        logged = self.appender.filled(gap, self._now)
        self.orderer.delivered(origin, to)
        self.settling.placed(logged)
        self._append_released()

    def close(self, now: float) -> None:
        """Refuse what is queued or pending: the service ends."""
        self._refuse_waiting(closing(), now)

    def _refuse_waiting(self, refusal: Refused, now: float) -> None:
        while (item := self.lanes.next(now)) is not None:
            self._refuse(item.payload, refusal)  # type: ignore[arg-type]
        self._refuse_all([Refusal(entry, refusal) for entry in self.orderer.drain()])

    # --- queue

    def _enqueue(self, work: Work) -> None:
        receipt = work.receipt
        item = item_of(work)
        try:
            full = self.log.full(work.count, work.size)
            if full is not None:  # then nothing queued is run either, so order is kept
                raise full
            self.lanes.offer(item, self._now)
        except Refused as refusal:
            self._refuse(work, refusal)
            return
        if isinstance(work, Sequenced) and not work.forwards:
            state = self.origins.get(work.batch.origin)
            work.claims = None if state is None else state.claims
        receipt.item = item
        receipt.waits(State.QUEUED, lambda: make_void(work) or self.lanes.withdraw(item))

    # --- admit

    def _run(self, work: Work) -> None:
        self._running = True  # whoever offers from within a callback below is queued, never nested
        try:
            if isinstance(work, Sequenced) and self._comes_again(work):
                self._refuse(work, said_hello_again())
            elif not isinstance(work, Sequenced):
                self._run_draft(work)
            elif not self._run_plain(work):
                self._run_sequenced(work)
        finally:
            self._running = False

    def _comes_again(self, work: Sequenced) -> bool:
        """True if its producer has said hello since it was queued: it comes anew, maybe as other bytes."""
        state = None if work.claims is None else self.origins.get(work.batch.origin)
        return state is not None and state.claims != work.claims

    def _run_plain(self, work: Sequenced) -> bool:
        """The short way, of what most batches are: plain, of a live origin, its next, and sound.

        It does what the long way does. Where anything is otherwise it gives False, and nothing has happened.
        """
        batch, session = work.batch, work.session
        if work.void is not None or work.lamport is not None or work.forwards or not is_simple(batch):
            return False
        state = self.origins.writer(batch, session.owner)
        if state is None or batch.base != self.orderer.have.get(batch.origin, 0) + 1:
            return False
        if batch.base + batch.count - 1 > COUNTER_MAX:
            return False
        placed = self.appender.run([batch], state, session.source, self._now)
        if placed:
            self._note_run(placed, work.receipt)
        return bool(placed)

    def _run_sequenced(self, work: Sequenced) -> None:
        """The long way."""
        batch, have, forwards = work.batch, self.orderer.have.get(work.batch.origin, 0), work.forwards
        try:
            self._admit(work)
            if batch.last <= have:
                self._reporter.report(work.receipt, self._level(work), self._repeat(work))
                return
            if not forwards and (batch.base <= have or (batch.leaps and batch.previous < have)):
                raise overlap(batch, have)
        except Refused as refusal:
            self._refuse(work, refusal)
            return
        if forwards:
            self._cut(work, have)
        elif work.void is None:
            work.void = fault_of(batch) or self._orphans.refusal(work)
        self._order(entry_of(work, have))

    def _cut(self, work: Sequenced, have: int) -> None:
        batch, state = work.batch, self.origins.get(work.batch.origin)
        cut = cut_at(work, have)
        if cut:
            assert state is not None, "it was admitted"
            places = places_of(batch, state, self.log)
            work.receipt.cut_off += tuple(places[row] for row in range(cut))

    def _admit(self, work: Sequenced) -> None:
        batch = work.batch
        check_numbers(work)
        if work.forwards:
            admit(self.origins, work, self.orderer.have.get(batch.origin, 0), self._now)
            return
        repeat = batch.last <= self.orderer.have.get(batch.origin, 0)
        self.origins.require(batch, work.session.owner, repeat=repeat)
        if batch.is_control:
            raise Refused(
                ErrorCode.UNAUTHORIZED, "control rows are written by the service alone: send deltas"
            )

    def _repeat(self, work: Sequenced) -> Published:
        """The answer to dots below the watermark, whoever brings them. Raises Refused."""
        batch, state = work.batch, self.origins.get(work.batch.origin)
        assert state is not None
        if work.forwards:
            published = covered(batch, places_of(batch, state, self.log), self.log)
        else:
            published = answer_repeat(batch, state, self.log)
        self.appender.counters.duplicates += batch.count
        return published

    def _run_draft(self, draft: Draft | MatrixDraft) -> None:
        """A draft has no order of its own; it waits for its parents and behind drafts on its vectors."""
        refused = next((one for one in draft.after if one.done and one.state is not State.ACKNOWLEDGED), None)
        if refused is not None:
            self._refuse(draft, parent_refused(refused))
            return
        orphaned = self._orphans.refusal(draft)
        if orphaned is not None:
            self._refuse(draft, orphaned)
            self._refuse_orphans(draft.ids or (), orphaned, draft.source)
            self._append_released()
            return
        waits: set[Dot | bytes] = {Dot(entry.origin, entry.last) for entry in named_in(draft, Entry)}
        waits |= self._standing.before(draft)
        waits |= draft.causes
        if not waits:
            self._append_draft(draft, None)
            return
        self._order(entry_of_draft(draft, self._standing.draw(), waits))

    # --- order

    def _order(self, entry: Entry) -> None:
        if self.orderer.check(entry):
            self._append(entry)
        else:
            self._park(entry)
        self._append_released()

    def _append_released(self) -> None:
        while (entry := self.orderer.next_ready()) is not None:
            work: Work = entry.item  # type: ignore[assignment]
            if entry.verdict is Verdict.APPEND:
                self._append(entry)
            elif entry.verdict is Verdict.OVERLAP and not work.forwards:
                self._refuse(work, self.orderer.overlap(entry))
            else:
                self._run_sequenced(work)  # type: ignore[arg-type]  # answered as a repeat, or cut

    def _park(self, entry: Entry) -> None:
        work: Work = entry.item  # type: ignore[assignment]
        parked = self.orderer.parked(entry)
        if parked is not None:
            assert isinstance(work, Sequenced), "a draft has its place to itself"
            if (refusal := join(work, parked, self.orderer.have.get(entry.origin, 0))) is not None:
                self._refuse(work, refusal)
            return
        refusals = self.orderer.park(entry, self._now)
        if refusals:
            self._refuse_all(refusals)
            return
        if not isinstance(work, Sequenced):
            self._standing.add(work, entry)
        if not work.receipt.done:
            work.receipt.item = entry
            work.receipt.waits(State.PENDING, lambda: self._withdraw(entry))

    def _withdraw(self, entry: Entry) -> bool:
        """A pending delta whose caller gave up: a draft goes, a dot stays and becomes void in its turn.

        One that was forwarded goes: it comes again. It stays where another forwarder waits for it too.
        """
        work = entry.item
        if isinstance(work, Sequenced) and work.forwards:
            if work.repeats or not self.orderer.holds(entry):
                return False
            self._refuse_all(self.orderer.refuse(entry, withdrawn()))
            return True
        if not self.orderer.withdraw(entry, self._now):
            return False
        make_void(entry.item)
        self._append_released()
        return True

    # --- log and route

    def _append(self, entry: Entry) -> None:
        work = entry.item
        if not isinstance(work, Sequenced):
            if entry.void:
                self._leave(entry)
            else:
                self._append_draft(work, entry)  # type: ignore[arg-type]
            return
        try:
            placed, outcome = self.appender.sequenced(work, self._now)
        except Refused as refusal:
            self._refuse_all(self.orderer.refuse(entry, refusal))
            return
        accepted = isinstance(outcome, Published)
        self.orderer.delivered(entry.origin, entry.last, accepted_ids(work.batch) if accepted else ())
        self.settling.placed_run(placed)
        self._reporter.report(work.receipt, self._level(work), outcome, placed[-1].next_offset)
        if isinstance(outcome, Refused):
            self._refuse_orphans(work.batch.ids or (), outcome, work.session.source)

    def _append_draft(self, draft: Draft | MatrixDraft, entry: Entry | None) -> None:
        origin = self._own_origins[draft.priority]
        if draft.after and isinstance(draft, Draft):
            draft.name_receipts()
        try:
            logged, published = self.appender.draft(draft, origin, self._now)
        except Refused as refusal:
            self._refuse(draft, refusal)
            self._refuse_orphans(draft.ids or (), refusal, draft.source)
            if entry is None:
                self._append_released()
            elif refusal.retryable:
                self._refuse_all(self.orderer.refuse(entry, refusal))
            else:
                self._leave(entry)
            return
        if logged is not None:
            self.orderer.delivered(origin, logged.batch.last, logged.batch.ids or ())
            self.settling.placed(logged)
        self._reporter.report(draft.receipt, draft.ack_level, published)
        if entry is not None:
            self._leave(entry)
        elif logged is not None:
            self._append_released()

    def _leave(self, entry: Entry) -> None:
        """A draft is pending no longer: what stood behind it may go on."""
        self._standing.remove(entry.item, entry)  # type: ignore[arg-type]  # it stands for a draft
        self.orderer.delivered(entry.origin, entry.last)
        self.orderer.forget(entry.origin)

    def _refuse_orphans(self, ids: Iterable[object], refusal: Refused, source: Source) -> None:
        """Note the ids of refused deltas, and refuse what waits for them as its parents."""
        orphans = deque(self._orphans.note(ids, refusal, source))
        while orphans:
            entry, orphaned = orphans.popleft()
            work: Work = entry.item  # type: ignore[assignment]
            self.orderer.withdraw(entry, self._now)
            if isinstance(work, Sequenced):
                work.void = orphaned
                continue
            self._refuse(work, orphaned)
            orphans += self._orphans.note(work.ids or (), orphaned, work.source)

    # --- telling

    def _level(self, work: Sequenced) -> AckLevel:
        """How well a batch has to be kept before its sender is told; a forwarder sends it only once."""
        return self.log.level if work.forwards else work.batch.ack_level

    def _refuse(self, work: Work, refusal: Refused) -> None:
        self._reporter.refuse(work.receipt, refusal)

    def _refuse_all(self, refusals: Iterable[Refusal]) -> None:
        for entry, refusal in refusals:
            work: Work = entry.item  # type: ignore[assignment]
            self._refuse(work, refusal)
            if entry.origin < 0:
                self._standing.remove(work, entry)  # type: ignore[arg-type]  # it stands for a draft
