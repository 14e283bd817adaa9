"""A service that starts from a checkpoint answers as one that reads its whole log."""

from __future__ import annotations

import random

import anyio
import pytest

from delta_prop import checkpointing
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from tests.delta_prop.durable.histories import History, answers, service, step

STEPS = 60


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that much happens while a checkpoint is copied."""
    monkeypatch.setattr(checkpointing, "ORIGINS_A_SLICE", 1)
    monkeypatch.setattr(checkpointing, "HEADS_A_SLICE", 3)
    monkeypatch.setattr(checkpointing, "READ_ROWS", 2)


async def lived(disk: SimDisk, seed: int, history: History, checkpoints: int) -> int:
    """A life with checkpoints written in the midst of it; how many were."""
    async with service(disk, seed) as p, anyio.create_task_group() as tasks:
        checkpointer = p._service_log.checkpointer
        assert checkpointer is not None
        history.begin(p)
        at = {history.chance.randrange(STEPS) for _ in range(checkpoints)}
        for number in range(STEPS):
            if number in at:
                tasks.start_soon(checkpointer.write)
            await step(p, history)
        await anyio.sleep(1)
        return checkpointer.written


def without_checkpoints(disk: SimDisk) -> SimDisk:
    bare = disk.kill()
    for path in bare.paths():
        if path.endswith((".checkpoint", ".part")):
            bare.remove(path)
    return bare


async def asked(disk: SimDisk, seed: int, history: History) -> dict[str, object]:
    async with service(disk, seed) as p:
        checkpointer = p._service_log.checkpointer
        assert checkpointer is not None
        return {"restored": checkpointer.restored, **await answers(p, history.frames)}


@pytest.mark.parametrize("seed", range(4))
def test_a_checkpoint_and_the_tail_say_what_the_whole_log_says(seed: int, full: bool) -> None:
    for number in range(seed * 100, seed * 100 + (40 if full else 1)):
        _compare(number)


def _compare(seed: int) -> None:
    history = History(random.Random(seed))
    disk = SimDisk(seed)
    written = 0
    for life in range(2):
        written += run_virtual(lived, disk, seed * 10 + life, history, 2)
    bare = without_checkpoints(disk)
    one, other = run_virtual(asked, disk, seed, history), run_virtual(asked, bare, seed, history)
    assert (one.pop("restored"), other.pop("restored")) == (True, False)
    for name, said in one.items():
        assert said == other[name], name
    assert one["told"] == [told for *_, told in history.frames], "another answer than at first"
    assert written >= 2
