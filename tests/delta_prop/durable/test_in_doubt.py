"""A delta that has an offset when the log fails is in doubt: its outcome is reported after the recovery."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.calls.receipt import OfferState
from delta_prop.testing import run_virtual
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel, Dot, Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.test_reopening import NO_RESERVE, contents, make_delta, service
from tests.delta_prop.durable.test_reopening_answers import LOGGED, break_disk, wait_until_recovered

if TYPE_CHECKING:
    from delta_prop.api.producer import Producer
    from delta_prop.api.propagator import Propagator

LOG_FILE = "streams/default/0/00000000000000000000.log"


@pytest.mark.parametrize("survives", [True, False])
def test_offer_in_doubt_is_resolved_by_the_recovery(survives: bool) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            # `mark`, the recovery point file, is written after the sync: if only it fails, the deltas survive
            break_disk(disk, "write", ending="mark" if survives else "")
            receipts = [p.offer(make_delta("a")), producer.offer(make_delta("b"))]
            await anyio.sleep(5)
            assert [receipt.state for receipt in receipts] == [OfferState.IN_DOUBT] * 2
            await wait_until_recovered(p, disk)
            offsets = await contents(disk)
            for key, receipt in zip("ab", receipts, strict=True):
                assert receipt.acknowledged == (key in offsets), "the answer must agree with the log"
                if key in offsets:
                    assert receipt.result().offset == offsets[key]
                else:
                    assert receipt.refusal().code is ErrorCode.LOG_FAILED
            assert len(offsets) == (2 if survives else 0), "the disk must give the outcome under test"

    run_virtual(main)


@pytest.mark.parametrize("survives", [True, False])
@pytest.mark.parametrize("with_producer", [True, False])
def test_timeout_in_doubt_names_a_dot_whose_outcome_is_known_after_recovery(
    survives: bool, with_producer: bool
) -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            # `mark`, the recovery point file, is written after the sync: if only it fails, the deltas survive
            break_disk(disk, "write", ending="mark" if survives else "")
            start_s = p.internals().partition.world.clock.now()
            with pytest.raises(Refused, match="may have happened") as caught:
                await (producer if with_producer else p).publish(make_delta("a"), timeout_s=3)
            assert p.internals().partition.world.clock.now() - start_s < 4, "the timeout must be respected"
            assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN
            dot = caught.value.details["dot"]
            assert isinstance(dot, Dot)
            with pytest.raises(Refused) as second:
                await p.outcome(dot, timeout_s=2)
            assert (second.value.code, second.value.details) == (ErrorCode.OUTCOME_UNKNOWN, {"dot": dot})
            await wait_until_recovered(p, disk)
            if with_producer:
                producer.resend()
            outcome = await p.outcome(dot)
            offsets = await contents(disk)
            assert offsets == ({"a": 0} if survives else {})
            if survives:
                assert outcome == 0
            else:  # a producer fills the dot with a no-op, so no other delta gets it
                assert outcome is (ErrorCode.INVALID_DELTA if with_producer else None)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(40))
def test_refused_delta_is_never_stored_after_a_failure(seed: int) -> None:
    disk, acknowledged, refused = SimDisk(seed), dict[str, int](), set[str]()

    async def publish(key: str, publisher: Propagator | Producer) -> None:
        try:
            published = await publisher.publish(make_delta(key), timeout_s=0.2)
        except Refused as refusal:
            if refusal.code is not ErrorCode.OUTCOME_UNKNOWN:
                refused.add(key)
        else:
            assert published.offset is not None
            acknowledged[key] = published.offset

    async def main() -> None:
        async with service(disk, seed) as p, anyio.create_task_group() as tasks:
            producer, first_failing_call = p.producer("me"), disk.calls + seed % 7 + 1
            disk.fail(
                lambda call: call.number >= first_failing_call and call.name in ("sync", "write"), times=None
            )
            for number in range(6):
                tasks.start_soon(publish, f"d{number}", p)
                tasks.start_soon(publish, f"h{number}", producer)
            await anyio.sleep(1)
            await wait_until_recovered(p, disk)
            producer.resend()
            await anyio.sleep(1)
        offsets = await contents(disk)
        assert acknowledged.items() <= offsets.items()
        assert not refused & offsets.keys(), "a delta refused as not stored must not be stored"

    run_virtual(main)


def test_cancelled_publish_in_doubt_ends_at_once() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            break_disk(disk, "sync")
            for publisher in (p, producer):
                start_s = p.internals().partition.world.clock.now()
                with anyio.move_on_after(2) as scope:
                    await publisher.publish(make_delta("a"))
                assert scope.cancelled_caught
                assert p.internals().partition.world.clock.now() - start_s < 3
            await wait_until_recovered(p, disk)

    run_virtual(main)


@pytest.mark.parametrize("seed", range(6))
def test_queries_wait_for_the_end_of_the_recovery(seed: int) -> None:
    async def main() -> None:
        disk = SimDisk(seed)
        async with service(disk, log=LOGGED) as p, anyio.create_task_group() as tasks:
            producer = p.producer("me", ack_level=AckLevel.LOGGED)
            published, outcomes = await producer.publish(make_delta("a")), list[ErrorCode | None]()
            break_disk(disk, "sync", "sync_directory")
            p.offer(make_delta("x"))
            await anyio.sleep(1)
            for query in (lambda: p.producer("other"), producer.watermark):
                with pytest.raises(Refused) as caught:
                    query()
                assert caught.value.code is ErrorCode.LOG_FAILED
            with pytest.raises(Refused) as caught:
                await producer.outcome(1, timeout_s=1)
            assert caught.value.code is ErrorCode.OUTCOME_UNKNOWN

            async def wait() -> None:
                try:
                    await p.wait_visible(published)
                except Refused as refusal:
                    outcomes.append(refusal.code)
                else:
                    outcomes.append(None)

            tasks.start_soon(wait)
            await anyio.sleep(1)
            assert outcomes == []
            disk.evict(LOG_FILE)
            await wait_until_recovered(p, disk)
            await anyio.sleep(1)
            offsets = await contents(disk)
            survived = "a" in offsets
            assert outcomes == [None if survived else ErrorCode.LOG_FAILED]
            assert await producer.outcome(1) == (0 if survived else None)
            assert producer.watermark() == int(survived)

    run_virtual(main)


def test_only_synced_rows_become_visible_on_a_failed_log() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            published = await p.publish(make_delta("a"))
            break_disk(disk, "write", "sync", "sync_directory")
            receipt = p.offer(make_delta("x"))
            await anyio.sleep(1)
            with pytest.raises(Refused) as caught:
                p.head("a")
            assert caught.value.code is ErrorCode.LOG_FAILED
            await p.wait_visible(published, timeout_s=1)
            for waited in (receipt, p.statistics().log.next_offset):
                start_s = p.internals().partition.world.clock.now()
                with pytest.raises(TimeoutError):
                    await p.wait_visible(waited, timeout_s=2)
                assert p.internals().partition.world.clock.now() - start_s < 3
            assert receipt.state is OfferState.IN_DOUBT, "nothing must be withdrawn"
            await wait_until_recovered(p, disk)
            with suppress(Refused):
                await receipt
            assert receipt.acknowledged == ("x" in await contents(disk))

    run_virtual(main)


@pytest.mark.parametrize("seed", range(4))
def test_duplicate_lost_in_a_recovery_is_not_visible(seed: int) -> None:
    async def main() -> None:
        disk = SimDisk(seed)
        async with service(disk, log=LOGGED) as p:
            await p.publish(make_delta("a"))
            break_disk(disk, "sync", "sync_directory")
            x = replace(make_delta("x"), id=bytes(16))
            acks = [await p.publish(x, ack_level=AckLevel.LOGGED) for _ in range(2)]
            assert acks[1].duplicate
            p.offer(make_delta("y"), ack_level=AckLevel.DURABLE)
            await anyio.sleep(1)
            disk.evict(LOG_FILE)
            await wait_until_recovered(p, disk)
            survived = "x" in await contents(disk)
            await p.publish(make_delta("b"), make_delta("c"), make_delta("d"))
            for ack in acks:
                if survived:
                    await p.wait_visible(ack)
                else:
                    with pytest.raises(Refused) as caught:
                        await p.wait_visible(ack)
                    assert caught.value.code is ErrorCode.LOG_FAILED

    run_virtual(main)


def test_watermark_counts_only_stored_rows() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer = p.producer("me")
            receipt = producer.offer(make_delta("a"))
            assert receipt.state is OfferState.APPENDED
            assert (producer.watermark(), p.producer("other").watermark()) == (0, 0)
            await receipt
            assert producer.watermark(Priority.NORMAL) == 1

    run_virtual(main)


def test_disk_that_reports_no_free_space_refuses_appends() -> None:
    async def main() -> None:
        disk = SimDisk(1, capacity_bytes=50_000)
        async with service(disk, log=replace(NO_RESERVE, free_bytes_min=100_000)) as p:
            disk.fail(lambda call: call.name == "free_bytes", times=None)
            with pytest.raises(Refused, match="does not report its free space") as caught:
                await p.publish(make_delta("a"), timeout_s=2)
            assert caught.value.code is ErrorCode.LOG_FULL

    run_virtual(main)
