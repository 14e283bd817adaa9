"""Transforms: a named function of a vector, resolved into a dense delta before it is queued.

It reads the vector, applies the function and publishes the result with `expect`, and it retries if the vector
has changed meanwhile. A function may block: it is called in a thread, unless it was registered with
`nonblocking`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import anyio
import numpy as np

from delta_prop.delivery.status import format_failure
from delta_prop_sinks.callback import is_async
from delta_prop_wire.delta import Delta, Dot, Source, dense
from delta_prop_wire.errors import InvalidDelta, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from delta_prop.calls.receipt import PublishAck
    from delta_prop.platform.ports import Threads

ATTEMPTS_MAX = 16
"""Maximum tries of one publish, if others change the vector each time."""


class VectorReader(Protocol):
    """Source of a transform's vectors: an attached sink that returns a vector's state."""

    def get(self, namespace: str, vector_id: str) -> object:
        """Return the state, with `vector`, `alive` and `key`; may be awaitable."""
        ...


@dataclass(frozen=True, slots=True)
class _Transform:
    function: Callable[[NDArray[np.float32]], ArrayLike]
    reads: str
    nonblocking: bool


class Transforms:
    """Registered functions by name."""

    def __init__(self) -> None:
        self._known: dict[str, _Transform] = {}
        self._lock = anyio.Lock()  # transforms of this process wait for each other rather than conflict

    def register(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        reads: str,
        *,
        nonblocking: bool,
    ) -> None:
        """Register `function` as `name`; it reads vectors from the attached sink `reads`."""
        if not name:
            raise UsageError("name '': give the transform a name")
        for field, value in (("name", name), ("reads", reads)):
            if not isinstance(value, str):
                raise UsageError(f"{field} {value!r:.60} is of type {type(value).__name__}: give text")
        if not callable(function):
            raise UsageError(f"{function!r:.80} cannot be called: give transform {name!r} a function")
        if is_async(function):
            raise UsageError(
                f"{function!r:.80} is asynchronous: give transform {name!r} a plain function, which is "
                "called in a thread and may block"
            )
        self._known[name] = _Transform(function, reads, nonblocking)

    async def publish(
        self,
        delta: Delta,
        *,
        find_sink: Callable[[str], object],
        catch_up: Callable[[str], Awaitable[None]],
        publish: Callable[[Delta], Awaitable[PublishAck]],
        threads: Threads,
    ) -> PublishAck:
        """Resolve and publish. Raises InvalidDelta for an unknown name or vector; Refused with CONFLICT if
        others keep changing the vector, with PROCESSING_FAILED if the function raises.
        """
        name = delta.operation.data.decode()
        transform = self._known.get(name)
        if transform is None:
            raise InvalidDelta(
                "operation", f"no transform {name!r} is registered: give one of {sorted(self._known)}"
            )
        sink = cast("VectorReader", find_sink(transform.reads))
        if not hasattr(sink, "get"):
            raise UsageError(
                f"transform {name!r} reads from {transform.reads!r}, which has no vectors: let it read from "
                "a storage or cache sink"
            )
        async with self._lock:
            for _ in range(ATTEMPTS_MAX):
                await catch_up(transform.reads)
                state = sink.get(delta.namespace, delta.vector_id)
                if inspect.isawaitable(state):
                    state = await state
                vector, dot = _require_vector(state, delta)
                call = partial(transform.function, vector.copy())
                try:
                    result = call() if transform.nonblocking else await threads.run(call)
                except Exception as failure:
                    raise _function_failed(name, delta, failure) from failure
                resolved = replace(delta, operation=dense(result), expect=dot, source=Source.TRANSFORM)
                try:
                    return await publish(resolved)
                except Refused as refusal:
                    if refusal.code is not ErrorCode.CONFLICT:
                        raise
        raise Refused(
            ErrorCode.CONFLICT,
            f"{delta.vector_id!r} was changed by others {ATTEMPTS_MAX} times while transform {name!r} ran: "
            "retry when it changes less often",
            retry_after_ms=100,
        )


def _function_failed(name: str, delta: Delta, failure: Exception) -> Refused:
    return Refused(
        ErrorCode.PROCESSING_FAILED,
        f"transform {name!r} failed at {delta.vector_id!r} in namespace {delta.namespace!r}: "
        f"{format_failure(failure)}: correct the function or the vector, then publish again",
        details={"transform": name, "vector_id": delta.vector_id, "namespace": delta.namespace},
    )


def _require_vector(state: object, delta: Delta) -> tuple[NDArray[np.float32], Dot]:
    vector = getattr(state, "vector", None)
    key = getattr(state, "key", None)  # (Lamport number, origin, counter)
    if not getattr(state, "alive", False) or vector is None or key is None:
        raise InvalidDelta(
            "vector_id",
            f"{delta.vector_id!r} in namespace {delta.namespace!r} is not a live vector, which a transform "
            "needs: create it first",
        )
    return vector, Dot(key[1], key[2])
