"""A custom sink: counts the changes of each namespace, and is exact after any failure.

`check_sink` tests it with duplicates, cancelled calls, restarts, crashes and more.

python examples/own_sink.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, Propagator, create, offset
from delta_prop.sinks import check_sink

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from delta_prop.sinks import Applied, Delivery, SinkContext


@dataclass(frozen=True)
class Counts:
    """A frozen snapshot of the sink's numbers: how many changes each namespace had."""

    changes: Mapping[str, int]


class CountingSink:
    """The full contract: `open`, `apply`, `aclose`, a name and statistics."""

    name = "counting"

    def __init__(self) -> None:
        self.changes: Counter[str] = Counter()
        self.last_offsets: dict[tuple[str, str], int] = {}  # a vector's last offset detects duplicates

    async def open(self, context: SinkContext) -> None:
        """Return None, so the service stores the cursor. A sink with its own cursor returns a ResumePoint."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Apply one or more batches in log order; when this returns, they are applied. Calls never
        overlap.
        """
        for delivery in deliveries:
            batch = delivery.batch
            rows = range(batch.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:  # those that match the sink's topics; the batch may have others
                vector = (batch.namespaces[row], batch.keys[row])
                row_offset = delivery.first_offset + row
                if row_offset > self.last_offsets.get(vector, -1):  # else a duplicate after a failure
                    self.changes[vector[0]] += 1
                    self.last_offsets[vector] = row_offset

    async def aclose(self) -> None:
        """Do nothing: the sink has no resources."""

    def statistics(self) -> Counts:
        return Counts(dict(self.changes))


async def read_changes(sink: CountingSink) -> object:
    """Return the view of the sink's readers."""
    return sink.statistics().changes


def count_changes(rows: Sequence[Applied]) -> object:
    """Return the view that readers must have after `rows`, each applied once."""
    return Counter(row.delta.namespace for row in rows)


async def main() -> None:
    await check_sink(CountingSink, read_changes, expected=count_changes)
    print("the sink follows the contract")

    async with Propagator() as p:
        sink = await p.attach(CountingSink(), topics=["ns:fruit", "op:offset"])
        await p.publish(Delta("apple", create([1.0]), namespace="fruit"))
        await p.publish(Delta("oak", create([1.0]), namespace="trees"))
        last = await p.publish(Delta("apple", offset(1.0), namespace="fruit"))  # matches two topics
        await p.publish(Delta("oak", offset(1.0), namespace="trees"))
        await p.wait_visible(last)
    print(sink.statistics().changes)


if __name__ == "__main__":
    anyio.run(main)
