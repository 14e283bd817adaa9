"""The table of a log's segments: which one holds an offset, and which come behind it."""

from __future__ import annotations

from delta_prop_broker.log.segment import Segment, Segments
from delta_prop_simulations.disk import SimDisk

BASES = (5, 9, 14, 40)


def table() -> Segments:
    segments = Segments(SimDisk(), "d")
    for base in BASES:
        segments.add(Segment("d", base))
    return segments


def test_an_offset_is_held_by_the_last_segment_that_begins_at_or_before_it() -> None:
    segments = table()
    held = {offset: segments.holding(offset).base for offset in (0, 5, 8, 9, 13, 14, 39, 40, 1 << 60)}
    assert held == {0: 5, 5: 5, 8: 5, 9: 9, 13: 9, 14: 14, 39: 14, 40: 40, 1 << 60: 40}
    assert [segment.base for segment in segments.since(13)] == [9, 14, 40]
    assert [segment.base for segment in segments.since(0)] == list(BASES)


def test_the_table_is_seen_as_a_sequence_that_follows_what_is_dropped_and_added() -> None:
    segments = table()
    seen = segments.all
    assert segments.last is seen[-1]
    assert [segments.drop_first().base for _ in range(3)] == [5, 9, 14]
    assert [segment.base for segment in seen] == [40]
    assert segments.holding(7).base == 40
    assert segments.drop_first().base == 40
    assert (segments.last, len(seen)) == (None, 0)
    segments.add(Segment("d", 41))
    assert segments.last is seen[0]
