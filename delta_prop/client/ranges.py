"""Reading a range of a log over the network by plain blocking calls: for executors and scripts.

No event loop and no thread. A connection that rests for long between two batches is made anew by the next.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.client.addresses import parse_addresses
from delta_prop.client.arguments import check_connection, settings_of
from delta_prop.client.backoff import Backoff
from delta_prop.client.blocking import CHANCE, FAULTS_MAX, Wire
from delta_prop.client.errors import Reconnect, Unreachable
from delta_prop.client.producing import check_stages
from delta_prop.client.wanted_range import CREDIT_BYTES, WantedRange
from delta_prop.misconfigured import Lasting, Misconfigured
from delta_prop.tls_contexts import client_context
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.frames import Ack, Credit, Hello, Nack, OriginClaim, Start, StartAt, Subscription
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL, Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeVar

    from delta_prop.client.addresses import Address
    from delta_prop.client.settings import ClientSettings
    from delta_prop.ports import Tls
    from delta_prop_wire.batch import LoggedBatch
    from delta_prop_wire.frames import Welcome

    T = TypeVar("T")

_CLIENT = "reads a range"
_NOTHING = Credit(0, 0)


class Bounds(NamedTuple):
    """What a log holds: the offsets from `first` up to `end`, which is the next one that readers get."""

    log_id: bytes
    epoch: int
    first: int
    end: int


class Asker:
    """Where to ask, and how: one service, by any of its addresses. Holds no connection."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self._addresses = parse_addresses(addresses)
        self._token = token
        self._tls = tls
        check_connection(token, tls)
        self._settings = settings_of(settings)

    def bounds(self) -> Bounds:
        """What there is to read now. Raises Refused, Unreachable."""

        def ask(line: _Line) -> Bounds:
            log = line.welcome.log
            assert log is not None, "services of this protocol tell their log"
            return Bounds(log.log_id, log.epoch, line.start_of(Start(StartAt.EARLIEST)), log.next_offset)

        return self._ask(ask)

    def offset_at(self, time_us: int) -> int:
        """The first offset that was logged at a time or later. Raises Refused, Unreachable."""
        return self._ask(lambda line: line.start_of(Start(StartAt.TIME, time_us)))

    def check_publishes(self, *, stages: bool = False) -> None:
        """Raise Refused where the service knows no such token, or that may not publish; with `stages`
        UsageError where it keeps no parts of jobs; Unreachable.
        """

        def ask(line: _Line) -> None:
            if stages:
                check_stages(line.welcome)
            if not line.may_publish:
                raise Refused(
                    ErrorCode.UNAUTHORIZED,
                    "this token may read, and not publish: give one that was made with --publish",
                )

        self._ask(ask)

    def watermark(self, origin: int, epoch: int) -> int:
        """The last counter of an origin that is dealt with. `epoch`: that of its present holder, who is not
        disturbed then. Raises Refused (FENCED where there is a later one), Unreachable.
        """

        def ask(line: _Line) -> int:
            return next(one.watermark for one in line.welcome.origins if one.origin == origin)

        return self._ask(ask, OriginClaim(origin, epoch))

    def read(
        self,
        start: int,
        end: int,
        topics: Sequence[Topic] = (ALL,),
        *,
        log: tuple[bytes, int] | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> Iterator[LoggedBatch]:
        """What the topics ask for from one offset up to another, each row once, in order; then it ends.

        `log`: the id and the epoch of the log that the offsets are of. Batches are cut where rows are left
        out; they tell their rows' offsets then. Raises Refused (CURSOR_TOO_OLD where the log has let go of
        what comes next), UsageError where it is another log, Unreachable.
        """
        wanted = WantedRange(start, end, topics, log=log, credit_bytes=credit_bytes)
        tries = _Tries(self._settings, self._addresses)
        while not wanted.done:
            try:
                with self._line(tries) as line:
                    wanted.welcomed(line.welcome)
                    line.send(wanted.requests(line.wire.session))
                    for batch in _batches(line, wanted):
                        tries.went_well()
                        yield batch
            except (OSError, PeerError, Reconnect, Misconfigured) as error:
                tries.failed(error)

    # --- helpers

    def _ask(self, question: Callable[[_Line], T], claim: OriginClaim | None = None) -> T:
        tries = _Tries(self._settings, self._addresses)
        while True:
            try:
                with self._line(tries, claim) as line:
                    return question(line)
            except (OSError, PeerError, Reconnect, Misconfigured) as error:
                tries.failed(error)

    @contextmanager
    def _line(self, tries: _Tries, claim: OriginClaim | None = None) -> Iterator[_Line]:
        """A connection whose hello was answered."""
        address = self._addresses[tries.next_turn() % len(self._addresses)]
        context = None if self._tls is None else client_context(self._tls)
        name = None if self._tls is None else self._tls.server_name
        wire = Wire(address, self._settings.connect_s_max, context, name, self._settings)
        try:
            origins = () if claim is None else (claim,)
            yield _Line(wire, Hello(token=self._token, client=_CLIENT, origins=origins))
        finally:
            wire.close()


class _Tries:
    """How often and how long it was tried."""

    def __init__(self, settings: ClientSettings, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._lasting = Lasting(len(addresses))
        self._limit_s = settings.open_s_max
        self._backoff = Backoff()
        self._turn = -1
        self._faults = 0
        self._since = time.monotonic()

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def went_well(self) -> None:
        self._backoff.reset()
        self._faults, self._since = 0, time.monotonic()

    def failed(self, error: Exception) -> None:
        """Wait until it is to be tried again. Raises why it is not."""
        self._lasting.note(error)
        addresses = self._addresses
        wait_s, cause = 0.0, error
        if isinstance(error, Reconnect):
            wait_s, cause = error.after_s, error.cause or ConnectionError("it asks to connect again")
        elif isinstance(error, PeerError):
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                raise Refused(error.code, error.message) from None
        if (self._turn + 1) % len(addresses) == 0:
            wait_s = max(wait_s, self._backoff.next_s(CHANCE.random()))
        if time.monotonic() + wait_s - self._since >= self._limit_s:
            if isinstance(cause, Refused | UsageError):
                raise cause from None
            names = ", ".join(map(str, addresses))
            raise Unreachable(
                f"none of {names} has answered for {self._limit_s:g} s (the last one: {cause}): start the "
                "service or correct the address"
            ) from None
        time.sleep(wait_s)


class _Line:
    """A connection, from the answer to its hello on."""

    def __init__(self, wire: Wire, hello: Hello) -> None:
        self.wire = wire
        ack = self._answer(hello)
        assert ack.welcome is not None, "what answers a hello"
        self.welcome: Welcome = ack.welcome
        self.may_publish = ack.credit is not None

    def start_of(self, start: Start) -> int:
        """The offset that a start means."""
        granted = self._answer(Subscription(1, (ALL,), start, _NOTHING)).subscribed
        if granted is None:
            raise ConnectionError(f"{self.wire.address} answered something else")
        return granted.start.next_offset

    def send(self, parts: Iterable[bytes]) -> None:
        """Have these sent by the next step."""
        self.wire.send(parts)

    def step(self) -> None:
        """Send and receive, until something comes or a heartbeat is due. Raises OSError."""
        session, now = self.wire.session, time.monotonic()
        if session.patience_s(now) <= 0:
            raise ConnectionError(f"{self.wire.address} has been silent for too long")
        beat = session.beat(now)
        self.wire.send(() if beat is None else (beat,))
        self.wire.step(max(min(session.patience_s(now), session.beat_wait_s(now)), 0.0))

    def _answer(self, request: Hello | Subscription) -> Ack:
        session = self.wire.session
        number, raw = session.request(request)
        self.wire.send([raw])
        while True:
            for frame in session.frames(time.monotonic()):
                if isinstance(frame, Nack) and (frame.correlation_id == number or not frame.sequence):
                    raise _told(frame)
                if isinstance(frame, Ack) and frame.correlation_id == number and not frame.more:
                    return frame
            self.step()


def _told(nack: Nack) -> Exception:
    refusal = nack.refusal()
    return Reconnect((refusal.retry_after_ms or 0) / 1000, refusal) if refusal.retryable else refusal


def _batches(line: _Line, wanted: WantedRange) -> Iterator[LoggedBatch]:
    session = line.wire.session
    while True:
        for frame in session.frames(time.monotonic()):
            yield from wanted.take_in(frame, session.connection.frame_bytes)
            if wanted.done:
                return
        line.send(wanted.grant(session))
        line.step()
