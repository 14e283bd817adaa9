"""The comparison behind `verify` detects and names every way in which a sink can differ."""

from __future__ import annotations

import pytest

from delta_prop.demo.reference_fold import Fingerprint, ReferenceFold
from delta_prop.demo.verify import compare, compare_stream

FOLDED = ReferenceFold({("n", "a"): [1.0, 2.0], ("n", "b"): [3.0, 4.0]})
A, B = (("n", "a"), [1.0, 2.0]), (("n", "b"), [3.0, 4.0])
FINGERPRINTS: list[Fingerprint] = [
    (("n", "a"), "create", 1),
    (("n", "b"), "create", 2),
    (("n", "a"), "sparse", 3),
]


def test_equal_rows_are_identical_in_any_order() -> None:
    verdict = compare("store", [B, A], FOLDED)
    assert verdict.is_identical
    assert (verdict.sink, verdict.row_count, verdict.wrong_count) == ("store", 2, 0)


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
def test_differing_row_is_named(rows: list[tuple[tuple[str, str], list[float]]], fault: str) -> None:
    verdict = compare("store", rows, FOLDED)
    assert not verdict.is_identical
    assert verdict.fault == fault
    assert verdict.wrong_count == (2 if not rows else 1)


@pytest.mark.parametrize(
    ("offsets", "fingerprints", "fault"),
    [
        ([0, 1, 2], FINGERPRINTS, ""),
        ([0, 5, 9], FINGERPRINTS, ""),
        ([0, 1], FINGERPRINTS[:2], "2 deltas came, 3 were published"),
        ([0, 1, 2, 3], [*FINGERPRINTS, FINGERPRINTS[0]], "4 deltas came, 3 were published"),
        ([0, 1, 1], FINGERPRINTS, "offsets do not ascend: a delta came twice or out of order"),
        ([0, 2, 1], FINGERPRINTS, "offsets do not ascend: a delta came twice or out of order"),
        (
            [0, 1, 2],
            [FINGERPRINTS[1], FINGERPRINTS[0], FINGERPRINTS[2]],
            "delta 0 is create n/b, published was create n/a",
        ),
        (
            [0, 1, 2],
            [FINGERPRINTS[0], FINGERPRINTS[1], (("n", "a"), "sparse", 4)],
            "delta 2 is sparse n/a, published was sparse n/a",
        ),
    ],
)
def test_stream_has_each_delta_once_in_order_unchanged(
    offsets: list[int], fingerprints: list[Fingerprint], fault: str
) -> None:
    assert compare_stream("subscriber", offsets, fingerprints, ReferenceFold({}, FINGERPRINTS)).fault == fault
