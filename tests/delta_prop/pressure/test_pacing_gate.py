"""The closed pacing gate: order of waiting publishers, cancellation, refusals, and listeners of pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from delta_prop import Priority, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_wire.frames import PressureLevel
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import catch_refusal, make_delta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from delta_prop.calls.receipt import Receipt
    from delta_prop.delivery.backpressure.pacer import Pressure
    from delta_prop_sinks.sink import Delivery, SinkContext

MAILBOX = 10
"""Bound of the mailbox, in deltas."""
SETTINGS = Settings(mailbox_deltas_max=MAILBOX, batch_deltas=5, merge_deltas_max=5, close_timeout_s=5.0)


class HeldSink:
    """A sink that applies only after `opened` is set, with a delay per row, and records the keys in order."""

    name = "held"

    def __init__(self, row_s: float = 0.0) -> None:
        self.keys: list[str] = []
        self.row_s = row_s
        self.opened = anyio.Event()

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply the rows after `opened` is set."""
        row_count = sum(delivery.count for delivery in deliveries)
        await self.opened.wait()
        await anyio.sleep(self.row_s * row_count)
        for delivery in deliveries:
            rows = range(delivery.logged.count) if delivery.rows is None else delivery.rows.tolist()
            self.keys += [delivery.batch.keys[row] for row in rows]

    async def aclose(self) -> None:
        """Do nothing: the recorded keys stay."""

    def statistics(self) -> int:
        """Return the number of rows applied."""
        return len(self.keys)


def run_at_closed_gate(
    main: Callable[[Propagator, HeldSink], Awaitable[None]], *, settings: Settings = SETTINGS
) -> None:
    """Run `main` while the gate is closed, because the held sink's mailbox is full."""

    async def run() -> None:
        sink = HeldSink()
        async with Propagator(settings, world=virtual_world()) as p:
            await p.attach(sink, pacing=True)
            first = [p.offer(make_delta(f"first-{row}")) for row in range(MAILBOX)]
            waiting = p.offer(make_delta("waiting"))
            assert p.statistics().queue.depth == 1  # statistics() first sends the offers of this tick
            assert all(receipt.acknowledged for receipt in first)
            assert not waiting.done
            assert waiting.withdraw()
            await main(p, sink)
            sink.opened.set()

    run_virtual(run)


async def wait_all(receipts: Sequence[Receipt], within_s: float = 60) -> None:
    with anyio.fail_after(within_s):
        for receipt in receipts:
            await receipt.wait()


def offset_of(receipt: Receipt) -> int:
    offset = receipt.result().offset
    assert offset is not None
    return offset


# --- order at the gate


def test_critical_work_overtakes_low_work_at_the_gate() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        low = [p.offer(make_delta(f"low-{row}", priority=Priority.LOW)) for row in range(200)]
        await anyio.sleep(1)
        critical = [p.offer(make_delta(f"critical-{row}", priority=Priority.CRITICAL)) for row in range(30)]
        assert p.statistics().queue.depth == 230
        assert not any(receipt.done for receipt in low + critical)
        sink.opened.set()
        await wait_all(low + critical)
        last = max(map(offset_of, critical))
        low_before = sum(offset_of(receipt) < last for receipt in low)
        print(f"\nlast of 30 critical deltas at position {last - MAILBOX}, {low_before} of 200 low before it")
        assert low_before <= 15  # one low delta in eight; more after ageing for a second
        assert [offset_of(receipt) for receipt in critical] == sorted(map(offset_of, critical))
        assert [offset_of(receipt) for receipt in low] == sorted(map(offset_of, low))

    run_at_closed_gate(main)


def test_low_work_progresses_under_endless_critical_work() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        waits_s: dict[Priority, list[float]] = {Priority.CRITICAL: [], Priority.LOW: []}
        sink.row_s = 0.002
        sink.opened.set()

        async def publish(priority: Priority, name: str) -> None:
            while True:
                started = anyio.current_time()
                await p.publish(*(make_delta(f"{name}-{row}", priority=priority) for row in range(2)))
                waits_s[priority].append(anyio.current_time() - started)

        with anyio.move_on_after(6):
            async with anyio.create_task_group() as callers:
                for number in range(20):
                    callers.start_soon(publish, Priority.CRITICAL, f"critical-{number}")
                for number in range(5):
                    callers.start_soon(publish, Priority.LOW, f"low-{number}")
        critical, low = len(waits_s[Priority.CRITICAL]), len(waits_s[Priority.LOW])
        print(
            f"\n{critical} critical and {low} low calls; a low one waited {max(waits_s[Priority.LOW]):.2f} s"
        )
        assert low >= (critical + low) / 12
        assert low <= (critical + low) / 4
        assert max(waits_s[Priority.LOW]) < 2
        long_waits_s = [wait_s for wait_s in waits_s[Priority.CRITICAL] if wait_s > 1]
        assert len(long_waits_s) <= 20, long_waits_s

    run_at_closed_gate(main)


