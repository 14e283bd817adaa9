"""Memory benchmarks: cases hold their items, and results are compared with the expected bytes."""

from __future__ import annotations

import multiprocessing
import re

import anyio
import pytest

from benchmarks import _memory_cases, memory
from benchmarks._memory_cases import CASES, FRAME_BYTES, Case, frames, in_mailbox, pending, run, subscriptions


def test_frames_are_of_the_size_that_is_counted() -> None:
    batches = frames("some", 300, 1, ids=False)
    assert sum(batch.size for batch in batches) / 300 == pytest.approx(FRAME_BYTES, rel=0.1)
    assert [batch.base for batch in batches] == list(range(1, 301))


@pytest.mark.parametrize("case", [in_mailbox, pending, subscriptions])
def test_a_case_holds_and_lets_go(case: object) -> None:
    assert isinstance(anyio.run(case, 200), float)  # type: ignore[arg-type]


def test_a_case_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(count: int) -> float:
        raise ValueError(f"{count} are too many")

    monkeypatch.setattr(_memory_cases, "CASES", (Case("bad", fail, 1), *CASES))
    here, there = multiprocessing.Pipe()
    run("bad", 7, there)
    assert "7 are too many" in here.recv()


def test_what_is_found_is_held_against_what_is_counted_on() -> None:
    free, bound = Case("free", in_mailbox, 1), Case("bound", pending, 1, 100)
    results = memory.report({free: [500.0], bound: [90.0, 110.0, 120.0]})
    (goal,) = results.goals
    assert (goal["what"], goal["verdict"]) == ("memory: bound", "short")
    assert results.figures["free"]["median"] == 500.0


@pytest.mark.parametrize(("quick", "added", "said"), [(True, "5,000", "did"), (False, "20,000", "did not")])
def test_how_many_were_added_stands_beside_the_bytes_of_one(quick: bool, added: str, said: str) -> None:
    case = Case("some", pending, 20_000)
    results = memory.report({case: [500.0]}, quick=quick)
    assert re.search(rf"\nsome +{added} +500 ", results.text())
    (note,) = results.notes
    assert note.endswith(f"--quick; this one {said}")
