"""Subscriptions: rows are delivered once, at the reader's pace, and the end names its cause."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop import Delta, ErrorCode, Propagator, Refused, Settings, UsageError, opaque
from delta_prop.delivery.subscription import Subscription
from delta_prop.testing import run_propagator, run_virtual, virtual_world

SMALL = Settings(mailbox_deltas_max=4, log_deltas_max=100)


def delta(number: int, namespace: str = "n") -> Delta:
    return Delta(f"v{number}", opaque(b"%d" % number), namespace)


def test_subscription_yields_deltas_with_offsets() -> None:
    async def main(p: Propagator) -> None:
        await p.publish(delta(0))
        async with p.subscribe() as latest, p.subscribe(start="earliest") as earliest:
            published = await p.publish(delta(1))
            first = await anext(latest)
            assert first.offset == published.offset == 1
            assert first.lamport == 2
            assert (first.delta.vector_id, first.delta.dot) == ("v1", published.dot)
            assert [(await anext(earliest)).offset for _ in range(2)] == [0, 1]

    run_propagator(main)


def test_latest_starts_at_subscribe_not_at_first_read() -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe()
        await p.publish(delta(0))
        assert (await anext(subscription)).offset == 0

    run_propagator(main)


def test_topics_select_rows_within_a_batch() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe("ns:m", "v:v3") as subscription:
            await p.publish(*(delta(i, "m" if i % 4 == 0 else "n") for i in range(8)))
            assert [(await anext(subscription)).offset for _ in range(3)] == [0, 3, 4]

    run_propagator(main)


def test_unknown_topic_is_rejected_at_once() -> None:
    async def main(p: Propagator) -> None:
        with pytest.raises(UsageError, match="is unknown"):
            p.subscribe("nonsense")

    run_propagator(main)


@settings(max_examples=25)
@given(
    pauses=st.lists(st.sampled_from([0, 0, 0.001, 0.02, 0.3]), min_size=1, max_size=30),
    reader_pauses=st.lists(st.sampled_from([0, 0, 0.004, 0.1]), min_size=1, max_size=10),
    size=st.integers(1, 5),
    seed=st.integers(0, 3),
)
def test_any_reader_pace_loses_and_duplicates_nothing(
    pauses: list[float], reader_pauses: list[float], size: int, seed: int
) -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe("ns:m")
        expected: list[int] = []
        received: list[int] = []

        async def write() -> None:
            for step, pause in enumerate(pauses):
                names = ["m" if (step + i) % 3 else "n" for i in range(size)]
                published = await p.publish(*(delta(i, name) for i, name in enumerate(names)))
                assert published.offset is not None
                expected.extend(published.offset + i for i, name in enumerate(names) if name == "m")
                await anyio.sleep(pause)
            await p.publish(delta(0, "m"))

        async with anyio.create_task_group() as tasks, subscription:
            tasks.start_soon(write)
            async for offset, _, _ in subscription:
                if offset == len(pauses) * size:
                    break
                received.append(offset)
                await anyio.sleep(reader_pauses[len(received) % len(reader_pauses)])
        assert received == expected

    run_propagator(main, Settings(mailbox_deltas_max=4), seed=seed)


def test_slow_reader_delays_no_other_and_gets_cursor_too_old() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe(start="earliest") as slow:
            await p.publish(delta(0))
            assert (await anext(slow)).offset == 0
            for i in range(300):
                await p.publish(delta(i))
                # lets the recorder sink of `run_propagator` run, for which the log keeps rows
                await anyio.lowlevel.checkpoint()
            assert anyio.current_time() == 0
            for _ in range(2):  # the error is raised on every read
                with pytest.raises(Refused) as caught:
                    async for _ in slow:
                        pass
                assert caught.value.code is ErrorCode.CURSOR_TOO_OLD
                assert caught.value.details["start_offset"] == p.statistics().log.start_offset
        reopened = p.subscribe(start="earliest")
        assert (await anext(reopened)).offset == p.statistics().log.start_offset

    run_propagator(main, SMALL)


def test_delta_counts_as_applied_when_reader_asks_for_next() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe(name="reader") as subscription:
            for i in range(5):
                await p.publish(delta(i), delta(i))
                await anyio.sleep(1)
            assert p.statistics().sinks["reader"].applied_deltas == 0
            assert p.statistics().sinks["reader"].catching_up
            for count in range(10):
                assert (await anext(subscription)).offset == count
                await anyio.sleep(1)
                assert p.statistics().sinks["reader"].applied_deltas <= count
            with anyio.move_on_after(1):
                await anext(subscription)
            assert p.statistics().sinks["reader"].applied_deltas == 10

    run_propagator(main, Settings(mailbox_deltas_max=4))


def test_cancelled_iteration_can_be_resumed() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe() as subscription:
            with anyio.move_on_after(1):
                await anext(subscription)
            await p.publish(delta(0))
            assert (await anext(subscription)).offset == 0

    run_propagator(main)


def test_close_ends_waiting_iteration() -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe()
        received: list[int] = []

        async def read() -> None:
            received.extend([delivered.offset async for delivered in subscription])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(1)
            await p.publish(delta(0))
            await anyio.sleep(1)
            await subscription.close()
        assert received == [0]
        await subscription.close()
        assert [delivered async for delivered in subscription] == []
        assert subscription.name not in p.statistics().sinks

    run_propagator(main)


def test_abandoned_subscription_does_not_delay_close() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            subscription = p.subscribe(start="earliest")
            await p.publish(*(delta(i) for i in range(5)))
            async for _ in subscription:
                break
        assert anyio.current_time() == 0

    run_virtual(main)


@pytest.mark.parametrize(("batch_count", "ends_early"), [(0, False), (20, True)])
def test_reader_that_outlives_propagator_gets_buffered_rows(batch_count: int, ends_early: bool) -> None:
    received: list[int] = []
    refusals: list[Any] = []

    async def read(subscription: Any) -> None:
        try:
            async for delivered in subscription:
                received.append(delivered.offset)
                await anyio.sleep(0.1)
        except Refused as refusal:
            refusals.append((refusal.code, refusal.details["offset"], refusal.details["next_offset"]))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            async with Propagator(world=virtual_world()) as p:
                subscription = p.subscribe()
                tasks.start_soon(read, subscription)
                await anyio.sleep(0.01)
                await p.publish(delta(0), delta(1))
                await anyio.sleep(0.15)
                for i in range(batch_count):
                    await p.publish(delta(i))
                assert anyio.current_time() == 0.16
            assert anyio.current_time() == 0.16

    run_virtual(main)
    assert received == [0, 1]
    assert refusals == ([(ErrorCode.SHUTTING_DOWN, 2, 22)] if ends_early else [])


def test_rows_that_match_no_topic_are_skipped_without_waking_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader skips more rows than the log holds; its applied offset is still the end of the log."""

    async def main(p: Propagator) -> None:
        async with p.subscribe("v:mine", name="mine") as subscription, anyio.create_task_group() as tasks:
            received: list[int] = []

            async def read() -> None:
                async for offset, _, _ in subscription:
                    received.append(offset)

            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            notified = []
            notify = Subscription.notify
            monkeypatch.setattr(Subscription, "notify", lambda self: (notified.append(1), notify(self)))
            for number in range(300):
                await p.publish(delta(number))
            assert not notified, "rows that match no topic have notified the reader"
            statistics = p.statistics().sinks["mine"]
            assert (statistics.applied_offset, statistics.lag, statistics.state) == (300, 0, "idle")
            await p.wait_visible(300, sinks=["mine"], timeout_s=1)
            p.pause("mine")
            assert p.statistics().sinks["mine"].applied_offset == 300, "the pause has undone skips"
            p.resume("mine")
            for number in range(300):
                await p.publish(delta(number))
            await p.publish(Delta("mine", opaque(b"x"), "n"))
            await p.wait_visible(601, sinks=["mine"], timeout_s=1)
            assert received == [600]
            tasks.cancel_scope.cancel()

    run_propagator(main, SMALL)


def test_wait_ends_for_a_subscription_that_skips_all_rows() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe("v:mine") as subscription, anyio.create_task_group() as tasks:
            reached: list[int] = []

            async def wait(offset: int) -> None:
                assert subscription._feed is not None
                await subscription._feed.wait(offset)
                reached.append(offset)

            for offset in (1, 3):
                tasks.start_soon(wait, offset)
            await anyio.lowlevel.checkpoint()
            for number in range(3):
                await p.publish(delta(number))
                # as with a log in a directory, whose high watermark moves after the append
                p.internals().partition.note_moved()
                await anyio.sleep(0.01)
                assert reached == [offset for offset in (1, 3) if offset <= number + 1]

    run_propagator(main)
