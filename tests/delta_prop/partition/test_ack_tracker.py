"""An append alone causes neither acks nor deliveries: the log's written and synced offsets do."""

from __future__ import annotations

import anyio
import pytest

from delta_prop.calls.receipt import OfferState
from delta_prop.testing import run_virtual
from delta_prop_broker.log.memory import MemoryLog
from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, create, opaque
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import Bench, batch_of
from tests.delta_prop.support import make_delta


class SlowLog(MemoryLog):
    """A log whose written and synced offsets the test sets."""

    ack_level = AckLevel.DURABLE
    written = synced = 0

    @property
    def high_watermark(self) -> int:
        return self.synced

    def offset_at_level(self, level: AckLevel) -> int:
        return {AckLevel.MEMORY: self.next_offset, AckLevel.LOGGED: self.written}.get(level, self.synced)


class SlowBench(Bench):
    """A pipeline with a `SlowLog`, which is `slow`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = self.pipeline.log = self.pipeline.appender.log = SlowLog(bytes(16))
        self.pipeline.ack_tracker._log = self.slow

    def set_offsets(self, written: int, synced: int) -> None:
        self.slow.written, self.slow.synced = written, synced
        self.pipeline.ack_tracker.advance()


def batch_at_level(bench: SlowBench, key: str, level: AckLevel) -> Batch:
    origin = bench.hello(key)
    return batch_of(origin, 1, make_delta(key), ack_level=level)


def test_acks_follow_their_level_and_delivery_follows_the_high_watermark() -> None:
    bench = SlowBench()
    levels = (AckLevel.MEMORY, AckLevel.LOGGED, AckLevel.DURABLE)
    receipts = [bench.send(batch_at_level(bench, level.name, level)) for level in levels]
    assert [receipt.state for receipt in receipts] == [
        OfferState.ACKNOWLEDGED,
        OfferState.APPENDED,
        OfferState.APPENDED,
    ]
    assert bench.routed == []
    bench.set_offsets(1, 0)
    assert [receipt.acknowledged for receipt in receipts] == [True, False, False]
    bench.set_offsets(2, 1)
    assert [receipt.acknowledged for receipt in receipts] == [True, True, False]
    assert bench.keys() == ["MEMORY"]
    bench.set_offsets(3, 3)
    assert all(receipt.acknowledged for receipt in receipts)
    assert bench.keys() == ["MEMORY", "LOGGED", "DURABLE"]
    assert not any(bench.pipeline.ack_tracker._pending_acks)


def test_sinks_get_batch_before_its_ack() -> None:
    bench, seen = SlowBench(), []
    receipt = bench.send(batch_at_level(bench, "a", AckLevel.DURABLE))
    receipt.add_done_callback(lambda _: seen.append(bench.keys()))
    bench.set_offsets(1, 1)
    assert seen == [["a"]]


def test_duplicate_is_acked_when_first_copy_reaches_level() -> None:
    bench = SlowBench()
    batch = batch_at_level(bench, "a", AckLevel.DURABLE)
    first, duplicate = bench.send(batch), bench.send(batch)
    assert (first.state, duplicate.state) == (OfferState.APPENDED, OfferState.APPENDED)
    bench.set_offsets(1, 0)
    assert not duplicate.done
    bench.set_offsets(1, 1)
    assert duplicate.result().duplicates == {0: 0}
    assert bench.send(batch).acknowledged
    assert bench.keys() == ["a"]


def test_duplicates_are_acked_in_offset_order() -> None:
    bench, reported = SlowBench(), list[str]()
    batches = {key: batch_at_level(bench, key, AckLevel.DURABLE) for key in "abc"}
    for name in ("a", "b", "c", "a, duplicate", "b, duplicate", "a, second duplicate"):
        bench.send(batches[name[0]]).add_done_callback(lambda _, name=name: reported.append(name))  # type: ignore[misc]
    bench.set_offsets(3, 1)
    assert reported == ["a", "a, duplicate", "a, second duplicate"]
    bench.set_offsets(3, 3)
    assert reported[3:] == ["b", "b, duplicate", "c"]


def test_final_refusal_is_reported_when_its_noop_is_durable() -> None:
    bench = SlowBench()
    origin = bench.hello("p")
    bad = bench.send(batch_of(origin, 1, Delta("v", create([float("nan")])), ack_level=AckLevel.DURABLE))
    assert bad.state is OfferState.APPENDED
    bench.set_offsets(1, 1)
    refusal = bad.refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.INVALID_DELTA


def test_appended_batch_cannot_be_withdrawn_or_block_others() -> None:
    bench = SlowBench()
    first = bench.send(batch_at_level(bench, "a", AckLevel.DURABLE))
    assert not first.withdraw()
    origin = bench.hello("a-child")
    second = bench.send(batch_of(origin, 1, make_delta("b"), ack_level=AckLevel.DURABLE))
    assert second.state is OfferState.APPENDED
    bench.set_offsets(2, 2)
    assert first.acknowledged
    assert second.acknowledged


def test_log_failure_refuses_pending_acks_and_stops_delivery() -> None:
    bench = SlowBench()
    receipts = [bench.send(batch_at_level(bench, key, AckLevel.DURABLE)) for key in ("a", "b")]
    bench.set_offsets(1, 1)
    bench.pipeline.ack_tracker.fail(Refused(ErrorCode.LOG_FAILED, "the disk is gone", retry_after_ms=1000))
    assert receipts[0].acknowledged
    refusal = receipts[1].refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FAILED
    bench.set_offsets(2, 2)
    assert bench.keys() == ["a"]


def test_producer_keeps_appended_batch_in_flight_until_ack() -> None:
    bench = SlowBench()
    producer = bench.producer("p")
    producer._ack_level = AckLevel.DURABLE
    receipt = producer.offer(Delta("v", opaque(b"x")))
    assert (receipt.state, producer.in_flight_batches) == (OfferState.APPENDED, 1)
    bench.set_offsets(1, 1)
    assert (receipt.state, producer.in_flight_batches) == (OfferState.ACKNOWLEDGED, 0)


@pytest.mark.parametrize("durable_after_s", [0.5, None])
def test_cancelled_caller_waits_for_commit_in_progress(durable_after_s: float | None) -> None:
    async def main() -> None:
        bench, reported = SlowBench(), []
        receipt = bench.send(batch_at_level(bench, "a", AckLevel.DURABLE))
        async with anyio.create_task_group() as tasks:

            async def caller() -> None:
                with anyio.move_on_after(0.1):
                    reported.append((await receipt.wait()).offset)

            tasks.start_soon(caller)
            if durable_after_s is not None:
                await anyio.sleep(durable_after_s)
                bench.set_offsets(1, 1)
        assert reported == ([0] if durable_after_s is not None else [])
        assert anyio.current_time() == pytest.approx(durable_after_s or 30.1)

    run_virtual(main)


def test_failing_callback_does_not_block_other_outcomes(caplog: pytest.LogCaptureFixture) -> None:
    bench = SlowBench()
    first, second = (bench.send(batch_at_level(bench, key, AckLevel.DURABLE)) for key in "ab")

    def fail(_: object) -> None:
        raise RuntimeError("the caller's own")

    first.add_done_callback(fail)
    bench.set_offsets(2, 2)
    assert first.acknowledged
    assert second.acknowledged
    assert "the caller's own" in caplog.text

    third, fourth = (bench.send(batch_at_level(bench, key, AckLevel.DURABLE)) for key in "cd")
    third.add_done_callback(fail)
    bench.pipeline.ack_tracker.fail(Refused(ErrorCode.LOG_FAILED, "gone"))
    assert third.done
    assert fourth.done
