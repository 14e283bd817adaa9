"""Transforms: read, apply, publish if nobody was faster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from delta_prop.testing import RecordedPropagator, run_propagator
from delta_prop.transforms import ATTEMPTS_MAX
from delta_prop_sinks import CacheSink, IndexSink
from delta_prop_wire.delta import Delta, Kind, Source, create, delete, offset, opaque, transform
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray


def double(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    vector *= 2  # it may write to what it is given
    return vector


def run(story: Callable[[RecordedPropagator, CacheSink], Awaitable[Any]]) -> None:
    async def main(p: RecordedPropagator) -> None:
        cache = await p.attach(CacheSink())
        p.register_transform("double", double, reads="cache")
        await p.publish(Delta("v", create([1.0, 2.0]), metadata={"kept": True}))
        await story(p, cache)

    run_propagator(main)


def test_it_becomes_a_dense_delta_which_keeps_the_metadata() -> None:
    async def story(p: RecordedPropagator, cache: CacheSink) -> None:
        published = await p.publish(Delta("v", transform("double"), metadata={"n": 1}))
        await p.settle()
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert (state.vector.tolist(), state.metadata) == ([2.0, 4.0], {"kept": True, "n": 1})
        last = p.recorder.deltas[-1]
        assert (last.operation.kind, last.source, last.dot) == (Kind.DENSE, Source.TRANSFORM, published.dot)

    run(story)


def test_it_reads_what_was_published_just_before() -> None:
    async def story(p: RecordedPropagator, cache: CacheSink) -> None:
        for _ in range(3):
            p.offer(Delta("v", offset(1.0)))
            await p.publish(Delta("v", transform("double")))
        await p.settle()
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [22.0, 30.0]

    run(story)


def test_it_runs_again_when_somebody_was_faster() -> None:
    async def story(p: RecordedPropagator, cache: CacheSink) -> None:
        calls: list[float] = []

        def slow(vector: NDArray[np.float32]) -> NDArray[np.float32]:
            calls.append(float(vector[0]))
            if len(calls) <= 2:
                p.offer(Delta("v", offset(10.0)))
            return -vector

        p.register_transform("slow", slow, reads="cache")
        await p.publish(Delta("v", transform("slow")))
        await p.settle()
        assert calls == [1.0, 11.0, 21.0]
        state = cache.peek("default", "v")
        assert state is not None
        assert state.vector is not None
        assert state.vector.tolist() == [-21.0, -22.0]

    run(story)


def test_it_gives_up_when_others_are_always_faster() -> None:
    async def story(p: RecordedPropagator, _: CacheSink) -> None:
        calls: list[int] = []

        def hopeless(vector: NDArray[np.float32]) -> NDArray[np.float32]:
            calls.append(1)
            p.offer(Delta("v", offset(1.0)))
            return vector

        p.register_transform("hopeless", hopeless, reads="cache")
        with pytest.raises(Refused, match=f"{ATTEMPTS_MAX} times") as caught:
            await p.publish(Delta("v", transform("hopeless")))
        assert caught.value.code is ErrorCode.CONFLICT
        assert len(calls) == ATTEMPTS_MAX

    run(story)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (Delta("v", transform("unheard")), r"'unheard' is registered: give one of \['double'\]"),
        (Delta("nobody", transform("double")), "not a live vector"),
        (Delta("dead", transform("double")), "not a live vector"),
        (Delta("bytes", transform("double")), "not a live vector"),
        (Delta("", transform("double")), "vector_id"),
    ],
)
def test_what_it_cannot_work_on_is_named(delta: Delta, words: str) -> None:
    async def story(p: RecordedPropagator, _: CacheSink) -> None:
        await p.publish(
            Delta("dead", create([1.0, 1.0])), Delta("dead", delete()), Delta("bytes", opaque(b"x"))
        )
        with pytest.raises(InvalidDelta, match=words):
            await p.publish(delta)

    run(story)


@pytest.mark.parametrize("nonblocking", [False, True])
def test_function_that_raises_is_refused_by_name(nonblocking: bool) -> None:
    def ill(vector: NDArray[np.float32]) -> NDArray[np.float32]:
        raise ZeroDivisionError("its norm is 0")

    async def story(p: RecordedPropagator, _: CacheSink) -> None:
        p.register_transform("unit", ill, reads="cache", nonblocking=nonblocking)
        with pytest.raises(Refused) as caught:
            await p.publish(Delta("v", transform("unit")))
        refused = caught.value
        assert refused.code is ErrorCode.PROCESSING_FAILED
        assert refused.details == {"transform": "unit", "vector_id": "v", "namespace": "default"}
        assert refused.message == (
            "transform 'unit' failed at 'v' in namespace 'default': ZeroDivisionError: its norm is 0: "
            "correct the function or the vector, then publish again"
        )
        assert isinstance(refused.__cause__, ZeroDivisionError)
        assert p.statistics().log.next_offset == 1
        await p.publish(Delta("v", transform("double")))

    run(story)


def test_misuse_is_told() -> None:
    async def story(p: RecordedPropagator, _: CacheSink) -> None:
        with pytest.raises(UsageError, match="alone"):
            await p.publish(Delta("v", transform("double")), Delta("v", offset(1.0)))
        with pytest.raises(UsageError, match="alone"):
            p.offer(Delta("v", transform("double")))
        with pytest.raises(UsageError, match="give the transform a name"):
            p.register_transform("", double, reads="cache")
        p.register_transform("astray", double, reads="index")
        with pytest.raises(UsageError, match="no sink named 'index'"):
            await p.publish(Delta("v", transform("astray")))
        await p.attach(IndexSink())
        with pytest.raises(UsageError, match="storage or cache"):
            await p.publish(Delta("v", transform("astray")))
        p.register_transform("ill", lambda vector: vector * np.nan, reads="cache")
        with pytest.raises(InvalidDelta, match="vector"):
            await p.publish(Delta("v", transform("ill")))
        assert p.statistics().log.next_offset == 1

    run(story)
