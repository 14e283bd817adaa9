"""The codec against golden bytes, every split point, truncation, flipped bits and garbage."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from delta_prop_wire import delta as d
from delta_prop_wire.algebra import State
from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import NEED_BYTES, Decoder, decode, encode, encode_head
from delta_prop_wire.compression import Compression
from delta_prop_wire.control_rows import OF_THE_LOG
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_vectors, encode_void
from delta_prop_wire.errors import PeerError
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    Backpressure,
    BatchFrame,
    Credit,
    Decide,
    Decision,
    DeltaFrame,
    Filter,
    Frame,
    Granted,
    Heartbeat,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    Level,
    Nack,
    OriginClaim,
    OriginGrant,
    RefusedRow,
    StagedPart,
    Start,
    StartAt,
    Subscribe,
    Subscription,
    Unsubscribe,
    Welcome,
)
from delta_prop_wire.header import CONTROL_PAYLOAD_BYTES_MAX, DELTA_PAYLOAD_BYTES_MAX, pack_header
from delta_prop_wire.spec import COUNTER_MAX, FRAME_PAYLOAD_BYTES_MAX, ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.states import StateRow, encode_states
from delta_prop_wire.topics import Topic
from tests.wire.control_batches import control_batch

DOCS = Path(__file__).parents[2] / "docs"
ORIGIN = 0x0000_0ABC_DEF0_0002
CURSOR = Cursor(bytes(range(16)), 3, 42)
SPARSE = Delta("doc-1", d.sparse([0, 7], [0.5, -1.25]), "docs", dot=Dot(ORIGIN, 5))
RICH = Delta(
    "doc-2",
    d.create([1.0, 2.0, -0.5]),
    "docs",
    id=bytes(range(16)),
    dot=Dot(ORIGIN, 6),
    parents=(Dot(ORIGIN, 5), bytes(range(16, 32))),
    clock=(Dot(1, 7), Dot(2, 9)),
    timestamp=0x0192_0000_0000_0001,
    priority=Priority.HIGH,
    source=Source.IMPORT,
    metadata={"title": "Büro", "gone": None, "size": {"pages": 12}},
    topics=("news",),
    expect=Dot(ORIGIN, 4),
)


def small_batch(**options: Any) -> Batch:
    return encode_batch([SPARSE, RICH_ROW], origin=ORIGIN, base=5, priority=Priority.HIGH, **options)


RICH_ROW = dataclasses.replace(RICH, id=None, clock=(), timestamp=0)
STAMP = Stamp(
    lamport=900,
    append_time=1_700_000_000_000_000,
    previous_crc=0x01020304,
    body_crc=small_batch().crc,
    synced_offset=17,
    source=Source.IMPORT,
)


def states_batch() -> Batch:
    vector = np.array([1.5, 2.0, -0.5], np.float32)
    return encode_states(
        [
            StateRow("docs", "doc-1", State(True, vector, None, {"title": "Büro"}, 1, (912, ORIGIN, 9)), 20),
            StateRow("docs", "doc-2", State(ignored=0, key=(913, ORIGIN, 10)), 21),
            StateRow("rows", "r-9", State(True, None, b"raw", {}, 0, (7, 1, 3)), 4),
        ]
    )


def cut_batch() -> Batch:
    """Rows 0 and 2 of a batch of three that lies at offset 17."""
    return encode_batch(
        [SPARSE, dataclasses.replace(RICH_ROW, parents=(), expect=None)],
        origin=ORIGIN,
        base=5,
        previous=4,
        counters=[5, 7],
        row_offsets=[17, 19],
        priority=Priority.HIGH,
    )


VOID = encode_void(origin=ORIGIN, base=8, count=2, code=ErrorCode.INVALID_DELTA, refused_crc=0x0A0B0C0D)
OWN_ROWS = {
    kind.name.lower().replace("_", " "): control_batch(bytes((kind,)) + b"what follows")
    for kind in sorted(OF_THE_LOG)
}
"""Of the types that a log will write for itself. What follows the type is open, so this stands for it."""
CUT_STAMP = dataclasses.replace(STAMP, previous_crc=0, body_crc=cut_batch().crc)
STATE_STAMP = dataclasses.replace(STAMP, lamport=913, body_crc=states_batch().crc)
SAMPLES: dict[str, Frame] = {
    "heartbeat without payload": Heartbeat(1),
    "heartbeat": Heartbeat(2, sent_us=5_000_000, echo_us=4_900_000, delivered=17, received=99),
    "hello": Subscribe(
        1,
        Hello(
            features=("lz4", "zstd"),
            token="secret",
            origins=(OriginClaim(ORIGIN, 1),),
            source=Source.IMPORT,
        ),
    ),
    "answer to hello": Ack(
        answers=1,
        credit=Credit(1000, 4_194_304),
        welcome=Welcome(
            features=("zstd",), origins=(OriginGrant(ORIGIN, 1, 4),), log=CURSOR, level=AckLevel.DURABLE
        ),
    ),
    "hello that says nothing": Subscribe(1, Hello()),
    "hello of a forwarder": Subscribe(
        1, Hello(source=Source.REPLICA, client="service in Graz", log_id=bytes(range(16, 32)))
    ),
    "answer to a forwarder": Ack(
        answers=1, welcome=Welcome(origins=(OriginGrant(ORIGIN, 1, 4),), more=True, log=CURSOR)
    ),
    "answer to a forwarder, last page": Ack(
        answers=1,
        credit=Credit(1000, 4_194_304),
        welcome=Welcome(origins=(OriginGrant(ORIGIN + 16, 2, 0),), log=CURSOR),
    ),
    "delta": DeltaFrame(5, SPARSE, ack_wanted=True),
    "delta with all fields": DeltaFrame(6, RICH, ack_wanted=True, ack_level=AckLevel.DURABLE),
    "batch": BatchFrame(5, small_batch(), ack_wanted=True),
    "batch from the log": BatchFrame(17, small_batch(), STAMP),
    "delta from the log": DeltaFrame(17, SPARSE, lamport=900),
    "batch cut by a filter": BatchFrame(17, cut_batch(), CUT_STAMP),
    "batch of void dots": BatchFrame(
        20, VOID, dataclasses.replace(STAMP, lamport=903, body_crc=VOID.crc, source=Source.LOCAL)
    ),
    **{
        f"batch of {name} rows": BatchFrame(
            22 + place,
            rows,
            dataclasses.replace(STAMP, lamport=905 + place, body_crc=rows.crc, source=Source.LOCAL),
        )
        for place, (name, rows) in enumerate(OWN_ROWS.items())
    },
    "batch of states": BatchFrame(0, states_batch(), STATE_STAMP),
    "ack": Ack(6, ranges=(AckRange(5, 5, 17), AckRange(6, 6, 3, True)), credit=Credit(2, 416)),
    "nack": Nack(
        7,
        ErrorCode.QUEUE_FULL,
        "80000 of 100000 deltas wait: try again",
        retry_after_ms=250,
        details={"depth": 80000, "capacity": 100000},
    ),
    "nack of an overlap": Nack(
        5, ErrorCode.OVERLAP, "counters up to 5 are done with: send the rest", details={"watermark": 5}
    ),
    "nack of a request": Nack(0, ErrorCode.BAD_REQUEST, "subscription 9 is unknown", answers=4),
    "nack of the connection": Nack(
        0, ErrorCode.SHUTTING_DOWN, "the service ends: connect again", retry_after_ms=1000
    ),
    "nack of a row": Nack(8, ErrorCode.INVALID_DELTA, "row 1: indices: 9 is outside", row=1, field="indices"),
    "backpressure": Backpressure(9, Level.THROTTLE, 90_000, 100_000, rate=2500.0, retry_after_ms=40),
    "subscribe": Subscribe(
        2,
        Subscription(
            1,
            (Topic.parse("ns:docs"), Topic.parse("op:delete"), Topic.parse("c:news")),
            Start(StartAt.CURSOR, CURSOR),
            Credit(1000, 1_048_576),
            group="search",
            filter=Filter((Source.LOCAL, Source.IMPORT), (Priority.CRITICAL,)),
        ),
    ),
    "subscribe to deltas": Subscribe(
        2, Subscription(1, (Topic.parse("*"),), Start(StartAt.EARLIEST), deltas=True)
    ),
    "answer to subscribe": Ack(answers=2, granted=Granted(1, CURSOR, 100, 10)),
    "ack of a subscriber": Ack(dealt_with=19, cursor=CURSOR, credit=Credit(2, 416)),
    "heartbeat of a server": Heartbeat(3, sent_us=7_000_000, dealt_with=20),
    "unsubscribe": Unsubscribe(3, 1),
    "hello of a part of a job": Subscribe(
        1, Hello(origins=(OriginClaim(ORIGIN, 0),), job=JobPart("nightly", 7, 23))
    ),
    "decide": Subscribe(
        2, Decide("nightly", Decision.COMMIT, (StagedPart(0, 17, 1000, 0x0A0B0C0D), StagedPart(7, 23, 250)))
    ),
    "decide to drop one run": Subscribe(3, Decide("nightly", Decision.ABORT, run=0x0A0B0C0D)),
    "answer to decide": Ack(answers=2, job=JobStatus(JobState.COMMITTED, 1250, published=1000, refused=1)),
    "answer that tells of a refused row": Ack(
        answers=4,
        job=JobStatus(
            JobState.PUBLISHED,
            1250,
            published=1249,
            refused=1,
            refused_rows=(
                RefusedRow(7, 249, "doc-1", ErrorCode.INVALID_DELTA, "vector_id: 'doc-1' is unknown"),
            ),
        ),
    ),
}
NAMES = pytest.mark.parametrize("name", SAMPLES)
WITH_DELTAS = pytest.mark.parametrize(
    "name", [name for name in SAMPLES if name.startswith(("delta", "batch"))]
)


def events(decoder: Decoder) -> list[Frame]:
    found = []
    while (event := decoder.next_event()) is not NEED_BYTES:
        found.append(event)
    return found


def received(*chunks: bytes) -> list[Frame]:
    decoder = Decoder()
    found = []
    for chunk in chunks:
        decoder.receive(chunk)
        found += events(decoder)
    assert decoder.buffered_bytes == 0
    return found


def plain(value: object) -> object:
    """A value of a frame as JSON can hold it: what stands beside the golden bytes."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, Topic):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Batch):
        return [row_of(value, row) for row in range(value.count)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: field for name, field in fields.items() if field not in (None, [], {})}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def row_of(batch: Batch, row: int) -> object:
    told = plain(batch.delta(row))
    if batch.row_offsets is not None and isinstance(told, dict):
        told["offset"] = int(batch.row_offsets[row])
    return told


