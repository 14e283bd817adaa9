"""The indexes: a crowd that comes and goes leaves nothing, and never more than it is."""

from __future__ import annotations

import random

from delta_prop_wire.delta import Dot


def test_indexes_stay_in_proportion_to_what_is_pending(new_chain, run_of):
    chain = new_chain(owner_share=1.0)
    chain.offer(run_of(1, 2, clock={5: 1_000_000, 6: 1}, parents=(b"x" * 16,)))
    for counter in range(1, 3_000):
        parked = run_of(7, counter, clock={5: counter, 8: counter}, parents=(bytes([1]) * 16,))
        chain.offer(parked)
        if counter % 3 == 0:
            chain.offer(run_of(5, counter - 2, counter))
        else:
            chain.orderer.withdraw(parked, 0.0)
        if counter % 50 == 0:
            chain.orderer.take_origin(7)
            chain.orderer.watermarks[7] = counter
            assert chain.orderer.statistics().index_length < 400
    chain.orderer.drain()
    assert chain.is_empty()


def test_refused_and_sent_again_many_times(new_chain, run_of):
    chain = new_chain(owner_share=1.0, pending_deltas_max=50)
    draw = random.Random(5)
    crowd = [run_of(1, counter, clock={2: counter}, parents=(Dot(3, counter),)) for counter in range(1, 101)]
    for turn in range(100):
        draw.shuffle(crowd)
        chain.offer(*crowd, now=turn * 10.0)
        chain.expire(turn * 10.0)
        now = chain.orderer.statistics()
        assert now.pending_deltas <= 50
        assert now.index_length <= 50 * 20
    for counter in range(1, 101):
        chain.offer(run_of(3, counter), run_of(2, counter))
    while chain.refused:
        chain.offer(*sorted(chain.refused, key=lambda entry: entry.first))
    assert len(chain.log) == 300
    assert chain.is_empty()


def test_waits_that_are_over_do_not_count_as_behind(new_chain, run_of):
    chain = new_chain()
    waiting = run_of(1, 1, clock={2: 1, 3: 1})
    chain.offer(waiting, run_of(2, 1))
    from delta_prop_wire.errors import Refused
    from delta_prop_wire.spec import ErrorCode

    refusals = chain.orderer.refuse(run_of(2, 2), Refused(ErrorCode.LOG_FULL, "full"))
    assert [entry.first for entry, _ in refusals] == [2]
    chain.offer(run_of(3, 1))
    assert chain.log[-1] is waiting
