"""Failing sinks and impatient operators in a whole propagator: ends, returns and replays at odd times."""

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
from tests.delta_prop.support import refused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop.testing import RecordedPropagator
    from delta_prop_sinks.sink import Sink


class Moody:
    """A callback's moods: what it rejects, what it raises, how long it takes. `seen` is what it took."""

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


def new(vector_id: str) -> Delta:
    return Delta(vector_id, create([1.0, 2.0]))


def adds_up(p: Propagator, name: str, *, start: int = 0, inherited: int = 0) -> bool:
    told = p.statistics().sinks[name]
    outcomes = told.applied_deltas + told.skipped + told.quarantined + told.dropped
    return told.skipped >= 0 and outcomes == told.applied_offset - start + inherited


def test_whoever_waits_is_told_of_the_one_that_is_left_in_the_way() -> None:
    async def main(p: RecordedPropagator) -> None:
        mood = Moody(0, 1)
        await p.attach(CallbackSink(mood, name="picky"))
        last = [await p.publish(new("v")) for _ in range(3)][-1]
        await p.settle()
        await p.drop("picky", 0)
        refusal = await refused(p.wait_visible(last, sinks=["picky"]))
        assert "it is blocked by offset 1: rejected: not 1" in refusal.message
        with pytest.raises(UsageError, match="waits for 1: give that one"):
            await p.replay("picky", 2)

    run_propagator(main)


def test_what_a_replay_left_half_done_can_be_named() -> None:
    async def main(p: RecordedPropagator) -> None:
        mood = Moody(0)
        await p.attach(CallbackSink(mood, name="picky"))
        last = [await p.publish(new("v")) for _ in range(3)][-1]
        await p.settle()
        mood.rejects.clear()
        mood.fails_at = 1
        with pytest.raises(TimeoutError, match="its quarantine holds 2 deltas"):
            await p.replay("picky", timeout_s=1)
        await anyio.sleep(10)
        assert mood.seen == [0]
        refusal = await refused(p.wait_visible(last, sinks=["picky"]))
        assert "it is blocked by offset 1: to be replayed" in refusal.message
        with pytest.raises(UsageError, match="offset 1 was not rejected: replay it"):
            await p.drop("picky", 1)
        mood.fails_at = None
        assert (await p.replay("picky", 1)).left == 0
        await p.wait_visible(last)
        assert mood.seen == [0, 1, 2]
        assert adds_up(p, "picky")

    run_propagator(main)


def test_a_cancellation_let_out_is_told_for_good_and_nobody_waits_for_that_sink() -> None:
    async def main(p: RecordedPropagator) -> None:
        mood = Moody(0)
        await p.attach(CallbackSink(mood, name="stray"))
        await p.publish(new("v"))
        await p.settle()
        mood.raises = anyio.get_cancelled_exc_class()()
        published = await p.publish(new("w"))
        await anyio.sleep(1)
        for _ in range(2):
            refusal = await refused(p.wait_visible(published, sinks=["stray"]))
            assert "leaked a cancellation" in refusal.message
            p.restart("stray")
        assert "leaked a cancellation" in (p.statistics().sinks["stray"].reason or "")
        before = anyio.current_time()
        assert "leaked a cancellation" in (await refused(p.replay("stray"))).message
        await p.detach("stray")
        assert anyio.current_time() == before
        mood.raises = None
        mood.rejects.clear()
        await p.attach(CallbackSink(mood, name="stray"))
        await p.wait_visible(published)
        assert (await p.replay("stray")).applied == 1
        assert mood.seen == [1, 0]

    run_propagator(main)


