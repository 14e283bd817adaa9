"""One connection without its socket: decodes and encodes frames, and enforces rules and credit both ways.

Any bytes of a peer can at worst raise ProtocolError, which ends the connection; misuse by the caller raises
UsageError and changes nothing.
"""

from __future__ import annotations

from typing import Literal

from delta_prop_wire.codec import NEED_BYTES, Decoder, _NeedBytes, encode
from delta_prop_wire.credit_window import NO_CREDIT, CreditWindow
from delta_prop_wire.delta import Source
from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.frame_runs import FrameRun
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    DeltaFrame,
    Frame,
    Hello,
    Nack,
    Subscribe,
    Subscription,
    UnknownRequest,
    Unsubscribe,
)
from delta_prop_wire.header import Header
from delta_prop_wire.message_rules import (
    RULES,
    TYPE_RULES,
    MessageKind,
    Phase,
    Role,
    Speaker,
    message_kind_of,
)
from delta_prop_wire.spec import FRAME_PAYLOAD_BYTES_MAX, HEADER_BYTES, ErrorCode, FrameType

REQUESTS_MAX = 256
"""The maximum number of unanswered Subscribes and Unsubscribes of one connection."""

_TOO_MANY = f"{REQUESTS_MAX} requests have no answer yet: wait for some answers"
_DATA = frozenset({FrameType.DELTA, FrameType.BATCH})
_REQUESTS = frozenset({FrameType.SUBSCRIBE, FrameType.UNSUBSCRIBE})


