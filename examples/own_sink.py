"""A sink of one's own: counts how often each namespace changed, and is exact after any failure.

`check_sink` plays to it what a sink may meet: repeats, cancelled calls, restarts, crashes, late rows.

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
    """A snapshot: it stays as it is while the sink goes on."""

    changes: Mapping[str, int]


class CountingSink:
    """The whole contract: `open`, `apply`, `aclose`, a name and statistics."""

    name = "counting"

    def __init__(self) -> None:
        self.changes: Counter[str] = Counter()
        self.last: dict[tuple[str, str], int] = {}  # each vector's last offset tells a repeat

    async def open(self, context: SinkContext) -> None:
        """None: the service keeps the cursor. A sink with a cursor of its own returns a ResumePoint."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Called with one or more batches in log order, never twice at once; returning means applied."""
        for delivery in deliveries:
            batch = delivery.batch
            rows = range(batch.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:  # these match the sink's topics; a batch may have others
                vector = (batch.namespaces[row], batch.keys[row])
                at = delivery.first_offset + row
                if at > self.last.get(vector, -1):  # else: a repeat after a failure
                    self.changes[vector[0]] += 1
                    self.last[vector] = at

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def statistics(self) -> Counts:
        return Counts(dict(self.changes))


async def seen(sink: CountingSink) -> object:
    """What readers of the sink see."""
    return sink.statistics().changes


def expected(rows: Sequence[Applied]) -> object:
    """What they must see after these rows, each once."""
    return Counter(row.delta.namespace for row in rows)


async def main() -> None:
    await check_sink(CountingSink, seen, expected=expected)
    print("the sink keeps the contract")

    async with Propagator() as p:
        sink = await p.attach(CountingSink(), topics=["ns:fruit", "op:offset"])
        await p.publish(Delta("apple", create([1.0]), namespace="fruit"))
        await p.publish(Delta("oak", create([1.0]), namespace="trees"))
        last = await p.publish(Delta("apple", offset(1.0), namespace="fruit"))  # matches twice, comes once
        await p.publish(Delta("oak", offset(1.0), namespace="trees"))
        await p.wait_visible(last)
    print(sink.statistics().changes)


if __name__ == "__main__":
    anyio.run(main)
