"""A feed with a sink that fails in all ways at once and an operator who does not wait, against the rules.

The sink keeps the contract and no more: it tells repeats by vector, so whatever comes out of order is lost
on it, and is missed at the end.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.route.redelivery import ReplayRequest
from delta_prop.route.status import FeedState
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.delta import Delta, Dot, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.route.support import ORIGIN, SMALL, Route, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.route.feed import Feed
    from delta_prop_sinks.sink import Delivery, SinkContext

SPACES = "abo"  # the sink takes a and b
ACTS = (
    *("nothing", "wait", "long wait", "restart", "replay", "replay one", "drop one", "drop"),
    *("replay and go", "stop", "watch", "come back", "come back behind", "fail late"),
)
MOODS = ("ok", "ok", "slow", "no", "part", "odd", "broken", "stop", "hang", "stray reject")


@dataclass
class Row:
    """One published row."""

    vector: tuple[str, str]
    causes: list[int]
    ids: bytes | None


@dataclass
class World:
    """The rows published, and their fate at a sink that keeps the contract."""

    rejects: dict[int, int]
    moods: list[str]
    rows: list[Row] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    heads: dict[tuple[str, str], int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    feed: Feed | None = None

    name = "model"

    async def open(self, context: SinkContext) -> None:
        """Nothing to open."""

    async def aclose(self) -> None:
        """Nothing to close."""

    def statistics(self) -> None:
        """Nothing to tell."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        offsets = offsets_of(deliveries)
        assert offsets == sorted(set(offsets))
        assert all(delivery.count for delivery in deliveries)
        mood = self.moods.pop() if self.moods else "ok"
        if mood in ("slow", "hang"):
            await (anyio.sleep(0.5) if mood == "slow" else anyio.sleep_forever())
        bad = next((offset for offset in offsets if self.rejects.get(offset)), None)
        if mood in ("ok", "slow"):
            if bad is not None:
                self.rejects[bad] -= 1
                self.take(offset for offset in offsets if offset < bad)
                raise RejectDelta(bad, "no")
            self.take(offsets)
            if not deliveries[-1].redelivered:
                self.check_cursor(deliveries[-1].next_offset)
            return
        if mood == "stop":
            raise StopSink("no disk")
        if mood == "broken":
            raise ZeroDivisionError
        if mood == "stray reject":
            raise RejectDelta(offsets[-1] + 1, "not yours")
        done: int | None = None
        if mood in ("part", "odd"):
            some = offsets[: len(offsets) // 2 + (mood == "odd")]
            if bad is not None:
                some = [offset for offset in some if offset < bad]
            self.take(some)
            done = some[-1] + 1 if some else offsets[0] - 1
        raise TryAgain("later", done)

    def take(self, offsets: object) -> None:
        for offset in offsets:  # type: ignore[attr-defined]
            vector = self.rows[offset].vector
            if offset > self.heads.get(vector, -1):
                self.heads[vector] = offset
                self.applied.append(offset)

    def check_cursor(self, next_offset: int) -> None:
        """Check that nothing is missing below the cursor of a sink that keeps its own."""
        assert self.feed is not None
        there = set(self.applied) | self.dropped
        for offset in range(next_offset):
            assert not self.wanted(offset) or offset in there or offset in self.feed.quarantine

    def wanted(self, offset: int) -> bool:
        return self.rows[offset].vector[0] != "o"


@st.composite
def stories(draw: st.DrawFn) -> tuple[World, list[object], int]:
    row = st.tuples(st.sampled_from(SPACES), st.sampled_from("uvw"), st.lists(st.integers(1, 9), max_size=2))
    batches = st.lists(row, min_size=1, max_size=6)
    world = World(
        draw(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=8)),
        draw(st.lists(st.sampled_from(MOODS), max_size=14)),
    )
    steps = draw(st.lists(st.one_of(batches, st.sampled_from(ACTS)), min_size=1, max_size=24))
    return world, steps, draw(st.sampled_from([1, 2, 4, 100]))


@given(stories())
def test_no_story_loses_repeats_or_reorders(story: tuple[World, list[object], int]) -> None:
    world, steps, room = story
    run_virtual(_tell, replace(world, rejects=dict(world.rejects), moods=list(world.moods)), steps, room)