class Connection:
    """One end of a connection.

    `phase`: how far the connection has come. `send_window`: the credit that this end may still spend;
    `receive_window`: the credit that the other end may still spend.
    """

    def __init__(self, role: Role, *, payload_bytes_max: int = FRAME_PAYLOAD_BYTES_MAX) -> None:
        self.phase = Phase.OPENING
        self.send_window = CreditWindow(NO_CREDIT)
        self.receive_window = CreditWindow(NO_CREDIT)
        self._is_server = role is Role.SERVER
        self._local_speaker = Speaker.SERVER if self._is_server else Speaker.CLIENT
        self._remote_speaker = Speaker.CLIENT if self._is_server else Speaker.SERVER
        self._decoder = Decoder(payload_bytes_max=payload_bytes_max, on_header=self._check_header)
        self.receive_buffer = self._decoder.receive_buffer
        """The bytes received and not yet taken, from `start` to `end`, for reading only."""
        self.get_buffer = self._decoder.get_buffer
        """Return the memory to receive into. Raises UsageError if events have to be taken first."""
        self._header: Header | None = None  # of the frame that is received now, or was received last
        self._next_sequence = 0  # the lowest sequence allowed for a producer's next deltas
        self._error: ProtocolError | None = None
        self._pending_requests: dict[int, Subscription | Unsubscribe] = {}  # unanswered, by sequence
        self._subscriptions: set[int] = set()  # granted and not ended

    @property
    def stream(self) -> int:
        """The stream that a producer's batches are for, in both directions; 0 unless it was set."""
        return self._decoder.stream

    @stream.setter
    def stream(self, stream: int) -> None:
        self._decoder.stream = stream

    # --- receiving

    @property
    def buffered_bytes(self) -> int:
        """The number of bytes received of a frame that is incomplete."""
        return self._decoder.buffered_bytes

    @property
    def last_frame_bytes(self) -> int:
        """The size of the last received frame, as charged to credit."""
        return 0 if self._header is None else HEADER_BYTES + self._header.length

    @property
    def incoming_frame_bytes(self) -> int:
        """The size of the frame being received, from its header; 0 before the header is complete."""
        header = self._decoder.header
        return 0 if header is None else HEADER_BYTES + header.length

    def buffer_updated(self, count: int) -> None:
        """Record that `count` bytes were written into the memory that `get_buffer` returned."""
        if self.phase is not Phase.ENDED:
            self.receive_buffer.buffer_updated(count)

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Copy in bytes that were received elsewhere. Raises UsageError as `get_buffer` does."""
        if self.phase is not Phase.ENDED:
            self._decoder.receive(chunk)

    def next_event(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        """Return the next whole frame, or NEED_BYTES; after a normal end always NEED_BYTES.

        On a ProtocolError, send `nack_of` the error and close; each later call raises it again.
        """
        if self.phase is Phase.ENDED:
            if self._error is not None:
                raise ProtocolError(self._error.code, self._error.message)
            return NEED_BYTES
        try:
            frame = self._decode()
            if frame is not NEED_BYTES:
                self._note_received(frame)
        except ProtocolError as error:
            self._error = error
            self.end()
            raise
        return frame

    def next_run(self) -> FrameRun | None:
        """Return the next frames of a producer if they form a run, else None; then call `next_event`."""
        if self.phase is not Phase.OPEN or self._remote_speaker is not Speaker.CLIENT:
            return None
        run = self._decoder.next_run(self.receive_window, self._next_sequence)
        if run is not None:
            self._next_sequence = run.sequence + run.rows
        return run

    def _decode(self) -> Frame | Literal[_NeedBytes.NEED_BYTES]:
        try:
            return self._decoder.next_event()
        except ProtocolError:
            self._header = self._decoder.header  # None if the header itself was invalid
            raise

    def nack_of(self, error: ProtocolError) -> Nack:
        """Return the Nack that reports an error of `next_event` to the peer."""
        header = self._header
        sequence = header.sequence if header is not None and header.type in _DATA else 0
        correlation_id = header.sequence if header is not None and header.type in _REQUESTS else None
        return Nack(sequence, error.code, error.message, correlation_id=correlation_id)

    # --- sending

    def send(self, frame: Frame) -> bytes:
        """Encode a frame and record it as sent.

        Raises UsageError if the rules or the credit forbid it, Refused (TOO_LARGE) for a delta.
        """
        if (
            type(frame) is Ack
            and frame.correlation_id is None
            and self.phase is Phase.OPEN
            and self._is_server
        ):
            raw = encode(frame)  # fast path: a server may always send an Ack that answers no request
            if frame.credit is not None:
                self.receive_window.grant(frame.credit)
            return raw
        self._check_can_send(message_kind_of(frame))
        if isinstance(frame, DeltaFrame | BatchFrame):
            self._check_window()
            raw = encode(frame, stream=self.stream)
            self.send_window.spend(frame.batch.count if isinstance(frame, BatchFrame) else 1, len(raw))
            return raw
        if isinstance(frame, Ack) and frame.credit is not None and not self._can_grant(self._local_speaker):
            raise UsageError(
                "credit before a subscription was granted: wait for the answer to the subscription"
            )
        if isinstance(frame, Subscribe | Unsubscribe) and len(self._pending_requests) >= REQUESTS_MAX:
            raise UsageError(_TOO_MANY)
        raw = encode(frame)
        self._note_sent(frame)
        return raw

    def spend(self, delta_count: int, size: int) -> None:
        """Charge batch frames that are sent as stored, without `send`. Raises UsageError as `send` does."""
        self._check_can_send(
            MessageKind.BATCH if self._local_speaker is Speaker.CLIENT else MessageKind.LOGGED_BATCH
        )
        self._check_window()
        self.send_window.spend(delta_count, size)

    def end(self) -> None:
        """End the connection: no more frames are read, and only Nacks and a server's Acks may be sent."""
        self.phase = Phase.ENDED

    # --- helpers

    def _check_header(self, header: Header) -> None:
        """Raise ProtocolError if a header shows that its frame is not allowed, before memory is reserved."""
        self._header = header
        violation = TYPE_RULES[self._remote_speaker, self.phase][header.type]
        if violation is not None:
            raise ProtocolError(*violation)
        if header.type in _DATA and self._remote_speaker is Speaker.CLIENT and not header.sequence:
            raise ProtocolError(
                ErrorCode.BAD_FRAME,
                f"a {header.type.name} frame with sequence 0, which in an Ack or Nack stands for the "
                "connection: number deltas from 1",
            )
        if header.type in _DATA and self._is_server and header.sequence < self._next_sequence:
            raise ProtocolError(
                ErrorCode.BAD_FRAME,
                f"sequence {header.sequence} is not above {self._next_sequence - 1}, the last delta's: "
                "send rising sequences, also for duplicates",
            )
        if header.type in _DATA and not self.receive_window.is_open:
            raise ProtocolError(
                ErrorCode.BAD_FRAME,
                f"a {header.type.name} frame without credit: wait for an Ack that grants credit",
            )

    def _note_received(self, frame: Frame) -> None:
        violation = RULES[self._remote_speaker, self.phase][message_kind_of(frame)]
        if violation is not None:
            raise ProtocolError(*violation)
        match frame:
            case DeltaFrame() | BatchFrame():
                assert self._header is not None
                rows = frame.batch.count if isinstance(frame, BatchFrame) else 1
                self.receive_window.spend(rows, HEADER_BYTES + self._header.length)
                self._next_sequence = frame.sequence + rows
            case Subscribe(request=Hello() | UnknownRequest() as hello) if self.phase is Phase.OPENING:
                self.phase = Phase.GREETED
                self._remote_speaker = _speaker_of(hello)
            case Subscribe(request=Subscription()) | Unsubscribe():
                if len(self._pending_requests) >= REQUESTS_MAX:
                    raise ProtocolError(ErrorCode.BAD_FRAME, _TOO_MANY)
                self._note_request(frame)
            case Ack():
                if not self._is_server:  # a client answers nothing
                    self._note_answer(frame)
                if frame.credit is not None and self._can_grant(self._remote_speaker):
                    self.send_window.grant(frame.credit)
            case Nack():
                self._note_refused(frame)

    def _note_sent(self, frame: Frame) -> None:
        match frame:
            case Subscribe(request=Hello() as hello) if self.phase is Phase.OPENING:
                self.phase = Phase.GREETED
                self._local_speaker = _speaker_of(hello)
            case Subscribe(request=Subscription()) | Unsubscribe():
                self._note_request(frame)
            case Ack():
                if self._is_server:
                    self._note_answer(frame)
                if frame.credit is not None:
                    self.receive_window.grant(frame.credit)
            case Nack():
                self._note_refused(frame)

    def _can_grant(self, speaker: Speaker) -> bool:
        """True if the speaker may grant credit: a server always, a client once it has a subscription."""
        return speaker is Speaker.SERVER or bool(self._subscriptions)

    def _note_request(self, frame: Subscribe | Unsubscribe) -> None:
        request = frame.request if isinstance(frame, Subscribe) else frame
        assert isinstance(
            request, Subscription | Unsubscribe
        )  # answers to other requests change nothing here
        self._pending_requests[frame.sequence] = request

    def _note_answer(self, ack: Ack) -> None:
        """Apply an Ack of the server: a welcome opens the connection, a subscription sets its credit."""
        if ack.welcome is not None and not ack.more:
            self.phase = Phase.OPEN
        request = None if ack.correlation_id is None else self._pending_requests.pop(ack.correlation_id, None)
        delivery_window = self.send_window if self._is_server else self.receive_window
        if isinstance(request, Unsubscribe):
            self._subscriptions.discard(request.subscription)
            if not self._subscriptions:
                delivery_window.reset(NO_CREDIT)
        elif request is not None:
            if not self._subscriptions:  # the first subscription sets the balance
                delivery_window.reset(request.credit)
            elif request.credit is not None:
                delivery_window.grant(request.credit)
            self._subscriptions.add(request.subscription)

    def _note_refused(self, nack: Nack) -> None:
        if self.phase in (Phase.OPENING, Phase.GREETED):
            self.end()
        if nack.correlation_id is not None:
            self._pending_requests.pop(nack.correlation_id, None)
        elif nack.is_about_connection and nack.code is not ErrorCode.BAD_REQUEST:
            self._subscriptions.clear()
            (self.send_window if self._is_server else self.receive_window).reset(NO_CREDIT)

    def _check_can_send(self, message: MessageKind) -> None:
        violation = RULES[self._local_speaker, self.phase][message]
        if violation is not None:
            raise UsageError(violation.text)

    def _check_window(self) -> None:
        if not self.send_window.is_open:
            raise UsageError(
                f"no credit left ({self.send_window.remaining}): wait for an Ack that grants credit"
            )


def _speaker_of(hello: Hello | UnknownRequest) -> Speaker:
    is_forwarder = isinstance(hello, Hello) and hello.source is Source.REPLICA
    return Speaker.FORWARDER if is_forwarder else Speaker.CLIENT
