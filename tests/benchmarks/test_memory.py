"""The memory benchmark: cases hold their items, and results are compared with the expected bytes."""

from __future__ import annotations

import multiprocessing
import re

import anyio
import pytest

from benchmarks import memory
from benchmarks.memory import (
    CASES,
    FRAME_BYTES,
    Case,
    frames,
    mailbox_delta_bytes,
    pending_delta_bytes,
    run,
    subscription_bytes,
)


def test_frames_have_assumed_size() -> None:
    batches = frames("some", 300, 1, with_ids=False)
    assert sum(batch.size for batch in batches) / 300 == pytest.approx(FRAME_BYTES, rel=0.1)
    assert [batch.base for batch in batches] == list(range(1, 301))


@pytest.mark.parametrize("case", [mailbox_delta_bytes, pending_delta_bytes, subscription_bytes])
def test_case_holds_and_releases_items(case: object) -> None:
    assert isinstance(anyio.run(case, 200), float)  # type: ignore[arg-type]


def test_failed_case_reports_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(count: int) -> float:
        raise ValueError(f"{count} are too many")

    monkeypatch.setattr(memory, "CASES", (Case("bad", fail, 1), *CASES))
    receiver, sender = multiprocessing.Pipe()
    run("bad", 7, sender)
    assert "7 are too many" in receiver.recv()


def test_measured_bytes_are_compared_with_assumed_bytes() -> None:
    free, bound = Case("free", mailbox_delta_bytes, 1), Case("bound", pending_delta_bytes, 1, 100)
    results = memory.report({free: [500.0], bound: [90.0, 110.0, 120.0]})
    (goal,) = results.goals
    assert (goal["what"], goal["verdict"]) == ("memory: bound", "short")
    assert results.figures["free"]["median"] == 500.0


@pytest.mark.parametrize(
    ("quick", "added", "note_end"), [(True, "5,000", "did"), (False, "20,000", "did not")]
)
def test_report_shows_item_count_beside_bytes(quick: bool, added: str, note_end: str) -> None:
    case = Case("some", pending_delta_bytes, 20_000)
    results = memory.report({case: [500.0]}, quick=quick)
    assert re.search(rf"\nsome +{added} +500 ", results.text())
    (note,) = results.notes
    assert note.endswith(f"--quick; this one {note_end}")
