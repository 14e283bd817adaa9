"""A connection's way in: its deltas go down the chain, what became of them is gathered for the next Ack.

It never waits. What it may hold is bounded by the credit that the connection was given; a refusal is an
outcome like an acknowledgement, and each is told once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from delta_prop.entries import fault_of
from delta_prop.ingest.work import Draft, Sequenced, Session
from delta_prop.receipt import Receipt, State
from delta_prop.refusals import Remembered
from delta_prop.server.grants import ANONYMOUS, Unauthorized
from delta_prop.server.partitions import check_origin, check_partition
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

    from delta_prop.inside import Inside
    from delta_prop.receipt import Published
    from delta_prop.server.counters import Counters
    from delta_prop.server.grants import Grant
    from delta_prop.server.limits import Rates
    from delta_prop.server.settings import ServerSettings
    from delta_prop_wire.batch import Batch
    from delta_prop_wire.delta import AckLevel
    from delta_prop_wire.frames import DeltaFrame, OriginClaim
    from delta_prop_wire.runs import Run

RANGES_MAX = 1_000
"""Ranges told by one Ack; more go into the next."""
_NOTHING = opaque(b"")
_NO_DOT = Dot(0, 1)


class _Open(Receipt):
    """A frame, or a run of some, whose outcome is not told yet, which the chain settles. `batches`: of a
    run.
    """

    __slots__ = ("_split", "_tell", "batches", "count", "first", "last", "size", "wanted")

    def __init__(
        self,
        first: int,
        count: int,
        size: int,
        tell: Callable[[_Open], None],
        split: Callable[[_Open, Sequence[int]], list[_Open]],
        *,
        wanted: bool,
    ) -> None:
        super().__init__()
        self.first = first
        self.last = first + count - 1
        self.count = count
        self.size = size
        self.batches: Sequence[Batch] = ()
        self.wanted = wanted
        self._tell = tell
        self._split = split

    def split(self, counts: Sequence[int]) -> list[_Open]:
        """See `Receipt`; a run is split into frames."""
        return self._split(self, counts)

    def acknowledge(self, published: Published) -> None:
        """Settle with an acknowledgement; in a few steps where nobody but the connection is told."""
        if self._then is not None or self._event is not None:
            self._acknowledge(published)
            return
        self.state = State.ACKNOWLEDGED
        self._outcome = published
        self._withdraw = self.item = None
        self._tell(self)

    def _finish(self) -> None:
        super()._finish()
        self._tell(self)


class Intake:
    """What one connection sends. `ring` is called when there is something to tell."""

    def __init__(
        self,
        inside: Inside,
        settings: ServerSettings,
        grant: Grant,
        source: Source,
        *,
        rates: Rates,
        counters: Counters,
        ring: Callable[[], None],
        audit: Callable[[Refused], None],
        splits: bool = False,
    ) -> None:
        """`splits`: the client sends the rows of a refused batch again, in smaller ones. `audit` is told of
        each refusal but for those that tell what became of an earlier delta.
        """
        self._chain = inside.chain
        self._now = inside.now
        self._level = inside.log.level
        self._settings = settings
        self._grant = grant
        self._rates = rates
        self._bounded = rates.bounds(grant)
        self._allowed: tuple[tuple[str, ...] | None, int] = (None, 0)  # names and kinds that passed last
        self._counters = counters
        self._ring = ring
        self._audit = audit
        self._session = Session(owner=grant.name, source=source, splits=splits)
        self._epochs: dict[int, int] = {}
        self._open: deque[_Open] = deque()
        self._told_up_to = 0
        self._ranges: list[AckRange] = []
        self._nacks: deque[Nack] = deque()
        self._owed_deltas = self._owed_bytes = 0
        self._closed = False
        self.in_use = False
        """Whether the client has claimed an origin or sent something: one that only may is no producer."""
        self.has_news = False
        """Whether there is something to tell."""
        self.unauthorized = False
        """Whether something came that the token does not allow: once that is told the connection ends."""

    @property
    def open_frames(self) -> int:
        """How many frames wait for their outcome."""
        return len(self._open)

    @property
    def forwards(self) -> bool:
        """Whether what comes is another service's log."""
        return self._session.forwards

    def claim(self, claims: Sequence[OriginClaim]) -> list[OriginGrant]:
        """Let this connection write as these origins. Raises Refused."""
        self.in_use = True
        owner = self._session.owner
        grants = self._chain.claim(claims, owner, self._now(), bounded=owner != ANONYMOUS)
        for grant in grants:
            self._epochs[grant.origin] = grant.epoch
        return [OriginGrant(grant.origin, grant.epoch, grant.watermark) for grant in grants]

    # --- what comes

    def run(self, run: Run) -> None:
        """Send batches that came together down the chain: what can go the short way, then the rest."""
        self.in_use = True
        batches, done = run.batches, 0
        if self._may_run(batches):
            done = self._chain.offer_run(batches, self._session, partial(self._opened_run, run), self._now())
        if done == len(batches):
            self._counters.deltas_in += run.rows
            return
        rows = sum([batch.count for batch in batches[:done]])
        self._counters.deltas_in += rows
        for batch in batches[done:]:
            frame = BatchFrame(run.sequence + rows, batch, ack_wanted=run.ack_wanted)
            self.batch(frame, batch.size)
            rows += batch.count

    def _may_run(self, batches: Sequence[Batch]) -> bool:
        """Whether the token allows all of these, and sets no rate that each would have to be held to."""
        if self._bounded:
            return False
        names, kinds = self._allowed
        try:
            for batch in batches:
                if (
                    batch.namespace_names is not names or batch.kinds_mask != kinds
                ):  # often it is the same table
                    names, kinds = batch.namespace_names, batch.kinds_mask
                    self._grant.check_publish(names, kinds)
        except Refused:
            return False
        self._allowed = names, kinds
        return True

    def _opened_run(self, run: Run, frames: int) -> _Open:
        rows, size = run.rows, run.size
        if frames < len(run.batches):
            rows = sum([batch.count for batch in run.batches[:frames]])
            size = sum([batch.size for batch in run.batches[:frames]])
        entry = self._opened(run.sequence, rows, size, wanted=run.ack_wanted)
        entry.batches = run.batches
        return entry

    def _opened(self, first: int, count: int, size: int, *, wanted: bool) -> _Open:
        entry = _Open(first, count, size, self._settled, self._split, wanted=wanted)
        self._open.append(entry)
        return entry

    def _split(self, run: _Open, counts: Sequence[int]) -> list[_Open]:
        """Let each frame of a run stand for itself, as they turn out differently."""
        frames, first = [], run.first
        for batch, count in zip(run.batches, counts, strict=False):
            frames.append(_Open(first, count, batch.size, self._settled, self._split, wanted=run.wanted))
            first += count
        at = self._open.index(run)
        self._open = deque([*islice(self._open, at), *frames, *islice(self._open, at + 1, None)])
        return frames

    def batch(self, frame: BatchFrame, size: int) -> None:
        """Send a batch down the chain. `size`: of the frame as it came, and as its credit was charged."""
        batch = frame.batch
        self.in_use = True
        entry = self._opened(frame.sequence, batch.count, size, wanted=frame.ack_wanted)
        self._counters.deltas_in += batch.count
        void: Refused | None = None
        try:
            if frame.stamp is not None and not self.forwards:  # it names another place than its origin's
                check_origin(batch.origin, frame.stamp.stream, frame.stamp.partition)
            self._check(batch)
        except Refused as refused:
            if not refused.voids or self.forwards:  # another service accepted it: never void here
                entry.refuse(refused)
                return
            void = refused
        lamport = frame.stamp.lamport if frame.stamp is not None and self.forwards else None
        if lamport is not None and (leap := self._leap(lamport)) is not None:
            entry.refuse(leap)
            return
        self._chain.offer(Sequenced(batch, self._session, entry, lamport, void), self._now())

    def delta(self, frame: DeltaFrame, size: int) -> None:
        """Send one delta down the chain, as the batch of one row that it stands for: under its dot, or under
        one that it is given there.
        """
        self.in_use = True
        entry = self._opened(frame.sequence, 1, size, wanted=frame.ack_wanted)
        self._counters.deltas_in += 1
        delta = replace(frame.delta, source=self._session.source)
        level = self._level if frame.ack_level is None else frame.ack_level
        void: Refused | None = _fault_beyond_batches(delta)
        batch = self._encoded(delta if void is None else _filler(delta), level)
        try:
            if delta.dot is None:
                check_partition(frame.stream, frame.partition or 0)
            else:
                at = origin_partition(delta.dot.origin) if frame.partition is None else frame.partition
                check_origin(delta.dot.origin, frame.stream, at)
                self._check_claimed(delta.dot.origin)
            self._rates.take_delta(self._grant, delta, self._now())
            self._check_scope((delta.namespace,), 1 << delta.operation.kind, len(delta.clock))
        except Refused as refused:
            void = refused
        if void is not None and not void.voids:
            entry.refuse(void)
        elif delta.dot is not None:
            self._chain.offer(Sequenced(batch, self._session, entry, void=void), self._now())
        elif (refusal := void or fault_of(batch)) is not None:
            entry.refuse(refusal)
            self._chain.note_refused([delta.id], refusal)
        else:
            draft = Draft((delta,), entry, delta.priority, level, self._session.source)
            self._chain.offer(draft, self._now())

    def _check_claimed(self, origin: int) -> None:
        """Raise Refused (UNKNOWN_ORIGIN) unless it was claimed here, so that its epoch is known."""
        if origin not in self._epochs:
            raise Refused(
                ErrorCode.UNKNOWN_ORIGIN,
                f"origin {origin:016x} was not claimed on this connection: say hello for it",
                details={"origin": origin},
            )

    def _encoded(self, delta: Delta, level: AckLevel) -> Batch:
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

    # --- what may come

    def _check(self, batch: Batch) -> None:
        """What the token and the server's bounds say. Raises Refused. The rate comes first: what the scope
        refuses is logged as void, and that must not go faster than the rest.
        """
        self._rates.take(self._grant, batch, self._now())
        if not self.forwards:
            self._check_scope(batch.namespace_names, batch.kinds_mask, batch.clock_entries)

    def _check_scope(self, namespaces: Sequence[str], kinds_mask: int, clock_entries: int) -> None:
        self._grant.check_publish(namespaces, kinds_mask)
        if clock_entries > self._settings.clock_entries_max:
            raise InvalidDelta(
                "clock",
                f"has {clock_entries} entries, allowed are {self._settings.clock_entries_max}: name "
                "only what has changed",
            )

    def _leap(self, lamport: int) -> Refused | None:
        """Why a forwarded Lamport number is not believed: one far ahead would use up all there are."""
        here, ahead = self._chain.appender.lamport, self._settings.lamport_jump_max
        if lamport <= here + ahead:
            return None
        return Refused(
            ErrorCode.BAD_REQUEST,
            f"Lamport number {lamport} is more than {ahead} (lamport_jump_max) above {here}, the highest "
            "here: look at the service that gave it",
        )

    # --- what became of it

    def _settled(self, entry: _Open) -> None:
        acknowledged = entry.state is State.ACKNOWLEDGED
        refusal = None if acknowledged else entry.refusal()
        if refusal is not None:
            self._refused(entry, refusal)
        elif entry.wanted and acknowledged:
            self._add_ranges(entry, entry.result())
        self._owed_deltas += entry.count
        self._owed_bytes += entry.size
        self.has_news = True
        if not self._closed:
            self._ring()

    def _refused(self, entry: _Open, refusal: Refused) -> None:
        if refusal.code is ErrorCode.UNAUTHORIZED and not isinstance(refusal, Unauthorized):
            refusal = Unauthorized(refusal.message)  # the same words whatever the cause
        self.unauthorized = self.unauthorized or isinstance(refusal, Unauthorized)
        self._nacks.append(Nack.of_frame(entry.first, refusal))
        self._counters.nack(refusal.code)
        if not isinstance(refusal, Remembered):
            self._audit(refusal)

    def _add_ranges(self, entry: _Open, published: Published) -> None:
        first = entry.first + len(entry.cut_off)
        for sequence, offset in enumerate(entry.cut_off, start=entry.first):
            at = UNKNOWN_OFFSET if offset is None else offset
            self._add_range(AckRange(sequence, sequence, at, duplicate=True))
        for one in ranges_of(first, published):
            self._add_range(one)
        self._counters.repeated += len(entry.cut_off) + len(published.duplicates)

    def _add_range(self, one: AckRange) -> None:
        ranges = self._ranges
        if ranges:
            last = ranges[-1]
            goes_on = last.offset + one.first - last.first == one.offset and last.offset != UNKNOWN_OFFSET
            if last.last + 1 == one.first and goes_on and last.duplicate == one.duplicate:
                ranges[-1] = AckRange(last.first, one.last, last.offset, last.duplicate)
                return
        ranges.append(one)

    # --- what is told

    def answers(self, *, pressed: bool) -> Sequence[Ack | Nack]:
        """What there is to tell now, refusals first; `has_news` tells quicker that there is nothing.

        `pressed`: credit that is owed is kept back.
        """
        self.has_news = pressed
        told: list[Ack | Nack] = [*self._nacks]
        self._nacks.clear()
        before, moved = self._told_up_to, False
        while self._open and self._open[0].done:
            self._told_up_to = max(self._told_up_to, self._open.popleft().last)
            moved = True
        credit = None if pressed else self._take_owed()
        while moved or credit is not None or self._ranges:
            ranges, self._ranges = self._ranges[:RANGES_MAX], self._ranges[RANGES_MAX:]
            # What a sequence says is told without a range has no offset, so it comes with the last of them.
            told.append(
                Ack(before if self._ranges else self._told_up_to, ranges=tuple(ranges), credit=credit)
            )
            moved, credit = bool(self._ranges), None
        self._counters.acks += len(told)
        return told

    def _take_owed(self) -> Credit | None:
        if not (self._owed_deltas or self._owed_bytes):
            return None
        credit = Credit(self._owed_deltas, self._owed_bytes)
        self._owed_deltas = self._owed_bytes = 0
        return credit

    def close(self) -> None:
        """The connection has gone: nobody is told any more. What was offered stays offered."""
        self._closed = True


