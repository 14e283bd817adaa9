"""Random appends, subscriptions, credits and reconnects: each matching delta arrives once, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.server import log_reader
from delta_prop_broker.segments import sendfile
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, Source, create, delete, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Credit, Filter, Start, StartAt, Subscription
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL, Topic
from tests.broker.durable import LOG_ID
from tests.delta_prop.server.session_fakes import (
    LARGE_LOG,
    SETTINGS,
    FakeService,
    FakeSubscriber,
    batch_of,
    expected_row,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMESPACES = ("a", "b", "c")
TOPICS = [Topic.parse(text) for text in ("*", "*", "v:k1", "ns:a", "ns:b", "op:create", "op:delete", "c:x")]
FILTERS = (None, None, Filter(sources=(Source.LOCAL,)), Filter(priorities=(Priority.HIGH, Priority.NORMAL)))


@pytest.fixture(autouse=True)
def _small_sendfile_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "RangeBounds", partial(sendfile.RangeBounds, bytes_min=2_000))


@dataclass
class SubscriberRun:
    """A random run of a subscriber, with the rows that it should have received.

    `earlier`: the rows received on earlier connections. `open`: the open subscriptions, by number.
    `subscriptions`: (offset, the subscriptions that were open from this offset on).
    """

    rng: random.Random
    service: FakeService
    scope: frozenset[str] | None
    as_deltas: bool
    is_unfiltered: bool
    subscriber: FakeSubscriber = field(init=False)
    earlier: list[tuple[int, int, bytes]] = field(default_factory=list)
    first_offset: int = 0
    last_number: int = 0
    open: dict[int, Subscription] = field(default_factory=dict)
    subscriptions: list[tuple[int, list[Subscription]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_offset = self.connect(Start(StartAt.LATEST))

    # --- steps

    def append(self) -> None:
        rng, service = self.rng, self.service
        namespace = rng.choice([*NAMESPACES, None, None])
        deltas = [
            Delta(
                f"k{rng.randrange(4)}",
                rng.choice([create([1.0]), delete(), opaque(b"x" * rng.choice([1, 300]))]),
                namespace or rng.choice(NAMESPACES),
                topics=("x",) if rng.random() < 0.1 else (),
            )
            for _ in range(rng.choice([1, 1, 2, 5, 12]))
        ]
        priority = rng.choice([Priority.HIGH, Priority.NORMAL, Priority.LOW])
        service.append(batch_of(deltas, service.counter, priority), rng.choice([Source.LOCAL, Source.IMPORT]))

    def append_noop(self) -> None:
        self.service.append_noop(self.rng.randint(1, 3))

    def commit(self) -> None:
        self.service.commit()

    def write(self) -> None:
        self.subscriber.write(times=self.rng.choice([1, 2, 5]))

    def wait(self) -> None:
        self.service.now += self.rng.choice([0.001, 0.02, 0.5])

    def grant(self) -> None:
        self.subscriber.grant(self.rng.randint(0, 30), self.rng.randint(0, 9_000))

    def subscribe(self) -> None:
        if len(self.open) < 4:
            self.note_subscriptions(self.subscriber.subscribe(self.draw_subscription()))

    def unsubscribe(self) -> None:
        if len(self.open) > 1:
            number = self.rng.choice(list(self.open))
            self.subscriber.session.unsubscribe(number)
            del self.open[number]
            self.note_subscriptions(self.subscriber.session.processed)

    def reconnect(self) -> None:
        offset = self.subscriber.session.processed
        self.subscriber.session.close()
        self.resume(offset, self.service.log.epoch)

    def recover(self) -> None:
        if self.service.disk is None:
            return
        epoch, offset = self.service.log.epoch, self.subscriber.session.processed
        self.service.fail_and_recover()
        assert self.subscriber.notified
        self.subscriber.wake_at = None
        with pytest.raises(Refused) as caught:
            self.subscriber.write()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
        self.resume(offset, epoch)

    # --- helpers

    def resume(self, offset: int, epoch: int) -> None:
        self.earlier += self.subscriber.received
        self.connect(Start(StartAt.CURSOR, Cursor(LOG_ID, epoch, offset)))

    def connect(self, start: Start) -> int:
        self.open = {}
        scope = self.scope
        self.subscriber = FakeSubscriber(
            self.service,
            scope=scope,
            bytes_max=self.rng.choice([1, 500, 30_000]),
        )
        credit = self.rng.choice([None, None, Credit(5, 3_000), Credit(0, 0)])
        wait_ms_max = self.rng.choice([0, 10])
        first = replace(self.draw_subscription(), start=start, credit=credit, wait_ms_max=wait_ms_max)
        offset = self.subscriber.subscribe(first)
        self.note_subscriptions(offset)
        return offset

    def draw_subscription(self) -> Subscription:
        self.last_number += 1
        topics = tuple({self.rng.choice(TOPICS) for _ in range(self.rng.choice([1, 1, 2]))})
        filter_ = self.rng.choice(FILTERS)
        if self.is_unfiltered:
            topics, filter_ = (ALL,), None
        self.open[self.last_number] = Subscription(
            self.last_number, topics, filter=filter_, deltas=self.as_deltas
        )
        return self.open[self.last_number]

    def note_subscriptions(self, offset: int) -> None:
        """Record that the open subscriptions apply from `offset` on."""
        self.subscriptions = [entry for entry in self.subscriptions if entry[0] < offset]
        self.subscriptions.append((offset, list(self.open.values())))

    def end(self) -> None:
        self.commit()
        self.subscriber.grant(1 << 40)
        self.subscriber.write_all(600)

    def expected(self) -> Iterator[tuple[int, int, bytes]]:
        for logged in self.service.appended:
            for row in range(0 if logged.batch.is_control else logged.count):
                offset = logged.offset + row
                if offset >= self.first_offset and self.is_expected(
                    offset, logged.batch.delta(row, logged.source)
                ):
                    yield expected_row(logged, row)

    def is_expected(self, offset: int, delta: Delta) -> bool:
        _, subscriptions = [entry for entry in self.subscriptions if entry[0] <= offset][-1]
        return (self.scope is None or delta.namespace in self.scope) and any(
            any(topic.matches(delta) for topic in request.topics)
            and (
                request.filter is None or not request.filter.sources or delta.source in request.filter.sources
            )
            and (
                request.filter is None
                or not request.filter.priorities
                or delta.priority in request.filter.priorities
            )
            for request in subscriptions
        )


STEP_WEIGHTS = {
    "append": 12,
    "append_noop": 1,
    "commit": 5,
    "write": 6,
    "wait": 3,
    "grant": 3,
    "subscribe": 0.4,
    "unsubscribe": 0.4,
    "reconnect": 0.3,
    "recover": 0.2,
}


@pytest.mark.parametrize("storage", ["in memory", "on disk"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), as_deltas=st.sampled_from([False, False, True]))
def test_each_matching_delta_comes_once_and_in_order_when_visible(
    storage: str, seed: int, as_deltas: bool
) -> None:
    rng = random.Random(seed)
    small_queue = replace(SETTINGS, subscriber_bytes_max=rng.choice([1, 1_000, 20_000]))
    log_settings = replace(LARGE_LOG, segment_bytes_max=10_000)
    service = FakeService.in_memory(settings=small_queue)
    if storage == "on disk":
        service = FakeService.on_disk(log_settings, settings=small_queue)
    for _ in range(rng.choice([0, 10])):
        service.append_rows(2)
        service.commit()
    is_unfiltered = rng.random() < 0.4
    scope = frozenset(rng.sample(NAMESPACES, 2)) if rng.random() < 0.3 and not is_unfiltered else None
    run = SubscriberRun(rng, service, scope, as_deltas, is_unfiltered)
    for step in rng.choices(list(STEP_WEIGHTS), list(STEP_WEIGHTS.values()), k=rng.choice([20, 150])):
        getattr(run, step)()
    run.end()
    assert run.earlier + run.subscriber.received == list(run.expected())
    assert run.subscriber.session.processed == service.log.high_watermark == service.log.next_offset
