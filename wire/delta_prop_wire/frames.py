"""The eight frames as frozen values, with the requests and responses that they carry.

Values only: `codec.py` has the bytes, and `message_rules.py` decides which side may send what. `sequence` is
in the frame's header; each frame documents what it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgpack
import numpy as np

from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, Source
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.stamp import Stamp
    from delta_prop_wire.topics import Topic


# --- deltas


@dataclass(frozen=True, slots=True)
class DeltaFrame:
    """One delta as a map, for clients that encode no columns.

    `sequence`: from a producer, a number above its previous one; from a log, the offset. `ack_level`: None
    for the server's default. `lamport`: the delta's Lamport number, which only a log assigns. `stream`,
    `partition`: the log that it belongs to; without a partition, it is the origin's.
    """

    sequence: int
    delta: Delta
    ack_wanted: bool = False
    ack_level: AckLevel | None = None
    lamport: int | None = None
    stream: int = 0
    partition: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BatchFrame:
    """Deltas in columns. `stamp`: a log's stamp; None for a frame of a producer, whose stamp holds no more
    than its origin's partition.

    `sequence`: from a producer, the number of row 0 (row i has `sequence + i`); from a log, row 0's offset.
    """

    sequence: int
    batch: Batch
    stamp: Stamp | None = None
    ack_wanted: bool = False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchFrame):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.sequence, bytes(self.batch.body), self.stamp, self.ack_wanted)


# --- answers


class Credit(NamedTuple):
    """Credit to send more, in deltas and in bytes of frames; sending stops when one of them runs out."""

    deltas: int
    bytes: int


class AckRange(NamedTuple):
    """The acknowledgement of sequences `first` to `last`, in the log from `offset` on.

    `duplicate`: they had been accepted before.
    """

    first: int
    last: int
    offset: int
    duplicate: bool = False


class OriginGrant(NamedTuple):
    """An origin's epoch from now on, and the counter of its last delta with an outcome (0: none)."""

    origin: int
    epoch: int
    watermark: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello: the server's optional features, and where each origin continues.

    `log`: the log's id, epoch and next offset. `level`: the highest ack level that the server grants;
    `default_level`: the one for whoever asks for none, if it is another. `address`: host:port by which other
    clients reach the server, if its operator has given one.
    """

    features: tuple[str, ...] = ()
    origins: tuple[OriginGrant, ...] = ()
    log: Cursor | None = None
    level: AckLevel | None = None
    address: str | None = None
    default_level: AckLevel | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The answer to a subscription: where it starts, and the bounds of its deliveries.

    `standby`: another member reads for the group; a second answer without it comes with the first delivery.
    `resets`: the number of times that an operator has set the group's cursor.
    """

    subscription: int
    start: Cursor
    batch_deltas_max: int
    wait_ms_max: int
    standby: bool = False
    resets: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """The acknowledgement of deltas, or the answer to a request. All parts are optional and independent.

    `sequence`: the outcome of every delta up to this number has been reported (a Nack is an outcome).
    `ranges`: offsets of acknowledged deltas, also above `sequence`. `processed`: from a client, nothing below
    this offset is needed again; from a server, everything below it was delivered on this connection or does
    not match its subscriptions. `cursor`: the server commits it for the group. `credit`: adds to the balance.
    `correlation_id`: the sequence of the request that this answers, with its `response`; `more`: further
    pages of the response follow. `stream`, `partition`: the log of the offsets and the credit.
    """

    sequence: int = 0
    ranges: tuple[AckRange, ...] = ()
    processed: int | None = None
    cursor: Cursor | None = None
    credit: Credit | None = None
    correlation_id: int | None = None
    response: Response | None = None
    more: bool = False
    stream: int = 0
    partition: int = 0

    @property
    def welcome(self) -> Welcome | None:
        """The response if it answers a hello, else None."""
        return self.response if isinstance(self.response, Welcome) else None

    @property
    def subscribed(self) -> Subscribed | None:
        """The response if it answers a subscription, else None."""
        return self.response if isinstance(self.response, Subscribed) else None

    @property
    def job(self) -> JobStatus | None:
        """The response if it answers a decision, else None."""
        return self.response if isinstance(self.response, JobStatus) else None


@dataclass(frozen=True, slots=True)
class Nack:
    """A refusal, its reason, and the time to wait before a retry (None: something has to be changed first).

    `sequence`: the sequence of a refused frame with deltas, all of which are refused. `frame`: True if this
    frame had sequence 0. `correlation_id`: the sequence of a refused request; `sequence` is 0 then. A Nack
    with none of the three refuses the connection. `row`, `field`: the first bad row of a batch and its bad
    field. `details`: further facts, by name.
    """

    sequence: int
    code: ErrorCode
    text: str
    retry_after_ms: int | None = None
    row: int | None = None
    field: str | None = None
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    correlation_id: int | None = None
    frame: Literal[True] | None = None

    @classmethod
    def of_frame(cls, sequence: int, refused: Refused) -> Nack:
        """Return the frame that reports the refusal of a peer's frame with deltas."""
        nack = cls.of(sequence, refused)
        return nack if sequence else dataclasses.replace(nack, frame=True)

    @property
    def is_about_connection(self) -> bool:
        """True if this refuses neither a frame nor a request."""
        return not self.sequence and self.correlation_id is None and not self.frame

    @classmethod
    def of(cls, sequence: int, refused: Refused, *, correlation_id: int | None = None) -> Nack:
        """Return the frame that reports `refused` to a peer."""
        return cls(
            sequence,
            refused.code,
            refused.message,
            refused.retry_after_ms,
            refused.row,
            refused.field,
            refused.details,
            correlation_id,
        )

    def refusal(self) -> Refused:
        """Return the error that this frame reports."""
        return Refused(
            self.code,
            self.text,
            retry_after_ms=self.retry_after_ms,
            row=self.row,
            field=self.field,
            details=self.details,
        )


