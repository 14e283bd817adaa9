"""`forget` removes tombstones: expired ones by offset, and erased vectors with every byte in every file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    HoldsTombstones,
    IndexSink,
    JsonLinesSink,
    ResidentVectors,
    StorageSink,
    TryAgain,
)
from delta_prop_sinks.conformance.steps import call_and_cancel_at
from delta_prop_wire.delta import Delta, create, delete, dense, metadata_only, opaque, sparse
from delta_prop_wire.encode import encode_batch
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, abandon, check_state, oracle, states_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop_sinks.image_manager import ImageManager
    from delta_prop_wire.algebra import VectorState

Ref = tuple[str, str]
X, Y, Z = ("default", "secret-id-x"), ("default", "secret-id-y"), ("notes", "secret-id-z")
ERASED = [X, Y, Z]
NUMBERS = [1234.5678, -8765.4321, 31.41592]
WIDER_NUMBERS = [*NUMBERS, 27.18281]
SECRETS = [
    *(vector_id.encode() for _, vector_id in ERASED),
    np.array(NUMBERS, "<f4").tobytes(),
    np.array(NUMBERS[::-1], "<f4").tobytes(),
    b"secret-title",
    b"secret-data",
]
NEVER = 10**9


def found_in(folder: Path, secrets: Sequence[bytes] = SECRETS) -> list[tuple[str, bytes]]:
    """Return the secrets that some file of a folder holds."""
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    return [(name, secret) for name, content in contents.items() for secret in secrets if secret in content]


def images_in(folder: Path) -> list[Path]:
    return list(folder.glob("*-image-*"))


def images_of(sink: StorageSink) -> ImageManager:
    """Return the manager of a sink's images; no public call writes an image at a given moment."""
    return sink._image_manager


async def apply_new(log: FakeLog, sink: Any, *deltas: Delta) -> None:
    applied_offset = log.next_offset
    log.append(*deltas)
    await sink.apply(log.deliveries(applied_offset))
    if isinstance(sink, StorageSink):
        await sink.flush()


def on(ref: Ref, operation: Any, **arguments: Any) -> Delta:
    return Delta(ref[1], operation, namespace=ref[0], **arguments)


def filler(start: int, count: int = 60) -> list[Delta]:
    return [Delta(f"row-{start + i:03}", create([i, 1, 2]), metadata={"n": i}) for i in range(count)]


async def write_secrets(log: FakeLog, sink: StorageSink) -> None:
    """Write versions of vectors that are larger and smaller than the ones before, between other rows."""
    await apply_new(log, sink, *filler(0))
    await apply_new(log, sink, on(X, create(NUMBERS), metadata={"t": "secret-title"}))
    await apply_new(log, sink, on(X, dense(NUMBERS[::-1]), metadata={"t": "secret-title" * 200}))
    await apply_new(log, sink, on(Y, create(NUMBERS)), on(Z, opaque(b"secret-data"), metadata={"n": 1}))
    await apply_new(log, sink, *filler(40), on(X, dense(NUMBERS), metadata={"t": "secret-title"}))
    await apply_new(log, sink, on(Z, opaque(b"secret-data" * 1000)), on(Y, dense(WIDER_NUMBERS[:3])))
    await apply_new(log, sink, on(Z, opaque(b"secret-data")))
    await apply_new(log, sink, on(X, metadata_only(), metadata={"t": None}), *filler(20, 5))


async def delete_secrets(log: FakeLog, sink: StorageSink) -> None:
    await apply_new(log, sink, on(X, delete()), on(Y, delete()), on(Z, delete()), Delta("row-001", delete()))


async def check_states(sink: StorageSink, log: FakeLog, removed: Sequence[Ref]) -> None:
    """Check that a sink has the log's states, and nothing of removed vectors."""
    for ref in removed:
        assert await sink.get(*ref) is None
        assert sink.head(*ref) is None
    for ref, state in oracle(log.batches).items():
        if ref not in removed:
            check_state(await sink.get(*ref), state, context=ref)


