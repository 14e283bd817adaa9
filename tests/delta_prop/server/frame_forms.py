"""Encoders of one delta as a Delta frame and as a batch, and an in-process server that accepts both.

Both are encoded here byte by byte, so that invalid content can be sent too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, cast

import msgpack

from delta_prop.partition.ingest.work import Sender
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop.server.answers import ConnectedClient, RefusalLog
from delta_prop.server.audit import Audit
from delta_prop.server.limits import RateLimiter
from delta_prop.server.outcome_collector import OutcomeCollector
from delta_prop.server.permissions import ALL_PERMISSIONS, Permissions
from delta_prop.server.produce_handler import ProduceHandler, PublishChecks
from delta_prop.server.server_context import Counters
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.codec import NEED_BYTES, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.control_rows import refused_code
from delta_prop_wire.delta import Delta, Kind, Priority, create, make_origin
from delta_prop_wire.encode import assemble, encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frames import (
    Ack,
    BatchFrame,
    Credit,
    DeltaFrame,
    Hello,
    Nack,
    OriginClaim,
    Subscribe,
    Welcome,
)
from delta_prop_wire.layout import CLOCK_ENTRY, EXPECT, PARENT, TAG, Column
from delta_prop_wire.message_rules import Role
from delta_prop_wire.spec import ErrorCode, Flag, FrameType
from delta_prop_wire.stamp import DEFAULT_LOG
from tests.delta_prop.partition.pipeline_bench import Bench
from tests.wire.sealing import frame_with_checksum

ORIGIN, SECOND, OTHER, UNCLAIMED = (make_origin(producer, Priority.NORMAL) for producer in (5, 6, 7, 8))
SEEDED = 3
"""Counters of ORIGIN that are used before a test sends anything; of SECOND, one counter is used."""
CREDIT = Credit(100_000, 1 << 30)
NORMAL = int(Priority.NORMAL) << 12
SPARSE_KINDS = (Kind.SPARSE, Kind.SPARSE_ADD)
FULL_VECTOR_KINDS = (Kind.CREATE, Kind.DENSE)
NUMBERED_KINDS = (*SPARSE_KINDS, *FULL_VECTOR_KINDS, Kind.SCALE, Kind.OFFSET)


@dataclass(frozen=True)
class DeltaFields:
    """A delta's fields, as bytes where frames have bytes."""

    vector_id: bytes = b"v"
    namespace: bytes = b"n"
    op: int = 0
    values: bytes = struct.pack("<2f", 1, 2)
    indices: bytes = b""
    data: bytes = b""
    id: bytes | None = None
    parents: tuple[tuple[int, int] | bytes, ...] = ()
    clock: tuple[tuple[int, int], ...] = ()
    timestamp: int = 0
    metadata: bytes | None = None
    topics: tuple[bytes, ...] = ()
    expect: tuple[int, int] | None = None


def as_delta(
    delta_fields: DeltaFields, counter: int, *, origin: int | None = ORIGIN, sequence: int | None = None
) -> bytes:
    """Return a Delta frame; without an origin it has no dot."""
    parts: dict[str, bytes] = {
        "vector_id": text(delta_fields.vector_id),
        "namespace": text(delta_fields.namespace),
        "op": pack(delta_fields.op),
    }
    if origin is not None:
        parts |= {"origin": pack(origin), "counter": pack(counter)}
    for name in ("values", "indices", "data"):
        if getattr(delta_fields, name):
            parts[name] = pack(getattr(delta_fields, name))
    for name in ("id", "expect"):
        if getattr(delta_fields, name) is not None:
            parts[name] = pack(getattr(delta_fields, name))
    for name in ("parents", "clock", "timestamp"):
        if getattr(delta_fields, name):
            parts[name] = pack(getattr(delta_fields, name))
    if delta_fields.topics:
        packed = msgpack.Packer().pack_array_header(len(delta_fields.topics))
        parts["topics"] = packed + b"".join(map(text, delta_fields.topics))
    if delta_fields.metadata is not None:
        parts["metadata"] = delta_fields.metadata
    payload = msgpack.Packer().pack_map_header(len(parts))
    payload += b"".join(pack(name) + value for name, value in parts.items())
    return frame_with_checksum(FrameType.DELTA, payload, flags=Flag.ACK_WANTED, sequence=sequence or counter)


