"""A connection's way out of the log: one cursor, from which all that its subscriptions match is sent.

Push while hot, pull when behind: batches come from the chain as long as there is room for them, else they are
read from the log, whole stretches of its files where nothing has to be left out. It has no task of its own
and never waits: whoever writes the connection asks it for what comes next.
"""

from __future__ import annotations

import logging
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from delta_prop.route.table import NOTHING, Nothing
from delta_prop.server.hot import BATCH_OVERHEAD_BYTES, HotQueue, Sending
from delta_prop.server.starts import check_cursor, check_held, check_place, offset_of
from delta_prop.server.wanted import Wanted
from delta_prop_broker.log.damage import LogDamaged
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.files.stretch import Bounds
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.errors import DeltaPropError, Refused
from delta_prop_wire.frames import Backpressure, Credit, Level, StartAt, Subscribed
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.window import Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.inside import Inside
    from delta_prop.route.table import Rows
    from delta_prop.server.groups import Groups, Joined
    from delta_prop.server.settings import ServerSettings
    from delta_prop_broker.log.files.stretch import Stretch, StretchReader
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import Subscription

READ_FRAMES_MAX, READ_BYTES_MAX = 64, 1024 * 1024
"""What is read at a time, or little more: so few frames that others on the loop hardly notice."""
_READ_ROWS_MAX = 100
STRETCH_BYTES_MAX = 4 * 1024 * 1024
"""What is sent out of a file at a time, where a client that is just quick enough takes that in time."""
READ_AGAIN_S = 0.5
"""When it is tried again to read the log, whose disk has failed."""
BATCH_DELTAS_MAX = 10_000
WARN_FROM, THROTTLE_FROM = 0.8, 0.95
"""Of what the log keeps: where a subscriber that lags is told."""
_UNBOUNDED = Credit(1 << 62, 1 << 62)

NO_SUBSCRIPTION = {"dealt_with": None, "behind": False, "group": None, "standing_by": False}
"""`Outlet.statistics` of a connection that has no outlet."""

logger = logging.getLogger("delta_prop.server")


class _State(Enum):
    """What the last `take` came to, and so what is worth ringing for."""

    GOES_ON = "goes on"
    IDLE = "idle"  # everything is sent
    GATHERS = "gathers"
    NO_CREDIT = "no credit"
    DISK_FAILS = "disk fails"


