"""The eight frames as frozen values: what can be said on a connection.

Values only: bytes are `codec.py`, who may say what when is not decided here. `sequence` stands in the
frame's header; what it counts is said with each frame.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgpack
import numpy as np

from delta_prop_wire.delta import Source
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from delta_prop_wire.batch import Batch
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority
    from delta_prop_wire.spec import ErrorCode
    from delta_prop_wire.stamp import Stamp
    from delta_prop_wire.topics import Topic


# --- deltas


@dataclass(frozen=True, slots=True)
class DeltaFrame:
    """One delta as a map, the form for languages without columns.

    `sequence`: a number of its producer's choice, greater than the one before; from a log, the offset.
    `ack_level`: what the acknowledgement is to promise, None for the server's default. `lamport`: its Lamport
    number, which only a log gives. `stream`, `partition`: where it belongs, None for its origin's.
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
    """Deltas in columns. `stamp` is the log's; None of a producer's, which says its origin's partition alone.

    `sequence`: from a producer the number of row 0, row i has `sequence + i`; stamped, the offset of row 0.
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
    """How much more may be sent, in deltas and in bytes of frames; whichever ends first."""

    deltas: int
    bytes: int


class AckRange(NamedTuple):
    """Sequences `first` to `last` lie in the log from `offset` on; `duplicate`: they had, before."""

    first: int
    last: int
    offset: int
    duplicate: bool = False


class OriginGrant(NamedTuple):
    """An origin's epoch from now on, and the counter of its last delta that is done with (0: none)."""

    origin: int
    epoch: int
    watermark: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello: what the server reads and does beyond the basics, and what each origin may go on
    from.

    `log`: the log's id, its epoch and its end. `level`: the highest level that its acknowledgements can have.
    """

    features: tuple[str, ...] = ()
    origins: tuple[OriginGrant, ...] = ()
    log: Cursor | None = None
    level: AckLevel | None = None


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The answer to a subscription: where it starts, and how deliveries are gathered.

    `standby`: another member reads for the group; a second answer, without it, comes with the first delivery.
    `resets`: how often an operator has set the group's place.
    """

    subscription: int
    start: Cursor
    batch_deltas_max: int
    wait_ms_max: int
    standby: bool = False
    resets: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """What was done. All parts are optional and independent.

    `sequence`: the outcome of every delta up to this number has been told (a Nack is an outcome).
    `ranges`: first offsets, and what overtook. `processed`: below this offset nothing is needed again; from
    a server, that everything below was delivered on this connection or is none of its business.
    `cursor`: commit it for the group. `credit`: adds to what is left. `correlation_id`: the sequence of the
    request that this answers, with its `response`; `more`: further pages of that follow. `stream`,
    `partition`: of offsets and credit.
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
        """The response, if it is that of a hello."""
        return self.response if isinstance(self.response, Welcome) else None

    @property
    def subscribed(self) -> Subscribed | None:
        """The response, if it is that of a subscription."""
        return self.response if isinstance(self.response, Subscribed) else None

    @property
    def job(self) -> JobStatus | None:
        """The response, if it is that of a decision."""
        return self.response if isinstance(self.response, JobStatus) else None


@dataclass(frozen=True, slots=True)
class Nack:
    """What was refused, why, and when to try again (None: not before something is changed).

    `sequence`: of the frame with deltas that is refused, as a whole; `frame` says so where that is 0.
    `correlation_id`: of the request that is refused; `sequence` is 0 then. None of them: it is about the
    connection.
    `row`, `field`: the first bad row of a batch and what is wrong with it. `details`: further facts, by name.
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
        """Make the frame that tells a peer what became of its frame with deltas."""
        nack = cls.of(sequence, refused)
        return nack if sequence else dataclasses.replace(nack, frame=True)

    @property
    def is_about_connection(self) -> bool:
        """True if it refuses neither a frame nor a request."""
        return not self.sequence and self.correlation_id is None and not self.frame

    @classmethod
    def of(cls, sequence: int, refused: Refused, *, correlation_id: int | None = None) -> Nack:
        """The frame that tells a peer of `refused`."""
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
        """The error that this frame tells of."""
        return Refused(
            self.code,
            self.text,
            retry_after_ms=self.retry_after_ms,
            row=self.row,
            field=self.field,
            details=self.details,
        )


