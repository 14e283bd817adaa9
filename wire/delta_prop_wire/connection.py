"""One connection, without its socket: what came in, what may go out, whose turn it is, credits both ways.

Whatever a peer sends can at worst raise PeerError, which ends the connection; our own misuse raises
UsageError and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import PeerError, UsageError
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    DeltaFrame,
    Hello,
    Nack,
    Subscribe,
    Subscription,
    UnknownRequest,
    Unsubscribe,
)
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, HEADER_BYTES, ErrorCode, FrameType
from delta_prop_wire.state import TABLE, TYPES, Phase, Role, Saying, Speaker, saying_of
from delta_prop_wire.window import NOTHING, Window

if TYPE_CHECKING:
    from delta_prop_wire.codec import _NeedBytes
    from delta_prop_wire.frames import Frame
    from delta_prop_wire.header import Header
    from delta_prop_wire.runs import Run

REQUESTS_MAX = 256
"""Subscribes and Unsubscribes of one connection that may wait for their answer."""

_TOO_MANY = f"{REQUESTS_MAX} requests wait for their answer: wait for some"
_DATA = frozenset({FrameType.DELTA, FrameType.BATCH})
_REQUESTS = frozenset({FrameType.SUBSCRIBE, FrameType.UNSUBSCRIBE})


class Connection:
    """One end. `window`: what it may send; `allowance`: what the other one may; `phase`: how far it is."""

    def __init__(self, role: Role, *, payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX) -> None:
        self.phase = Phase.OPENING
        self.window = Window(NOTHING)
        self.allowance = Window(NOTHING)
        self._serves = role is Role.SERVER
        self._self = Speaker.SERVER if self._serves else Speaker.CLIENT
        self._peer = Speaker.CLIENT if self._serves else Speaker.SERVER
        self._decoder = Decoder(payload_bytes_max=payload_bytes_max, look_at=self._look_at)
        self.held = self._decoder.held
        """What came and was not taken yet, to look at: from `start` to `end`, and often nothing."""
        self.buffer = self._decoder.buffer
        """Where the next bytes are to be received into. Raises UsageError before the events are taken."""
        self._header: Header | None = None  # of the frame that came last, or is coming
        self._next_sequence = 0  # the lowest that the next deltas of a producer may have
        self._error: PeerError | None = None
        self._asked: dict[int, Subscription | Unsubscribe] = {}  # without an answer, by sequence
        self._subscriptions: set[int] = set()  # those that were granted and have not ended

    # --- receiving

    @property
    def buffered_bytes(self) -> int:
        """Bytes that came of a frame that is not whole yet."""
        return self._decoder.buffered_bytes

    @property
    def frame_bytes(self) -> int:
        """The size of the frame that came last, as credits are charged for it."""
        return 0 if self._header is None else HEADER_BYTES + self._header.length

    @property
    def under_way_bytes(self) -> int:
        """The size of the frame that has begun to come, as its header says; 0 where that is not there."""
        header = self._decoder.header
        return 0 if header is None else HEADER_BYTES + header.length

    def received(self, count: int) -> None:
        """So many bytes lie in the buffer that was given last."""
        if self.phase is not Phase.ENDED:
            self._decoder.received(count)

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Take bytes that were received elsewhere. Raises UsageError as `buffer` does."""
        if self.phase is not Phase.ENDED:
            self._decoder.receive(chunk)

    def next_event(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        """The next whole frame; after the end, none. Raises PeerError: send `nack_of` it, and close."""
        if self.phase is Phase.ENDED:
            if self._error is not None:
                raise PeerError(self._error.code, self._error.message)
            return NEED_BYTES
        try:
            frame = self._decode()
            if frame is not NEED_BYTES:
                self._note_received(frame)
        except PeerError as error:
            self._error = error
            self.end()
            raise
        return frame

    def next_run(self) -> Run | None:
        """Frames of a producer that can go the short way together, else None: ask `next_event` then."""
        if self.phase is not Phase.OPEN or self._peer is not Speaker.CLIENT:
            return None
        run = self._decoder.next_run(self.allowance, self._next_sequence)
        if run is not None:
            self._next_sequence = run.sequence + run.rows
        return run

    def _decode(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        try:
            return self._decoder.next_event()
        except PeerError:
            self._header = self._decoder.header  # None where it was the header that could not be read
            raise

    def nack_of(self, error: PeerError) -> Nack:
        """What to tell the peer of an error that `next_event` raised."""
        header = self._header
        sequence = header.sequence if header is not None and header.type in _DATA else 0
        answers = header.sequence if header is not None and header.type in _REQUESTS else None
        return Nack(sequence, error.code, error.message, correlation_id=answers)

    # --- sending

    def send(self, frame: Frame) -> bytes:
        """The bytes of a frame, which is on its way from now on.

        Raises UsageError where the table or the credits forbid it, Refused (TOO_LARGE) for a delta.
        """
        if type(frame) is Ack and frame.correlation_id is None and self.phase is Phase.OPEN and self._serves:
            raw = encode(frame)  # the short way of what a server says most: it may, and answers no request
            if frame.credit is not None:
                self.allowance.grant(frame.credit)
            return raw
        self._check_may_send(saying_of(frame))
        if isinstance(frame, DeltaFrame | BatchFrame):
            self._check_window()
            raw = encode(frame)
            self.window.spend(frame.batch.count if isinstance(frame, BatchFrame) else 1, len(raw))
            return raw
        if isinstance(frame, Ack) and frame.credit is not None and not self._may_grant(self._self):
            raise UsageError("credit before a subscription was granted: wait for that")
        if isinstance(frame, Subscribe | Unsubscribe) and len(self._asked) >= REQUESTS_MAX:
            raise UsageError(_TOO_MANY)
        raw = encode(frame)
        self._note_sent(frame)
        return raw

    def spend(self, deltas: int, size: int) -> None:
        """Charge batch frames that are sent as they lie, without `send`. Raises as that does."""
        self._check_may_send(Saying.BATCH if self._self is Speaker.CLIENT else Saying.LOGGED_BATCH)
        self._check_window()
        self.window.spend(deltas, size)

    def end(self) -> None:
        """Nothing more is read, and nothing said but a Nack, and what became of what had come."""
        self.phase = Phase.ENDED

    # --- helpers

    def _look_at(self, header: Header) -> None:
        """Refuse by its header what may not come, before room is made for it."""
        self._header = header
        refusal = TYPES[self._peer, self.phase][header.type]
        if refusal is not None:
            raise PeerError(*refusal)
        if header.type in _DATA and self._peer is Speaker.CLIENT and not header.sequence:
            raise PeerError(
                ErrorCode.BAD_FRAME,
                f"a {header.type.name} frame with sequence 0, by which answers mean the connection: number "
                "frames from 1",
            )
        if header.type in _DATA and self._serves and header.sequence < self._next_sequence:
            raise PeerError(
                ErrorCode.BAD_FRAME,
                f"sequence {header.sequence}: not above {self._next_sequence - 1}, the last of the deltas "
                "before: number upward, repeats as well",
            )
        if header.type in _DATA and not self.allowance.open:
            raise PeerError(
                ErrorCode.BAD_FRAME,
                f"a {header.type.name} frame without credit: wait for an Ack that grants some",
            )

    def _note_received(self, frame: Frame) -> None:
        refusal = TABLE[self._peer, self.phase][saying_of(frame)]
        if refusal is not None:
            raise PeerError(*refusal)
        match frame:
            case DeltaFrame() | BatchFrame():
                assert self._header is not None
                rows = frame.batch.count if isinstance(frame, BatchFrame) else 1
                self.allowance.spend(rows, HEADER_BYTES + self._header.length)
                self._next_sequence = frame.sequence + rows
            case Subscribe(request=Hello() | UnknownRequest() as hello) if self.phase is Phase.OPENING:
                self.phase = Phase.GREETED
                self._peer = _speaker_of(hello)
            case Subscribe(request=Subscription()) | Unsubscribe():
                if len(self._asked) >= REQUESTS_MAX:
                    raise PeerError(ErrorCode.BAD_FRAME, _TOO_MANY)
                self._note_asked(frame)
            case Ack():
                self._note_answer(frame)
                if frame.credit is not None and self._may_grant(self._peer):
                    self.window.grant(frame.credit)
            case Nack():
                self._note_refused(frame)

    def _note_sent(self, frame: Frame) -> None:
        match frame:
            case Subscribe(request=Hello() as hello) if self.phase is Phase.OPENING:
                self.phase = Phase.GREETED
                self._self = _speaker_of(hello)
            case Subscribe(request=Subscription()) | Unsubscribe():
                self._note_asked(frame)
            case Ack():
                self._note_answer(frame)
                if frame.credit is not None:
                    self.allowance.grant(frame.credit)
            case Nack():
                self._note_refused(frame)

    def _may_grant(self, speaker: Speaker) -> bool:
        """A server grants to producers at any time, a client for deliveries, once there may be some."""
        return speaker is Speaker.SERVER or bool(self._subscriptions)

    def _note_asked(self, frame: Subscribe | Unsubscribe) -> None:
        asked = frame.request if isinstance(frame, Subscribe) else frame
        assert isinstance(asked, Subscription | Unsubscribe)  # the answers to others change nothing here
        self._asked[frame.sequence] = asked

    def _note_answer(self, ack: Ack) -> None:
        """Whichever end it comes from: of an opening hello the end, of a subscription its credit."""
        if ack.welcome is not None and not ack.more:
            self.phase = Phase.OPEN
        asked = None if ack.correlation_id is None else self._asked.pop(ack.correlation_id, None)
        deliveries = self.window if self._serves else self.allowance
        if isinstance(asked, Unsubscribe):
            self._subscriptions.discard(asked.subscription)
            if not self._subscriptions:
                deliveries.begin(NOTHING)
        elif asked is not None:
            if not self._subscriptions:  # the first sets the bound, also after all others have ended
                deliveries.begin(asked.credit)
            elif asked.credit is not None:
                deliveries.grant(asked.credit)
            self._subscriptions.add(asked.subscription)

    def _note_refused(self, nack: Nack) -> None:
        if self.phase in (Phase.OPENING, Phase.GREETED):
            self.end()
        if nack.correlation_id is not None:
            self._asked.pop(nack.correlation_id, None)
        elif nack.is_about_connection and nack.code is not ErrorCode.BAD_REQUEST:
            self._subscriptions.clear()
            (self.window if self._serves else self.allowance).begin(NOTHING)

    def _check_may_send(self, said: Saying) -> None:
        refusal = TABLE[self._self, self.phase][said]
        if refusal is not None:
            raise UsageError(refusal.text)

    def _check_window(self) -> None:
        if not self.window.open:
            raise UsageError(f"no credit is left ({self.window.left}): wait for an Ack that grants some")


def _speaker_of(hello: Hello | UnknownRequest) -> Speaker:
    forwards = isinstance(hello, Hello) and hello.source is Source.REPLICA
    return Speaker.FORWARDER if forwards else Speaker.CLIENT
