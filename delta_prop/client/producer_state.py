"""The state of a producer: offers without dots, batches in flight, retries; and the handling of each answer.

Pure: no waiting, no connection bytes, `now` is an argument. Its rule: each offer gets one outcome; a batch
that is not acknowledged is resent, in order, with the same dots and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from delta_prop.calls.outcomes import PublishAck
from delta_prop.client.ack_ranges import contiguous_offset, outcome_of
from delta_prop.client.capacity_probe import CapacityProbe
from delta_prop.client.coalesced_calls import CALLS_BYTES_MAX, CALLS_MAX, CALLS_WINDOW_S, CoalescedCalls
from delta_prop.client.counts import Counts
from delta_prop.client.errors import Reconnect
from delta_prop.client.in_flight import InFlight
from delta_prop.client.offer import (
    ROW_OVERHEAD_BYTES,
    Offer,
    OutcomeJoiner,
    OutcomeListener,
    PartListener,
    PendingDot,
)
from delta_prop.client.refusals import dot_used_before, offer_unanswered, timed_out, with_row
from delta_prop.client.senders import Senders
from delta_prop.client.sequence_sender import SequenceSender, UnackedBatch
from delta_prop.client.service_identity import RequestedLevel, ServiceIdentity
from delta_prop.client.splitting import split_around, split_rows
from delta_prop.client.unacked_offers import UnackedOffers
from delta_prop.delivery.backpressure.advice import Advice
from delta_prop.producing.origin_sequence import IN_FLIGHT_BYTES_MAX, check_in_flight
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import Delta, Priority
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import Ack, Backpressure, BatchFrame, Nack, OriginClaim, Welcome
from delta_prop_wire.spec import COUNTER_MAX, FINAL, VECTOR_ID_BYTES_MAX, ErrorCode
from delta_prop_wire.stamp import DEFAULT_LOG, LogName

if TYPE_CHECKING:
    from delta_prop.platform.one_shot import OneShot

IN_FLIGHT_OFFERS_MAX = 10_000
BATCH_DELTAS_MAX = 1_000
BATCH_BYTES_MAX = 256 * 1024
FAULTS_MAX = 5
"""Connections in a row that may end with a wrong checksum before the fault counts as permanent."""
_WEIGHTS = (8, 4, 2, 1)  # by priority: shares of what is sent
_PROCESSED_CODES = FINAL | {ErrorCode.DOT_REUSED, ErrorCode.OUTCOME_UNKNOWN}
"""Codes of refusals for deltas that the service has processed before."""
_RETRY_WAIT_MAX_S = 60.0


class ProducerState:
    """The offers of one producer, from the call to the outcome."""

    def __init__(
        self,
        name: str,
        *,
        ack_level: RequestedLevel = None,
        log_id: bytes | None = None,
        priority: Priority = Priority.NORMAL,
        can_split: bool = False,
    ) -> None:
        """`priority`: the priority whose origin is claimed before something is offered. `can_split`: the
        hello announced that a batch refused for one row is split here, so that each row keeps its counter.
        """
        check_name("producer", name, VECTOR_ID_BYTES_MAX)
        self.name = name
        self.can_split = can_split
        self.failure: Refused | UsageError | None = None
        """The reason why nothing can be sent any more."""
        self.advice = Advice()
        self._senders = Senders(name, priority, can_split=can_split)
        self.bind(DEFAULT_LOG)
        self._service = ServiceIdentity(log_id, ack_level)
        self._unacked = UnackedOffers()
        self._open_calls: CoalescedCalls | None = None  # those that the next call may join
        self._in_flight = InFlight()
        self._probe = CapacityProbe()
        self._faults = 0
        self.counts = Counts()

    # --- state

    @property
    def log(self) -> LogName:
        """The partition that it writes to."""
        return self._senders.log

    @property
    def in_flight_offers(self) -> int:
        """The number of calls that have no outcome yet."""
        return self._unacked.calls

    @property
    def waits_for(self) -> Refused | None:
        """A refusal that blocks offers in flight; None: there is none."""
        return self._probe.refusal or self._probe.last_refusal

    @property
    def log_id(self) -> bytes | None:
        """The log of the service that answered."""
        return self._service.log_id

    def watermark(self, priority: Priority) -> int:
        """Return the counter up to which the service had processed this producer's deltas at the welcome."""
        return self._senders.all[priority].watermark

    # --- offers

    def check_open(self) -> None:
        """Raise the reason why nothing can be sent any more, if there is one."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    @property
    def has_capacity(self) -> bool:
        """True if one more offer may be taken."""
        return self._unacked.calls < IN_FLIGHT_OFFERS_MAX and self._unacked.bytes < IN_FLIGHT_BYTES_MAX

    def check_capacity(self) -> None:
        """Raise Refused (QUEUE_FULL) if too much has no outcome yet."""
        check_in_flight(
            self.name,
            "calls",
            count=self._unacked.calls,
            count_max=IN_FLIGHT_OFFERS_MAX,
            size=self._unacked.bytes,
            size_max=IN_FLIGHT_BYTES_MAX,
        )

    def offer(self, offer: Offer, now: float) -> None:
        """Add an offer. Raises Refused, UsageError: then nothing was added."""
        self.check_open()
        self.check_capacity()
        sender = self._senders.all[offer.priority]
        self._check_counter(sender, offer.counter, offer.count)
        offer.offered_at = now
        self._enqueue(sender, offer)

    def offer_call(
        self, delta: Delta, waker: OneShot, now: float, listener: OutcomeListener
    ) -> CoalescedCalls | None:
        """Add one delta for which `is_opaque_only` is true, coalesced with earlier calls: a fast `offer`.

        Returns the calls, of which it is the last one; None if only `offer` can take the delta. `listener` is
        notified whenever some of the calls have been.
        """
        size = len(delta.operation.data)
        if size > CALLS_BYTES_MAX:
            return None
        calls, unacked = self._open_calls, self._unacked
        if (
            calls is None
            or calls.priority is not delta.priority
            or calls.count >= CALLS_MAX
            or calls.size >= CALLS_BYTES_MAX
            or now - calls.offered_at >= CALLS_WINDOW_S
        ):
            calls = self._start_coalescing(delta, now, listener)
        if calls is None or unacked.calls >= IN_FLIGHT_OFFERS_MAX or unacked.bytes >= IN_FLIGHT_BYTES_MAX:
            return None
        size += ROW_OVERHEAD_BYTES + 3 * len(delta.vector_id)
        calls.pending_deltas.append(delta)
        calls.wakers.append(waker)
        calls.count += 1
        calls.size += size
        unacked.calls += 1
        unacked.bytes += size
        return calls

    def drop(self, offer: Offer) -> bool:
        """Withdraw an offer; return True if it is not in the log and never will be.

        Returns False if the service may have it: if it is then refused or lost, it is not resent.
        """
        is_removed = self._remove(offer)
        offer.done = offer.done or is_removed
        return is_removed

    def drop_call(self, calls: CoalescedCalls, row: int) -> bool:
        """Withdraw one of the coalesced calls, as `drop` does."""
        if calls.done:
            return False
        return self.drop((calls.parts or self._split_calls(calls))[row])

    def expire(self, now: float, offers_timeout_s: float, calls_timeout_s: float | None = None) -> None:
        """Drop and report the offers that timed out. `calls_timeout_s`: for awaited offers."""
        for awaited, limit_s in ((False, offers_timeout_s), (True, calls_timeout_s or offers_timeout_s)):
            while (oldest := self._unacked.oldest(awaited=awaited)) and now - oldest.offered_at >= limit_s:
                if isinstance(oldest, CoalescedCalls):
                    self._split_calls(oldest)
                    continue
                is_removed = self._remove(oldest)
                self._settle(oldest, timed_out(oldest, limit_s, withdrawn=is_removed))

    def oldest_at(self, *, awaited: bool = False) -> float | None:
        """Return the time of the oldest offer without an outcome: of an awaited one, or of the others."""
        oldest = self._unacked.oldest(awaited=awaited)
        return None if oldest is None else oldest.offered_at

    # --- connections

    def bind(self, log: LogName) -> None:
        """Write to this partition, instead of the default one. Call it before anything is sent."""
        self._senders.bind(log)

    def claim_origins(self) -> tuple[OriginClaim, ...]:
        """Return the origins for the hello that opens a connection."""
        return self._claim(self._senders.to_claim())

    def claim_new_origins(self) -> tuple[OriginClaim, ...]:
        """Return the origins that are written to and not claimed yet on this connection."""
        return self._claim([sender for sender in self._senders.used if not sender.is_claimed])

    def on_welcome(self, welcome: Welcome, *, same_address: bool) -> None:
        """Note that a hello was answered: resend all that is open. Raises UsageError, Refused."""
        self._service.check(welcome, may_change_log=same_address)
        self._service.grant_level(welcome)
        senders, lost_count = [], 0
        for grant in welcome.origins:
            sender = self._senders.by_origin(grant.origin)
            if sender is not None:
                lost_count += self._senders.apply_grant(sender, grant)
                senders.append(sender)
        self.counts.lost += lost_count
        for sender in senders:
            sender.requeue_all(lost=lost_count > 0, is_lost=self._senders.is_lost)
            for unacked in reversed(sender.retries.copy()):
                is_dropped = any(offer.is_dropped for _, offer in unacked.offers)
                if is_dropped and not unacked.is_maybe_stored and not unacked.is_withdrawn:
                    self._withdraw(unacked)

    def on_disconnect(self) -> None:
        """Note that the connection is lost, and with it the sequences of the batches in flight."""
        self._in_flight.clear()
        self._probe.on_disconnect()
        self.advice.clear()
        for sender in self._senders.all:
            sender.is_claimed = sender.is_granted = False
            for unacked in sender.unacked.values():
                unacked.is_maybe_stored = unacked.is_maybe_stored or unacked.sequence > 0
                unacked.sequence = 0

    def fail(self, failure: Refused | UsageError) -> None:
        """Fail every open offer: nothing can be sent any more."""
        if self.failure is not None:
            return
        self.failure, self._open_calls = failure, None
        refusal = failure if isinstance(failure, Refused) else Refused(ErrorCode.BAD_REQUEST, str(failure))
        for calls in [offer for offer in self._unacked.all() if isinstance(offer, CoalescedCalls)]:
            self._split_calls(calls)
        for offer in self._unacked.all():
            maybe_stored = self._is_maybe_stored(offer)
            self._settle(offer, offer_unanswered(offer, refusal) if maybe_stored else refusal)

    def close(self) -> None:
        """Close the producer: open offers fail."""
        text = f"producer {self.name!r} was closed before this was acknowledged, and it has not happened"
        self.fail(Refused(ErrorCode.SHUTTING_DOWN, text))

    # --- sending

    def next_frame(self, now: float) -> BatchFrame | None:
        """Return the next frame, with its sequence; None if none may be sent. Call only with open credit."""
        unacked = self.next_batch(now)
        return None if unacked is None else BatchFrame(unacked.sequence, unacked.batch, ack_wanted=True)

    def next_batch(self, now: float) -> UnackedBatch | None:
        """Return the next batch to send, None if there is none now, and note that it is sent."""
        if self.failure is not None or self.advice.wait_s(now) > 0 or self._probe.wait_s(now) > 0:
            return None
        for sender in self._probe.choose(self._senders.fair_order()):
            unacked = self._next_batch_of(sender, now)
            if unacked is not None:
                return self._send(sender, unacked, now)
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until `next_frame` may return a frame; None: not before an answer or offer."""
        if not any(sender.is_busy for sender in self._senders.used):
            return None
        senders = [sender for sender in self._senders.used if sender.is_granted]
        waits_s = [max(sender.retry_at - now, 0.0) for sender in senders if sender.retries]
        waits_s += [0.0 for sender in senders if sender.waiting and not sender.retries]
        held_s = max(self.advice.wait_s(now), self._probe.wait_s(now))
        if held_s > 0:
            return held_s
        return min((wait_s for wait_s in waits_s if wait_s > 0), default=None)

    # --- answers

    def on_ack(self, ack: Ack) -> bool:
        """Handle an Ack of sequences; return True if it brought an outcome."""
        has_outcome = False
        for unacked in self._in_flight.take_acked(ack):
            has_outcome = True
            self._probe.on_answered(unacked)
            unacked.sender.backoff.reset()
            self._settle_acked(unacked)
        if has_outcome:
            self._faults = 0
        return has_outcome

    def on_nack(self, nack: Nack, now: float, sample: float = 0.0) -> None:
        """Handle the refusal of a batch or connection. Raises Reconnect, Refused (if it is final)."""
        refusal = nack.refusal()
        if nack.correlation_id is not None or nack.is_about_connection:
            self._raise_refusal(refusal)
        unacked = self._in_flight.take(nack.sequence)
        if unacked is not None:
            self._on_batch_refused(unacked, refusal, now, sample)

    def on_backpressure(self, advice: Backpressure, now: float) -> None:
        """Follow the service's backpressure advice."""
        self.advice.update(advice, now)

    # --- offers, inside

    def _check_counter(self, sender: SequenceSender, counter: int | None, count: int) -> None:
        last = sender.last_numbered
        if counter is None and last is None:
            return
        if sender in self._senders.used and (counter is None) != (last is None):
            raise UsageError(
                f"priority {sender.priority.name.lower()}: some deltas have a counter, some none: number all "
                "of a priority's deltas, or none"
            )
        if counter is not None and not (last or 0) < counter <= COUNTER_MAX - count + 1:
            raise UsageError(
                f"counter {counter}: not above {last or 0}, the last one, or too large: give rising counters "
                "within a priority"
            )
        sender.last_numbered = None if counter is None else counter + count - 1

    def _start_coalescing(self, delta: Delta, now: float, listener: OutcomeListener) -> CoalescedCalls | None:
        """Return an offer that this call and later ones join until it is drawn or another offer comes."""
        sender = self._senders.all[delta.priority]
        is_untracked = self._senders.vector_order.stays_untracked(sender, self._senders.used)
        if self.failure is not None or not self.has_capacity or not is_untracked:
            return None
        calls = CoalescedCalls(delta.priority, now, listener)
        self._enqueue(sender, calls)
        self._open_calls = calls
        return calls

    def _enqueue(self, sender: SequenceSender, offer: Offer) -> None:
        self._open_calls = None
        offer.pending_dot = PendingDot(sender.origin)
        # From here on an offer may name each of the coalesced calls.
        if self._senders.vector_order.starts_tracking(offer, self._senders.used):
            for unacked in self._unacked.all():
                if isinstance(unacked, CoalescedCalls):
                    self._split_calls(unacked)
        self._senders.add(sender, offer)
        self._unacked.add(offer)

    def _split_calls(self, calls: CoalescedCalls) -> list[Offer]:
        """Make each call an offer of its own, in the position of the calls: the slow path."""
        self._open_calls = None
        parts = calls.split()
        if calls.unacked_batch is None:
            self._senders.all[calls.priority].replace_offer(calls, parts)
        else:
            calls.unacked_batch.replace_offer(calls, parts)
        self._unacked.replace(calls, parts)
        return parts

    def _split_all_calls(self, unacked: UnackedBatch) -> None:
        for _, offer in list(unacked.offers):
            if isinstance(offer, CoalescedCalls):
                self._split_calls(offer)

    def _remove(self, offer: Offer) -> bool:
        if offer not in self._unacked:
            return False
        offer.is_dropped = True
        unacked = offer.unacked_batch
        if unacked is None:
            self._senders.all[offer.priority].waiting.remove(offer)
            offer.pending_dot.is_removed = True
        elif self._is_maybe_stored(offer):
            return False
        else:
            self._withdraw(unacked)
        self._unacked.remove(offer)
        return True

    @staticmethod
    def _is_maybe_stored(offer: Offer) -> bool:
        """True if the service may have the offer, under a dot without a known outcome."""
        unacked = offer.unacked_batch
        return (
            unacked is not None
            and not unacked.is_withdrawn
            and (unacked.sequence > 0 or unacked.is_maybe_stored)
        )

    def _settle(self, offer: Offer, outcome: PublishAck | Refused) -> None:
        """Report an offer's outcome, unless it has one."""
        self._unacked.remove(offer)
        if offer.done:
            return
        if isinstance(outcome, PublishAck):
            self.counts.acknowledged += offer.count
        else:
            self.counts.refused += offer.count
        offer.settle(outcome)

    # --- connections, inside

    def _claim(self, senders: Sequence[SequenceSender]) -> tuple[OriginClaim, ...]:
        for sender in senders:
            sender.is_claimed = True
        return tuple(OriginClaim(sender.origin, sender.epoch, self.log.stream) for sender in senders)

    def _raise_refusal(self, refusal: Refused) -> NoReturn:
        """Raise the error for a refused hello or connection."""
        if refusal.code is ErrorCode.CHECKSUM:
            self._faults += 1
            if self._faults < FAULTS_MAX:
                raise Reconnect(0.0, refusal)
        elif refusal.retryable and refusal.code is not ErrorCode.UNKNOWN_STREAM:  # ids are never used again
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        raise refusal

    # --- sending, inside

    def _next_batch_of(self, sender: SequenceSender, now: float) -> UnackedBatch | None:
        if sender.retries:
            return sender.take_retry() if now >= sender.retry_at else None
        self._open_calls = None
        while True:
            unacked = sender.draw_batch(
                level=self._service.level,
                deltas_max=BATCH_DELTAS_MAX,
                bytes_max=BATCH_BYTES_MAX,
                is_lost=self._senders.is_lost,
            )
            if unacked is not None or not sender.unencodable:
                return unacked
            for offer, refusal in sender.unencodable:
                offer.pending_dot.is_removed = True
                self._settle(offer, refusal)
            sender.unencodable.clear()

    def _send(self, sender: SequenceSender, unacked: UnackedBatch, now: float) -> UnackedBatch:
        count = unacked.batch.count
        self._in_flight.add(unacked)
        self._probe.on_sent(unacked, now)
        self.advice.spend(count, now)
        sender.virtual_time += count / _WEIGHTS[sender.priority]
        if unacked.send_count == 1:
            unacked.send_order = self.counts.batches
            self.counts.batches += 1
            self.counts.deltas += count
        elif unacked.send_count == 2:
            self.counts.resent += 1
        return unacked

    # --- answers, inside

    def _settle_acked(self, unacked: UnackedBatch) -> None:
        """Settle the acknowledged offers. Coalesced calls stay together if one range covers all rows."""
        unacked.sender.remove(unacked)
        if contiguous_offset(unacked) is None:
            self._split_all_calls(unacked)
        for row, offer in unacked.offers:
            self._settle(offer, outcome_of(unacked, row, offer))

    def _on_batch_refused(self, unacked: UnackedBatch, refusal: Refused, now: float, sample: float) -> None:
        self._split_all_calls(unacked)
        self._probe.on_refused(unacked, refusal)
        code = refusal.code
        parts: Sequence[UnackedBatch] = ()
        if code is ErrorCode.OVERLAP and not unacked.is_outcome_query:
            parts = self._split_at_watermark(unacked, refusal)
        if parts:
            for part in parts:
                unacked.sender.schedule_retry(part, now)
        elif refusal.retryable or (code is ErrorCode.OUTCOME_UNKNOWN and refusal.retry_after_ms is not None):
            self._retry(unacked, refusal, now, sample)
        elif code in _PROCESSED_CODES and (
            unacked.is_withdrawn or unacked.is_outcome_query or code is ErrorCode.OUTCOME_UNKNOWN
        ):
            self._settle_processed(unacked, refusal)
        elif code is ErrorCode.UNKNOWN_ORIGIN and not unacked.is_origin_unknown:
            unacked.is_origin_unknown = True
            raise Reconnect()  # a new hello reports the origin's state
        elif refusal.is_final and self.can_split and unacked.batch.count > 1 and not unacked.is_outcome_query:
            for part in split_around(unacked, refusal.row):
                unacked.sender.schedule_retry(part, now)
        elif refusal.is_final:
            self._settle_final(unacked, refusal)
        else:
            unacked.sequence, unacked.is_maybe_stored = 0, False  # a refused batch is not in the log
            raise refusal

    def _retry(self, unacked: UnackedBatch, refusal: Refused, now: float, sample: float) -> None:
        sender, batch = unacked.sender, unacked.batch
        self._probe.last_refusal = refusal
        for _, offer in unacked.offers:
            offer.refusal = refusal
        is_first = unacked is next(iter(sender.unacked.values()))
        if refusal.code is ErrorCode.DEP_TIMEOUT and is_first and not batch.clock and not batch.parents:
            raise Reconnect(0.0, refusal)  # it follows processed deltas only: a hello reports which exist
        wait_s = sender.backoff.next_s(sample)
        if self.can_split and refusal.code is ErrorCode.DEP_TIMEOUT:  # a part waits for the other parts
            wait_s = 0.001
        elif refusal.retry_after_ms is not None:
            wait_s = max(refusal.retry_after_ms / 1000, 0.001)
        sender.schedule_retry(unacked, now + min(wait_s, _RETRY_WAIT_MAX_S))
        if not unacked.is_withdrawn and any(offer.is_dropped for _, offer in unacked.offers):
            self._withdraw(unacked)

    def _settle_processed(self, unacked: UnackedBatch, refusal: Refused) -> None:
        """Report the outcome of dots that were processed before."""
        unacked.sender.remove(unacked)
        unacked.acked_ranges.clear()
        if unacked.is_outcome_query and refusal.code is ErrorCode.DOT_REUSED:
            refusal = dot_used_before(refusal)
        for row, offer in unacked.offers:
            unknown = refusal.code is ErrorCode.OUTCOME_UNKNOWN
            self._settle(offer, outcome_of(unacked, row, offer) if unknown else refusal)

    def _split_at_watermark(self, unacked: UnackedBatch, refusal: Refused) -> Sequence[UnackedBatch]:
        """Split a batch at the watermark that the refusal names; return the parts, if any.

        The service has the rows before it, and acknowledges them with offsets when they are resent apart.
        """
        watermark, batch = refusal.details.get("watermark"), unacked.batch
        if not isinstance(watermark, int) or not batch.base <= watermark < batch.last:
            return ()
        rows = sum(batch.counter(row) <= watermark for row in range(batch.count))
        for row, offer in unacked.offers:
            if row < rows < row + offer.count:
                self._split_offer(unacked, offer, rows - row)
                break
        parts = unacked.split_at(rows)
        if parts[0].batch.last <= unacked.sender.former_watermark:
            parts[0].make_outcome_query()
        unacked.sender.replace_batch(unacked, parts)
        return parts

    def _split_offer(self, unacked: UnackedBatch, offer: Offer, rows: int) -> None:
        """Replace an offer by two, of its first rows and of the others; join their outcomes."""
        joiner = OutcomeJoiner(offer)
        parts, last = [], offer.pending_dot.counter
        row_ranges = (rows, last - offer.count + rows), (offer.count - rows, last)
        for index, (count, counter) in enumerate(row_ranges):
            part = Offer(offer.priority, (), PartListener(joiner, index))
            part.count, part.size = count, offer.size * count // offer.count
            part.is_single, part.offered_at, part.has_ids = True, offer.offered_at, offer.has_ids
            part.pending_dot = PendingDot(offer.pending_dot.origin)
            part.pending_dot.counter = counter
            part.is_dropped = offer.is_dropped
            parts.append(part)
        parts[1].pending_dot = offer.pending_dot
        self._unacked.replace(offer, parts)
        position = next(index for index, entry in enumerate(unacked.offers) if entry[1] is offer)
        row = unacked.offers[position][0]
        unacked.offers[position : position + 1] = [(row, parts[0]), (row + rows, parts[1])]

    def _settle_final(self, unacked: UnackedBatch, refusal: Refused) -> None:
        """Report the final refusal to the offer at fault; requeue the others, whose dots are used up."""
        unacked.sender.remove(unacked)
        offers = unacked.offers
        must_isolate = len(offers) > 1 and refusal.row is None  # the refusal does not name the offer at fault
        requeued = []
        for row, offer in offers:
            refused_row = None if refusal.row is None else refusal.row - row
            at_fault = not must_isolate and (refused_row is None or 0 <= refused_row < offer.count)
            if not (offer.done or at_fault or offer.is_dropped):
                self._restore_deltas(unacked, row, offer)
                offer.is_single = offer.is_single or must_isolate
                requeued.append(offer)
            else:
                self._settle(offer, with_row(refusal, refused_row))
        unacked.sender.requeue_offers(requeued)

    @staticmethod
    def _restore_deltas(unacked: UnackedBatch, row: int, offer: Offer) -> None:
        """Restore the deltas of an offer from the batch, whose dots are used up."""
        offer.deltas = [unacked.batch.delta(index) for index in range(row, row + offer.count)]
        offer.columns, offer.counter = None, None
        offer.after = ()  # the rows name these parents by now

    def _withdraw(self, unacked: UnackedBatch) -> None:
        """Withdraw a batch that is not in flight, since some of its offers were dropped.

        The other offers get new dots, or keep the counters that their callers gave.
        """
        self._split_all_calls(unacked)
        if self.can_split and unacked.batch.count > 1:
            unacked.sender.retries.remove(unacked)
            for part in split_rows(unacked):
                unacked.sender.schedule_retry(part, unacked.sender.retry_at)
                if part.offers[0][1].is_dropped:
                    part.withdraw()
            return
        requeued = []
        for row, offer in unacked.offers:
            if not offer.is_dropped:
                self._restore_deltas(unacked, row, offer)
                requeued.append(offer)
        unacked.offers = [(row, offer) for row, offer in unacked.offers if offer.is_dropped]
        if unacked.is_outcome_query:
            unacked.sender.remove(unacked)
            unacked.sender.retries.remove(unacked)
        else:
            unacked.withdraw()
        unacked.sender.requeue_offers(requeued)
