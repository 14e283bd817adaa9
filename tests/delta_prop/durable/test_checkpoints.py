"""A service that starts from a checkpoint gives the same answers as one that reads its full log."""

from __future__ import annotations

import errno
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop import LogSettings
from delta_prop.partition.ingest.heads import HeadChanges
from delta_prop.partition.ingest.work import Sender
from delta_prop.partition.state import checkpointing
from delta_prop.partition.state.checkpointing import Checkpointer
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import CHANGING, SimDisk
from delta_prop_wire.delta import AckLevel, Delta, create
from delta_prop_wire.errors import InvalidDelta
from tests.delta_prop.durable.histories import (
    NO_CHECKPOINTS,
    History,
    answers,
    outcome_of,
    resend_batch,
    service,
    step,
    with_other_bytes,
)

if TYPE_CHECKING:
    from delta_prop_wire.batch import Batch

STEPS = 60


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slices small and slow, so that the state changes while a checkpoint is copied."""
    monkeypatch.setattr(checkpointing, "ORIGINS_PER_SLICE", 1)
    monkeypatch.setattr(checkpointing, "HEADS_PER_SLICE", 3)
    monkeypatch.setattr(checkpointing, "READ_ROWS", 2)
    monkeypatch.setattr(checkpointing, "yield_to_loop", lambda: anyio.sleep(0.005))


async def run_with_checkpoints(
    disk: SimDisk, seed: int, history: History, checkpoints: int
) -> tuple[int, SimDisk]:
    """Run a service that writes checkpoints; return their number and the disk just before the close."""
    async with service(disk, seed) as p, anyio.create_task_group() as tasks:
        checkpointer = p.internals().partition.storage.checkpointer
        assert checkpointer is not None
        history.note_restart(p)
        checkpoint_steps = {history.rng.randrange(STEPS) for _ in range(checkpoints)}
        for number in range(STEPS):
            if number in checkpoint_steps:
                tasks.start_soon(checkpointer.write)
            await step(p, history)
        await anyio.sleep(1)
        return checkpointer.written, disk.kill()


def without_checkpoints(disk: SimDisk) -> SimDisk:
    bare = disk.kill()
    for path in bare.paths():
        if path.endswith((".checkpoint", ".part")):
            bare.remove(path)
    return bare


async def restart_and_query(disk: SimDisk, seed: int, history: History) -> dict[str, object]:
    async with service(disk, seed) as p:
        checkpointer = p.internals().partition.storage.checkpointer
        assert checkpointer is not None
        return {"restored": checkpointer.is_restored, **await answers(p, history.frames)}


@pytest.mark.parametrize("seed", range(4))
def test_checkpoint_and_tail_give_the_answers_of_the_full_log(
    seed: int, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # a history has few vectors: by default, each checkpoint would hold all of them
        monkeypatch.setattr(Checkpointer, "_is_full_cheaper", lambda *_: False)
    for number in range(seed * 100, seed * 100 + (40 if full else 1)):
        compare_checkpoint_with_log(number)


def compare_checkpoint_with_log(seed: int) -> None:
    history = History(random.Random(seed))
    disk = SimDisk(seed)
    written = 0
    for run in range(2):
        newly_written, killed = run_virtual(run_with_checkpoints, disk, seed * 10 + run, history, 2)
        written += newly_written
    is_killed = seed > 0  # only history 0 ends with a clean stop
    disk = killed if is_killed else disk
    bare = without_checkpoints(disk)
    restored, replayed = (
        run_virtual(restart_and_query, disk, seed, history),
        run_virtual(restart_and_query, bare, seed, history),
    )
    assert (restored.pop("restored"), replayed.pop("restored")) == (True, False)
    for name, value in restored.items():
        assert value == replayed[name], name
    assert restored["duplicates"] == [outcome for *_, outcome in history.frames], (
        "each outcome must be the one of the first copy"
    )
    assert written >= 2
    assert len(history.frames) > 30


# --- writing and retention

TINY = LogSettings(
    segment_bytes_max=4_096,
    bytes_max=1 << 20,
    retention_bytes=8_192,
    retention_s=3600.0,
    checkpoint_frames=50,
)


def test_removed_rows_are_still_known_from_the_checkpoint() -> None:
    disk, log = SimDisk(1), replace(TINY, retention_bytes=32_000)

    async def first() -> list[tuple[Batch, str]]:
        async with service(disk, 1, log) as p:
            frames: list[tuple[Batch, str]] = []
            producer = p.producer("me")
            for number in range(300):
                await producer.publish(Delta(f"v{number}", create([1.0]), id=number.to_bytes(16, "big")))
                if number in (3, 40, 220):
                    frame = p.internals().partition.log.read(number, rows_max=1, bytes_max=1 << 20)[0].batch
                    frames.append((frame, f"[(0, {number})]"))
            await anyio.sleep(10)
            assert 40 < p.statistics().log.start_offset <= 220
            return frames

    async def second() -> None:
        async with service(disk, 2, log) as p:
            assert p.recovery is not None
            assert p.recovery.checkpoint == 300
            assert p.producer("me").watermark() == 300
            for frame, outcome in frames:
                is_stored = frame.base > p.statistics().log.start_offset
                answers = [
                    outcome_of(await resend_batch(p, batch, Sender("me")))
                    for batch in (frame, with_other_bytes(frame))
                ]
                # With other content, a batch of an earlier producer epoch is FENCED, not DOT_REUSED.
                assert answers == ([outcome, "FENCED"] if is_stored else ["OUTCOME_UNKNOWN"] * 2)
                assert await p.producer("me").outcome(frame.base) == frame.base - 1, (
                    "its offset must be known"
                )
            published = await p.publish(Delta("v280", create([1.0]), id=(280).to_bytes(16, "big")))
            assert published.duplicates == {0: 280}
            with pytest.raises(InvalidDelta, match="holds vectors of 1"):
                await p.publish(Delta("x", create([1.0, 2.0])))
            assert p.head("v7") is not None

    frames = run_virtual(first)
    run_virtual(second)


@pytest.mark.parametrize(("vectors", "rereads"), [(5, False), (200, True)])
def test_checkpoint_rereads_rows_only_if_vectors_outnumber_new_rows(
    vectors: int, rereads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Batch] = []
    note = HeadChanges.note
    monkeypatch.setattr(
        HeadChanges, "note", lambda self, batch, source: (noted.append(batch), note(self, batch, source))
    )

    async def main() -> None:
        async with service(SimDisk(1), 1) as p:
            checkpointer = p.internals().partition.storage.checkpointer
            assert checkpointer is not None
            for number in range(200):
                await p.publish(Delta(f"v{number % vectors}", create([float(number)])))
            await checkpointer.write()
            for number in range(60):
                await p.publish(Delta(f"v{number % vectors}", create([float(number)])))
            noted.clear()
            await checkpointer.write()
            assert bool(noted) is rereads

    run_virtual(main)


def test_checkpoints_keep_the_tail_short_as_the_log_grows() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, 1, replace(NO_CHECKPOINTS, checkpoint_frames=20)) as p:
            checkpointer = p.internals().partition.storage.checkpointer
            assert checkpointer is not None
            for number in range(400):
                await p.publish(Delta(f"v{number % 5}", create([float(number)])))
                await anyio.sleep(0.1)
                assert (
                    p.internals().partition.log.next_offset - (p.internals().partition.log.needed_from or 0)
                    <= 200
                )
            assert checkpointer.written >= 3
            disk = disk.kill()  # the process ends here
        async with service(disk, 2) as p:
            assert p.recovery is not None
            assert p.recovery.checkpoint is not None
            assert p.recovery.checkpoint >= 200
            assert p.internals().partition.pipeline.orderer.watermarks == dict.fromkeys(
                p.internals().partition.pipeline.orderer.watermarks, 400
            )

    run_virtual(main)


def test_corrupted_checkpoint_falls_back_to_an_older_one_or_the_log() -> None:
    history = History(random.Random(5))
    disk = SimDisk(5)
    for run in range(2):
        run_virtual(run_with_checkpoints, disk, run, history, 2)
    expected = run_virtual(restart_and_query, disk.kill(), 5, history)
    for suffix in (".checkpoint", ".part"):
        for count in (1, 100):  # the newest file, or all of them
            corrupted = disk.kill()
            for path in sorted(path for path in corrupted.paths() if path.endswith(suffix))[::-1][:count]:
                corrupted.flip(path, 5 if suffix == ".part" else 60)
            answered = run_virtual(restart_and_query, corrupted, 5, history)
            if count == 100:
                assert not answered["restored"]
            assert {**answered, "restored": 0} == {**expected, "restored": 0}


def test_crash_at_any_call_of_a_checkpoint_changes_no_answer(full: bool) -> None:
    def run(disk: SimDisk, history: History) -> None:
        run_virtual(run_with_checkpoints, disk, 3, history, 2)

    probe = SimDisk(9)
    run(probe, History(random.Random(9)))
    calls = [call for call in probe.trace if call.path.endswith((".part", ".new", ".checkpoint"))]
    numbers = [call.number for call in calls if call.name in CHANGING]
    assert len(numbers) > 20
    for number in numbers if full else numbers[:: len(numbers) // 8]:
        disk, history = SimDisk(9), History(random.Random(9))
        disk.crash_at(number)
        with pytest.raises(BaseException) as caught:
            run(disk, history)
        assert "SimCrash" in repr(caught.value)
        after = disk.crash(number)
        bare = without_checkpoints(after)
        restored, replayed = (run_virtual(restart_and_query, disk, 7, history) for disk in (after, bare))
        assert {**restored, "restored": 0} == {**replayed, "restored": 0}
        outcomes = list(zip(restored["duplicates"], (first for *_, first in history.frames), strict=True))  # type: ignore[call-overload]
        assert all(now == before for now, before in outcomes), "an acknowledged delta must keep its outcome"


def test_rows_that_a_start_needs_are_retained_while_no_checkpoint_can_be_written() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, 1, TINY) as p:
            producer = p.producer("me")
            for number in range(100):
                await producer.publish(Delta(f"v{number}", create([1.0])))
            await anyio.sleep(5)
            needed_from = p.internals().partition.log.needed_from
            assert needed_from
            disk.fail(lambda call: call.path.endswith(".part"), errno.ENOSPC, times=None)
            for number in range(300):
                await producer.publish(Delta(f"w{number}", create([1.0])))
            await anyio.sleep(5)
            assert p.internals().partition.log.needed_from == needed_from
            assert p.statistics().log.start_offset <= needed_from
            disk = disk.kill()
        async with service(disk, 2, TINY) as p:
            assert p.producer("me").watermark() == 400
            assert p.recovery is not None
            assert p.recovery.checkpoint == needed_from

    run_virtual(main)


@pytest.mark.parametrize("seed", range(3))
def test_power_cut_after_a_checkpoint_loses_no_row_below_it(seed: int) -> None:
    history = History(random.Random(seed))
    crashed_disks: list[SimDisk] = []

    async def main() -> None:
        async with service(SimDisk(seed), seed, replace(NO_CHECKPOINTS, read_level=AckLevel.LOGGED)) as p:
            checkpointer, disk = (
                p.internals().partition.storage.checkpointer,
                p.internals().partition.storage.disk,
            )
            assert checkpointer is not None
            assert isinstance(disk, SimDisk)
            history.note_restart(p)
            for _ in range(20):
                await step(p, history)
            p.internals().partition.storage.committer.request_sync()  # type: ignore[union-attr]
            await anyio.sleep(1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(checkpointer.write)
                for _ in range(20):
                    p.offer(Delta("late", create([1.0, 2.0])), ack_level=AckLevel.LOGGED)
                    await anyio.lowlevel.checkpoint()
            crashed_disks.append(disk.crash(seed))  # as soon as the checkpoint is written

    run_virtual(main)
    restored, replayed = (
        run_virtual(restart_and_query, disk, 7, history)
        for disk in (crashed_disks[0], without_checkpoints(crashed_disks[0]))
    )
    assert restored.pop("restored"), "the checkpoint must be used"
    assert {**restored, "restored": False} == replayed
