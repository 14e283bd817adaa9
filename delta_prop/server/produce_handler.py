"""A connection's write path: offers its deltas to the pipeline; an `OutcomeCollector` reports their outcomes.

It never waits. The deltas that it holds are bounded by the connection's credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.partition.entries import find_fault
from delta_prop.partition.ingest.work import Draft, Sender, SequencedBatch
from delta_prop.server.partition_checks import check_frame, check_named, check_served
from delta_prop.server.permissions import ANONYMOUS, Permissions
from delta_prop_wire.batch import Batch
from delta_prop_wire.bounds import check_clock_order
from delta_prop_wire.delta import AckLevel, Delta, Dot, opaque, origin_partition
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frame_runs import FrameRun
from delta_prop_wire.frames import BatchFrame, DeltaFrame, OriginClaim, OriginGrant
from delta_prop_wire.layout import NAME_BYTES_MAX
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import LogName
from delta_prop_wire.validate import validate_delta

if TYPE_CHECKING:
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import Clock
    from delta_prop.server.limits import RateLimiter
    from delta_prop.server.outcome_collector import OutcomeCollector, PendingFrame
    from delta_prop.server.server_context import Counters
    from delta_prop.server.settings import ServerSettings

_EMPTY_OPERATION = opaque(b"")
_NO_DOT = Dot(0, 1)


class PublishChecks:
    """The rights and limits of one token."""

    def __init__(
        self, permissions: Permissions, rate_limiter: RateLimiter, clock: Clock, *, clock_entries_max: int
    ) -> None:
        self._permissions = permissions
        self._rate_limiter = rate_limiter
        self._is_limited = rate_limiter.has_limit(permissions)
        self._now = clock.now
        self._clock_entries_max = clock_entries_max
        # the namespaces and the kinds that the token allowed last
        self._last_allowed: tuple[tuple[str, ...] | None, int] = (None, 0)

    def allow_run(self, batches: Sequence[Batch]) -> bool:
        """Return True if the token allows all of these batches, and they need no check of a rate limit."""
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

    def check_batch(self, batch: Batch, *, is_forwarded: bool) -> None:
        """Check a batch; a forwarded one only for its rate. Raises Refused.

        The rate comes first: a batch out of scope is logged as a no-op record, which must be limited too.
        """
        self._rate_limiter.take(self._permissions, batch, self._now())
        if not is_forwarded:
            self._check_scope(batch.namespace_names, batch.kinds_mask, batch.clock_entry_count)

    def take_rate(self, delta: Delta) -> None:
        """Take a single delta from the rate limits. Raises Refused (RATE_LIMITED)."""
        self._rate_limiter.take_delta(self._permissions, delta, self._now())

    def check_delta(self, delta: Delta) -> None:
        """Check a single delta, except for its rate. Raises Refused."""
        self._check_scope((delta.namespace,), 1 << delta.operation.kind, len(delta.clock))

    def _check_scope(self, namespaces: Sequence[str], kinds_mask: int, clock_entry_count: int) -> None:
        self._permissions.check_publish(namespaces, kinds_mask)
        if clock_entry_count > self._clock_entries_max:
            raise InvalidDelta(
                "clock",
                f"{clock_entry_count} entries: name only what has changed, up to "
                f"{self._clock_entries_max} entries",
            )


class ProduceHandler:
    """The deltas of one connection, on their way into the pipeline."""

    is_throttled = True
    """True if no credit is returned while the pipeline's queue is nearly full."""

    def __init__(
        self,
        partition: Partition,
        settings: ServerSettings,
        sender: Sender,
        *,
        checks: PublishChecks,
        outcomes: OutcomeCollector,
        counters: Counters,
    ) -> None:
        self.outcomes = outcomes
        self.is_used = False
        """True once the client has claimed an origin or sent something, and so is a producer."""
        self._name = partition.name
        self._pipeline = partition.pipeline
        self._now = partition.world.clock.now
        self._level = partition.log.default_level
        self._lamport_jump_max = settings.lamport_jump_max
        self._sender = sender
        self._checks = checks
        self._counters = counters
        self._epochs: dict[int, int] = {}  # of the claimed origins

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
        if self._checks.allow_run(batches):
            offered_count = self._pipeline.offer_run(
                run, self._sender, partial(self._open_run, run), self._now()
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

    def _open_run(self, run: FrameRun, frame_count: int) -> PendingFrame:
        row_count, size = run.rows, run.size
        if frame_count < len(run.batches):
            row_count = sum([batch.count for batch in run.batches[:frame_count]])
            size = sum([batch.size for batch in run.batches[:frame_count]])
        return self.outcomes.open(
            run.sequence, row_count, size, is_ack_wanted=run.ack_wanted, batches=run.batches
        )

    def handle_batch(self, frame: BatchFrame, size: int) -> None:
        """Offer a batch. `size`: bytes of the received frame, which credit was charged for."""
        batch = frame.batch
        self.is_used = True
        entry = self.outcomes.open(frame.sequence, batch.count, size, is_ack_wanted=frame.ack_wanted)
        self._counters.deltas_in += batch.count
        final_refusal: Refused | None = None
        try:
            if not self.is_forwarder:
                check_frame(frame, self._name)
            self._checks.check_batch(batch, is_forwarded=self.is_forwarder)
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
        entry = self.outcomes.open(frame.sequence, 1, size, is_ack_wanted=frame.ack_wanted)
        self._counters.deltas_in += 1
        delta = replace(frame.delta, source=self._sender.source)
        level = self._level if frame.ack_level is None else frame.ack_level
        final_refusal: Refused | None = _find_unbatchable_fault(delta)
        batch = self._encode(delta if final_refusal is None else _make_filler(delta), level)
        try:
            if delta.dot is None:
                check_served(LogName(frame.stream, frame.partition or 0), self._name)
            else:
                partition = origin_partition(delta.dot.origin) if frame.partition is None else frame.partition
                check_named(LogName(frame.stream, partition), delta.dot.origin, self._name)
            self._checks.take_rate(delta)
            if delta.dot is not None:
                self._check_claimed(delta.dot.origin)
            self._checks.check_delta(delta)
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

    def close(self) -> None:
        """Stop reporting: the connection has closed. Offered deltas stay offered."""
        self.outcomes.close()

    # --- helpers

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

    def _lamport_jump_error(self, lamport: int) -> Refused | None:
        """Return the refusal of a forwarded Lamport number so far ahead that the numbers may run out."""
        highest, jump_max = self._pipeline.appender.lamport, self._lamport_jump_max
        if lamport <= highest + jump_max:
            return None
        return Refused(
            ErrorCode.BAD_REQUEST,
            f"Lamport number {lamport}: more than {jump_max} (lamport_jump_max) above {highest}, the "
            "highest here: check the service that assigned it",
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
