"""A simulated sink of random capacity after the pacing gate, and a source that always has more deltas.

Ticks take 20 ms. A capacity is drawn every 100 ms; unused capacity is lost. A bursty sink takes up to 1,000
deltas per call, and releases them together when the call ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.delivery.backpressure.pacer import Credits, Measure, Pacer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop.delivery.backpressure.controller import Law

TICKS_PER_S = 50
TICKS_PER_LAW_STEP = TICKS_PER_S // 10
CALL_DELTAS_MAX = 1_000
BYTES = 100  # per delta

CAPACITIES = (10_000, 20_000, 5_000, 50_000)
"""Nominal capacities of a sink, in deltas per second, one after the other."""
HOLD_S = 10
"""Seconds for which each capacity holds."""
SETTLE_S = 5
"""Seconds after a change of the capacity that are not measured."""


class SmoothSink:
    """A sink that releases deltas one by one."""

    def __init__(self) -> None:
        self._work = 0.0

    def serve(self, depth: int, work: float) -> int:
        """Add work; return how many of the `depth` deltas it completes."""
        self._work += work
        completed = min(int(self._work), depth)
        self._work = self._work - completed if completed < depth else 0.0
        return completed


class BurstySink:
    """A sink that releases the deltas of a call together."""

    def __init__(self) -> None:
        self._work = 0.0
        self._in_call = 0

    def serve(self, depth: int, work: float) -> int:
        """Add work; return how many of the `depth` deltas it completes."""
        self._work += work
        completed = 0
        while True:
            if not self._in_call:
                self._in_call = min(depth - completed, CALL_DELTAS_MAX)
                if not self._in_call:
                    self._work = 0.0
                    return completed
            if self._work < self._in_call:
                return completed
            self._work -= self._in_call
            completed += self._in_call
            self._in_call = 0


@dataclass
class RunRecord:
    """Results of a run; per tick: the deltas admitted, and the deltas that the sink's capacity allowed."""

    admitted: list[int] = field(default_factory=list)
    capacities: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # one per step of the law
    depths: list[int] = field(default_factory=list)  # one per tick
    credit_exceeded: bool = False


def simulate(
    law: Law,
    *,
    capacity: Callable[[float], float],
    seconds: float,
    mailbox_deltas: int,
    bursty: bool = False,
    demand: Callable[[float], float] | None = None,
    batch_deltas: int = 100,
    waiting_max: float = float("inf"),
) -> RunRecord:
    """Run a source against the sink; without `demand` (deltas/s, by time) it always has more deltas."""
    pacer, credits_ = Pacer(), Credits(mailbox_deltas, mailbox_deltas * BYTES)
    pacer.pace("slow", law, credits_, 0.0)
    sink = BurstySink() if bursty else SmoothSink()
    record = RunRecord()
    depth, drained, waiting = 0, 0, 0.0
    for tick in range(1, round(seconds * TICKS_PER_S) + 1):
        now = tick / TICKS_PER_S
        waiting = float("inf") if demand is None else min(waiting + demand(now) / TICKS_PER_S, waiting_max)
        admitted = 0
        while waiting >= batch_deltas and pacer.admits(batch_deltas, batch_deltas * BYTES, now):
            pacer.note(batch_deltas, batch_deltas * BYTES, now)
            admitted += batch_deltas
            waiting -= batch_deltas
        depth += admitted
        depth_max = max(mailbox_deltas, batch_deltas)
        record.credit_exceeded |= depth > depth_max or depth != credits_.deltas_outstanding
        work = capacity(now) / TICKS_PER_S
        completed = sink.serve(depth, work)
        credits_.release(completed, completed * BYTES)
        depth, drained = depth - completed, drained + completed
        record.admitted.append(admitted)
        record.capacities.append(work)
        record.depths.append(depth)
        if tick % TICKS_PER_LAW_STEP == 0:
            pacer.step(now, {"slow": Measure(drained, depth, mailbox_deltas)})
            record.rates.append(law.rate)
            drained = 0
    return record


def noisy_steps(
    seed: int, nominal: Sequence[int] = CAPACITIES, hold_s: float = HOLD_S
) -> Callable[[float], float]:
    """Return a capacity that follows the nominal ones, with uniform noise of 20 % drawn every 100 ms."""
    rng = random.Random(seed)
    capacities = [
        capacity * (1 + rng.uniform(-0.2, 0.2)) for capacity in nominal for _ in range(round(hold_s * 10))
    ]

    def capacity_at(now: float) -> float:
        return capacities[min(int((now - 1e-6) * 10), len(capacities) - 1)]

    return capacity_at


def window_ratios(
    record: RunRecord, nominal: Sequence[int] = CAPACITIES, hold_s: float = HOLD_S
) -> Iterator[tuple[float, float]]:
    """Yield for each settled one-second window: admitted over nominal capacity, and over actual capacity."""
    ticks = round(hold_s * TICKS_PER_S)
    for index, nominal_capacity in enumerate(nominal):
        first = index * ticks + SETTLE_S * TICKS_PER_S
        for start in range(first, (index + 1) * ticks - TICKS_PER_S + 1, TICKS_PER_LAW_STEP):
            admitted = sum(record.admitted[start : start + TICKS_PER_S])
            capacity = sum(record.capacities[start : start + TICKS_PER_S])
            yield admitted / nominal_capacity, admitted / capacity
