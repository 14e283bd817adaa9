"""The log's benchmark: each figure is related to its baseline in the same round."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import log
from benchmarks.log import FULL, SPARSE, Round

ROUND = Round(
    disk=100.0, publish=40.0, publish_deltas=1e5, commits=20, sync_us=500.0, ack_us=1_000.0, ack_p99_us=9e3,
    catch_up=200.0, frame_bytes=13e3, rows=24, cpu_us=50.0,
)  # fmt: skip


def test_ratios_use_figures_of_same_round() -> None:
    slow = replace(ROUND, disk=50.0, publish=10.0, ack_us=2_000.0)
    results = log.report({FULL: [ROUND, slow, slow], SPARSE: [ROUND]})
    by_goal = {goal["what"]: (goal["found"]["median"], goal["verdict"]) for goal in results.goals}
    assert by_goal["log: publish, 4 MiB in flight, whole vectors, beside the disk"] == (0.2, "short")
    assert by_goal["log: ack p50, one in flight, whole vectors, beside fdatasync"] == (4.0, "short")
    assert by_goal["log: a subscriber catches up, whole vectors, beside publish"] == (20.0, "reached")
    assert [verdict for what, (_, verdict) in by_goal.items() if SPARSE in what] == ["reached"] * 3
    assert "24 a frame of 13,000 bytes" in results.text()
