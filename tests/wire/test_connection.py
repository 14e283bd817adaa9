"""Connections: which messages each end may send in each phase, credits, and errors of a peer."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire.codec import NEED_BYTES, encode, encode_head
from delta_prop_wire.connection import REQUESTS_MAX, Connection
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.frames import (
    Ack,
    Backpressure,
    BatchFrame,
    Credit,
    Decide,
    Decision,
    DeltaFrame,
    Describe,
    Frame,
    Heartbeat,
    Hello,
    Nack,
    PressureLevel,
    Subscribe,
    Subscribed,
    Subscription,
    Unsubscribe,
    Welcome,
)
from delta_prop_wire.header import pack_header
from delta_prop_wire.message_rules import (
    RULES,
    UNAUTHORIZED_TEXT,
    MessageKind,
    Phase,
    Role,
    Speaker,
    message_kind_of,
)
from delta_prop_wire.spec import ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.topics import ALL
from tests.wire.sealing import frame_with_checksum

DELTA = Delta("doc-1", d.opaque(b"x" * 9))
BATCH = encode_batch([DELTA] * 3, origin=7, base=1)
SLICED = encode_batch([DELTA] * 2, origin=7, base=1, counters=[1, 3], row_offsets=[5, 7])
START = Cursor(bytes(16), 1, 0)
AMPLE_CREDIT = Credit(1000, 1_000_000)
FRAMES: dict[MessageKind, Frame] = {
    MessageKind.HELLO: Subscribe(1, Hello()),
    MessageKind.WELCOME: Ack(correlation_id=1, response=Welcome()),
    MessageKind.SUBSCRIBE: Subscribe(2, Subscription(1, (ALL,))),
    MessageKind.UNSUBSCRIBE: Unsubscribe(3, 1),
    MessageKind.DECIDE: Subscribe(4, Decide("nightly", Decision.QUERY)),
    MessageKind.QUERY: Subscribe(5, Describe()),
    MessageKind.DELTA: DeltaFrame(1, DELTA),
    MessageKind.BATCH: BatchFrame(2, BATCH),
    MessageKind.LOGGED_DELTA: DeltaFrame(5, DELTA, lamport=9),
    MessageKind.LOGGED_BATCH: BatchFrame(5, BATCH, Stamp(9, body_crc=BATCH.crc)),
    MessageKind.SLICED_BATCH: BatchFrame(5, SLICED, Stamp(9, body_crc=SLICED.crc)),
    MessageKind.ACK: Ack(5),
    MessageKind.NACK: Nack(5, ErrorCode.QUEUE_FULL, "full"),
    MessageKind.BACKPRESSURE: Backpressure(1, PressureLevel.WARN),
    MessageKind.HEARTBEAT: Heartbeat(1),
}
# Phases: O opening, G greeted, P open, E ended; + may be sent, ! is refused as UNAUTHORIZED.
GRID = """
               client   forwarder  server
               O G P E  O G P E    O G P E
