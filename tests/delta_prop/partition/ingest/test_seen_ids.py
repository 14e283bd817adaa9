"""`SeenIds`: every id is found at its first offset, no unknown id is found, and memory stays bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from delta_prop.partition.ingest import id_runs, seen_ids
from delta_prop.partition.ingest.bloom import hash_id, hash_ids
from delta_prop.partition.ingest.id_merging import RunMerge
from delta_prop.partition.ingest.id_runs import RunCorrupted
from delta_prop.partition.ingest.seen_ids import FEW_IDS, SeenIds
from tests.delta_prop.partition.ingest.id_store import IdStore

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 1_000  # rows of a batch
GAP = 3  # offsets of other rows between two batches
DUPLICATES = 10_000
BYTES_PER_ID_MAX = 64


def ids_of(batch: int, count: int = BATCH) -> list[bytes]:
    """Return the ids of a batch, the same ones on each call."""
    raw = np.random.default_rng([4711, batch]).bytes(16 * count)
    return [raw[start : start + 16] for start in range(0, 16 * count, 16)]


def offset_of(batch: int, row: int = 0) -> int:
    return batch * (BATCH + GAP) + row


def filled_ids(batches: int, **settings: int) -> SeenIds:
    seen = SeenIds(**settings)
    for batch in range(batches):
        seen.add(ids_of(batch), offset_of(batch))
    return seen


def test_unknown_ids_are_not_found() -> None:
    seen = SeenIds()
    assert seen.find([]) == []
    assert seen.find(ids_of(0)) == [None] * BATCH
    assert ids_of(0)[0] not in seen
    assert "not an id" not in seen


@pytest.mark.parametrize(
    ("generation_ids", "count"), [(1, 4), (7, 40), (70, 100), (2_500, BATCH), (1_000_000, BATCH)]
)
def test_each_id_is_found_with_its_first_offset(generation_ids: int, count: int) -> None:
    seen = SeenIds(generation_ids=generation_ids)
    for batch in range(10):
        seen.add(ids_of(batch, count), offset_of(batch))
    for batch in range(10):
        ids, offsets = ids_of(batch, count), [offset_of(batch, row) for row in range(count)]
        assert seen.find(ids) == offsets
        assert seen.find(ids[:FEW_IDS]) == offsets[:FEW_IDS]
        assert ids[-1] in seen
    assert seen.find(ids_of(99)) == [None] * BATCH
    assert seen.statistics().ids == 10 * count


def test_duplicates_and_new_ids_in_one_call() -> None:
    seen = filled_ids(5, generation_ids=1_500)
    interleaved = [id_ for pair in zip(ids_of(0), ids_of(77), ids_of(4), strict=True) for id_ in pair]
    expected = [offset for row in range(BATCH) for offset in (offset_of(0, row), None, offset_of(4, row))]
    assert seen.find(interleaved) == expected
    assert [seen.find([id_])[0] for id_ in interleaved] == expected


def test_first_offset_wins() -> None:
    seen = SeenIds(generation_ids=100)
    first, *others = ids_of(0, 301)
    seen.add([first, others[0], first], 10)
    assert seen.find([first]) == [10]
    seen.add(others[1:], 20)
    finish_sealing(seen)
    for _ in range(2):  # its second offset is in the dict, then sealed too
        seen.add([first], 1_000)
        assert seen.find([first]) == [10]
        assert seen.find([first] * (FEW_IDS + 1)) == [10] * (FEW_IDS + 1)
        seen.add(ids_of(1, 200), 2_000)
        finish_sealing(seen)


def test_offsets_may_be_given_one_by_one() -> None:
    seen = SeenIds(generation_ids=2)
    ids = ids_of(0, 5)
    seen.add_at(ids, [3, 5, 8, 13, 21])
    assert seen.find(ids) == [3, 5, 8, 13, 21]
    finish_sealing(seen)
    statistics = seen.statistics()
    assert (statistics.runs, statistics.ids_open) == (2, 1), "a batch should be split where a generation ends"


def test_ids_with_equal_hashes_are_distinguished() -> None:
    ids = [id_with_hash(hashed=7, second=second) for second in range(3_000)]
    assert len(set(ids)) == 3_000
    assert {hash_id(id_)[0] for id_ in ids} == {7}
    seen = SeenIds(generation_ids=2_000)
    seen.add(ids[:2_000], 0)
    finish_sealing(seen)
    assert seen.find(ids) == [*range(2_000), *[None] * 1_000]
    assert [seen.find([id_])[0] for id_ in ids[1_990:2_010]] == [*range(1_990, 2_000), *[None] * 10]


def id_with_hash(hashed: int, second: int) -> bytes:
    """Return an id with the given hash, as an attacker would make it: the finalizer inverted."""
    word = (1 << 64) - 1
    unmixed = undo_shift(hashed, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & word
    unmixed = undo_shift(unmixed, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & word
    first = (undo_shift(unmixed, 30) - second * 0x9E3779B97F4A7C15) & word
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")


def undo_shift(value: int, shift: int) -> int:
    """Return the number that gives `value` if it is xored with itself, shifted to the right."""
    unshifted = value
    for _ in range(64 // shift + 1):
        unshifted = value ^ (unshifted >> shift)
    return unshifted


def finish_sealing(seen: SeenIds) -> None:
    while seen._sealing is not None:
        seen._continue_sealing(seen_ids.STEP_EVERY_IDS)


def test_bloom_filter_error_costs_a_lookup_and_no_delta() -> None:
    seen = SeenIds(generation_ids=1_000, error_rate=0.3)
    for batch in range(20):
        assert seen.find(ids_of(batch)) == [None] * BATCH
        assert all(id_ not in seen for id_ in ids_of(batch)[:100])
        seen.add(ids_of(batch), offset_of(batch))
    finish_sealing(seen)
    statistics = seen.statistics()
    assert statistics.false_positives > 1_000, "the test needs many false positives"
    assert statistics.confirmed == 0


def test_runs_below_an_offset_are_forgotten() -> None:
    seen = filled_ids(10, generation_ids=2_000)
    finish_sealing(seen)
    assert (seen.statistics().runs, seen.kept_since) == (5, 0)
    seen.forget_below(offset_of(3, BATCH - 1))
    assert (seen.statistics().runs, seen.kept_since) == (4, offset_of(1, BATCH - 1) + 1)
    seen.forget_below(offset_of(3, BATCH - 1) + 1)
    assert (seen.statistics().runs, seen.kept_since) == (3, offset_of(3, BATCH - 1) + 1)
    assert seen.find(ids_of(3)) == [None] * BATCH
    assert seen.find(ids_of(4)[:1]) == [offset_of(4)]
    assert seen.find(ids_of(4)) == [offset_of(4, row) for row in range(BATCH)]


def test_newest_ids_stay_known_though_the_log_drops_rows() -> None:
    seen = filled_ids(10, generation_ids=2_000, retained_min=5 * BATCH)
    finish_sealing(seen)
    seen.forget_below(offset_of(10))
    assert (seen.statistics().runs, seen.kept_since) == (3, offset_of(3, BATCH - 1) + 1)
    assert seen.find(ids_of(4)) == [offset_of(4, row) for row in range(BATCH)]
    seen.add(ids_of(10), offset_of(10))
    seen.forget_below(offset_of(11))
    assert (seen.statistics().runs, seen.kept_since) == (2, offset_of(5, BATCH - 1) + 1)
    assert seen.find(ids_of(4)) == [None] * BATCH


def test_ids_are_full_while_the_maximum_of_runs_is_unwritten() -> None:
    seen, store = SeenIds(generation_ids=1_000, waiting_max=2), IdStore()
    for batch in range(2):
        assert not seen.is_full
        seen.add(ids_of(batch), offset_of(batch))
        finish_sealing(seen)
    assert seen.is_full
    store.write(seen)
    assert not seen.is_full
    assert not filled_ids(5, generation_ids=1_000).is_full, "by default, unwritten runs should have no bound"


@pytest.mark.parametrize("index_bytes_max", [1, 60_000, 1 << 30])
def test_filters_stay_in_memory_within_the_bound(index_bytes_max: int) -> None:
    seen, store = SeenIds(generation_ids=5_000, index_bytes_max=index_bytes_max), IdStore()
    for batch in range(90):
        seen.add(ids_of(batch), offset_of(batch))
        store.write(seen)
        while store.merge(seen):
            pass
        store.load_filters(seen)
        assert sum(run.nbytes for run in seen.runs) <= max(
            index_bytes_max, id_runs.FENCE_BYTES * len(seen.runs)
        ), "runs should take at most the bound, or one fence each"
    sizes = [(run.facts.row_count, run.filter is not None) for run in seen.runs]
    with_filter = [rows for rows, has_filter in sizes if has_filter]
    without = [rows for rows, has_filter in sizes if not has_filter]
    assert (with_filter == []) == (index_bytes_max == 1)
    assert (without == []) == (index_bytes_max == 1 << 30)
    assert max(with_filter, default=0) <= min(without, default=1 << 60), "small runs should keep filters"
    for batch in (0, 40, 89):
        assert seen.find(ids_of(batch)) == [offset_of(batch, row) for row in range(BATCH)]
        assert seen.find(ids_of(batch)[:5]) == [offset_of(batch, row) for row in range(5)]
    assert seen.find(ids_of(500)) == [None] * BATCH


def test_unreadable_run_is_named_and_nothing_is_guessed() -> None:
    seen, store = SeenIds(generation_ids=1_000, index_bytes_max=1), IdStore()
    reports: list[bool] = []
    for batch in range(2):
        seen.add(ids_of(batch), offset_of(batch))
        seen.seal()
    store.write(seen)
    seen.on_corruption = lambda: reports.append(True)
    corrupted = seen.runs[0]
    for page in range(corrupted.facts.page_count):
        store.disk.flip(store.path(corrupted), 4096 * page + 50)
    for ids in (ids_of(0), ids_of(0)[:1], ids_of(1), ids_of(7)):
        seen.corrupted_run = None
        with pytest.raises(RunCorrupted):
            seen.find(ids)
        assert seen.corrupted_run is corrupted
    assert ids_of(0)[0] not in seen, "an id in an unreadable run should count as not seen"
    assert reports
    seen.forget_below(offset_of(0, BATCH - 1) + 1)
    assert seen.corrupted_run is None
    assert seen.find(ids_of(1)) == [offset_of(1, row) for row in range(BATCH)]


def test_runs_forgotten_during_a_merge_stay_forgotten() -> None:
    seen, store = SeenIds(generation_ids=1_000), IdStore()
    for batch in range(4):
        seen.add(ids_of(batch), offset_of(batch))
        seen.seal()
    store.write(seen)
    before = seen.runs
    merge = RunMerge(before, 0.001)
    seen.forget_below(offset_of(1, BATCH - 1) + 1)
    writer = store.checkpoints.begin_file("merged.part")
    while not merge.is_done:
        for chunk in merge.step():
            writer.add(chunk)
    part = writer.finish()
    merged = merge.result(store.checkpoints.open_file(part), part, "x/merged.part")
    seen.replace_runs(before, [merged])
    assert seen.runs == [merged]
    seen.forget_below(offset_of(3, BATCH - 1) + 1)
    seen.replace_runs([merged], before[:1])
    assert seen.runs == [], "all runs should be forgotten"


@pytest.mark.alone
def test_sealing_is_spread_over_later_calls() -> None:
    generation_ids, batch = 50_000, 100
    seen = SeenIds(generation_ids=generation_ids)
    work = []
    for number in range(2 * generation_ids // batch):
        ids = ids_of(number, batch)
        began = time.thread_time()
        seen.add(ids, number * batch)
        work.append(time.thread_time() - began)
        if number == generation_ids // batch:
            assert seen.statistics().runs == 0, "a full generation should be sealed step by step"
            assert seen.find(ids_of(3, batch)) == list(range(300, 400)), "the dict should answer until then"
    assert seen.statistics().runs == 1, "the run should be sealed before the next generation is full"
    median = sorted(work)[len(work) // 2]
    print(f"adding {batch} ids took {median * 1e6:.0f} us, at most {max(work) * 1e3:.1f} ms")
    assert max(work) < 0.05


@pytest.mark.alone
def test_lookup_costs_a_few_microseconds_per_id() -> None:
    seen = filled_ids(21, generation_ids=2_000)
    finish_sealing(seen)
    new = ids_of(500)
    singles = min(cpu_time_s(lambda: [seen.find([id_]) for id_ in new]) for _ in range(5)) / len(new)
    batched = min(cpu_time_s(lambda: seen.find(new)) for _ in range(5)) / len(new)
    print(f"with 10 runs, a new id costs {singles * 1e6:.1f} us, in 1,000 {batched * 1e6:.2f} us")
    assert singles < 30e-6
    assert batched < 10e-6


def cpu_time_s(action: Callable[[], object]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def test_batch_hashes_agree_with_single_hashes() -> None:
    ids = ids_of(1, 100)
    hashes, second_halves = hash_ids(ids)
    assert [hash_id(id_) for id_ in ids] == list(zip(hashes.tolist(), second_halves.tolist(), strict=True))


# --- large amounts: every id found at its first offset, bounded memory


def test_unique_ids_are_all_stored_in_bounded_memory(full: bool) -> None:
    count, generation_ids = (10_000_000, 1_000_000) if full else (200_000, 20_000)
    run = subprocess.run(
        [sys.executable, __file__, str(count), str(generation_ids)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    print(
        f"{count:,} unique ids, generations of {generation_ids:,} ({outcome['runs']} sealed): "
        f"{outcome['lost']} lost, {outcome['wrong']} of {outcome['repeats']:,} duplicates at a wrong offset; "
        f"memory grew by {outcome['bytes_per_id']:.1f} B per id, at most {outcome['peak_bytes_per_id']:.1f} "
        f"(bound {BYTES_PER_ID_MAX}); {outcome['seconds']:.1f} s"
    )
    assert outcome["lost"] == 0
    assert (outcome["repeats"], outcome["wrong"]) == (DUPLICATES, 0)
    assert outcome["runs"] >= 9
    assert outcome["peak_bytes_per_id"] <= BYTES_PER_ID_MAX


def measure(count: int, generation_ids: int) -> dict[str, float]:
    """Return the figures of one run. Nothing else runs in its process, so only ids make its memory grow."""
    batches = count // BATCH
    filled_ids(2, generation_ids=BATCH).find(ids_of(0))  # one-time allocations do not count as memory of ids
    seen = SeenIds(generation_ids=generation_ids)
    before = peak = resident_bytes()
    began = time.perf_counter()
    lost = 0
    for batch in range(batches):
        ids = ids_of(batch)
        lost += BATCH - seen.find(ids).count(None)
        seen.add(ids, offset_of(batch))
        peak = max(peak, resident_bytes())
    lost += batches * BATCH - seen.statistics().ids
    after = resident_bytes()
    wrong = 0
    positions = np.sort(np.random.default_rng(4).integers(0, count, DUPLICATES)).tolist()
    for batch, group in groupby(positions, key=lambda position: position // BATCH):
        ids = ids_of(batch)
        for row in (position % BATCH for position in group):
            wrong += seen.find(ids[row : row + 1]) != [offset_of(batch, row)]
        wrong += seen.find(ids) != [offset_of(batch, row) for row in range(BATCH)]
    return {
        "lost": lost,
        "repeats": DUPLICATES,
        "wrong": wrong,
        "runs": seen.statistics().runs,
        "bytes_per_id": (after - before) / count,
        "peak_bytes_per_id": (peak - before) / count,
        "seconds": time.perf_counter() - began,
    }


def resident_bytes() -> int:
    """Return the process's resident memory."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * 4_096
    ps = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(ps.stdout) * 1_024


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