# --- flow


class PressureLevel(IntEnum):
    """The pressure on the sender of the frame."""

    OK = 0
    WARN = 1
    THROTTLE = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Advice to the other side, in addition to credits; sent in both directions.

    `rate`: the recommended deltas per second; None: no limit. `depth`, `capacity`: of the sender's queue.
    """

    sequence: int
    level: PressureLevel
    depth: int = 0
    capacity: int = 0
    rate: float | None = None
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life on an idle connection.

    `sequence`: a running number. `sent_us`: the sender's monotonic clock; `echo_us`: the last `sent_us`
    received. `delivered`, `received`: the highest sequence sent and received so far. `credit`: the sender's
    own balance. `processed`: as in an Ack.
    """

    sequence: int
    sent_us: int | None = None
    echo_us: int | None = None
    delivered: int | None = None
    received: int | None = None
    credit: Credit | None = None
    processed: int | None = None


# --- requests


class JobPart(NamedTuple):
    """The part of a job that a connection stages.

    `attempt`: a part may be sent several times at once, and the job's decision names the attempt that counts.
    """

    job: str
    part: int
    attempt: int


class OriginClaim(NamedTuple):
    """An origin that a producer will write as, its epoch (0: requests one), and its stream."""

    origin: int
    epoch: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """The request that opens a connection: the client's identity and features.

    `source`: the source of its origins' deltas. `client`: a name for people. `log_id`: the id of the log that
    a forwarder reads. `job`: the part of a job that this connection sends, staged until the job is decided.
    `splits`: a batch that is refused for one of its rows uses up no dots, since the client splits it.
    `stream`, `partition`: what the connection works with, to which its origins belong.
    """

    features: tuple[str, ...] = ()
    token: str | None = dataclasses.field(default=None, repr=False)
    origins: tuple[OriginClaim, ...] = ()
    source: Source = Source.LOCAL
    client: str | None = None
    log_id: bytes | None = None
    job: JobPart | None = None
    splits: bool = False
    stream: int = 0
    partition: int = 0


class StartAt(Enum):
    """The kinds of starts of a subscription."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"
    CURSOR = "cursor"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Start:
    """A kind of start, and its value: an offset, a time in microseconds since 1970, or a cursor."""

    kind: StartAt
    value: int | Cursor | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter by source and priority of the deltas that match a topic; an empty field filters nothing."""

    sources: tuple[Source, ...] = ()
    priorities: tuple[Priority, ...] = ()


class PartitionStart(NamedTuple):
    """A partition to read, its start and its credit; None for those of the subscription."""

    partition: int
    start: Start | None = None
    credit: Credit | None = None


@dataclass(frozen=True, slots=True)
class Subscription:
    """A request for deliveries. A delta that matches several topics is delivered once.

    `subscription`: a number by which Unsubscribe names it. The server collects deltas up to
    `batch_deltas_max` or for `wait_ms_max`. `group`: the name under which the server stores the cursor;
    `member`: the id of the joining member, the same on all its connections. `deltas`: deliver Delta frames,
    one per row, instead of batches. `stream`, `partitions`: the stream and the partitions to read; empty:
    all.
    """

    subscription: int
    topics: tuple[Topic, ...]
    start: Start = Start(StartAt.LATEST)
    credit: Credit | None = None
    batch_deltas_max: int = 100
    wait_ms_max: int = 10
    group: str | None = None
    member: bytes | None = None
    filter: Filter | None = None
    deltas: bool = False
    stream: int = 0
    partitions: tuple[PartitionStart, ...] = ()


class Decision(Enum):
    """The decisions about a job; QUERY only asks for its status."""

    COMMIT = "commit"
    ABORT = "abort"
    QUERY = "query"


def attempt_of(run: int, number: int) -> int:
    """Return the number of an attempt of a job's run; the run is in its upper 32 bits."""
    return run << 32 | number & 0xFFFFFFFF


def job_run_of(attempt: int) -> int:
    """Return the run of the job that an attempt belongs to."""
    return attempt >> 32


