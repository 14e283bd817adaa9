"""A consumer session on a real log, and a fake writer that polls it only when notified or due."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_prop.delivery.routing_table import RouteTarget, RoutingTable
from delta_prop.server.answers import ConnectedClient
from delta_prop.server.consumer_session import ConsumerSession
from delta_prop.server.groups import Groups
from delta_prop.server.permissions import Permissions
from delta_prop.server.settings import ServerSettings
from delta_prop.testing import virtual_world
from delta_prop_broker.disk import FileRange
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.codec import NEED_BYTES, Decoder, encode
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.delta import AckLevel, Delta, Priority, Source, create, opaque
from delta_prop_wire.delta_map import pack_delta
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import BatchFrame, Credit, DeltaFrame, Start, StartAt, Subscription
from delta_prop_wire.slicing import rows_of
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import Topic
from tests.broker.durable import LOG_ID, commit, open_log

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from delta_prop.server.send_queue import SendChunk
    from delta_prop_wire.batch import Batch, LoggedBatch

LARGE_LOG = LogSettings(
    segment_bytes_max=300_000,
    bytes_max=4_000_000,
    retention_bytes=4_000_000,
    tail_bytes_max=1,
    free_bytes_min=0,
    reserve_bytes=0,
    compact=False,
)
SETTINGS = ServerSettings(subscriber_bytes_max=20_000, send_bytes_max=4_000)
EARLIEST = Start(StartAt.EARLIEST)
LATEST = Start(StartAt.LATEST)
ALL = (Topic.parse("*"),)


def subscription(number: int = 1, *topics: str, **more: Any) -> Subscription:
    return Subscription(number, tuple(map(Topic.parse, topics or ("*",))), **more)


def rows_batch(count: int, base: int, *, data: bytes = b"x" * 20, **more: Any) -> Batch:
    deltas = [Delta(f"v{(base + row) % 7}", opaque(data), namespace="rows") for row in range(count)]
    return batch_of(deltas, base, **more)


def batch_of(deltas: list[Delta], base: int, priority: Priority = Priority.NORMAL) -> Batch:
    return encode_batch(deltas, origin=16, base=base, priority=priority, ack_level=AckLevel.MEMORY)


@dataclass
class FixedClock:
    """A clock that stands still until a test sets it."""

    seconds: float = 100.0

    def now(self) -> float:
        return self.seconds

    def wall_us(self) -> int:
        return 0


def reader_of(scope: Collection[str] | None) -> Permissions:
    """Return the permissions of a subscriber that may read these namespaces; None for all."""
    return Permissions("reader", subscribe=True, namespaces=None if scope is None else tuple(scope))


class FakeSinkManager:
    """The part of `SinkManager` that consumer sessions use."""

    def __init__(self) -> None:
        self.table: RoutingTable[RouteTarget] = RoutingTable()
        self.sessions: dict[RouteTarget, None] = {}

    def add_target(self, session: RouteTarget, topics: Iterable[Topic]) -> None:
        self.sessions[session] = None
        self.table.subscribe(session, topics)

    def remove_target(self, session: RouteTarget) -> None:
        self.sessions.pop(session, None)
        self.table.unsubscribe(session)


@dataclass
class FakeService:
    """A log, whose visible batches are passed to consumer sessions as the service does."""

    log: DurableLog | MemoryLog
    disk: SimDisk | None = None
    settings: ServerSettings = SETTINGS
    now: float = 100.0
    counter: int = 1
    """The counter of the next row."""
    sinks: Any = field(default_factory=FakeSinkManager)
    appended: list[LoggedBatch] = field(default_factory=list)
    _not_visible: list[LoggedBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = Groups(self.disk, self.log, virtual_world())
        clock = SimpleNamespace(now=lambda: self.now)
        self.partition: Any = SimpleNamespace(log=self.log, world=SimpleNamespace(clock=clock))

    @classmethod
    def on_disk(cls, log_settings: LogSettings = LARGE_LOG, **more: Any) -> FakeService:
        disk = SimDisk()
        return cls(open_log(disk, log_settings)[0], disk, **more)

    @classmethod
    def in_memory(cls, **more: Any) -> FakeService:
        return cls(MemoryLog(LOG_ID), **more)

    def append(self, batch: Batch, source: Source = Source.LOCAL) -> LoggedBatch:
        logged = self.log.append(batch, lamport=3 * self.log.next_offset + 5, source=source)
        self.counter += batch.count
        self.appended.append(logged)
        self._not_visible.append(logged)
        if isinstance(self.log, MemoryLog):
            self.publish_visible()
        return logged

    def append_rows(self, count: int, **more: Any) -> LoggedBatch:
        return self.append(rows_batch(count, self.counter, **more))

    def append_noop(self, count: int = 1) -> LoggedBatch:
        return self.append(
            encode_noop(code=ErrorCode.INVALID_DELTA, origin=16, base=self.counter, count=count)
        )

    def commit(self) -> None:
        if isinstance(self.log, DurableLog):
            commit(self.log)
        self.publish_visible()

    def publish_visible(self) -> None:
        while self._not_visible and self._not_visible[0].next_offset <= self.log.high_watermark:
            logged = self._not_visible.pop(0)
            for target, rows in self.sinks.table.plan(logged.batch):
                target.offer(logged, rows)
        for session in self.sinks.sessions:
            session.note_visible()

    def fail_and_recover(self) -> None:
        """Fail the disk and recover the log in place: rows that were not synced are lost."""
        assert isinstance(self.log, DurableLog)
        self.log.fail(OSError("the disk"))
        self._not_visible.clear()
        self.log.resume(self.log.recover_in_place())
        self.appended = [logged for logged in self.appended if logged.next_offset <= self.log.next_offset]
        for session in list(self.sinks.sessions):
            session.note_recovered()


class FakeSubscriber:
    """A client that records the rows that it receives, in order, and checks that its credit allows them."""

    def __init__(
        self,
        service: FakeService,
        *,
        codecs: frozenset[int] = frozenset(),
        scope: frozenset[str] | None = None,
        bytes_max: int | None = None,
        rows_max: int | None = None,
    ) -> None:
        self.rows_max = rows_max
        self.service = service
        self.received: list[tuple[int, int, bytes]] = []
        """The offset, the Lamport number and the packed delta of each row."""
        self.chunk_kinds: list[str] = []  # "range" (sendfile) or "parts"
        self.range_sizes: list[int] = []  # in bytes, of each sendfile range
        self.bytes = 0  # bytes received on the connection
        self.frames: list[BatchFrame | DeltaFrame] = []
        self.notified = True
        self.notifications = 0
        self.window = CreditWindow(None)
        self.wake_at: float | None = None
        self.bytes_max = bytes_max or service.settings.send_bytes_max
        self.session = ConsumerSession(
            service.partition,
            service.sinks,
            service.groups,
            settings=service.settings,
            client=ConnectedClient(1, "host:1", permissions=reader_of(scope), codecs=codecs),
            writer=self,
        )

    def notify(self) -> None:
        """See `Notifiable`."""
        self.notified = True
        self.notifications += 1

    def subscribe(self, request: Subscription) -> int:
        if request.credit is not None:
            self.window = CreditWindow(request.credit)
        granted = self.session.subscribe(request)
        self.notified = True
        return granted.start.next_offset

    def grant(self, deltas: int, size: int = 1 << 40) -> None:
        self.window.grant(Credit(deltas, size))
        self.session.grant(Credit(deltas, size))

    def write(self, times: int = 1 << 30) -> int:
        """Poll the session as a writer does, when notified or due; return the number of chunks."""
        chunk_count = 0
        while times and (self.notified or (self.wake_at is not None and self.wake_at <= self.service.now)):
            times -= 1
            self.notified, self.wake_at = False, None
            chunk = self.session.take(self.service.now, self.bytes_max, rows_max=self.rows_max)
            if chunk is not None:
                assert chunk.delta_count <= (self.rows_max or chunk.delta_count)
                chunk_count += 1
                self._receive(chunk)
                self.notified = self.notified or not times or not self.session.try_idle()
                continue
            wait_s = self.session.wait_s(self.service.now)
            self.wake_at = None if wait_s is None else self.service.now + wait_s
        return chunk_count

    def write_all(self, seconds: float = 5.0) -> None:
        """Advance the time, and write whenever the session is due."""
        end = self.service.now + seconds
        self.write()
        while self.wake_at is not None and self.wake_at <= end:
            self.service.now = max(self.service.now, self.wake_at)
            self.write()
        self.service.now = end

    def offsets(self) -> list[int]:
        return [offset for offset, _, _ in self.received]

    def _receive(self, chunk: SendChunk) -> None:
        if isinstance(chunk.parts, FileRange):
            self.chunk_kinds.append("range")
            self.range_sizes.append(chunk.parts.size)
            raw = chunk.parts.file.read(chunk.parts.position, chunk.parts.size)
        else:
            self.chunk_kinds.append("parts")
            raw = b"".join(chunk.parts)
        assert len(raw) == chunk.bytes
        self.bytes += len(raw)
        high_watermark = self.service.log.high_watermark
        decoder, delta_count = Decoder(), 0
        for start in range(0, len(raw), 1 << 22):
            decoder.receive(raw[start : start + (1 << 22)])
            while (frame := decoder.next_event()) is not NEED_BYTES:
                assert isinstance(frame, BatchFrame | DeltaFrame)
                delta_count += self._receive_frame(frame)
        assert decoder.buffered_bytes == 0
        assert delta_count == chunk.delta_count
        assert chunk.next_offset <= self.session.processed <= high_watermark
        assert self.received[-1][0] < chunk.next_offset

    def _receive_frame(self, frame: BatchFrame | DeltaFrame) -> int:
        assert self.window.is_open, "a frame should be sent only while both balances are above 0"
        self.frames.append(frame)
        if isinstance(frame, DeltaFrame):
            assert frame.lamport is not None
            rows = [(frame.sequence, frame.lamport, pack_delta(frame.delta))]
            size = len(encode(frame))
        else:
            assert frame.stamp is not None
            assert not frame.batch.is_control
            rows = [(row.offset, row.lamport, pack_delta(row.delta)) for row in rows_of(frame)]
            size = frame.batch.size
        assert rows[-1][0] < self.service.log.high_watermark
        self.window.spend(len(rows), size)
        self.received += rows
        return len(rows)


def expected_row(logged: LoggedBatch, row: int) -> tuple[int, int, bytes]:
    """Return a row as `FakeSubscriber.received` should have it."""
    delta = logged.batch.delta(row, logged.source)
    return logged.offset + row, logged.lamport + row, pack_delta(delta)


def expected_rows(service: FakeService, first: int = 0) -> list[tuple[int, int, bytes]]:
    """Return all rows from an offset on, without those of control batches."""
    return [
        expected_row(logged, row)
        for logged in service.appended
        for row in range(0 if logged.batch.is_control else logged.count)
        if logged.offset + row >= first
    ]


def refusal_of(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def append_mixed(service: FakeService) -> None:
    """Append a batch of two namespaces and two kinds."""
    deltas = [
        Delta(f"{name}{number}", operation, name)
        for number in range(3)
        for name, operation in (("a", create([1.0])), ("b", opaque(b"y")))
    ]
    service.append(batch_of(deltas, service.counter))


def multi_segment_service() -> FakeService:
    """Return a service whose log has several segments, with some control rows."""
    log_settings = replace(LARGE_LOG, segment_bytes_max=80_000)
    service = FakeService.on_disk(log_settings, settings=ServerSettings(subscriber_bytes_max=20_000))
    for number in range(250):
        service.append_rows(2, data=bytes(400))
        if number % 150 == 149:
            service.append_noop(2)
        if number % 10 == 0:
            service.commit()
    service.commit()
    return service


EACH_LOG = pytest.mark.parametrize(
    "make_service", [FakeService.in_memory, FakeService.on_disk], ids=["in memory", "on disk"]
)