def golden() -> dict[str, dict[str, Any]]:
    entries = json.loads((DOCS / "protocol-golden.json").read_text())
    return {entry["name"]: entry for entry in entries["frames"]}


# --- golden bytes


def test_the_first_golden_frame() -> None:
    frame = bytes.fromhex("D3 01 05 00 00 00 00 00 00 00 00 01 00 00 00 00")
    assert encode(Heartbeat(1)) == frame
    assert decode(frame) == Heartbeat(1)


def test_every_sample_has_golden_bytes() -> None:
    assert list(golden()) == list(SAMPLES)


@NAMES
def test_golden_bytes(name: str) -> None:
    entry = golden()[name]
    raw = bytes.fromhex(entry["hex"])
    assert encode(SAMPLES[name]) == raw
    assert decode(raw) == SAMPLES[name]
    assert entry["type"] == FrameType(raw[2]).name
    assert entry["fields"] == plain(decode(raw))


# --- streams


@NAMES
def test_whole_byte_by_byte_and_with_bytes_left_over(name: str) -> None:
    frame, raw = SAMPLES[name], encode(SAMPLES[name])
    assert received(raw) == [frame]
    assert received(*(bytes((byte,)) for byte in raw)) == [frame]
    decoder = Decoder()
    decoder.receive(raw + raw[:7])
    assert events(decoder) == [frame]
    assert decoder.buffered_bytes == 7
    decoder.receive(raw[7:])
    assert events(decoder) == [frame]


