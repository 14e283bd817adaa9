"""CallbackSink: plain and async functions, called per delta or per delivery, and their failures."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from delta_prop import Propagator, Settings
from delta_prop.platform.world import real_world
from delta_prop_sinks import CallbackSink, Delivery, RejectDelta, TryAgain
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from collections.abc import Callable


def log_of_three() -> FakeLog:
    log = FakeLog()
    log.append(*(Delta(name, create([1])) for name in "abc"))
    return log


@pytest.mark.parametrize("asynchronous", [False, True])
def test_function_gets_each_delta_in_order_with_offset(asynchronous: bool) -> None:
    received: list[tuple[int, str]] = []

    def plain(offset: int, delta: Delta) -> None:
        received.append((offset, delta.vector_id))

    async def coroutine(offset: int, delta: Delta) -> None:
        await anyio.lowlevel.checkpoint()
        plain(offset, delta)

    async def main() -> None:
        log = log_of_three()
        sink = CallbackSink(coroutine if asynchronous else plain)
        assert await sink.open(log) is None
        await sink.apply([Delivery(log.batches[0]), Delivery(log.batches[0], np.array([1], np.intp))])
        assert sink.statistics().calls == 4
        await sink.aclose()

    anyio.run(main)
    assert received == [(0, "a"), (1, "b"), (2, "c"), (1, "b")]


def test_function_gets_one_delivery_at_a_time() -> None:
    received: list[Any] = []
    sink = CallbackSink(received.append, per="delivery")
    deliveries = log_of_three().deliveries()
    anyio.run(sink.apply, deliveries)
    assert received == deliveries


def test_failures_report_done_offset() -> None:
    def fail(offset: int, delta: Delta) -> None:
        if offset == 1:
            raise ValueError("no room")

    def reject(offset: int, delta: Delta) -> None:
        raise RejectDelta(offset, "never")

    deliveries = log_of_three().deliveries()
    with pytest.raises(TryAgain, match="ValueError: no room") as caught:
        anyio.run(CallbackSink(fail).apply, deliveries)
    assert caught.value.done_offset == 1
    with pytest.raises(RejectDelta, match="never"):
        anyio.run(CallbackSink(reject).apply, deliveries)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="is not callable"):
        CallbackSink(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="per 'row'"):
        CallbackSink(print, per="row")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nonblocking 'no' is not a bool: give True or False"):
        CallbackSink(print, nonblocking="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("per", "function", "message"),
    [
        ("delta", lambda delta: None, r"too many positional arguments.*: .* of \(offset, delta\)"),
        ("delta", lambda offset, delta, more: None, r"missing a required argument: 'more'"),
        ("delta", partial(lambda tag: None, "tag"), r"too many positional arguments"),
        (
            "delivery",
            lambda offset, delta: None,
            r"missing a required argument: 'delta'.*: .* of \(delivery\)",
        ),
    ],
)
def test_function_with_wrong_signature_is_refused(per: Any, function: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CallbackSink(function, per=per)


@pytest.mark.parametrize("function", [print, [].append, lambda *_: None, lambda a, b, c=1: None, type, max])
def test_fitting_or_unknown_signature_is_accepted(function: Any) -> None:
    CallbackSink(function, per="delivery" if function.__name__ == "append" else "delta")


def test_only_plain_functions_run_in_their_own_thread() -> None:
    received: dict[str, list[int]] = {}

    def recorder(name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            received.setdefault(name, []).append(threading.get_ident())

        return note

    class AsyncCallable:
        async def __call__(self, *_: object) -> None:
            recorder("object")()

    async def record_awaited(_tag: str, *_: object) -> None:
        recorder("partial")()

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(CallbackSink(recorder("plain"), name="plain"))
            await p.attach(CallbackSink(recorder("other"), name="other", per="delivery"))
            await p.attach(CallbackSink(recorder("nonblocking"), name="nonblocking", nonblocking=True))
            await p.attach(CallbackSink(AsyncCallable(), name="object"))
            await p.attach(CallbackSink(partial(record_awaited, "tag"), name="partial"))
            await p.wait_visible(await p.publish(*(Delta(f"v{n}", create([1])) for n in range(250))))
            await p.detach("plain")
            assert count_own_threads() == before + 1  # the thread of the sink "other"

    loop_thread, before = threading.get_ident(), count_own_threads()
    anyio.run(main)
    assert count_own_threads() == before
    thread_ids = {name: set(idents) for name, idents in received.items()}
    assert thread_ids["nonblocking"] == thread_ids["object"] == thread_ids["partial"] == {loop_thread}
    assert len(thread_ids["plain"]) == len(thread_ids["other"]) == 1
    assert len(thread_ids["plain"] | thread_ids["other"] | {loop_thread}) == 3
    assert len(received["plain"]) == 250


def count_own_threads() -> int:
    return sum(thread.name == "delta-prop own" for thread in threading.enumerate())


def test_awaitable_of_plain_function_is_awaited_by_loop() -> None:
    thread_ids: list[int] = []

    async def record_awaited() -> None:
        thread_ids.append(threading.get_ident())

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(CallbackSink(lambda *_: record_awaited()))
            await p.wait_visible(await p.publish(*(Delta(f"v{n}", create([1])) for n in range(150))))

    anyio.run(main)
    assert thread_ids == [threading.get_ident()] * 150


def test_cancelled_call_waits_for_the_running_function() -> None:
    calls: list[int] = []

    def block_briefly(offset: int, _: Delta) -> None:
        calls.append(offset)
        time.sleep(0.05)

    async def main() -> None:
        sink = CallbackSink(block_briefly)
        async with real_world().own_thread() as thread:
            log = log_of_three()
            log.clock = real_world().clock  # type: ignore[assignment]
            log.own_thread = lambda: nullcontext(thread)  # type: ignore[assignment, method-assign, return-value]
            await sink.open(log)
            with anyio.move_on_after(0.02):
                await sink.apply(log.deliveries())
            assert calls == [0]
            await sink.apply(log.deliveries())
            assert calls == [0, 0, 1, 2]
            await sink.aclose()

    anyio.run(main)


def test_closing_does_not_wait_for_hanging_function() -> None:
    release, entered = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        entered.set()
        release.wait(60)

    async def main() -> None:
        sink = CallbackSink(hang)
        started_at = time.monotonic()
        async with Propagator(Settings(close_timeout_s=0.5)) as p:
            await p.attach(sink)
            await p.publish(Delta("v", create([1])))
            await anyio.to_thread.run_sync(entered.wait)
        assert time.monotonic() - started_at < 10
        async with Propagator() as p:
            with pytest.raises(UsageError, match="'callback': a call of its function, made before"):
                await p.attach(sink)
            release.set()
            while sink.statistics().running:  # noqa: ASYNC110 - no event signals the end of the thread
                await anyio.sleep(0.01)
            await p.attach(sink)

    try:
        anyio.run(main)
    finally:
        release.set()


def test_retryable_failure_without_done_offset_gets_offset_of_the_call() -> None:
    shared_error = TryAgain("busy")  # some programs raise one shared instance

    def busy(offset: int, _: Delta) -> None:
        if offset == busy_at[0]:
            raise shared_error

    def fail_earlier(offset: int, _: Delta) -> None:
        if offset == 2:
            raise TryAgain("what was buffered is lost", done_offset=1)

    deliveries = log_of_three().deliveries()
    for failing_offset in (2, 1):
        busy_at = [failing_offset]
        with pytest.raises(TryAgain, match="busy") as caught:
            anyio.run(CallbackSink(busy).apply, deliveries)
        assert caught.value.done_offset == failing_offset
    with pytest.raises(TryAgain, match="buffered") as caught:
        anyio.run(CallbackSink(fail_earlier).apply, deliveries)
    assert caught.value.done_offset == 1
