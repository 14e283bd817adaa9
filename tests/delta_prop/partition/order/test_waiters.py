"""The orderer's indexes: their length stays proportional to the pending entries, and falls to zero."""

from __future__ import annotations

import random

from delta_prop_wire.delta import Dot


def test_index_length_stays_proportional_to_pending(new_pipeline, new_entry):
    pipeline = new_pipeline(owner_share=1.0)
    pipeline.offer(new_entry(1, 2, clock={5: 1_000_000, 6: 1}, parents=(b"x" * 16,)))
    for counter in range(1, 3_000):
        pending = new_entry(7, counter, clock={5: counter, 8: counter}, parents=(bytes([1]) * 16,))
        pipeline.offer(pending)
        if counter % 3 == 0:
            pipeline.offer(new_entry(5, counter - 2, counter))
        else:
            pipeline.orderer.withdraw(pending, 0.0)
        if counter % 50 == 0:
            pipeline.orderer.take_origin(7)
            pipeline.orderer.watermarks[7] = counter
            assert pipeline.orderer.statistics().index_length < 400
    pipeline.orderer.drain()
    assert pipeline.is_empty()


def test_indexes_are_empty_after_entries_refused_and_resent_many_times(new_pipeline, new_entry):
    pipeline = new_pipeline(owner_share=1.0, pending_deltas_max=50)
    rng = random.Random(5)
    entries = [
        new_entry(1, counter, clock={2: counter}, parents=(Dot(3, counter),)) for counter in range(1, 101)
    ]
    for turn in range(100):
        rng.shuffle(entries)
        pipeline.offer(*entries, now=turn * 10.0)
        pipeline.expire(turn * 10.0)
        statistics = pipeline.orderer.statistics()
        assert statistics.pending_deltas <= 50
        assert statistics.index_length <= 50 * 20
    for counter in range(1, 101):
        pipeline.offer(new_entry(3, counter), new_entry(2, counter))
    while pipeline.refusals:
        pipeline.offer(*sorted(pipeline.refusals, key=lambda entry: entry.first))
    assert len(pipeline.log) == 300
    assert pipeline.is_empty()


def test_entry_no_longer_depends_on_an_origin_that_it_no_longer_waits_for(new_pipeline, new_entry):
    pipeline = new_pipeline()
    waiting = new_entry(1, 1, clock={2: 1, 3: 1})
    pipeline.offer(waiting, new_entry(2, 1))
    from delta_prop_wire.errors import Refused
    from delta_prop_wire.spec import ErrorCode

    refusals = pipeline.orderer.refuse(new_entry(2, 2), Refused(ErrorCode.LOG_FULL, "full"))
    assert [entry.first for entry, _ in refusals] == [2]
    pipeline.offer(new_entry(3, 1))
    assert pipeline.log[-1] is waiting