@pytest.mark.parametrize("residency", ["complete", "evicted"])
@pytest.mark.parametrize("image_rows_min", [1, NEVER])
@pytest.mark.parametrize("mode", ["behind", "through"])
def test_erased_vectors_leave_no_byte(tmp_path: Path, mode: Any, image_rows_min: int, residency: str) -> None:
    def new_sink() -> StorageSink:
        resident = ResidentVectors(resident_bytes_max=6000 if residency == "evicted" else 1 << 30)
        path = tmp_path / "v.db"
        return StorageSink(path, mode=mode, image_rows_min=image_rows_min, resident=resident)

    async def main() -> None:
        log, sink = FakeLog(), new_sink()
        await sink.open(log)
        await write_secrets(log, sink)
        await sink.aclose()
        sink = new_sink()
        await sink.open(log)
        found = {secret for _, secret in found_in(tmp_path)}
        assert {*SECRETS[:4], b"secret-data"} <= found  # others are overwritten
        await delete_secrets(log, sink)
        await apply_new(log, sink, *filler(20))
        assert sink.resident.complete == (residency == "complete")
        assert (sink.head(*X) is None) == (residency == "evicted")
        await sink.forget(
            [*ERASED, ("default", "unknown"), ("nowhere", "unknown"), ("default", "row-002")], 0
        )
        assert found_in(tmp_path) == []
        await check_states(sink, log, ERASED)
        await apply_new(log, sink, *filler(70), Delta("new", opaque(b"new")))
        await sink.aclose()
        assert found_in(tmp_path) == []
        sink = new_sink()
        await sink.open(log)
        await check_states(sink, log, ERASED)
        await sink.forget(ERASED, 0)
        await check_states(sink, log, ERASED)
        await sink.aclose()

    anyio.run(main)


def test_erasure_clears_what_an_earlier_removal_has_left(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await write_secrets(log, sink)
        await sink.aclose()
        with closing(sqlite3.connect(path)) as raw, raw:
            raw.execute("PRAGMA secure_delete = OFF")
            raw.execute("DELETE FROM vectors WHERE vector_id LIKE 'secret%'")
        assert found_in(tmp_path, SECRETS[:3])
        sink = StorageSink(path)
        await sink.open(log)
        await sink.forget([X], 0)
        assert found_in(tmp_path) == []
        await sink.aclose()

    anyio.run(main)


def test_erasure_waits_for_another_reader_of_the_file(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await write_secrets(log, sink)
        await delete_secrets(log, sink)
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM vectors").fetchone()
            with pytest.raises(TryAgain, match="cannot be erased: another program reads it"):
                await sink.forget(ERASED, 0)
        await sink.forget(ERASED, 0)
        assert found_in(tmp_path) == []
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("is_partial", [False, True])
def test_expiry_removes_only_tombstones_below_the_offset(tmp_path: Path, is_partial: bool) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        resident = ResidentVectors(resident_bytes_max=6000 if is_partial else 1 << 30)
        sink = StorageSink(path, resident=resident)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 40), Delta("nobody", sparse([0], [1])))
        for number in range(6):
            await apply_new(log, sink, Delta(f"row-{number:03}", delete()))
        last_offsets = [log.next_offset - 6 + number for number in range(6)]
        await apply_new(log, sink, Delta("row-001", create([5, 5, 5])), *filler(50))
        await sink.forget([], 0)
        await check_states(sink, log, [])
        await sink.forget([], last_offsets[3])
        removed = [("default", name) for name in ("row-000", "row-002", "nobody")]
        await check_states(sink, log, removed)
        abandon(sink)
        sink = StorageSink(path)
        await sink.open(log)
        await check_states(sink, log, removed)
        await sink.aclose()

    anyio.run(main)


def test_expiry_removes_tombstones_of_an_earlier_log(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 4), Delta("row-001", delete()), Delta("row-002", delete()))
        await sink.aclose()
        other_log = FakeLog(b"another log of 16"[:16], lamport=log.lamport)
        sink = StorageSink(path)
        await sink.open(other_log)
        await apply_new(other_log, sink, Delta("row-003", delete()))
        await sink.forget([], 0)
        assert await sink.get("default", "row-001") is not None
        await sink.forget([], 1)
        alive = {vector_id for _, vector_id, _ in sink.resident.rows()}
        assert alive == {"row-000"}  # the delete of row-003 has offset 0
        await sink.aclose()

    anyio.run(main)


def test_removed_tombstones_do_not_return_from_an_image(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 40))
        await sink.aclose()
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        assert sink.statistics().image == "loaded, with 0 rows that were written later"
        await apply_new(log, sink, Delta("row-001", delete()))
        await images_of(sink).write(log.threads, log.log_id)  # an image that no flush has named yet
        await sink.forget([], log.next_offset)
        await apply_new(log, sink, Delta("row-002", create([7, 7, 7])))
        abandon(sink)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await check_states(sink, log, [("default", "row-001")])
        await sink.aclose()

    anyio.run(main)