def as_batch(
    rows: Sequence[DeltaFields],
    base: int,
    *,
    origin: int = ORIGIN,
    epoch: int = 1,
    sequence: int | None = None,
) -> bytes:
    """Return a Batch frame; its clock is the clock of the first row that has one."""
    columns: dict[Column, bytes] = {
        Column.KEY_ENDS: ends(len(row.vector_id) for row in rows),
        Column.KEYS: b"".join(row.vector_id for row in rows),
    }
    names = [*dict.fromkeys(row.namespace for row in rows)]
    columns[Column.NAMESPACES] = table(names)
    if len(names) > 1:
        columns[Column.NAMESPACE_INDEX] = pack_all("H", [names.index(row.namespace) for row in rows])
    if len({row.op for row in rows}) > 1:
        columns[Column.KINDS] = bytes(row.op for row in rows)
    if any(row.values or row.op in NUMBERED_KINDS for row in rows):
        columns[Column.VALUES] = b"".join(row.values for row in rows)
        if len({len(row.values) for row in rows}) > 1:
            columns[Column.VALUE_ENDS] = ends(len(row.values) // 4 for row in rows)
    if any(row.indices or row.op in SPARSE_KINDS for row in rows):
        columns[Column.INDICES] = b"".join(row.indices for row in rows)
    if any(row.data for row in rows):
        columns[Column.BLOB_ENDS] = ends(len(row.data) for row in rows)
        columns[Column.BLOBS] = b"".join(row.data for row in rows)
    if any(row.metadata is not None for row in rows):
        columns[Column.METADATA_ENDS] = ends(len(row.metadata or b"") for row in rows)
        columns[Column.METADATA] = b"".join(row.metadata or b"" for row in rows)
    if any(row.id is not None for row in rows):
        columns[Column.IDS] = b"".join(row.id or bytes(16) for row in rows)
    _add_optional_columns(columns, rows)
    times = [row.timestamp for row in rows]
    time = next((timestamp for timestamp in times if timestamp), 0)
    if any(timestamp not in (0, time) for timestamp in times):
        columns[Column.TIMES] = pack_all("Q", times)
    clock = next((row.clock for row in rows if row.clock), ())
    if clock:
        columns[Column.CLOCK] = b"".join(CLOCK_ENTRY.pack(*entry) for entry in clock)
    widths = {len(row.values) // 4 for row in rows if row.op in FULL_VECTOR_KINDS}
    batch = assemble(
        columns,
        attributes=NORMAL,
        count=len(rows),
        origin=origin,
        epoch=epoch,
        base=base,
        hybrid_time=time,
        kinds_mask=sum({1 << row.op for row in rows if row.op < 64}),
        dimension=widths.pop() if len(widths) == 1 else 0,
    )
    return encode(BatchFrame(sequence or base, batch, ack_wanted=True))


def _add_optional_columns(columns: dict[Column, bytes], rows: Sequence[DeltaFields]) -> None:
    """Add the columns of parents, topics and expected heads, as far as rows have some."""
    parents = [
        PARENT.pack(row, 1, entry)
        if isinstance(entry, bytes)
        else PARENT.pack(row, 0, CLOCK_ENTRY.pack(*entry))
        for row, delta_fields in enumerate(rows)
        for entry in delta_fields.parents
    ]
    topics = [*dict.fromkeys(entry for row in rows for entry in row.topics)]
    expects = [
        EXPECT.pack(row, 0, *delta_fields.expect)
        for row, delta_fields in enumerate(rows)
        if delta_fields.expect is not None
    ]
    if parents:
        columns[Column.PARENTS] = b"".join(parents)
    if topics:
        columns[Column.TAG_NAMES] = table(topics)
        columns[Column.TAGS] = b"".join(
            TAG.pack(row, topics.index(entry))
            for row, delta_fields in enumerate(rows)
            for entry in delta_fields.topics
        )
    if expects:
        columns[Column.EXPECTS] = b"".join(expects)


def pack(value: object) -> bytes:
    """Return a value in msgpack."""
    return bytes(msgpack.packb(value))


def text(raw: bytes) -> bytes:
    """Return bytes as msgpack text, also if they are not UTF-8."""
    return b"\xdb" + len(raw).to_bytes(4, "big") + raw


def table(names: Sequence[bytes]) -> bytes:
    """Return a table of names, also if they are not UTF-8."""
    return b"".join(struct.pack("<H", len(name)) + name for name in names)


def ends(sizes: Any) -> bytes:
    """Return the end positions of fields with these sizes."""
    return pack_all("I", [*accumulate(sizes)])


def pack_all(code: str, numbers: Sequence[int]) -> bytes:
    """Return numbers, little-endian."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


@dataclass(frozen=True)
class Answer:
    """The answer to a frame. `code`: None for an Ack, or if there is no answer yet (`waits`).

    `open`: False if the connection ends.
    """

    code: ErrorCode | None = None
    field: str | None = None
    row: int | None = None
    waits: bool = False
    open: bool = True


class Server:
    """One connection of a producer, in process: `handle` is passed the bytes that a socket would receive."""

    def __init__(
        self, permissions: Permissions = ALL_PERMISSIONS, settings: ServerSettings | None = None
    ) -> None:
        self.bench = Bench(log_deltas_max=1_000)
        clock = SimpleNamespace(now=lambda: self.bench.now)
        partition = SimpleNamespace(
            name=DEFAULT_LOG,
            pipeline=self.bench.pipeline,
            log=self.bench.log,
            world=SimpleNamespace(clock=clock),
        )
        settings, counters = settings or ServerSettings(), Counters()
        client = ConnectedClient(1, "host:1", permissions=permissions)
        refusals = RefusalLog(client, counters, Audit(cast("Any", clock)))
        self.handler = ProduceHandler(
            cast("Any", partition),
            settings,
            Sender(permissions.name),
            checks=PublishChecks(
                permissions,
                RateLimiter(),
                cast("Any", clock),
                clock_entries_max=settings.clock_entries_max,
            ),
            outcomes=OutcomeCollector(Wakeup(), counters, refusals),
            counters=counters,
        )
        self.handler.claim([OriginClaim(origin) for origin in (ORIGIN, SECOND, OTHER)])
        self._connection = Connection(Role.SERVER)
        self._connection.receive(encode(Subscribe(1, Hello())))
        self._connection.next_event()
        self._connection.send(Ack(correlation_id=1, response=Welcome(), credit=CREDIT))
        seeds = [Delta(name, create([1.0, 2.0]), "n") for name in ("seed-0", "seed-1", "v")]
        assert len(seeds) == SEEDED
        self.bench.send(encode_batch(seeds, origin=ORIGIN, base=1), owner=permissions.name)
        self.bench.send(encode_batch(seeds[:1], origin=SECOND, base=1), owner=permissions.name)
        assert len(self.bench.routed) == 2

    def handle(self, raw: bytes) -> Answer:
        """Handle one frame as a connection does, and return the answer."""
        connection, handler = self._connection, self.handler
        connection.receive(raw)
        try:
            run = connection.next_run()
            if run is not None:
                handler.handle_run(run)
            elif (frame := connection.next_event()) is not NEED_BYTES:
                if isinstance(frame, BatchFrame):
                    handler.handle_batch(frame, connection.last_frame_bytes)
                else:
                    assert isinstance(frame, DeltaFrame)
                    handler.handle_delta(frame, connection.last_frame_bytes)
        except ProtocolError as error:
            return Answer(error.code, open=False)
        return self._answer()

    def _answer(self) -> Answer:
        answers = self.handler.outcomes.take_answers(throttled=False)
        (nack,) = [answer for answer in answers if isinstance(answer, Nack)] or [None]
        if nack is None:
            return Answer(waits=not answers)
        return Answer(nack.code, nack.field, nack.row, open=not self.handler.outcomes.is_unauthorized)

    def answer_after_timeout(self) -> Answer:
        """Return the answer after all timeouts of waiting deltas."""
        self.bench.now += 3_600
        self.bench.pipeline.tick(self.bench.now)
        return self._answer()

    def accepts_more(self) -> bool:
        """True if the connection accepts another delta."""
        after = as_delta(DeltaFields(vector_id=b"after"), 1, origin=OTHER, sequence=1_000)
        return self.handle(after) == Answer()

    def logged(self) -> list[tuple[int, int, bytes]]:
        """Return the offset, Lamport number and body of each batch after the seeds."""
        return [
            (logged_batch.offset, logged_batch.lamport, bytes(logged_batch.batch.body))
            for logged_batch in self.bench.routed[2:]
        ]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows after the seeds, independent of batches; of no-op records, only the code."""
        return [
            (
                logged_batch.offset + row,
                logged_batch.batch.dot(row),
                refused_code(logged_batch.batch, row)
                if logged_batch.batch.is_control
                else logged_batch.batch.delta(row),
            )
            for logged_batch in self.bench.routed[2:]
            for row in range(logged_batch.count)
        ]

    def state(self) -> tuple[object, ...]:
        """Return the rest of the service's state."""
        bench, pipeline = self.bench, self.bench.pipeline
        names = sorted(name for name in bench.vectors._namespaces)
        heads = {name: dict(bench.vectors._namespaces[name].heads) for name in names}
        dimensions = {name: bench.vectors.dimension(name) for name in names}
        return (
            dict(pipeline.orderer.watermarks),
            heads,
            dimensions,
            len(pipeline.appender.refused_ids),
            len(pipeline.orderer._pending),
        )


def valid_fields(number: int) -> DeltaFields:
    """Return a valid delta, for a batch with other rows."""
    return DeltaFields(vector_id=b"company-%d" % number)


def with_id(delta_fields: DeltaFields, like: DeltaFields) -> DeltaFields:
    """Return the row, with an id if `like` has one: either all rows of a batch have ids or none has."""
    return (
        delta_fields
        if like.id is None
        else replace(delta_fields, id=delta_fields.vector_id.ljust(16, b"-")[:16])
    )
