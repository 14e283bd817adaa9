"""Answers to callers when the log's disk fails, and their state after the log is recovered."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop.calls.receipt import OfferState, Receipt
from delta_prop.testing import run_virtual
from delta_prop_broker.corruption import LogBusy
from delta_prop_broker.log.durable import DurableLog
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.durable.test_reopening import NO_RESERVE, contents, make_delta, service

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator

LOGGED = replace(NO_RESERVE, read_level=AckLevel.LOGGED)


def break_disk(disk: SimDisk, *names: str, ending: str = "", times: int | None = None) -> None:
    """Make these calls fail from now on, for files whose paths end in `ending`."""
    disk.fail(lambda call: call.name in names and call.path.endswith(ending), errno.EIO, times=times)


async def wait_until_recovered(p: Propagator, disk: SimDisk) -> None:
    disk.heal()
    for _ in range(100):
        await anyio.sleep(0.5)
        reopening = p.statistics().reopening
        assert reopening is not None
        if reopening.reopened and not reopening.failed:
            break


def code_of(error: Refused | None) -> ErrorCode | None:
    return None if error is None else error.code


def test_rows_synced_before_the_failure_are_acknowledged_once() -> None:
    async def main() -> None:
        disk, acks = SimDisk(1), []
        async with service(disk) as p, anyio.create_task_group() as tasks:
            producer = p.producer("me")
            await p.publish(make_delta("first"))

            async def publish() -> None:
                acks.append(await p.publish(make_delta("a"), make_delta("b")))

            async def produce() -> None:
                acks.append(await producer.publish(make_delta("c"), timeout_s=100))

            break_disk(disk, "write", ending="mark")  # after the sync: the deltas are stored
            tasks.start_soon(publish)
            tasks.start_soon(produce)
            await anyio.sleep(0.1)
            assert acks == []
            late_offer = p.offer(make_delta("refused"))
            assert code_of(late_offer.refusal()) is ErrorCode.LOG_FAILED
            await wait_until_recovered(p, disk)
        assert sorted((ack.offset, ack.level) for ack in acks) == [
            (1, AckLevel.DURABLE),
            (3, AckLevel.DURABLE),
        ]
        assert await contents(disk) == {"first": 0, "a": 1, "b": 2, "c": 3}

    run_virtual(main)


def test_duplicate_between_write_and_sync_waits_for_the_sync() -> None:
    async def main() -> None:
        disk = SimDisk(7)
        async with service(disk) as p:
            producer = p.producer("me")
            first = producer.offer(make_delta("a"))
            break_disk(disk, "sync", times=1)
            frame = next(iter(producer._lanes[Priority.NORMAL].unacked.values())).batch
            duplicate = producer.send_frame(frame)
            assert (first.state, duplicate.state) == (OfferState.APPENDED, OfferState.APPENDED)
            for receipt in (first, duplicate):
                with pytest.raises(Refused) as caught:
                    await receipt.wait()
                assert caught.value.code is ErrorCode.LOG_FAILED
            image = disk.crash(3)
            await wait_until_recovered(p, disk)
            retries = [producer.send_frame(frame), producer.send_frame(frame)]
            assert [retry.state for retry in retries] == [OfferState.APPENDED] * 2
            assert {(await retry.wait()).offset for retry in retries} == {0}
            producer.resend()
            assert producer.in_flight_batches == 0
            assert await contents(disk) == {"a": 0}
            assert len(await contents(image)) <= 1

    run_virtual(main)


def test_pending_offers_are_refused_at_once_and_resent_later() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            parent, child = p.producer("parent"), p.producer("child")
            waiting = child.offer(
                Delta(
                    "v", make_delta("v").operation, parents=(Dot(parent._lanes[Priority.NORMAL].origin, 1),)
                )
            )
            draft = p.offer(make_delta("w"), after=[waiting])
            assert (waiting.state, draft.state) == (OfferState.PENDING, OfferState.PENDING)
            break_disk(disk, "sync")
            p.offer(make_delta("x"))
            await anyio.sleep(0.1)
            for receipt in (waiting, draft):
                assert code_of(receipt.refusal()) is ErrorCode.LOG_FAILED
            assert (p.statistics().pending.pending_deltas, p.statistics().queue.depth) == (0, 0)
            await wait_until_recovered(p, disk)
            child.resend()
            await parent.publish(make_delta("u"))
            await anyio.sleep(0.1)
            assert child.in_flight_batches == 0
            assert (await contents(disk)).keys() >= {"u", "v"}

    run_virtual(main)


def test_lost_counters_acknowledged_at_a_lower_level_are_filled() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        async with service(disk) as p:
            await p.attach(CallbackSink(lambda offset, delta: seen.append((offset, delta.vector_id))))
            producer = p.producer("me", ack_level=AckLevel.MEMORY)
            await producer.publish(make_delta("a"))
            await p.wait_visible(1)
            break_disk(disk, "write", ending=".log")
            for key in ("b", "c", "d"):
                assert (await producer.publish(make_delta(key))).level is AckLevel.MEMORY
            await anyio.sleep(0.1)
            await wait_until_recovered(p, disk)
            assert producer.watermark() < 4
            published = await producer.publish(make_delta("e"), timeout_s=10)
            assert published.dot is not None
            assert published.dot.counter == 5, "an acknowledged dot must not be given twice"
            assert await producer.outcome(4) is ErrorCode.DOT_REUSED
            await p.wait_visible(published)
            assert producer.watermark() == 5
            assert [key for _, key in seen] == ["a", "e"]
        async with service(disk) as p:
            assert p.producer("me").watermark() == 5

    run_virtual(main)


def test_recovery_keeps_fencing_and_the_lock() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            old = p.producer("me")
            await old.publish(make_delta("a"))
            new = p.producer("me")
            break_disk(disk, "sync")
            p.offer(make_delta("x"))
            await anyio.sleep(0.3)
            with pytest.raises(LogBusy):
                async with service(disk):
                    pass
            await wait_until_recovered(p, disk)
            with pytest.raises(Refused) as caught:
                await old.publish(make_delta("b"))
            assert caught.value.code is ErrorCode.FENCED
            assert (await new.publish(make_delta("c"))).dot == Dot(new._lanes[Priority.NORMAL].origin, 2)

    run_virtual(main)


def test_sink_ahead_of_a_lost_tail_stops_and_others_continue() -> None:
    async def main() -> None:
        disk, quick_offsets, other_offsets = SimDisk(1), [], []
        async with service(disk, log=LOGGED) as p:
            await p.attach(CallbackSink(lambda offset, _: quick_offsets.append(offset), name="quick"))
            await p.attach(
                CallbackSink(lambda offset, _: other_offsets.append(offset), name="other"), topics="v:nothing"
            )
            await p.publish(make_delta("a"))
            await p.publish(make_delta("b"), ack_level=AckLevel.LOGGED)
            await p.wait_visible(2)
            assert quick_offsets == [0, 1]
            await anyio.sleep(2)
            cursors = json.loads(disk.peek("cursors").split(b"\n", 1)[1])["cursors"]
            assert [cursor[1] for cursor in cursors.values()] == [1, 1], (
                "cursors must not pass the synced rows"
            )
            break_disk(disk, "sync", times=1)
            with pytest.raises(Refused):
                await p.publish(make_delta("c"), timeout_s=0.01)
            disk.evict("streams/default/0/00000000000000000000.log")
            await wait_until_recovered(p, disk)
            end = p.recovery.next_offset if p.recovery is not None else -1
            assert end < 2, "the log must have lost a row"
            sinks = p.statistics().sinks
            assert (sinks["quick"].state, sinks["other"].state) == ("needs snapshot", "idle")
            assert "is ahead" in (sinks["quick"].reason or "")
            reader = p.subscribe(start="earliest")
            published = await p.publish(make_delta("d"))
            await p.wait_visible(published, sinks=["other"])
            assert sinks["other"].lag == 0
            async with reader:
                async for delivered in reader:
                    if delivered.delta.vector_id == "d":
                        break
            p.restart("quick")
            await anyio.sleep(1)
            assert quick_offsets == [0, 1], "the sink must not resume at an offset that now holds another row"

    run_virtual(main)


def test_clean_close_syncs_the_log_and_its_cursors() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        for _ in range(2):
            async with service(disk, log=LOGGED) as p:
                await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="one"))
                if not seen:
                    await p.publish(make_delta("a"), make_delta("b"), ack_level=AckLevel.LOGGED)
                    await p.wait_visible(2)
        assert seen == [0, 1], "after a clean close no row may be redelivered"

    run_virtual(main)


def test_corruption_stops_the_log_for_good_and_refuses_at_once() -> None:
    async def main() -> None:
        disk, seen = SimDisk(1), []
        async with service(disk) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset)))
            await p.publish(make_delta("a"))
            break_disk(disk, "write", ending=".log", times=1)
            disk.flip("streams/default/0/00000000000000000000.log", 90)
            for number, code in enumerate(
                (ErrorCode.OUTCOME_UNKNOWN, ErrorCode.LOG_FAILED, ErrorCode.LOG_FAILED)
            ):
                with pytest.raises(Refused, match="log verify") as caught:
                    await (p if number < 2 else p.producer("me")).publish(make_delta("b"))
                assert (caught.value.code, caught.value.retry_after_ms) == (code, None)
            reopening = p.statistics().reopening
            assert reopening is not None
            assert (reopening.failed, reopening.next_try_s) == (True, None)
            tries = reopening.tries
            await anyio.sleep(100)
            assert p.statistics().reopening == replace(reopening, tries=tries)
            assert seen == [0]

    run_virtual(main)


def test_service_closes_in_the_middle_of_an_outage() -> None:
    async def main() -> None:
        for wait_s in (0.0, 0.03, 0.2, 5.0):
            disk = SimDisk(1)
            async with service(disk) as p:
                await p.publish(make_delta("a"))
                break_disk(disk, "sync", "write")
                receipt = p.offer(make_delta("b"))
                await anyio.sleep(wait_s)
            assert receipt.done
            disk.heal()
            async with service(disk) as p:
                await p.publish(make_delta("c"))

    run_virtual(main)


def test_recovery_waits_for_a_running_segment_compression() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, log=replace(NO_RESERVE, segment_bytes_max=300, compress="lz4")) as p:
            log = p.internals().partition.log
            assert isinstance(log, DurableLog)
            for number in range(5):
                await p.publish(make_delta(f"v{number}"))
            compression_run = log.take_compression()
            assert compression_run is not None
            break_disk(disk, "sync", times=1)
            receipt = p.offer(make_delta("x"))
            await anyio.sleep(5)
            assert receipt.state is OfferState.IN_DOUBT
            reopening = p.statistics().reopening
            assert reopening is not None
            assert (reopening.failed, reopening.reopened) == (True, 0)
            while not compression_run.step():  # its last step replaces the file
                pass
            compression_run.close()
            log.finish_compression(compression_run)
            await wait_until_recovered(p, disk)
            assert (await contents(disk)).keys() >= {f"v{number}" for number in range(5)}
            late_offsets: list[int] = []
            await p.attach(
                CallbackSink(lambda offset, _: late_offsets.append(offset), name="late"), start="earliest"
            )
            await p.wait_visible(5, sinks=["late"])
            assert late_offsets[:5] == [0, 1, 2, 3, 4]

    run_virtual(main)


# --- disk space


def test_full_disk_refuses_before_writing_and_recovers_with_space() -> None:
    async def main() -> None:
        disk, offsets = SimDisk(1, capacity_bytes=200_000), []
        log = replace(NO_RESERVE, segment_bytes_max=10_000, bytes_max=150_000, retention_bytes=150_000)
        log = replace(log, free_bytes_min=10_000, reserve_bytes=30_000)
        async with service(disk, log=log) as p, anyio.create_task_group() as tasks:
            assert p.statistics().log.reserve_bytes == 30_000
            await p.attach(CallbackSink(lambda _at, _delta: None, name="slow"))
            await p.publish(make_delta("a"))
            disk.put("others", bytes(disk.free_bytes() - 5_000))

            async def publish(key: str) -> None:
                offsets.append((await p.publish(make_delta(key), timeout_s=1000)).offset)

            tasks.start_soon(publish, "b")
            await anyio.sleep(3)
            assert offsets == [1], "the free space is polled at each commit"
            # Other files take the last byte: cursors are still written, out of the reserve.
            disk.put("others", disk.peek("others") + bytes(disk.free_bytes()))
            await p.attach(CallbackSink(lambda _at, _delta: None, name="another"))
            await anyio.sleep(5)
            assert p.statistics().log.reserve_bytes == 0
            tasks.start_soon(publish, "c")
            await anyio.sleep(5)
            assert offsets == [1]
            reopening = p.statistics().reopening
            assert reopening is not None
            assert reopening.reopened == reopening.tries == 0, "refused before anything was written"
            disk.remove("others")
            await anyio.sleep(40)
            assert sorted(offsets) == [1, 2]
            assert p.statistics().log.reserve_bytes == 30_000
        disk.put("others", bytes(disk.free_bytes()))
        async with service(disk, log=log) as p:  # a full disk opens
            assert p.statistics().log.next_offset == 3
            with pytest.raises(Refused) as caught:
                await p.publish(make_delta("d"), timeout_s=1)
            assert caught.value.code is ErrorCode.LOG_FULL

    run_virtual(main)


def test_idle_log_seals_and_removes_its_last_segment() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk, log=replace(NO_RESERVE, segment_s_max=60, retention_s=120)) as p:
            await p.publish(make_delta("a"))
            await anyio.sleep(50)
            assert p.statistics().log.segments == 1
            await anyio.sleep(20)
            assert p.statistics().log.segments == 2
            await anyio.sleep(100)
            assert (p.statistics().log.start_offset, p.statistics().log.segments) == (1, 1)
            await p.publish(make_delta("b"))
        assert await contents(disk) == {"b": 1}

    run_virtual(main)


def test_in_flight_batch_is_resent_unchanged_beside_another_lane() -> None:
    async def main() -> None:
        disk = SimDisk(1)
        async with service(disk) as p:
            producer, receipts = p.producer("me"), dict[int, Receipt]()

            def offer(number: int, priority: Priority) -> None:
                delta = replace(make_delta(str(number)), priority=priority)
                producer.offer_numbered(number, delta, lambda receipt: receipts.update({number: receipt}))

            offer(1, Priority.NORMAL)
            await anyio.sleep(1)
            break_disk(disk, "write", ending=".log")
            offer(2, Priority.HIGH)
            offer(3, Priority.NORMAL)
            await anyio.sleep(1)
            assert not receipts[3].acknowledged
            await wait_until_recovered(p, disk)
            with suppress(Refused):
                producer.resend()
            await anyio.sleep(1)
            assert [receipts[number].acknowledged for number in (1, 2, 3)] == [True] * 3
            assert list(await contents(disk)) == ["1", "2", "3"]

    run_virtual(main)
