"""`SinkContext.history` yields the rows of several vectors in log order, also from a long log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import Delta, Propagator, Refused, Settings, create
from delta_prop.delivery import sink_context
from delta_prop.delivery.sink_context import find_head, read_history
from delta_prop.sinks import CallbackSink, TryAgain
from delta_prop.testing import run_propagator
from delta_prop_wire.delta import ABSENT, Operation, delete
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.sinks import Delivery, SinkContext


class HistorySink(CallbackSink):
    """A sink that reads the history of some vectors when it gets the row before offset `end`."""

    def __init__(self, end: int, *vectors: tuple[str, str]) -> None:
        super().__init__(lambda _offset, _delta: None, name="historian")
        self.end, self.vectors = end, vectors
        self.history: list[tuple[str, str, int]] = []

    async def open(self, context: SinkContext) -> None:
        self.context = context
        return await super().open(context)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries[-1].next_offset == self.end:
            self.history = [
                (logged.batch.namespaces[row], logged.batch.keys[row], logged.offset + row)
                async for logged, row in self.context.history(self.vectors)
            ]
        await super().apply(deliveries)


async def publish_alternating(p: Propagator, end: int) -> None:
    """Publish up to `end`: (`x`, `a`) or (`y`, `b`) in turn, then a batch of (`x`, `b`) and (`y`, `a`)."""
    for number in range(0, end, 3):
        await p.publish(Delta("ab"[number % 2], create([1.0]), "xy"[number // 3 % 2]))
        await p.publish(Delta("b", create([1.0]), "x"), Delta("a", create([1.0]), "y"))


def test_head_read_from_log_equals_head_in_memory() -> None:
    async def main(p: Propagator) -> None:
        unknown_operation = Operation(12, data=b"later")
        rows = (
            Delta("new", unknown_operation),
            Delta("gone", create([1.0])),
            Delta("gone", delete()),
            Delta("gone", unknown_operation),
        )
        await p.publish(*rows)
        log = p.internals().partition.log
        heads = [find_head(read_history(log, [("default", name)])) for name in ("new", "gone", "nobody")]
        assert [None if head is None else head.alive for head in heads] == [True, False, None]
        await p.publish(Delta("gone", create([1.0]), expect=ABSENT))
        with pytest.raises(Refused) as conflict:
            await p.publish(Delta("new", create([1.0]), expect=ABSENT))
        assert conflict.value.code is ErrorCode.CONFLICT

    run_propagator(main)


def test_history_of_several_vectors_is_in_log_order() -> None:
    async def main(p: Propagator) -> None:
        sink = await p.attach(HistorySink(300, ("x", "b"), ("y", "a"), ("y", "nobody")))
        full_sink = await p.attach(
            HistorySink(300, ("x", "a"), ("x", "b"), ("y", "a"), ("y", "b")), name="all"
        )
        await publish_alternating(p, 300)
        await p.wait_visible(300)
        assert [offset for *_, offset in full_sink.history] == list(range(300))
        expected = {("x", "b"), ("y", "a")}
        assert sink.history == [entry for entry in full_sink.history if entry[:2] in expected]

    run_propagator(main)


def test_long_history_read_does_not_time_out_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(sink_context.Pace):
        is_due = True

        async def rest(self) -> None:
            await anyio.sleep(1.0)

    async def main(p: Propagator) -> None:
        sink = await p.attach(HistorySink(298, ("x", "b")))
        await publish_alternating(p, 297)
        monkeypatch.setattr(sink_context, "Pace", Slow)
        start_s = anyio.current_time()
        await p.publish(Delta("b", create([1.0]), "x"))
        await p.wait_visible(298, timeout_s=1_000)
        assert anyio.current_time() - start_s > 100, "the history read must take over 100 s"
        assert p.statistics().sinks["historian"].errors == 0
        assert sink.history

    run_propagator(main, Settings(apply_timeout_s=5.0))


def test_history_below_log_start_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(p: Propagator) -> None:
        sink = await p.attach(HistorySink(598, ("x", "b")))
        await publish_alternating(p, 597)
        log = p.internals().partition.log
        real_read, read_count = log.read, 0

        def read_or_fail(offset: int, **bounds: int) -> object:
            nonlocal read_count
            read_count += 1
            if read_count == 2:
                raise Refused(ErrorCode.CURSOR_TOO_OLD, "the log starts at offset 500")
            return real_read(offset, **bounds)

        monkeypatch.setattr(log, "read", read_or_fail)
        with pytest.raises(TryAgain, match="the log cannot be read: the log starts at offset 500"):
            [row async for row in sink.context.history([("x", "b")])]
        await p.publish(Delta("b", create([1.0]), "x"))
        await p.wait_visible(598)
        assert len(sink.history) == 200

    run_propagator(main)
