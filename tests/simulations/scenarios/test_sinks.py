"""Counts of a simulated sink, and the rows that it rejects."""

from __future__ import annotations

from random import Random

import numpy as np

from delta_prop_simulations.scenarios.sinks import LAG_S_MAX, SinkCounts, _Rejections
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.delta import Delta, create
from tests.sinks.support import FakeLog


def test_only_rows_within_the_bound_count_as_quick() -> None:
    counts = SinkCounts()
    counts.note_applied(3, LAG_S_MAX)
    counts.note_applied(2, LAG_S_MAX + 0.1)
    assert (counts.applied, counts.within_1s, counts.lag.count) == (5, 3, 5)
    counts.note_redelivery(is_duplicate=True)
    counts.note_redelivery(is_duplicate=False)
    counts.note_redelivery(is_duplicate=False)
    assert (counts.duplicates, counts.out_of_order) == (1, 2)


def test_rejected_rows_have_the_offsets_of_delivered_rows() -> None:
    log = FakeLog()
    log.append(*(Delta(f"v{number}", create([1.0])) for number in range(10)))
    (full,) = log.deliveries()
    part = Delivery(full.logged, np.array([2, 5], np.intp))
    assert _Rejections(Random(1)).first_rejected([full], 0.0) is None
    assert _Rejections(Random(1)).first_rejected([part], 1.0) == 2
    rejections, offsets = _Rejections(Random(1)), []
    for _ in range(2_000):
        if (offset := rejections.first_rejected([full], 0.05)) is not None:
            offsets.append(offset)
    assert 600 < len(offsets) < 1_000
    assert set(offsets) == set(range(10))