# --- flow


class Level(IntEnum):
    """How pressed the sender is."""

    OK = 0
    WARN = 1
    THROTTLE = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Advice to the other side, beside the hard credits; both directions.

    `rate`: deltas a second that would suit, None for any. `depth` of `capacity`: how full the queue is.
    """

    sequence: int
    level: Level
    depth: int = 0
    capacity: int = 0
    rate: float | None = None
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent when idle. `sent_us`: the sender's monotonic clock; `echo_us`: the last one that it got.

    `sequence`: a running number. `delivered`, `received`: highest sequence sent and received so far.
    `credit`: what the sender believes it may still send. `processed`: as in an Ack.
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
    """Which part of a job a connection stages. `attempt`: parts may be sent several times at once, and the
    job's decision names the one that counts.
    """

    job: str
    part: int
    attempt: int


class OriginClaim(NamedTuple):
    """An origin that a producer will write as, its epoch (0: it wants one), and the stream it belongs to."""

    origin: int
    epoch: int = 0
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection: who I am and what I speak. `source`: where the deltas of my origins come from.

    `client`: a name for people. `log_id`: of the log that a forwarder reads. `job`: the part of a job that is
    sent here, to be kept aside until the job is decided. `splits`: a batch that is refused for one of its
    rows keeps its dots, as the client splits it.
    """

    features: tuple[str, ...] = ()
    token: str | None = dataclasses.field(default=None, repr=False)
    origins: tuple[OriginClaim, ...] = ()
    source: Source = Source.LOCAL
    client: str | None = None
    log_id: bytes | None = None
    job: JobPart | None = None
    splits: bool = False


class StartAt(Enum):
    """Where a subscription starts."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time"
    CURSOR = "cursor"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Start:
    """A start, and its value: an offset, a time in microseconds since 1970, or a cursor."""

    at: StartAt
    value: int | Cursor | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Of the deltas that match a topic, only those of these sources and priorities; empty: of all."""

    sources: tuple[Source, ...] = ()
    priorities: tuple[Priority, ...] = ()


class PartitionStart(NamedTuple):
    """A partition to read, where that starts and how much may come of it; None: as the subscription says."""

    partition: int
    start: Start | None = None
    credit: Credit | None = None


