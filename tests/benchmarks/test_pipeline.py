"""The benchmark of an embedded service records when each call is acknowledged and visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from benchmarks import _embedded, pipeline
from benchmarks._embedded import Bench, bare_rate
from benchmarks._results import Results
from delta_prop_wire.delta import AckLevel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def few_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_embedded, "KEYS", 200)
    monkeypatch.setattr(_embedded, "NAMES", [f"key-{number}" for number in range(200)])
    monkeypatch.setattr(_embedded, "_PREPARED_MAX", 20)


@pytest.mark.parametrize("size", [1, 10])
def test_each_call_records_ack_and_visible_times(size: int) -> None:
    async def main() -> None:
        async with Bench("storage", "index", "cache", "callback") as bench:
            for level in (AckLevel.LOGGED, AckLevel.DURABLE):
                before = bench.propagator.statistics().log.next_offset
                closed = await bench.closed_loop(size, level, in_flight=3, seconds=0.01)
                paced = await bench.open_loop(size, level, rate=1e6, calls=5, in_flight=2)
                assert paced.deltas == 5 * size
                for result in (closed, paced):
                    assert len(result.acknowledged) == len(result.visible) == result.deltas // size
                    assert min(result.visible) > 0
                after = bench.propagator.statistics().log.next_offset
                assert after - before == closed.deltas + paced.deltas

    anyio.run(main)


def test_scenes_are_measured_at_both_levels_and_judged(tmp_path: Path) -> None:
    scenes = [scene for scene in pipeline.SCENES if scene.name in ("batch 10", "single sink")]
    results = Results("pipeline")
    runs = pipeline.measure(results, scenes, 1, 0.01)
    pipeline._report(results, scenes, runs)
    assert {goal["row"] for goal in results.goals} == {"8", "9"}
    assert results.figures["batch 10, durable: rate"]["median"] > 0
    assert results.figures[pipeline.bare_name(100)]["median"] > 0
    assert bare_rate(1, 0.01, tmp_path) > 0
