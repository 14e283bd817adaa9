"""The callback sink: plain and async functions, a delta or a delivery at a time, and their failures."""

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
from delta_prop.world import real_world
from delta_prop_sinks import CallbackSink, Delivery, RejectDelta, TryAgain
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import UsageError
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from collections.abc import Callable


def filled() -> FakeLog:
    log = FakeLog()
    log.append(*(Delta(name, create([1])) for name in "abc"))
    return log


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_delta_in_order_with_its_offset(asynchronous: bool) -> None:
    seen: list[tuple[int, str]] = []

    def plain(offset: int, delta: Delta) -> None:
        seen.append((offset, delta.vector_id))

    async def coroutine(offset: int, delta: Delta) -> None:
        await anyio.lowlevel.checkpoint()
        plain(offset, delta)

    async def main() -> None:
        log = filled()
        sink = CallbackSink(coroutine if asynchronous else plain)
        assert await sink.open(log) is None
        await sink.apply([Delivery(log.batches[0]), Delivery(log.batches[0], np.array([1], np.intp))])
        assert sink.statistics().calls == 4
        await sink.aclose()

    anyio.run(main)
    assert seen == [(0, "a"), (1, "b"), (2, "c"), (1, "b")]


def test_a_delivery_at_a_time() -> None:
    seen: list[Any] = []
    sink = CallbackSink(seen.append, per="delivery")
    deliveries = filled().deliveries()
    anyio.run(sink.apply, deliveries)
    assert seen == deliveries


def test_failures_say_how_far_it_came() -> None:
    def fails(offset: int, delta: Delta) -> None:
        if offset == 1:
            raise ValueError("no room")

    def rejects(offset: int, delta: Delta) -> None:
        raise RejectDelta(offset, "never")

    deliveries = filled().deliveries()
    with pytest.raises(TryAgain, match="ValueError: no room") as caught:
        anyio.run(CallbackSink(fails).apply, deliveries)
    assert caught.value.done_offset == 1
    with pytest.raises(RejectDelta, match="never"):
        anyio.run(CallbackSink(rejects).apply, deliveries)


def test_wrong_use_is_told() -> None:
    with pytest.raises(UsageError, match="is not callable"):
        CallbackSink(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="per 'row'"):
        CallbackSink(print, per="row")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="nonblocking 'no' is not a bool: give True or False"):
        CallbackSink(print, nonblocking="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("per", "function", "told"),
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
def test_a_function_that_cannot_take_what_it_gets_is_refused(per: Any, function: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        CallbackSink(function, per=per)


@pytest.mark.parametrize("function", [print, [].append, lambda *_: None, lambda a, b, c=1: None, type, max])
def test_a_function_is_taken_that_can_be_called_or_tells_no_signature(function: Any) -> None:
    CallbackSink(function, per="delivery" if function.__name__ == "append" else "delta")


def test_a_plain_function_is_called_in_a_thread_of_its_own_and_others_by_the_loop() -> None:
    seen: dict[str, list[int]] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(*_: object) -> None:
            seen.setdefault(name, []).append(threading.get_ident())

        return note

    class Waits:
        async def __call__(self, *_: object) -> None:
            noting("object")()

    async def waits(_tag: str, *_: object) -> None:
        noting("partial")()

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(CallbackSink(noting("plain"), name="plain"))
            await p.attach(CallbackSink(noting("other"), name="other", per="delivery"))
            await p.attach(CallbackSink(noting("nonblocking"), name="nonblocking", nonblocking=True))
            await p.attach(CallbackSink(Waits(), name="object"))
            await p.attach(CallbackSink(partial(waits, "tag"), name="partial"))
            await p.wait_visible(await p.publish(*(Delta(f"v{n}", create([1])) for n in range(250))))
            await p.detach("plain")
            assert threads() == before + 1  # the other's

    here, before = threading.get_ident(), threads()
    anyio.run(main)
    assert threads() == before
    ran = {name: set(idents) for name, idents in seen.items()}
    assert ran["nonblocking"] == ran["object"] == ran["partial"] == {here}
    assert len(ran["plain"]) == len(ran["other"]) == 1
    assert len(ran["plain"] | ran["other"] | {here}) == 3
    assert len(seen["plain"]) == 250


def threads() -> int:
    return sum(one.name == "delta-prop own" for one in threading.enumerate())


def test_what_a_plain_function_gives_to_be_awaited_is_awaited_by_the_loop() -> None:
    ran: list[int] = []

    async def waits() -> None:
        ran.append(threading.get_ident())

    async def main() -> None:
        async with Propagator() as p:
            await p.attach(CallbackSink(lambda *_: waits()))
            await p.wait_visible(await p.publish(*(Delta(f"v{n}", create([1])) for n in range(150))))

    anyio.run(main)
    assert ran == [threading.get_ident()] * 150


def test_a_call_that_is_broken_off_ends_behind_the_function_that_runs() -> None:
    calls: list[int] = []

    def blocks(offset: int, _: Delta) -> None:
        calls.append(offset)
        time.sleep(0.05)

    async def main() -> None:
        sink = CallbackSink(blocks)
        async with real_world().own_thread() as thread:
            log = filled()
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


def test_closing_leaves_a_function_alone_that_does_not_return() -> None:
    go, entered = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        entered.set()
        go.wait(60)

    async def main() -> None:
        sink = CallbackSink(stuck)
        began = time.monotonic()
        async with Propagator(Settings(close_timeout_s=0.5)) as p:
            await p.attach(sink)
            await p.publish(Delta("v", create([1])))
            await anyio.to_thread.run_sync(entered.wait)
        assert time.monotonic() - began < 10
        async with Propagator() as p:
            with pytest.raises(UsageError, match="'callback': a call of its function still runs from before"):
                await p.attach(sink)
            go.set()
            while sink.statistics().running:  # noqa: ASYNC110 - of the thread nobody is told
                await anyio.sleep(0.01)
            await p.attach(sink)

    try:
        anyio.run(main)
    finally:
        go.set()


def test_a_passing_failure_says_how_far_it_came_whether_it_was_told_or_not() -> None:
    told = TryAgain("busy")  # one for all, as some programs raise it

    def busy(offset: int, _: Delta) -> None:
        if offset == busy_at[0]:
            raise told

    def earlier(offset: int, _: Delta) -> None:
        if offset == 2:
            raise TryAgain("what was buffered is lost", done_offset=1)

    deliveries = filled().deliveries()
    for at in (2, 1):
        busy_at = [at]
        with pytest.raises(TryAgain, match="busy") as caught:
            anyio.run(CallbackSink(busy).apply, deliveries)
        assert caught.value.done_offset == at
    with pytest.raises(TryAgain, match="buffered") as caught:
        anyio.run(CallbackSink(earlier).apply, deliveries)
    assert caught.value.done_offset == 1
