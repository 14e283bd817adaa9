"""A sink of one's own: counts how often each namespace changed, and is exact after any failure.

python examples/own_sink.py
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio

from delta_prop import Delta, Propagator, create, offset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.sinks import Delivery, SinkContext


class CountingSink:
    """The whole contract: `open`, `apply`, `aclose`, a name and statistics."""

    name = "counting"

    def __init__(self) -> None:
        self.changes: Counter[str] = Counter()
        self.next_offset = 0

    async def open(self, context: SinkContext) -> None:
        """None: the service keeps the cursor. A sink with a cursor of its own returns a ResumePoint."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Called with one or more batches in log order, never twice at once; returning means applied."""
        for delivery in deliveries:
            rows = range(delivery.batch.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:
                at = delivery.first_offset + row
                if at >= self.next_offset and not delivery.batch.is_control:  # else: a repeat after a failure
                    self.changes[delivery.batch.namespaces[row]] += 1
                    self.next_offset = at + 1

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def statistics(self) -> dict[str, int]:
        return dict(self.changes)


async def main() -> None:
    async with Propagator() as p:
        sink = await p.attach(CountingSink(), topics=["ns:fruit", "op:offset"])
        await p.publish(Delta("apple", create([1.0]), namespace="fruit"))
        await p.publish(Delta("oak", create([1.0]), namespace="trees"))
        seen = await p.publish(Delta("apple", offset(1.0), namespace="fruit"))  # matches twice, comes once
        await p.publish(Delta("oak", offset(1.0), namespace="trees"))
        await p.wait_visible(seen)
    print(sink.statistics())


if __name__ == "__main__":
    anyio.run(main)
