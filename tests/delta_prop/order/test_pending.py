"""The waiting room: what it counts, which bound it names, and that nothing stays behind."""

from __future__ import annotations

from delta_prop.order.pending import PendingEntries


def room(**options):
    defaults = {
        "deltas_max": 100,
        "bytes_max": 10_000,
        "timeout_s": 5.0,
        "owner_share": 1.0,
        "reserve_share": 0.0,
    }
    return PendingEntries(**defaults | options)


def test_counts_by_owner_and_forgets_owners(run_of):
    pending = room()
    one, two = run_of(1, 2, 4, owner="x"), run_of(1, 5, owner="x")
    pending.add(one, 0.0)
    pending.add(two, 1.0)
    assert (pending.deltas, pending.bytes, len(pending)) == (4, 400, 2)
    assert pending.owners["x"].deltas == 4
    assert one in pending
    pending.remove(one)
    pending.remove(two)
    assert (pending.deltas, pending.bytes, pending.owners) == (0, 0, {})
    assert one not in pending


def test_expired_in_order_of_arrival(run_of):
    pending = room()
    entries = [run_of(1, counter) for counter in range(2, 7)]
    for at, entry in enumerate(entries):
        pending.add(entry, float(at))
    pending.remove(entries[1])
    expired = []
    for entry in pending.iter_expired(7.0):
        pending.remove(entry)
        expired.append(entry)
    assert expired == [entries[0], entries[2]]
    assert pending.oldest() is entries[3]


def test_queue_of_deadlines_is_bounded_by_what_is_held(run_of):
    pending = room(deltas_max=1_000)
    pending.add(run_of(1, 2), 0.0)
    for counter in range(3, 2_000):
        entry = run_of(1, counter)
        pending.add(entry, 0.0)
        pending.remove(entry)
        assert pending.queue_length < 70


def test_names_the_bound_that_is_broken_and_opens_the_reserve(run_of):
    pending = room(deltas_max=10, reserve_share=0.2)
    pending.add(run_of(1, 2, 9), 0.0)
    one_more = run_of(2, 2)
    shortage = pending.shortage(one_more, is_wanted=False)
    assert (shortage.what, shortage.depth, shortage.capacity) == ("deltas pending", 8, 8)
    assert not pending.can_hold(one_more)
    assert pending.shortage(one_more, is_wanted=True) is None
    assert pending.shortage(run_of(2, 2, 4), is_wanted=True).capacity == 10


def test_an_empty_room_may_be_too_small(run_of):
    pending = room(owner_share=0.25)
    assert not pending.can_hold(run_of(1, 2, 27))
    assert pending.shortage(run_of(1, 2, 27), is_wanted=True).capacity == 25
