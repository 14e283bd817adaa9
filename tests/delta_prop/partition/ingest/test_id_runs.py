"""Runs of ids, in memory and in files, with several page sizes: lookups, merges, reports of corruption."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.partition.ingest import id_runs
from delta_prop.partition.ingest.bloom import hash_ids
from delta_prop.partition.ingest.id_merging import FANOUT, GENERATIONS_PER_RUN_MAX, RunMerge, choose_runs
from delta_prop.partition.ingest.id_runs import IdRun, RunCorrupted, RunFacts, RunWriter, sort_rows
from delta_prop.partition.ingest.seen_ids import SeenIds
from tests.delta_prop.partition.ingest.id_store import IdStore
from tests.delta_prop.partition.ingest.test_seen_ids import id_with_hash, ids_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_broker.recovery.checkpoints import CheckpointFile

SMALL_PAGE = 16 + 24 * 3


@pytest.fixture(params=[SMALL_PAGE, 4096], ids=["pages of 3 rows", "pages of 170 rows"])
def _page_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_runs, "PAGE_BYTES", request.param)


def run_of(ids: Sequence[bytes], offsets: Sequence[int], *, step: int = 1_000) -> IdRun:
    """Return a run in memory, built from `step` rows at a time."""
    hashes, second_halves = hash_ids(ids)
    rows = sort_rows(np.stack((hashes, second_halves, np.array(offsets, np.uint64)), axis=1))
    writer = RunWriter(len(ids), 0.001)
    pages: list[bytes] = []
    for start in range(0, len(rows), step):
        pages += writer.add(rows[start : start + step])
    facts, last = writer.finish()
    run = IdRun(facts, writer.fences, pages=[*pages, *last])
    run.filter = writer.filter
    return run


def store_run(store: IdStore, run: IdRun) -> IdRun:
    """Return the same run, read from its file."""
    name = store.checkpoints.free_name(0, "run")
    part = store.checkpoints.write_file(name, run.chunks())
    return IdRun.open(store.checkpoints.open_file(part), part, store.checkpoints.path_of(part))


def find_ids(run: IdRun, ids: Sequence[bytes]) -> list[int | None]:
    """Return the ids' offsets; check `find` against `find_many`."""
    hashes, second_halves = hash_ids(ids)
    offsets = run.find_many(hashes, second_halves)
    pairs = zip(hashes.tolist(), second_halves.tolist(), strict=True)
    assert [run.find(hashed, second) for hashed, second in pairs] == offsets
    return offsets


def variants(run: IdRun) -> Iterator[IdRun]:
    """Yield the run in memory, from a file, and with ever fewer fences."""
    yield run
    store = IdStore()
    yield store_run(store, run)
    thinned = store_run(store, run)
    while thinned.thin_fences():
        yield thinned


@pytest.mark.usefixtures("_page_bytes")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 169, 170, 171, 400])
def test_each_id_is_found_at_its_offset_and_no_other(count: int) -> None:
    ids, others = ids_of(1, count), ids_of(2, 200)
    offsets = list(range(5, 5 + 2 * count, 2))
    for run in variants(run_of(ids, offsets, step=7)):
        assert find_ids(run, ids) == offsets
        assert find_ids(run, others) == [None] * 200
        assert (run.facts.row_count, run.facts.first_offset, run.facts.last_offset) == (count, 5, offsets[-1])
        rows = run.rows(0, run.facts.page_count)
        assert sorted(rows[:, 2].tolist()) == offsets
    assert run.fences_nbytes == id_runs.FENCE_BYTES, "thinning should end at one fence"


@pytest.mark.usefixtures("_page_bytes")
def test_ids_with_equal_hashes_span_many_pages() -> None:
    ids = [id_with_hash(hashed, second) for hashed in (7, 8, 1 << 63) for second in range(0, 200, 2)]
    others = [id_with_hash(hashed, second) for hashed in (6, 7, 8, 9, 1 << 63) for second in range(1, 201, 2)]
    for run in variants(run_of(ids, range(300))):
        assert find_ids(run, ids) == list(range(300))
        assert find_ids(run, others) == [None] * len(others)


