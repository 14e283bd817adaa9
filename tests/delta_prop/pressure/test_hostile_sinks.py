"""Failing sinks and hasty operators: cancellation, replay and reattachment at odd moments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop.config import Settings
from delta_prop.embedded import Propagator
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
    """A callback that rejects, raises and delays as set. `seen` holds what it applied."""

    def __init__(self, *rejects: int) -> None:
        self.rejects = set(rejects)
        self.raises: BaseException | None = None
        self.takes_s = 0.0
        self.fails_at: int | None = None
        self.seen: list[int] = []

    async def __call__(self, offset: int, delta: Delta) -> None:
        if self.takes_s:
            await anyio.sleep(self.takes_s)
        if self.raises is not None:
            raise self.raises
        if offset == self.fails_at:
            raise ConnectionRefusedError("no")
        if offset in self.rejects:
            raise RejectDelta(offset, f"not {offset}")
        self.seen.append(offset)


def create_delta(vector_id: str) -> Delta:
    return Delta(vector_id, create([1.0, 2.0]))


def outcomes_add_up(p: Propagator, name: str, *, start: int = 0, inherited: int = 0) -> bool:
    statistics = p.statistics().sinks[name]
    outcomes = statistics.applied_deltas + statistics.skipped + statistics.quarantined + statistics.dropped
    return statistics.skipped >= 0 and outcomes == statistics.applied_offset - start + inherited


def test_waiter_is_refused_with_the_remaining_blocking_offset() -> None:
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


def test_half_done_replay_can_be_resumed_by_offset() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0)
        await p.attach(CallbackSink(callback, name="picky"))
        last = [await p.publish(create_delta("v")) for _ in range(3)][-1]
        await p.settle()
        callback.rejects.clear()
        callback.fails_at = 1
        with pytest.raises(TimeoutError, match="its quarantine holds 2 deltas"):
            await p.replay("picky", timeout_s=1)
        await anyio.sleep(10)
        assert callback.seen == [0]
        refusal = await catch_refusal(p.wait_visible(last, sinks=["picky"]))
        assert "it is blocked by offset 1: to be replayed" in refusal.message
        with pytest.raises(UsageError, match="offset 1 was not rejected: replay it"):
            await p.drop("picky", 1)
        callback.fails_at = None
        assert (await p.replay("picky", 1)).left == 0
        await p.wait_visible(last)
        assert callback.seen == [0, 1, 2]
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
        assert callback.seen == [1, 0]

    run_propagator(main)


@pytest.mark.parametrize(
    "at", ["call", "back-off", "breaker", "late call", "late back-off", "full", "detach"]
)
def test_cancelled_propagator_closes_at_once(at: str) -> None:
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
                if at in ("call", "detach", "late call"):
                    callback.takes_s = 1e5
                elif at != "full":
                    callback.raises = ConnectionRefusedError("no")
                if at.startswith("late"):
                    tasks.start_soon(p.replay, "sick")
                else:
                    published = await p.publish(create_delta("w"))
                    tasks.start_soon(p.wait_visible, published)
                await anyio.sleep(20 if at == "breaker" else 0.3)
                if at == "detach":
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
    ends: list[str] = []

    async def main() -> None:
        callback = FaultyCallback()
        callback.raises = error
        async with Propagator(world=virtual_world(0)) as p:
            await p.attach(CallbackSink(callback, name="odd"))
            published = await p.publish(create_delta("v"))
            try:
                await p.wait_visible(published)
            finally:
                ends.append("told")

    with pytest.raises(BaseException) as caught:
        run_virtual(main)
    if isinstance(error, KeyboardInterrupt | SystemExit):  # the loop raises them by themselves
        assert caught.value is error
    else:
        assert caught.group_contains(type(error), match=r"\Aodd\Z")
    assert ends == ["told"]


# --- reattached sinks


def test_rewound_sink_gets_quarantined_rows_in_order() -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(2)
        await p.attach(CallbackSink(callback, name="again"))
        for vector in "xvvyv":
            await p.publish(create_delta(vector))
        await p.settle()
        assert len(p.quarantine("again")) == 2
        await p.detach("again")
        callback.seen.clear()
        callback.rejects.clear()
        callback.takes_s = 1
        await p.attach(CallbackSink(callback, name="again"), start="earliest")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.replay, "again")
            await p.settle()
        assert callback.seen == [0, 1, 2, 3, 4]
        assert p.quarantine("again") == []
        assert outcomes_add_up(p, "again")

    run_propagator(main)


@pytest.mark.parametrize("start", ["resume", "latest", 3])
def test_statistics_of_a_reattached_quarantine_start_anew(start: int | str) -> None:
    async def main(p: RecordedPropagator) -> None:
        callback = FaultyCallback(0, 1, 2)
        await p.attach(CallbackSink(callback, name="again"))
        for vector in "abcd":
            await p.publish(create_delta(vector))
        await p.settle()
        await p.drop("again", 0)
        callback.rejects.discard(1)
        await p.replay("again", 1)
        assert outcomes_add_up(p, "again")
        await p.detach("again")
        await p.publish(create_delta("c"))
        await p.attach(CallbackSink(callback, name="again"), start=start)  # type: ignore[arg-type]
        begin = {"resume": 4, "latest": 5}.get(str(start), 3)
        await p.settle()
        assert outcomes_add_up(p, "again", start=begin, inherited=1)
        callback.rejects.clear()
        await p.replay("again")
        assert outcomes_add_up(p, "again", start=begin, inherited=1)
        statistics = p.statistics().sinks["again"]
        assert (statistics.dropped, statistics.quarantined) == (0, 0)

    run_propagator(main)


class HaltingSink:
    """A real sink that rejects the rows at some offsets, or accepts only redelivered rows."""

    def __init__(self, sink: Sink, *rejects: int) -> None:
        self.sink = sink
        self.name = sink.name
        self.rejects = set(rejects)
        self.redelivered_only = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink, name)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            if self.redelivered_only and not one.redelivered:
                raise StopSink("late rows only")
            rows = np.arange(one.logged.count) if one.rows is None else one.rows
            for at, row in enumerate(rows.tolist()):
                if one.first_offset + row in self.rejects:
                    if at:
                        end = one.first_offset + row
                        await self.sink.apply([replace(one, rows=rows[:at], end=end)])
                    raise RejectDelta(one.first_offset + row, "no")
            await self.sink.apply([one])


async def _halt_in_a_batch(p: RecordedPropagator, sink: HaltingSink) -> None:
    """Stop the sink within a batch: row 0 is redelivered, row 1 is all that it applied of the rest."""
    await p.attach(sink)
    await p.publish_many([f"v{n}" for n in range(5)], np.ones((5, 2), np.float32))
    await anyio.sleep(1)
    statistics = p.statistics().sinks[sink.name]
    assert (statistics.state, statistics.applied_offset, statistics.quarantined) == ("stopped", 2, 1)
    sink.rejects.clear()
    sink.redelivered_only = True
    assert (await p.replay(sink.name)).applied == 1
    await anyio.sleep(2)
    statistics = p.statistics().sinks[sink.name]
    assert (statistics.state, statistics.applied_offset) == ("stopped", 2)
    assert statistics.committed_offset <= 2


QUARANTINE_OF_ONE = Settings(quarantine_deltas_max=1)


def test_redelivered_row_does_not_advance_storage_cursor(tmp_path: Path) -> None:
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


def test_redelivered_row_does_not_advance_index_cursor() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = HaltingSink(IndexSink(), 0, 2)
        await _halt_in_a_batch(p, sink)
        sink.redelivered_only = False
        p.restart("index")
        await p.settle()
        await p.wait_visible(5, committed=True)
        alive = {vector_id for _, vector_id, state in sink.rows() if state.alive}
        assert alive == {f"v{n}" for n in range(5)}

    run_propagator(main, QUARANTINE_OF_ONE)


@pytest.mark.parametrize("rejects", [set(), {2}])
def test_redelivered_row_is_flushed_before_its_quarantine_ends(tmp_path: Path, rejects: set[int]) -> None:
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


def test_delivery_part_ends_after_its_last_row() -> None:
    batch = encode_batch([create_delta(f"v{n}") for n in range(7)], origin=16, base=1)
    logged = LoggedBatch(batch, 10, 1, Source.LOCAL)
    rows = np.array([0, 2, 3, 5], np.intp)
    parts = [part for group in _pieces([Delivery(logged, rows)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 17]
    parts = [part for group in _pieces([Delivery(logged, rows, end=16)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 16]