def test_image_does_not_hold_numbers_of_a_vector_whose_slot_is_reused(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 4), on(X, create(NUMBERS)))
        await apply_new(log, sink, on(X, delete()))
        await sink.forget([X], 0)
        await apply_new(log, sink, Delta("reuses the slot", opaque(b"1")))
        await sink.aclose()
        assert len(images_in(tmp_path)) == 1
        assert found_in(tmp_path) == []

    anyio.run(main)


@pytest.mark.parametrize("pause_at", [1, 2, 3])
def test_erasure_removes_an_image_being_written(tmp_path: Path, pause_at: int) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await write_secrets(log, sink)
        await apply_new(log, sink, on(X, delete()), on(Y, delete()), on(Z, delete()))
        thread = PausedThread(pause_at)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(images_of(sink).write, thread, log.log_id)
            await thread.is_paused.wait()
            tasks.start_soon(thread.resume_later)
            await sink.forget(ERASED, 0)
            assert found_in(tmp_path) == []
        assert found_in(tmp_path) == []
        await sink.flush()
        assert not images_in(tmp_path)
        abandon(sink)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        assert sink.statistics().image == "none"
        await sink.aclose()
        assert images_in(tmp_path)
        assert found_in(tmp_path) == []

    anyio.run(main)


def test_image_that_is_ready_during_a_removal_is_not_used(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 40), Delta("row-001", delete()))
        async with anyio.create_task_group() as tasks, sink.resident.hold():
            tasks.start_soon(sink.forget, [], log.next_offset)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            await images_of(sink).write(log.threads, log.log_id)
        await apply_new(log, sink, Delta("row-002", create([7, 7, 7])))
        abandon(sink)
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await check_states(sink, log, [("default", "row-001")])
        await sink.aclose()

    anyio.run(main)


def test_forget_flushes_so_that_the_deletes_are_not_redelivered(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        log.append(on(X, create(NUMBERS)), on(Y, create(NUMBERS)))
        log.append(on(X, delete()), on(Y, delete()))
        await sink.apply(log.deliveries())
        await sink.forget([X], 0)
        assert log.commits[-1] == log.next_offset
        abandon(sink)
        sink = StorageSink(path)
        assert (await sink.open(log)).cursor.next_offset == log.next_offset
        await check_states(sink, log, [X])
        await sink.aclose()

    anyio.run(main)


def test_index_keeps_tombstones_of_an_earlier_log_unless_some_expire() -> None:
    async def main() -> None:
        log, index = FakeLog(), IndexSink()
        await index.open(log)
        await apply_new(log, index, Delta("a", create([1, 2, 3])), Delta("b", delete()))
        await index.aclose()
        await index.open(FakeLog(bytes(16), lamport=log.lamport))
        await index.forget([], 0)
        assert states_of(index).keys() == {("default", "a"), ("default", "b")}
        await index.forget([], 1)
        assert states_of(index).keys() == {("default", "a")}
        await index.aclose()

    anyio.run(main)


class PausedThread:
    """A thread that pauses after one of its calls."""

    def __init__(self, pause_at: int) -> None:
        self.pause_at = pause_at
        self.is_paused, self.can_continue = anyio.Event(), anyio.Event()
        self.calls = 0

    async def run(self, function: Any) -> Any:
        result = function()
        self.calls += 1
        if self.calls == self.pause_at:
            self.is_paused.set()
            await self.can_continue.wait()
        return result

    async def resume_later(self) -> None:
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        self.can_continue.set()


@pytest.mark.parametrize("wait", range(8))
def test_cancelled_erasure_is_completed_by_the_next_call(tmp_path: Path, wait: int) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path, image_rows_min=1)
        await sink.open(log)
        await write_secrets(log, sink)
        await delete_secrets(log, sink)
        before = log.next_offset
        await call_and_cancel_at(wait, lambda: sink.forget(ERASED, before))
        await apply_new(log, sink, Delta("row-003", create([8, 8, 8])))
        await sink.forget(ERASED, before)
        assert found_in(tmp_path) == []
        await check_states(sink, log, [*ERASED, ("default", "row-001")])
        await sink.aclose()

    anyio.run(main)