def test_bytes_across_two_rows_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_runs, "PAGE_BYTES", SMALL_PAGE)
    ids = [id_with_hash(1, 0), id_with_hash(1, 1)]
    run = run_of(ids, [2, 3])
    raw = b"".join(run.chunks())[:48]
    hashed, second = (int.from_bytes(raw[at : at + 8], "little") for at in (8, 16))
    assert (hashed, second) == (0, 2)
    assert run.find(hashed, second) is None


@given(
    groups=st.lists(
        st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True), min_size=2, max_size=4
    ),
    page_rows=st.integers(1, 4),
    pages=st.integers(1, 3),
)
def test_merged_run_keeps_all_ids_with_first_offsets(
    groups: list[list[int]], page_rows: int, pages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_runs, "PAGE_BYTES", 16 + 24 * page_rows)
        patch.setattr("delta_prop.partition.ingest.id_merging.PAGES_PER_STEP", pages)
        store, expected, runs, offset = IdStore(), dict[int, int](), [], 0
        for numbers in groups:
            group_ids = [id_with_hash(number % 5, number) for number in numbers]
            runs.append(store_run(store, run_of(group_ids, range(offset, offset + len(numbers)))))
            for index, number in enumerate(numbers):
                expected.setdefault(number, offset + index)
            offset += len(numbers)
        merge, writer = RunMerge(runs, 0.001), store.checkpoints.begin_file("merged.part")
        while not merge.is_done:
            for chunk in merge.step():
                writer.add(chunk)
        part = writer.finish()
        for run in (
            merge.result(store.checkpoints.open_file(part), part, "merged"),
            IdRun.open(store.checkpoints.open_file(part), part, "merged"),
        ):
            run.filter = run.filter or run.load_filter()
            all_ids = [id_with_hash(number % 5, number) for number in range(61)]
            assert find_ids(run, all_ids) == [expected.get(number) for number in range(61)]
            assert run.facts.row_count == len(expected)
            hashes, _ = hash_ids([all_ids[number] for number in expected])
            assert len(run.filter.candidates(hashes)) == len(expected)


# --- corruption


def test_each_flipped_bit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_runs, "PAGE_BYTES", SMALL_PAGE)
    ids, offsets = ids_of(1, 20), list(range(20))
    size = len(b"".join(run_of(ids, offsets).chunks()))
    for position in range(size):
        store = IdStore()
        run = run_of(ids, offsets)
        name = store.checkpoints.free_name(0, "run")
        part = store.checkpoints.write_file(name, run.chunks())
        path = store.checkpoints.path_of(part)
        store.disk.flip(path, position)
        with pytest.raises(RunCorrupted) as corruption:
            read_all(store, part, ids)
        assert corruption.value.path == path


def read_all(store: IdStore, part: CheckpointFile, ids: Sequence[bytes]) -> None:
    """Read everything that a run holds."""
    opened = IdRun.open(store.checkpoints.open_file(part), part, store.checkpoints.path_of(part))
    opened.load_filter()
    find_ids(opened, ids)


@pytest.mark.parametrize("cut", [1, 60, 500])
def test_truncated_run_is_reported_on_open(cut: int) -> None:
    store = IdStore()
    part = store.checkpoints.write_file("run.part", run_of(ids_of(1, 300), range(300)).chunks())
    file = store.disk.open("x/run.part")
    file.truncate(part.size - cut)
    with pytest.raises(RunCorrupted, match=r"x/run\.part"):
        IdRun.open(store.checkpoints.open_file(part), part, "x/run.part")


def test_swapped_pages_are_reported() -> None:
    store = IdStore()
    part = store.checkpoints.write_file("run.part", run_of(ids_of(1, 400), range(400)).chunks())
    file = store.disk.open("x/run.part")
    first, second = file.read(0, 4096), file.read(4096, 4096)
    file.write(0, [second, first])
    run = IdRun.open(store.checkpoints.open_file(part), part, "x/run.part")
    with pytest.raises(RunCorrupted, match="page"):
        find_ids(run, ids_of(1, 400))


