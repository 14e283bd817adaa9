"""`RecordedPropagator` publishes lines, records each delivered delta, and waits until all sinks are done."""

from __future__ import annotations

import pytest

from delta_prop import Delta, Refused, create, offset
from delta_prop.sinks import CallbackSink, StopSink
from delta_prop.testing import RecordedPropagator, RecordingSink, run_propagator


def test_delivered_deltas_are_recorded() -> None:
    async def main(p: RecordedPropagator) -> None:
        published = await p.publish_lines(
            '{"vector_id": "v", "op": "create", "vector": [1, 2]}\n\n{"vector_id": "v", "op": "delete"}'
        )
        await p.settle()
        assert [ack.offset for ack in published] == [0, 1]
        assert p.recorder.vector_ids == ["v", "v"]
        assert [delivered.offset for delivered in p.recorder.received] == [0, 1]
        assert p.recorder.deltas[0].dot == published[0].dot

    run_propagator(main)


def test_settle_waits_for_deltas_published_by_sinks() -> None:
    async def main(p: RecordedPropagator) -> None:
        async def follow(_: int, delta: Delta) -> None:
            if delta.operation.kind == 0:
                await p.publish(Delta(delta.vector_id, offset(1.0)))

        await p.attach(CallbackSink(follow))
        await p.publish(Delta("v", create([1.0])))
        await p.settle()
        assert p.recorder.vector_ids == ["v", "v"]

    run_propagator(main)


def test_settle_raises_for_a_stopped_sink_or_full_recorder() -> None:
    def stop(*_: object) -> None:
        raise StopSink("out of paper")

    async def main(p: RecordedPropagator) -> None:
        await p.attach(RecordingSink(name="small", deltas_max=1))
        await p.publish(Delta("v", create([1.0])), Delta("w", create([1.0])))
        with pytest.raises(Refused, match="raise deltas_max"):
            await p.settle()
        await p.detach("small")
        await p.attach(CallbackSink(stop))
        with pytest.raises(Refused, match="out of paper"):
            await p.settle()

    run_propagator(main)
