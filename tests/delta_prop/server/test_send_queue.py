"""The fast path of `SendQueue` for a single complete batch equals its general path."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from delta_prop.server.send_queue import SendQueue
from delta_prop_wire.batch import LoggedBatch
from delta_prop_wire.credit_window import CreditWindow
from delta_prop_wire.delta import Source
from delta_prop_wire.frames import Credit
from tests.delta_prop.server.session_fakes import rows_batch


@given(
    st.lists(st.integers(1, 5), max_size=2),
    st.none() | st.builds(Credit, st.integers(-3, 9), st.integers(-3, 2_000)),
)
def test_single_batch_fast_path_equals_the_general_path(counts: list[int], credit: Credit | None) -> None:
    fast, general = SendQueue(1_000), SendQueue(1_000)
    windows = CreditWindow(credit), CreditWindow(credit)
    offset = 7
    for row_count in counts:
        logged = LoggedBatch(rows_batch(row_count, offset), offset, 3, Source.LOCAL)
        offset = logged.next_offset
        fast.put(logged, None)
        general.put(logged, None)
    chunk = fast.take_single(windows[0])
    if chunk is None:
        assert len(counts) != 1 or not windows[0].is_open
        assert len(fast.waiting) == len(counts)
    else:
        assert chunk == general.take(windows[1], 1_000_000, as_deltas=False)
    remaining = [(queue.delta_count, queue.bytes, len(queue.waiting)) for queue in (fast, general)]
    assert remaining[0] == remaining[1]
    assert windows[0].remaining == windows[1].remaining