@pytest.mark.parametrize(
    "at", ["call", "back-off", "breaker", "late call", "late back-off", "full", "detach"]
)
def test_a_cancelled_propagator_closes_at_once_whatever_its_sinks_do(at: str) -> None:
    ended_at: list[float] = []

    async def main() -> None:
        mood = Moody(0)
        with anyio.CancelScope() as scope:
            async with (
                Propagator(world=virtual_world(0)) as p,
                anyio.create_task_group() as tasks,
            ):
                await p.attach(CallbackSink(mood, name="sick"))
                await p.publish(new("v"))
                await anyio.sleep(1)
                if at in ("call", "detach", "late call"):
                    mood.takes_s = 1e5
                elif at != "full":
                    mood.raises = ConnectionRefusedError("no")
                if at.startswith("late"):
                    tasks.start_soon(p.replay, "sick")
                else:
                    published = await p.publish(new("w"))
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


class Odd(BaseException):
    """Of no kind that anybody foresees."""


@pytest.mark.parametrize("error", [Odd("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_exception_ends_the_propagator_and_leaves_nobody_waiting(error: BaseException) -> None:
    ends: list[str] = []

    async def main() -> None:
        mood = Moody()
        mood.raises = error
        async with Propagator(world=virtual_world(0)) as p:
            await p.attach(CallbackSink(mood, name="odd"))
            published = await p.publish(new("v"))
            try:
                await p.wait_visible(published)
            finally:
                ends.append("told")

    with pytest.raises(BaseException) as caught:
        run_virtual(main)
    assert caught.group_contains(type(error)) if isinstance(caught.value, BaseExceptionGroup) else True
    assert ends == ["told"]


# --- coming back


def test_what_lies_ahead_of_a_sink_that_comes_back_is_delivered_in_its_turn() -> None:
    async def main(p: RecordedPropagator) -> None:
        mood = Moody(2)
        await p.attach(CallbackSink(mood, name="again"))
        for vector in "xvvyv":
            await p.publish(new(vector))
        await p.settle()
        assert len(p.quarantine("again")) == 2
        await p.detach("again")
        mood.seen.clear()
        mood.rejects.clear()
        mood.takes_s = 1
        await p.attach(CallbackSink(mood, name="again"), start="earliest")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(p.replay, "again")
            await p.settle()
        assert mood.seen == [0, 1, 2, 3, 4]
        assert p.quarantine("again") == []
        assert adds_up(p, "again")

    run_propagator(main)


@pytest.mark.parametrize("start", ["resume", "latest", 3])
def test_a_quarantine_that_waited_counts_from_anew(start: int | str) -> None:
    async def main(p: RecordedPropagator) -> None:
        mood = Moody(0, 1, 2)
        await p.attach(CallbackSink(mood, name="again"))
        for vector in "abcd":
            await p.publish(new(vector))
        await p.settle()
        await p.drop("again", 0)
        mood.rejects.discard(1)
        await p.replay("again", 1)
        assert adds_up(p, "again")
        await p.detach("again")
        await p.publish(new("c"))
        await p.attach(CallbackSink(mood, name="again"), start=start)  # type: ignore[arg-type]
        begin = {"resume": 4, "latest": 5}.get(str(start), 3)
        await p.settle()
        assert adds_up(p, "again", start=begin, inherited=1)
        mood.rejects.clear()
        await p.replay("again")
        assert adds_up(p, "again", start=begin, inherited=1)
        told = p.statistics().sinks["again"]
        assert (told.dropped, told.quarantined) == (0, 0)

    run_propagator(main)


class Halting:
    """A real sink that rejects the rows at some offsets, or takes nothing but late rows."""

    def __init__(self, sink: Sink, *rejects: int) -> None:
        self.sink = sink
        self.name = sink.name
        self.rejects = set(rejects)
        self.late_only = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink, name)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for one in deliveries:
            if self.late_only and not one.redelivered:
                raise StopSink("late rows only")
            rows = np.arange(one.logged.count) if one.rows is None else one.rows
            for at, row in enumerate(rows.tolist()):
                if one.first_offset + row in self.rejects:
                    if at:
                        end = one.first_offset + row
                        await self.sink.apply([replace(one, rows=rows[:at], end=end)])
                    raise RejectDelta(one.first_offset + row, "no")
            await self.sink.apply([one])


async def _halt_in_a_batch(p: RecordedPropagator, sink: Halting) -> None:
    """Row 0 of a batch comes late, while row 1 is all of the rest that has come."""
    await p.attach(sink)
    await p.publish_many([f"v{n}" for n in range(5)], np.ones((5, 2), np.float32))
    await anyio.sleep(1)
    told = p.statistics().sinks[sink.name]
    assert (told.state, told.applied_offset, told.quarantined) == ("stopped", 2, 1)
    sink.rejects.clear()
    sink.late_only = True
    assert (await p.replay(sink.name)).applied == 1
    await anyio.sleep(2)
    told = p.statistics().sinks[sink.name]
    assert (told.state, told.applied_offset) == ("stopped", 2)
    assert told.committed_offset <= 2


ONE_HELD = Settings(quarantine_deltas_max=1)


def test_a_late_row_does_not_carry_the_cursor_of_storage_over_the_rest_of_its_batch(tmp_path: Path) -> None:
    async def main(p: RecordedPropagator) -> None:
        await _halt_in_a_batch(p, Halting(StorageSink(tmp_path / "facts.db"), 0, 2))
        await p.detach("storage")
        again = StorageSink(tmp_path / "facts.db")
        await p.attach(again)
        await p.settle()
        states = [await again.get("default", f"v{n}") for n in range(5)]
        assert all(state is not None and state.alive for state in states)
        await p.detach("storage")

    run_propagator(main, ONE_HELD)


def test_a_late_row_does_not_carry_the_cursor_of_an_index_over_the_rest_of_its_batch() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = Halting(IndexSink(), 0, 2)
        await _halt_in_a_batch(p, sink)
        sink.late_only = False
        p.restart("index")
        await p.settle()
        await p.wait_visible(5, committed=True)
        alive = {vector_id for _, vector_id, state in sink.rows() if state.alive}
        assert alive == {f"v{n}" for n in range(5)}

    run_propagator(main, ONE_HELD)


@pytest.mark.parametrize("rejects", [set(), {2}])
def test_a_late_row_is_on_the_disk_when_the_quarantine_lets_go_of_it(
    tmp_path: Path, rejects: set[int]
) -> None:
    async def main(p: RecordedPropagator) -> None:
        storage = StorageSink(tmp_path / "facts.db", flush_s=1e3)
        sink = Halting(storage, 0, 2)
        await p.attach(sink)
        await p.publish(*(new(f"v{n}") for n in range(3)))
        await p.settle()
        await storage.flush()
        sink.rejects = rejects
        assert (await p.replay("storage")).left == len(rejects)
        assert storage.statistics().dirty_rows == 0
        await p.detach("storage")

    run_propagator(main)


def test_what_finds_no_room_in_the_middle_of_a_batch_is_not_passed_by_the_cursor_of_storage(
    tmp_path: Path,
) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(Halting(StorageSink(tmp_path / "facts.db"), 0))
        await p.publish(new("v"))
        await p.settle()
        await p.publish(*(new(name) for name in ("a", "v", "b")))  # the second has to wait, with no room
        await anyio.sleep(1)
        told = p.statistics().sinks["storage"]
        assert (told.state, told.applied_offset) == ("stopped", 2)
        assert told.committed_offset <= 2
        await p.detach("storage")
        again = StorageSink(tmp_path / "facts.db")
        await p.attach(again)
        await anyio.sleep(1)
        assert (await p.replay("storage")).left == 0
        await p.settle()
        states = [await again.get("default", name) for name in "vab"]
        assert all(state is not None and state.alive for state in states)
        await p.detach("storage")

    run_propagator(main, ONE_HELD)


def test_a_part_of_a_delivery_ends_where_its_rows_end() -> None:
    batch = encode_batch([new(f"v{n}") for n in range(7)], origin=16, base=1)
    logged = LoggedBatch(batch, 10, 1, Source.LOCAL)
    rows = np.array([0, 2, 3, 5], np.intp)
    parts = [part for group in _pieces([Delivery(logged, rows)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 17]
    parts = [part for group in _pieces([Delivery(logged, rows, end=16)], 2) for part in group]
    assert [part.next_offset for part in parts] == [13, 16]