HELLO          + . + .  + . + .    . . . .
WELCOME        ! . . .  ! . . .    . + + .
SUBSCRIBE      ! + + .  ! + + .    . . . .
UNSUBSCRIBE    ! + + .  ! + + .    . . . .
DECIDE         ! + + .  ! . . .    . . . .
QUERY          ! + + .  ! + + .    . . . .
DELTA          ! . + .  ! . . .    . . . .
BATCH          ! . + .  ! . . .    . . . .
LOGGED_DELTA   ! . . .  ! . . .    . . + .
LOGGED_BATCH   ! . . .  ! . + .    . . + .
SLICED_BATCH   ! . . .  ! . . .    . . + .
ACK            ! . + .  ! . + .    . . + +
NACK           ! . + +  ! . + +    + + + +
BACKPRESSURE   ! . + .  ! . + .    . . + .
HEARTBEAT      ! + + .  ! + + .    . . + .
"""
CELLS = [
    pytest.param(speaker, phase, MessageKind[name], mark, id=f"{speaker.name}-{phase.name}-{name}")
    for name, *marks in (line.split() for line in GRID.strip().splitlines()[2:])
    for (speaker, phase), mark in zip(((s, p) for s in Speaker for p in Phase), marks, strict=True)
]


def connected_pair(phase: Phase = Phase.OPEN, source: Source = Source.LOCAL) -> tuple[Connection, Connection]:
    """Return a client and a server in a phase, with credit in both directions in phase OPEN."""
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    if phase is not Phase.OPENING:
        transmit(client, server, Subscribe(1, Hello(source=source)))
    if phase in (Phase.OPEN, Phase.ENDED):
        transmit(server, client, Ack(correlation_id=1, credit=AMPLE_CREDIT, response=Welcome()))
        transmit(client, server, Subscribe(9, Subscription(9, (ALL,))))
        transmit(server, client, Ack(correlation_id=9, response=Subscribed(9, START, 1, 0)))
    if phase is Phase.ENDED:
        client.end()
        server.end()
    return client, server


def transmit(sender: Connection, receiver: Connection, frame: Frame) -> Frame:
    """Send a frame from one end to the other; check that it arrives unchanged."""
    receiver.receive(sender.send(frame))
    event = receiver.next_event()
    assert event == frame
    assert receiver.next_event() is NEED_BYTES
    return frame


def speaker_and_listener(speaker: Speaker, phase: Phase) -> tuple[Connection, Connection]:
    """Return the connection that sends and the one that receives."""
    client, server = connected_pair(phase, Source.REPLICA if speaker is Speaker.FORWARDER else Source.LOCAL)
    return (server, client) if speaker is Speaker.SERVER else (client, server)


# --- the table


def test_every_cell_is_in_the_grid() -> None:
    assert len(CELLS) == len(Speaker) * len(Phase) * len(MessageKind) == sum(map(len, RULES.values()))
    assert all(message_kind_of(frame) is kind for kind, frame in FRAMES.items())


@pytest.mark.parametrize(("speaker", "phase", "kind", "mark"), CELLS)
def test_message_rules_match_the_grid(speaker: Speaker, phase: Phase, kind: MessageKind, mark: str) -> None:
    sender, receiver = speaker_and_listener(speaker, phase)
    frame = FRAMES[kind]
    if speaker is Speaker.FORWARDER and kind is MessageKind.HELLO:
        frame = Subscribe(1, Hello(source=Source.REPLICA))
    if mark == "+":
        raw = sender.send(frame)
        receiver.receive(raw)
        assert receiver.next_event() == (NEED_BYTES if phase is Phase.ENDED else frame)
        return
    with pytest.raises(UsageError):
        sender.send(frame)
    assert sender.phase is phase
    receiver.receive(encode(frame))
    if phase is Phase.ENDED:
        assert receiver.next_event() is NEED_BYTES
        return
    with pytest.raises(ProtocolError) as caught:
        receiver.next_event()
    assert receiver.phase is Phase.ENDED
    assert caught.value.code is (ErrorCode.UNAUTHORIZED if mark == "!" else ErrorCode.BAD_FRAME)
    assert (caught.value.message == UNAUTHORIZED_TEXT) == (mark == "!")


def test_connection_phases_follow_the_handshake() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    assert client.phase is server.phase is Phase.OPENING
    transmit(client, server, Subscribe(1, Hello()))
    assert client.phase is server.phase is Phase.GREETED
    transmit(server, client, Ack(correlation_id=1, response=Welcome(), more=True))
    assert client.phase is server.phase is Phase.GREETED
    transmit(server, client, Ack(correlation_id=1, response=Welcome()))
    assert client.phase is server.phase is Phase.OPEN
    transmit(client, server, Subscribe(2, Hello()))
    transmit(server, client, Nack(0, ErrorCode.FENCED, "newer", correlation_id=2))
    transmit(server, client, Nack(0, ErrorCode.CURSOR_TOO_OLD, "gone"))
    assert client.phase is server.phase is Phase.OPEN


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.GREETED])
def test_connection_refused_before_it_is_open_has_ended(phase: Phase) -> None:
    client, server = connected_pair(phase)
    transmit(server, client, Nack(0, ErrorCode.UNAUTHORIZED, UNAUTHORIZED_TEXT))
    assert client.phase is server.phase is Phase.ENDED


def test_requests_may_follow_a_hello_at_once() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    frames = [Subscribe(1, Hello()), FRAMES[MessageKind.SUBSCRIBE], FRAMES[MessageKind.QUERY], Heartbeat(1)]
    server.receive(b"".join(map(client.send, frames)))
    assert [server.next_event() for _ in frames] == frames


def test_delta_that_follows_a_hello_at_once_is_refused() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    server.receive(client.send(Subscribe(1, Hello())) + encode(FRAMES[MessageKind.DELTA]))
    server.next_event()
    with pytest.raises(ProtocolError, match="answer to the hello: wait"):
        server.next_event()


@pytest.mark.parametrize("source", Source)
def test_only_a_forwarder_may_send_stamped_batches(source: Source) -> None:
    client, server = connected_pair(source=source)
    if source is Source.REPLICA:
        transmit(client, server, FRAMES[MessageKind.LOGGED_BATCH])
    else:
        with pytest.raises(UsageError, match="log's stamp"):
            client.send(FRAMES[MessageKind.LOGGED_BATCH])


def test_later_hello_with_source_replica_makes_no_forwarder() -> None:
    client, server = connected_pair()
    transmit(client, server, Subscribe(4, Hello(source=Source.REPLICA)))
    with pytest.raises(UsageError):
        client.send(FRAMES[MessageKind.LOGGED_BATCH])
    server.receive(encode(FRAMES[MessageKind.LOGGED_BATCH]))
    with pytest.raises(ProtocolError):
        server.next_event()


# --- receiving


@pytest.mark.parametrize("size", [1, 7, 16, 100, 5000])
def test_frames_are_received_in_pieces_of_any_size(size: int) -> None:
    client, server = connected_pair()
    frames = [BatchFrame(n, BATCH) for n in range(1, 61, 3)]
    raw = b"".join(client.send(frame) for frame in frames)
    received: list[Frame] = []
    while raw:
        space = server.get_buffer()
        count = min(size, len(space), len(raw))
        space[:count] = raw[:count]
        server.buffer_updated(count)
        raw = raw[count:]
        while (event := server.next_event()) is not NEED_BYTES:
            received.append(event)
    assert received == frames
    assert server.buffered_bytes == 0


def test_buffered_bytes_show_a_partial_frame() -> None:
    client, server = connected_pair()
    raw = client.send(FRAMES[MessageKind.BATCH])
    server.receive(raw[:-1])
    assert server.next_event() is NEED_BYTES
    assert server.buffered_bytes == len(raw) - 1


@pytest.mark.parametrize("phase", [Phase.OPENING, Phase.GREETED])
def test_batch_before_the_handshake_is_refused_by_its_header(phase: Phase) -> None:
    _, server = connected_pair(phase)
    server.receive(pack_header(FrameType.BATCH, Flag.BATCHED, 1, 16_000_000))
    with pytest.raises(ProtocolError):
        server.next_event()


def test_nack_of_garbage_does_not_name_the_frame_before() -> None:
    client, server = connected_pair()
    server.receive(client.send(FRAMES[MessageKind.BATCH]) + b"GET / HTTP/1.1\r\n\r\n")
    server.next_event()
    with pytest.raises(ProtocolError) as caught:
        server.next_event()
    assert server.nack_of(caught.value) == Nack(0, ErrorCode.BAD_FRAME, caught.value.message)


def test_error_is_permanent_and_closes_the_connection() -> None:
    client, server = connected_pair()
    server.receive(b"GET / HTTP/1.1\r\n\r\n" + encode(Heartbeat(1)))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="0x47"):
            server.next_event()
    server.receive(encode(Heartbeat(1)))
    assert server.buffered_bytes == 0
    with pytest.raises(UsageError, match="end of the connection"):
        server.send(Heartbeat(1))
    assert client.phase is Phase.OPEN


def test_bytes_after_the_end_are_discarded() -> None:
    _, server = connected_pair(Phase.ENDED)
    for _ in range(100):
        space = server.get_buffer()
        server.buffer_updated(len(space))
    assert server.buffered_bytes == 0
    assert server.next_event() is NEED_BYTES


@pytest.mark.parametrize(
    ("raw", "sequence", "correlation_id"),
    [
        (encode(replace(FRAMES[MessageKind.LOGGED_BATCH], sequence=77)), 77, None),  # type: ignore[type-var]
        (pack_header(FrameType.DELTA, 0, 78, 0), 78, None),
        (pack_header(FrameType.UNSUBSCRIBE, 0, 5, 0), 0, 5),
        (frame_with_checksum(FrameType.SUBSCRIBE, b"\xc1", sequence=6), 0, 6),
        (frame_with_checksum(FrameType.ACK, b"\xc1", sequence=7), 0, None),
    ],
)
def test_nack_names_the_failed_frame(raw: bytes, sequence: int, correlation_id: int | None) -> None:
    client, server = connected_pair()
    server.receive(raw)
    with pytest.raises(ProtocolError) as caught:
        server.next_event()
    nack = server.nack_of(caught.value)
    assert (nack.sequence, nack.correlation_id) == (sequence, correlation_id)
    assert (nack.code, nack.text) == (caught.value.code, caught.value.message)
    client.receive(server.send(nack))
    assert client.next_event() == nack


def test_nack_of_an_unreadable_first_header_names_no_frame() -> None:
    server = Connection(Role.SERVER)
    server.receive(bytes(16))
    with pytest.raises(ProtocolError) as caught:
        server.next_event()
    assert server.nack_of(caught.value) == Nack(0, ErrorCode.BAD_FRAME, caught.value.message)


# --- credits


def test_producer_has_no_credit_before_a_grant() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    transmit(client, server, Subscribe(1, Hello()))
    transmit(server, client, Ack(correlation_id=1, response=Welcome()))
    with pytest.raises(UsageError, match="no credit left"):
        client.send(FRAMES[MessageKind.BATCH])
    server.receive(encode(FRAMES[MessageKind.BATCH])[:16])
    with pytest.raises(ProtocolError, match="without credit"):
        server.next_event()


def test_nothing_is_delivered_before_a_subscription_is_granted() -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    transmit(client, server, Subscribe(1, Hello()))
    transmit(server, client, Ack(correlation_id=1, response=Welcome(), credit=AMPLE_CREDIT))
    for frame in (
        Subscribe(2, Subscription(1, (ALL,), credit=AMPLE_CREDIT)),
        Subscribe(3, Subscription(1, (ALL,), credit=Credit(1, 1))),
    ):
        transmit(client, server, frame)
    assert not server.send_window.is_open
    with pytest.raises(UsageError, match="before a subscription"):
        client.send(Ack(credit=AMPLE_CREDIT))
    server.receive(encode(Ack(credit=AMPLE_CREDIT)))
    server.next_event()
    assert not server.send_window.is_open
    transmit(server, client, Nack(0, ErrorCode.BAD_REQUEST, "no", correlation_id=2))
    transmit(server, client, Ack(correlation_id=2, response=Subscribed(1, START, 1, 0)))
    assert not server.send_window.is_open
    transmit(server, client, Ack(correlation_id=3, response=Subscribed(1, START, 1, 0)))
    assert server.send_window.remaining == client.receive_window.remaining == (1, 1)
    transmit(client, server, Ack(credit=AMPLE_CREDIT))
    assert server.send_window.remaining == client.receive_window.remaining == (1001, 1_000_001)
    transmit(client, server, Subscribe(4, Subscription(2, (ALL,), credit=Credit(2, 2))))
    transmit(server, client, Ack(correlation_id=4, response=Subscribed(2, START, 1, 0)))
    assert server.send_window.remaining == client.receive_window.remaining == (1003, 1_000_003)


def test_subscription_without_credit_is_unbounded() -> None:
    client, server = connected_pair()
    assert server.send_window.remaining is client.receive_window.remaining is None
    transmit(client, server, Subscribe(4, Subscription(2, (ALL,), credit=Credit(2, 2))))
    transmit(server, client, Ack(correlation_id=4, response=Subscribed(2, START, 1, 0)))
    assert server.send_window.remaining is client.receive_window.remaining is None


def test_first_subscription_after_the_last_ended_sets_new_credit() -> None:
    client, server = connected_pair()
    transmit(client, server, Unsubscribe(4, 9))
    transmit(server, client, Ack(correlation_id=4, processed=17))
    assert server.send_window.remaining == client.receive_window.remaining == (0, 0)
    with pytest.raises(UsageError, match="before a subscription"):
        client.send(Ack(credit=AMPLE_CREDIT))
    transmit(client, server, Subscribe(5, Subscription(1, (ALL,), credit=Credit(4, 4))))
    transmit(server, client, Ack(correlation_id=5, response=Subscribed(1, START, 1, 0)))
    assert server.send_window.remaining == client.receive_window.remaining == (4, 4)
    transmit(client, server, Subscribe(6, Subscription(2, (ALL,))))
    transmit(server, client, Ack(correlation_id=6, response=Subscribed(2, START, 1, 0)))
    transmit(client, server, Unsubscribe(7, 1))
    transmit(server, client, Ack(correlation_id=7))
    assert server.send_window.remaining == client.receive_window.remaining == (4, 4)


def test_ack_of_a_client_answers_no_request() -> None:
    client, server = connected_pair()
    transmit(client, server, Subscribe(4, Subscription(2, (ALL,), credit=Credit(2, 2))))
    transmit(client, server, Unsubscribe(5, 9))
    transmit(client, server, Unsubscribe(6, 2))
    for sequence in (4, 5, 6):
        transmit(client, server, Ack(correlation_id=sequence, response=Subscribed(2, START, 1, 0)))
    assert server.send_window.remaining is client.receive_window.remaining is None
    for sequence in (4, 5, 6):
        assert server.send_window.remaining is client.receive_window.remaining is None
        transmit(server, client, Ack(correlation_id=sequence))
    assert server.send_window.remaining == client.receive_window.remaining == (0, 0)


@pytest.mark.parametrize("code", ErrorCode)
def test_nack_of_the_connection_ends_its_subscriptions(code: ErrorCode) -> None:
    client, server = connected_pair()
    transmit(server, client, Nack(5, code, "of a frame"))
    transmit(server, client, Nack(0, code, "of a request", correlation_id=77))
    assert server.send_window.is_open
    assert client.receive_window.is_open
    transmit(server, client, Nack(0, code, "of the connection"))
    stays_open = code is ErrorCode.BAD_REQUEST
    assert server.send_window.is_open is client.receive_window.is_open is stays_open


def test_unanswered_requests_are_bounded() -> None:
    client, server = connected_pair()
    for sequence in range(REQUESTS_MAX):
        transmit(client, server, Subscribe(sequence, Subscription(1, (ALL,))))
    one_more = Subscribe(REQUESTS_MAX, Subscription(1, (ALL,)))
    with pytest.raises(UsageError, match="wait for some answers"):
        client.send(one_more)
    server.receive(encode(one_more))
    with pytest.raises(ProtocolError, match="wait for some answers"):
        server.next_event()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 8), st.integers(0, 1500)),
        st.tuples(st.sampled_from(["batch", "delta", "stored"]), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@given(steps=STEPS, from_server=st.booleans())
def test_both_ends_count_credit_equally(steps: list[tuple[str, int, int]], from_server: bool) -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    transmit(client, server, Subscribe(1, Hello()))
    transmit(server, client, Ack(correlation_id=1, response=Welcome()))
    transmit(client, server, Subscribe(2, Subscription(1, (ALL,), credit=Credit(0, 0))))
    transmit(server, client, Ack(correlation_id=2, response=Subscribed(1, START, 1, 0)))
    sender, receiver = (server, client) if from_server else (client, server)
    frames = {
        "delta": FRAMES[MessageKind.LOGGED_DELTA if from_server else MessageKind.DELTA],
        "batch": FRAMES[MessageKind.LOGGED_BATCH if from_server else MessageKind.BATCH],
    }
    deltas = size = 0
    for number, (step, more_deltas, more_bytes) in enumerate(steps):
        sequence = 5 + 3 * number
        if step == "grant":
            transmit(receiver, sender, Ack(credit=Credit(more_deltas, more_bytes)))
            deltas, size = deltas + more_deltas, size + more_bytes
        elif deltas <= 0 or size <= 0:
            with pytest.raises(UsageError, match="no credit"):
                sender.spend(3, 1) if step == "stored" else sender.send(frames[step])
        else:
            frame = replace(frames["batch" if step == "stored" else step], sequence=sequence)
            raw = encode(frame)
            if step == "stored":
                sender.spend(3, len(raw))
                receiver.receive(raw)
                receiver.next_event()
            else:
                transmit(sender, receiver, frame)
            deltas, size = deltas - (1 if step == "delta" else 3), size - len(raw)
        assert (
            sender.send_window.remaining
            == receiver.receive_window.remaining
            == (max(deltas, 0), max(size, 0))
        )


@pytest.mark.parametrize("source", [Source.LOCAL, Source.REPLICA])
@pytest.mark.parametrize(
    ("first_sequence", "sequence", "is_accepted"),
    [(5, 8, True), (5, 99, True), (5, 7, False), (5, 5, False), (5, 1, False)],
)
def test_sequence_of_a_producer_rises_above_the_last_row(
    source: Source, first_sequence: int, sequence: int, is_accepted: bool
) -> None:
    _, server = connected_pair(source=source)
    for number in (first_sequence, sequence):
        stamp = Stamp(9) if source is Source.REPLICA else None
        server.receive(encode(BatchFrame(number, BATCH, stamp)))
    assert isinstance(server.next_event(), BatchFrame)
    if is_accepted:
        assert isinstance(server.next_event(), BatchFrame)
        return
    with pytest.raises(ProtocolError, match=rf"sequence {sequence} is not above 7\b.* send ") as caught:
        server.next_event()
    assert caught.value.code is ErrorCode.BAD_FRAME
    assert server.nack_of(caught.value).sequence == sequence


def test_sequence_after_a_delta_rises_by_one() -> None:
    _, server = connected_pair()
    server.receive(b"".join(encode(DeltaFrame(sequence, DELTA)) for sequence in (5, 6, 6)))
    assert isinstance(server.next_event(), DeltaFrame)
    assert isinstance(server.next_event(), DeltaFrame)
    with pytest.raises(ProtocolError, match="sequence 6 is not above 6,"):
        server.next_event()


def test_sequence_of_a_forwarder_begins_at_zero() -> None:
    _, server = connected_pair(source=Source.REPLICA)
    server.receive(encode(BatchFrame(0, BATCH, Stamp(9))) + encode(BatchFrame(3, BATCH, Stamp(12))))
    assert isinstance(server.next_event(), BatchFrame)
    assert isinstance(server.next_event(), BatchFrame)
    server.receive(encode(BatchFrame(0, BATCH, Stamp(15))))
    with pytest.raises(ProtocolError, match="sequence 0 is not above 5,"):
        server.next_event()


def test_stored_frame_is_charged_by_its_rows_and_bytes() -> None:
    client, server = connected_pair()
    stored = encode_head(BATCH, 5, Stamp(9, body_crc=BATCH.crc)) + bytes(BATCH.body)
    server.spend(3, len(stored))
    client.receive(stored)
    assert isinstance(client.next_event(), BatchFrame)
    server.end()
    with pytest.raises(UsageError):
        server.spend(3, len(stored))


# --- random input


def test_any_peer_input_raises_only_protocol_errors(full: bool) -> None:
    rng = random.Random(11)
    frames = [encode(frame) for frame in FRAMES.values()]
    for _ in range(50_000 if full else 300):
        speaker, phase = rng.choice([*Speaker]), rng.choice([*Phase])
        _, listener = speaker_and_listener(speaker, phase)
        raw = bytearray(b"".join(rng.choices(frames, k=rng.randrange(1, 4))))
        for _ in range(rng.randrange(3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        receive_all(listener, raw)


def receive_all(listener: Connection, raw: bytes | bytearray) -> None:
    listener.receive(raw)
    event: Any = None
    try:
        while event is not NEED_BYTES:
            event = listener.next_event()
    except ProtocolError as error:
        listener.send(listener.nack_of(error))
