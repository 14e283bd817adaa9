"""The propagator for scripts and notebooks: the same verbs as plain calls, its loop on a thread of its own.

Every call may come from any thread; each waits under the deadline of the verb behind it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial
from inspect import isawaitable
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

from delta_prop.embedded import Propagator
from delta_prop_wire.delta import DEFAULT_NAMESPACE, Kind
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
    from types import TracebackType

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from delta_prop.attached import Start
    from delta_prop.attachments import OnLogFull, Place
    from delta_prop.backpressure.pacer import Pressure
    from delta_prop.config import Settings
    from delta_prop.producer import Producer
    from delta_prop.published import Delivered
    from delta_prop.publishing import Named
    from delta_prop.receipt import Published
    from delta_prop.route.late import Replayed
    from delta_prop.route.quarantine import SetAside
    from delta_prop.route.subscription import Subscription
    from delta_prop.statistics import Statistics
    from delta_prop_sinks.sink import Sink
    from delta_prop_wire.delta import AckLevel, Delta, Dot

    S = TypeVar("S", bound=Sink)

T = TypeVar("T")


class SyncPropagator:
    """`with SyncPropagator() as p: p.publish(delta)`. See `Propagator` for what each verb promises."""

    def __init__(self, settings: Settings | None = None, *, backend: str = "asyncio") -> None:
        self._backend = backend
        self._propagator = Propagator(settings)
        self._exit = ExitStack()
        self._portal: BlockingPortal | None = None
        self._loop_thread = 0

    def __enter__(self) -> SyncPropagator:
        with ExitStack() as stack:  # undone in order if the propagator cannot open
            portal = stack.enter_context(start_blocking_portal(self._backend))
            running: AbstractContextManager[Propagator] = portal.wrap_async_context_manager(self._propagator)
            stack.enter_context(running)
            self._exit = stack.pop_all()
        self._loop_thread = portal.call(get_ident)
        self._portal = portal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal = None
        self._exit.__exit__(kind, error, trace)

    @overload
    def call(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T: ...

    @overload
    def call(self, function: Callable[[], T]) -> T: ...

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function of no arguments on the loop's thread: a sink's `search` or `get`, for instance."""
        if not callable(function):
            raise UsageError(
                f"{function!r:.80} cannot be called: give a function, as in call(lambda: cache.get(…))"
            )
        return self._running().call(_awaited, function)

    def attach(
        self,
        sink: S,
        *,
        topics: str | Iterable[str] = "*",
        name: str | None = None,
        start: Start = "resume",
        required: bool = True,
        pacing: bool = False,
        on_log_full: OnLogFull | None = None,
        batch_deltas: int | None = None,
        linger_ms_max: float | None = None,
        rebuild: bool = False,
    ) -> S:
        """Attach a sink; return it. Its own methods are called through `call`."""
        attach = partial(
            self._propagator.attach,
            sink,
            topics=topics,
            name=name,
            start=start,
            required=required,
            pacing=pacing,
            on_log_full=on_log_full,
            batch_deltas=batch_deltas,
            linger_ms_max=linger_ms_max,
            rebuild=rebuild,
        )
        return self._running().call(attach)

    def detach(self, name: str) -> None:
        """Let a sink go."""
        self._running().call(self._propagator.detach, name)

    def restart(self, name: str) -> None:
        """Let a stopped sink go on; one whose breaker is open is tried at once."""
        self.call(partial(self._propagator.restart, name))

    def rebuild(self, name: str) -> None:
        """Have a sink's data replaced by the newest snapshot of the log and what follows it."""
        self.call(partial(self._propagator.rebuild, name))

    def pause(self, name: str) -> None:
        """Bring a sink nothing until `resume`."""
        self.call(partial(self._propagator.pause, name))

    def resume(self, name: str) -> None:
        """End a pause."""
        self.call(partial(self._propagator.resume, name))

    def reset(self, name: str, to: Place, *, timeout_s: float = 30.0) -> int:
        """Have a sink go on at `earliest`, `latest` or an offset; return the offset."""
        return self._running().call(partial(self._propagator.reset, name, to, timeout_s=timeout_s))

    def quarantine(self, sink: str) -> list[SetAside]:
        """What this sink has set aside, in log order."""
        return self.call(partial(self._propagator.quarantine, sink))

    def replay(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> Replayed:
        """Have quarantined deltas applied once more (no offsets: all), and what waits behind them."""
        return self._running().call(partial(self._propagator.replay, sink, *offsets, timeout_s=timeout_s))

    def drop(self, sink: str, *offsets: int, timeout_s: float = 30.0) -> Replayed:
        """Give up quarantined deltas (no offsets: all); what waits behind them goes on."""
        return self._running().call(partial(self._propagator.drop, sink, *offsets, timeout_s=timeout_s))

    def pressure(self) -> Pressure:
        """How pressed producers are now."""
        return self.call(self._propagator.pressure)

    def publish(
        self,
        *deltas: Delta,
        after: Sequence[Named] = (),
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish deltas of one priority; return the acknowledgement."""
        publish = partial(
            self._propagator.publish, *deltas, after=after, ack_level=ack_level, timeout_s=timeout_s
        )
        return self._running().call(publish)

    def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        indices: ArrayLike | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish whole vectors, or with `indices` parts of them, as columns."""
        publish = partial(
            self._propagator.publish_many,
            ids,
            matrix,
            indices=indices,
            namespace=namespace,
            kind=kind,
            timeout_s=timeout_s,
        )
        return self._running().call(publish)

    def publish_as(self, producer: Producer, *deltas: Delta, timeout_s: float = 30.0) -> Published:
        """Publish under a producer's own dots."""
        return self._running().call(partial(producer.publish, *deltas, timeout_s=timeout_s))

    def producer(self, name: str) -> Producer:
        """A named handle, for `publish_as`."""
        return self._running().call(self._propagator.producer, name)

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Let deltas apply `function` to a vector; it is called in a thread of its own, or by the loop's."""
        self._propagator.register_transform(name, function, reads=reads, nonblocking=nonblocking)

    def wait_visible(
        self,
        published: Published | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks have applied a delta."""
        wait = partial(
            self._propagator.wait_visible, published, sinks=sinks, committed=committed, timeout_s=timeout_s
        )
        self._running().call(wait)

    def subscribe(self, *topics: str, start: Start = "latest") -> Iterator[Delivered]:
        """Iterate over deltas as they come; close the iterator to end it."""
        return self._read(self.call(partial(self._propagator.subscribe, *topics, start=start)))

    def head(self, vector_id: str, namespace: str = DEFAULT_NAMESPACE) -> Dot | None:
        """The dot of a vector's last delta."""
        return self.call(partial(self._propagator.head, vector_id, namespace))

    def statistics(self) -> Statistics:
        """A snapshot of everything."""
        return self.call(self._propagator.statistics)

    def _read(self, subscription: Subscription) -> Iterator[Delivered]:
        portal = self._running()
        try:
            while self._portal is portal:
                try:
                    yield portal.call(subscription.__anext__)
                except StopAsyncIteration:
                    return
                except RuntimeError:
                    if self._portal is portal:
                        raise  # else it was closed just now, from another thread
        finally:
            if self._portal is portal:
                portal.call(subscription.close)

    def _running(self) -> BlockingPortal:
        if self._portal is None:
            raise UsageError("the propagator is not open: use it inside `with SyncPropagator() as p:`")
        if get_ident() == self._loop_thread:
            raise UsageError(
                "a SyncPropagator was called on its own loop's thread, which would wait for itself: call it "
                "from another thread, not within `call`, `nonblocking` functions or sinks"
            )
        return self._portal


async def _awaited(function: Callable[[], Any]) -> Any:
    """Call on the loop; an awaitable result is awaited there."""
    result = function()
    return await result if isawaitable(result) else result
