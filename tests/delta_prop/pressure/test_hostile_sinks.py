"""Failing sinks and hasty operators: cancellation, replay and reattachment at odd moments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.testing import run_propagator, run_virtual, virtual_world
from delta_prop_sinks import CallbackSink, IndexSink, RejectDelta, StopSink, StorageSink
from delta_prop_sinks.index import _pieces
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.delta import Delta, Source, create
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import UsageError
from tests.delta_prop.support import catch_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop.testing import RecordedPropagator
    from delta_prop_sinks.sink import Sink


class FaultyCallback:
    """A callback that rejects, raises and delays as set. `applied`: the offsets that it has applied."""

    def __init__(self, *rejects: int) -> None:
        self.rejects = set(rejects)
        self.raises: BaseException | None = None
        self.delay_s = 0.0
        self.failing_offset: int | None = None
        self.applied: list[int] = []

    async def __call__(self, offset: int, delta: Delta) -> None:
        if self.delay_s:
            await anyio.sleep(self.delay_s)
        if self.raises is not None:
            raise self.raises
        if offset == self.failing_offset:
            raise ConnectionRefusedError("no")
        if offset in self.rejects:
            raise RejectDelta(offset, f"not {offset}")
        self.applied.append(offset)


def create_delta(vector_id: str) -> Delta:
    return Delta(vector_id, create([1.0, 2.0]))


def outcomes_add_up(p: Propagator, name: str, *, start: int = 0, quarantined_before_start: int = 0) -> bool:
    statistics = p.statistics().sinks[name]
    outcomes = statistics.applied_deltas + statistics.skipped + statistics.quarantined + statistics.dropped
    return (
        statistics.skipped >= 0 and outcomes == statistics.applied_offset - start + quarantined_before_start
    )


def test_refusal_of_a_waiter_names_the_offset_that_still_blocks() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0, 1)
        await p.attach(CallbackSink(callback, name="picky"))
        last = [await p.publish(create_delta("v")) for _ in range(3)][-1]
        await p.settle()
        await p.drop("picky", 0)
        refusal = await catch_refusal(p.wait_visible(last, sinks=["picky"]))
        assert "it is blocked by offset 1: rejected: not 1" in refusal.message
        with pytest.raises(UsageError, match="waits for 1: give that one"):
            await p.replay("picky", 2)

    run_propagator(main)


def test_interrupted_replay_can_be_resumed_by_offset() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0)
        await p.attach(CallbackSink(callback, name="picky"))
        last = [await p.publish(create_delta("v")) for _ in range(3)][-1]
        await p.settle()
        callback.rejects.clear()
        callback.failing_offset = 1
        with pytest.raises(TimeoutError, match="its quarantine holds 2 deltas"):
            await p.replay("picky", timeout_s=1)
        await anyio.sleep(10)
        assert callback.applied == [0]
        refusal = await catch_refusal(p.wait_visible(last, sinks=["picky"]))
        assert "it is blocked by offset 1: to be replayed" in refusal.message
        with pytest.raises(UsageError, match="offset 1 was not rejected, but waits to be replayed"):
            await p.drop("picky", 1)
        callback.failing_offset = None
        assert (await p.replay("picky", 1)).left == 0
        await p.wait_visible(last)
        assert callback.applied == [0, 1, 2]
        assert outcomes_add_up(p, "picky")

    run_propagator(main)


def test_leaked_cancellation_stops_the_sink_until_reattached() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0)
        await p.attach(CallbackSink(callback, name="stray"))
        await p.publish(create_delta("v"))
        await p.settle()
        callback.raises = anyio.get_cancelled_exc_class()()
        published = await p.publish(create_delta("w"))
        await anyio.sleep(1)
        for _ in range(2):
            refusal = await catch_refusal(p.wait_visible(published, sinks=["stray"]))
            assert "leaked a cancellation" in refusal.message
            p.restart("stray")
        assert "leaked a cancellation" in (p.statistics().sinks["stray"].reason or "")
        before = anyio.current_time()
        assert "leaked a cancellation" in (await catch_refusal(p.replay("stray"))).message
        await p.detach("stray")
        assert anyio.current_time() == before
        callback.raises = None
        callback.rejects.clear()
        await p.attach(CallbackSink(callback, name="stray"))
        await p.wait_visible(published)
        assert (await p.replay("stray")).applied == 1
        assert callback.applied == [1, 0]

    run_propagator(main)


@pytest.mark.parametrize(
    "moment", ["call", "back-off", "breaker", "replay call", "replay back-off", "quarantined", "detach"]
)
def test_cancelled_propagator_closes_at_once(moment: str) -> None:
    ended_at: list[float] = []

    async def main() -> None:
        callback = FaultyCallback(0)
        with anyio.CancelScope() as scope:
            async with (
                Propagator(world=virtual_world(0)) as p,
                anyio.create_task_group() as tasks,
            ):
                await p.attach(CallbackSink(callback, name="sick"))
                await p.publish(create_delta("v"))
                await anyio.sleep(1)
                if moment in ("call", "detach", "replay call"):
                    callback.delay_s = 1e5
                elif moment != "quarantined":
                    callback.raises = ConnectionRefusedError("no")
                if moment.startswith("replay"):
                    tasks.start_soon(p.replay, "sick")
                else:
                    published = await p.publish(create_delta("w"))
                    tasks.start_soon(p.wait_visible, published)
                await anyio.sleep(20 if moment == "breaker" else 0.3)
                if moment == "detach":
                    tasks.start_soon(p.detach, "sick")
                    await anyio.sleep(0.1)
                ended_at.append(anyio.current_time())
                scope.cancel()
                await anyio.sleep_forever()
        ended_at.append(anyio.current_time())

    run_virtual(main)
    assert ended_at[1] - ended_at[0] < 0.1


class UnexpectedError(BaseException):
    """An exception that no code expects."""


@pytest.mark.parametrize("error", [UnexpectedError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_base_exception_ends_propagator_and_its_waiters(error: BaseException) -> None:
    reports: list[str] = []

    async def main() -> None:
        callback = FaultyCallback()
        callback.raises = error
        async with Propagator(world=virtual_world(0)) as p:
            await p.attach(CallbackSink(callback, name="odd"))
            published = await p.publish(create_delta("v"))
            try:
                await p.wait_visible(published)
            finally:
                reports.append("reported")

    with pytest.raises(BaseException) as caught:
        run_virtual(main)
    if isinstance(error, KeyboardInterrupt | SystemExit):  # the loop raises these without an exception group
        assert caught.value is error
    else:
        assert caught.group_contains(type(error), match=r"\Aodd\Z")
    assert reports == ["reported"]


# --- reattached sinks


def test_rewound_sink_gets_quarantined_rows_in_order() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(2)
        await p.attach(CallbackSink(callback, name="reattached"))
        for vector in "xvvyv":
            await p.publish(create_delta(vector))
        await p.settle()
        assert len(p.quarantine("reattached")) == 2
        await p.detach("reattached")
        callback.applied.clear()
        callback.rejects.clear()
        callback.delay_s = 1
        await p.attach(CallbackSink(callback, name="reattached"), start="earliest")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.replay, "reattached")
            await p.settle()
        assert callback.applied == [0, 1, 2, 3, 4]
        assert p.quarantine("reattached") == []
        assert outcomes_add_up(p, "reattached")

    run_propagator(main)


@pytest.mark.parametrize("start", ["resume", "latest", 3])
def test_statistics_of_a_reattached_quarantine_start_fresh(start: int | str) -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0, 1, 2)
        await p.attach(CallbackSink(callback, name="reattached"))
        for vector in "abcd":
            await p.publish(create_delta(vector))
        await p.settle()
        await p.drop("reattached", 0)
        callback.rejects.discard(1)
        await p.replay("reattached", 1)
        assert outcomes_add_up(p, "reattached")
        await p.detach("reattached")
        await p.publish(create_delta("c"))
        await p.attach(CallbackSink(callback, name="reattached"), start=start)  # type: ignore[arg-type]
        first_offset = {"resume": 4, "latest": 5}.get(str(start), 3)
        await p.settle()
        assert outcomes_add_up(p, "reattached", start=first_offset, quarantined_before_start=1)
        callback.rejects.clear()
        await p.replay("reattached")
        assert outcomes_add_up(p, "reattached", start=first_offset, quarantined_before_start=1)
        statistics = p.statistics().sinks["reattached"]
        assert (statistics.dropped, statistics.quarantined) == (0, 0)

    run_propagator(main)


class HaltingSink:
    """A wrapper of a real sink that rejects some offsets, or accepts only rows released from the
    quarantine.
    """

    def __init__(self, sink: Sink, *rejects: int) -> None:
        self.sink = sink
        self.name = sink.name
        self.rejects = set(rejects)
        self.released_only = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink, name)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self.released_only and not delivery.redelivered:
                raise StopSink("released rows only")
            rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
            for index, row in enumerate(rows.tolist()):
                if delivery.first_offset + row in self.rejects:
                    if index:
                        end = delivery.first_offset + row
                        await self.sink.apply([replace(delivery, rows=rows[:index], end=end)])
                    raise RejectDelta(delivery.first_offset + row, "no")
            await self.sink.apply([delivery])


async def _halt_in_a_batch(p: RecordedPropagator, sink: HaltingSink) -> None:
    """Stop the sink within a batch (row 0 is quarantined, row 1 applied, row 2 not), then replay row 0."""
    await p.attach(sink)
    await p.publish_many([f"v{n}" for n in range(5)], np.ones((5, 2), np.float32))
    await anyio.sleep(1)
    statistics = p.statistics().sinks[sink.name]
    assert (statistics.state, statistics.applied_offset, statistics.quarantined) == ("stopped", 2, 1)
    sink.rejects.clear()
    sink.released_only = True
    assert (await p.replay(sink.name)).applied == 1
    await anyio.sleep(2)
    statistics = p.statistics().sinks[sink.name]
    assert (statistics.state, statistics.applied_offset) == ("stopped", 2)
    assert statistics.committed_offset <= 2


QUARANTINE_OF_ONE = Settings(quarantine_deltas_max=1)


def test_released_row_does_not_advance_storage_cursor(tmp_path: Path) -> None:
    async def main(p: RecordedPropagator) -> None:
        await _halt_in_a_batch(p, HaltingSink(StorageSink(tmp_path / "facts.db"), 0, 2))
        await p.detach("storage")
        second = StorageSink(tmp_path / "facts.db")
        await p.attach(second)
        await p.settle()
        states = [await second.get("default", f"v{n}") for n in range(5)]
        assert all(state is not None and state.alive for state in states)
        await p.detach("storage")

    run_propagator(main, QUARANTINE_OF_ONE)


def test_released_row_does_not_advance_index_cursor() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = HaltingSink(IndexSink(), 0, 2)
        await _halt_in_a_batch(p, sink)
        sink.released_only = False
        p.restart("index")
        await p.settle()
        await p.wait_visible(5, committed=True)
        alive = {vector_id for _, vector_id, state in sink.rows() if state.alive}
        assert alive == {f"v{n}" for n in range(5)}

    run_propagator(main, QUARANTINE_OF_ONE)


@pytest.mark.parametrize("rejects", [set(), {2}])
def test_released_row_is_flushed_before_replay_returns(tmp_path: Path, rejects: set[int]) -> None:
    async def main(p: RecordedPropagator) -> None:
        storage = StorageSink(tmp_path / "facts.db", flush_s=1e3)
        sink = HaltingSink(storage, 0, 2)
        await p.attach(sink)
        await p.publish(*(create_delta(f"v{n}") for n in range(3)))
        await p.settle()
        await storage.flush()
        sink.rejects = rejects
        assert (await p.replay("storage")).left == len(rejects)
        assert storage.statistics().dirty_rows == 0
        await p.detach("storage")

    run_propagator(main)


def test_full_quarantine_amid_a_batch_stops_the_storage_cursor(
    tmp_path: Path,
) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(HaltingSink(StorageSink(tmp_path / "facts.db"), 0))
        await p.publish(create_delta("v"))
        await p.settle()
        await p.publish(
            *(create_delta(name) for name in ("a", "v", "b"))
        )  # the second row is blocked, and the quarantine is full
        await anyio.sleep(1)
        statistics = p.statistics().sinks["storage"]
        assert (statistics.state, statistics.applied_offset) == ("stopped", 2)
        assert statistics.committed_offset <= 2
        await p.detach("storage")
        second = StorageSink(tmp_path / "facts.db")
        await p.attach(second)
        await anyio.sleep(1)
        assert (await p.replay("storage")).left == 0
        await p.settle()
        states = [await second.get("default", name) for name in "vab"]
        assert all(state is not None and state.alive for state in states)
        await p.detach("storage")

    run_propagator(main, QUARANTINE_OF_ONE)


def test_each_part_but_the_last_ends_after_its_last_row() -> None:
    batch = encode_batch([create_delta(f"v{n}") for n in range(7)], origin=16, base=1)
    logged = LoggedBatch(batch, 10, 1, Source.LOCAL)
    rows = np.array([0, 2, 3, 5], np.intp)
    parts = [part for group in _pieces([Delivery(logged, rows)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 17]
    parts = [part for group in _pieces([Delivery(logged, rows, end=16)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 16]