def test_publishers_are_served_in_order() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        served: list[int] = []
        offsets: list[int | None] = []

        async def publish(number: int) -> None:
            published = await p.publish(make_delta(f"v{number}"))
            served.append(number)
            offsets.append(published.offset)

        async with anyio.create_task_group() as callers:
            for number in range(40):
                callers.start_soon(publish, number)
                await anyio.sleep(0.001)
            assert served == []
            sink.opened.set()
        assert served == list(range(40))
        assert offsets == list(range(MAILBOX, MAILBOX + 40))

    run_at_closed_gate(main)


def test_offers_are_acknowledged_when_the_gate_opens() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        receipts = [p.offer(make_delta(f"v{row}-0"), make_delta(f"v{row}-1")) for row in range(10)]
        await anyio.sleep(5)
        assert not any(receipt.done for receipt in receipts)
        assert p.statistics().queue.depth == 20
        sink.opened.set()
        await wait_all(receipts)
        assert [offset_of(receipt) for receipt in receipts] == list(range(MAILBOX, MAILBOX + 20, 2))
        assert p.statistics().queue.depth == 0

    run_at_closed_gate(main)


def test_small_batch_does_not_overtake_a_waiting_large_one() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        sink.opened.set()
        await p.wait_visible(MAILBOX)
        sink.opened = anyio.Event()
        refill = [p.offer(make_delta(f"again-{row}")) for row in range(MAILBOX - 2)]
        large = p.offer(*(make_delta(f"large-{row}") for row in range(5)))
        small = p.offer(make_delta("small"))
        assert p.statistics().queue.depth == 6
        assert all(receipt.acknowledged for receipt in refill)
        assert not large.done
        assert not small.done  # it would fit, but the batch before it does not
        sink.opened.set()
        await wait_all([large, small])
        assert offset_of(large) < offset_of(small)

    run_at_closed_gate(main)


# --- cancelled publishers


def test_publish_cancelled_at_the_gate_is_neither_queued_nor_logged() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        before = p.statistics()
        refusal = await catch_refusal(p.publish(make_delta("late"), timeout_s=2))
        assert refusal.code is ErrorCode.DEP_TIMEOUT
        with anyio.move_on_after(1) as scope:
            await p.publish(make_delta("cancelled"))
        assert scope.cancelled_caught
        assert p.offer(make_delta("withdrawn")).withdraw()
        statistics = p.statistics()
        assert (statistics.queue.depth, statistics.queue.depth_bytes, statistics.pending.pending_deltas) == (
            0,
            0,
            0,
        )
        assert (statistics.accepted, statistics.log.next_offset) == (before.accepted, before.log.next_offset)
        sink.opened.set()
        await p.publish(make_delta("next"))
        await p.wait_visible(MAILBOX + 1)
        assert sink.keys == [*(f"first-{row}" for row in range(MAILBOX)), "next"]
        # When the gate opens, a full mailbox of deltas is admitted at once.
        await anyio.sleep(5)
        assert p.pressure().level is PressureLevel.OK
        receipts = [p.offer(make_delta(f"more-{row}")) for row in range(MAILBOX)]
        assert p.statistics().queue.depth == 0
        assert all(receipt.acknowledged for receipt in receipts)

    run_at_closed_gate(main)


def test_close_refuses_waiting_publishers_at_once() -> None:
    refusals: list[tuple[float, ErrorCode]] = []

    async def main() -> None:
        async with anyio.create_task_group() as callers:
            async with Propagator(SETTINGS, world=virtual_world()) as p:
                await p.attach(HeldSink(), pacing=True)
                for row in range(MAILBOX):
                    p.offer(make_delta(f"first-{row}"))

                async def publish(number: int) -> None:
                    priority = Priority(number % 4)
                    refusal = await catch_refusal(p.publish(make_delta(f"v{number}", priority=priority)))
                    refusals.append((anyio.current_time(), refusal.code))

                async def produce() -> None:
                    refusal = await catch_refusal(
                        p.producer("dots").publish(make_delta("dots"), timeout_s=60)
                    )
                    refusals.append((anyio.current_time(), refusal.code))

                for number in range(20):
                    callers.start_soon(publish, number)
                callers.start_soon(produce)
                receipt = p.offer(make_delta("offered"))
                await anyio.sleep(3)
                assert refusals == []
            refusal = receipt.refusal()
            assert refusal is not None
            assert refusal.code is ErrorCode.SHUTTING_DOWN
            assert refusal.retry_after_ms

    run_virtual(main)
    assert len(refusals) == 21
    assert {code for _, code in refusals} == {ErrorCode.SHUTTING_DOWN}
    assert {round(time_s, 3) for time_s, _ in refusals} == {3.0}  # before the sink's close timeout


