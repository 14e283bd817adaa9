"""The producer: how dots are drawn, and how its batches are retried in order, withdrawn and fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

import delta_prop.api.producer
from delta_prop.api.settings import Settings
from delta_prop.calls.receipt import OfferState
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CallbackSink
from delta_prop_wire.delta import Delta, Dot, Priority, create, offset, transform
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.partition.pipeline_bench import Bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.api.producer import Producer


def make_delta(key: str, **more: Any) -> Delta:
    return Delta(key, create([1.0, 2.0]), **more)


def full_bench() -> Bench:
    """Return a bench whose log is full until its holder is released."""
    bench = Bench(log_deltas_max=1)
    bench.publish(make_delta("filler"))
    bench.log.hold("slow", lambda: 0)
    return bench


def free_log_space(bench: Bench) -> None:
    bench.log.release("slow")


# --- dots


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (lambda p: p.offer(Delta("", create([1.0]))), "vector_id"),
        (lambda p: p.offer(make_delta("a"), Delta("v", create([float("nan")]))), "vector"),
        (lambda p: p.offer(make_delta("a", id=b"i" * 16), make_delta("b")), "id"),
        (lambda p: p.offer(Delta("v", transform("normalize"))), "propagator's publish"),
        (lambda p: p.offer(), "give 1 to"),
        (lambda p: p.offer(make_delta("a"), after=[Dot(1, n) for n in range(1, 100)]), "parents"),
        (lambda p: p.offer(make_delta("a"), make_delta("b", priority=Priority.LOW)), "call of its own"),
    ],
)
def test_invalid_offer_is_rejected_before_a_dot_is_drawn(
    send: Callable[[Producer], object], message: str
) -> None:
    bench = Bench()
    with pytest.raises(InvalidDelta, match="producer: 0 bytes"):
        bench.producer("")
    producer = bench.producer("p")
    with pytest.raises((InvalidDelta, UsageError), match=message):
        send(producer)
    published = producer.offer(make_delta("a")).result()
    assert published.dot is not None
    assert published.dot.counter == 1
    assert producer.in_flight_batches == 0


def test_final_refusal_uses_its_dot_and_next_offer_succeeds() -> None:
    bench = Bench()
    producer = bench.producer("p")
    refusal = producer.offer(Delta("unknown", offset(1.0))).refusal()
    assert isinstance(refusal, InvalidDelta)
    assert producer.watermark() == 1
    assert producer.offer(make_delta("a")).result().dot == Dot(bench.hello("p"), 2)
    assert producer.in_flight_batches == 0


def test_new_handle_continues_at_watermark_of_each_lane() -> None:
    bench = Bench()
    first = bench.producer("p")
    for _ in range(3):
        first.offer(make_delta("a"), make_delta("b"))
    first.offer(make_delta("c", priority=Priority.HIGH))
    second = bench.producer("p")
    assert (second.watermark(), second.watermark(Priority.HIGH), second.watermark(Priority.LOW)) == (6, 1, 0)
    dots = [
        second.offer(make_delta("d")).result().dot,
        second.offer(make_delta("e", priority=Priority.HIGH)).result().dot,
    ]
    assert [dot and dot.counter for dot in dots] == [7, 2]


def test_fenced_handle_is_refused_and_draws_no_more_dots() -> None:
    bench = Bench()
    first, second = bench.producer("p"), bench.producer("p")
    refusal = first.offer(make_delta("a")).refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.FENCED
    for _ in range(3):
        with pytest.raises(Refused, match="give it its own name"):
            first.offer(make_delta("a"))
    assert first.in_flight_batches == 1
    assert second.offer(make_delta("b")).result().offset == 0


def test_pending_delta_of_fenced_handle_is_refused() -> None:
    bench = Bench()
    waiting = bench.producer("p").offer(make_delta("child", parents=(Dot(1 << 20, 1),)))
    assert waiting.state is OfferState.PENDING
    second = bench.producer("p")
    refusal = waiting.refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.FENCED
    assert second.offer(make_delta("b")).result().dot == Dot(bench.hello("p"), 1)


# --- retries


def test_retryable_refusal_keeps_its_dot_and_is_sent_first() -> None:
    bench = full_bench()
    producer = bench.producer("p")
    receipt = producer.offer(make_delta("a"))
    refusal = receipt.refusal()
    assert refusal is not None
    assert refusal.code is ErrorCode.LOG_FULL
    with pytest.raises(Refused, match="still needs the oldest"):
        producer.offer(make_delta("b"))
    assert (producer.in_flight_batches, producer.watermark()) == (1, 0)
    free_log_space(bench)
    assert producer.offer(make_delta("c")).result().dot == Dot(bench.hello("p"), 2)
    assert bench.keys() == ["filler", "a", "c"]
    assert producer.in_flight_batches == 0


def test_publishers_of_one_handle_wait_and_keep_their_order() -> None:
    async def main(p: RecordedPropagator) -> None:
        producer = p.producer("p")
        opened = anyio.Event()

        async def slow(*_: object) -> None:
            await opened.wait()

        await p.attach(CallbackSink(slow))
        dots: dict[str, int] = {}

        async def publish(key: str) -> None:
            published = await producer.publish(make_delta(key), timeout_s=100)
            assert published.dot is not None
            dots[key] = published.dot.counter

        async with anyio.create_task_group() as tasks:
            for n in range(20):
                tasks.start_soon(publish, f"v{n:02}")
                await anyio.sleep(0.001)
            await anyio.sleep(5)
            assert len(dots) == 4
            opened.set()
        await p.settle()
        assert len(dots) == 20
        assert p.recorder.vector_ids == sorted(dots, key=lambda key: dots[key])
        assert sorted(dots.values()) == list(range(1, 21))
        assert producer.in_flight_batches == 0

    run_propagator(main, Settings(log_deltas_max=4))


def test_publish_timeout_on_full_log_leaves_a_noop() -> None:
    async def main(p: RecordedPropagator) -> None:
        opened = anyio.Event()

        async def slow(*_: object) -> None:
            await opened.wait()

        await p.attach(CallbackSink(slow))
        producer = p.producer("p")
        await producer.publish(make_delta("a"))
        with pytest.raises(Refused, match="still needs the oldest"):
            await producer.publish(make_delta("b"), timeout_s=2)
        assert anyio.current_time() == pytest.approx(2, abs=0.1)
        opened.set()
        await p.settle()
        published = await producer.publish(make_delta("c"))
        await p.settle()
        assert published.dot is not None
        assert published.dot.counter == 3
        assert p.recorder.vector_ids == ["a", "c"]
        assert p.statistics().noops == 1

    run_propagator(main, Settings(log_deltas_max=1))


def test_publish_timeout_on_missing_parent_is_dep_timeout() -> None:
    async def main(p: RecordedPropagator) -> None:
        producer = p.producer("p")
        with pytest.raises(Refused, match="withdrawn") as caught:
            await producer.publish(make_delta("child", parents=(b"p" * 16,)), timeout_s=1)
        assert caught.value.code is ErrorCode.DEP_TIMEOUT
        published = await producer.publish(make_delta("next"))
        assert published.dot is not None
        assert published.dot.counter == 2
        await p.publish(make_delta("parent", id=b"p" * 16))
        await p.settle()
        assert p.recorder.vector_ids == ["next", "parent"]
        assert p.statistics().noops == 1

    run_propagator(main)


# --- withdrawn offers


def test_publish_cancelled_while_pending_is_never_applied() -> None:
    async def main(p: RecordedPropagator) -> None:
        producer = p.producer("p")
        with anyio.move_on_after(1) as scope:
            await producer.publish(make_delta("never", parents=(b"p" * 16,)))
        assert scope.cancelled_caught
        await p.publish(make_delta("parent", id=b"p" * 16))
        await producer.publish(make_delta("next"))
        await p.settle()
        assert p.recorder.vector_ids == ["parent", "next"]
        assert producer.in_flight_batches == 0

    run_propagator(main)


def test_publish_cancelled_between_retries_is_never_applied() -> None:
    async def main(p: RecordedPropagator) -> None:
        opened = anyio.Event()

        async def slow(*_: object) -> None:
            await opened.wait()

        await p.attach(CallbackSink(slow))
        producer = p.producer("p")
        await producer.publish(make_delta("a"))
        with anyio.move_on_after(1.01) as scope:
            await producer.publish(make_delta("never"))
        assert scope.cancelled_caught
        with pytest.raises(Refused, match="still needs the oldest"):
            producer.offer(make_delta("refused"))
        assert producer.in_flight_batches == 1
        opened.set()
        await p.settle()
        await producer.publish(make_delta("next"))
        await p.settle()
        assert p.recorder.vector_ids == ["a", "next"]
        assert (p.statistics().noops, producer.in_flight_batches) == (1, 0)

    run_propagator(main, Settings(log_deltas_max=1))


def test_offer_withdrawn_in_the_queue_is_never_applied() -> None:
    bench = Bench()
    producer = bench.producer("p")
    bench.log.is_accepting = False
    first, second = producer.offer(make_delta("never")), producer.offer(make_delta("b"))
    assert first.withdraw()
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    assert (first.state, second.state) == (OfferState.WITHDRAWN, OfferState.ACKNOWLEDGED)
    producer.offer(make_delta("c"))
    assert bench.keys() == ["b", "c"]
    assert producer.in_flight_batches == 0


# --- lanes


def test_delta_in_another_lane_waits_for_the_vector_it_changes() -> None:
    bench = Bench()
    producer = bench.producer("p")
    bench.log.is_accepting = False
    producer.offer(make_delta("v", priority=Priority.LOW))
    producer.offer(Delta("v", offset(1.0), priority=Priority.CRITICAL))
    producer.offer(make_delta("w", priority=Priority.CRITICAL))
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    low, urgent = (logged.batch for logged in bench.routed if logged.batch.keys == ["v"])
    assert (low.priority, urgent.priority) == (Priority.LOW, Priority.CRITICAL)
    assert urgent.clock == (low.dot(0),)
    producer.offer(Delta("v", offset(1.0), priority=Priority.CRITICAL))
    assert bench.routed[-1].batch.clock == ()  # the parent was sent with an earlier batch
    assert bench.vectors.concurrent_updates == 0


def test_pending_receipt_can_be_named_as_dependency() -> None:
    bench = Bench()
    producer, other = bench.producer("p"), bench.producer("q")
    waiting = producer.offer(make_delta("a", parents=(b"x" * 16,)))
    child = other.offer(make_delta("child"), after=[waiting])
    assert (waiting.state, child.state) == (OfferState.PENDING, OfferState.PENDING)
    bench.publish(make_delta("x", id=b"x" * 16))
    assert bench.keys() == ["x", "a", "child"]
    later = other.offer(make_delta("later"), after=[waiting.result(), b"x" * 16, Dot(bench.hello("p"), 1)])
    assert later.result().offset == 3


# --- bounds


def test_refusal_at_the_limit_of_in_flight_batches_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_prop.api.producer, "IN_FLIGHT_BATCHES_MAX", 3)
    bench = Bench()
    producer = bench.producer("p")
    bench.log.is_accepting = False
    receipts = [producer.offer(make_delta(f"v{n}")) for n in range(3)]
    with pytest.raises(Refused, match="3 of 3 batches") as caught:
        producer.offer(make_delta("one more"))
    assert caught.value.code is ErrorCode.QUEUE_FULL
    bench.log.is_accepting = True
    bench.pipeline.pump(bench.now)
    assert all(receipt.acknowledged for receipt in receipts)
    assert producer.offer(make_delta("one more")).result().offset == 3


def test_in_flight_bytes_are_limited_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_prop.api.producer, "IN_FLIGHT_BYTES_MAX", 1)
    bench = Bench()
    producer = bench.producer("p")
    for n in range(5):
        producer.offer(make_delta(f"v{n}"))
    bench.log.is_accepting = False
    producer.offer(make_delta("waits"))
    with pytest.raises(Refused, match="of 1 bytes"):
        producer.offer(make_delta("one more"))


def test_resent_frame_has_one_effect() -> None:
    bench = Bench()
    producer = bench.producer("p")
    first = producer.offer(make_delta("a")).result()
    duplicate = producer.send_frame(bench.routed[0].batch).result()
    assert (duplicate.duplicate, duplicate.duplicates) == (True, {0: first.offset})
    assert bench.keys() == ["a"]
