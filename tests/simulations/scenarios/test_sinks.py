"""Counts of a simulated sink, and the rows that it rejects."""

from __future__ import annotations

from random import Random

import numpy as np

from delta_prop_simulations.scenarios.measures import LAG_S_MAX, Histogram, OffsetTimes
from delta_prop_simulations.scenarios.scenario import SinkSpec
from delta_prop_simulations.scenarios.sinks import ConfiguredDistribution, SimulatedSink, _Rejections
from delta_prop_sinks.sink import Delivery
from delta_prop_wire.delta import Delta, create
from tests.sinks.support import FakeLog


def test_only_rows_within_the_bound_count_as_quick() -> None:
    lag = Histogram()
    lag.add(LAG_S_MAX, 3)
    lag.add(LAG_S_MAX + 0.1, 2)
    assert (lag.count, lag.within_1s) == (5, 3)


def test_redelivery_counts_as_duplicate_or_out_of_order() -> None:
    log = FakeLog()
    log.append(*(Delta(f"v{number}", create([1.0])) for number in range(10)))
    (delivery,) = log.deliveries()
    spec = SinkSpec("sink")
    sink = SimulatedSink(spec, ConfiguredDistribution(spec), Random(1), OffsetTimes())
    for next_offset in (0, 10, 5, 7):
        sink.next_offset = next_offset
        sink._note_applied(delivery, 10, 0.0)
    assert (sink.counts.duplicates, sink.counts.out_of_order) == (1, 2)


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
