"""A connection's write path: offers its deltas to the pipeline, and collects their outcomes for the next Ack.

It never waits. The deltas that it holds are bounded by the connection's credit; each outcome, acknowledgement
or refusal, is reported once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.calls.refusals import KnownOutcome
from delta_prop.partition.entries import find_fault
from delta_prop.partition.ingest.work import Draft, Sender, SequencedBatch
from delta_prop.server.partitions import check_origin, check_partition
from delta_prop.server.permissions import ANONYMOUS, Unauthorized
from delta_prop_wire.bounds import check_clock_order
from delta_prop_wire.delta import Delta, Dot, Source, opaque, origin_partition
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Ack, AckRange, BatchFrame, Credit, Nack, OriginGrant
from delta_prop_wire.layout import NAME_BYTES_MAX
from delta_prop_wire.spec import UNKNOWN_OFFSET, ErrorCode
from delta_prop_wire.validate import validate_delta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.api.internals import Internals
    from delta_prop.calls.receipt import PublishAck
    from delta_prop.server.counters import Counters
    from delta_prop.server.limits import RateLimiter
    from delta_prop.server.permissions import Permissions
    from delta_prop.server.settings import ServerSettings
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel
    from delta_prop_wire.frame_runs import FrameRun
    from delta_prop_wire.frames import DeltaFrame, OriginClaim

RANGES_MAX = 1_000
"""Maximum ranges in one Ack; more go into the next."""
_EMPTY_OPERATION = opaque(b"")
_NO_DOT = Dot(0, 1)


class _PendingFrame(Receipt):
    """A frame, or a run of frames, whose outcome is to be reported. `batches`: those of a run.

    `first`, `last`: the sequences of its deltas; `size`: bytes for which credit was charged.
    """

    __slots__ = ("_on_settled", "_split", "batches", "count", "first", "is_ack_wanted", "last", "size")

    def __init__(
        self,
        first: int,
        count: int,
        size: int,
        on_settled: Callable[[_PendingFrame], None],
        split: Callable[[_PendingFrame, Sequence[int]], list[_PendingFrame]],
        *,
        is_ack_wanted: bool,
    ) -> None:
        super().__init__()
        self.first = first
        self.last = first + count - 1
        self.count = count
        self.size = size
        self.batches: Sequence[Batch] = ()
        self.is_ack_wanted = is_ack_wanted
        self._on_settled = on_settled
        self._split = split

    def split(self, counts: Sequence[int]) -> list[_PendingFrame]:
        """See `Receipt`; a run is split into its frames."""
        return self._split(self, counts)

    def acknowledge(self, published: PublishAck) -> None:
        """Settle with an acknowledgement; fast if only the connection is notified."""
        if self._callbacks is not None or self._event is not None:
            self._acknowledge(published)
            return
        self.state = OfferState.ACKNOWLEDGED
        self._outcome = published
        self._withdraw = self.item = None
        self._on_settled(self)

    def _finish(self) -> None:
        super()._finish()
        self._on_settled(self)


class ProduceHandler:
    """The deltas of one connection. `notify` is called when there are answers."""

    def __init__(
        self,
        internals: Internals,
        settings: ServerSettings,
        permissions: Permissions,
        source: Source,
        *,
        rate_limiter: RateLimiter,
        counters: Counters,
        notify: Callable[[], None],
        audit: Callable[[Refused], None],
        can_split: bool = False,
    ) -> None:
        """`can_split`: the client resends the rows of a refused batch, in smaller ones.

        `audit` is called with each refusal, except those that report the outcome of an earlier delta.
        """
        self._pipeline = internals.partition.pipeline
        self._now = internals.partition.world.clock.now
        self._level = internals.partition.log.ack_level
        self._settings = settings
        self._permissions = permissions
        self._rate_limiter = rate_limiter
        self._is_limited = rate_limiter.has_limit(permissions)
        # the namespaces and the kinds that the token allowed last
        self._last_allowed: tuple[tuple[str, ...] | None, int] = (None, 0)
        self._counters = counters
        self._notify = notify
        self._audit = audit
        self._sender = Sender(owner=permissions.name, source=source, can_split=can_split)
        self._epochs: dict[int, int] = {}  # of the claimed origins
        self._pending: deque[_PendingFrame] = deque()
        self._acked_sequence = 0
        self._ranges: list[AckRange] = []
        self._nacks: deque[Nack] = deque()
        self._owed_deltas = self._owed_bytes = 0  # credit to return with the next Ack
        self._closed = False
        self.is_used = False
        """True once the client has claimed an origin or sent something, and so is a producer."""
        self.has_answers = False
        """True while there is something to report."""
        self.is_unauthorized = False
        """True once the token did not allow something: the connection ends once that is reported."""

    @property
    def pending_frames(self) -> int:
        """The number of frames without an outcome."""
        return len(self._pending)

    @property
    def is_forwarder(self) -> bool:
        """True if the deltas come from another service's log."""
        return self._sender.is_forwarder

    def claim(self, claims: Sequence[OriginClaim]) -> list[OriginGrant]:
        """Allow this connection to write as these origins. Raises Refused."""
        self.is_used = True
        owner = self._sender.owner
        grants = self._pipeline.claim(claims, owner, self._now(), bounded=owner != ANONYMOUS)
        for grant in grants:
            self._epochs[grant.origin] = grant.epoch
        return [OriginGrant(grant.origin, grant.epoch, grant.watermark) for grant in grants]

    # --- deltas

    def handle_run(self, run: FrameRun) -> None:
        """Offer batches that came together: as many as possible by the fast path, then the rest."""
        self.is_used = True
        batches, offered_count = run.batches, 0
        if self._is_run_allowed(batches):
            offered_count = self._pipeline.offer_run(
                batches, self._sender, partial(self._open_run, run), self._now()
            )
        if offered_count == len(batches):
            self._counters.deltas_in += run.rows
            return
        row_count = sum([batch.count for batch in batches[:offered_count]])
        self._counters.deltas_in += row_count
        for batch in batches[offered_count:]:
            frame = BatchFrame(run.sequence + row_count, batch, ack_wanted=run.ack_wanted)
            self.handle_batch(frame, batch.size)
            row_count += batch.count

    def _is_run_allowed(self, batches: Sequence[Batch]) -> bool:
        """True if the token allows all of these batches, and they need no check of a rate limit."""
        if self._is_limited:
            return False
        names, kinds = self._last_allowed
        try:
            for batch in batches:
                # Consecutive batches often share one table of names.
                if batch.namespace_names is not names or batch.kinds_mask != kinds:
                    names, kinds = batch.namespace_names, batch.kinds_mask
                    self._permissions.check_publish(names, kinds)
        except Refused:
            return False
        self._last_allowed = names, kinds
        return True

    def _open_run(self, run: FrameRun, frame_count: int) -> _PendingFrame:
        row_count, size = run.rows, run.size
        if frame_count < len(run.batches):
            row_count = sum([batch.count for batch in run.batches[:frame_count]])
            size = sum([batch.size for batch in run.batches[:frame_count]])
        entry = self._open_frame(run.sequence, row_count, size, is_ack_wanted=run.ack_wanted)
        entry.batches = run.batches
        return entry

    def _open_frame(self, first: int, count: int, size: int, *, is_ack_wanted: bool) -> _PendingFrame:
        entry = _PendingFrame(first, count, size, self._on_settled, self._split, is_ack_wanted=is_ack_wanted)
        self._pending.append(entry)
        return entry

    def _split(self, run: _PendingFrame, counts: Sequence[int]) -> list[_PendingFrame]:
        """Replace a run by its frames, as their outcomes differ."""
        frames, first = [], run.first
        for batch, count in zip(run.batches, counts, strict=False):
            frames.append(
                _PendingFrame(
                    first, count, batch.size, self._on_settled, self._split, is_ack_wanted=run.is_ack_wanted
                )
            )
            first += count
        index = self._pending.index(run)
        self._pending = deque(
            [*islice(self._pending, index), *frames, *islice(self._pending, index + 1, None)]
        )
        return frames

    def handle_batch(self, frame: BatchFrame, size: int) -> None:
        """Offer a batch. `size`: bytes of the received frame, which credit was charged for."""
        batch = frame.batch
        self.is_used = True
        entry = self._open_frame(frame.sequence, batch.count, size, is_ack_wanted=frame.ack_wanted)
        self._counters.deltas_in += batch.count
        final_refusal: Refused | None = None
        try:
            if frame.stamp is not None and not self.is_forwarder:  # the stamp may name a wrong partition
                check_origin(batch.origin, frame.stamp.stream, frame.stamp.partition)
            self._check(batch)
        except Refused as refused:
            # A forwarded batch must not become a no-op: another service has accepted it.
            if not refused.is_final or self.is_forwarder:
                entry.refuse(refused)
                return
            final_refusal = refused
        lamport = frame.stamp.lamport if frame.stamp is not None and self.is_forwarder else None
        if lamport is not None and (jump_error := self._lamport_jump_error(lamport)) is not None:
            entry.refuse(jump_error)
            return
        self._pipeline.offer(SequencedBatch(batch, self._sender, entry, lamport, final_refusal), self._now())

    def handle_delta(self, frame: DeltaFrame, size: int) -> None:
        """Offer one delta, as a batch of one row under its dot, or as a draft if it has no dot."""
        self.is_used = True
        entry = self._open_frame(frame.sequence, 1, size, is_ack_wanted=frame.ack_wanted)
        self._counters.deltas_in += 1
        delta = replace(frame.delta, source=self._sender.source)
        level = self._level if frame.ack_level is None else frame.ack_level
        final_refusal: Refused | None = _find_unbatchable_fault(delta)
        batch = self._encode(delta if final_refusal is None else _make_filler(delta), level)
        try:
            if delta.dot is None:
                check_partition(frame.stream, frame.partition or 0)
            else:
                partition = origin_partition(delta.dot.origin) if frame.partition is None else frame.partition
                check_origin(delta.dot.origin, frame.stream, partition)
            self._rate_limiter.take_delta(self._permissions, delta, self._now())
            if delta.dot is not None:
                self._check_claimed(delta.dot.origin)
            self._check_scope((delta.namespace,), 1 << delta.operation.kind, len(delta.clock))
        except Refused as refused:
            final_refusal = refused
        if final_refusal is not None and not final_refusal.is_final:
            entry.refuse(final_refusal)
        elif delta.dot is not None:
            self._pipeline.offer(
                SequencedBatch(batch, self._sender, entry, final_refusal=final_refusal), self._now()
            )
        elif (refusal := final_refusal or find_fault(batch)) is not None:
            entry.refuse(refusal)
            self._pipeline.note_refused([delta.id], refusal)
        else:
            draft = Draft((delta,), entry, delta.priority, level, self._sender.source)
            self._pipeline.offer(draft, self._now())

    def _check_claimed(self, origin: int) -> None:
        """Raise Refused (UNKNOWN_ORIGIN) unless the origin was claimed here, so that its epoch is known."""
        if origin not in self._epochs:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {origin:016x}: not claimed on this connection: send a hello that claims it",
                details={"origin": origin},
            )

    def _encode(self, delta: Delta, level: AckLevel) -> Batch:
        dot = delta.dot or _NO_DOT
        return encode_batch(
            [delta],
            origin=dot.origin,
            base=dot.counter,
            epoch=self._epochs.get(dot.origin, 0),
            clock=delta.clock,
            ack_level=level,
            priority=delta.priority,
            hybrid_time=delta.timestamp,
        )

    # --- checks

    def _check(self, batch: Batch) -> None:
        """Check a batch against the token and the server's limits. Raises Refused.

        The rate comes first: a batch out of scope is logged as a no-op record, which must be limited too.
        """
        self._rate_limiter.take(self._permissions, batch, self._now())
        if not self.is_forwarder:
            self._check_scope(batch.namespace_names, batch.kinds_mask, batch.clock_entry_count)

    def _check_scope(self, namespaces: Sequence[str], kinds_mask: int, clock_entry_count: int) -> None:
        self._permissions.check_publish(namespaces, kinds_mask)
        if clock_entry_count > self._settings.clock_entries_max:
            raise InvalidDelta(
                "clock",
                f"{clock_entry_count} entries: name only what has changed, up to "
                f"{self._settings.clock_entries_max} entries",
            )

    def _lamport_jump_error(self, lamport: int) -> Refused | None:
        """Return the refusal of a forwarded Lamport number so far ahead that the numbers may run out."""
        highest, jump_max = self._pipeline.appender.lamport, self._settings.lamport_jump_max
        if lamport <= highest + jump_max:
            return None
        return Refused(
            ErrorCode.BAD_REQUEST,
            f"Lamport number {lamport}: more than {jump_max} (lamport_jump_max) above {highest}, the "
            "highest here: check the service that assigned it",
        )

    # --- outcomes

    def _on_settled(self, entry: _PendingFrame) -> None:
        acknowledged = entry.state is OfferState.ACKNOWLEDGED
        refusal = None if acknowledged else entry.refusal()
        if refusal is not None:
            self._add_refusal(entry, refusal)
        elif entry.is_ack_wanted and acknowledged:
            self._add_ranges(entry, entry.result())
        self._owed_deltas += entry.count
        self._owed_bytes += entry.size
        self.has_answers = True
        if not self._closed:
            self._notify()

    def _add_refusal(self, entry: _PendingFrame, refusal: Refused) -> None:
        if refusal.code is ErrorCode.UNAUTHORIZED and not isinstance(refusal, Unauthorized):
            refusal = Unauthorized(refusal.message)  # the same text for every cause
        self.is_unauthorized = self.is_unauthorized or isinstance(refusal, Unauthorized)
        self._nacks.append(Nack.of_frame(entry.first, refusal))
        self._counters.count_nack(refusal.code)
        if not isinstance(refusal, KnownOutcome):
            self._audit(refusal)

    def _add_ranges(self, entry: _PendingFrame, published: PublishAck) -> None:
        first = entry.first + len(entry.sliced_offsets)  # after the rows that the log had before
        for sequence, offset in enumerate(entry.sliced_offsets, start=entry.first):
            ack_offset = UNKNOWN_OFFSET if offset is None else offset
            self._add_range(AckRange(sequence, sequence, ack_offset, duplicate=True))
        for ack_range in make_ack_ranges(first, published):
            self._add_range(ack_range)
        self._counters.duplicate_acks += len(entry.sliced_offsets) + len(published.duplicates)

    def _add_range(self, ack_range: AckRange) -> None:
        ranges = self._ranges
        if ranges:
            last = ranges[-1]
            is_contiguous = (
                last.offset + ack_range.first - last.first == ack_range.offset
                and last.offset != UNKNOWN_OFFSET
            )
            if last.last + 1 == ack_range.first and is_contiguous and last.duplicate == ack_range.duplicate:
                ranges[-1] = AckRange(last.first, ack_range.last, last.offset, last.duplicate)
                return
        ranges.append(ack_range)

    # --- answers

    def take_answers(self, *, throttled: bool) -> Sequence[Ack | Nack]:
        """Return all that is to be reported now, refusals first.

        Callers check `has_answers` before, which is faster. `throttled`: if True, no credit is returned yet.
        """
        self.has_answers = throttled
        answers: list[Ack | Nack] = [*self._nacks]
        self._nacks.clear()
        previously_acked, has_advanced = self._acked_sequence, False
        while self._pending and self._pending[0].done:
            self._acked_sequence = max(self._acked_sequence, self._pending.popleft().last)
            has_advanced = True
        credit = None if throttled else self._take_owed_credit()
        while has_advanced or credit is not None or self._ranges:
            ranges, self._ranges = self._ranges[:RANGES_MAX], self._ranges[RANGES_MAX:]
            # A sequence without a range has no offset, so Acks advance it only with the last ranges.
            answers.append(
                Ack(
                    previously_acked if self._ranges else self._acked_sequence,
                    ranges=tuple(ranges),
                    credit=credit,
                )
            )
            has_advanced, credit = bool(self._ranges), None
        self._counters.acks += len(answers)
        return answers

    def _take_owed_credit(self) -> Credit | None:
        if not (self._owed_deltas or self._owed_bytes):
            return None
        credit = Credit(self._owed_deltas, self._owed_bytes)
        self._owed_deltas = self._owed_bytes = 0
        return credit

    def close(self) -> None:
        """Stop notifying: the connection has closed. Offered deltas stay offered."""
        self._closed = True


