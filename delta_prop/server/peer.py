"""One connected client: its frames are read and handed on, what is to be told or delivered is written.

Whatever it sends can at worst end this connection. It has two tasks, one that reads and one that writes; what
it holds is bounded by its credit, its outlet, and what it leaves unread.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop.advice import Advice
from delta_prop.server.asking import Questions, welcomes
from delta_prop.server.endings import one_way, recovered, shutting_down, silent, too_slow
from delta_prop.server.grants import Unauthorized
from delta_prop.server.outbox import Outbox
from delta_prop.server.outlet import NO_SUBSCRIPTION, Outlet
from delta_prop.server.partitions import check_claims, check_partition, only_partition
from delta_prop.server.room import FREE_BYTES
from delta_prop.server.staging import StagingIntake, intake_for
from delta_prop_wire.codec import NEED_BYTES
from delta_prop_wire.connection import Connection
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import PeerError, Refused
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    Decide,
    DeltaFrame,
    Heartbeat,
    Hello,
    JobStatus,
    Level,
    Nack,
    OriginGrant,
    Subscribe,
    Subscription,
    Unsubscribe,
)
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state import Phase, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio.abc import TaskGroup

    from delta_prop.ports import Stream
    from delta_prop.server.grants import Grant
    from delta_prop.server.hot import Sending
    from delta_prop.server.hub import Hub
    from delta_prop.server.intake import Intake
    from delta_prop_wire.frames import Frame, Request, Response

logger = logging.getLogger("delta_prop.server")

_FINISH_S_MAX = 5.0
_TURN_S_MAX = 0.002
_PROGRESS_S = 1.0


class Peer:
    """A connection from the moment it is accepted. `run` serves it to its end."""

    def __init__(self, number: int, stream: Stream, hub: Hub) -> None:
        self.number = number
        self.address = stream.peer
        self.client: str | None = None
        self.grant: Grant | None = None
        self.intake: Intake | None = None
        self.outlet: Outlet | None = None
        self._source = Source.LOCAL  # as its first hello says
        self._stream = stream
        self._hub = hub
        self._tasks: TaskGroup  # while it runs
        self._chain = hub.inside.chain
        self._connection = Connection(Role.SERVER, payload_bytes_max=hub.settings.frame_bytes_max)
        self._held = self._connection.held
        self._outbox = Outbox(stream, self._connection, hub, self)
        self.ring = self._outbox.ring
        """There may be something to write."""
        self._draining = self._finishing = False
        self._drain_until = self._log_end = inf
        self._unanswered = 0  # requests whose answer waits for the disk
        self._questions = Questions(hub, self._respond, self._refuse_request)
        self._greeting: anyio.Event | None = None  # what follows the first hello waits for its answer
        self._since = self._heard_at = hub.now()
        self._frame_since: float | None = None  # a frame has begun to come and is not whole
        self._room_bytes = FREE_BYTES  # for the frame that is coming
        self._waits = False  # for more of that
        self._advice = Advice()  # of the client, for what is delivered
        self._echo_us: int | None = None
        self._beats = 0
        self._progress_told = (0, 0.0)
        self._warned = Level.OK
        self._rebuilt = 0  # of the chain whose watermarks the client was told
        self._leaving: deque[tuple[int, Unsubscribe]] = deque()  # once all below an offset is delivered
        self._scope = anyio.CancelScope()

    # --- life

    async def run(self) -> None:
        """Serve it until it ends, whoever ends it."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    tasks.start_soon(self._write_all)
                    await self._read_all()
                    self._finishing = True
                    self.ring()
                    tasks.cancel_scope.deadline = anyio.current_time() + _FINISH_S_MAX  # of the writer
        finally:
            reads = self._draining and self.outlet is not None  # and may still be reading what was written
            self._close_parts()
            await self._stream.aclose(self._drain_until - self._hub.now() if reads else 0.0)

    def _close_parts(self) -> None:
        if self.intake is not None:
            self.intake.close()
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None
        if self._room_bytes > FREE_BYTES:
            self._give_room_back()

    def end(self, nack: Nack | None = None) -> None:
        """Tell this last thing and end."""
        if nack is not None and not self._outbox.ending:
            self._tell(nack)
        self._outbox.ending = True
        self.ring()

    def break_off(self) -> None:
        """End it now."""
        if not self._scope.cancel_called:  # to cancel again takes as long as the first time
            self._scope.cancel()

    def drain(self, until: float, end: float = inf) -> None:
        """Take nothing more in; end once what was taken is answered, and all below `end` is delivered."""
        self._draining, self._drain_until, self._log_end = True, until, end
        self.ring()

    @property
    def waits_for_outcomes(self) -> bool:
        """True while something that was taken in may still get its place in the log."""
        return self.intake is not None and self.intake.open_frames > 0

    def finished(self) -> bool:
        """Whether nothing is to come that the client waits for: asked when there is nothing to write."""
        if self._unanswered or self._questions.waiting or self.waits_for_outcomes:
            return False
        if self._draining and not self._finishing:
            outlet = self.outlet
            if outlet is None or outlet.standing_by or outlet.dealt_with >= self._log_end:
                self.end(Nack.of(0, shutting_down()))  # which is to be written first
            return False
        return self._finishing

    # --- reading

    async def _read_all(self) -> None:
        connection, stream, hub = self._connection, self._stream, self._hub
        try:
            while not self._outbox.ending:
                # Room is for what really comes, not for what a header announces.
                if connection.buffered_bytes >= self._room_bytes < connection.under_way_bytes:
                    await self._make_room(connection.under_way_bytes)
                if not await stream.receive_each(connection.buffer, self._came):
                    return
                while not self._take_frames():
                    await (anyio.lowlevel.checkpoint() if self._greeting is None else self._greeting.wait())
        except ConnectionError:
            self.break_off()
        except PeerError as error:
            hub.counters.nack(error.code)
            self._end_for(error)

    def _came(self, count: int) -> bool:
        """Whether to go on: all that came is taken, and there is room for more of it."""
        connection, held = self._connection, self._held
        self._hub.counters.bytes_in += count
        connection.received(count)
        return (
            self._take_frames()
            and not self._outbox.ending
            and not (held.end - held.start >= self._room_bytes < connection.under_way_bytes)
        )

    def _take_frames(self) -> bool:
        """Frames that came whole, as many as may be in one go. Whether that was all."""
        if not self._take_some():
            return False
        if self._room_bytes > FREE_BYTES and not self._connection.under_way_bytes:
            self._give_room_back()
        if self._frame_since is None and self._held.start < self._held.end:
            self._frame_since = self._hub.now()
        return True

    def _take_some(self) -> bool:
        """Frames that came whole, in one turn: what follows is done at its end. Whether that was all."""
        hub, held = self._hub, self._held
        began = hub.now()
        with hub.inside.turn:
            while held.start < held.end:
                if self._greeting is not None:
                    return False
                if not (self._take_run() or self._take_one()):
                    break
                self._frame_since = None
                now = self._heard_at = hub.now()
                if self._outbox.ending:
                    return True
                if now - began > _TURN_S_MAX:
                    return False
        return True

    def _take_run(self) -> bool:
        """Frames that can go the short way together, if such come next."""
        intake = self.intake
        if intake is None or self._draining or self._rebuilt != self._chain.rebuilt:
            return False
        run = self._connection.next_run()
        if run is None:
            return False
        self._hub.counters.frames_in += len(run.batches)
        intake.run(run)
        return True

    def _take_one(self) -> bool:
        """The next whole frame, if there is one."""
        frame = self._connection.next_event()
        if frame is NEED_BYTES:
            return False
        self._hub.counters.frames_in += 1
        self._take(frame)
        return True

    async def _make_room(self, size: int) -> None:
        """Read on once there is room for a large frame; the time until then is not the client's."""
        self._waits = True
        await self._hub.room.take(size)
        self._waits, self._room_bytes = False, size
        self._frame_since = self._hub.now()

    def _give_room_back(self) -> None:
        self._hub.room.give_back(self._room_bytes)
        self._room_bytes = FREE_BYTES

    def _end_for(self, error: PeerError) -> None:
        self._hub.audit.refused(self.address, self.grant, "FRAME", error)
        self.end(self._connection.nack_of(error))

    def _take(self, frame: Frame) -> None:
        match frame:
            case BatchFrame() | DeltaFrame():
                self._take_deltas(frame)
            case Subscribe(sequence, request):
                self._answer(sequence, request)
            case Unsubscribe():
                self._unsubscribe(frame)
            case Ack():
                self._take_ack(frame)
            case Heartbeat():
                self._echo_us = frame.sent_us
                if frame.sent_us is not None:
                    self._beat(self._hub.now())
                if frame.processed is not None and self.outlet is not None:
                    self.outlet.note_dealt_with(frame.processed)
            case Backpressure():
                self._advice.take(frame, self._hub.now())
                self.ring()  # what waited for the end of a stop may go now
            case Nack():
                logger.info("%s says %s: %s", self.address, frame.code.name, frame.text)

    def _take_deltas(self, frame: BatchFrame | DeltaFrame) -> None:
        intake = self.intake
        if self._draining:
            self._tell(Nack.of_frame(frame.sequence, shutting_down()))
        elif self._is_of_past():
            self.end(Nack.of(0, recovered()))
        elif intake is None:  # a hello without the right to publish
            refused = Unauthorized("the token may not publish")
            self._unauthorized(refused, type(frame).__name__, frame.sequence)
        elif isinstance(frame, BatchFrame):
            intake.batch(frame, self._connection.frame_bytes)
        else:
            intake.delta(frame, self._connection.frame_bytes)

    def _take_ack(self, ack: Ack) -> None:
        outlet, grant = self.outlet, self.grant
        assert grant is not None
        if not grant.subscribe:
            self._unauthorized(Unauthorized("the token may not subscribe"), "Ack")
        if outlet is None:
            return
        try:
            check_partition(ack.stream, ack.partition)
            if ack.credit is not None:
                outlet.grant(ack.credit)
            if ack.processed is not None:
                outlet.note_dealt_with(ack.processed)
            if ack.cursor is not None:
                outlet.commit(ack.cursor)
        except Refused as refused:
            self._refuse(0, refused)

    # --- requests

    def _answer(self, sequence: int, request: Request) -> None:
        try:
            match request:
                case Hello():
                    self._hello(sequence, request)
                case Decide():
                    self._decide(sequence, request)
                case Subscription():
                    self._subscribe(sequence, request)
                case _:
                    self._questions.ask(sequence, request, self.grant, self._tasks)
        except Refused as refused:
            self._refuse_request(sequence, request, refused)

    def _refuse_request(self, sequence: int, request: Request, refused: Refused) -> None:
        if refused.code is ErrorCode.UNAUTHORIZED:  # the same words whatever the cause
            self._unauthorized(refused, type(request).__name__, correlation_id=sequence)
        else:
            self._refuse(0, refused, correlation_id=sequence)

    def _hello(self, sequence: int, hello: Hello) -> None:
        first = self.grant is None
        if first:
            self.grant = self._hub.access.check(hello.token)
            self.client = hello.client
            self.codecs = frozenset(one for one in self._hub.codecs if one.name.lower() in hello.features)
            self._source = hello.source
        hello = replace(hello, source=self._source)  # a later one says no other
        grant = self.grant
        assert grant is not None
        if hello.origins or hello.source is Source.REPLICA:
            grant.check_origins(hello.source)
        check_claims(hello)
        if grant.publish and (self.intake is None or (hello.job is not None and self._is_unused())):
            self.intake = intake_for(self._hub, grant, hello, self.ring, self.address)
        elif hello.job is not None:
            grant.check_origins(hello.source)
            raise one_way()
        granted = self.intake.claim(hello.origins) if self.intake is not None and hello.origins else []
        if hello.source is Source.REPLICA:
            granted = self._hub.watermarks()
        if not granted:
            self._welcome(sequence, granted, first=first)
            return

        self._unanswered += 1
        greeting = self._greeting = anyio.Event() if first else None

        def answer(failure: Refused | None) -> None:
            self._unanswered -= 1
            if greeting is not None:
                self._greeting = None
                greeting.set()
            if self._outbox.ending:
                return
            if failure is not None:
                self._refuse(0, failure, correlation_id=sequence)
            else:
                self._welcome(sequence, granted, first=first)

        self._chain.when_kept(answer)  # watermarks may count what the log can still lose

    def _is_unused(self) -> bool:
        """Whether nothing was claimed, sent or staged on this connection."""
        intake = self.intake
        return not (intake is None or intake.in_use or isinstance(intake, StagingIntake))

    def _respond(self, sequence: int, response: Response, *, more: bool = False) -> None:
        self._tell(Ack(0, correlation_id=sequence, response=response, more=more))

    def _decide(self, sequence: int, request: Decide) -> None:
        grant = self.grant
        assert grant is not None
        grant.check_origins(Source.LOCAL)
        self._unanswered += 1

        def told(outcome: JobStatus | Refused) -> None:
            self._unanswered -= 1
            if isinstance(outcome, Refused):
                self._refuse_request(sequence, request, outcome)
            elif not self._outbox.ending:
                self._respond(sequence, outcome)

        try:
            self._hub.jobs.decide(request, grant.name, told)
        except Refused as refused:
            self._unanswered -= 1
            raise refused from None

    def _welcome(self, sequence: int, granted: list[OriginGrant], *, first: bool) -> None:
        settings = self._hub.settings
        self._rebuilt = self._chain.rebuilt
        credit = None
        if first and self.intake is not None:
            credit = Credit(settings.producer_deltas_credit, settings.producer_bytes_credit)
        elif first:  # untold: what it sends all the same is refused for its token, and not for want of credit
            self._connection.allowance.grant(Credit(1, 1))
        *pages, last = welcomes(self._hub, granted)
        for page in pages:
            self._respond(sequence, page, more=True)
        self._tell(Ack(0, credit=credit, correlation_id=sequence, response=last))

    def _subscribe(self, sequence: int, request: Subscription) -> None:
        grant = self.grant
        assert grant is not None
        grant.check_subscribe(request.topics)
        request = only_partition(request)
        outlet = self.outlet
        if outlet is None:
            outlet = Outlet(
                self._hub.inside,
                settings=self._hub.settings,
                codecs=self.codecs,
                may_read=grant.reader,
                ring=self.ring,
                groups=self._hub.groups,
            )
        try:
            granted = outlet.subscribe(request, partial(self._respond, sequence))
        except Refused:
            if self.outlet is None:
                outlet.close()
            raise
        self.outlet = outlet
        self._respond(sequence, granted)

    codecs: frozenset[int] = frozenset()
    """Codecs of stored frames that the client has said it reads."""

    def _unsubscribe(self, frame: Unsubscribe) -> None:
        grant = self.grant
        assert grant is not None
        try:
            grant.check_subscribe(())
        except Unauthorized as refused:
            self._unauthorized(refused, "Unsubscribe", correlation_id=frame.sequence)
            return
        visible = self._hub.inside.log.visible
        if frame.drain and self.outlet is not None and self.outlet.has_to_deliver(frame.subscription):
            self._leaving.append((visible, frame))
        else:
            self._leave(frame)

    def _leave(self, frame: Unsubscribe) -> None:
        try:
            if self.outlet is None:
                raise Refused(
                    ErrorCode.BAD_REQUEST, f"no subscription {frame.subscription} is open on this connection"
                )
            dealt_with = self.outlet.dealt_with  # of what it was subscribed to until now
            self.outlet.unsubscribe(frame.subscription)
        except Refused as refused:
            self._refuse(0, refused, correlation_id=frame.sequence)
        else:
            self._tell(Ack(0, correlation_id=frame.sequence, processed=dealt_with))

    def _let_leave(self) -> None:
        """End the subscriptions whose last delivery is written."""
        outlet, leaving = self.outlet, self._leaving
        while leaving and (outlet is None or outlet.standing_by or outlet.dealt_with >= leaving[0][0]):
            self._leave(leaving.popleft()[1])

    def _refuse(self, sequence: int, refused: Refused, correlation_id: int | None = None) -> None:
        self._hub.counters.nack(refused.code)
        self._hub.audit.refused(self.address, self.grant, "REQUEST", refused)
        self._tell(Nack.of(sequence, refused, correlation_id=correlation_id))
        if self._connection.phase is Phase.ENDED:  # it was the hello that opens the connection
            self.end()

    def _unauthorized(
        self, refused: Refused, what: str, sequence: int = 0, correlation_id: int | None = None
    ) -> None:
        """Refused by the token: always in the same words, and then the connection ends."""
        if not isinstance(refused, Unauthorized):
            refused = Unauthorized(refused.message)
        self._hub.audit.refused(self.address, self.grant, what, refused)
        self._hub.counters.nack(refused.code)
        self.end(Nack.of(sequence, refused, correlation_id=correlation_id))

    # --- writing

    def _tell(self, frame: Frame) -> None:
        self._outbox.tell(frame)
        if self._outbox.overfull:
            self.break_off()

    def tell_pressure(self, pressure: Backpressure) -> None:
        """Advise a producer."""
        is_open = self._connection.phase is Phase.OPEN and not self._outbox.ending
        if self.intake is not None and self.intake.in_use and is_open:
            self._tell(pressure)

    async def _write_all(self) -> None:
        try:
            await self._outbox.run()
        except (ConnectionError, TimeoutError) as error:
            logger.info("connection %d of %s ends: %r", self.number, self.address, error)
        if not self._finishing:  # the reader waits for bytes; to cancel takes longer than to return
            self.break_off()

    def answers(self) -> Sequence[Frame]:
        """What has become of what came in, not told yet."""
        intake = self.intake
        if intake is None or not intake.has_news or self._connection.phase is Phase.ENDED:  # by unsound bytes
            return ()
        told = intake.answers(pressed=self._hub.pressed)
        if intake.unauthorized:
            self._outbox.ending = True
        return told

    def next_sending(self, now: float) -> Sending | None:
        """What is to be delivered next; None: nothing at the moment."""
        if self._leaving:
            self._let_leave()
        outlet, advice = self.outlet, self._advice
        if outlet is None or advice.wait_s(now) > 0:
            return None
        try:
            sending = outlet.take(now, self._hub.settings.send_bytes_max, rows_max=advice.rows_max)
        except Refused as refused:
            self._refuse(0, refused)
            outlet.close()
            self.outlet = None
            self._let_leave()
            return None
        if sending is not None:
            advice.spend(sending.deltas, now)
        return sending

    def rests(self) -> bool:
        """Whether there is nothing to write, nor to end, before somebody rings."""
        if self._draining or self._finishing or self._leaving:
            return False
        intake, outlet = self.intake, self.outlet
        return (intake is None or not intake.has_news) and (outlet is None or outlet.rests())

    def wait_s(self, now: float) -> float | None:
        """When there may be more to deliver, in seconds; None: when somebody rings."""
        if self.outlet is None:
            return None
        return self._advice.wait_s(now) or self.outlet.wait_s(now)

    # --- what time brings

    def tick(self, now: float, late_s: float) -> None:
        """Now and then: heartbeats, silence, deadlines, how far it is, warnings. `late_s`: how long this
        server was held up itself, which is not the client's silence.
        """
        if self._outbox.ending:
            return
        settings = self._hub.settings
        self._heard_at += late_s
        fault = self._fault(now)
        if fault is not None:
            logger.info("connection %d of %s ends: %s", self.number, self.address, fault)
            self._hub.counters.peers_lost += 1
            self.break_off()
        elif self.intake is not None and self.intake.forwards and self._is_of_past():
            # It then brings again what was lost, though nothing new may come for long.
            self.end(Nack.of(0, recovered()))
        elif self._connection.phase is Phase.OPEN:
            self.check_token()
            self._tell_progress(now)
            if now - self._outbox.spoke_at >= settings.heartbeat_s:
                self._beat(now)

    def _is_of_past(self) -> bool:
        """True if the log was recovered since hello, so what the client was told of it may be lost."""
        return self._rebuilt != self._chain.rebuilt

    def _fault(self, now: float) -> str | None:
        settings, begun = self._hub.settings, self._frame_since
        if self.grant is None:
            late = now - self._since > settings.handshake_s_max
            return f"no hello within {settings.handshake_s_max} s" if late else None
        if self._waits:
            return None
        if begun is None:
            return silent(now - self._heard_at, settings)
        return too_slow(now - begun, self._connection.buffered_bytes, settings)

    def check_token(self) -> None:
        """End it where its token holds no more."""
        grant = self.grant
        if grant is not None and not self._outbox.ending and not self._hub.access.still_holds(grant):
            self._unauthorized(Unauthorized("the token has expired or was taken back"), "CONNECTION")

    def _tell_progress(self, now: float) -> None:
        outlet = self.outlet
        if outlet is None or outlet.standing_by:
            return
        told, at = self._progress_told
        if outlet.dealt_with > told and now - at >= _PROGRESS_S:
            self._progress_told = (outlet.dealt_with, now)
            self._tell(Ack(0, processed=outlet.dealt_with))
        warning = outlet.warning
        level = Level.OK if warning is None else warning.level
        if level != self._warned:
            self._warned = level
            self._tell(warning or Backpressure(self._hub.running_number(), Level.OK))

    def _beat(self, now: float) -> None:
        self._beats += 1
        self._tell(
            Heartbeat(
                self._beats,
                sent_us=int(now * 1_000_000),
                echo_us=self._echo_us,
                processed=None if self.outlet is None else self.outlet.delivered,
            )
        )
        self._outbox.spoke_at = now

    # --- telling operators

    def statistics(self) -> dict[str, Any]:
        """A snapshot, for people and their tools."""
        outlet = self.outlet
        return {
            "number": self.number,
            "address": self.address,
            "client": self.client,
            "token": None if self.grant is None else self.grant.name,
            "seconds": round(self._hub.now() - self._since, 1),
            "open_frames": 0 if self.intake is None else self.intake.open_frames,
            "subscribed": outlet is not None,
            **(NO_SUBSCRIPTION if outlet is None else outlet.statistics()),
        }
