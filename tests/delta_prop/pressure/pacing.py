"""Shared code of the pacing tests: a sink with a random capacity, and publishers with unlimited demand."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import anyio
import numpy as np

from delta_prop_wire.delta import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop import Propagator
    from delta_prop_sinks.sink import Delivery, SinkContext

INTERVAL_S = 0.1
IDS = [f"v{row}" for row in range(1_000)]
MATRIX = np.ones((1_000, 1), np.float32)


def noisy_steps(seed: int, steps: Sequence[int], hold_s: float) -> list[float]:
    """Draw a sink's capacity for each 100 ms, in deltas per second.

    It stays within 20 % of one of `steps` for `hold_s`, then of the next.
    """
    rng = random.Random(f"capacity {seed}")
    return [step * (1 + rng.uniform(-0.2, 0.2)) for step in steps for _ in range(round(hold_s / INTERVAL_S))]


@dataclass(slots=True)
class WorkingSink:
    """A sink that works at its capacity, which changes every 100 ms."""

    name: str
    capacity: Sequence[float]
    """Deltas per second, for each 100 ms; the last value stays."""
    rows: int = 0
    in_flight_max: int = 0
    pushed_lag_max: int = 0
    done_at: list[tuple[float, int]] = field(default_factory=list)
    """The time after each call, and the rows applied until then."""
    _p: Propagator | None = None

    def observe(self, p: Propagator) -> None:
        """Record at each call how many deltas of this propagator are admitted and not applied yet."""
        self._p = p

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service keeps the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Work through the rows."""
        rows = sum(delivery.count for delivery in deliveries)
        self.sample()
        await anyio.sleep_until(self.finish_time(anyio.current_time(), rows))
        self.sample()
        self.rows += rows
        self.done_at.append((anyio.current_time(), self.rows))

    def finish_time(self, now: float, rows: float) -> float:
        """Return the time at which the rows are done if work on them starts at `now`."""
        index, last = int(now / INTERVAL_S + 1e-9), len(self.capacity) - 1
        while True:
            rate = self.capacity[min(index, last)]
            end = (index + 1) * INTERVAL_S
            if index >= last or rows <= rate * (end - now):
                return now + rows / rate
            rows -= rate * max(end - now, 0.0)
            now, index = end, index + 1

    def sample(self) -> None:
        """Record how many deltas are admitted and not applied yet."""
        if self._p is not None:
            feed = self._p.internals().sinks.feed(self.name)
            self.in_flight_max = max(self.in_flight_max, feed.in_flight[0])
            if not feed.is_catching_up:
                self.pushed_lag_max = max(
                    self.pushed_lag_max, self._p.internals().partition.log.high_watermark - feed.applied
                )

    async def aclose(self) -> None:
        """Do nothing: there is nothing to close."""

    def statistics(self) -> int:
        """Return the number of rows applied."""
        return self.rows


@dataclass(slots=True)
class AdmittedRates:
    """Numbers of acknowledged deltas, for each 100 ms of virtual time."""

    bins: list[int] = field(default_factory=list)

    def note(self, count: int) -> None:
        """Count deltas that are acknowledged now."""
        index = int(anyio.current_time() / INTERVAL_S + 1e-9)
        if index >= len(self.bins):
            self.bins += [0] * (index + 1 - len(self.bins))
        self.bins[index] += count

    def rates(self, from_s: float, to_s: float) -> Iterator[float]:
        """Yield the deltas per second over each window of one second, every 100 ms."""
        first, last = round(from_s / INTERVAL_S), round(to_s / INTERVAL_S)
        bins = self.bins + [0] * max(last - len(self.bins), 0)
        for start in range(first, last - 9):
            yield float(sum(bins[start : start + 10]))


async def publish_until(
    p: Propagator,
    admitted: AdmittedRates,
    *,
    until_s: float,
    batch: int = 100,
    publishers: int = 5,
    rate_max: float = inf,
) -> None:
    """Publish until `until_s`, by several callers with one batch at a time each, up to `rate_max`."""
    ids, matrix = IDS[:batch], MATRIX[:batch]

    async def publish() -> None:
        while anyio.current_time() < until_s:
            await p.publish_many(ids, matrix, kind=Kind.DENSE)
            admitted.note(batch)
            if rate_max < inf:
                await anyio.sleep(publishers * batch / rate_max)

    with anyio.move_on_after(until_s - anyio.current_time()):
        async with anyio.create_task_group() as callers:
            for _ in range(publishers):
                callers.start_soon(publish)