@dataclass(frozen=True, slots=True)
class Subscription:
    """What to deliver. A delta that matches several topics comes once.

    `subscription`: a number by which Unsubscribe names it. Deltas are gathered up to `batch_deltas_max`
    or for `wait_ms_max`. `group`: a name under which the server keeps the cursor; `member`: who joins it, the
    same over all connections. `deltas`: deliver Delta frames, one a row, instead of batches. `stream`: of
    which; `partitions`: which of them, empty: all.
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
    """What is to become of a job; QUERY asks only how it is."""

    COMMIT = "commit"
    ABORT = "abort"
    QUERY = "query"


def attempt_of(run: int, number: int) -> int:
    """The number of an attempt that belongs to a run of its job: that stands in its upper 32 bits."""
    return run << 32 | number & 0xFFFFFFFF


def run_of(attempt: int) -> int:
    """The run of its job that an attempt belongs to."""
    return attempt >> 32


class StagedPart(NamedTuple):
    """A part that counts: the attempt that brought it, and its deltas. `checksum`: of what its batches say,
    one after the other (`content_crc`); 0: not told.
    """

    part: int
    attempt: int
    deltas: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Decide:
    """Decide a job: its staged parts are published, or dropped. `parts`: with COMMIT, all that count; `run`:
    with ABORT, drop only the attempts of this run of the job.
    """

    job: str
    decision: Decision
    parts: tuple[StagedPart, ...] = ()
    run: int | None = None


class JobState(Enum):
    """How far a job is."""

    STAGING = "staging"
    COMMITTED = "committed"
    PUBLISHED = "published"
    ABORTED = "aborted"


class RefusedRow(NamedTuple):
    """A delta of a committed job that has no effect: which row of its part, from 0, and why. `vector_id`: as
    much of it as is kept; empty where it is not known. `text`: empty where the code alone is known any more.
    """

    part: int
    row: int
    vector_id: str
    code: ErrorCode
    text: str

    @property
    def why(self) -> str:
        """What is told of it."""
        return self.text or "refused before the service started again, which knows no more of it"

    def __str__(self) -> str:
        of = f"vector_id {self.vector_id!r}, " if self.vector_id else ""
        return f"{of}row {self.row} of part {self.part}: {self.code.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The answer to a decision. Of its deltas so many were published, known before, or refused by now;
    `refused_rows`: the first of these.
    """

    state: JobState
    deltas: int = 0
    published: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_rows: tuple[RefusedRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Get:
    """Ask for a fact as the service has it: its state, and the dot of its last change. `namespace`: None, it
    is found in the vector id, as a delta's.
    """

    vector_id: str
    namespace: str | None = None


class FactState(Enum):
    """The state of a fact: never heard of, deleted, a vector, or bytes."""

    ABSENT = "absent"
    DELETED = "deleted"
    VECTOR = "vector"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact, or a page of one. `offset`: every delta below it is counted in. `dot`, `lamport`: of its last
    delta, with or without effect; None where it is absent.

    `values` (float32, little-endian), `data` and `metadata` (a msgpack map) may be cut into pages: those of
    all pages belong end to end.
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
        """Its numbers; none unless it is a vector."""
        return np.frombuffer(self.values, "<f4")

    @property
    def metadata_map(self) -> dict[str, Any]:
        """Its metadata."""
        return dict(msgpack.unpackb(self.metadata)) if self.metadata else {}


@dataclass(frozen=True, slots=True)
class FindOffsets:
    """Ask where in the log these starts are: EARLIEST, LATEST or TIME."""

    starts: tuple[Start, ...]
    stream: int = 0
    partition: int = 0


@dataclass(frozen=True, slots=True)
class FoundOffsets:
    """The offset of each start that was asked for, and the end of the log in which they are."""

    offsets: tuple[int, ...]
    log: Cursor


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask what the service is: its streams, where their logs begin and end, the requests that it knows."""


class PartitionRange(NamedTuple):
    """A partition, the oldest offset of its log, and the log's end."""

    partition: int
    start_offset: int
    log: Cursor


class StreamDescription(NamedTuple):
    """A stream: its name, its id, its partitions."""

    name: str
    stream: int
    partitions: tuple[PartitionRange, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """The answer to Describe. `requests`: the newest version of each request that is known, by its name."""

    streams: tuple[StreamDescription, ...]
    requests: Mapping[str, int]
    features: tuple[str, ...] = ()
    level: AckLevel | None = None


class UnknownRequest(NamedTuple):
    """A request that this side does not know, or not in that version; it is refused, the connection stays."""

    name: str
    version: int


Request = Hello | Subscription | Decide | Get | FindOffsets | Describe | UnknownRequest
Response = Welcome | Subscribed | JobStatus | Fact | FoundOffsets | Description


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A request; an Ack or a Nack answers it by its `sequence`."""

    sequence: int
    request: Request


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """End a subscription. `drain`: deliver first what is on the way; the Ack follows the last of it."""

    sequence: int
    subscription: int
    drain: bool = True


Frame = DeltaFrame | BatchFrame | Ack | Nack | Backpressure | Heartbeat | Subscribe | Unsubscribe