def make_ack_ranges(first: int, published: PublishAck) -> tuple[AckRange, ...]:
    """Return the offsets of a batch's rows as ranges; its sequences begin at `first`."""
    if not published.duplicates:
        assert published.offset is not None
        return (AckRange(first, first + published.count - 1, published.offset),)
    return tuple(
        AckRange(sequence, sequence, UNKNOWN_OFFSET if offset is None else offset, duplicate)
        for sequence, (offset, _, duplicate) in enumerate(published.row_acks(), start=first)
    )


def _find_unbatchable_fault(delta: Delta) -> InvalidDelta | None:
    """Return the refusal of a delta that no batch can encode unchanged; None for other deltas.

    Such a delta has a name too long for the table of names, or a clock that encoding would sort. Other deltas
    are checked as batches.
    """
    longest = max(len(name.encode()) for name in (delta.namespace, *delta.topics))
    try:
        if longest > NAME_BYTES_MAX or [*delta.clock] != sorted(delta.clock):
            validate_delta(delta)
            check_clock_order(delta.clock)
    except InvalidDelta as fault:
        return fault if fault.field == "clock" else InvalidDelta(fault.field or "", fault.reason, row=0)
    return None


def _make_filler(delta: Delta) -> Delta:
    """Return a minimal delta with the dot and the id of another one."""
    return Delta(
        "refused",
        _EMPTY_OPERATION,
        id=delta.id,
        dot=delta.dot,
        timestamp=delta.timestamp,
        priority=delta.priority,
    )
