"""Every bundled sink keeps the contract, and the kit finds those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    Delivery,
    IndexSink,
    JsonLinesSink,
    Resident,
    ResumePoint,
    StorageSink,
)
from delta_prop_sinks.conformance import NotConforming, check_sink
from delta_prop_wire.algebra import State, apply
from delta_prop_wire.cursor import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from delta_prop_sinks import Sink, SinkContext


def conforms(make: Callable[[], Any], probe: Any = None, *, backend: str = "asyncio") -> None:
    anyio.run(check_sink, make, probe, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("mode", ["behind", "through"])
@pytest.mark.parametrize("bytes_max", [3_000, 1 << 30])
def test_storage(tmp_path: Path, backend: str, mode: Any, bytes_max: int) -> None:
    conforms(
        lambda: StorageSink(
            tmp_path / "v.db",
            mode=mode,
            resident=Resident(resident_bytes_max=bytes_max),
            rows_unflushed_max=5,
        ),
        backend=backend,
    )


def test_cache() -> None:
    conforms(lambda: CacheSink(entries_max=8))
    conforms(lambda: CacheSink(mode="invalidate"))


def test_index() -> None:
    async def seen(sink: IndexSink) -> object:
        return sink.search([1, 2, 3, 4], 100), sorted((*ref, state.content) for *ref, state in sink.rows())

    conforms(IndexSink, seen)


def test_jsonlines(tmp_path: Path) -> None:
    async def seen(sink: JsonLinesSink) -> object:
        return sink.path.read_text()

    conforms(lambda: JsonLinesSink(tmp_path / "out.jsonl"), seen)


def test_callback() -> None:
    last: dict[str, int] = {}

    async def seen(sink: CallbackSink) -> object:
        return dict(last)

    conforms(lambda: CallbackSink(lambda offset, delta: last.__setitem__(delta.vector_id, offset)), seen)


@dataclass(frozen=True)
class Numbers:
    calls: int = 0


class Plain:
    """Keeps the contract, in the plainest way; its children break one part each."""

    name = "plain"

    def __init__(self) -> None:
        self.states: dict[tuple[str, str], State] = {}

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.context = context
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            batch = delivery.batch
            for row in range(batch.count) if delivery.rows is None else delivery.rows.tolist():
                self.fold((batch.namespaces[row], batch.keys[row]), delivery, row)

    def fold(self, ref: tuple[str, str], delivery: Delivery, row: int) -> None:
        state, batch = self.states.get(ref, State()), delivery.batch
        if state.key is None or state.key < delivery.logged.key(row):
            key = delivery.logged.key(row)
            self.states[ref] = apply(state, batch.operation(row), batch.metadata(row), key)

    def get(self, namespace: str, vector_id: str) -> State | None:
        return self.states.get((namespace, vector_id))

    async def aclose(self) -> None:
        pass

    def statistics(self) -> Any:
        return Numbers()


def test_a_plain_sink_conforms() -> None:
    conforms(Plain)
    sink: Sink = Plain()
    assert sink.name == "plain"


class FoldsRepeats(Plain):
    def fold(self, ref: tuple[str, str], delivery: Delivery, row: int) -> None:
        state, batch = self.states.get(ref, State()), delivery.batch
        self.states[ref] = apply(state, batch.operation(row), batch.metadata(row))


class IgnoresRows(Plain):
    def fold(self, ref: tuple[str, str], delivery: Delivery, row: int) -> None:
        if delivery.logged.offset % 5 == 0:
            super().fold(ref, delivery, row)


class SaysTooMuch(Plain):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.context.committed(deliveries[-1].next_offset + 1)


class Nameless(Plain):
    name = ""


class Changeable(Plain):
    def statistics(self) -> Any:
        return {"calls": 1}


class OpensAhead(Plain):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        return ResumePoint(Cursor(context.log_id, 1, 10), 10)


class ForgetsItsClosing(Plain):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (FoldsRepeats, "is not the fold of its deltas"),
        (IgnoresRows, "is not the fold of its deltas"),
        (SaysTooMuch, r"committed\(18\), but only 17 was delivered"),
        (Nameless, "name: ''"),
        (Changeable, "is not a frozen dataclass"),
        (OpensAhead, "is not within the log"),
    ],
)
def test_what_breaks_the_contract_is_found(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(NotConforming, match=match):
        conforms(make)


def test_closing_twice_is_tried() -> None:
    with pytest.raises(RuntimeError, match="closed twice"):
        conforms(ForgetsItsClosing)


def test_repeats_that_a_reader_sees_are_found() -> None:
    async def seen(sink: CallbackSink) -> object:
        return sink.statistics().calls

    with pytest.raises(NotConforming, match="after every delivery came again, whole and in pieces"):
        conforms(lambda: CallbackSink(lambda offset, delta: None), seen)