def test_error_on_the_thread_is_retryable(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await write_secrets(log, sink)
        await delete_secrets(log, sink)
        log.threads.failure = OSError(28, "No space left on device")
        with pytest.raises(TryAgain, match="No space left"):
            await sink.forget(ERASED, 0)
        log.threads.failure = None
        await sink.forget(ERASED, 0)
        assert found_in(tmp_path) == []
        await check_states(sink, log, ERASED)
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("is_reopened", [False, True])
def test_erasure_during_a_rebuild_clears_old_and_new_rows(tmp_path: Path, is_reopened: bool) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await write_secrets(log, sink)  # in the old rows, the vectors are alive
        log.append(on(X, delete()), on(Y, delete()), on(Z, delete()), on(Z, create([1, 1, 1])))
        offset, rows = log.next_offset, states_at(log, log.next_offset)
        await sink.begin_rebuild(offset)
        await sink.load_states(rows)
        if is_reopened:
            await sink.aclose()
            sink = StorageSink(path)
            assert (await sink.open(log)).rebuilding
        await sink.forget([X, Y], 0)
        assert found_in(tmp_path, [SECRETS[0], SECRETS[1], *SECRETS[3:6]]) == []
        others = [row for row in rows if (row.namespace, row.vector_id) not in (X, Y)]
        if is_reopened:
            await sink.begin_rebuild(offset)
            await sink.load_states(others)
        await sink.end_rebuild(offset, log.lamport)
        await check_states(sink, log, [X, Y])
        await sink.forget([Z], 0)  # it is alive again: only its earlier data goes
        check_state(await sink.get(*Z), oracle(log.batches)[Z])
        assert found_in(tmp_path, [secret for secret in SECRETS if secret != Z[1].encode()]) == []
        await sink.aclose()

    anyio.run(main)


def test_expiry_during_a_rebuild_removes_new_tombstones(tmp_path: Path) -> None:
    async def main() -> None:
        log, path = FakeLog(), tmp_path / "v.db"
        sink = StorageSink(path)
        await sink.open(log)
        await apply_new(log, sink, *filler(0, 4))
        log.append(Delta("row-001", delete()), Delta("row-002", delete()))
        offset = log.next_offset
        await sink.begin_rebuild(offset)
        await sink.load_states(states_at(log, offset))
        await sink.forget([], offset - 1)
        await sink.end_rebuild(offset, log.lamport)
        await check_states(sink, log, [("default", "row-001")])
        await sink.aclose()

    anyio.run(main)


def test_late_forwarded_delta_makes_a_forgotten_vector_anew(tmp_path: Path) -> None:
    async def main() -> None:
        log, sink = FakeLog(), StorageSink(tmp_path / "v.db")
        await sink.open(log)
        await apply_new(log, sink, Delta("a", create([1, 2, 3])), Delta("b", create([1, 2, 3])))
        log.forward(encode_batch([Delta("a", create([4, 4, 4]))], origin=99, base=1), lamport=100)
        await sink.apply(log.deliveries(2))
        await apply_new(log, sink, Delta("a", delete()))
        assert len(sink.resident.chains) == 1
        await sink.forget([("default", "a")], 0)
        assert len(sink.resident.chains) == 0
        late = log.forward(encode_batch([Delta("a", create([5, 5, 5]))], origin=99, base=2), lamport=1)
        await sink.apply(log.deliveries(late.offset))
        check_state(await sink.get("default", "a"), oracle([late])["default", "a"])
        await sink.aclose()

    anyio.run(main)


def states_of(sink: Any) -> dict[Ref, VectorState]:
    return {(namespace, vector_id): state for namespace, vector_id, state in sink.rows()}


@settings(max_examples=60, deadline=None)
@given(logs(), st.integers(0, 30), st.sets(st.sampled_from("abcdef")), st.integers(0, 5))
def test_forgetting_changes_no_live_state(log: FakeLog, before: int, erased: set[str], cut: int) -> None:
    async def main() -> None:
        cut_offset = log.batches[min(cut, len(log.batches) - 1)].next_offset
        index, cache = IndexSink(), CacheSink()
        await index.open(log)
        await cache.open(log)
        deliveries = [delivery for delivery in log.deliveries() if delivery.next_offset <= cut_offset]
        await index.apply(deliveries)
        await cache.apply(deliveries)
        refs = [("default", vector_id) for vector_id in sorted(erased)]
        expected = states_of(index)
        offsets = {(row.namespace, row.vector_id): row.offset for row in states_at(log, cut_offset)}
        await index.forget(refs, before)
        await cache.forget(refs, before)
        remaining = states_of(index)
        for ref, state in expected.items():
            is_removed = not state.alive and (ref in refs or offsets[ref] < before)
            assert (ref not in remaining) == is_removed
            if not is_removed:
                check_state(remaining[ref], state)
            cached = cache.peek(*ref)
            assert cached is None or not is_removed
            if cached is not None:
                check_state(cached, state, compare_ignored=False)
        await index.forget(refs, before)
        assert states_of(index).keys() == remaining.keys()

    anyio.run(main)


@settings(max_examples=25, deadline=None)
@given(logs(with_forwarded=False), st.integers(0, 30), st.integers(0, 5))
def test_deltas_after_forgetting_fold_as_on_unknown_vectors(
    tmp_path_factory: Any, log: FakeLog, before: int, cut: int
) -> None:
    async def main() -> None:
        count = min(cut, len(log.batches))
        sink = StorageSink(tmp_path_factory.mktemp("forget") / "v.db")
        await sink.open(log)
        first, later = log.deliveries()[:count], log.deliveries()[count:]
        if first:
            await sink.apply(first)
        before_state = oracle(log.batches[:count])
        await sink.forget([], before)
        if later:
            await sink.apply(later)
        for ref, state in oracle(log.batches).items():
            actual = await sink.get(*ref)
            if ref in before_state and not before_state[ref].alive and actual is None:
                assert not state.alive
            else:
                check_state(actual, state, compare_ignored=False)
        await sink.aclose()

    anyio.run(main)


@pytest.mark.parametrize("first", ["storage", "index"])
def test_shared_vectors_are_forgotten_in_either_order(tmp_path: Path, first: str) -> None:
    async def main() -> None:
        log = FakeLog()
        storage = StorageSink(tmp_path / "v.db")
        index = IndexSink(resident=storage.resident)
        await storage.open(log)
        await index.open(log)
        await write_secrets(log, storage)
        await delete_secrets(log, storage)
        await index.apply(log.deliveries())
        sinks: list[Any] = [storage, index] if first == "storage" else [index, storage]
        for sink in [*sinks, *sinks]:
            await sink.forget(ERASED, log.next_offset)
        assert found_in(tmp_path) == []
        await check_states(storage, log, [*ERASED, ("default", "row-001")])
        assert not {vector_id for _, vector_id, _ in index.rows()} & {vector_id for _, vector_id in ERASED}
        await index.aclose()
        await storage.aclose()

    anyio.run(main)


def test_forget_waits_for_an_apply_of_another_sink_that_shares_the_vectors() -> None:
    async def main() -> None:
        log, resident = FakeLog(), ResidentVectors()
        log.clock.step = 1.0  # each delivery takes so long that `apply` yields after it
        resident.enter(log)
        log.append(Delta("a", create([1, 2, 3])), Delta("a", delete()))
        log.append(Delta("b", create([1, 2, 3])))
        is_applied = False

        async def apply() -> None:
            nonlocal is_applied
            await resident.apply(log.deliveries(), log)
            is_applied = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(apply)
            await anyio.lowlevel.checkpoint()
            assert not is_applied
            await resident.forget([("default", "a")], 0, log)
            assert is_applied
        assert resident.state("default", "a") is None

    anyio.run(main)


def test_cache_drops_tombstones_and_reloads() -> None:
    async def main() -> None:
        log, loads = FakeLog(), []
        tombstone = oracle([FakeLog().append(Delta("a", delete()))])["default", "a"]
        results: list[VectorState | None] = [tombstone, None, tombstone]
        is_loading, can_return = anyio.Event(), anyio.Event()

        async def loader(namespace: str, vector_id: str) -> VectorState | None:
            loads.append(vector_id)
            is_loading.set()
            await can_return.wait()
            return results.pop(0)

        cache = CacheSink(loader=loader)
        await cache.open(log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.get, "default", "a")
            await is_loading.wait()
            await cache.forget([("default", "a")], 0)
            can_return.set()
        assert loads == ["a", "a"]
        assert cache.peek("default", "a") is None
        await cache.get("default", "a")
        await cache.forget([], 0)
        check_state(cache.peek("default", "a"), tombstone)
        await apply_new(log, cache, Delta("b", delete()), Delta("c", delete()), Delta("d", create([1, 2, 3])))
        await cache.forget([("default", "d"), ("default", "unknown")], 1)
        assert [cache.peek("default", name) is not None for name in "bcd"] == [False, True, True]
        await cache.forget([], NEVER)
        assert [cache.peek("default", name) is not None for name in "bcd"] == [False, False, True]

    anyio.run(main)


def test_sinks_that_keep_no_tombstone_do_not_forget(tmp_path: Path) -> None:
    assert not isinstance(JsonLinesSink(tmp_path / "lines"), HoldsTombstones)
    assert not isinstance(CallbackSink(print), HoldsTombstones)
    for sink in (StorageSink(tmp_path / "v.db"), IndexSink(), CacheSink()):
        assert isinstance(sink, HoldsTombstones)
