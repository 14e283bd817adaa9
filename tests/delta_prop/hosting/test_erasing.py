"""Erasing a vector leaves nothing of it in any file; a crash meanwhile leaves it as it was, or deleted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import CHANGING, SimCrash, SimDisk
from delta_prop_sinks import CacheSink, CallbackSink
from delta_prop_sinks.sink import RejectDelta
from delta_prop_wire.delta import Delta, create, dense, opaque, sparse_add
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.hosting.hosts import NO_RESERVE, hosting, publish

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.hosting.streams import Streams

SMALL = replace(NO_RESERVE, segment_bytes_max=3_000, checkpoint_frames=5)
VECTOR, OTHER = "ada-lovelace", "someone-else"
NUMBERS = [7.25, -3.5, 0.125, 9.0]
TRACES = (b"ada-love", b"born in 1815", b"raw bytes", np.float32(NUMBERS).tobytes())
"""Bytes of the vector's id, metadata, data and numbers."""


async def write_history(p: Propagator) -> None:
    """Write the vector in every way, between others, with a checkpoint on the way."""
    for number in range(8):
        await publish(p, f"v-{number}")
        await p.publish(
            Delta(VECTOR, create(NUMBERS), metadata={"note": "born in 1815"}), Delta(OTHER, create([1.0] * 4))
        )
        await p.publish(Delta(VECTOR, sparse_add([0], [0.0])))
        await p.publish(Delta(VECTOR, dense(NUMBERS)))
        await p.publish(Delta(VECTOR, opaque(b"some raw bytes")), Delta(f"w-{number}", create(NUMBERS[::-1])))


def traces_on(disk: SimDisk) -> dict[str, list[bytes]]:
    """Return what the files have of the vector, by path."""
    found = {path: [trace for trace in TRACES if trace in disk.peek(path)] for path in disk.paths()}
    return {path: traces for path, traces in found.items() if traces}


async def erase(streams: Streams, timeout_s: float = 30) -> None:
    await streams.erase("people", VECTOR, timeout_s=timeout_s)


def test_no_byte_of_an_erased_vector_is_in_any_file() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk, log=SMALL) as streams:
            await streams.create("people", 1)
            p = await streams.open("people")
            cache = await p.attach(CacheSink(name="cache"), start="earliest")
            await write_history(p)
            assert len(traces_on(disk)) > 2
            assert {*TRACES} == {trace for traces in traces_on(disk).values() for trace in traces}
            await erase(streams)
            assert traces_on(disk) == {}
            assert p.head(VECTOR) is None
            assert await cache.get("default", VECTOR) is None
            assert p.head(OTHER) is not None
            await publish(p, "later")
            await erase(streams)  # again: nothing is there
            assert traces_on(disk) == {}
        assert traces_on(disk) == {}
        async with hosting(disk, 2, log=SMALL) as streams:
            p = await streams.open("people")
            assert (p.head(VECTOR), p.head("later") is not None) == (None, True)
            await p.publish(Delta(VECTOR, create(NUMBERS)))
            assert p.head(VECTOR) is not None

    run_virtual(main)


def test_vector_is_erased_in_its_partition_and_others_stay() -> None:
    disk = SimDisk(1)

    async def main() -> None:
        async with hosting(disk, log=SMALL) as streams:
            await streams.create("people", 3)
            for number in range(3):
                await publish(await streams.open("people", number), f"x-{number}")
            with pytest.raises(Refused):
                await streams.erase("nobody", VECTOR)
            await streams.erase("people", VECTOR, dry_run=True)
            ends = [(await streams.open("people", number)).statistics().log for number in range(3)]
            assert [end.next_offset for end in ends] == [1, 1, 1]
            await erase(streams)
            ends = [(await streams.open("people", number)).statistics().log for number in range(3)]
            assert sorted(end.next_offset for end in ends) == [1, 1, 2]

    run_virtual(main)


