"""Sample frames of every kind, which make the golden bytes, and their fields as JSON."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from delta_prop_wire import delta as d
from delta_prop_wire import requests
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import encode
from delta_prop_wire.compression import Compression
from delta_prop_wire.control_rows import LOG_TYPES
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Delta, Dot, ParentPosition, Priority, Source
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.frames import (
    Ack,
    AckRange,
    Backpressure,
    BatchFrame,
    Credit,
    Decide,
    Decision,
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
    JobPart,
    JobState,
    JobStatus,
    Nack,
    OriginClaim,
    OriginGrant,
    PartitionRange,
    PartitionStart,
    PressureLevel,
    RefusedRow,
    StagedPart,
    Start,
    StartAt,
    StreamChange,
    StreamDescription,
    Subscribe,
    Subscribed,
    Subscription,
    Unsubscribe,
    Welcome,
)
from delta_prop_wire.header import pack_header
from delta_prop_wire.spec import ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.state_rows import StateRow, encode_states
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)
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


WITH_ID = Delta("doc-3", d.delete(), "docs", id=bytes(range(16)))
OPAQUE = Delta("r-9", d.opaque(b"raw"), "docs", timestamp=0x0192_0000_0000_0001)
DELETE = Delta("doc-1", d.delete(), "docs", timestamp=0x0192_0000_0000_0001)


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
            StateRow(
                "docs", "doc-1", VectorState(True, vector, None, {"title": "Büro"}, 1, (912, ORIGIN, 9)), 20
            ),
            StateRow("docs", "doc-2", VectorState(ignored=0, key=(913, ORIGIN, 10)), 21),
            StateRow("rows", "r-9", VectorState(True, None, b"raw", {}, 0, (7, 1, 3)), 4),
        ]
    )


def sliced_batch() -> Batch:
    """Return rows 0 and 2 of a batch of three rows at offset 17."""
    return encode_batch(
        [SPARSE, dataclasses.replace(RICH_ROW, parents=(), expect=None)],
        origin=ORIGIN,
        base=5,
        previous=4,
        counters=[5, 7],
        row_offsets=[17, 19],
        priority=Priority.HIGH,
    )


NOOP_BATCH = encode_noop(origin=ORIGIN, base=8, count=2, code=ErrorCode.INVALID_DELTA, refused_crc=0x0A0B0C0D)
LOG_BATCHES = {
    kind.name.lower().replace("_", " "): control_batch(bytes((kind,)) + b"what follows")
    for kind in sorted(LOG_TYPES)
}
"""Batches of the types that the log itself writes, with a placeholder for the content after the type."""
SLICED_STAMP = dataclasses.replace(STAMP, previous_crc=0, body_crc=sliced_batch().crc)
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
        correlation_id=1,
        credit=Credit(1000, 4_194_304),
        response=Welcome(
            features=("zstd",), origins=(OriginGrant(ORIGIN, 1, 4),), log=CURSOR, level=AckLevel.DURABLE
        ),
    ),
    "answer to hello, with the address of the server": Ack(
        correlation_id=1,
        response=Welcome(log=CURSOR, level=AckLevel.LOGGED, address="facts.example.net:7373"),
    ),
    "answer to hello, with the stream's default level": Ack(
        correlation_id=1,
        response=Welcome(log=CURSOR, level=AckLevel.DURABLE, default_level=AckLevel.LOGGED),
    ),
    "hello that says nothing": Subscribe(1, Hello()),
    "hello of a forwarder": Subscribe(
        1, Hello(source=Source.REPLICA, client="service in Graz", log_id=bytes(range(16, 32)))
    ),
    "answer to a forwarder": Ack(
        correlation_id=1, response=Welcome(origins=(OriginGrant(ORIGIN, 1, 4),), log=CURSOR), more=True
    ),
    "answer to a forwarder, last page": Ack(
        correlation_id=1,
        credit=Credit(1000, 4_194_304),
        response=Welcome(origins=(OriginGrant(ORIGIN + 16, 2, 0),), log=CURSOR),
    ),
    "delta": DeltaFrame(5, SPARSE, ack_wanted=True),
    "delta with all fields": DeltaFrame(6, RICH, ack_wanted=True, ack_level=AckLevel.DURABLE),
    "batch": BatchFrame(5, small_batch(), ack_wanted=True),
    "batch with ids and a clock": BatchFrame(
        7,
        encode_batch([WITH_ID], origin=ORIGIN, base=7, epoch=3, clock=RICH.clock, ack_level=AckLevel.DURABLE),
    ),
    "batch whose counters leap": BatchFrame(
        8, encode_batch([OPAQUE, DELETE], origin=ORIGIN, base=40, previous=12, counters=[40, 43])
    ),
    "batch of several namespaces and times": BatchFrame(
        10,
        encode_batch(
            [OPAQUE, dataclasses.replace(DELETE, namespace="rows", timestamp=0x0192_0000_0000_0002)],
            origin=ORIGIN,
            base=44,
            hybrid_time=0x0192_0000_0000_0001,
        ),
    ),
    "batch with a parent in another partition": BatchFrame(
        11,
        encode_batch(
            [dataclasses.replace(DELETE, parents=(bytes(range(16)), Dot(0x0ABC_DEF0_0032, 5)))],
            origin=ORIGIN,
            base=46,
            parent_positions=[(0, 1, ParentPosition(3, 1, 4711))],
        ),
    ),
    "batch for another partition than its origin's": BatchFrame(
        12, encode_batch([OPAQUE], origin=ORIGIN, base=46), Stamp(stream=7, partition=3)
    ),
    "batch from the log": BatchFrame(17, small_batch(), STAMP),
    "delta from the log": DeltaFrame(17, SPARSE, lamport=900),
    "batch cut by a filter": BatchFrame(17, sliced_batch(), SLICED_STAMP),
    "batch of void dots": BatchFrame(
        20, NOOP_BATCH, dataclasses.replace(STAMP, lamport=903, body_crc=NOOP_BATCH.crc, source=Source.LOCAL)
    ),
    **{
        f"batch of {name} rows": BatchFrame(
            22 + index,
            batch,
            dataclasses.replace(STAMP, lamport=905 + index, body_crc=batch.crc, source=Source.LOCAL),
        )
        for index, (name, batch) in enumerate(LOG_BATCHES.items())
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
    "nack of a request": Nack(0, ErrorCode.BAD_REQUEST, "subscription 9 is unknown", correlation_id=4),
    "nack of the connection": Nack(
        0, ErrorCode.SHUTTING_DOWN, "the service ends: connect again", retry_after_ms=1000
    ),
    "nack of a row": Nack(8, ErrorCode.INVALID_DELTA, "row 1: indices: 9 is outside", row=1, field="indices"),
    "backpressure": Backpressure(9, PressureLevel.THROTTLE, 90_000, 100_000, rate=2500.0, retry_after_ms=40),
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
    "subscribe as a member": Subscribe(
        2,
        Subscription(
            1, (Topic.parse("*"),), Start(StartAt.GROUP), group="search", member=bytes(range(16, 32))
        ),
    ),
    "subscribe to deltas": Subscribe(
        2, Subscription(1, (Topic.parse("*"),), Start(StartAt.EARLIEST), deltas=True)
    ),
    "subscribe to a partition": Subscribe(
        2,
        Subscription(
            1,
            (Topic.parse("*"),),
            Start(StartAt.EARLIEST),
            stream=7,
            partitions=(
                PartitionStart(3, Start(StartAt.CURSOR, CURSOR), Credit(10, 4096)),
                PartitionStart(4),
            ),
        ),
    ),
    "answer to subscribe": Ack(correlation_id=2, response=Subscribed(1, CURSOR, 100, 10)),
    "answer to standby": Ack(
        correlation_id=2, response=Subscribed(1, CURSOR, 100, 10, standby=True, resets=1)
    ),
    "ack of a subscriber": Ack(processed=19, cursor=CURSOR, credit=Credit(2, 416)),
    "ack of a partition": Ack(cursor=CURSOR, stream=7, partition=3),
    "get": Subscribe(5, Get("doc-1", "docs")),
    "answer to get": Ack(
        correlation_id=5,
        response=Fact(FactState.VECTOR, 42, Dot(ORIGIN, 9), 912, values=bytes.fromhex("0000c03f")),
        more=True,
    ),
    "answer to get, last page": Ack(
        correlation_id=5,
        response=Fact(
            FactState.VECTOR,
            42,
            Dot(ORIGIN, 9),
            912,
            values=bytes.fromhex("00000040"),
            metadata=bytes.fromhex("81a57469746c65a3666f78"),
        ),
    ),
    "answer to get of what is not there": Ack(correlation_id=6, response=Fact(FactState.ABSENT, 42)),
    "offsets": Subscribe(
        7, FindOffsets((Start(StartAt.EARLIEST), Start(StartAt.TIME, 1_700_000_000_000_000)))
    ),
    "answer to offsets": Ack(correlation_id=7, response=FoundOffsets((4, 17), CURSOR)),
    "describe": Subscribe(8, Describe()),
    "answer to describe": Ack(
        correlation_id=8,
        response=Description(
            (StreamDescription("default", 0, (PartitionRange(0, 4, CURSOR),)),),
            {"hello": 1, "get": 1},
            ("zstd",),
            AckLevel.DURABLE,
        ),
    ),
    "describe a stream": Subscribe(9, Describe("events", ranges=True)),
    "answer to describe a stream": Ack(
        correlation_id=9,
        response=Description(
            (
                StreamDescription(
                    "events",
                    7,
                    (PartitionRange(0, 0, CURSOR), PartitionRange(1, 4, CURSOR)),
                    2,
                    {"retention_s": 3600.5, "compact": True, "compress": "zstd", "retention_bytes": 1 << 40},
                ),
            ),
            {"describe": 1},
        ),
    ),
    "create a stream": Subscribe(
        10,
        CreateStream(
            "events", 2, {"retention_s": 3600.5, "compact": True, "compress": "zstd"}, if_not_exists=True
        ),
    ),
    "create a stream without settings": Subscribe(11, CreateStream("audit", 3)),
    "answer to create a stream": Ack(
        correlation_id=11,
        response=Description((StreamDescription("audit", 8, (), 3),), {"describe": 1}),
    ),
    "alter a stream": Subscribe(
        12, AlterStream("events", {"retention_s": None, "retention_bytes": 1 << 40}, dry_run=True)
    ),
    "delete a stream": Subscribe(13, DeleteStream("events", dry_run=True)),
    "truncate a stream": Subscribe(14, TruncateStream("events", 4711, 1)),
    "erase a vector": Subscribe(15, EraseVector("events", "people:ada", "people", 5_000)),
    "nack of a later version": Nack(0, ErrorCode(999), "what only a later version knows", retry_after_ms=50),
    "heartbeat of a server": Heartbeat(3, sent_us=7_000_000, processed=20),
    "unsubscribe": Unsubscribe(3, 1),
    "hello of a part of a job": Subscribe(
        1, Hello(origins=(OriginClaim(ORIGIN, 0),), job=JobPart("nightly", 7, 23))
    ),
    "decide": Subscribe(
        2, Decide("nightly", Decision.COMMIT, (StagedPart(0, 17, 1000, 0x0A0B0C0D), StagedPart(7, 23, 250)))
    ),
    "decide to drop one run": Subscribe(3, Decide("nightly", Decision.ABORT, run=0x0A0B0C0D)),
    "answer to decide": Ack(
        correlation_id=2, response=JobStatus(JobState.COMMITTED, 1250, published=1000, refused=1)
    ),
    "answer that tells of a refused row": Ack(
        correlation_id=4,
        response=JobStatus(
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


def _compressed(frame: Frame, codec: Compression) -> bytes:
    """Return a stamped batch compressed in the simplest form of the codec, a run of literal bytes.

    The output of a library differs between versions, and every valid form is read.
    """
    raw = encode(frame)
    body = raw[64:]
    size = len(body)
    if codec is Compression.LZ4:  # a token of 15 literals, then the count of further literals
        rest = size - 15
        packed = b"\xf0" + b"\xff" * (rest // 255) + bytes([rest % 255]) + body
    else:  # magic, single segment with a content size of 2 bytes, one last raw block
        packed = bytes.fromhex("28b52ffd60") + (size - 256).to_bytes(2, "little")
        packed += (size << 3 | 1).to_bytes(3, "little") + body
    payload = raw[16:64] + bytes([codec]) + size.to_bytes(4, "little") + packed
    flags = raw[3] | Flag.COMPRESSED
    return pack_header(FrameType.BATCH, flags, frame.sequence, len(payload)) + payload


COMPRESSED = {
    f"batch from the log, {codec.name}": (
        _compressed(SAMPLES["batch from the log"], codec),
        "batch from the log",
    )
    for codec in Compression
}
"""Compressed frames to read, each with the name of its uncompressed sample."""
REQUEST_NAMES = {codec.request.made: codec.name for codec in requests._CODECS} | {
    codec.response.made: codec.name for codec in requests._CODECS
}
"""The name of a request, by the types of the request and of its response."""


def to_json_value(value: object) -> object:
    """Return a frame or one of its values as JSON, as the golden file has it."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, Topic):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Batch):
        return [row_to_json(value, row) for row in range(value.count)]
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: to_json_value(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        if isinstance(value, Start):  # the golden file had this key before the attribute got its name
            fields = {"at": fields.pop("kind")} | fields
        if isinstance(value, StreamChange):  # the golden file has the request's name under this key
            fields = {"stream": fields.pop("name")} | fields
        present = {name: field for name, field in fields.items() if field not in (None, [], {})}
        return {"name": REQUEST_NAMES[type(value)]} | present if type(value) in REQUEST_NAMES else present
    if isinstance(value, Mapping):
        return {name: to_json_value(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_json_value(value._asdict())
    if isinstance(value, tuple | list):
        return [to_json_value(item) for item in value]
    return value


def row_to_json(batch: Batch, row: int) -> object:
    entry = to_json_value(batch.delta(row))
    if batch.parent_positions and isinstance(entry, dict):
        entry["places"] = [
            to_json_value(position) for parent_row, _, position in batch.parent_positions if parent_row == row
        ]
    if batch.row_offsets is not None and isinstance(entry, dict):
        entry["offset"] = int(batch.row_offsets[row])
    return entry