@NAMES
def test_every_split_point(name: str) -> None:
    frame, raw = SAMPLES[name], encode(SAMPLES[name])
    for at in range(1, len(raw)):
        assert received(raw[:at], raw[at:]) == [frame]


@NAMES
def test_truncated_anywhere_is_never_an_event(name: str) -> None:
    raw = encode(SAMPLES[name])
    for length in range(len(raw)):
        decoder = Decoder()
        decoder.receive(raw[:length])
        assert decoder.next_event() is NEED_BYTES
        assert decoder.buffered_bytes == length
        with pytest.raises(PeerError):
            decode(raw[:length])


def test_frames_in_a_row_in_any_chunks() -> None:
    raw = b"".join(encode(frame) for frame in SAMPLES.values())
    for size in (1, 15, 16, 17, 64, 1000, len(raw)):
        chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert received(*chunks) == list(SAMPLES.values())


def test_a_frame_that_is_kept_is_not_changed_by_what_comes_after() -> None:
    decoder = Decoder()
    decoder.receive(encode(SAMPLES["batch"]))
    (first,) = events(decoder)
    decoder.receive(encode(SAMPLES["batch from the log"]) * 20)
    assert len(events(decoder)) == 20
    assert first == SAMPLES["batch"]


# --- damage


@WITH_DELTAS
def test_every_flipped_bit_is_refused_or_well_typed(name: str) -> None:
    frame = SAMPLES[name]
    raw = bytearray(encode(frame))
    passed = set()
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        decoder = Decoder()
        decoder.receive(raw)
        try:
            event = decoder.next_event()
        except PeerError:
            pass
        else:
            passed.add(bit // 8)
            assert event is NEED_BYTES or isinstance(event, type(frame))
            assert not isinstance(event, BatchFrame) or event.stamp is None or event == frame
        raw[bit // 8] ^= 1 << bit % 8
    assert passed <= {3, *range(4, 12), *range(12, 16)}  # flags that do not bind, sequence, length
    if name == "batch from the log":
        assert passed <= set(range(12, 16))  # the stamp covers the header; a longer length waits


@NAMES
def test_flipped_bits_of_any_frame_raise_nothing_but_the_peers_error(name: str) -> None:
    raw = bytearray(encode(SAMPLES[name]))
    for bit in range(len(raw) * 8):
        raw[bit // 8] ^= 1 << bit % 8
        only_the_peers_error(bytes(raw))
        raw[bit // 8] ^= 1 << bit % 8


def only_the_peers_error(raw: bytes) -> None:
    decoder = Decoder()
    decoder.receive(raw)
    try:
        for event in events(decoder):
            look_at(event)
            encode(event)
    except PeerError:
        with pytest.raises(PeerError):
            decoder.next_event()


def look_at(event: Frame) -> None:
    """What was let in can be read to the last row."""
    if not isinstance(event, BatchFrame) or not event.batch.is_control:
        plain(event)


def test_garbage_raises_nothing_but_the_peers_error(full: bool) -> None:
    chance = random.Random(7)
    for _ in range(200_000 if full else 3_000):
        kind = chance.randrange(8)
        payload = chance.randbytes(chance.randrange(200))
        flags = Flag.BATCHED if kind == FrameType.BATCH else 0
        if kind == FrameType.DELTA:
            payload += crc32c(payload).to_bytes(4, "little")
        only_the_peers_error(pack_header(FrameType(kind), flags, 1, len(payload)) + payload)
        only_the_peers_error(chance.randbytes(60))


def test_an_error_latches_and_frees_what_was_held() -> None:
    decoder = Decoder()
    decoder.receive(encode(Heartbeat(1)) + b"GET / HTTP/1.1\r\n" + encode(Heartbeat(2)))
    assert decoder.next_event() == Heartbeat(1)
    for _ in range(3):
        with pytest.raises(PeerError, match="starts with byte 0x47") as caught:
            decoder.next_event()
        assert caught.value.code is ErrorCode.BAD_FRAME
        decoder.receive(encode(Heartbeat(3)))
        assert decoder.buffered_bytes == 0


def test_the_frame_that_failed_can_be_named() -> None:
    payload = msgpack.packb({"level": 9})
    decoder = Decoder()
    decoder.receive(pack_header(FrameType.BACKPRESSURE, 0, 77, len(payload)) + payload)
    with pytest.raises(PeerError, match=r"Backpressure: field 'level' is 9; known are 0 ok, 1 warn"):
        decoder.next_event()
    assert decoder.header is not None
    assert decoder.header.sequence == 77


# --- bounds


def refused(raw: bytes) -> PeerError:
    decoder = Decoder()
    decoder.receive(raw)
    with pytest.raises(PeerError) as caught:
        decoder.next_event()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "flags", "bound"),
    [
        (FrameType.BATCH, Flag.BATCHED, FRAME_PAYLOAD_BYTES_MAX),
        (FrameType.DELTA, 0, DELTA_PAYLOAD_BYTES_MAX),
        (FrameType.ACK, 0, CONTROL_PAYLOAD_BYTES_MAX),
        (FrameType.SUBSCRIBE, 0, CONTROL_PAYLOAD_BYTES_MAX),
    ],
)
def test_a_frame_too_large_is_refused_by_its_header_alone(kind: FrameType, flags: int, bound: int) -> None:
    decoder = Decoder()
    decoder.receive(pack_header(kind, flags, 1, bound))
    assert decoder.next_event() is NEED_BYTES
    tracemalloc.start()
    try:
        error = refused(pack_header(kind, flags, 1, bound + 1))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert error.code is ErrorCode.TOO_LARGE
    assert str(bound) in error.message


def test_an_announced_size_allocates_nothing() -> None:
    tracemalloc.start()
    try:
        decoder = Decoder()
        decoder.receive(pack_header(FrameType.BATCH, Flag.BATCHED, 1, FRAME_PAYLOAD_BYTES_MAX))
        assert decoder.next_event() is NEED_BYTES
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_peer_not_yet_known_gets_less() -> None:
    decoder = Decoder(payload_bytes_max=4096)
    decoder.receive(pack_header(FrameType.SUBSCRIBE, 0, 1, 4097))
    with pytest.raises(PeerError, match="allowed are 4096"):
        decoder.next_event()


def test_a_few_bytes_cannot_announce_gigabytes() -> None:
    for bomb in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 1000,
        b"\x91" * 5000,
        b"\x81\xa1x" * 5000,
        b"\x81\xa1x" + b"\xdc\x13\x88" * 60 + b"\x00" * 5000,
    ):
        tracemalloc.start()
        try:
            error = refused(pack_header(FrameType.ACK, 0, 1, len(bomb)) + bomb)
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()
        assert error.code is ErrorCode.BAD_FRAME


def test_the_greatest_batch_passes() -> None:
    rows = 250
    matrix = np.ones((rows, 16_000), np.float32)
    batch = encode_vectors([f"k{i}" for i in range(rows)], matrix, namespace="n", origin=1, base=1)
    assert batch.size > 15 * 1024 * 1024
    raw = encode(BatchFrame(1, batch))
    assert received(raw[:1000], raw[1000:9_000_000], raw[9_000_000:]) == [BatchFrame(1, batch)]


# --- header rules


@pytest.mark.parametrize(
    ("at", "byte", "code"),
    [
        (0, 0x53, ErrorCode.BAD_FRAME),
        (1, 2, ErrorCode.UNSUPPORTED_VERSION),
        (1, 0, ErrorCode.UNSUPPORTED_VERSION),
        (2, 8, ErrorCode.BAD_FRAME),
        (2, 255, ErrorCode.BAD_FRAME),
        (3, 1, ErrorCode.BAD_FRAME),
        (3, 2, ErrorCode.BAD_FRAME),
        (3, 4, ErrorCode.BAD_FRAME),
        (3, 8, ErrorCode.BAD_FRAME),
        (3, 16, ErrorCode.UNSUPPORTED_FLAG),
        (3, 128, ErrorCode.UNSUPPORTED_FLAG),
    ],
)
def test_what_a_header_may_not_say(at: int, byte: int, code: ErrorCode) -> None:
    raw = bytearray(encode(Heartbeat(1)))
    raw[at] = byte
    assert refused(bytes(raw)).code is code


def test_a_batch_without_the_batched_flag() -> None:
    raw = bytearray(encode(SAMPLES["batch"]))
    raw[3] &= ~Flag.BATCHED
    error = refused(bytes(raw))
    assert error.code is ErrorCode.BAD_FRAME
    assert "b3" in error.message


@pytest.mark.parametrize("priority", Priority)
def test_the_priority_bit_is_a_hint_and_the_payload_wins(priority: Priority) -> None:
    delta = dataclasses.replace(SPARSE, priority=priority)
    batch = encode_batch([SPARSE], origin=ORIGIN, base=1, priority=priority)
    for frame in (DeltaFrame(1, delta), BatchFrame(1, batch)):
        raw = bytearray(encode(frame))
        assert bool(raw[3] & Flag.HIGH_PRIORITY) == (priority <= Priority.HIGH)
        raw[3] ^= Flag.HIGH_PRIORITY
        assert decode(bytes(raw)) == frame


def test_a_batch_shorter_than_its_stamp() -> None:
    assert refused(pack_header(FrameType.BATCH, Flag.BATCHED, 1, 47) + bytes(47)).code is ErrorCode.BAD_FRAME


def test_sequences_of_a_batch_stay_below_the_bound() -> None:
    batch = small_batch()
    assert decode(encode(BatchFrame(COUNTER_MAX - 2, batch))) == BatchFrame(COUNTER_MAX - 2, batch)
    assert refused(encode(BatchFrame(COUNTER_MAX - 1, batch))).code is ErrorCode.BAD_FRAME


# --- stamped and compressed batches


def test_head_and_body_are_the_frame() -> None:
    batch = small_batch()
    head = encode_head(batch, 17, STAMP)
    assert len(head) == 64
    assert decode(head + batch.body) == BatchFrame(17, batch, STAMP)


@pytest.mark.parametrize("codec", Compression)
@pytest.mark.parametrize("stamp", [None, STAMP])
def test_compressed_batches_say_the_same(codec: Compression, stamp: Stamp | None) -> None:
    rows = 100
    batch = encode_vectors(
        [f"k{i}" for i in range(rows)], np.zeros((rows, 64), np.float32), namespace="n", origin=1, base=1
    )
    stamp = stamp and dataclasses.replace(stamp, body_crc=batch.crc)
    frame = BatchFrame(3, batch, stamp)
    raw = encode(frame, compression=codec)
    assert len(raw) < batch.size // 4
    assert raw[3] & Flag.COMPRESSED
    assert raw[64] == codec
    assert received(raw) == [frame]
    assert raw[16:64] == encode(frame)[16:64]


def test_small_batches_are_not_compressed() -> None:
    assert encode(SAMPLES["batch"], compression=Compression.ZSTD) == encode(SAMPLES["batch"])


def test_a_stamp_of_another_body_is_refused() -> None:
    stamp = dataclasses.replace(STAMP, body_crc=1)
    error = refused(encode(BatchFrame(17, small_batch(), stamp)))
    assert error.code is ErrorCode.CHECKSUM
    assert "stamp" in error.message


def test_a_forwarders_stamp_has_no_body_checksum() -> None:
    frame = BatchFrame(17, small_batch(), Stamp(lamport=5, source=Source.REPLICA), ack_wanted=True)
    assert received(encode(frame)) == [frame]


def test_lamport_numbers_stay_below_the_bound() -> None:
    frame = BatchFrame(17, small_batch(), Stamp(lamport=COUNTER_MAX))
    assert refused(encode(frame)).code is ErrorCode.BAD_FRAME


def test_a_control_batch_travels() -> None:
    batch = encode_void(origin=ORIGIN, base=1, count=3, code=ErrorCode.INVALID_DELTA)
    assert received(encode(BatchFrame(1, batch))) == [BatchFrame(1, batch)]
