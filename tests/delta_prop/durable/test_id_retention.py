"""Ids are known as long as the log holds their deltas: with ids on disk, after crashes, with corruption."""

from __future__ import annotations

import errno
import random
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.partition.ingest import id_runs
from delta_prop.partition.ingest.seen_ids import WAITING_MAX
from delta_prop.partition.state.id_run_store import RETRY_S
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import Delta, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import catch_refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop.partition.ingest.seen_ids import SeenIds

GENERATION = 16
"""Ids per generation."""
COUNT = 24 * GENERATION
"""Number of deltas that each seed publishes across the power cuts."""
SETTINGS = Settings(ids_per_generation=GENERATION, id_generations_max=1, close_timeout_s=5)
LOG = LogSettings(
    segment_bytes_max=1 << 20, free_bytes_min=0, reserve_bytes=0, checkpoint_frames=1 << 40,
    checkpoint_bytes=1 << 40, compact=False,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_runs, "PAGE_BYTES", 16 + 24 * 5)


def service(
    disk: SimDisk, settings: Settings = SETTINGS, log: LogSettings = LOG, seed: int = 1
) -> Propagator:
    return Propagator(
        settings, data="x", log=log, world=virtual_world(seed, thread_delay_s_max=0.01, disk=disk)
    )


def delta(number: int) -> Delta:
    return Delta(f"v{number}", opaque(b"%d" % number), id=random.Random(number).randbytes(16))


async def publish(p: Propagator, numbers: Iterable[int]) -> None:
    """Publish new deltas, four per call."""
    all_numbers = list(numbers)
    for first in range(0, len(all_numbers), 4):
        published = await p.publish(*map(delta, all_numbers[first : first + 4]))
        assert not published.duplicates


async def assert_known(p: Propagator, numbers: Iterable[int]) -> None:
    """Publish the deltas of these numbers again, and check that nothing is appended.

    Each must be a duplicate of the delta whose offset is its number; if the log has removed that delta, the
    outcome must be unknown.
    """
    start, end = p.statistics().log.start_offset, p.statistics().log.next_offset
    for number in numbers:
        if number >= start:
            assert (await p.publish(delta(number))).duplicates == {0: number}
            continue
        with pytest.raises(Refused, match="no longer holds") as caught:
            await p.publish(delta(number))
        assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN
    assert p.statistics().log.next_offset == end


def ids_of(p: Propagator) -> SeenIds:
    return p.internals().partition.pipeline.appender.ids


async def settle(p: Propagator) -> None:
    """Wait until all id runs are stored, merged and loaded."""
    checkpointer = p.internals().partition.storage.checkpointer
    assert checkpointer is not None
    with anyio.fail_after(1_000):
        while checkpointer._id_store.wait_s is not None:  # noqa: ASYNC110 - nothing signals that all is stored
            await anyio.sleep(0.1)


@pytest.mark.parametrize("index_bytes_max", [1, 300, 1 << 20], ids=lambda size: f"{size} bytes in memory")
def test_duplicate_is_known_while_the_log_holds_the_delta(index_bytes_max: int, full: bool) -> None:
    disk, count = SimDisk(1), (40 if full else 24) * GENERATION
    settings = replace(SETTINGS, id_index_bytes_max=index_bytes_max)

    async def run_service(start: int) -> None:
        async with service(disk, settings) as p:
            assert p.recovery is not None
            assert (p.recovery.checkpoint is not None) == (start > 0)
            await assert_known(p, range(0, start, 7))
            await publish(p, range(start, start + count))
            await settle(p)
            statistics = p.statistics().ids
            assert statistics.ids == start + count
            assert (statistics.runs_waiting, statistics.kept_since) == (0, 0)
            assert statistics.runs <= 2 * (start + count) // (GENERATION * 16) + 7
            index_bytes = sum(run.nbytes for run in ids_of(p).runs)
            assert index_bytes <= max(index_bytes_max, 16 * statistics.runs)
            await assert_known(p, range(0, start + count, 7))

    for number in range(3):
        run_virtual(run_service, number * count)


def test_files_of_unneeded_id_runs_are_removed() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        log = replace(LOG, checkpoint_frames=20, checkpoint_bytes=1 << 40)
        async with service(disk, log=log) as p:
            await publish(p, range(60 * GENERATION))
            await settle(p)
            checkpointer = p.internals().partition.storage.checkpointer
            assert checkpointer is not None
            for number in range(2):  # the older checkpoint names older runs
                await publish(p, range((60 + number) * GENERATION, (61 + number) * GENERATION))
                await settle(p)
                await checkpointer.write()
            files = [path for path in disk.paths() if "-run" in path]
            named = {run.path.rpartition("/")[2] for run in ids_of(p).runs}
            assert named <= {path.rpartition("/")[2] for path in files}
            assert len(files) <= len(named) + 4

    run_virtual(main)