def test_erasing_waits_for_sinks_and_says_so() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=SMALL) as streams:
            await streams.create("people", 1)
            p = await streams.open("people")
            await p.attach(CallbackSink(lambda offset, delta: None, name="slow"), start="earliest")
            await write_history(p)
            p.pause("slow")
            with pytest.raises(Refused, match=r"sink 'slow' is paused at offset \d+: resume it"):
                await erase(streams, 2)
            p.resume("slow")
            await erase(streams)
            await p.detach("slow")
            with pytest.raises(
                Refused, match=r"sink 'slow' is detached, and may have it: attach it, or forget"
            ):
                await erase(streams, 2)
            p.forget("slow")
            await erase(streams)

    run_virtual(main)


def test_erasing_waits_for_quarantined_deltas_of_its_batches() -> None:
    disk = SimDisk(1)

    def reject(offset: int, delta: Delta) -> None:
        if delta.vector_id == OTHER:
            raise RejectDelta(offset, "not this one")

    async def main() -> None:
        async with hosting(disk, log=SMALL) as streams:
            await streams.create("people", 1)
            p = await streams.open("people")
            await p.attach(CallbackSink(reject, name="strict"), start="earliest")
            await write_history(p)
            await anyio.sleep(1)
            with pytest.raises(Refused, match=r"sink 'strict' has offset 2 in quarantine: replay or drop it"):
                await erase(streams, 3)
            while p.quarantine("strict"):
                await p.drop("strict")
            assert any("quarantine" in path for path in traces_on(disk))
            await erase(streams)
            assert traces_on(disk) == {}

    run_virtual(main)


def test_vector_that_is_written_meanwhile_is_not_erased() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=SMALL) as streams:
            await streams.create("people", 1)
            p = await streams.open("people")
            await write_history(p)

            async def rewrite() -> None:
                with anyio.move_on_after(60):
                    while True:
                        await p.publish(Delta(VECTOR, create(NUMBERS)))
                        await anyio.sleep(0.01)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rewrite)
                with pytest.raises(
                    Refused, match=r"was written again meanwhile: stop what writes"
                ) as refused:
                    await erase(streams)
                assert refused.value.code is ErrorCode.CONFLICT
                tasks.cancel_scope.cancel()
            assert p.head(VECTOR) is not None
            await erase(streams)

    run_virtual(main)


def test_log_without_compaction_refuses_to_erase() -> None:
    async def main() -> None:
        async with hosting(SimDisk(1), log=replace(SMALL, compact=False)) as streams:
            p = await streams.open()
            await publish(p, "v")
            with pytest.raises(UsageError, match="only a log on disk with compaction"):
                await streams.erase("default", "v")
            assert p.statistics().log.next_offset == 1

    run_virtual(main)


@pytest.mark.parametrize("is_power_cut", [False, True])
def test_crash_at_every_disk_call_of_an_erase_leaves_old_or_deleted(is_power_cut: bool, full: bool) -> None:
    erased: list[bool] = []

    async def fill(disk: SimDisk) -> None:
        async with hosting(disk, log=SMALL) as streams:
            await streams.create("people", 1)
            p = await streams.open("people")
            await write_history(p)
            erased.append(False)
            await erase(streams)
            erased[-1] = True

    async def check(disk: SimDisk) -> None:
        async with hosting(disk, 9, log=SMALL) as streams:
            assert not (erased[-1] and traces_on(disk))
            p = await streams.open("people")
            others = {vector_id: p.head(vector_id) for vector_id in (OTHER, "v-7", "w-7")}
            assert None not in others.values()
            await erase(streams)
            assert traces_on(disk) == {}
            assert {vector_id: p.head(vector_id) for vector_id in others} == others

    reference = SimDisk()
    run_virtual(fill, reference)
    calls = [call for call in reference.trace if call.name in CHANGING]
    first = next(call.number for call in calls if "snapshot" in call.path) - 12
    numbers = [call.number for call in calls if call.number > first]
    assert len(numbers) > 25
    for number in numbers if full else numbers[:: 3 if is_power_cut else 4]:
        disk = SimDisk(number)
        disk.crash_at(number, "after" if number % 2 else "before")
        with suppress(SimCrash, BaseExceptionGroup):
            run_virtual(fill, disk)
        run_virtual(check, disk.crash() if is_power_cut else disk.kill())
    assert True in erased
    assert False in erased
