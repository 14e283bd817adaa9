"""Deltas that a sink cannot apply are neither lost nor reordered; an outage quarantines no delta."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop import Propagator, Settings
from delta_prop.testing import run_propagator
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    IndexSink,
    RejectDelta,
    ResidentVectors,
    StorageSink,
    TryAgain,
)
from delta_prop_sinks.sink import Backlog, Delivery
from delta_prop_wire.algebra import fold
from delta_prop_wire.delta import Delta, Dot, Kind, create, sparse, sparse_add
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from tests.delta_prop.support import catch_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delta_prop.testing import RecordedPropagator
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.algebra import VectorState

OTHERS = 1_000
"""Number of vectors that the sinks accept."""


class RejectingSink:
    """A wrapper of a real sink that rejects creates of `vector_id`; if that is None, it rejects nothing."""

    def __init__(self, sink: Sink, vector_id: str) -> None:
        self.sink = sink
        self.name = sink.name
        self.vector_id: str | None = vector_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sink, name)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        ready: list[Delivery] = []
        for delivery in deliveries:
            batch = delivery.batch
            rows = np.arange(batch.count) if delivery.rows is None else delivery.rows
            for index, row in enumerate(rows.tolist()):
                if batch.keys[row] == self.vector_id and batch.kinds[row] == Kind.CREATE:
                    before = rows[:index]
                    ready += [Delivery(delivery.logged, before, delivery.redelivered)] if len(before) else []
                    if ready:
                        await self.sink.apply(ready)
                    raise RejectDelta(delivery.first_offset + row, f"no room for {self.vector_id}")
            ready.append(delivery)
        await self.sink.apply(ready)


def sinks(folder: Path) -> dict[str, Sink]:
    return {
        "storage": StorageSink(folder / "facts.db", resident=ResidentVectors()),
        "through": StorageSink(
            folder / "through.db", name="through", mode="through", resident=ResidentVectors()
        ),
        "index": IndexSink(resident=ResidentVectors()),
        "cache": CacheSink(entries_max=10_000),
    }


async def content(sink: Any, name: str) -> dict[str, object]:
    """Return the values of each live vector, as read from the sink."""
    if name == "cache":
        keys = ["bad", "child", *(f"v{n}" for n in range(OTHERS))]
        states = [(key, sink.peek("default", key)) for key in keys]
    elif name == "index":
        states = [(key, state) for _, key, state in sink.rows()]
    else:
        await sink.flush()
        states = [(key, state) async for _, key, state in sink.rows()]
    return {key: state.vector.tolist() for key, state in states if state is not None and state.alive}


def fold_log(p: RecordedPropagator, without: set[int]) -> dict[str, object]:
    """Return the fold of the log's deltas, except for those at the offsets in `without`."""
    changes: dict[str, list[Any]] = {}
    for received in p.recorder.received:
        if received.offset not in without:
            dot = received.delta.dot
            assert dot is not None
            key = (received.lamport, dot.origin, dot.counter)
            changes.setdefault(received.delta.vector_id, []).append(
                (key, received.delta.operation, received.delta.metadata)
            )
    states: dict[str, VectorState] = {key: fold(rows) for key, rows in changes.items()}
    return {
        key: state.vector.tolist()
        for key, state in states.items()
        if state.alive and state.vector is not None
    }


