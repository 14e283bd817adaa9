"""A live listener: at the reader's pace, nothing lost, nothing twice, and an end that tells what it is."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop import Delta, ErrorCode, Propagator, Refused, Settings, UsageError, opaque
from delta_prop.route.subscription import Subscription
from delta_prop.testing import run_propagator, run_virtual, virtual_world

SMALL = Settings(mailbox_deltas_max=4, log_deltas_max=100)


def delta(number: int, namespace: str = "n") -> Delta:
    return Delta(f"v{number}", opaque(b"%d" % number), namespace)


def test_it_yields_what_comes_with_its_place() -> None:
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


def test_latest_is_where_it_was_asked_for_not_where_it_is_first_read() -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe()
        await p.publish(delta(0))
        assert (await anext(subscription)).offset == 0

    run_propagator(main)


def test_topics_are_looked_at_by_row() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe("ns:m", "v:v3") as subscription:
            await p.publish(*(delta(i, "m" if i % 4 == 0 else "n") for i in range(8)))
            assert [(await anext(subscription)).offset for _ in range(3)] == [0, 3, 4]

    run_propagator(main)


def test_an_unknown_topic_is_refused_at_once() -> None:
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
def test_whatever_the_pace_nothing_is_lost_or_comes_twice(
    pauses: list[float], reader_pauses: list[float], size: int, seed: int
) -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe("ns:m")
        expected: list[int] = []
        got: list[int] = []

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
            async for place, _, _ in subscription:
                if place == len(pauses) * size:
                    break
                got.append(place)
                await anyio.sleep(reader_pauses[len(got) % len(reader_pauses)])
        assert got == expected

    run_propagator(main, Settings(mailbox_deltas_max=4), seed=seed)


def test_a_slow_reader_delays_nobody_and_learns_what_it_missed() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe(start="earliest") as slow:
            await p.publish(delta(0))
            assert (await anext(slow)).offset == 0
            for i in range(300):
                await p.publish(delta(i))
                await anyio.lowlevel.checkpoint()  # the recorder, for which the log waits, keeps up
            assert anyio.current_time() == 0
            for _ in range(2):  # it stays so
                with pytest.raises(Refused) as caught:
                    async for _ in slow:
                        pass
                assert caught.value.code is ErrorCode.CURSOR_TOO_OLD
                assert caught.value.details["start_offset"] == p.statistics().log.start_offset
        again = p.subscribe(start="earliest")
        assert (await anext(again)).offset == p.statistics().log.start_offset

    run_propagator(main, SMALL)


def test_only_what_the_reader_came_back_from_counts_as_applied() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe(name="reader") as subscription:
            for i in range(5):
                await p.publish(delta(i), delta(i))
                await anyio.sleep(1)
            assert p.statistics().sinks["reader"].applied_deltas == 0
            assert p.statistics().sinks["reader"].catching_up
            for taken in range(10):
                assert (await anext(subscription)).offset == taken
                await anyio.sleep(1)
                assert p.statistics().sinks["reader"].applied_deltas <= taken
            with anyio.move_on_after(1):
                await anext(subscription)
            assert p.statistics().sinks["reader"].applied_deltas == 10

    run_propagator(main, Settings(mailbox_deltas_max=4))


def test_an_iteration_that_is_cancelled_can_be_taken_up_again() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe() as subscription:
            with anyio.move_on_after(1):
                await anext(subscription)
            await p.publish(delta(0))
            assert (await anext(subscription)).offset == 0

    run_propagator(main)


def test_closing_ends_an_iteration_that_waits() -> None:
    async def main(p: Propagator) -> None:
        subscription = p.subscribe()
        got: list[int] = []

        async def read() -> None:
            got.extend([one.offset async for one in subscription])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.sleep(1)
            await p.publish(delta(0))
            await anyio.sleep(1)
            await subscription.close()
        assert got == [0]
        await subscription.close()
        assert [one async for one in subscription] == []
        assert subscription.name not in p.statistics().sinks

    run_propagator(main)


def test_an_abandoned_subscription_delays_no_end() -> None:
    async def main() -> None:
        async with Propagator(world=virtual_world()) as p:
            subscription = p.subscribe(start="earliest")
            await p.publish(*(delta(i) for i in range(5)))
            async for _ in subscription:
                break
        assert anyio.current_time() == 0

    run_virtual(main)


@pytest.mark.parametrize(("before", "ends_early"), [(0, False), (20, True)])
def test_a_reader_that_outlives_the_propagator_ends_with_what_it_has(before: int, ends_early: bool) -> None:
    got: list[int] = []
    told: list[Any] = []

    async def read(subscription: Any) -> None:
        try:
            async for one in subscription:
                got.append(one.offset)
                await anyio.sleep(0.1)
        except Refused as refusal:
            told.append((refusal.code, refusal.details["offset"], refusal.details["next_offset"]))

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            async with Propagator(world=virtual_world()) as p:
                subscription = p.subscribe()
                tasks.start_soon(read, subscription)
                await anyio.sleep(0.01)
                await p.publish(delta(0), delta(1))
                await anyio.sleep(0.15)
                for i in range(before):
                    await p.publish(delta(i))
                assert anyio.current_time() == 0.16
            assert anyio.current_time() == 0.16

    run_virtual(main)
    assert got == [0, 1]
    assert told == ([(ErrorCode.SHUTTING_DOWN, 2, 22)] if ends_early else [])


def test_what_is_for_others_wakes_nobody_and_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more than the log holds goes by; then its own comes. Who asks finds it at the end of the log."""

    async def main(p: Propagator) -> None:
        async with p.subscribe("v:mine", name="one") as subscription, anyio.create_task_group() as tasks:
            found: list[int] = []

            async def read() -> None:
                async for offset, _, _ in subscription:
                    found.append(offset)

            tasks.start_soon(read)
            await anyio.lowlevel.checkpoint()
            rung = []
            ring = Subscription.notify
            monkeypatch.setattr(Subscription, "notify", lambda self: (rung.append(1), ring(self)))
            for number in range(300):
                await p.publish(delta(number))
            assert not rung, "nothing was for it"
            told = p.statistics().sinks["one"]
            assert (told.applied_offset, told.lag, told.state) == (300, 0, "idle")
            await p.wait_visible(300, sinks=["one"], timeout_s=1)
            p.pause("one")
            assert p.statistics().sinks["one"].applied_offset == 300, "what it has passed over stays so"
            p.resume("one")
            for number in range(300):
                await p.publish(delta(number))
            await p.publish(Delta("mine", opaque(b"x"), "n"))
            await p.wait_visible(601, sinks=["one"], timeout_s=1)
            assert found == [600]
            tasks.cancel_scope.cancel()

    run_propagator(main, SMALL)


def test_a_wait_for_one_that_passes_over_ends_when_the_log_is_there() -> None:
    async def main(p: Propagator) -> None:
        async with p.subscribe("v:mine", name="one") as one, anyio.create_task_group() as tasks:
            reached: list[int] = []

            async def wait(offset: int) -> None:
                assert one._feed is not None
                await one._feed.wait(offset)
                reached.append(offset)

            for offset in (1, 3):
                tasks.start_soon(wait, offset)
            await anyio.lowlevel.checkpoint()
            for number in range(3):
                await p.publish(delta(number))
                p._note_moved()  # as a log in a directory has it, whose marks move behind the append
                await anyio.sleep(0.01)
                assert reached == [offset for offset in (1, 3) if offset <= number + 1]

    run_propagator(main)
