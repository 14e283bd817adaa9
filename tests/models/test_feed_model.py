"""The guarantees of a feed whose sink fails in every way, with an operator who acts at any time.

The sink does only what its contract demands: it detects duplicates by vector, so it loses a row that comes
out of order, which the checks at the end find.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.delivery.feed_state import FeedState
from delta_prop.delivery.redelivery import ReplayRequest
from delta_prop.testing import run_virtual
from delta_prop_sinks.sink import RejectDelta, StopSink, TryAgain
from delta_prop_wire.delta import Delta, Dot, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.delivery.support import ORIGIN, SMALL_LIMITS, Route, offsets_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.delivery.feed import Feed
    from delta_prop_sinks.sink import Delivery, SinkContext

NAMESPACES = "abo"  # the sink takes a and b
ACTIONS = (
    *("nothing", "wait", "long wait", "restart", "replay", "replay one", "drop one", "drop"),
    *("replay and go", "stop", "watch", "reattach", "reattach earlier", "fail late"),
)
"""Actions of the operator. `replay and go`: does not wait for the replay."""
BEHAVIORS = ("ok", "ok", "slow", "retry", "half", "larger half", "broken", "stop", "hang", "stray reject")
"""Behaviors of a call of the sink. `half`, `larger half`: applies this part of the rows, then fails."""


@dataclass
class Row:
    """One published row."""

    vector: tuple[str, str]
    causes: list[int]
    delta_id: bytes | None


@dataclass
class ContractSink:
    """A sink that keeps the contract. It also stores the published rows and their outcomes.

    `rejects`: for an offset, how many times the sink still rejects it. `behaviors`: of the next
    calls; taken from the end of the list.
    """

    rejects: dict[int, int]
    behaviors: list[str]
    rows: list[Row] = field(default_factory=list)
    applied: list[int] = field(default_factory=list)
    heads: dict[tuple[str, str], int] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    feed: Feed | None = None

    name = "model"

    async def open(self, context: SinkContext) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""

    def statistics(self) -> None:
        """Return nothing."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        offsets = offsets_of(deliveries)
        assert offsets == sorted(set(offsets))
        assert all(delivery.count for delivery in deliveries)
        behavior = self.behaviors.pop() if self.behaviors else "ok"
        if behavior in ("slow", "hang"):
            await (anyio.sleep(0.5) if behavior == "slow" else anyio.sleep_forever())
        rejected = next((offset for offset in offsets if self.rejects.get(offset)), None)
        if behavior in ("ok", "slow"):
            if rejected is not None:
                self.rejects[rejected] -= 1
                self.take(offset for offset in offsets if offset < rejected)
                raise RejectDelta(rejected, "no")
            self.take(offsets)
            if not deliveries[-1].redelivered:
                self.check_cursor(deliveries[-1].next_offset)
            return
        if behavior == "stop":
            raise StopSink("no disk")
        if behavior == "broken":
            raise ZeroDivisionError
        if behavior == "stray reject":
            raise RejectDelta(offsets[-1] + 1, "not yours")
        applied_end: int | None = None
        if behavior in ("half", "larger half"):
            applied_rows = offsets[: len(offsets) // 2 + (behavior == "larger half")]
            if rejected is not None:
                applied_rows = [offset for offset in applied_rows if offset < rejected]
            self.take(applied_rows)
            applied_end = applied_rows[-1] + 1 if applied_rows else offsets[0] - 1
        raise TryAgain("later", applied_end)

    def take(self, offsets: object) -> None:
        for offset in offsets:  # type: ignore[attr-defined]
            vector = self.rows[offset].vector
            if offset > self.heads.get(vector, -1):
                self.heads[vector] = offset
                self.applied.append(offset)

    def check_cursor(self, next_offset: int) -> None:
        """Check that a sink with a cursor of its own would miss no row below it."""
        assert self.feed is not None
        present = set(self.applied) | self.dropped
        for offset in range(next_offset):
            assert not self.matches(offset) or offset in present or offset in self.feed.quarantine

    def matches(self, offset: int) -> bool:
        return self.rows[offset].vector[0] != "o"


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[ContractSink, list[object], int]:
    row = st.tuples(
        st.sampled_from(NAMESPACES), st.sampled_from("uvw"), st.lists(st.integers(1, 9), max_size=2)
    )
    batches = st.lists(row, min_size=1, max_size=6)
    sink = ContractSink(
        draw(st.dictionaries(st.integers(0, 40), st.integers(1, 3), max_size=8)),
        draw(st.lists(st.sampled_from(BEHAVIORS), max_size=14)),
    )
    steps = draw(st.lists(st.one_of(batches, st.sampled_from(ACTIONS)), min_size=1, max_size=24))
    return sink, steps, draw(st.sampled_from([1, 2, 4, 100]))


@given(scenarios())
def test_no_scenario_loses_or_duplicates_or_reorders_a_row(
    scenario: tuple[ContractSink, list[object], int],
) -> None:
    sink, steps, quarantine_max = scenario
    run_virtual(
        _run_scenario,
        replace(sink, rejects=dict(sink.rejects), behaviors=list(sink.behaviors)),
        steps,
        quarantine_max,
    )


async def _run_scenario(sink: ContractSink, steps: list[object], quarantine_max: int) -> None:
    limits = replace(SMALL_LIMITS, quarantine_deltas_max=quarantine_max, apply_timeout_s=5)
    async with Route.running() as route:
        driver = FeedDriver(route, sink, limits)
        for step in steps:
            if isinstance(step, str):
                await driver.run_action(step)
            else:
                driver.publish(step)  # type: ignore[arg-type]
            driver.check()
        sink.rejects.clear()
        sink.behaviors.clear()
        for _ in range(20):
            await driver.run_action("wait")
            await driver.run_action("watch")
            await driver.run_action("restart")
            await driver.run_action("replay")
            await anyio.sleep(40)
            driver.check()
        driver.check_end()


class FeedDriver:
    """A driver that runs actions on one feed."""

    def __init__(self, route: Route, sink: ContractSink, limits: object) -> None:
        self.route = route
        self.sink = sink
        self.limits = limits
        self.start = self.quarantined_at_start = 0
        self.attach(0)

    def attach(self, start: int, quarantine: object = None) -> None:
        self.feed = self.sink.feed = self.route.feed(
            self.sink,  # type: ignore[arg-type]
            *("ns:a", "ns:b"),
            start=start,
            limits=self.limits,  # type: ignore[arg-type]
            quarantine=quarantine,  # type: ignore[arg-type]
        )
        self.start, self.quarantined_at_start = start, len(self.feed.quarantine)
        if quarantine is None:
            drop, dropped = self.feed.quarantine.drop, self.sink.dropped

            def note_drop(offset: int) -> None:
                drop(offset)
                dropped.add(offset)

            self.feed.quarantine.drop = note_drop  # type: ignore[method-assign]

    def publish(self, batch: list[tuple[str, str, list[int]]]) -> None:
        deltas = []
        base = self.route.log.next_offset
        for row, (namespace, vector, distances) in enumerate(batch):
            causes = sorted({base + row - distance for distance in distances if base + row - distance >= 0})
            delta_id = bytes(8) + (base + row).to_bytes(8, "big") if len(batch) % 2 else None
            self.sink.rows.append(Row((namespace, vector), causes, delta_id))
            parents = tuple(self.sink.rows[cause].delta_id or Dot(ORIGIN, cause + 1) for cause in causes)
            deltas.append(Delta(vector, create([1.0]), namespace, parents=parents, id=delta_id))
        self.route.append(encode_batch(deltas, origin=ORIGIN, base=base + 1))

    async def run_action(self, action: str) -> None:
        feed = self.feed
        if action in ("wait", "long wait"):
            await anyio.sleep(1 if action == "wait" else 45)
        elif action == "restart":
            feed.control.restart()
        elif action == "stop":
            feed.control.stop(Refused(ErrorCode.PROCESSING_FAILED, "stopped"))
        elif action == "watch":
            feed.cancel_overdue_call(anyio.current_time() + 4)
            await anyio.lowlevel.checkpoint()
        elif action.startswith("reattach"):
            await self.reattach(is_rewound="earlier" in action)
        elif action == "fail late":
            self.sink.behaviors += ["half", "hang", "half"]
            await self.request_replay(None, drop=False, timeout_s=3)
        elif action.startswith(("replay", "drop")):
            heads = [record.offset for record in feed.quarantine.records() if record.reason is not None]
            offsets = frozenset(heads[-1:]) if "one" in action else None
            timeout_s = 0 if "go" in action else 3
            await self.request_replay(offsets, drop="drop" in action, timeout_s=timeout_s)

    async def request_replay(self, offsets: frozenset[int] | None, *, drop: bool, timeout_s: float) -> None:
        request = ReplayRequest(offsets, drop=drop)
        self.feed.add_request(request)
        with anyio.move_on_after(timeout_s), suppress(Refused):
            await request.wait()

    async def reattach(self, *, is_rewound: bool) -> None:
        await self.route.detach(self.feed)
        start = self.feed.cursor.saved.processed
        self.attach(max(start - 5, 0) if is_rewound else start, self.feed.quarantine)

    def check(self) -> None:
        statistics = self.feed.statistics()
        outcomes = (
            statistics.applied_deltas + statistics.skipped + statistics.quarantined + statistics.dropped
        )
        assert statistics.skipped >= 0
        assert outcomes == statistics.applied_offset - self.start + self.quarantined_at_start
        assert len(self.feed.quarantine) <= self.feed.quarantine.deltas_max
        for record in self.feed.quarantine.records():
            assert record.blocked_by in self.feed.quarantine
        if self.feed.has_ended and not statistics.in_call:
            assert all(record.offset < self.feed.applied for record in self.feed.quarantine.records())

    def check_end(self) -> None:
        sink = self.sink
        statistics = self.feed.statistics()
        assert (statistics.state, statistics.quarantined, statistics.lag) == (FeedState.IDLE.value, 0, 0), (
            statistics
        )
        expected = {offset for offset in range(len(sink.rows)) if sink.matches(offset)}
        assert len(sink.applied) == len(set(sink.applied))
        assert expected - set(sink.applied) <= sink.dropped
        position = {offset: index for index, offset in enumerate(sink.applied)}
        for offset, row in enumerate(sink.rows):
            for cause in row.causes:
                if offset in position and cause in position and cause not in sink.dropped:
                    assert position[cause] < position[offset]
