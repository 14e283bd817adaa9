"""Fakes for tests of sinks: a log in a list, a clock that a test sets, threads that call functions directly.

The oracle is the algebra's own fold of everything in the log; it uses no code of a sink.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from delta_prop_sinks.sink import Delivery
from delta_prop_wire.algebra import VectorState, fold
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.delta import Kind, KnownIds, Source
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.state_rows import StateRow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from delta_prop_sinks import ResidentVectors, StorageSink
    from delta_prop_wire.delta import Delta

LOG_ID = bytes(range(16))
LOCAL_ORIGIN = 0x8000_0000_0000_0010
"""Origin of local deltas; its top bit is set, so stores must handle unsigned numbers."""


def abandon(storage: StorageSink) -> None:
    """Close the file as `kill -9` does: what is not written is lost. No public call does that."""
    storage._file.close()


class StillClock:
    def __init__(self) -> None:
        self.time = 0.0
        self.step = 0.0  # seconds that each reading adds

    def now(self) -> float:
        self.time += self.step
        return self.time

    def wall_us(self) -> int:
        return 1_700_000_000_000_000


class InlineThreads:
    def __init__(self) -> None:
        self.failure: BaseException | None = None

    async def run(self, function: Callable[[], Any]) -> Any:
        if self.failure is not None:
            raise self.failure
        return function()


class FakeLog:
    """A log and a sink's context. As in the service, local Lamport numbers are above all earlier ones."""

    topics = frozenset("*")

    def __init__(self, log_id: bytes = LOG_ID, *, lamport: int = 0, log_start: int = 0) -> None:
        self.log_id = log_id
        self.epoch = 1
        self.log_start = log_start
        self.clock = StillClock()
        self.threads = InlineThreads()
        self.batches: list[LoggedBatch] = []
        self.next_offset = 0
        self.lamport = lamport
        self.commits: list[int] = []  # the offsets that the sink reported as committed
        self.ids: set[bytes] = set()
        self.counters: dict[int, int] = {}

    def own_thread(self) -> AbstractAsyncContextManager[InlineThreads]:
        return nullcontext(self.threads)

    def background_thread(self) -> AbstractAsyncContextManager[InlineThreads]:
        return nullcontext(self.threads)

    def committed(self, next_offset: int) -> None:
        self.commits.append(next_offset)

    def first_missing(self, watermarks: Mapping[int, int]) -> int | None:
        return None

    def rewind(self, offset: int) -> None:
        raise AssertionError(f"no sink may rewind, here to {offset}")

    def dimension(self, namespace: str) -> int | None:
        for logged in self.batches:
            for row, name in enumerate(logged.batch.namespaces):
                if name == namespace and logged.batch.kinds[row] in (Kind.CREATE, Kind.DENSE):
                    return len(logged.batch.operation(row).values)  # type: ignore[arg-type]
        return None

    async def history(self, vectors: Collection[tuple[str, str]]) -> AsyncIterator[tuple[LoggedBatch, int]]:
        for logged in self.batches:
            if logged.next_offset > self.log_start:
                for row, ref in enumerate(zip(logged.batch.namespaces, logged.batch.keys, strict=True)):
                    if ref in vectors:
                        yield logged, row

    def append(self, *deltas: Delta) -> LoggedBatch:
        base = self.counters.get(LOCAL_ORIGIN, 0) + 1
        self.counters[LOCAL_ORIGIN] = base + len(deltas) - 1
        return self.append_batch(encode_batch(deltas, origin=LOCAL_ORIGIN, base=base))

    def append_batch(
        self, batch: Batch, *, lamport: int | None = None, source: Source = Source.LOCAL
    ) -> LoggedBatch:
        lamport = self.lamport + 1 if lamport is None else lamport
        ids = batch.ids or []
        known_count = sum(id_ in self.ids for id_ in ids)
        known_ids = (
            KnownIds.NONE if not known_count else KnownIds.ALL if known_count == len(ids) else KnownIds.SOME
        )
        self.ids.update(ids)
        logged = LoggedBatch(batch, self.next_offset, lamport, source, known_ids=known_ids)
        self.lamport = max(self.lamport, lamport + batch.count - 1)
        self.next_offset = logged.next_offset
        self.batches.append(logged)
        return logged

    def forward(self, batch: Batch, lamport: int) -> LoggedBatch:
        return self.append_batch(batch, lamport=lamport, source=Source.REPLICA)

    def deliveries(self, start: int = 0) -> list[Delivery]:
        return [Delivery(logged) for logged in self.batches if logged.next_offset > start]


def apply_all(resident: ResidentVectors, deliveries: Sequence[Delivery], log: FakeLog) -> int:
    """Fold deliveries, also rows that must be refolded from the log; return the number of new rows."""
    return anyio.run(resident.apply, deliveries, log)


def oracle(batches: Sequence[LoggedBatch]) -> dict[tuple[str, str], VectorState]:
    """Return the correct state of every vector after these batches, in any order.

    Of deltas with one id only the first has an effect.
    """
    rows: dict[tuple[str, str], list[Any]] = {}
    ids: dict[tuple[str, str], dict[Any, bytes]] = {}
    for logged in batches:
        batch = logged.batch
        for row in range(batch.count):
            ref = (batch.namespaces[row], batch.keys[row])
            rows.setdefault(ref, []).append((logged.key(row), batch.operation(row), batch.metadata(row)))
            if batch.ids is not None:
                ids.setdefault(ref, {})[logged.key(row)] = batch.ids[row]
    return {
        ref: fold(changes, without_effect=_later_duplicates(ids.get(ref, {})))
        for ref, changes in rows.items()
    }


def _later_duplicates(ids: dict[Any, bytes]) -> set[Any]:
    earlier_ids: set[bytes] = set()
    duplicates = set()
    for key in sorted(ids):
        if ids[key] in earlier_ids:
            duplicates.add(key)
        earlier_ids.add(ids[key])
    return duplicates


def states_at(log: FakeLog, end: int) -> list[StateRow]:
    """Return every vector's state as of an offset between two batches, as `load_states` gets them."""
    batches = [logged for logged in log.batches if logged.next_offset <= end]
    last_offsets: dict[tuple[str, str], int] = {}
    for logged in batches:
        for row, key in enumerate(logged.batch.keys):
            last_offsets[logged.batch.namespaces[row], key] = logged.offset + row
    return [StateRow(*ref, state, last_offsets[ref]) for ref, state in sorted(oracle(batches).items())]


def check_state(
    actual: VectorState | None, expected: VectorState, *, compare_ignored: bool = True, context: object = ""
) -> None:
    """Assert that two states are equal to the bit, including metadata and the last key."""
    assert actual is not None, context
    assert actual.content == expected.content, context
    assert actual.key == expected.key, context
    assert not compare_ignored or actual.ignored == expected.ignored, context


def vectors(count: int, dimension: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((count, dimension)).astype(np.float32)
