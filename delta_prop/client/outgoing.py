"""What a producer has on its way: dots, batches under way, what is sent again, and what each answer means.

Pure: no waiting, no bytes of connections, `now` is an argument. Its rule: each offer is told one outcome;
what is not acknowledged is sent again, in order, under the same dots and as the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop.advice import Advice
from delta_prop.client.answers import outcome_of, whole_place
from delta_prop.client.calls import CALLS_BYTES_MAX, CALLS_MAX, CALLS_S_MAX, Calls
from delta_prop.client.counts import Counts
from delta_prop.client.errors import Reconnect
from delta_prop.client.flight import Flight
from delta_prop.client.heads import Heads
from delta_prop.client.held import Held
from delta_prop.client.known_service import KnownService, granted_level
from delta_prop.client.lane import Lane
from delta_prop.client.offer import ROW_BYTES, Joined, Offer, Place
from delta_prop.client.probing import Probing
from delta_prop.client.refusing import former, late, of_row, unanswered
from delta_prop.client.splitting import around, singles
from delta_prop.published import Published
from delta_prop_wire.bounds import check_name
from delta_prop_wire.delta import AckLevel, Dot, Priority, make_origin, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import BatchFrame, OriginClaim
from delta_prop_wire.spec import COUNTER_MAX, VECTOR_ID_BYTES_MAX, VOIDING, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

    from delta_prop.client.lane import OpenFrame
    from delta_prop.waking import Waker
    from delta_prop_wire.delta import Delta
    from delta_prop_wire.frames import Ack, Backpressure, Nack, OriginGrant, Welcome

OPEN_OFFERS_MAX = 10_000
OPEN_BYTES_MAX = 64 * 1024 * 1024
BATCH_DELTAS_MAX = 1_000
BATCH_BYTES_MAX = 256 * 1024
FAULTS_MAX = 5
"""Connections in a row that may end with a checksum that does not fit, before it is taken for lasting."""
_WEIGHTS = (8, 4, 2, 1)
_DEALT_WITH = VOIDING | {ErrorCode.DOT_REUSED, ErrorCode.OUTCOME_UNKNOWN}
"""How a service refuses what it has dealt with before."""
_AGAIN_S_MAX = 60.0


class Outgoing:
    """The offers of one producer, from the call to the outcome."""

    def __init__(
        self,
        name: str,
        *,
        ack_level: AckLevel | None = None,
        partition: int = 0,
        log_id: bytes | None = None,
        priority: Priority = Priority.NORMAL,
        splits: bool = False,
    ) -> None:
        """`priority`: what is claimed first, before something is offered. `splits`: the service was told that
        a batch which is refused for a row is split here, so that each row keeps its number.
        """
        check_name("producer", name, VECTOR_ID_BYTES_MAX)
        self.name = name
        self.splits = splits
        self.failure: Refused | UsageError | None = None
        """Why nothing goes any more."""
        self.advice = Advice()
        producer_id = producer_id_of(name)
        self._lanes = tuple(
            Lane(make_origin(producer_id, one, partition), one, splits=splits) for one in Priority
        )
        self._first = self._lanes[priority]
        self._used: list[Lane] = []
        self._asked_level = ack_level
        self._level = AckLevel.MEMORY if ack_level is None else ack_level
        self._service = KnownService(log_id)
        self._origin_of = {lane.origin: lane for lane in self._lanes}
        self._heads = Heads()
        self._lost: dict[int, list[tuple[int, int]]] = {}
        self._held = Held()
        self._gathering: Calls | None = None
        self._flight = Flight()
        self._probing = Probing()
        self._standing: Refused | None = None
        self._faults = 0
        self.counts = Counts()

    # --- what is asked

    @property
    def open_offers(self) -> int:
        """Calls without an outcome."""
        return self._held.calls

    @property
    def open_bytes(self) -> int:
        """About how many bytes they take."""
        return self._held.bytes

    @property
    def waits_for(self) -> Refused | None:
        """The refusal that stands in the way of all that is open, or of some of it; None: there is none."""
        return self._probing.refusal or self._standing

    @property
    def log_id(self) -> bytes | None:
        """The log of the service that answered."""
        return self._service.log_id

    def watermark(self, priority: Priority) -> int:
        """The counter up to which the service had dealt with this producer's deltas when it said hello."""
        return self._lanes[priority].watermark

    # --- offers

    def check_open(self) -> None:
        """Raise why nothing goes any more."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    @property
    def has_room(self) -> bool:
        """Whether one more offer may come."""
        return self._held.calls < OPEN_OFFERS_MAX and self._held.bytes < OPEN_BYTES_MAX

    def check_room(self) -> None:
        """Raise Refused (QUEUE_FULL) where too much is without an outcome."""
        if not self.has_room:
            raise Refused(
                ErrorCode.QUEUE_FULL,
                f"producer {self.name!r} has {self._held.calls} of {OPEN_OFFERS_MAX} calls and "
                f"{self._held.bytes} of {OPEN_BYTES_MAX} bytes unacknowledged: await some receipts first",
                retry_after_ms=10,
                details={"depth": self._held.calls, "capacity": OPEN_OFFERS_MAX},
            )

    def offer(self, offer: Offer, now: float) -> None:
        """Take an offer in. Raises Refused, UsageError: then nothing was taken."""
        self.check_open()
        self.check_room()
        lane = self._lanes[offer.priority]
        self._check_counter(lane, offer.counter, offer.count)
        offer.at = now
        self._line_up(lane, offer)

    def call(
        self, delta: Delta, waker: Waker, now: float, tell: Callable[[Published | Refused], None]
    ) -> Calls | None:
        """The short way of `offer`, for one delta of which `is_simple` is true: it joins the calls before it.

        Returns them, of which it is the last one; None where only `offer` tells what is to be done. `tell` is
        called whenever some of them were told.
        """
        size = len(delta.operation.data)
        if size > CALLS_BYTES_MAX:
            return None
        calls, held = self._gathering, self._held
        if (
            calls is None
            or calls.priority is not delta.priority
            or calls.count >= CALLS_MAX
            or calls.size >= CALLS_BYTES_MAX
            or now - calls.at >= CALLS_S_MAX
        ):
            calls = self._gather(delta, now, tell)
        if calls is None or held.calls >= OPEN_OFFERS_MAX or held.bytes >= OPEN_BYTES_MAX:
            return None
        size += ROW_BYTES + 3 * len(delta.vector_id)
        calls.gathered.append(delta)
        calls.wakers.append(waker)
        calls.count += 1
        calls.size += size
        held.calls += 1
        held.bytes += size
        return calls

    def give_up(self, offer: Offer) -> bool:
        """Take an offer back: it has not happened and will not. False where the service may have it: should
        it be refused or get lost, it is not sent again.
        """
        gone = self._take_out(offer)
        offer.done = offer.done or gone
        return gone

    def give_up_call(self, calls: Calls, row: int) -> bool:
        """The same for one of the calls."""
        if calls.done:
            return False
        return self.give_up((calls.parts or self._separate(calls))[row])

    def expire(self, now: float, offers_s_max: float, calls_s_max: float | None = None) -> None:
        """Give up what has waited longer, and tell it so. `calls_s_max`: of calls, as long as offers."""
        for waited_for, limit_s in ((False, offers_s_max), (True, calls_s_max or offers_s_max)):
            while (oldest := self._held.oldest(waited_for=waited_for)) and now - oldest.at >= limit_s:
                if isinstance(oldest, Calls):
                    self._separate(oldest)
                    continue
                gone = self._take_out(oldest)
                self._settle(oldest, late(oldest, limit_s, gone=gone))

    def oldest_at(self, *, waited_for: bool = False) -> float | None:
        """When the oldest offer without an outcome was made; or the oldest calls."""
        oldest = self._held.oldest(waited_for=waited_for)
        return None if oldest is None else oldest.at

    # --- connections

    def claims(self) -> tuple[OriginClaim, ...]:
        """The origins for the hello that opens a connection."""
        lanes = self._used or [self._first]
        return self._claim(lanes)

    def further_claims(self) -> tuple[OriginClaim, ...]:
        """Origins that are written to and not claimed yet on this connection."""
        return self._claim([lane for lane in self._used if not lane.claimed])

    def welcomed(self, welcome: Welcome, *, same_address: bool) -> None:
        """A hello was answered: have all that is open sent again. Raises UsageError, Refused."""
        self._service.check(welcome, may_begin_anew=same_address)
        self._level = granted_level(self._asked_level, welcome.level)
        lanes, lost = [], False
        for grant in welcome.origins:
            lane = self._origin_of.get(grant.origin)
            if lane is not None:
                lost = self._grant(lane, grant) or lost
                lanes.append(lane)
        for lane in lanes:
            lane.line_up(lost=lost, is_lost=self._is_lost)
            for frame in reversed(lane.again.copy()):
                if not frame.doubt and not frame.void and any(offer.given_up for _, offer in frame.offers):
                    self._withdraw(frame)

    def disconnected(self) -> None:
        """The connection is gone, and with it the sequences of what was under way."""
        self._flight.clear()
        self._probing.disconnected()
        self.advice.forget()
        for lane in self._lanes:
            lane.claimed = lane.live = False
            for frame in lane.open.values():
                frame.doubt = frame.doubt or frame.sequence > 0
                frame.sequence = 0

    def fail(self, failure: Refused | UsageError) -> None:
        """Nothing goes any more: tell everyone."""
        if self.failure is not None:
            return
        self.failure, self._gathering = failure, None
        told = failure if isinstance(failure, Refused) else Refused(ErrorCode.BAD_REQUEST, str(failure))
        for calls in [one for one in self._held.all() if isinstance(one, Calls)]:
            self._separate(calls)
        for offer in self._held.all():
            self._settle(offer, unanswered(offer, told) if self._may_be_there(offer) else told)

    def close(self) -> None:
        """The producer ends."""
        told = f"producer {self.name!r} was closed before this was acknowledged, and it has not happened"
        self.fail(Refused(ErrorCode.SHUTTING_DOWN, told))

    # --- sending

    def next_frame(self, now: float) -> BatchFrame | None:
        """What to send next, numbered; None where nothing may go now. Ask only while credits are open."""
        frame = self.next_open(now)
        return None if frame is None else BatchFrame(frame.sequence, frame.batch, ack_wanted=True)

    def next_open(self, now: float) -> OpenFrame | None:
        """The same, with what is known of it here."""
        if self.failure is not None or self.advice.wait_s(now) > 0 or self._probing.wait_s(now) > 0:
            return None
        for lane in self._probing.choose(self._in_turn()):
            frame = self._next_of(lane, now)
            if frame is not None:
                return self._send(lane, frame, now)
        return None

    def wait_s(self, now: float) -> float | None:
        """When it is worth asking `next_frame` again; None where only an answer or an offer changes that."""
        if not any(lane.busy for lane in self._used):
            return None
        waits = [max(lane.again_at - now, 0.0) for lane in self._used if lane.again and lane.live]
        waits += [0.0 for lane in self._used if lane.live and lane.waiting and not lane.again]
        held_s = max(self.advice.wait_s(now), self._probing.wait_s(now))
        if held_s > 0:
            return held_s
        return min((one for one in waits if one > 0), default=None)

    # --- answers

    def acknowledged(self, ack: Ack) -> bool:
        """Take in what an Ack says of sequences; whether some outcome was told."""
        told_some = False
        for frame in self._flight.answered(ack):
            told_some = True
            self._standing = None
            self._probing.answered(frame)
            frame.lane.backoff.reset()
            self._acknowledged(frame)
        if told_some:
            self._faults = 0
        return told_some

    def refused(self, nack: Nack, now: float, chance: float = 0.0) -> None:
        """Take in the refusal of a batch, or of the connection. Raises Reconnect, Refused (it is the end)."""
        refusal = nack.refusal()
        if nack.correlation_id is not None or nack.is_about_connection:
            self._not_served(refusal)
        frame = self._flight.take(nack.sequence)
        if frame is not None:
            self._frame_refused(frame, refusal, now, chance)

    def pressed(self, advice: Backpressure, now: float) -> None:
        """Follow what the service advises."""
        self.advice.take(advice, now)

    # --- offers, inside

    @staticmethod
    def _check_counter(lane: Lane, counter: int | None, count: int) -> None:
        if lane.used and (counter is None) != (lane.numbered is None):
            raise UsageError(
                f"priority {lane.priority.name.lower()}: either the caller numbers all of its deltas, or none"
            )
        if counter is not None and not (lane.numbered or 0) < counter <= COUNTER_MAX - count + 1:
            raise UsageError(
                f"counter {counter}: within a priority they rise, and {lane.numbered or 0} was given"
            )
        lane.numbered = None if counter is None else counter + count - 1

    def _gather(self, delta: Delta, now: float, tell: Callable[[Published | Refused], None]) -> Calls | None:
        """What this call and those behind it may join, until it is cut or something stands behind it."""
        lane = self._lanes[delta.priority]
        if self.failure is not None or not self.has_room or not self._heads.idle(lane, self._used):
            return None
        calls = Calls(delta.priority, now, tell)
        self._line_up(lane, calls)
        self._gathering = calls
        return calls

    def _line_up(self, lane: Lane, offer: Offer) -> None:
        self._gathering = None
        offer.place = Place(lane.origin)
        if self._heads.begins(offer, self._used):  # what was called may be named one by one from now on
            for one in self._held.all():
                if isinstance(one, Calls):
                    self._separate(one)
        self._heads.note(offer, self._used)
        if lane not in self._used:
            self._used.append(lane)
        if not lane.busy:  # it takes no more than its share for having rested
            lane.turn = max(lane.turn, min((one.turn for one in self._used if one.busy), default=0.0))
        lane.waiting.append(offer)
        lane.used = True
        self._held.add(offer)

    def _separate(self, calls: Calls) -> list[Offer]:
        """The long way: each call as an offer of its own, where they stood together."""
        self._gathering = None
        parts = calls.split()
        if calls.frame is None:
            self._lanes[calls.priority].replace(calls, parts)
        else:
            calls.frame.replace(calls, parts)
        self._held.replace(calls, parts)
        return parts

    def _separate_all(self, frame: OpenFrame) -> None:
        for _, offer in list(frame.offers):
            if isinstance(offer, Calls):
                self._separate(offer)

    def _take_out(self, offer: Offer) -> bool:
        if offer not in self._held:
            return False
        offer.given_up = True
        frame = offer.frame
        if frame is None:
            self._lanes[offer.priority].waiting.remove(offer)
            offer.place.gone = True
        elif self._may_be_there(offer):
            return False
        else:
            self._withdraw(frame)
        self._held.remove(offer)
        return True

    @staticmethod
    def _may_be_there(offer: Offer) -> bool:
        """True if the service may have it, under a dot of which no outcome is known."""
        frame = offer.frame
        return frame is not None and not frame.void and (frame.sequence > 0 or frame.doubt)

    def _settle(self, offer: Offer, outcome: Published | Refused) -> None:
        """Tell an offer its outcome, unless it has one."""
        self._held.remove(offer)
        if offer.done:
            return
        if isinstance(outcome, Published):
            self.counts.acknowledged += offer.count
        else:
            self.counts.refused += offer.count
        offer.settle(outcome)

    # --- connections, inside

    def _claim(self, lanes: Sequence[Lane]) -> tuple[OriginClaim, ...]:
        for lane in lanes:
            lane.claimed = True
        return tuple(OriginClaim(lane.origin, lane.epoch) for lane in lanes)

    def _grant(self, lane: Lane, grant: OriginGrant) -> bool:
        after, until = lane.granted(grant.epoch, grant.watermark)
        if until <= after:
            return False
        self._lost.setdefault(lane.origin, []).append((after, until))
        self.counts.lost += until - after
        return True

    def _is_lost(self, dot: Dot) -> bool:
        return any(after < dot.counter <= until for after, until in self._lost.get(dot.origin, ()))

    def _not_served(self, refusal: Refused) -> NoReturn:
        """A hello, or the whole connection, was refused."""
        if refusal.code is ErrorCode.CHECKSUM:
            self._faults += 1
            if self._faults < FAULTS_MAX:
                raise Reconnect(0.0, refusal)
        elif refusal.retryable:
            raise Reconnect((refusal.retry_after_ms or 0) / 1000, refusal)
        raise refusal

    # --- sending, inside

    def _in_turn(self) -> Iterator[Lane]:
        """Lanes with something to send; the one that had least of its share first."""
        lanes = [lane for lane in self._used if lane.live and lane.busy]
        return iter(lanes if len(lanes) < 2 else sorted(lanes, key=_turn))

    def _next_of(self, lane: Lane, now: float) -> OpenFrame | None:
        if lane.again:
            return lane.again.pop(0) if now >= lane.again_at else None
        self._gathering = None
        while True:
            frame = lane.cut(
                level=self._level,
                deltas_max=BATCH_DELTAS_MAX,
                bytes_max=BATCH_BYTES_MAX,
                is_lost=self._is_lost,
            )
            if frame is not None or not lane.unfit:
                return frame
            for offer, refusal in lane.unfit:
                offer.place.gone = True
                self._settle(offer, refusal)
            lane.unfit.clear()

    def _send(self, lane: Lane, frame: OpenFrame, now: float) -> OpenFrame:
        count = frame.batch.count
        self._flight.add(frame)
        self._probing.sent(frame, now)
        self.advice.spend(count, now)
        lane.turn += count / _WEIGHTS[lane.priority]
        if frame.sent == 1:
            frame.number = self.counts.batches
            self.counts.batches += 1
            self.counts.deltas += count
        elif frame.sent == 2:
            self.counts.resent += 1
        return frame

    # --- answers, inside

    def _acknowledged(self, frame: OpenFrame) -> None:
        """Tell what has its place. Calls go the short way where all of them were told as one."""
        frame.lane.done(frame)
        whole = whole_place(frame)
        if whole is None:
            self._separate_all(frame)
        for row, offer in frame.offers:
            if whole is not None and isinstance(offer, Calls):
                self._held.remove(offer)
                self.counts.acknowledged += offer.count
                offer.acknowledge(whole + row, frame.batch.dot(row), frame.batch.ack_level)
            else:
                self._settle(offer, outcome_of(frame, row, offer))

    def _frame_refused(self, frame: OpenFrame, refusal: Refused, now: float, chance: float) -> None:
        self._separate_all(frame)
        self._probing.refused(frame, refusal)
        code = refusal.code
        parts = self._cut(frame, refusal) if code is ErrorCode.OVERLAP and not frame.question else ()
        if parts:
            for part in parts:
                frame.lane.refused(part, now)
        elif refusal.retryable or (code is ErrorCode.OUTCOME_UNKNOWN and refusal.retry_after_ms is not None):
            self._again(frame, refusal, now, chance)
        elif code in _DEALT_WITH and (frame.void or frame.question or code is ErrorCode.OUTCOME_UNKNOWN):
            self._answered(frame, refusal)
        elif code is ErrorCode.UNKNOWN_ORIGIN and not frame.unknown:
            frame.unknown = True
            raise Reconnect()  # a new hello tells
        elif refusal.voids and self.splits and frame.batch.count > 1 and not frame.question:
            for part in around(frame, refusal.row):
                frame.lane.refused(part, now)
        elif refusal.voids:
            self._void(frame, refusal)
        else:
            frame.sequence, frame.doubt = 0, False  # what this refuses has not happened
            raise refusal

    def _again(self, frame: OpenFrame, refusal: Refused, now: float, chance: float) -> None:
        lane, batch = frame.lane, frame.batch
        self._standing = refusal
        for _, offer in frame.offers:
            offer.refusal = refusal
        first = frame is next(iter(lane.open.values()))
        if refusal.code is ErrorCode.DEP_TIMEOUT and first and not batch.clock and not batch.parents:
            raise Reconnect(0.0, refusal)  # it waits for what is dealt with: hello tells what is there
        wait_s = lane.backoff.next_s(chance)
        if (
            self.splits and refusal.code is ErrorCode.DEP_TIMEOUT
        ):  # it goes behind the parts of what was split
            wait_s = 0.001
        elif refusal.retry_after_ms is not None:
            wait_s = max(refusal.retry_after_ms / 1000, 0.001)
        lane.refused(frame, now + min(wait_s, _AGAIN_S_MAX))
        if not frame.void and any(offer.given_up for _, offer in frame.offers):
            self._withdraw(frame)

    def _answered(self, frame: OpenFrame, refusal: Refused) -> None:
        """Tell what became of dots that were dealt with before."""
        frame.lane.done(frame)
        frame.told.clear()
        if frame.question and refusal.code is ErrorCode.DOT_REUSED:
            refusal = former(refusal)
        for row, offer in frame.offers:
            unknown = refusal.code is ErrorCode.OUTCOME_UNKNOWN
            self._settle(offer, outcome_of(frame, row, offer) if unknown else refusal)

    def _cut(self, frame: OpenFrame, refusal: Refused) -> Sequence[OpenFrame]:
        """Cut a batch at the watermark that the refusal names: the service has the rows before, and tells
        where when they are sent again by themselves. Nothing where there is nothing to cut.
        """
        watermark, batch = refusal.details.get("watermark"), frame.batch
        if not isinstance(watermark, int) or not batch.base <= watermark < batch.last:
            return ()
        rows = sum(batch.counter(row) <= watermark for row in range(batch.count))
        for row, offer in frame.offers:
            if row < rows < row + offer.count:
                self._halve(frame, offer, rows - row)
                break
        parts = frame.cut(rows)
        if parts[0].batch.last <= frame.lane.known:
            parts[0].ask()
        frame.lane.exchange(frame, parts)
        return parts

    def _halve(self, frame: OpenFrame, offer: Offer, rows: int) -> None:
        """Let two offers stand for one, of its first rows and of the others. It is told both as one."""
        joined = Joined(offer)
        parts, last = [], offer.place.counter
        for number, (count, counter) in enumerate(
            ((rows, last - offer.count + rows), (offer.count - rows, last))
        ):
            part = Offer(offer.priority, (), joined.tell(number))
            part.count, part.size = count, offer.size * count // offer.count
            part.alone, part.at, part.has_ids = True, offer.at, offer.has_ids
            part.place = Place(offer.place.origin)
            part.place.counter = counter
            part.given_up = offer.given_up
            parts.append(part)
        parts[1].place = offer.place
        self._held.replace(offer, parts)
        at = next(place for place, one in enumerate(frame.offers) if one[1] is offer)
        row = frame.offers[at][0]
        frame.offers[at : at + 1] = [(row, parts[0]), (row + rows, parts[1])]

    def _void(self, frame: OpenFrame, refusal: Refused) -> None:
        """The dots are used up. Who is at fault is told; the others go on under new dots."""
        frame.lane.done(frame)
        offers = frame.offers
        by_itself = len(offers) > 1 and refusal.row is None  # nobody knows whose fault it is
        again = []
        for row, offer in offers:
            at = None if refusal.row is None else refusal.row - row
            guilty = not by_itself and (at is None or 0 <= at < offer.count)
            if offer.done:
                self._settle(offer, of_row(refusal, at))
            elif not guilty and not offer.given_up:
                self._take_back(frame, row, offer)
                offer.alone = offer.alone or by_itself
                again.append(offer)
            else:
                self._settle(offer, of_row(refusal, at))
        frame.lane.put_back(again)

    @staticmethod
    def _take_back(frame: OpenFrame, row: int, offer: Offer) -> None:
        """The deltas of an offer, out of the batch whose dots are void."""
        offer.deltas = [frame.batch.delta(one) for one in range(row, row + offer.count)]
        offer.columns, offer.counter = None, None
        offer.after = ()  # named in the rows by now

    def _withdraw(self, frame: OpenFrame) -> None:
        """Some of its offers were given up and it is not under way: make it void; the others get new dots, or
        keep theirs where their callers number them.
        """
        self._separate_all(frame)
        if self.splits and frame.batch.count > 1:
            frame.lane.again.remove(frame)
            for part in singles(frame):
                frame.lane.refused(part, frame.lane.again_at)
                if part.offers[0][1].given_up:
                    part.withdraw()
            return
        again = []
        for row, offer in frame.offers:
            if not offer.given_up:
                self._take_back(frame, row, offer)
                again.append(offer)
        frame.offers = [(row, offer) for row, offer in frame.offers if offer.given_up]
        if frame.question:
            frame.lane.done(frame)
            frame.lane.again.remove(frame)
        else:
            frame.withdraw()
        frame.lane.put_back(again)


def _turn(lane: Lane) -> float:
    return lane.turn