def ranges_of(first: int, published: Published) -> tuple[AckRange, ...]:
    """Return where the rows are of a batch whose sequences begin at `first`."""
    if not published.duplicates:
        assert published.offset is not None
        return (AckRange(first, first + published.count - 1, published.offset),)
    return tuple(
        AckRange(sequence, sequence, UNKNOWN_OFFSET if offset is None else offset, duplicate)
        for sequence, (offset, _, duplicate) in enumerate(published.places(), start=first)
    )


def _fault_beyond_batches(delta: Delta) -> InvalidDelta | None:
    """Why a delta is refused that no batch can say, since it has a name of more bytes than a table of names
    holds, or a clock that encoding would sort; None for all others, which are judged as batches.
    """
    longest = max(len(name.encode()) for name in (delta.namespace, *delta.topics))
    try:
        if longest > NAME_BYTES_MAX or [*delta.clock] != sorted(delta.clock):
            validate_delta(delta)
            check_clock_order(delta.clock)
    except InvalidDelta as fault:
        return fault if fault.field == "clock" else InvalidDelta(fault.field or "", fault.reason, row=0)
    return None


def _filler(delta: Delta) -> Delta:
    """The least that has the dot and the id of a delta."""
    return Delta(
        "refused", _NOTHING, id=delta.id, dot=delta.dot, timestamp=delta.timestamp, priority=delta.priority
    )
