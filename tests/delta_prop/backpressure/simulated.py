"""A sink in simulated time behind the gate: what it can do is drawn, the source always has more.

Ticks of 20 ms. A capacity is drawn anew every 100 ms; one that is not used is lost. A lumpy sink takes
up to 1,000 deltas a call, and lets them go together when their time is over.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.backpressure.credit import Credits
from delta_prop.backpressure.pacer import Measure, Pacer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop.backpressure.controller import Law

TICKS_A_SECOND = 50
TICKS_A_STEP = TICKS_A_SECOND // 10
CALL_DELTAS_MAX = 1_000
BYTES = 100  # a delta

STEPS = (10_000, 20_000, 5_000, 50_000)
HOLD_S = 10
SETTLE_S = 5


class SmoothSink:
    """Lets go as it works."""

    def __init__(self) -> None:
        self._work = 0.0

    def serve(self, depth: int, work: float) -> int:
        """Return how many of `depth` deltas are done by `work` more."""
        self._work += work
        done = min(int(self._work), depth)
        self._work = self._work - done if done < depth else 0.0
        return done


class LumpySink:
    """Lets a whole call go when it is done."""

    def __init__(self) -> None:
        self._work = 0.0
        self._in_hand = 0

    def serve(self, depth: int, work: float) -> int:
        """Return how many of `depth` deltas are done by `work` more."""
        self._work += work
        done = 0
        while True:
            if not self._in_hand:
                self._in_hand = min(depth - done, CALL_DELTAS_MAX)
                if not self._in_hand:
                    self._work = 0.0
                    return done
            if self._work < self._in_hand:
                return done
            self._work -= self._in_hand
            done += self._in_hand
            self._in_hand = 0


@dataclass
class Run:
    """Record of a run; by tick: deltas `admitted`, and `possible` with the sink's capacity."""

    admitted: list[int] = field(default_factory=list)
    possible: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # by step of the law
    depths: list[int] = field(default_factory=list)  # by tick
    credit_exceeded: bool = False


def run(
    law: Law,
    *,
    capacity: Callable[[float], float],
    seconds: float,
    mailbox: int,
    lumpy: bool = False,
    demand: Callable[[float], float] | None = None,
    batch: int = 100,
    waiting_max: float = float("inf"),
) -> Run:
    """Run a source against the sink; without `demand` (deltas/s at a time) it always has more."""
    pacer, credits_ = Pacer(), Credits(mailbox, mailbox * BYTES)
    pacer.pace("slow", law, credits_, 0.0)
    sink = LumpySink() if lumpy else SmoothSink()
    told = Run()
    depth, drained, waiting = 0, 0, 0.0
    for tick in range(1, round(seconds * TICKS_A_SECOND) + 1):
        now = tick / TICKS_A_SECOND
        waiting = float("inf") if demand is None else min(waiting + demand(now) / TICKS_A_SECOND, waiting_max)
        admitted = 0
        while waiting >= batch and pacer.admits(batch, batch * BYTES, now):
            pacer.note(batch, batch * BYTES, now)
            admitted += batch
            waiting -= batch
        depth += admitted
        told.credit_exceeded |= depth > max(mailbox, batch) or depth != credits_.deltas_out
        work = capacity(now) / TICKS_A_SECOND
        done = sink.serve(depth, work)
        credits_.release(done, done * BYTES)
        depth, drained = depth - done, drained + done
        told.admitted.append(admitted)
        told.possible.append(work)
        told.depths.append(depth)
        if tick % TICKS_A_STEP == 0:
            pacer.step(now, {"slow": Measure(drained, depth, mailbox)})
            told.rates.append(law.rate)
            drained = 0
    return told


def noisy_steps(seed: int, steps: Sequence[int] = STEPS, hold_s: float = HOLD_S) -> Callable[[float], float]:
    """A capacity that holds each step, within 20 % of it, drawn evenly every 100 ms."""
    draws = random.Random(seed)
    drawn = [step * (1 + draws.uniform(-0.2, 0.2)) for step in steps for _ in range(round(hold_s * 10))]

    def capacity(now: float) -> float:
        return drawn[min(int((now - 1e-6) * 10), len(drawn) - 1)]

    return capacity


def windows(told: Run, steps: Sequence[int] = STEPS, hold_s: float = HOLD_S) -> Iterator[tuple[float, float]]:
    """Of each window of a second, every 100 ms, settled: admitted over capacity, and over what was drawn."""
    ticks = round(hold_s * TICKS_A_SECOND)
    for index, step in enumerate(steps):
        first = index * ticks + SETTLE_S * TICKS_A_SECOND
        for start in range(first, (index + 1) * ticks - TICKS_A_SECOND + 1, TICKS_A_STEP):
            admitted = sum(told.admitted[start : start + TICKS_A_SECOND])
            possible = sum(told.possible[start : start + TICKS_A_SECOND])
            yield admitted / step, admitted / possible
