"""Reads without a Spark session: ranges, filters that become topics, batches that are joined."""

from __future__ import annotations

import pickle

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from delta_prop.client.ranges import LogBounds
from delta_prop.spark.columns import READ_SCHEMA
from delta_prop.spark.data_source import reading, rows
from delta_prop.spark.data_source.pushdown import ReadFilter, narrow
from delta_prop.spark.data_source.reading import Reader, split_range
from delta_prop.spark.data_source.rows import SCHEMA, merge_batches
from delta_prop.spark.options import read_options
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.topics import ALL, Topic

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""

BOUNDS = LogBounds(bytes(16), 3, 0, 1_000_000)
NEWS = (Topic.parse("c:news"),)


@pytest.mark.parametrize(
    ("start", "end", "partitions", "expected"),
    [
        (0, 10, 3, [(0, 3), (3, 6), (6, 10)]),
        (5, 7, 9, [(5, 6), (6, 7)]),
        (5, 5, 4, [(5, 5)]),
        (0, 99_999, None, [(0, 99_999)]),
        (0, 200_001, None, [(0, 66_667), (66_667, 133_334), (133_334, 200_001)]),
    ],
)
def test_range_is_split_into_partitions(
    start: int, end: int, partitions: int | None, expected: list[tuple[int, int]]
) -> None:
    ranges = split_range(start, end, BOUNDS, partitions)
    assert [(one.start, one.end) for one in ranges] == expected
    assert {(one.log_id, one.epoch) for one in ranges} == {(bytes(16), 3)}
    assert pickle.loads(pickle.dumps(ranges)) == ranges


def test_huge_range_has_a_bounded_number_of_partitions() -> None:
    assert len(split_range(0, 10**12, BOUNDS, None)) == reading.PARTITIONS_DEFAULT_MAX


def make_logged(count: int, offset: int) -> LoggedBatch:
    deltas = [Delta(f"k{offset + row}", create([1.0, 2.0]), "n") for row in range(count)]
    return LoggedBatch(encode_batch(deltas, origin=1, base=offset + 1), offset, offset + 1, Source.LOCAL)


def test_small_batches_are_merged_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MERGE_ROWS", 10)
    sizes = [4, 4, 4, 12, 1, 9, 1]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    merged = list(merge_batches(make_logged(*one) for one in zip(sizes, offsets, strict=True)))
    assert [one.num_rows for one in merged] == [8, 4, 12, 10, 1]
    assert [offset for one in merged for offset in one.column("offset").to_pylist()] == list(
        range(sum(sizes))
    )
    assert all(one.schema == SCHEMA for one in merged)


@pytest.mark.parametrize(
    ("filters", "topics", "first", "end"),
    [
        ([EqualTo(("vector_id",), "a")], ("v:a",), 0, None),
        ([EqualNullSafe(("namespace",), "docs")], ("ns:docs",), 0, None),
        ([EqualTo(("op",), "create"), In(("vector_id",), ("a", "b"))], ("v:a", "v:b"), 0, None),
        ([EqualTo(("vector_id",), "x" * 600)], ("*",), 0, None),
        ([EqualTo(("op",), "frobnicate")], ("*",), 0, None),
        ([In(("vector_id",), tuple(map(str, range(257))))], ("*",), 0, None),
        ([Not(EqualTo(("vector_id",), "a")), StringStartsWith(("vector_id",), "a")], ("*",), 0, None),
        ([EqualTo(("vector_id", "inner"), "a"), IsNull(("vector_id",))], ("*",), 0, None),
        ([EqualTo(("vector_id",), None)], ("*",), 0, None),
        ([GreaterThan(("offset",), 4), LessThanOrEqual(("offset",), 9)], ("*",), 5, 10),
        ([GreaterThanOrEqual(("offset",), 4), LessThan(("offset",), 9)], ("*",), 4, 9),
        ([EqualTo(("offset",), 4), GreaterThan(("offset",), 1)], ("*",), 4, 5),
        ([GreaterThan(("counter",), 4)], ("*",), 0, None),
    ],
)
def test_filters_narrow_topics_and_offsets(
    filters: list[Filter], topics: tuple[str, ...], first: int, end: int | None
) -> None:
    assert narrow(ReadFilter((ALL,)), filters) == ReadFilter(tuple(map(Topic.parse, topics)), first, end)


def test_topics_of_the_user_are_not_changed_by_filters() -> None:
    assert narrow(ReadFilter(NEWS), [EqualTo(("vector_id",), "a")]).topics == NEWS


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, None, (5, 9)),
        (6, None, (6, 9)),
        (20, None, (9, 9)),
        (0, 7, (5, 7)),
        (0, 3, (5, 5)),
        (8, 6, (8, 8)),
    ],
)
def test_range_is_clipped_by_a_filter(first: int, end: int | None, expected: tuple[int, int]) -> None:
    assert ReadFilter((ALL,), first, end).clip(5, 9) == expected


def test_reader_is_pickled_without_a_connection() -> None:
    options = read_options({"url": "delta://nowhere:1", "namespace": "docs"}, {}, NOW_US)
    unpickled = pickle.loads(pickle.dumps(Reader(options, READ_SCHEMA)))
    assert unpickled._filter.topics == (Topic.parse("ns:docs"),)
