"""Sinks that fail a share of their rows delay no other sink; a row that keeps failing is reported."""

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
from tests.delta_prop.pressure.isolation import TimedSink, publish_all, rows_of, steady_sink, traffic
from tests.delta_prop.support import make_delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop import Delta
    from delta_prop.testing import RecordedPropagator
    from delta_prop_sinks.sink import Delivery, SinkContext

FAILURE_SHARE = 0.3
CALLS = 60
"""Calls of `publish`, together some 700 deltas."""


@dataclass(slots=True)
class AllOrNothingSink:
    """A sink that fails calls as `CallbackSink` does, but never reports how many rows are done."""

    name: str
    rng: random.Random
    applied: list[int] = field(default_factory=list)

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply all rows or none."""
        offsets = list(rows_of(deliveries))
        if any(self.rng.random() < FAILURE_SHARE for _ in offsets):
            raise TryAgain("busy")
        self.applied += offsets

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> None:
        """Return nothing."""


def unsteady_sink(kind: str, seed: int) -> tuple[Any, list[int]]:
    """Return a sink that fails a share of its rows, and the list of rows that it applied."""
    rng = random.Random(f"unsteady {seed}")
    if kind == "silent":
        sink = AllOrNothingSink("unsteady", rng)
        return sink, sink.applied
    applied: list[int] = []

    def take(offset: int, _: Delta) -> None:
        if rng.random() < FAILURE_SHARE:
            raise TryAgain("busy") if kind != "defect" else ValueError("busy")
        applied.append(offset)

    async def take_on_the_loop(offset: int, delta: Delta) -> None:
        await anyio.lowlevel.checkpoint()
        take(offset, delta)

    return CallbackSink(take_on_the_loop if kind == "async" else take, name="unsteady"), applied


def run(seed: int, kind: str | None) -> tuple[list[Any], list[int], float]:
    """Return what was observed beside the unsteady sink, the offsets that it applied, and the end time.

    Observed are the acknowledgements, and per other sink its rows with their times.
    """

    async def main() -> tuple[list[Any], list[int], float]:
        others = [steady_sink("quick", call_s=0.001), steady_sink("busy", call_s=0.05, row_s=0.005)]
        sink, applied = (None, []) if kind is None else unsteady_sink(kind, seed)
        async with Propagator(
            Settings(mailbox_deltas_max=300, merge_deltas_max=200), world=virtual_world(seed)
        ) as p:
            for any_sink in [*others, *([] if sink is None else [sink])]:
                await p.attach(any_sink)
            acknowledged = await publish_all(p, traffic(seed, calls=CALLS, calls_per_s=6.0))
            end = p.statistics().log.next_offset
            await p.wait_visible(end, timeout_s=3_600)
            ended = anyio.current_time()
            if sink is not None:
                assert p.statistics().sinks["unsteady"].applied_offset == end > 500
        return [acknowledged, *_applied_rows(others)], applied, ended

    return run_virtual(main)


def _applied_rows(sinks: Sequence[TimedSink]) -> list[Any]:
    return [sink.applied for sink in sinks]


@pytest.mark.parametrize("kind", ["sync", "async", "defect", "silent"])
def test_sink_failing_for_30_percent_of_rows_delays_nobody(kind: str, full: bool) -> None:
    for seed in range(20 if full else 2):
        baseline, _, baseline_s = run(seed, None)
        observed, applied, ended_s = run(seed, kind)
        assert observed == baseline
        assert sorted(applied) == list(range(len(applied)))  # each once: an applied row is not redelivered
        print(
            f"{kind}: {len(applied)} rows in {ended_s:.0f} s of virtual time, without it {baseline_s:.0f} s"
        )
        assert ended_s < 300


def test_row_that_keeps_failing_is_reported_as_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    async def main(p: RecordedPropagator) -> None:
        fixed = False

        def take(offset: int, _: Delta) -> None:
            if offset == 40 and not fixed:
                raise TryAgain("no such table")

        await p.attach(CallbackSink(take, name="target"))
        await p.publish(*(make_delta(f"v{number}") for number in range(100)))
        await anyio.sleep(0.3)
        assert p.statistics().sinks["target"].failing is None  # the row may still pass
        await anyio.sleep(5)
        statistics = p.statistics().sinks["target"]
        assert (statistics.state, statistics.applied_offset) == ("retrying", 40)
        assert statistics.failing is not None
        assert (statistics.failing.offset, statistics.failing.vector_id) == (40, "v40")
        assert statistics.failing.failures > 5
        assert statistics.reason is not None
        assert statistics.reason.startswith("TryAgain: no such table; offset 40 (vector 'v40' in namespace")
        await anyio.sleep(60)
        assert p.statistics().sinks["target"].state == "breaker open"
        fixed = True
        await p.settle()
        statistics = p.statistics().sinks["target"]
        assert (statistics.state, statistics.failing, statistics.reason) == ("idle", None, None)

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_propagator(main)
    (line,) = [record.message for record in caplog.records if "keeps failing" in record.message]
    assert "offset 40 (vector 'v40' in namespace 'default'), delivered alone, has failed" in line
    assert "RejectDelta" in line


def test_slow_sink_gets_smaller_calls_until_they_fit_timeout() -> None:
    async def main() -> None:
        sink = steady_sink("slow", call_s=0.0, row_s=1.0)
        async with Propagator(Settings(apply_timeout_s=10.0), world=virtual_world()) as p:
            await p.attach(sink)
            last = await p.publish(*(make_delta(f"v{number}") for number in range(100)))
            await p.wait_visible(last, timeout_s=1_000)
        assert [offset for offset, _ in sink.applied] == list(range(100))

    run_virtual(main)


def test_uncancellable_call_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def shielded_work(_: list[int]) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(20)

        async with Propagator(Settings(apply_timeout_s=5.0), world=virtual_world()) as p:
            await p.attach(TimedSink("stuck", shielded_work))
            await p.publish(make_delta("v"))
            await anyio.sleep(5.5)
            assert p.statistics().sinks["stuck"].reason is None
            await anyio.sleep(2)
            statistics = p.statistics().sinks["stuck"]
            assert statistics.state == "working"
            assert statistics.reason is not None
            assert statistics.reason.startswith(
                "a call was cancelled after 5 s (apply_timeout_s), but does not end"
            )
            await anyio.sleep(13)
            statistics = p.statistics().sinks["stuck"]
            assert (statistics.state, statistics.reason, statistics.applied_offset) == ("idle", None, 1)

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_virtual(main)
    assert [record.message for record in caplog.records if "does not end" in record.message]


def test_replay_of_flaky_rows_completes() -> None:
    async def main(p: RecordedPropagator) -> None:
        rejects, rng, applied = True, random.Random(1), list[int]()

        class FlakySink(AllOrNothingSink):
            async def apply(self, deliveries: Sequence[Delivery]) -> None:
                offsets = list(rows_of(deliveries))
                if rejects:
                    raise RejectDelta(offsets[0], "not now")
                if any(rng.random() < FAILURE_SHARE for _ in offsets):
                    raise TryAgain("busy")
                applied.extend(offsets)

        await p.attach(FlakySink("flaky", rng))
        await p.publish(*(make_delta(f"v{number}") for number in range(60)))
        await p.settle()
        rejects = False
        assert (await p.replay("flaky", timeout_s=300)).applied == 60
        assert sorted(applied) == list(range(60))

    run_propagator(main)
