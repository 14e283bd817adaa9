"""A delta that had its place when the log failed: nobody is told of it before a recovery has decided."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.receipt import OfferState
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Dot, Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.test_reopening import ANY, contents, made, service
from tests.delta_prop.durable.test_reopening_told import LOGGED, break_disk, until_back

if TYPE_CHECKING:
    from delta_prop.embedded import Propagator
    from delta_prop.producer import Producer

LOG_FILE = "streams/default/0/00000000000000000000.log"


@pytest.mark.parametrize("kept", [True, False])
def test_an_offer_in_doubt_is_told_the_truth_once_the_log_is_recovered(kept: bool) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            break_disk(disk, "write", ending="mark" if kept else "")
            receipts = [p.offer(made("a")), producer.offer(made("b"))]
            await anyio.sleep(5)
            assert [one.state for one in receipts] == [OfferState.IN_DOUBT] * 2
            await until_back(p, disk)
            found = await contents(disk)
            for key, receipt in zip("ab", receipts, strict=True):
                assert receipt.acknowledged == (key in found), "told otherwise than it is"
                if key in found:
                    assert receipt.result().offset == found[key]
                else:
                    assert receipt.refusal().code is ErrorCode.LOG_FAILED
            assert len(found) == (2 if kept else 0), "the test is about both outcomes"

    run_virtual(main)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("handle", [True, False])
def test_a_deadline_that_passes_in_doubt_names_the_dot_and_the_dot_tells(kept: bool, handle: bool) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            break_disk(disk, "write", ending="mark" if kept else "")
            began = p._now()
            with pytest.raises(Refused, match="may have happened") as caught:
                await (producer if handle else p).publish(made("a"), timeout_s=3)
            assert p._now() - began < 4, "a deadline is a deadline"
            assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN
            dot = caught.value.details["dot"]
            assert isinstance(dot, Dot)
            with pytest.raises(Refused) as again:
                await p.outcome(dot, timeout_s=2)
            assert (again.value.code, again.value.details) == (ErrorCode.OUTCOME_UNKNOWN, {"dot": dot})
            await until_back(p, disk)
            if handle:
                producer.resend()
            told = await p.outcome(dot)
            found = await contents(disk)
            assert found == ({"a": 0} if kept else {})
            if kept:
                assert told == 0
            else:  # a handle fills the dot, so that nothing comes under it any more
                assert told is (ErrorCode.INVALID_DELTA if handle else None)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_told_as_not_happened_never_happens(seed: int) -> None:
    disk, told, refused = SimDisk(seed), dict[str, int](), set[str]()

    async def publish(key: str, publisher: Propagator | Producer) -> None:
        try:
            published = await publisher.publish(made(key), timeout_s=0.2)
        except Refused as refusal:
            if refusal.code is not ErrorCode.OUTCOME_UNKNOWN:
                refused.add(key)
        else:
            assert published.offset is not None
            told[key] = published.offset

    async def main() -> None:
        async with service(disk, seed) as p, anyio.create_task_group() as tasks:
            producer, calls = p.producer("me"), disk.calls + seed % 7 + 1
            disk.fail(lambda call: call.number >= calls and call.name in ("sync", "write"), times=None)
            for number in range(6):
                tasks.start_soon(publish, f"d{number}", p)
                tasks.start_soon(publish, f"h{number}", producer)
            await anyio.sleep(1)
            await until_back(p, disk)
            producer.resend()
            await anyio.sleep(1)
        found = await contents(disk)
        assert told.items() <= found.items()
        assert not refused & found.keys(), "told that it has not happened, and it did"

    run_virtual(main)


def test_who_is_cancelled_while_his_delta_is_in_doubt_is_not_held_up() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            break_disk(disk, "sync")
            for publisher in (p, producer):
                began = p._now()
                with anyio.move_on_after(2) as scope:
                    await publisher.publish(made("a"))
                assert scope.cancelled_caught
                assert p._now() - began < 3
            await until_back(p, disk)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_rests_on_the_state_is_answered_before_the_recovery_has_ended(seed: int) -> None:
    async def main() -> None:
        disk = SimDisk(seed)
        async with service(disk, log=LOGGED) as p, anyio.create_task_group() as tasks:
            producer = p.producer("me", ack_level=AckLevel.LOGGED)
            published, told = await producer.publish(made("a")), list[ErrorCode | None]()
            break_disk(disk, "sync", "sync_directory")
            p.offer(made("x"))
            await anyio.sleep(1)
            for ask in (lambda: p.producer("other"), producer.watermark):
                with pytest.raises(Refused) as caught:
                    ask()
                assert caught.value.code is ErrorCode.LOG_FAILED
            with pytest.raises(Refused) as caught:
                await producer.outcome(1, timeout_s=1)
            assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN

            async def wait() -> None:
                try:
                    await p.wait_visible(published)
                except Refused as refusal:
                    told.append(refusal.code)
                else:
                    told.append(None)

            tasks.start_soon(wait)
            await anyio.sleep(1)
            assert told == []
            disk.evict(LOG_FILE)
            await until_back(p, disk)
            await anyio.sleep(1)
            found = await contents(disk)
            kept = "a" in found
            assert told == [None if kept else ErrorCode.LOG_FAILED]
            assert await producer.outcome(1) == (0 if kept else None)
            assert producer.watermark() == int(kept)

    run_virtual(main)


def test_what_is_synced_is_visible_beside_a_failed_log_and_the_rest_waits_as_long_as_asked() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            published = await p.publish(made("a"))
            break_disk(disk, "write", "sync", "sync_directory")
            receipt = p.offer(made("x"))
            await anyio.sleep(1)
            with pytest.raises(Refused) as caught:
                p.head("a")
            assert caught.value.code is ErrorCode.LOG_FAILED
            await p.wait_visible(published, timeout_s=1)
            for waited in (receipt, p.statistics().log.next_offset):
                began = p._now()
                with pytest.raises(TimeoutError):
                    await p.wait_visible(waited, timeout_s=2)
                assert p._now() - began < 3
            assert receipt.state is OfferState.IN_DOUBT, "nothing was withdrawn"
            await until_back(p, disk)
            with suppress(Refused):
                await receipt
            assert receipt.acknowledged == ("x" in await contents(disk))

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
def test_a_duplicate_that_a_recovery_has_lost_is_not_told_as_visible(seed: int) -> None:
    async def main() -> None:
        disk = SimDisk(seed)
        async with service(disk, log=LOGGED) as p:
            await p.publish(made("a"))
            break_disk(disk, "sync", "sync_directory")
            x = replace(made("x"), id=bytes(16))
            told = [await p.publish(x, ack_level=AckLevel.LOGGED) for _ in range(2)]
            assert told[1].duplicate
            p.offer(made("y"), ack_level=AckLevel.DURABLE)
            await anyio.sleep(1)
            disk.evict(LOG_FILE)
            await until_back(p, disk)
            kept = "x" in await contents(disk)
            await p.publish(made("b"), made("c"), made("d"))
            for one in told:
                if kept:
                    await p.wait_visible(one)
                else:
                    with pytest.raises(Refused) as caught:
                        await p.wait_visible(one)
                    assert caught.value.code is ErrorCode.LOG_FAILED

    run_virtual(main)


def test_a_watermark_counts_only_what_is_kept() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            receipt = producer.offer(made("a"))
            assert receipt.state is OfferState.APPENDED
            assert (producer.watermark(), p.producer("other").watermark()) == (0, 0)
            await receipt
            assert producer.watermark(Priority.NORMAL) == 1

    run_virtual(main)


def test_a_disk_that_does_not_tell_its_room_refuses_and_is_asked_again() -> None:
    async def main() -> None:
        disk = SimDisk(1, capacity_bytes=50_000)
        async with service(disk, log=replace(ANY, free_bytes_min=100_000)) as p:
            disk.fail(lambda call: call.name == "free_bytes", times=None)
            with pytest.raises(Refused, match="does not report its free space") as caught:
                await p.publish(made("a"), timeout_s=2)
            assert caught.value.code is ErrorCode.LOG_FULL

    run_virtual(main)