@pytest.mark.parametrize("name", ["storage", "through", "index", "cache"])
@pytest.mark.parametrize("act", ["replay", "drop"])
def test_rejected_create_blocks_only_its_vector(tmp_path: Path, name: str, act: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = RejectingSink(sinks(tmp_path)[name], "bad")
        await p.attach(sink)
        matrix = np.arange(2 * OTHERS, dtype=np.float32).reshape(OTHERS, 2)
        await p.publish_many([f"v{n}" for n in range(OTHERS // 2)], matrix[: OTHERS // 2])
        bad = await p.publish(Delta("bad", create([1.0, 2.0])))
        for n in range(5):
            await p.publish(Delta("bad", sparse([n % 2], [float(n)])), Delta("v0", sparse_add([0], [1.0])))
        child = await p.publish(Delta("child", create([0.0, 0.0])), after=[bad])
        await p.publish_many([f"v{n}" for n in range(OTHERS // 2, OTHERS)], matrix[OTHERS // 2 :])
        await p.settle()

        statistics = p.statistics().sinks[name]
        assert (statistics.quarantined, statistics.rejected, statistics.state, statistics.lag) == (
            7,
            1,
            "idle",
            0,
        )
        quarantined = p.quarantine(name)
        assert [record.reason for record in quarantined] == ["no room for bad", *[None] * 6]
        assert {record.blocked_by for record in quarantined} == {bad.offset}
        assert quarantined[-1].delta.vector_id == "child"
        others = fold_log(p, {record.offset for record in quarantined})
        assert len(others) == OTHERS
        assert await content(sink, name) == others
        refusal = await catch_refusal(p.wait_visible(child, sinks=[name]))
        assert refusal.code is ErrorCode.PROCESSING_FAILED
        assert f"is blocked by offset {bad.offset}" in refusal.message

        assert bad.offset is not None
        if act == "replay":
            assert (await p.replay(name)).left == 7  # the sink still rejects it
            assert await content(sink, name) == others
            sink.vector_id = None
            assert (await p.replay(name, bad.offset)).applied == 7
            assert await content(sink, name) == fold_log(p, set())
        else:
            result = await p.drop(name, bad.offset)
            assert (result.applied, result.dropped, result.left) == (6, 1, 0)
            assert await content(sink, name) == fold_log(p, {bad.offset})
        await p.wait_visible(child, sinks=[name])
        sink.vector_id = None
        await p.publish(Delta("bad", create([8.0, 9.0])), Delta("bad", sparse([0], [7.0])))
        await p.settle()
        assert (await content(sink, name))["bad"] == [7.0, 9.0]
        await p.detach(name)

    run_propagator(main)


def test_quarantine_survives_detach_and_attach(tmp_path: Path) -> None:
    async def main(p: RecordedPropagator) -> None:
        first = RejectingSink(StorageSink(tmp_path / "facts.db"), "bad")
        await p.attach(first)
        await p.publish(Delta("bad", create([1.0])), Delta("good", create([1.0])))
        await p.settle()
        await p.detach("storage")
        await p.publish(Delta("bad", sparse([0], [2.0])))
        second = StorageSink(tmp_path / "facts.db")
        await p.attach(second)
        await p.settle()
        assert [record.delta.vector_id for record in p.quarantine("storage")] == ["bad", "bad"]
        assert await second.get("default", "bad") is None
        assert (await p.replay("storage")).applied == 2
        state = await second.get("default", "bad")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [2.0]
        await p.detach("storage")

    run_propagator(main)


def test_ten_minute_outage_opens_breaker_and_quarantines_none(caplog: pytest.LogCaptureFixture) -> None:
    async def main(p: RecordedPropagator) -> None:
        applied: Counter[int] = Counter()
        calls: list[float] = []
        down = True

        async def send(offset: int, delta: Delta) -> None:
            calls.append(anyio.current_time())
            if down:
                raise ConnectionRefusedError(111, "connection refused")
            applied[offset] += 1

        await p.attach(CallbackSink(send, name="remote"))
        for number in range(600):
            await p.publish(*(Delta(f"v{n}", create([float(number)])) for n in range(5)))
            await anyio.sleep(1)
            statistics = p.statistics().sinks["remote"]
            assert (statistics.quarantined, statistics.applied_offset, statistics.committed_offset) == (
                0,
                0,
                0,
            )
        statistics = p.statistics().sinks["remote"]
        assert statistics.state == "breaker open"
        assert statistics.breaker_opened == 1
        assert statistics.reason is not None
        assert "connection refused" in statistics.reason
        assert statistics.errors == len(calls) < 60
        assert statistics.lag == 3_000
        with pytest.raises(
            TimeoutError, match=r"'remote' is breaker open, 3000 deltas behind \(.*connection refused"
        ):
            await p.wait_visible(3_000, sinks=["remote"], timeout_s=1)
        down = False
        await p.settle()
        assert anyio.current_time() < 640
        assert applied == Counter(range(3_000))
        assert p.statistics().sinks["remote"].quarantined == 0

    with caplog.at_level(logging.WARNING, "delta_prop"):
        run_propagator(main)
    assert [record.message for record in caplog.records if "keeps failing" in record.message]
    assert len(caplog.records) == 1


def test_replay_of_unknown_offset_or_sink_is_refused() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda offset, delta: None))
        with pytest.raises(UsageError, match="offset 3 is not in the quarantine of sink 'callback'"):
            await p.replay("callback", 3)
        with pytest.raises(UsageError, match="no sink named 'nobody'"):
            await p.drop("nobody")
        assert (await p.replay("callback")).left == 0

    run_propagator(main)


def test_replay_of_a_failing_sink_times_out() -> None:
    async def main(p: RecordedPropagator) -> None:
        error: list[Exception | None] = [RejectDelta(0, "no")]

        def apply(_offset: int, _delta: Delta) -> None:
            if error[0] is not None:
                raise error[0]

        await p.attach(CallbackSink(apply))
        await p.publish(Delta("v", create([1.0])))
        await p.settle()
        error[0] = TryAgain("down")
        with pytest.raises(TimeoutError, match="its quarantine holds 1 deltas"):
            await p.replay("callback", timeout_s=5)
        error[0] = None
        await anyio.sleep(60)
        assert len(p.quarantine("callback")) == 1  # the failed replay is not continued
        assert (await p.replay("callback")).applied == 1

    run_propagator(main)


def test_quarantined_parent_blocks_only_its_own_sink() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(RejectingSink(CacheSink(), "bad"))
        await p.publish(Delta("bad", create([1.0])))
        parent = p.head("bad")
        assert isinstance(parent, Dot)
        published = await p.publish(Delta("other", create([1.0]), parents=(parent,)))
        await p.wait_visible(published, sinks=["recorder"])
        with pytest.raises(Refused, match="quarantine"):
            await p.wait_visible(published, sinks=["cache"])

    run_propagator(main)


def test_delta_after_a_publish_is_blocked_by_any_rejected_row_of_it() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = RejectingSink(CacheSink(), "bad")
        await p.attach(sink)
        await p.publish(Delta("other", create([1.0])))
        published = await p.publish(Delta("bad", create([1.0])), Delta("fine", create([1.0])))
        receipt = p.offer(Delta("bad", sparse([0], [2.0])))
        children = [
            await p.publish(Delta("child-1", create([1.0])), after=[published]),
            await p.publish(Delta("child-2", create([1.0])), after=[receipt]),
        ]
        await p.settle()
        quarantined = [record.delta.vector_id for record in p.quarantine("cache")]
        assert quarantined == ["bad", "bad", "child-1", "child-2"]
        sink.vector_id = None
        assert (await p.replay("cache")).left == 0
        for child in children:
            await p.wait_visible(child, sinks=["cache"])

    run_propagator(main)


class ContractBreakingSink:
    """A sink that breaks the contract in one way."""

    name = "odd"

    def __init__(self, breaks: str) -> None:
        self.breaks = breaks

    async def open(self, context: object) -> None:
        pass

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        if self.breaks == "offset":
            raise RejectDelta(None, "x")  # type: ignore[arg-type]
        if self.breaks == "done":
            raise TryAgain("x", "5")  # type: ignore[arg-type]
        if self.breaks == "text":
            raise Textless
        if self.breaks == "group":
            raise ExceptionGroup("tasks", [RejectDelta(deliveries[0].first_offset, "no")])
        if self.breaks == "reasonless":
            raise RejectDelta(deliveries[0].first_offset, None)  # type: ignore[arg-type]

    def backlog(self) -> int:
        if self.breaks == "backlog":
            raise ZeroDivisionError
        return Backlog(0, 1) if self.breaks != "number" else 5  # type: ignore[return-value]

    async def aclose(self) -> None:
        pass

    def statistics(self) -> None:
        pass


class Textless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("breaks", ["offset", "done", "text", "group", "reasonless", "backlog", "number"])
def test_contract_breaking_sink_affects_only_itself(breaks: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(ContractBreakingSink(breaks))
        published = await p.publish(Delta("v", create([1.0])))
        await anyio.sleep(1)
        statistics = p.statistics().sinks["odd"]
        expected_states = {"group": "idle", "reasonless": "idle", "backlog": "stopped", "number": "stopped"}
        assert statistics.state == expected_states.get(breaks, "retrying")
        if statistics.state == "idle":
            assert statistics.quarantined == 1
            assert (await p.drop("odd")).left == 0
        else:
            assert statistics.reason
        await p.wait_visible(published, sinks=["recorder"])
        await p.detach("odd")

    run_propagator(main)


def test_hanging_call_is_cancelled_for_an_optional_sink() -> None:
    async def main(p: RecordedPropagator) -> None:
        calls: list[float] = []

        async def hang(_offset: int, _delta: Delta) -> None:
            calls.append(anyio.current_time())
            await anyio.sleep_forever()

        await p.attach(CallbackSink(hang), required=False)
        await p.publish(Delta("v", create([1.0])))
        await anyio.sleep(30)
        assert len(calls) >= 2
        assert p.statistics().sinks["callback"].errors >= 1

    run_propagator(main, Settings(apply_timeout_s=5.0, close_timeout_s=1.0))


@pytest.mark.parametrize("hangs", ["apply", "apply and aclose", "breaker"])
def test_detach_ends_within_the_close_timeout(hangs: str) -> None:
    class HangingSink(ContractBreakingSink):
        async def apply(self, deliveries: Sequence[Delivery]) -> None:
            if hangs == "breaker":
                raise TryAgain("down")
            await anyio.sleep_forever()

        async def aclose(self) -> None:
            if "aclose" in hangs:
                await anyio.sleep_forever()

    async def main(p: RecordedPropagator) -> None:
        await p.attach(HangingSink("nothing"))
        await p.publish(Delta("v", create([1.0])))
        await anyio.sleep(20)
        began = anyio.current_time()
        await p.detach("odd")
        assert anyio.current_time() - began <= (10.0 if hangs != "breaker" else 0.1) + 1e-6

    run_propagator(main)


def test_pressure_is_stop_while_a_sink_keeps_the_log_full() -> None:
    async def main(p: RecordedPropagator) -> None:
        await p.attach(CallbackSink(lambda offset, delta: anyio.sleep_forever()))
        for number in range(200):
            p.offer(Delta(f"v{number}", create([1.0])))
        await anyio.sleep(10)
        pressure = p.pressure()
        assert pressure.level == 3
        assert pressure.retry_after_ms
        assert "'callback' keeps the log full" in pressure.reason

    run_propagator(main, Settings(log_deltas_max=100, close_timeout_s=1.0))


def test_closed_subscription_leaves_no_cursor_and_no_statistics() -> None:
    async def main(p: RecordedPropagator) -> None:
        for _ in range(50):
            async with p.subscribe():
                pass
        assert p.internals().sinks.cursors.detached_names == []
        assert list(p.statistics().sinks) == ["recorder"]

    run_propagator(main)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.replay("recorder", [1]), "give whole numbers"),
        (lambda p: p.drop("recorder", timeout_s="x"), "timeout_s 'x'"),
        (lambda p: p.wait_visible(0, sinks=5), "give a list of names"),
        (lambda p: p.attach(ContractBreakingSink(""), pacing="yes"), "give True or False"),
        (lambda p: p.attach(ContractBreakingSink(""), on_log_full="drop"), "give one of refuse"),
        (lambda p: p.attach(ContractBreakingSink(""), batch_deltas="x"), "batch_deltas"),
        (lambda p: p.attach(ContractBreakingSink(""), linger_ms="x"), "linger_ms"),
        (lambda p: p.attach(ContractBreakingSink(""), start=[]), "start"),
    ],
)
def test_invalid_arguments_raise_usage_errors(call: Any, message: str) -> None:
    async def main(p: RecordedPropagator) -> None:
        with pytest.raises(UsageError, match=message):
            await call(p)

    run_propagator(main)


def test_calls_on_a_closed_propagator_are_refused() -> None:
    p = Propagator()
    for call in (p.pressure, p.statistics, lambda: p.quarantine("x"), lambda: p.restart("x")):
        with pytest.raises(UsageError, match="not open"):
            call()
