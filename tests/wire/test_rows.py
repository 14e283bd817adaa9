"""Reading a batch row by row traverses its rare columns once, however many rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from delta_prop_wire.delta import Delta, Dot, opaque
from delta_prop_wire.encode import encode_batch

ROWS = 300


class CountedEntries(tuple[Any, ...]):
    """Entries that count how often they are traversed."""

    traversals = 0

    def __iter__(self) -> Iterator[Any]:
        self.traversals += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self.traversals += 1
        return iter(self[::-1])


@pytest.mark.parametrize("column", ["parents", "row_topics", "expects"])
def test_rare_columns_are_traversed_once_for_all_rows(column: str) -> None:
    deltas = [
        Delta(
            f"v{row}",
            opaque(b"x"),
            parents=(Dot(1, row + 1), bytes([row % 256] * 16)) if row % 2 else (),
            topics=("a", f"t{row}") if row % 3 else (),
            expect=Dot(2, row + 1) if row % 5 else None,
        )
        for row in range(ROWS)
    ]
    batch = encode_batch(deltas, origin=16, base=1)
    entries = CountedEntries(getattr(batch, column))
    setattr(batch, column, entries)
    for row, delta in enumerate(deltas):
        decoded = batch.delta(row)
        assert (decoded.parents, decoded.topics, decoded.expect) == (
            delta.parents,
            delta.topics,
            delta.expect,
        )
    assert entries.traversals == 1
