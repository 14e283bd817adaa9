"""Sinks that fail for a share of their rows end and delay nobody; a row that never passes is told."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop import Propagator, Settings
from delta_prop.sinks import CallbackSink, RejectDelta, TryAgain
from delta_prop.testing import run_propagator, run_virtual, virtual_world
from tests.delta_prop.pressure.isolation import TimedSink, publish_all, rows_of, steady, traffic
from tests.delta_prop.support import made

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop import Delta
    from delta_prop.testing import RecordedPropagator
    from delta_prop_sinks.sink import Delivery, SinkContext

SHARE = 0.3
CALLS = 60
"""Of `publish`, together some 700 deltas."""


@dataclass(slots=True)
class Silent:
    """Fails as the callbacks do, and never says how far it came."""

    name: str
    drawn: random.Random
    noted: list[int] = field(default_factory=list)

    async def open(self, context: SinkContext) -> None:
        """Nothing to open: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all, or nothing."""
        offsets = list(rows_of(deliveries))
        if any(self.drawn.random() < SHARE for _ in offsets):
            raise TryAgain("busy")
        self.noted += offsets

    async def aclose(self) -> None:
        """Nothing to close."""

    def statistics(self) -> None:
        """Nothing to tell."""


def unsteady(kind: str, seed: int) -> tuple[Any, list[int]]:
    """A sink that says "try again" for that share of the rows it is brought, and what it has applied."""
    drawn = random.Random(f"unsteady {seed}")
    if kind == "silent":
        sink = Silent("unsteady", drawn)
        return sink, sink.noted
    noted: list[int] = []

    def take(offset: int, _: Delta) -> None:
        if drawn.random() < SHARE:
            raise TryAgain("busy") if kind != "defect" else ValueError("busy")
        noted.append(offset)

    async def take_on_the_loop(offset: int, delta: Delta) -> None:
        await anyio.lowlevel.checkpoint()
        take(offset, delta)

    return CallbackSink(take_on_the_loop if kind == "async" else take, name="unsteady"), noted


def run(seed: int, kind: str | None) -> tuple[list[Any], list[int], float]:
    """Return the others' rows and times, the unsteady sink's offsets, and the end time."""

    async def main() -> tuple[list[Any], list[int], float]:
        others = [steady("quick", call_s=0.001), steady("busy", call_s=0.05, row_s=0.005)]
        sink, noted = (None, []) if kind is None else unsteady(kind, seed)
        async with Propagator(
            Settings(mailbox_deltas_max=300, merge_deltas_max=200), world=virtual_world(seed)
        ) as p:
            for one in [*others, *([] if sink is None else [sink])]:
                await p.attach(one)
            acknowledged = await publish_all(p, traffic(seed, calls=CALLS, calls_per_s=6.0))
            end = p.statistics().log.next_offset
            await p.wait_visible(end, timeout_s=3_600)
            ended = anyio.current_time()
            if sink is not None:
                assert p.statistics().sinks["unsteady"].applied_offset == end > 500
        return [acknowledged, *_times(others)], noted, ended

    return run_virtual(main)


def _times(sinks: Sequence[TimedSink]) -> list[Any]:
    return [sink.noted for sink in sinks]


@pytest.mark.parametrize("kind", ["plain", "async", "defect", "silent"])
def test_a_sink_that_fails_for_three_rows_in_ten_ends_and_delays_nobody(kind: str, full: bool) -> None:
    for seed in range(20 if full else 2):
        seen, _, without_s = run(seed, None)
        beside, noted, ended_s = run(seed, kind)
        assert beside == seen
        assert sorted(noted) == list(range(len(noted)))  # each once: what was applied does not come again
        print(f"{kind}: {len(noted)} rows in {ended_s:.0f} s of virtual time, without it {without_s:.0f} s")
        assert ended_s < 300


def test_a_row_that_fails_on_and_on_is_told_as_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    async def main(p: RecordedPropagator) -> None:
        cured = False

        def take(offset: int, _: Delta) -> None:
            if offset == 40 and not cured:
                raise TryAgain("no such table")

        await p.attach(CallbackSink(take, name="target"))
        await p.publish(*(made(f"v{number}") for number in range(100)))
        await anyio.sleep(0.3)
        assert p.statistics().sinks["target"].failing is None  # may pass soon
        await anyio.sleep(5)
        told = p.statistics().sinks["target"]
        assert (told.state, told.applied_offset) == ("retrying", 40)
        assert told.failing is not None
        assert (told.failing.offset, told.failing.vector_id) == (40, "v40")
        assert told.failing.failures > 5
        assert told.reason is not None
        assert told.reason.startswith("TryAgain: no such table; offset 40 (vector 'v40' in namespace")
        await anyio.sleep(60)
        assert p.statistics().sinks["target"].state == "breaker open"
        cured = True
        await p.settle()
        told = p.statistics().sinks["target"]
        assert (told.state, told.failing, told.reason) == ("idle", None, None)

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_propagator(main)
    (line,) = [one.message for one in caplog.records if "keeps failing" in one.message]
    assert "offset 40 (vector 'v40' in namespace 'default'), delivered alone, has failed" in line
    assert "RejectDelta" in line


def test_a_sink_whose_calls_take_too_long_is_brought_less_until_they_do_not() -> None:
    async def main() -> None:
        sink = steady("slow", call_s=0.0, row_s=1.0)
        async with Propagator(Settings(apply_timeout_s=10.0), world=virtual_world()) as p:
            await p.attach(sink)
            last = await p.publish(*(made(f"v{number}") for number in range(100)))
            await p.wait_visible(last, timeout_s=1_000)
        assert [offset for offset, _ in sink.noted] == list(range(100))

    run_virtual(main)


def test_a_call_that_cannot_be_broken_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def works(_: list[int]) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(20)

        async with Propagator(Settings(apply_timeout_s=5.0), world=virtual_world()) as p:
            await p.attach(TimedSink("stuck", works))
            await p.publish(made("v"))
            await anyio.sleep(5.5)
            assert p.statistics().sinks["stuck"].reason is None
            await anyio.sleep(2)
            told = p.statistics().sinks["stuck"]
            assert told.state == "working"
            assert told.reason is not None
            assert told.reason.startswith(
                "a call was cancelled after 5 s (apply_timeout_s), but does not end"
            )
            await anyio.sleep(13)
            told = p.statistics().sinks["stuck"]
            assert (told.state, told.reason, told.applied_offset) == ("idle", None, 1)

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_virtual(main)
    assert [one.message for one in caplog.records if "does not end" in one.message]


def test_a_replay_of_rows_that_fail_now_and_then_ends() -> None:
    async def main(p: RecordedPropagator) -> None:
        rejects, drawn, seen = True, random.Random(1), list[int]()

        class Moody(Silent):
            async def apply(self, deliveries: Sequence[Delivery]) -> None:
                offsets = list(rows_of(deliveries))
                if rejects:
                    raise RejectDelta(offsets[0], "not now")
                if any(drawn.random() < SHARE for _ in offsets):
                    raise TryAgain("busy")
                seen.extend(offsets)

        await p.attach(Moody("moody", drawn))
        await p.publish(*(made(f"v{number}") for number in range(60)))
        await p.settle()
        rejects = False
        assert (await p.replay("moody", timeout_s=300)).applied == 60
        assert sorted(seen) == list(range(60))

    run_propagator(main)