async def _tell(world: World, steps: list[object], room: int) -> None:
    limits = replace(SMALL, quarantine_deltas_max=room, apply_timeout_s=5)
    async with Route.running() as route:
        play = Play(route, world, limits)
        for step in steps:
            if isinstance(step, str):
                await play.act(step)
            else:
                play.publish(step)  # type: ignore[arg-type]
            play.check()
        world.rejects.clear()
        world.moods.clear()
        for _ in range(20):
            await play.act("wait")
            await play.act("watch")
            await play.act("restart")
            await play.act("replay")
            await anyio.sleep(40)
            play.check()
        play.check_end()


class Play:
    """Actions on one feed."""

    def __init__(self, route: Route, world: World, limits: object) -> None:
        self.route = route
        self.world = world
        self.limits = limits
        self.start = self.inherited = 0
        self.attach(0)

    def attach(self, start: int, quarantine: object = None) -> None:
        self.feed = self.world.feed = self.route.feed(
            self.world,  # type: ignore[arg-type]
            *("ns:a", "ns:b"),
            start=start,
            limits=self.limits,  # type: ignore[arg-type]
            quarantine=quarantine,  # type: ignore[arg-type]
        )
        self.start, self.inherited = start, len(self.feed.quarantine)
        if quarantine is None:
            drop, dropped = self.feed.quarantine.drop, self.world.dropped

            def note(offset: int) -> None:
                drop(offset)
                dropped.add(offset)

            self.feed.quarantine.drop = note  # type: ignore[method-assign]

    def publish(self, batch: list[tuple[str, str, list[int]]]) -> None:
        deltas = []
        base = self.route.log.next_offset
        for at, (space, vector, back) in enumerate(batch):
            causes = sorted({base + at - one for one in back if base + at - one >= 0})
            named = bytes(8) + (base + at).to_bytes(8, "big") if len(batch) % 2 else None
            self.world.rows.append(Row((space, vector), causes, named))
            parents = tuple(self.world.rows[one].ids or Dot(ORIGIN, one + 1) for one in causes)
            deltas.append(Delta(vector, create([1.0]), space, parents=parents, id=named))
        self.route.append(encode_batch(deltas, origin=ORIGIN, base=base + 1))

    async def act(self, act: str) -> None:
        feed = self.feed
        if act in ("wait", "long wait"):
            await anyio.sleep(1 if act == "wait" else 45)
        elif act == "restart":
            feed.restart()
        elif act == "stop":
            feed.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
        elif act == "watch":
            feed.cancel_overdue_call(anyio.current_time() + 4)
            await anyio.lowlevel.checkpoint()
        elif act.startswith("come back"):
            await self.come_back(behind="behind" in act)
        elif act == "fail late":
            self.world.moods += ["part", "hang", "part"]
            await self.ask(None, drop=False, timeout_s=3)
        elif act.startswith(("replay", "drop")):
            heads = [one.offset for one in feed.quarantine.records() if one.reason is not None]
            offsets = frozenset(heads[-1:]) if "one" in act else None
            timeout_s = 0 if "go" in act else 3
            await self.ask(offsets, drop="drop" in act, timeout_s=timeout_s)

    async def ask(self, offsets: frozenset[int] | None, *, drop: bool, timeout_s: float) -> None:
        request = ReplayRequest(offsets, drop=drop)
        self.feed.add_request(request)
        with anyio.move_on_after(timeout_s), suppress(Refused):
            await request.wait()

    async def come_back(self, *, behind: bool) -> None:
        await self.route.detach(self.feed)
        start = self.feed.saved_cursor.processed
        self.attach(max(start - 5, 0) if behind else start, self.feed.quarantine)

    def check(self) -> None:
        told = self.feed.statistics()
        outcomes = told.applied_deltas + told.skipped + told.quarantined + told.dropped
        assert told.skipped >= 0
        assert outcomes == told.applied_offset - self.start + self.inherited
        assert len(self.feed.quarantine) <= self.feed.quarantine.deltas_max
        for one in self.feed.quarantine.records():
            assert one.blocked_by in self.feed.quarantine
        if self.feed.has_ended and not told.in_call:
            assert all(one.offset < self.feed.applied for one in self.feed.quarantine.records())

    def check_end(self) -> None:
        world = self.world
        told = self.feed.statistics()
        assert (told.state, told.quarantined, told.lag) == (FeedState.IDLE.value, 0, 0), told
        wanted = {offset for offset in range(len(world.rows)) if world.wanted(offset)}
        assert len(world.applied) == len(set(world.applied))
        assert wanted - set(world.applied) <= world.dropped
        place = {offset: at for at, offset in enumerate(world.applied)}
        for offset, row in enumerate(world.rows):
            for cause in row.causes:
                if offset in place and cause in place and cause not in world.dropped:
                    assert place[cause] < place[offset]
