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

from delta_prop.spark.columns import READ_SCHEMA
from delta_prop.spark.data_source import reading, rows
from delta_prop.spark.data_source.pushdown import ReadFilter, narrow
from delta_prop.spark.data_source.reading import OffsetRange, Reader, split_ranges
from delta_prop.spark.data_source.rows import SCHEMA, merge_batches
from delta_prop.spark.options import read_options
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.stamp import LogName
from delta_prop_wire.topics import ALL, Topic

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""


def offset_range(start: int, end: int, partition: int = 0) -> OffsetRange:
    return OffsetRange(start, end, bytes(16), 3, LogName(7, partition))


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
    ranges = split_ranges([offset_range(start, end)], partitions)
    assert [(one.start, one.end) for one in ranges] == expected
    assert {(one.log_id, one.epoch, one.log) for one in ranges} == {(bytes(16), 3, (7, 0))}
    assert pickle.loads(pickle.dumps(ranges)) == ranges


def test_huge_range_has_a_bounded_number_of_partitions() -> None:
    assert len(split_ranges([offset_range(0, 10**12)], None)) == reading.PARTITIONS_DEFAULT_MAX
    ranges = [offset_range(0, 10**12, partition) for partition in range(3)]
    assert len(split_ranges(ranges, None)) == reading.PARTITIONS_DEFAULT_MAX // 3 * 3


@pytest.mark.parametrize(
    ("partitions", "expected"),
    [
        (None, [(1, 0, 10), (3, 5, 35)]),
        (1, [(1, 0, 10), (3, 5, 35)]),
        (8, [(1, 0, 5), (1, 5, 10), *((3, start, start + 5) for start in range(5, 35, 5))]),
    ],
)
def test_each_log_with_rows_has_a_task(partitions: int | None, expected: list[tuple[int, int, int]]) -> None:
    ranges = [offset_range(*one) for one in ((0, 0, 0), (0, 10, 1), (9, 9, 2), (5, 35, 3))]
    split = split_ranges(ranges, partitions)
    assert [(one.log.partition, one.start, one.end) for one in split] == expected
    assert split_ranges(ranges[::2], partitions) == [ranges[0]]
    assert split_ranges([], partitions) == []


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