def test_ids_of_removed_rows_are_forgotten_run_by_run() -> None:
    disk = SimDisk(1)
    log = replace(
        LOG, segment_bytes_max=4_096, bytes_max=1 << 20, retention_bytes=40_000, checkpoint_frames=50
    )

    async def main() -> None:
        async with service(disk, log=log) as p:
            forgotten_runs = 0
            for number in range(0, 200 * GENERATION, GENERATION):
                await publish(p, range(number, number + GENERATION))
                await anyio.sleep(2)
                statistics = p.statistics()
                start = statistics.log.start_offset
                assert statistics.ids.kept_since <= start
                assert statistics.ids.ids <= number + GENERATION - start + 16 * GENERATION + 1
                forgotten_runs = max(forgotten_runs, statistics.ids.runs_forgotten)
            assert forgotten_runs > 3
            start = p.statistics().log.start_offset
            assert start > 0
            await assert_known(p, range(start, 200 * GENERATION, 11))
            assert ids_of(p).find([delta(0).id or b""]) == [None]

    run_virtual(main)


def test_ids_of_newest_generations_outlive_their_deltas() -> None:
    disk, count = SimDisk(1), 40 * GENERATION
    settings = replace(SETTINGS, id_generations_max=16)
    log = replace(LOG, segment_bytes_max=4_096, bytes_max=1 << 20, retention_bytes=20_000)
    memory_log_settings = replace(settings, log_deltas_max=GENERATION)
    world = virtual_world(1)

    async def run_service(p: Propagator, numbers: range) -> None:
        async with p:
            await publish(p, numbers)
            await anyio.sleep(30)
            start = p.statistics().log.start_offset
            assert start > numbers.stop - 16 * GENERATION, "the duplicates must include removed rows"
            await assert_known(p, range(numbers.stop - 16 * GENERATION, numbers.stop, 11))
            assert 0 < p.statistics().ids.kept_since <= start
            assert ids_of(p).find([delta(0).id or b""]) == [None], "older generations must be forgotten"

    run_virtual(run_service, service(disk, settings, log), range(count))
    run_virtual(run_service, service(disk, settings, log), range(count, count + 4))
    run_virtual(run_service, Propagator(memory_log_settings, world=world), range(count))


def test_known_ids_start_at_the_log_start_without_a_checkpoint() -> None:
    disk = SimDisk(1)
    log = replace(
        LOG,
        segment_bytes_max=4_096,
        bytes_max=1 << 20,
        retention_bytes=20_000,
        checkpoint_frames=50,
        compact=True,
    )

    async def first() -> None:
        async with service(disk, log=log) as p:
            await publish(p, range(100 * GENERATION))
            await anyio.sleep(30)
            assert p.statistics().log.start_offset > 0

    async def second() -> None:
        for path in disk.paths():
            if path.endswith(".checkpoint"):
                disk.remove(path)
        async with service(disk, log=log) as p:
            start = p.statistics().log.start_offset
            assert p.statistics().ids.kept_since == start > 0
            await assert_known(p, range(start, 100 * GENERATION, 11))

    run_virtual(first)
    run_virtual(second)


