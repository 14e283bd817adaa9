"""Frames are immutable values, and each one round-trips."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delta_prop_wire import delta as d
from delta_prop_wire.codec import NEED_BYTES, Decoder, decode, encode
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import ABSENT, AckLevel, Delta, Dot, Priority, Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    Backpressure,
    BatchFrame,
    Credit,
    DeltaFrame,
    Describe,
    Description,
    Fact,
    FactState,
    Filter,
    FindOffsets,
    FoundOffsets,
    Frame,
    Get,
    Heartbeat,
    Hello,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    OriginGrant,
    PartitionRange,
    PartitionStart,
    PressureLevel,
    Start,
    StartAt,
    StreamDescription,
    Subscribe,
    Subscribed,
    Subscription,
    Unsubscribe,
    Welcome,
)
from delta_prop_wire.packing import U64_MAX
from delta_prop_wire.spec import COUNTER_MAX, ErrorCode
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)
from delta_prop_wire.topics import ALL, Topic


def decode_chunks(*chunks: bytes) -> list[Frame]:
    decoder = Decoder()
    frames: list[Frame] = []
    for chunk in chunks:
        decoder.receive(chunk)
        while (event := decoder.next_event()) is not NEED_BYTES:
            frames.append(event)
    return frames


def test_refusal_round_trips_as_a_nack() -> None:
    refused = Refused(ErrorCode.QUEUE_FULL, "full", retry_after_ms=5, row=2, field="id", details={"depth": 9})
    frame = decode(encode(Nack.of(7, refused, correlation_id=3)))
    assert isinstance(frame, Nack)
    assert frame.sequence == 7
    assert frame.correlation_id == 3
    assert vars(frame.refusal()) == vars(refused)
    assert frame.refusal().retryable


def test_token_is_hidden_in_repr() -> None:
    assert "secret" not in repr(Subscribe(1, Hello(token="secret")))


def test_frames_are_immutable_values() -> None:
    first, equal = (BatchFrame(1, encode_batch([Delta("a", d.delete())], origin=1, base=1)) for _ in range(2))
    assert first == equal
    assert hash(first) == hash(equal)
    assert first != dataclasses.replace(first, sequence=2)
    assert first != Heartbeat(1)
    for frame in (first, Heartbeat(1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frame.sequence = 2  # type: ignore[misc]


# --- round trips

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, U64_MAX)
OFFSETS = st.integers(0, COUNTER_MAX)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
DOTS = st.builds(Dot, U64, st.integers(1, COUNTER_MAX))
CURSORS = st.builds(Cursor, st.binary(min_size=16, max_size=16), OFFSETS, OFFSETS)
CREDITS = st.builds(Credit, U64, U64)
MAYBE_CREDIT = st.none() | CREDITS
TOPICS = st.one_of(
    st.just(ALL),
    NAME.map(lambda name: Topic.from_bytes(b"\x01" + name.encode())),
    NAME.map(lambda name: Topic.from_bytes(b"\x04" + name.encode())),
    st.integers(0, 63).map(lambda kind: Topic.from_bytes(bytes((3, kind)))),
)
PATCHES = st.dictionaries(
    NAME,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(1 << 63), U64_MAX) | st.floats(allow_nan=False) | NAME,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
NUMBERS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=6)
PAIRS = st.lists(st.tuples(U32, st.floats(width=32, allow_nan=False)), max_size=6)
OPERATIONS = st.one_of(
    NUMBERS.map(d.create),
    NUMBERS.map(d.dense),
    PAIRS.map(lambda pairs: d.sparse([i for i, _ in pairs], [v for _, v in pairs])),
    PAIRS.map(lambda pairs: d.sparse_add([i for i, _ in pairs], [v for _, v in pairs])),
    st.floats(width=32, allow_nan=False).map(d.scale),
    st.floats(width=32, allow_nan=False).map(d.offset),
    NAME.map(d.transform),
    st.binary(max_size=30).map(d.opaque),
    st.sampled_from([d.delete(), d.metadata_only()]),
    st.builds(d.Operation, st.integers(10, 63), data=st.binary(max_size=9)),
)
DELTAS = st.builds(
    Delta,
    vector_id=NAME,
    operation=OPERATIONS,
    namespace=NAME,
    id=st.none() | st.binary(min_size=16, max_size=16),
    dot=st.none() | DOTS,
    parents=st.lists(DOTS | st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
    clock=st.lists(DOTS, max_size=4, unique_by=lambda dot: dot.origin).map(lambda dots: tuple(sorted(dots))),
    timestamp=U64,
    priority=st.sampled_from(Priority),
    source=st.sampled_from(Source),
    metadata=st.none() | PATCHES,
    topics=st.lists(NAME, max_size=3).map(tuple),
    expect=st.none() | st.just(ABSENT) | DOTS,
)
U16 = st.integers(0, (1 << 16) - 1)
STARTS = st.builds(Start, st.just(StartAt.OFFSET), OFFSETS) | st.builds(Start, st.just(StartAt.GROUP))
LEVELS = st.none() | st.sampled_from(AckLevel)
NAMES = st.lists(NAME, max_size=3).map(tuple)
PAGES = st.binary(max_size=12)
COUNTS = st.integers(1, 1 << 16)
SETTINGS = st.dictionaries(
    NAME.filter(lambda name: len(name.encode()) <= 64),
    st.none()
    | st.booleans()
    | OFFSETS
    | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=16),
    max_size=4,
)
RESPONSES = st.one_of(
    st.builds(
        Welcome,
        NAMES,
        st.lists(st.builds(OriginGrant, U64, U32, OFFSETS), max_size=3).map(tuple),
        st.none() | CURSORS,
        LEVELS,
    ),
    st.builds(Subscribed, U32, CURSORS, st.integers(1, 65536), st.integers(0, 60_000), st.booleans(), U32),
    st.builds(JobStatus, st.sampled_from(JobState), U64, U64, U64, U64),
    st.builds(
        Fact, st.sampled_from(FactState), OFFSETS, st.none() | DOTS, st.none() | OFFSETS, PAGES, PAGES, PAGES
    ),
    st.builds(FoundOffsets, st.lists(OFFSETS, max_size=3).map(tuple), CURSORS),
    st.builds(
        Description,
        st.lists(
            st.builds(
                StreamDescription,
                NAME,
                U32,
                st.lists(st.builds(PartitionRange, U16, OFFSETS, CURSORS), max_size=2).map(tuple),
                st.just(1) | COUNTS,
                SETTINGS,
            ),
            max_size=2,
        ).map(tuple),
        st.dictionaries(NAME, st.integers(1, 255), max_size=3),
        NAMES,
        LEVELS,
    ),
)
REQUESTS = st.one_of(
    st.builds(Get, NAME, st.none() | NAME),
    st.builds(FindOffsets, st.lists(STARTS, max_size=3).map(tuple), U32, U16),
    st.builds(Describe, st.none() | NAME),
    st.builds(CreateStream, NAME, COUNTS, SETTINGS, st.booleans(), st.booleans()),
    st.builds(AlterStream, NAME, SETTINGS, st.booleans()),
    st.builds(DeleteStream, NAME, st.booleans()),
    st.builds(TruncateStream, NAME, OFFSETS, U16, st.booleans()),
    st.builds(EraseVector, NAME, NAME, st.none() | NAME, U32, st.booleans()),
)
FRAMES = st.one_of(
    st.builds(
        DeltaFrame,
        st.integers(0, COUNTER_MAX - 1),
        DELTAS,
        st.booleans(),
        LEVELS,
        st.none() | OFFSETS,
        U32,
        st.none() | U16,
    ),
    st.builds(
        Ack,
        U64,
        ranges=st.lists(
            st.builds(
                lambda a, b, *rest: AckRange(min(a, b), max(a, b), *rest), U64, U64, OFFSETS, st.booleans()
            ),
            max_size=4,
        ).map(tuple),
        processed=st.none() | OFFSETS,
        cursor=st.none() | CURSORS,
        credit=MAYBE_CREDIT,
        correlation_id=st.none() | U64,
        response=st.none() | RESPONSES,
        more=st.booleans(),
        stream=U32,
        partition=U16,
    ),
    st.builds(
        Nack,
        U64,
        st.sampled_from(ErrorCode),
        NAME,
        st.none() | U32,
        st.none() | st.integers(0, 65535),
        st.none() | NAME,
        PATCHES,
        st.none() | U64,
    ),
    st.builds(
        Backpressure,
        U64,
        st.sampled_from(PressureLevel),
        U64,
        U64,
        st.none() | st.floats(min_value=0, allow_nan=False, allow_infinity=False),
        st.none() | U32,
    ),
    st.builds(
        Heartbeat,
        U64,
        st.none() | U64,
        st.none() | U64,
        st.none() | U64,
        st.none() | U64,
        MAYBE_CREDIT,
        st.none() | OFFSETS,
    ),
    st.builds(
        Subscribe,
        U64,
        st.builds(
            Hello,
            st.lists(NAME, max_size=3).map(tuple),
            st.none() | NAME,
            st.lists(st.builds(OriginClaim, U64, U32, U32), max_size=3).map(tuple),
            st.sampled_from(Source),
            st.none() | NAME,
            st.none() | st.binary(min_size=16, max_size=16),
        )
        | st.builds(
            Subscription,
            U32,
            st.lists(TOPICS, min_size=1, max_size=3).map(tuple),
            st.builds(Start, st.just(StartAt.OFFSET), OFFSETS) | st.builds(Start, st.just(StartAt.GROUP)),
            MAYBE_CREDIT,
            st.integers(1, 65536),
            st.integers(0, 60_000),
            st.none() | NAME,
            st.none() | st.binary(min_size=16, max_size=16),
            st.none()
            | st.builds(
                Filter,
                st.lists(st.sampled_from(Source), max_size=4).map(tuple),
                st.lists(st.sampled_from(Priority), max_size=4).map(tuple),
            ),
            st.booleans(),
            U32,
            st.lists(st.builds(PartitionStart, U16, st.none() | STARTS, MAYBE_CREDIT), max_size=2).map(tuple),
        )
        | REQUESTS,
    ),
    st.builds(Unsubscribe, U64, U32, st.booleans()),
)


@given(frames=st.lists(FRAMES, min_size=1, max_size=3), cut=st.integers(0, 300))
@example(frames=[Ack(0, ranges=(AckRange(0, 0, 0),), credit=Credit(0, 0), response=Welcome((), ()))], cut=0)
@example(frames=[Ack(0, ranges=(AckRange(0, 0, 0),), credit=Credit(0, 0), more=True)], cut=0)
def test_frames_round_trip(frames: list[Frame], cut: int) -> None:
    raw = b"".join(encode(frame) for frame in frames)
    assert decode_chunks(raw[:cut], raw[cut:]) == frames


@given(
    deltas=st.lists(DELTAS, min_size=1, max_size=5), is_stamped=st.booleans(), lamport=st.integers(0, 1 << 62)
)
def test_batches_round_trip(deltas: list[Delta], is_stamped: bool, lamport: int) -> None:
    deltas = [dataclasses.replace(delta, id=None, clock=()) for delta in deltas]
    batch = encode_batch(deltas, origin=7, base=3, epoch=9)
    stamp = Stamp(lamport, Source.REPLICA, previous_crc=5, body_crc=batch.crc) if is_stamped else None
    frame = BatchFrame(12, batch, stamp, ack_wanted=not is_stamped)
    (decoded,) = decode_chunks(encode(frame))
    assert decoded == frame
    assert isinstance(decoded, BatchFrame)
    for row, delta in enumerate(deltas):
        assert decoded.batch.delta(row).operation == delta.operation
        assert decoded.batch.delta(row).metadata == delta.metadata
