"""The comparison behind `verify`: every way in which a sink can differ is seen, and named."""

from __future__ import annotations

import pytest

from delta_prop.demo.reference_fold import Fingerprint, ReferenceFold
from delta_prop.demo.verify import compare, compare_stream

FOLDED = ReferenceFold({("n", "a"): [1.0, 2.0], ("n", "b"): [3.0, 4.0]})
A, B = (("n", "a"), [1.0, 2.0]), (("n", "b"), [3.0, 4.0])
MARKS: list[Fingerprint] = [(("n", "a"), "create", 1), (("n", "b"), "create", 2), (("n", "a"), "sparse", 3)]


def test_the_same_rows_are_identical_in_any_order() -> None:
    verdict = compare("store", [B, A], FOLDED)
    assert verdict.is_identical
    assert (verdict.sink, verdict.rows, verdict.wrong_count) == ("store", 2, 0)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([A], "n/b is missing"),
        ([], "n/a is missing"),
        ([A, B, (("n", "c"), [0.0])], "n/c exists, but was not published"),
        ([A, (("n", "b"), [3.0, 5.0])], "n/b: number 1 is 5, published was 4"),
        ([A, (("n", "b"), [3.0])], "n/b has 1 numbers, published were 2"),
    ],
)
def test_a_row_that_differs_is_named(rows: list[tuple[tuple[str, str], list[float]]], fault: str) -> None:
    verdict = compare("store", rows, FOLDED)
    assert not verdict.is_identical
    assert verdict.fault == fault
    assert verdict.wrong_count == (2 if not rows else 1)


@pytest.mark.parametrize(
    ("offsets", "marks", "fault"),
    [
        ([0, 1, 2], MARKS, ""),
        ([0, 5, 9], MARKS, ""),
        ([0, 1], MARKS[:2], "2 deltas came, 3 were published"),
        ([0, 1, 2, 3], [*MARKS, MARKS[0]], "4 deltas came, 3 were published"),
        ([0, 1, 1], MARKS, "offsets do not ascend: a delta came twice or out of order"),
        ([0, 2, 1], MARKS, "offsets do not ascend: a delta came twice or out of order"),
        ([0, 1, 2], [MARKS[1], MARKS[0], MARKS[2]], "delta 0 is create n/b, published was create n/a"),
        (
            [0, 1, 2],
            [MARKS[0], MARKS[1], (("n", "a"), "sparse", 4)],
            "delta 2 is sparse n/a, published was sparse n/a",
        ),
    ],
)
def test_a_stream_has_each_delta_once_in_order_and_whole(
    offsets: list[int], marks: list[Fingerprint], fault: str
) -> None:
    assert compare_stream("subscriber", offsets, marks, ReferenceFold({}, MARKS)).fault == fault