def test_start_without_a_checkpoint_keeps_few_ids_in_memory() -> None:
    disk = SimDisk(1)
    waiting_runs: list[int] = []

    async def first() -> None:
        async with service(disk) as p:
            await publish(p, range(50 * GENERATION))
            p.internals().partition.storage.checkpointer = None

    async def second(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("delta_prop.partition.storage.storage._RESTORE_ROWS", 40)
        async with service(disk) as p:
            assert p.recovery is not None
            assert p.recovery.checkpoint is None
            waiting_runs.append(p.statistics().ids.runs_waiting)
            await assert_known(p, range(0, 50 * GENERATION, 7))
            await settle(p)

    run_virtual(first)
    with pytest.MonkeyPatch.context() as patch:
        run_virtual(second, patch)
    assert waiting_runs == [0]


# --- a failing disk


def test_waiting_id_runs_are_bounded_while_the_disk_refuses() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with service(disk) as p:
            await publish(p, range(GENERATION))
            disk.fail(lambda call: call.name == "write" and "-run" in call.path, errno.ENOSPC, times=None)
            number, refusal = GENERATION, None
            while refusal is None and number < 20 * GENERATION:
                receipt = p.offer(delta(number))
                with suppress(Refused):
                    await receipt.wait()
                refusal = receipt.refusal()
                number += refusal is None
            assert refusal is not None
            assert refusal.code is ErrorCode.LOG_FULL
            assert p.statistics().ids.runs_waiting == WAITING_MAX
            assert (await p.publish(Delta("without", opaque(b"id")))).offset is not None
            disk.heal()
            assert not (await p.publish(delta(number))).duplicates, "a waiting caller must succeed"
            await assert_known(p, range(number))

    run_virtual(main)


# --- crashes


def test_acknowledged_ids_are_known_after_crashes_at_any_step(full: bool) -> None:
    """Cut the power at random disk calls, in up to six processes per seed; then all ids must be known."""
    crashes = crashes_at_id_runs = 0
    for seed in range(300 if full else 7):
        rng = random.Random(f"ids {seed}")
        disk, known_count, has_finished = SimDisk(seed), 0, False
        for _ in range(6):
            disk.crash_at(disk.calls + rng.randrange(1, 1_500))
            known_count, has_finished = run_virtual(run_until_crash, disk, seed, known_count)
            if has_finished:
                break
            crashes += 1
            crashes_at_id_runs += "-run" in disk.trace[-1].path
            disk = disk.crash(rng.randrange(1 << 30))
        disk.heal()
        known_count, has_finished = run_virtual(run_until_crash, disk, seed, known_count)
        assert (known_count, has_finished) == (COUNT, True)
    print(f"{crashes} crashes, {crashes_at_id_runs} of them at a call for an id run")
    assert crashes > (200 if full else 6)
    assert crashes_at_id_runs > (20 if full else 0)


async def run_until_crash(disk: SimDisk, seed: int, known_count: int) -> tuple[int, bool]:
    """Check the known ids and publish the others; return how many are known, and if no crash came."""
    log = replace(LOG, checkpoint_frames=15)
    try:
        async with service(disk, log=log, seed=seed) as p:
            await assert_known(p, range(0, known_count, 5))
            for number in range(known_count, COUNT):
                published = await p.publish(delta(number))
                assert published.duplicates in ({}, {0: number})
                known_count = number + 1
            await settle(p)
            await assert_known(p, range(known_count))
            return known_count, True
    except BaseException:
        if not disk.is_off:
            raise
        return known_count, False


# --- corruption


@pytest.mark.parametrize("index_bytes_max", [1, 1 << 20], ids=["by pages only", "after filters"])
def test_corrupted_id_run_is_rebuilt_from_the_log(index_bytes_max: int) -> None:
    disk = SimDisk(1)
    settings = replace(SETTINGS, id_index_bytes_max=index_bytes_max)

    async def main() -> None:
        async with service(disk, settings) as p:
            await publish(p, range(20 * GENERATION))
            await settle(p)
            checkpointer = p.internals().partition.storage.checkpointer
            assert checkpointer is not None
            await checkpointer.write()
            corrupted_run = ids_of(p).runs[0]
            for page in range(corrupted_run.facts.page_count):
                disk.flip(corrupted_run.path, corrupted_run.facts.page_bytes * page + 3)
            refusal = await catch_refusal(p.offer(delta(3)).wait())
            assert (refusal.code, refusal.retryable) == (ErrorCode.LOG_FAILED, True)
            assert (await p.publish(delta(3))).duplicates == {0: 3}, "a waiting caller must get its answer"
            await settle(p)
            assert corrupted_run not in ids_of(p).runs
            await assert_known(p, range(0, 20 * GENERATION, 3))
            await publish(p, range(20 * GENERATION, 21 * GENERATION))

    async def reopen() -> None:
        async with service(disk, settings) as p:
            assert p.recovery is not None
            assert p.recovery.checkpoint is not None
            await assert_known(p, range(0, 21 * GENERATION, 3))

    run_virtual(main)
    run_virtual(reopen)


def test_corrupted_id_run_found_by_a_merge_is_repaired() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with service(disk) as p:
            await publish(p, range(3 * GENERATION))
            await settle(p)
            (first, *_) = ids_of(p).runs
            disk.flip(first.path, 3)
            await publish(p, range(3 * GENERATION, 5 * GENERATION))
            await anyio.sleep(3 * RETRY_S)
            await settle(p)
            assert len(ids_of(p).runs) == 1
            await assert_known(p, range(5 * GENERATION))

    run_virtual(main)


def test_unreadable_id_run_is_rebuilt_at_start() -> None:
    disk = SimDisk(1)

    async def first() -> list[str]:
        async with service(disk) as p:
            await publish(p, range(20 * GENERATION))
            await settle(p)
            return [run.path for run in ids_of(p).runs]

    async def second() -> None:
        async with service(disk) as p:
            assert p.recovery is not None
            assert p.recovery.checkpoint is None
            await assert_known(p, range(0, 20 * GENERATION, 3))

    paths = run_virtual(first)
    disk.flip(paths[0], len(disk.peek(paths[0])) - 5)
    run_virtual(second)
