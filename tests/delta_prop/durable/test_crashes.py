"""The service on a false disk that crashes: what was acknowledged as durable is there, once, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.embedded import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import AckLevel, Delta, create
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.producer import Producer

PRODUCERS = 3
DELTAS = 12


@dataclass
class Story:
    """Acknowledgements and counts over one service's lives."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    lives: int = 0
    repeats: int = 0
    crashes: int = 0


async def live(disk: SimDisk, seed: int, story: Story) -> list[tuple[int, str]]:
    """One life: each producer goes on where it stopped. What the log holds, if the life ends well."""
    story.lives += 1
    seen: list[tuple[int, str]] = []
    world = virtual_world(seed + 1000 * story.lives, thread_delay_s_max=0.01, disk=disk)
    async with Propagator(data="x", world=world) as p:
        sink = CallbackSink(lambda offset, delta: seen.append((offset, delta.vector_id)))
        await p.attach(sink, start="earliest")
        async with anyio.create_task_group() as tasks:
            for number in range(PRODUCERS):
                tasks.start_soon(produce, p.producer(f"p{number}"), number, story)
        await p.wait_visible(p.statistics().log.next_offset)
    return seen


async def produce(producer: Producer, number: int, story: Story) -> None:
    """Send everything from the start: the same dots, so what is known is answered as a repeat."""
    for at in range(DELTAS):
        key = f"{number}-{at}"
        if at < producer.watermark():
            story.repeats += 1
            continue
        published = await producer.publish(made(key))
        assert published.level is AckLevel.DURABLE
        assert published.offset is not None
        if key in story.acknowledged:
            assert story.acknowledged[key] == published.offset
        story.acknowledged[key] = published.offset


def made(key: str) -> Delta:
    return Delta(key, create([1.0]))


def crashed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(crashed(one) for one in error.exceptions)
    return isinstance(error, SimCrash)


def run_life(disk: SimDisk, seed: int, story: Story) -> list[tuple[int, str]] | None:
    """A life, or None where the disk crashed under it."""
    try:
        return run_virtual(live, disk, seed, story)
    except BaseException as error:
        if not crashed(error):
            raise
        story.crashes += 1
        return None


@pytest.mark.parametrize("power", [True, False])
def test_what_was_acknowledged_is_there_after_any_crash(power: bool) -> None:
    story = Story()
    probe = SimDisk(0)
    assert run_life(probe, 0, story) is not None
    calls = probe.calls
    assert calls > 60
    step = 3
    struck = 0
    for n in range(1, calls, step):
        story = Story()
        disk = SimDisk(n)
        disk.crash_at(n, None)
        seen = run_life(disk, n, story)
        assert seen is None
        before = dict(story.acknowledged)
        disk = disk.crash(n) if power else disk.kill()
        seen = run_life(disk, n, story)
        assert seen is not None
        struck += story.crashes
        offsets = [offset for offset, _ in seen]
        assert offsets == sorted(set(offsets))
        assert sorted(key for _, key in seen) == sorted(
            f"{number}-{at}" for number in range(PRODUCERS) for at in range(DELTAS)
        )
        place = {key: offset for offset, key in seen}
        assert all(place[key] == offset for key, offset in before.items())
        for number in range(PRODUCERS):
            mine = [key for _, key in seen if key.startswith(f"{number}-")]
            assert mine == [f"{number}-{at}" for at in range(DELTAS)]
    print(f"{struck} crashes over {calls} disk calls")
    assert struck >= 20


def test_an_append_that_the_disk_refuses_is_not_acknowledged() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with Propagator(data="x", world=virtual_world(1, disk=disk)) as p:
            await p.publish(made("a"))
            disk.fail(disk.calls + 1, 5)
            disk.fail(lambda call: call.name in ("write", "sync"), 5, times=None)
            for key, code in (("b", ErrorCode.OUTCOME_UNKNOWN), ("c", ErrorCode.LOG_FAILED)):
                with pytest.raises(Refused) as caught:
                    await p.publish(made(key), timeout_s=5)
                assert caught.value.code is code
            disk.heal()

    run_virtual(main)


def test_a_crash_while_closing_leaves_no_task_and_no_scope_behind() -> None:
    async def live(disk: SimDisk) -> None:
        async with Propagator(data="x", world=virtual_world(1, disk=disk)) as p:
            await p.attach(CallbackSink(lambda _offset, _delta: None))
            await p.publish(made("a"))
            await p.wait_visible(1)
            disk.crash_at(lambda call: "cursors" in call.path)

    async def main() -> None:
        with pytest.raises(BaseException) as caught:
            await live(SimDisk(1))
        assert crashed(caught.value)

    run_virtual(main)