class Outlet:
    """One connection's. `take` gives what comes next, `wait_s` says when to ask again where that is nothing;
    `ring` is called when it is to be asked before. Once `take` has raised, the outlet is closed.
    """

    def __init__(
        self,
        inside: Inside,
        *,
        settings: ServerSettings,
        codecs: frozenset[int],
        may_read: Callable[[str], bool] | None,
        ring: Callable[[], None],
        groups: Groups,
    ) -> None:
        """`codecs`: of compressed frames that the client reads. `may_read`: which namespaces; None: all."""
        self.behind = False
        """Whether it reads the log, and is not pushed."""
        self.group: str | None = None
        """The group that it reads for, or stands by for."""
        self.standing_by = False
        """True while another member reads for the group: nothing is sent."""
        self._log = inside.log
        self._sinks = inside.sinks
        self._now = inside.now
        self._settings = settings
        self._bytes_max = settings.outlet_bytes_max
        slow_bytes = int(settings.send_s_max * settings.receive_rate_min)
        self._stretch_bytes_max = max(settings.send_bytes_max, min(slow_bytes, STRETCH_BYTES_MAX))
        self._codecs = codecs
        self._ring = ring
        self._groups = groups
        self._wanted = Wanted(may_read)
        self._first: Subscription | None = None  # which set the cursor, the group, the credit and the form
        self._then: Callable[[Subscribed], None] | None = None  # is told once it stands by no more
        self._resets = 0  # of the group's place, by operators
        self._whole = False  # batches go as they are, and not each delta by itself
        self._window = Window(None)
        self._batch_deltas_max, self._linger_s = 1, 0.0
        self._queue = HotQueue()
        self._end = 0  # everything below is sent, in the queue, or none of its business
        self._state = _State.GOES_ON
        self._busy = False  # something was sent just now: what comes next may gather
        self._oldest_at = 0.0  # when the first of what waits came
        self._stretches: StretchReader | None = None
        if isinstance(inside.log, DurableLog):
            self._stretches = inside.log.stretches.reader()
        self._stretching = False  # the file of the last stretch is open
        self._read_once = False
        self._again_at = -inf  # when the log is read again, whose disk has failed
        self._refused: Refused | None = None
        self._warnings = 0

    # --- what the client asks for

    def subscribe(
        self, request: Subscription, then: Callable[[Subscribed], None] | None = None
    ) -> Subscribed:
        """Add topics. The first one says where the cursor begins, further ones count from wherever it is.

        `then` is called with the second answer to one that stands by at first: it reads for its group now.
        Raises Refused (BAD_REQUEST, CURSOR_TOO_OLD, LOG_FAILED) and changes nothing.
        """
        if self._first is None:
            self._begin(request)
            self._then = then
        else:
            self._check_further(request, self._first)
            self._wanted.add(request)
            self._look_again()
            if request.credit is not None:
                self.grant(request.credit)
        self._sinks.add_outlet(self, self._wanted.topics)
        return self._answer_to(request)

    def unsubscribe(self, subscription: int) -> None:
        """Take topics away: nothing is sent for them alone any more. Raises Refused (BAD_REQUEST)."""
        self._wanted.remove(subscription)
        if len(self._wanted):
            self._look_again()
            self._sinks.add_outlet(self, self._wanted.topics)
        else:
            self.close()

    def grant(self, credit: Credit) -> None:
        """So much more may be sent."""
        self._window.grant(credit)
        if self._state is _State.NO_CREDIT and self._window.open:
            self._wake()

    def note_dealt_with(self, offset: int) -> None:
        """The client has done with everything below: its group goes on there. No further than was sent."""
        if self.group is not None and not self.standing_by:
            self._groups.commit(self.group, min(offset, self.dealt_with), self)

    def commit(self, cursor: Cursor) -> None:
        """The same, said with the log that is meant. Raises Refused (BAD_REQUEST)."""
        if self.group is None:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                "a cursor is committed for a group, and this connection has none: name one in its first "
                "Subscribe",
            )
        self.note_dealt_with(check_cursor(cursor, self._log))

    # --- how far it is

    @property
    def dealt_with(self) -> int:
        """Everything below is delivered, or none of its business; while it stands by, where the group was."""
        if self.standing_by:
            return self._end
        if self._queue.waiting:
            return self._queue.first_offset
        return self._end if self.behind else max(self._end, self._log.visible)

    def statistics(self) -> dict[str, Any]:
        """A snapshot, for people and their tools."""
        return {
            "dealt_with": self.delivered,
            "behind": self.behind and not self.standing_by,
            "group": self.group,
            "standing_by": self.standing_by,
        }

    @property
    def delivered(self) -> int | None:
        """`dealt_with`; None while it stands by."""
        return None if self.standing_by else self.dealt_with

    def has_to_deliver(self, subscription: int) -> bool:
        """True if it has this subscription, and something is left to deliver."""
        return subscription in self._wanted and not (self.standing_by or self.dealt_with >= self._log.visible)

    @property
    def warning(self) -> Backpressure | None:
        """What to tell a client that lags so far that the log may soon let go of what it needs."""
        log, at = self._log, self.dealt_with
        lag = log.visible - at
        if lag <= 0 or self._first is None or self.standing_by:
            return None
        share = log.kept_share(at)
        if share < WARN_FROM:
            return None
        self._warnings += 1
        level = Level.WARN if share < THROTTLE_FROM else Level.THROTTLE
        return Backpressure(self._warnings, level, depth=lag, capacity=log.next_offset - log.first_offset)

    # --- what the service says

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        """Take a batch that has become visible; where there is no room it will be read from the log."""
        if self.behind:
            return
        wanted = self._wanted.narrow(logged, rows) if self._wanted.narrows else rows
        if logged.offset < self._end:
            wanted = _behind(wanted, logged, self._end)
        if isinstance(wanted, Nothing):
            return
        queue = self._queue
        waiting = bool(queue.waiting)
        if waiting and queue.bytes + logged.batch.size + BATCH_OVERHEAD_BYTES > self._bytes_max:
            self.behind = True
        else:
            if self._busy and not waiting:
                self._oldest_at = self._now()
            queue.put(logged, wanted)
            self._end = logged.offset + logged.batch.count
        if self._state is _State.IDLE or (self._state is _State.GATHERS and self._has_gathered()):
            self._state = _State.GOES_ON
            self._ring()

    def note_visible(self) -> None:
        """What matched was offered; `dealt_with` moves by itself."""

    def note_recovered(self) -> None:
        """The log was recovered in place, in another epoch: cursors that this connection gave count no more.

        The client comes back with the one that it has, and learns whether what it got is still there.
        """
        self.fence(
            Refused(
                ErrorCode.SHUTTING_DOWN,
                f"the log was recovered after a failure of its disk, and is in epoch {self._log.epoch} now: "
                "connect again, and go on from your cursor",
                retry_after_ms=50,
            )
        )

    def take_over(self, joined: Joined) -> None:
        """Go on for the group, where it has come to; who read for it before has left."""
        self.standing_by, self._resets = False, joined.resets
        try:
            self._end = check_place(joined.place, self._log)
        except Refused as refused:
            self.fence(refused)
            return
        self.behind = self._lags()
        if self._then is not None and self._first is not None:
            self._then(self._answer_to(self._first))
        self._wake()

    def fence(self, refused: Refused) -> None:
        """Send nothing more; the client is told why by the next `take`."""
        self._refused = self._refused or refused
        self._queue.clear()
        self.behind = True
        self._leave_group()
        self._wake()

    # --- what is sent

    def take(self, now: float, bytes_max: int, *, rows_max: int | None = None) -> Sending | None:
        """What to send next, about so many bytes; None: nothing now. The one before it must have been sent.

        `rows_max`: no more rows than these, for which frames are cut; None: any number.

        Raises Refused: CURSOR_TOO_OLD, FENCED, PROCESSING_FAILED (what comes next is damaged), SHUTTING_DOWN.
        """
        gathers = self._busy and self._linger_s
        if self._whole and rows_max is None and not (self.behind or self._stretching or gathers):
            lone = self._queue.take_lone(self._window)
            if lone is not None:
                self._busy, self._state, self._oldest_at = True, _State.GOES_ON, now
                return lone
        try:
            if self._refused is not None:
                raise self._refused
            sending = self._take(now, bytes_max, rows_max)
        except (Refused, DeltaPropError) as error:
            self.close()
            raise _told(error) from None
        except OSError as error:
            if self._again_at == -inf:
                logger.warning("the log cannot be read for a subscriber, which is tried again: %s", error)
            self._state, self._again_at = _State.DISK_FAILS, now + READ_AGAIN_S
            return None
        if sending is not None:
            self._busy, self._state, self._oldest_at = True, _State.GOES_ON, now
        return sending

    def rests(self) -> bool:
        """Whether all there is was taken, and so written: what comes next rings, and goes at once."""
        if self._refused is not None or (not self.standing_by and (self._queue.waiting or self.behind)):
            return False
        self._state, self._busy = _State.IDLE, False
        if self._stretching:
            self._let_go_of_file()
        return True

    def wait_s(self, now: float) -> float | None:
        """How long until there may be something to send, in seconds; None: until `ring`."""
        if self._state is _State.GOES_ON:
            return 0.0
        if self._state is _State.GATHERS:
            return max(0.0, self._oldest_at + self._linger_s - now)
        return max(0.0, self._again_at - now) if self._state is _State.DISK_FAILS else None

    def close(self) -> None:
        """The connection has gone, or wants nothing more: nothing is held for it."""
        self._sinks.remove_outlet(self)
        self._leave_group()
        self._wanted.clear()
        self._queue.clear()
        self._first, self._then, self.behind = None, None, False
        self._let_go_of_file()

    # --- helpers: subscribing

    def _begin(self, request: Subscription) -> None:
        self._wanted.add(request)
        try:
            begin = self._begin_at(request)
        except BaseException as error:
            self._wanted.clear()
            self._leave_group()
            if isinstance(error, OSError | DeltaPropError):
                raise _told(error) from None
            raise
        self._first, self._end = request, begin
        self._batch_deltas_max = min(max(request.batch_deltas_max, 1), BATCH_DELTAS_MAX)
        self._linger_s = request.wait_ms_max / 1000
        self._whole = not request.deltas
        self._window.begin(request.credit)
        self._queue.clear()
        self.behind = self._lags()
        self._state, self._busy, self._read_once = _State.GOES_ON, False, False

    def _begin_at(self, request: Subscription) -> int:
        """Where the cursor begins: a group's where it has come to, a new group's where the start says."""
        start, log, group = request.start, self._log, request.group
        if group is None:
            if start.at is StartAt.GROUP:
                raise Refused(ErrorCode.BAD_REQUEST, "start at group, but no group is named: name one")
            return offset_of(start, log)
        if isinstance(start.value, Cursor):  # of another log, or of an end that was lost, it is told always
            check_cursor(start.value, log)

        def begin() -> int:
            return log.first_offset if start.at is StartAt.GROUP else offset_of(start, log)

        joined = self._groups.join(group, self, begin, identity=request.member)
        self.group, self.standing_by, self._resets = group, joined.standby, joined.resets
        return joined.place if joined.standby else check_place(joined.place, log)

    def _answer_to(self, request: Subscription) -> Subscribed:
        first = self._first
        assert first is not None
        of_group = first.group is not None and request.subscription == first.subscription
        return Subscribed(
            request.subscription,
            Cursor(self._log.log_id, self._log.epoch, self._end),
            self._batch_deltas_max,
            first.wait_ms_max,
            standby=of_group and self.standing_by,
            resets=self._resets if of_group else 0,
        )

    def _check_further(self, request: Subscription, first: Subscription) -> None:
        named = {
            "start": request.start != first.start and request.start.at is not StartAt.LATEST,
            "group": request.group not in (None, first.group),
            "deltas": request.deltas and not first.deltas,
            "credit": request.credit is not None and first.credit is None,
        }
        other = [name for name, differs in named.items() if differs]
        if other:
            raise Refused(
                ErrorCode.BAD_REQUEST,
                f"a connection has one cursor, and its first Subscribe ({first.subscription}) has set its "
                f"start, group, credit and form: leave out {', '.join(other)}, or use another connection",
                field=other[0],
            )

    def _look_again(self) -> None:
        """The topics change: what waits was chosen for others, so it is read again from the log."""
        if self.standing_by:
            return
        self._end = self.dealt_with
        self._queue.clear()
        self.behind = self._lags()
        self._wake()

    def _lags(self) -> bool:
        """Whether it reads the log. Without credit the cursor stays, for topics that are still to come."""
        return self.standing_by or self._end < self._log.visible or not self._window.open

    def _leave_group(self) -> None:
        if self.group is not None:
            self._groups.leave(self.group, self)
            self.group, self.standing_by = None, False

    # --- helpers: sending

    def _wake(self) -> None:
        self._state = _State.GOES_ON
        self._ring()

    def _has_gathered(self) -> bool:
        queue = self._queue
        return (
            self.behind
            or queue.deltas >= self._batch_deltas_max
            or queue.bytes >= self._settings.send_bytes_max
        )

    def _take(self, now: float, bytes_max: int, rows_max: int | None) -> Sending | None:
        first, waiting = self._first, self._queue.waiting
        if self._stretching and not self.behind:
            self._let_go_of_file()
        if first is None or self.standing_by or not (waiting or self.behind):
            self._state, self._busy = _State.IDLE, False
            return None
        if not self._window.open:
            self._state = _State.NO_CREDIT
            return None
        if waiting and self._busy and self._gathers(now):
            self._state = _State.GATHERS
            return None
        self._state = _State.GOES_ON
        if not waiting:
            stretch = self._stretch(rows_max)
            if stretch is not None:
                return self._send_stretch(stretch)
            self._read()
        if not waiting:
            return None
        return self._queue.take(self._window, bytes_max, as_deltas=first.deltas, rows_max=rows_max)

    def _let_go_of_file(self) -> None:
        self._stretching = False
        if self._stretches is not None:
            self._stretches.close()

    def _gathers(self, now: float) -> bool:
        """Whether what waits may wait for more of it."""
        linger_s = self._linger_s
        return linger_s > 0 and now < self._oldest_at + linger_s and not self._has_gathered()

    def _read(self) -> None:
        """Queue what comes next in the log; once the log's end is reached, batches are pushed again."""
        log, begin = self._log, check_held(self._end, self._log)
        frames, left = 0, min(READ_BYTES_MAX, self._settings.outlet_bytes_max)
        while frames < READ_FRAMES_MAX and left > 0:
            try:
                read = log.read(begin, rows_max=_READ_ROWS_MAX, bytes_max=left)
            except (DeltaPropError, OSError):
                if frames:  # what lies before it is sent first
                    break
                raise
            for logged in read:
                rows = self._wanted.rows(logged)
                if logged.offset < begin:
                    rows = _behind(rows, logged, begin)
                if not isinstance(rows, Nothing):
                    self._queue.put(logged, rows)
                left -= logged.batch.size + BATCH_OVERHEAD_BYTES
            if not read:
                break
            frames += len(read)
            begin = self._end = read[-1].next_offset
        self._read_once, self._again_at = True, -inf
        # No await between this comparison and the flag: what is appended next is offered.
        self.behind = self._end < log.visible

    def _stretch(self, rows_max: int | None) -> Stretch | None:
        """Whole frames as they lie in the log's files, where all is wanted as it is.

        What comes first is verified, by reading or as a stretch: a client that found damage comes back there.
        """
        first = self._first
        if self._stretches is None or not self._wanted.everything:
            return None
        assert first is not None
        if first.deltas:
            return None
        deltas, size = self._window.left or _UNBOUNDED
        size = min(size, self._stretch_bytes_max)
        deltas = deltas if rows_max is None else min(deltas, rows_max)
        bounds = Bounds(
            deltas, size, read_bytes_max=self._settings.send_bytes_max, verified=not self._read_once
        )
        self._stretching = True
        try:
            return self._stretches.next(self._end, bounds, codecs=self._codecs)
        except (LogDamaged, OSError):
            return None  # reading tells what is wrong, if it is where this subscriber is

    def _send_stretch(self, stretch: Stretch) -> Sending:
        what, deltas, size, self._end = stretch
        self._window.spend(deltas, size)
        self.behind = self._end < self._log.visible
        return Sending(what, deltas, size, self._end)


def _behind(rows: Rows | Nothing, logged: LoggedBatch, offset: int) -> Rows | Nothing:
    """Of the rows of a batch those from an offset on."""
    if isinstance(rows, Nothing) or offset >= logged.next_offset:
        return NOTHING
    rows = np.arange(logged.count) if rows is None else rows
    rows = rows[rows >= offset - logged.offset]
    return rows if len(rows) else NOTHING


def _told(error: OSError | DeltaPropError) -> Refused:
    """What a subscriber is told of why the log cannot be read."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OSError) and not isinstance(error, DeltaPropError):
        return Refused(
            ErrorCode.LOG_FAILED,
            f"the log cannot be read, as its disk fails with {error}: try again",
            retry_after_ms=1_000,
        )
    logger.error("a subscriber cannot be sent what comes next: %s", error)
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"what comes next cannot be sent: {error}: tell the operator, or start behind it",
    )
