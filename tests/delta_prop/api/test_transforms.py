"""Transforms read a vector, apply a function, and publish the result unless the vector has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from delta_prop.api.transforms import ATTEMPTS_MAX
from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop_sinks import CacheSink, IndexSink
from delta_prop_wire.delta import Delta, Kind, Source, create, delete, offset, opaque, transform
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray


def double(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    vector *= 2  # a transform may modify its argument
    return vector


def run_scenario(scenario: Callable[[RecordedPropagator, CacheSink], Awaitable[Any]]) -> None:
    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        p.register_transform("double", double, reads="cache")
        await p.publish(Delta("v", create([1.0, 2.0]), metadata={"kept": True}))
        await scenario(p, cache)

    run_propagator(main)


def test_transform_becomes_dense_delta_and_keeps_metadata() -> None:
    async def scenario(p: RecordedPropagator, cache: CacheSink) -> None:
        published = await p.publish(Delta("v", transform("double"), metadata={"n": 1}))
        await p.settle()
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert (state.vector.tolist(), state.metadata) == ([2.0, 4.0], {"kept": True, "n": 1})
        last = p.recorder.deltas[-1]
        assert (last.operation.kind, last.source, last.dot) == (Kind.DENSE, Source.TRANSFORM, published.dot)

    run_scenario(scenario)


def test_transform_reads_preceding_deltas() -> None:
    async def scenario(p: RecordedPropagator, cache: CacheSink) -> None:
        for _ in range(3):
            p.offer(Delta("v", offset(1.0)))
            await p.publish(Delta("v", transform("double")))
        await p.settle()
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [22.0, 30.0]

    run_scenario(scenario)


def test_transform_is_retried_on_concurrent_update() -> None:
    async def scenario(p: RecordedPropagator, cache: CacheSink) -> None:
        calls: list[float] = []

        def conflicting(vector: NDArray[np.float32]) -> NDArray[np.float32]:
            calls.append(float(vector[0]))
            if len(calls) <= 2:
                p.offer(Delta("v", offset(10.0)))
            return -vector

        p.register_transform("slow", conflicting, reads="cache")
        await p.publish(Delta("v", transform("slow")))
        await p.settle()
        assert calls == [1.0, 11.0, 21.0]
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [-21.0, -22.0]

    run_scenario(scenario)


def test_transform_fails_after_attempts_max_conflicts() -> None:
    async def scenario(p: RecordedPropagator, _: CacheSink) -> None:
        calls: list[int] = []

        def always_conflicting(vector: NDArray[np.float32]) -> NDArray[np.float32]:
            calls.append(1)
            p.offer(Delta("v", offset(1.0)))
            return vector

        p.register_transform("hopeless", always_conflicting, reads="cache")
        with pytest.raises(Refused, match=f"{ATTEMPTS_MAX} times") as caught:
            await p.publish(Delta("v", transform("hopeless")))
        assert caught.value.code is ErrorCode.CONFLICT
        assert len(calls) == ATTEMPTS_MAX

    run_scenario(scenario)


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (Delta("v", transform("unheard")), r"'unheard' is registered: give one of \['double'\]"),
        (Delta("nobody", transform("double")), "not a live vector"),
        (Delta("dead", transform("double")), "not a live vector"),
        (Delta("bytes", transform("double")), "not a live vector"),
        (Delta("", transform("double")), "vector_id"),
    ],
)
def test_transform_of_missing_vector_or_name_is_refused(delta: Delta, message: str) -> None:
    async def scenario(p: RecordedPropagator, _: CacheSink) -> None:
        await p.publish(
            Delta("dead", create([1.0, 1.0])), Delta("dead", delete()), Delta("bytes", opaque(b"x"))
        )
        with pytest.raises(InvalidDelta, match=message):
            await p.publish(delta)

    run_scenario(scenario)


@pytest.mark.parametrize("nonblocking", [False, True])
def test_transform_function_error_is_refused_by_name(nonblocking: bool) -> None:
    def failing(vector: NDArray[np.float32]) -> NDArray[np.float32]:
        raise ZeroDivisionError("its norm is 0")

    async def scenario(p: RecordedPropagator, _: CacheSink) -> None:
        p.register_transform("unit", failing, reads="cache", nonblocking=nonblocking)
        with pytest.raises(Refused) as caught:
            await p.publish(Delta("v", transform("unit")))
        refusal = caught.value
        assert refusal.code is ErrorCode.PROCESSING_FAILED
        assert refusal.details == {"transform": "unit", "vector_id": "v", "namespace": "default"}
        assert refusal.message == (
            "transform 'unit' failed at 'v' in namespace 'default': ZeroDivisionError: its norm is 0: "
            "correct the function or the vector, then publish again"
        )
        assert isinstance(refusal.__cause__, ZeroDivisionError)
        assert p.statistics().log.next_offset == 1
        await p.publish(Delta("v", transform("double")))

    run_scenario(scenario)


def test_wrong_transform_use_is_rejected() -> None:
    async def scenario(p: RecordedPropagator, _: CacheSink) -> None:
        with pytest.raises(UsageError, match="alone"):
            await p.publish(Delta("v", transform("double")), Delta("v", offset(1.0)))
        with pytest.raises(UsageError, match="alone"):
            p.offer(Delta("v", transform("double")))
        with pytest.raises(UsageError, match="give the transform a name"):
            p.register_transform("", double, reads="cache")
        p.register_transform("of index", double, reads="index")
        with pytest.raises(UsageError, match="no sink named 'index'"):
            await p.publish(Delta("v", transform("of index")))
        await p.attach(IndexSink())
        with pytest.raises(UsageError, match="storage or cache"):
            await p.publish(Delta("v", transform("of index")))
        p.register_transform("to nan", lambda vector: vector * np.nan, reads="cache")
        with pytest.raises(InvalidDelta, match="vector"):
            await p.publish(Delta("v", transform("to nan")))
        assert p.statistics().log.next_offset == 1

    run_scenario(scenario)
