"""Whatever is appended, asked for, granted and broken off: each matching delta comes once, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.server import consumer_session as module
from delta_prop_broker.log.files import sendfile as stretches
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, Priority, Source, create, delete, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.frames import Credit, Filter, Start, StartAt, Subscription
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL, Topic
from tests.broker.durable import LOG_ID
from tests.delta_prop.server.outlets import ROOMY, SETTINGS, House, Line, batch_of, told

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("a", "b", "c")
TOPICS = [Topic.parse(text) for text in ("*", "*", "v:k1", "ns:a", "ns:b", "op:create", "op:delete", "c:x")]
FILTERS = (None, None, Filter(sources=(Source.LOCAL,)), Filter(priorities=(Priority.HIGH, Priority.NORMAL)))


@pytest.fixture(autouse=True)
def _small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RangeBounds", partial(stretches.RangeBounds, bytes_min=2_000))


@dataclass
class Story:
    """A random life of a subscriber, and what it should have got."""

    chance: random.Random
    house: House
    scope: frozenset[str] | None
    form: bool
    plain: bool
    line: Line = field(init=False)
    earlier: list[tuple[int, int, bytes]] = field(default_factory=list)
    begin: int = 0
    numbers: int = 0
    open: dict[int, Subscription] = field(default_factory=dict)
    asked: list[tuple[int, list[Subscription]]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin = self.connect(Start(StartAt.LATEST))

    # --- what happens

    def append(self) -> None:
        chance, house = self.chance, self.house
        one_name = chance.choice([*NAMES, None, None])
        deltas = [
            Delta(
                f"k{chance.randrange(4)}",
                chance.choice([create([1.0]), delete(), opaque(b"x" * chance.choice([1, 300]))]),
                one_name or chance.choice(NAMES),
                topics=("x",) if chance.random() < 0.1 else (),
            )
            for _ in range(chance.choice([1, 1, 2, 5, 12]))
        ]
        priority = chance.choice([Priority.HIGH, Priority.NORMAL, Priority.LOW])
        house.append(batch_of(deltas, house.counter, priority), chance.choice([Source.LOCAL, Source.IMPORT]))

    def void(self) -> None:
        self.house.void(self.chance.randint(1, 3))

    def commit(self) -> None:
        self.house.commit()

    def write(self) -> None:
        self.line.write(times=self.chance.choice([1, 2, 5]))

    def wait(self) -> None:
        self.house.now += self.chance.choice([0.001, 0.02, 0.5])

    def grant(self) -> None:
        self.line.grant(self.chance.randint(0, 30), self.chance.randint(0, 9_000))

    def subscribe(self) -> None:
        if len(self.open) < 4:
            self.note(self.line.subscribe(self.subscription()))

    def unsubscribe(self) -> None:
        if len(self.open) > 1:
            number = self.chance.choice(list(self.open))
            self.line.outlet.unsubscribe(number)
            del self.open[number]
            self.note(self.line.outlet.processed)

    def reconnect(self) -> None:
        at = self.line.outlet.processed
        self.line.outlet.close()
        self.go_on(at, self.house.log.epoch)

    def recover(self) -> None:
        if self.house.disk is None:
            return
        epoch, at = self.house.log.epoch, self.line.outlet.processed
        self.house.fail()
        assert self.line.rung
        self.line.wake_at = None
        with pytest.raises(Refused) as caught:
            self.line.write()
        assert caught.value.code is ErrorCode.SHUTTING_DOWN
        self.go_on(at, epoch)

    # --- helpers

    def go_on(self, at: int, epoch: int) -> None:
        self.earlier += self.line.got
        self.connect(Start(StartAt.CURSOR, Cursor(LOG_ID, epoch, at)))

    def connect(self, start: Start) -> int:
        self.open = {}
        scope = self.scope
        self.line = Line(
            self.house,
            may_read=None if scope is None else scope.__contains__,
            bytes_max=self.chance.choice([1, 500, 30_000]),
        )
        credit = self.chance.choice([None, None, Credit(5, 3_000), Credit(0, 0)])
        wait_ms_max = self.chance.choice([0, 10])
        first = replace(self.subscription(), start=start, credit=credit, wait_ms_max=wait_ms_max)
        at = self.line.subscribe(first)
        self.note(at)
        return at

    def subscription(self) -> Subscription:
        self.numbers += 1
        topics = tuple({self.chance.choice(TOPICS) for _ in range(self.chance.choice([1, 1, 2]))})
        filter_ = self.chance.choice(FILTERS)
        if self.plain:
            topics, filter_ = (ALL,), None
        self.open[self.numbers] = Subscription(self.numbers, topics, filter=filter_, deltas=self.form)
        return self.open[self.numbers]

    def note(self, at: int) -> None:
        """From this offset on it asks for what is open now."""
        self.asked = [one for one in self.asked if one[0] < at]
        self.asked.append((at, list(self.open.values())))

    def end(self) -> None:
        self.commit()
        self.line.grant(1 << 40)
        self.line.write_all(600)

    def expected(self) -> Iterator[tuple[int, int, bytes]]:
        for logged in self.house.appended:
            for row in range(0 if logged.batch.is_control else logged.count):
                offset = logged.offset + row
                if offset >= self.begin and self.wants(offset, logged.batch.delta(row, logged.source)):
                    yield told(logged, row)

    def wants(self, offset: int, delta: Delta) -> bool:
        _, asked = [one for one in self.asked if one[0] <= offset][-1]
        return (self.scope is None or delta.namespace in self.scope) and any(
            any(topic.matches(delta) for topic in one.topics)
            and (one.filter is None or not one.filter.sources or delta.source in one.filter.sources)
            and (one.filter is None or not one.filter.priorities or delta.priority in one.filter.priorities)
            for one in asked
        )


MOVES = {
    "append": 12,
    "void": 1,
    "commit": 5,
    "write": 6,
    "wait": 3,
    "grant": 3,
    "subscribe": 0.4,
    "unsubscribe": 0.4,
    "reconnect": 0.3,
    "recover": 0.2,
}


@pytest.mark.parametrize("place", ["in memory", "on disk"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), form=st.sampled_from([False, False, True]))
def test_each_matching_delta_comes_once_in_order_and_never_before_it_is_visible(
    place: str, seed: int, form: bool
) -> None:
    chance = random.Random(seed)
    small = replace(SETTINGS, subscriber_bytes_max=chance.choice([1, 1_000, 20_000]))
    log_settings = replace(ROOMY, segment_bytes_max=10_000)
    house = House.in_memory(settings=small)
    if place == "on disk":
        house = House.on_disk(log_settings, settings=small)
    for _ in range(chance.choice([0, 10])):
        house.rows(2)
        house.commit()
    plain = chance.random() < 0.4
    scope = frozenset(chance.sample(NAMES, 2)) if chance.random() < 0.3 and not plain else None
    story = Story(chance, house, scope, form, plain)
    for move in chance.choices(list(MOVES), list(MOVES.values()), k=chance.choice([20, 150])):
        getattr(story, move)()
    story.end()
    assert story.earlier + story.line.got == list(story.expected())
    assert story.line.outlet.processed == house.log.high_watermark == house.log.next_offset