class StagedPart(NamedTuple):
    """A staged part of a job: the attempt that counts, and the number of deltas in it.

    `checksum`: the checksum of the content of its batches, one after the other (`content_crc`); 0: unknown.
    """

    part: int
    attempt: int
    deltas: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Decide:
    """A request to decide a job: the service publishes its staged parts, or drops them.

    `parts`: with COMMIT, all parts to publish. `run`: with ABORT, drop only the attempts of this run of the
    job.
    """

    job: str
    decision: Decision
    parts: tuple[StagedPart, ...] = ()
    run: int | None = None


class JobState(Enum):
    """The states of a job."""

    STAGING = "staging"
    COMMITTED = "committed"
    PUBLISHED = "published"
    ABORTED = "aborted"


class RefusedRow(NamedTuple):
    """A refused delta of a committed job: its part, its row in the part from 0, and the reason.

    `vector_id`: may be truncated; empty if unknown. `text`: empty if only the code is still known.
    """

    part: int
    row: int
    vector_id: str
    code: ErrorCode
    text: str

    @property
    def reason(self) -> str:
        """The reason of the refusal as text."""
        return self.text or "refused before the service restarted, which stored only the code"

    def __str__(self) -> str:
        vector = f"vector_id {self.vector_id!r}, " if self.vector_id else ""
        return f"{vector}row {self.row} of part {self.part}: {self.code.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The answer to a decision.

    `deltas`: how many deltas the job has; before the decision, how many are staged so far. Of these,
    `published` have been appended by now, `duplicates` had been accepted before, and `refused` were refused.
    `refused_rows`: the first refused rows.
    """

    state: JobState
    deltas: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_rows: tuple[RefusedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Get:
    """A request for a fact in the service: its state, and the dot of its last change.

    `namespace`: None for the namespace that the vector id names before its first ":", as for a delta.
    """

    vector_id: str
    namespace: str | None = None


class FactState(Enum):
    """The states of a fact: unknown to the log, deleted, a vector, or bytes."""

    ABSENT = "absent"
    DELETED = "deleted"
    VECTOR = "vector"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact, or a page of one. `offset`: every delta below it is included.

    `dot`, `lamport`: those of its last delta, with or without effect; None if the fact is absent. `values`
    (float32, little-endian), `data` and `metadata` (a msgpack map) may be split into pages, to be joined end
    to end.
    """

    state: FactState
    offset: int
    dot: Dot | None = None
    lamport: int | None = None
    values: bytes = b""
    data: bytes = b""
    metadata: bytes = b""

    @property
    def vector(self) -> NDArray[np.float32]:
        """The numbers of the vector (1-D, float32); empty unless the fact is a vector."""
        return np.frombuffer(self.values, "<f4")

    @property
    def metadata_map(self) -> dict[str, Any]:
        """The metadata as a dictionary."""
        return dict(msgpack.unpackb(self.metadata)) if self.metadata else {}


@dataclass(frozen=True, slots=True)
class FindOffsets:
    """A request for the offsets in the log of these starts: EARLIEST, LATEST or TIME."""

    starts: tuple[Start, ...]
    stream: int = 0
    partition: int = 0


@dataclass(frozen=True, slots=True)
class FoundOffsets:
    """The answer to FindOffsets: the offset of each start, and a cursor at the end of the log."""

    offsets: tuple[int, ...]
    log: Cursor


@dataclass(frozen=True, slots=True)
class Describe:
    """A request to describe the service: its streams, the bounds of their logs, the requests it knows.

    `stream`: the name of the only stream to describe. The answer has only the ranges that are at hand, which
    are those of open partitions; with `ranges`, all partitions of that stream are opened for it.
    """

    stream: str | None = None
    ranges: bool = False


class PartitionRange(NamedTuple):
    """A partition, its log's start offset, and a cursor at its log's end."""

    partition: int
    start_offset: int
    log: Cursor


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream: its name, its id, the ranges of its partitions as far as they are known.

    `count`: the number of its partitions. `settings`: those that it has of its own, by name.
    """

    name: str
    stream: int
    partitions: tuple[PartitionRange, ...]
    count: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to Describe, and to a change of a stream, with that stream only.

    `requests`: the newest known version of each request, by its name. `address`: as in a welcome.
    """

    streams: tuple[StreamDescription, ...]
    requests: Mapping[str, int]
    features: tuple[str, ...] = ()
    level: AckLevel | None = None
    address: str | None = None


class UnknownRequest(NamedTuple):
    """A request whose name or version this side does not know; it is refused, and the connection stays."""

    name: str
    version: int


StreamChange = CreateStream | AlterStream | DeleteStream | TruncateStream | EraseVector
Request = Hello | Subscription | Decide | Get | FindOffsets | Describe | StreamChange | UnknownRequest
Response = Welcome | Subscribed | JobStatus | Fact | FoundOffsets | Description


@dataclass(frozen=True, slots=True)
class Subscribe:
    """The frame of a request; an Ack or a Nack answers it by its `sequence`."""

    sequence: int
    request: Request


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """A request to end a subscription. `drain`: the server delivers all that is in flight before its Ack."""

    sequence: int
    subscription: int
    drain: bool = True


Frame = DeltaFrame | BatchFrame | Ack | Nack | Backpressure | Heartbeat | Subscribe | Unsubscribe