# --- producers with dots


def test_producer_passes_the_gate_in_order_exactly_once() -> None:
    async def main(p: Propagator, sink: HeldSink) -> None:
        sink.row_s = 0.02
        producer = p.producer("one")
        order: list[int] = []
        cancelled: set[int] = set()

        async def publish(number: int) -> None:
            with anyio.move_on_after(0.5 if number % 10 == 3 else 60) as scope:
                await producer.publish(make_delta(f"dot-{number:03}"))
                order.append(number)
            if scope.cancelled_caught:
                cancelled.add(number)

        async def open_and_close() -> None:
            for _ in range(5):
                sink.opened.set()
                await anyio.sleep(0.3)
                sink.opened = anyio.Event()
                await anyio.sleep(0.7)
            sink.opened.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_and_close)
            for number in range(100):
                tasks.start_soon(publish, number)
                await anyio.sleep(0.01)
        assert cancelled
        assert order == [number for number in range(100) if number not in cancelled]
        assert producer.watermark() == 100  # cancelled counters are no-ops, so nothing waits for them
        assert producer.in_flight_batches == 0
        await p.wait_visible(p.statistics().log.next_offset)
        assert [key for key in sink.keys if key.startswith("dot")] == [f"dot-{number:03}" for number in order]

    run_at_closed_gate(main)


def test_producer_sends_as_soon_as_the_gate_opens() -> None:
    """The producer wakes when the gate opens, not at the next poll of sinks (every 100 ms) or end of a
    call.
    """
    settings = Settings(merge_deltas_max=100, rate_initial=200)

    async def main() -> None:
        sink = HeldSink(row_s=0.005)  # calls take half a second
        sink.opened.set()
        async with Propagator(settings, world=virtual_world()) as p:
            await p.attach(sink, pacing=True)
            producer, waits = p.producer("one"), []
            for number in range(1_000):
                started = anyio.current_time()
                await producer.publish(make_delta(f"v{number}"))
                waits.append(anyio.current_time() - started)
            settled = waits[500:]
            assert max(settled) < 0.05
            assert sum(wait > 0 for wait in settled) > 400  # each publish waited at the gate

    run_virtual(main)


# --- listeners


def test_pressure_changes_reach_every_listener() -> None:
    received: list[list[Pressure]] = [[], [], []]

    async def main() -> None:
        async with anyio.create_task_group() as listeners:
            sink = HeldSink()
            async with Propagator(SETTINGS, world=virtual_world()) as p:

                async def listen(pressures: list[Pressure]) -> None:
                    async for pressure in p.pressure_changes():
                        pressures.append(pressure)

                for pressures in received:
                    listeners.start_soon(listen, pressures)
                await anyio.sleep(1)
                assert [len(pressures) for pressures in received] == [
                    1,
                    1,
                    1,
                ]  # each listener got the current level at once, and no change since
                assert received[0][0].level is PressureLevel.OK
                assert received[0][0].rate_limit is None
                await p.attach(sink, pacing=True)
                for row in range(MAILBOX + 5):
                    p.offer(make_delta(f"v{row}"))
                await anyio.sleep(3)
                last = received[0][-1]
                assert last.level is PressureLevel.STOP
                assert last.paced_by == "held"
                assert last.depth == 5
                assert last.retry_after_ms
                assert "nothing leaves it" in last.reason
                sink.opened.set()
                await anyio.sleep(3)
                assert received[0][-1].level is PressureLevel.OK
                await p.detach("held")
                await anyio.sleep(0.2)
                assert received[0][-1].rate_limit is None
                count = len(received[0])
                await anyio.sleep(60.05)  # so that the propagator closes between two pacing steps
                assert len(received[0]) == count < 60
            # The listeners end when the propagator is closed; otherwise this block would never end.

    run_virtual(main)
    assert received[0] == received[1] == received[2]
    assert {PressureLevel.OK, PressureLevel.STOP} <= {pressure.level for pressure in received[0]}


def test_listening_ends_at_close_though_a_sink_hangs() -> None:
    ended: list[float] = []

    async def main() -> None:
        async def listen(p: Propagator) -> None:
            async for _ in p.pressure_changes():
                pass
            ended.append(anyio.current_time())

        async with (
            anyio.create_task_group() as listeners,
            Propagator(SETTINGS, world=virtual_world()) as p,
        ):
            await p.attach(HeldSink(), pacing=True)
            p.offer(make_delta("v"))
            listeners.start_soon(listen, p)
            await anyio.sleep(2)

    run_virtual(main)
    assert len(ended) == 1
    assert ended[0] < 2 + 3 * SETTINGS.close_timeout_s
