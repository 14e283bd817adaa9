"""`pause`, `resume` and `reset` from a program: what a sink gets, what the log keeps, also after a crash."""

from __future__ import annotations

import anyio
import pytest

from delta_prop import LogSettings, Propagator, SyncPropagator
from delta_prop.delivery.operator_requests import DIRECTORY, OperatorRequest, put_request
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_sinks import CallbackSink
from delta_prop_sinks.sink import StopSink
from delta_prop_wire.errors import Refused, UsageError
from tests.delta_prop.durable.quarantined import RejectingSink, Store, make_delta, quarantined_rows, service

SMALL = LogSettings(segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=8192, retention_s=3600.0)


def test_log_keeps_rows_of_a_paused_sink_and_other_sinks_continue() -> None:
    async def main() -> None:
        disk, seen, other = SimDisk(1), [], []
        async with service(disk, 1, SMALL) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="first"))
            await p.attach(CallbackSink(lambda offset, _: other.append(offset), name="other"))
            await p.publish(make_delta("a"))
            await p.wait_visible(1)
            p.pause("first")
            for number in range(300):
                await p.publish(make_delta(f"v{number}"))
            await p.wait_visible(301, sinks=["other"])
            await anyio.sleep(5)
            log = p.statistics().log
            assert (log.start_offset, log.held_by) == (0, "first")
            with pytest.raises(Refused, match="is paused at offset 1: resume it"):
                await p.wait_visible(301, sinks=["first"])
        async with service(disk.crash(1), 2, SMALL) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="first"))
            await anyio.sleep(5)
            assert p.statistics().sinks["first"].state == "paused"
            assert seen == [0]
            p.resume("first")
            await p.wait_visible(301, sinks=["first"])
            assert seen == list(range(301))
            await anyio.sleep(5)

    run_virtual(main)


def test_pause_during_a_call_does_not_wait() -> None:
    async def main() -> None:
        seen = []

        async def slow(offset: int, _: object) -> None:
            await anyio.sleep(1)
            seen.append(offset)

        async with Propagator(world=virtual_world(1)) as p:
            await p.attach(CallbackSink(slow, name="slow"))
            for number in range(5):
                await p.publish(make_delta(f"v{number}"))
                await anyio.sleep(0.1)
            p.pause("slow")
            await anyio.sleep(20)
            assert seen == [0]
            p.resume("slow")
            await p.wait_visible(5, timeout_s=20)
            assert seen == [0, 1, 2, 3, 4]

    run_virtual(main)


def test_stopped_sink_can_be_paused_and_resumed() -> None:
    async def main() -> None:
        failing, seen = [True], []

        def take(offset: int, _: object) -> None:
            if failing:
                raise StopSink("ill")
            seen.append(offset)

        async with Propagator(world=virtual_world(1)) as p:
            await p.attach(CallbackSink(take, name="ill"))
            await p.publish(make_delta("a"))
            await anyio.sleep(1)
            assert p.statistics().sinks["ill"].state == "stopped"
            p.pause("ill")
            assert p.statistics().sinks["ill"].state == "paused"
            p.restart("ill")
            assert p.statistics().sinks["ill"].state == "paused"
            failing.clear()
            p.resume("ill")
            await p.wait_visible(1)
            assert seen == [0]

    run_virtual(main)


def test_working_failing_or_absent_sink_can_be_reset() -> None:
    async def main() -> None:
        disk, seen, failing = SimDisk(1), [], [False]

        async def take(offset: int, _: object) -> None:
            await anyio.sleep(0.01)
            if failing[0]:
                raise RuntimeError("ill")
            seen.append(offset)

        async with service(disk, 1) as p:
            await p.attach(CallbackSink(take, name="s"))
            for number in range(10):
                await p.publish(make_delta(f"v{number}"))
            await p.wait_visible(10)
            assert await p.reset("s", 4) == 4
            await p.wait_visible(10)
            assert seen == [*range(10), *range(4, 10)]
            failing[0] = True
            await p.publish(make_delta("bad"), make_delta("worse"))
            await anyio.sleep(100)
            assert p.statistics().sinks["s"].state == "breaker open"
            assert await p.reset("s", "latest") == 12
            failing[0] = False
            await p.publish(make_delta("good"))
            await p.wait_visible(13, timeout_s=60)
            assert seen[16:] == [12]
            feed = p.statistics().sinks["s"]
            assert (feed.applied_deltas, feed.skipped, feed.applied_offset) == (1, 0, 13)
            await p.detach("s")
            assert await p.reset("s", "earliest") == 0
            with pytest.raises(UsageError, match="from 0 to 13"):
                await p.reset("s", 14)
            with pytest.raises(UsageError, match="give one of \\['s'\\]"):
                p.pause("nobody")
        seen.clear()
        async with service(disk.crash(1), 2) as p:
            await p.attach(CallbackSink(take, name="s"))
            await p.wait_visible(13)
            assert seen == list(range(13))

    run_virtual(main)


def test_reset_skips_dropped_rows_and_redelivers_held_ones() -> None:
    async def main() -> None:
        disk, store, bad = SimDisk(1), Store(keeps_cursor=False), {7.0, 8.0}
        async with service(disk, 1) as p:
            await p.attach(RejectingSink(store, bad))
            await p.publish(make_delta("a", 7), make_delta("b", 8), make_delta("c"))
            await p.internals().sinks.feed("totals").wait(3)
            await p.drop("totals", 0)
            bad.clear()
            await p.reset("totals", 0)
            await p.wait_visible(3)
            assert quarantined_rows(p) == []
            assert store.sums == {"b": 8, "c": 1}
            own_store = Store(keeps_cursor=True)
            await p.attach(RejectingSink(own_store, bad), name="own")
            with pytest.raises(UsageError, match="stores its cursor with its data"):
                await p.reset("own", 0)

    run_virtual(main)


def test_sync_propagator_pauses_resumes_and_resets_sinks() -> None:
    seen = []
    with SyncPropagator() as p:
        p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="s"))
        p.publish(make_delta("a"))
        p.wait_visible(1)
        p.pause("s")
        p.publish(make_delta("b"))
        assert p.statistics().sinks["s"].state == "paused"
        p.resume("s")
        p.wait_visible(2)
        assert p.reset("s", "earliest") == 0
        p.wait_visible(2)
        assert seen == [0, 1, 0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_processed_operator_request_survives_a_power_cut(seed: int) -> None:
    async def main() -> None:
        disk, seen = SimDisk(seed), []
        async with service(disk, 1) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="s"))
            await p.publish(make_delta("a"))
            log_id = p.internals().partition.log.log_id.hex()
        put_request(disk, OperatorRequest("pause", "s", log_id), 1)
        async with service(disk, 2):
            while disk.list(DIRECTORY):  # noqa: ASYNC110 - nothing signals its removal
                await anyio.sleep(0.001)
            after = disk.crash(seed)
        async with service(after, 3) as p:
            await p.attach(CallbackSink(lambda offset, _: seen.append(offset), name="s"))
            await anyio.sleep(2)
            assert p.statistics().sinks["s"].state == "paused"

    run_virtual(main)
