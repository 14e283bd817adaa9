"""`apply_now` of the sinks folds as `apply` does, or returns False if the sink would have to wait."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.delivery.sink_invoker import has_apply_now
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import (
    CacheSink,
    CallbackSink,
    Delivery,
    IndexSink,
    RejectDelta,
    ResidentVectors,
    StorageSink,
)
from delta_prop_wire.delta import Delta, create, sparse
from tests.sinks.strategies import logs
from tests.sinks.support import FakeLog, apply_all, check_state, oracle

if TYPE_CHECKING:
    from collections.abc import Sequence


@settings(max_examples=20, deadline=None)
@given(log=logs(), use_apply_now=st.lists(st.booleans(), min_size=30, max_size=30))
def test_apply_now_and_apply_give_the_same_fold(log: FakeLog, use_apply_now: list[bool]) -> None:
    async def main() -> None:
        with TemporaryDirectory() as folder:
            storage = StorageSink(Path(folder) / "s.db", flush_s=60)
            index = IndexSink(resident=storage.resident)
            cache = CacheSink()
            sinks: list[Any] = [storage, index, cache]
            for sink in sinks:
                await sink.open(log)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(storage.background)
                await anyio.lowlevel.checkpoint()
                for position, delivery in enumerate(log.deliveries()):
                    for sink_number, sink in enumerate(sinks):
                        if not (use_apply_now[(position + sink_number) % 30] and sink.apply_now([delivery])):
                            await sink.apply([delivery])
                tasks.cancel_scope.cancel()
            resident_states = {(space, name): state for space, name, state in storage.resident.rows()}
            expected = oracle(log.batches)
            assert resident_states.keys() == expected.keys()
            for ref, state in expected.items():
                check_state(resident_states[ref], state, context=ref)
                cached = cache.peek(*ref)
                if cached is not None:
                    check_state(cached, state, compare_ignored=False, context=ref)
            assert storage.resident.next_offset == log.next_offset
            for sink in sinks:
                await sink.aclose()

    anyio.run(main)


def test_storage_that_must_wait_declines_apply_now() -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1.0])))
        with TemporaryDirectory() as folder:
            through = StorageSink(Path(folder) / "s.db", mode="through")
            assert not through.apply_now(log.deliveries())  # the sink is not open
            await through.open(log)
            assert not through.apply_now(log.deliveries())
            await through.aclose()
            small = StorageSink(Path(folder) / "t.db", resident=ResidentVectors(resident_bytes_max=1))
            await small.open(log)
            await small.apply(log.deliveries())
            assert not small.apply_now(log.deliveries())
            await small.aclose()

    anyio.run(main)


class OverridesApply(CacheSink):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await anyio.lowlevel.checkpoint()


class OverridesBoth(OverridesApply):
    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        return True


def test_has_apply_now_honours_overridden_apply() -> None:
    assert has_apply_now(CacheSink())
    assert not has_apply_now(OverridesApply())
    assert has_apply_now(OverridesBoth())
    assert not has_apply_now(CallbackSink(print))
    patched: Any = CacheSink()
    patched.apply = None
    assert not has_apply_now(patched)


class FailsAtThirdDelta(CacheSink):
    """`apply_now` fails at the third delta and declines the second; `apply` rejects the third."""

    def __init__(self) -> None:
        super().__init__()
        self.apply_now_calls = self.apply_calls = 0

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        self.apply_calls += 1
        for delivery in deliveries:
            if delivery.first_offset == 2:
                raise RejectDelta(2, "never")

    def apply_now(self, deliveries: Sequence[Delivery]) -> bool:
        self.apply_now_calls += 1
        if deliveries[0].first_offset == 2:
            raise ValueError("it goes wrong here")
        return deliveries[0].first_offset != 1


def test_failure_in_apply_now_is_retried_with_apply() -> None:
    async def main(p: RecordedPropagator) -> None:
        sink = await p.attach(FailsAtThirdDelta(), name="failing")
        for value in range(4):
            await p.publish(Delta("a" if value != 3 else "b", create([value])))
            await p.settle()
        statistics = p.statistics().sinks["failing"]
        assert (statistics.applied_offset, statistics.applied_deltas, statistics.rejected) == (4, 3, 1)
        # After a rejection, each delta goes through `apply`.
        assert (sink.apply_now_calls, sink.apply_calls) == (3, 3)

    run_propagator(main)


def test_delta_is_applied_within_publish() -> None:
    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        await p.publish(Delta("a", create([1, 2])))
        await anyio.sleep(1)
        published = await p.publish(Delta("a", sparse([1], [7])))
        state = cache.peek("default", "a")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [1, 7]
        assert p.statistics().sinks["cache"].applied_offset == published.next_offset

    run_propagator(main)


@pytest.mark.parametrize("rows", [None, np.array([0])])
def test_batch_applied_by_another_sink_is_duplicate(rows: Any) -> None:
    log = FakeLog()
    resident = ResidentVectors()
    resident.enter(log)
    logged = log.append(Delta("a", create([1])), Delta("b", create([2])))
    assert apply_all(resident, [Delivery(logged, rows)], log) == (2 if rows is None else 1)
    assert apply_all(resident, [Delivery(logged)], log) == (0 if rows is None else 1)
    assert resident.statistics().duplicates == (2 if rows is None else 1)
