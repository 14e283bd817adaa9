"""Pending entries: their counts, the bound that a shortage names, and nothing left after removal."""

from __future__ import annotations

from delta_prop.partition.order.pending import PendingEntries


def new_pending(**options):
    defaults = {
        "deltas_max": 100,
        "bytes_max": 10_000,
        "timeout_s": 5.0,
        "owner_share": 1.0,
        "reserve_share": 0.0,
    }
    return PendingEntries(**defaults | options)


def test_pending_counts_deltas_by_owner_and_removes_empty_owners(new_entry):
    pending = new_pending()
    first, second = new_entry(1, 2, 4, owner="x"), new_entry(1, 5, owner="x")
    pending.add(first, 0.0)
    pending.add(second, 1.0)
    assert (pending.delta_count, pending.bytes, len(pending)) == (4, 400, 2)
    assert pending.owners["x"].delta_count == 4
    assert first in pending
    pending.remove(first)
    pending.remove(second)
    assert (pending.delta_count, pending.bytes, pending.owners) == (0, 0, {})
    assert first not in pending


def test_expired_entries_come_in_order_of_arrival(new_entry):
    pending = new_pending()
    entries = [new_entry(1, counter) for counter in range(2, 7)]
    for now, entry in enumerate(entries):
        pending.add(entry, float(now))
    pending.remove(entries[1])
    expired = []
    for entry in pending.iter_expired(7.0):
        pending.remove(entry)
        expired.append(entry)
    assert expired == [entries[0], entries[2]]
    assert pending.oldest() is entries[3]


def test_deadline_queue_length_is_bounded_by_pending_entries(new_entry):
    pending = new_pending(deltas_max=1_000)
    pending.add(new_entry(1, 2), 0.0)
    for counter in range(3, 2_000):
        entry = new_entry(1, counter)
        pending.add(entry, 0.0)
        pending.remove(entry)
        assert pending.queue_length < 70


def test_awaited_entry_may_use_the_reserve_and_another_gets_a_shortage(new_entry):
    pending = new_pending(deltas_max=10, reserve_share=0.2)
    pending.add(new_entry(1, 2, 9), 0.0)
    one_more = new_entry(2, 2)
    shortage = pending.find_shortage(one_more, is_awaited=False)
    assert (shortage.unit, shortage.depth, shortage.capacity) == ("pending deltas", 8, 8)
    assert not pending.can_hold(one_more)
    assert pending.find_shortage(one_more, is_awaited=True) is None
    assert pending.find_shortage(new_entry(2, 2, 4), is_awaited=True).capacity == 10


def test_entry_larger_than_owner_share_never_fits(new_entry):
    pending = new_pending(owner_share=0.25)
    assert not pending.can_hold(new_entry(1, 2, 27))
    assert pending.find_shortage(new_entry(1, 2, 27), is_awaited=True).capacity == 25
