"""Histories of vectors that a sink asks for: of several at once, in pieces, from long logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, Propagator, Refused, Settings, create
from delta_prop import sink_runtime as module
from delta_prop.sink_runtime import find_head, read_history
from delta_prop.sinks import CallbackSink, TryAgain
from delta_prop.testing import run_propagator
from delta_prop_wire.delta import ABSENT, Operation, delete
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.sinks import Delivery, SinkContext


class Historian(CallbackSink):
    """Asks for the history of some vectors whenever it is brought the last of so many deltas."""

    def __init__(self, count: int, *vectors: tuple[str, str]) -> None:
        super().__init__(lambda _offset, _delta: None, name="historian")
        self.count, self.vectors = count, vectors
        self.told: list[tuple[str, str, int]] = []

    async def open(self, context: SinkContext) -> None:
        self.context = context
        return await super().open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries[-1].next_offset == self.count:
            self.told = [
                (logged.batch.namespaces[row], logged.batch.keys[row], logged.offset + row)
                async for logged, row in self.context.history(self.vectors)
            ]
        await super().apply(deliveries)


async def written(p: Propagator, count: int) -> None:
    """Deltas for `a` and `b` in turn, of two namespaces; now and then a batch of both."""
    for number in range(0, count, 3):
        await p.publish(Delta("ab"[number % 2], create([1.0]), "xy"[number // 3 % 2]))
        await p.publish(Delta("b", create([1.0]), "x"), Delta("a", create([1.0]), "y"))


def test_head_read_from_the_log_is_that_of_a_service_that_saw_its_deltas() -> None:
    async def main(p: Propagator) -> None:
        later = Operation(12, data=b"later")
        rows = (
            Delta("new", later),
            Delta("gone", create([1.0])),
            Delta("gone", delete()),
            Delta("gone", later),
        )
        await p.publish(*rows)
        log = p.internals().log
        heads = [find_head(read_history(log, [("default", name)])) for name in ("new", "gone", "nobody")]
        assert [None if head is None else head.alive for head in heads] == [True, False, None]
        await p.publish(Delta("gone", create([1.0]), expect=ABSENT))
        with pytest.raises(Refused) as conflict:
            await p.publish(Delta("new", create([1.0]), expect=ABSENT))
        assert conflict.value.code is ErrorCode.CONFLICT

    run_propagator(main)


def test_several_vectors_are_told_in_the_order_of_the_log() -> None:
    async def main(p: Propagator) -> None:
        sink = await p.attach(Historian(300, ("x", "b"), ("y", "a"), ("y", "nobody")))
        everything = await p.attach(
            Historian(300, ("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")), name="all"
        )
        await written(p, 300)
        await p.wait_visible(300)
        assert [at for *_, at in everything.told] == list(range(300))
        wanted = {("x", "b"), ("y", "a")}
        assert sink.told == [one for one in everything.told if one[:2] in wanted]

    run_propagator(main)


def test_reading_a_long_log_does_not_make_a_call_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(module.Pace):
        is_due = True

        async def rest(self) -> None:
            await anyio.sleep(1.0)

    async def main(p: Propagator) -> None:
        sink = await p.attach(Historian(298, ("x", "b")))
        await written(p, 297)
        monkeypatch.setattr(module, "Pace", Slow)
        began = anyio.current_time()
        await p.publish(Delta("b", create([1.0]), "x"))
        await p.wait_visible(298, timeout_s=1_000)
        assert anyio.current_time() - began > 100, "as long as that took"
        assert p.statistics().sinks["historian"].errors == 0
        assert sink.told

    run_propagator(main, Settings(apply_timeout_s=5.0))


def test_what_the_log_lets_go_of_meanwhile_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(p: Propagator) -> None:
        sink = await p.attach(Historian(598, ("x", "b")))
        await written(p, 597)
        log = p.internals().log
        read, readings = log.read, 0

        def failing(at: int, **bounds: int) -> object:
            nonlocal readings
            readings += 1
            if readings == 2:
                raise Refused(ErrorCode.CURSOR_TOO_OLD, "the log starts at offset 500")
            return read(at, **bounds)

        monkeypatch.setattr(log, "read", failing)
        with pytest.raises(TryAgain, match="the log cannot be read: the log starts at offset 500"):
            [place async for place in sink.context.history([("x", "b")])]
        await p.publish(Delta("b", create([1.0]), "x"))
        await p.wait_visible(598)
        assert len(sink.told) == 200

    run_propagator(main)
