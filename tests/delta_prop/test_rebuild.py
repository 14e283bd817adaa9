"""A sink that lost its place is rebuilt from a snapshot, goes on with the tail, and holds the whole fold."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimCrash, SimDisk
from delta_prop_sinks import CacheSink, CallbackSink, IndexSink, ResidentVectors, StorageSink
from delta_prop_wire.delta import Delta, create, delete, offset, scale, sparse_add
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.state_rows import state_of
from tests.delta_prop.rebuilding import FAILURES, History, Place, PlacedSink, same
from tests.delta_prop.support import expect_refusal, refused

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Settings(log_deltas_max=60, merge_deltas_max=100, retries=2, breaker_failures=100)


async def publish_round(p: Propagator, number: int, count: int = 10) -> None:
    """Creates at first, additive changes from then on, now and then a tombstone."""
    for row in range(count):
        key = f"v{row}"
        if number == 0:
            await p.publish(Delta(key, create([row, 1.0, 2.0]), metadata={"row": row}))
        elif (number + row) % 7 == 0:
            await p.publish(Delta(f"gone{number}", create([1.0, 1.0, 1.0])), Delta(f"gone{number}", delete()))
        else:
            change = (sparse_add([0], [1.25]), scale(1.5), offset(0.5))[(number + row) % 3]
            await p.publish(Delta(key, change, metadata={"at": number}))


async def fill(p: Propagator, history: History, rounds: range) -> None:
    for number in rounds:
        await publish_round(p, number)
        await anyio.sleep(0.01)
        history.read()


def test_a_sink_away_since_the_start_is_rebuilt_and_catches_up() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            other: list[int] = []
            await p.attach(CallbackSink(lambda at, _: other.append(at), name="other"))
            history = History(p)
            await fill(p, history, range(8))
            snapshot = history.take_snapshot()
            await fill(p, history, range(8, 11))
            assert p.statistics().log.start_offset > 0
            place = Place()
            await p.attach(PlacedSink(place))
            await fill(p, history, range(11, 13))
            end = p.statistics().log.next_offset
            await p.wait_visible(end)
            same(place.states, history.states())
            told = p.statistics().sinks["placed"]
            assert (told.state, told.rebuild, told.rebuilds, told.lag) == ("idle", None, 1, 0)
            assert told.applied_deltas + told.skipped == end - snapshot.offset
            assert place.calls[0] == "begin"
            assert place.calls.index("end") == 1 + -(-snapshot.rows // 5)
            assert (snapshot.opened, snapshot.closed) == (1, 2)  # once it was only asked for
            assert other == list(range(end))

    run_virtual(main)


@pytest.mark.parametrize("cursor", [True, False])
@pytest.mark.parametrize("failing", range(1, 8))
def test_a_rebuild_survives_every_failure_of_its_sink(failing: int, cursor: bool) -> None:
    async def main() -> None:
        for failure in FAILURES:
            async with Propagator(SMALL, world=virtual_world()) as p:
                history = History(p)
                await fill(p, history, range(8))
                history.take_snapshot()
                await fill(p, history, range(8, 10))
                place = Place()
                place.fail[failing] = failure
                await p.attach(PlacedSink(place, cursor=cursor))
                await anyio.sleep(1)
                if p.statistics().sinks["placed"].state == "stopped":
                    assert "no more" in (p.statistics().sinks["placed"].reason or "")
                    assert p.statistics().sinks["placed"].rebuild is not None or "end" in place.calls
                    p.restart("placed")
                await p.wait_visible(p.statistics().log.next_offset)
                same(place.states, history.states())
                assert place.calls.count("end") <= 2
                assert not place.fail

    run_virtual(main)


def test_a_call_that_takes_too_long_begins_it_again() -> None:
    async def main() -> None:
        settings = replace(SMALL, apply_timeout_s=2.0)
        async with Propagator(settings, world=virtual_world()) as p:
            history = History(p)
            await fill(p, history, range(9))
            snapshot = history.take_snapshot()
            place = Place()
            place.hang.add(2)
            await p.attach(PlacedSink(place))
            await anyio.sleep(1)
            told = p.statistics().sinks["placed"]
            assert told.state == "rebuilding"
            assert told.rebuild is not None
            assert (told.rebuild.offset, told.rebuild.rows_total) == (snapshot.offset, snapshot.rows)
            assert "log starts at" in told.rebuild.why
            with pytest.raises(TimeoutError, match="'placed' is rebuilding"):
                await p.wait_visible(snapshot.offset, sinks=["placed"], timeout_s=0.1)
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert place.calls.count("begin") == 2
            assert snapshot.opened == 2

    run_virtual(main)


def test_a_snapshot_that_cannot_be_read_is_begun_again() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            await fill(p, history, range(9))
            history.take_snapshot().fails = 2
            place = Place()
            await p.attach(PlacedSink(place))
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert place.calls.count("begin") == 3

    run_virtual(main)


def test_a_sink_that_loses_its_place_is_rebuilt_at_once() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, place = History(p), Place()
            await p.attach(PlacedSink(place), on_log_full="invalidate_cursor")
            await fill(p, history, range(1))
            place.hang.add(len(place.calls) + 1)
            await fill(p, history, range(1, 8))
            history.take_snapshot()
            await fill(p, history, range(8, 12))
            assert p.statistics().log.start_offset > 20
            place.release.set()
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert p.statistics().sinks["placed"].rebuilds == 1

    run_virtual(main)


def test_the_tail_is_kept_while_a_rebuild_runs_and_a_newer_snapshot_serves_one_that_lost_it() -> None:
    async def main(required: bool) -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, place = History(p), Place()
            await fill(p, history, range(8))
            snapshot = history.take_snapshot()
            place.hang.add(2)
            await p.attach(PlacedSink(place), required=required)
            await anyio.sleep(0.1)
            await fill(p, history, range(8, 13))
            assert p.statistics().log.start_offset <= snapshot.offset
            if required:  # it keeps the log from going on, as it would had it been there all the time
                more = [Delta(f"more{n}", create([1.0, 2.0, 3.0])) for n in range(20)]
                assert (await refused(p.publish(*more, timeout_s=1))).code is ErrorCode.LOG_FULL
            else:
                newer = history.take_snapshot()
                await fill(p, history, range(13, 16))
                assert p.statistics().log.start_offset > snapshot.offset
            place.release.set()
            await p.wait_visible(p.statistics().log.next_offset)
            history.read()
            same(place.states, history.states())
            assert place.calls.count("begin") == (1 if required else 2)
            assert required or newer.closed
            await fill(p, history, range(16, 30))  # and nobody is kept from going on afterwards
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())

    run_virtual(main, True)
    run_virtual(main, False)


def test_an_operator_has_a_sink_rebuilt_and_what_it_set_aside_is_in_the_states() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history, place = History(p), Place()
            await p.attach(PlacedSink(place))
            await fill(p, history, range(2))
            place.states.clear()  # it drifts, whatever the reason
            p.rebuild("placed")  # the log is whole, so it is read once more
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert place.calls.count("take") == 0
            await fill(p, history, range(2, 6))
            history.take_snapshot()
            p.rebuild("placed")
            p.rebuild("placed")
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert p.statistics().sinks["placed"].rebuilds == 2
            await p.attach(CallbackSink(print, name="lines"), start="latest")
            with pytest.raises(UsageError, match=r"cannot be rebuilt: it stores deltas"):
                p.rebuild("lines")
            with pytest.raises(UsageError, match="no sink named"):
                p.rebuild("nobody")

    run_virtual(main)


def test_what_cannot_be_rebuilt_is_told_what_to_do() -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            await fill(p, history, range(9))
            await expect_refusal(lambda: p.attach(PlacedSink(Place())), "let the log compact")
            await expect_refusal(lambda: p.attach(PlacedSink(Place()), rebuild=True), "has no snapshot")
            await expect_refusal(
                lambda: p.attach(CallbackSink(print)), 'start="earliest" to take what is left'
            )
            place = Place()
            await p.attach(PlacedSink(place), start="earliest")  # as it was: what is left, and no more
            await p.wait_visible(p.statistics().log.next_offset)
            assert "begin" not in place.calls
            with pytest.raises(Refused, match=r"cannot be rebuilt: .*let it compact") as refusal:
                p.rebuild("placed")
            assert refusal.value.code is ErrorCode.CURSOR_TOO_OLD
            await fill(p, history, range(9, 10))
            await p.wait_visible(p.statistics().log.next_offset)
            told = p.statistics().sinks["placed"]
            assert (told.state, told.rebuilds) == ("idle", 0)  # it goes on as it was
            assert "begin" not in place.calls  # what it holds is not given up for nothing
            history.take_snapshot()
            p.rebuild("placed")
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            await expect_refusal(
                lambda: p.attach(PlacedSink(Place(), "topics"), topics=["*", "op:create"]), "needs offset 0"
            )
            with pytest.raises(UsageError, match="do not match complete vectors"):
                await p.attach(PlacedSink(Place(), "topics"), topics="op:create", rebuild=True)
            some = Place()
            await p.attach(PlacedSink(some, "some"), topics=["v:v1", "v:v2"])
            await p.wait_visible(p.statistics().log.next_offset)
            expected = history.states()
            same(some.states, {ref: expected[ref] for ref in (("default", "v1"), ("default", "v2"))})

    run_virtual(main)


@pytest.mark.parametrize("cursor", [True, False])
@pytest.mark.parametrize("crash", [True, False])
def test_a_rebuild_that_a_service_did_not_end_is_begun_again_by_the_next(cursor: bool, crash: bool) -> None:
    disk = SimDisk(1)
    log = LogSettings(segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=1 << 19)
    place = Place()

    def service(seed: int, disk: SimDisk) -> Propagator:
        return Propagator(
            Settings(close_timeout_s=1), data="x", log=log, world=virtual_world(seed, disk=disk)
        )

    disks: list[SimDisk] = []

    async def first() -> None:
        async with service(1, disk) as p:
            history = History(p)
            await p.attach(PlacedSink(place, cursor=cursor))
            await fill(p, history, range(3))
            history.take_snapshot()
            place.hang.add(len(place.calls) + 3)
            p.rebuild("placed")
            await anyio.sleep(0.3)
            assert p.statistics().sinks["placed"].state == "rebuilding"
            disks.append(disk.crash(3) if crash else disk)

    async def second() -> None:
        place.hang.clear()
        calls = len(place.calls)
        place.void = place.void and not cursor  # as if the sink itself had not noticed
        async with service(2, disks[0]) as p:
            history = History(p)
            history.take_snapshot()
            await p.attach(PlacedSink(place, cursor=cursor), start="latest")
            await fill(p, history, range(3, 5))
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert place.calls[calls] == "begin"
        async with service(3, disks[0]) as p:
            calls = len(place.calls)
            await p.attach(PlacedSink(place, cursor=cursor))
            await p.wait_visible(p.statistics().log.next_offset)
            assert place.calls[calls:] == []

    with suppress(SimCrash) if crash else nullcontext():
        run_virtual(first)
    run_virtual(second)


def test_data_of_another_log_are_replaced_only_where_its_owner_says_so(tmp_path: Path) -> None:
    async def fill_one(seed: int, rounds: range) -> None:
        async with Propagator(data="x", world=virtual_world(seed, disk=SimDisk(seed))) as p:
            storage = await p.attach(StorageSink(tmp_path / "v.db"), rebuild=seed > 1)
            for number in rounds:
                await publish_round(p, number)
            await p.wait_visible(p.statistics().log.next_offset)
            history = History(p)
            history.read()
            await storage.flush()
            held = {(namespace, key): state async for namespace, key, state in storage.rows()}
            if seed > 1:
                same(held, history.states())

    run_virtual(fill_one, 1, range(4))

    async def not_by_itself() -> None:
        async with Propagator(data="x", world=virtual_world(5, disk=SimDisk(5))) as p:
            await publish_round(p, 0)
            refusal = await refused(p.attach(StorageSink(tmp_path / "v.db")))
            assert refusal.code is ErrorCode.CURSOR_TOO_OLD
            assert "or with rebuild=True" in refusal.message

    run_virtual(not_by_itself)
    run_virtual(fill_one, 2, range(2))


def test_storage_index_and_cache_come_back_to_the_same_answers(tmp_path: Path) -> None:
    async def main() -> None:
        async with Propagator(SMALL, world=virtual_world()) as p:
            history = History(p)
            whole = await p.attach(IndexSink(name="whole"))
            await fill(p, history, range(8))
            history.take_snapshot()
            await fill(p, history, range(8, 11))
            resident = ResidentVectors()
            storage = await p.attach(StorageSink(tmp_path / "v.db", resident=resident))
            shared = await p.attach(IndexSink(name="shared", resident=resident))
            own = await p.attach(IndexSink(name="own"))
            cache = await p.attach(CacheSink())
            await fill(p, history, range(11, 13))
            await p.wait_visible(p.statistics().log.next_offset)
            states = history.states()
            await storage.flush()
            same({(namespace, key): state async for namespace, key, state in storage.rows()}, states)
            query: Any = [1.0, 2.0, 3.0]
            for index in (shared, own):
                assert index.search(query, 20, metric="l2") == whole.search(query, 20, metric="l2")
                same({(namespace, key): state for namespace, key, state in index.rows()}, states)
            for ref, state in states.items():
                found = await cache.get(*ref)
                assert found is not None
                assert (found.content, found.key) == (state.content, state.key)
            for name in ("shared", "own", "cache", "storage"):
                assert p.statistics().sinks[name].rebuilds == 1, name
            p.rebuild("storage")  # the index that shares its vectors follows
            await fill(p, history, range(13, 15))
            await p.wait_visible(p.statistics().log.next_offset)
            await storage.flush()
            same({ref[:2]: ref[2] for ref in [row async for row in storage.rows()]}, history.states())
            assert shared.search(query, 20, metric="l2") == whole.search(query, 20, metric="l2")

    run_virtual(main)


def test_the_states_of_a_large_frame_are_made_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.delta_prop.rebuilding.FRAME_ROWS", 1000)
    made: list[int] = [0]
    monkeypatch.setattr(
        "delta_prop.route.rebuild.state_of", lambda *given: (made.append(made.pop() + 1), state_of(*given))[1]
    )

    async def watch() -> None:
        while True:
            made.append(0)
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        settings = replace(SMALL, batch_deltas=3, merge_deltas_max=3)
        async with Propagator(settings, world=virtual_world()) as p, anyio.create_task_group() as tasks:
            history = History(p)
            await fill(p, history, range(8))
            assert history.take_snapshot().rows > 9
            await p.attach(PlacedSink(place := Place()))
            tasks.start_soon(watch)
            await p.wait_visible(p.statistics().log.next_offset)
            same(place.states, history.states())
            assert sum(made) > 9
            assert max(made) <= 3
            tasks.cancel_scope.cancel()

    run_virtual(main)