def test_opening_reads_fences_and_no_pages() -> None:
    store = IdStore()
    run = run_of(ids_of(1, 50_000), range(50_000))
    part = store.checkpoints.write_file("run.part", run.chunks())
    read_sizes: list[int] = []
    file = store.checkpoints.open_file(part)
    original = file.read

    def record_read(position: int, size: int) -> bytes:
        read_sizes.append(size)
        return original(position, size)

    file.read = record_read  # type: ignore[method-assign]
    opened = IdRun.open(file, part, "x/run.part")
    assert sum(read_sizes) < part.size // 200
    read_sizes.clear()
    hashes, second_halves = hash_ids(ids_of(1, 1))
    assert opened.find(int(hashes[0]), int(second_halves[0])) == 0
    assert read_sizes == [4096]


# --- choice of runs to merge


def runs_of_sizes(*generations: int) -> list[IdRun]:
    """Return runs of these sizes, in generations of 1,000 ids; they have no rows."""
    template = run_of(ids_of(1, 1), [0])
    runs = []
    for count in generations:
        facts = RunFacts(count * 1_000, 0, 0, count * 1_000, 0.001, 4096)
        runs.append(IdRun(facts, (template._hashes, template._seconds)))
    return runs


@pytest.mark.parametrize(
    ("generations", "merged"),
    [
        ([], None),
        ([1, 1, 1], None),
        ([1, 1, 1, 1], (0, 4)),
        ([4, 1, 1, 1, 1], (1, 5)),
        ([1, 1, 1, 1, 1, 1, 1], (0, 4)),
        ([4, 4, 4, 4], (0, 4)),
        ([4, 4, 4, 4, 1], (0, 4)),
        ([16, 16, 16, 16], None),
        ([16, 8, 4, 2, 1], None),
        ([16, 4, 4, 4, 1, 1], (1, 5)),
        ([8, 4, 3, 2], None),
        ([3, 1, 2, 1], (0, 4)),
    ],
)
def test_similar_neighbours_are_merged_up_to_the_bound(
    generations: list[int], merged: tuple[int, int] | None
) -> None:
    runs = runs_of_sizes(*generations)
    chosen = choose_runs(runs, 1_000)
    assert list(chosen) == ([] if merged is None else runs[merged[0] : merged[1]])


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=60), st.sampled_from([GENERATIONS_PER_RUN_MAX, 1 << 20])
)
def test_merging_leaves_few_runs_at_few_rewrites(sealed_counts: list[int], bound: int) -> None:
    """`sealed_counts`: how many generations are sealed before each choice of runs to merge."""
    sizes: list[int] = []
    written = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("delta_prop.partition.ingest.id_merging.GENERATIONS_PER_RUN_MAX", bound)
        for count in sealed_counts:
            sizes += [1] * count
            while chosen := choose_runs(runs := runs_of_sizes(*sizes), 1_000):
                first = runs.index(chosen[0])
                merged = sum(sizes[first : first + FANOUT])
                sizes[first : first + FANOUT] = [merged]
                written += merged
    total = sum(sizes)
    assert total == sum(sealed_counts)
    assert len(sizes) <= 3 * total // GENERATIONS_PER_RUN_MAX + 3 * (FANOUT - 1)
    assert written <= total * math.log2(min(total, bound))


def test_ids_stay_known_through_merges() -> None:
    store, seen = IdStore(), SeenIds(generation_ids=100)
    for batch in range(40):
        seen.add(ids_of(batch, 100), 100 * batch)
        seen.seal()
        store.write(seen)
        while store.merge(seen):
            pass
    assert seen.statistics().runs <= 8
    for batch in range(40):
        assert seen.find(ids_of(batch, 100)) == list(range(100 * batch, 100 * batch + 100))
