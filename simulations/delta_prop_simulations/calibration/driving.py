"""Drives a set-up the same way measured and predicted: sends deltas, and notes their lags.

It uses only the clock that it is given, so the same code runs in real and in virtual time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delta_prop.embedded import Propagator
    from delta_prop.receipt import Receipt
    from delta_prop_simulations.calibration.distributions import Samples
    from delta_prop_simulations.rng import Random
    from delta_prop_wire.delta import Delta

STALLED_S = 60.0
"""The time without any progress of its sink after which a run has failed."""


@dataclass
class Observation:
    """The summed results of runs. `lags_s`: of each publish, from its offset to its application."""

    lags_s: list[float] = field(default_factory=list)
    deltas: int = 0
    seconds: float = 0.0

    def add(self, other: Observation) -> None:
        """Add the results of another run."""
        self.lags_s += other.lags_s
        self.deltas += other.deltas
        self.seconds += other.seconds

    @property
    def rate(self) -> float:
        """The number of deltas applied per second."""
        return self.deltas / self.seconds if self.seconds else 0.0

    def lag_s(self, share: float) -> float:
        """Return the lag that this share of publishes stays below."""
        ordered = sorted(self.lags_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Stopwatch:
    """Stores the time at which each offset was assigned, and computes the lag when it is applied."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._offset_times: deque[tuple[int, float]] = deque()
        self._observation: Observation | None = None
        self._applied = self._from = 0
        self._begin_at = 0.0
        self._progress: anyio.Event | None = None

    async def wait_until_applied(self, next_offset: int) -> None:
        """Wait until every offset below is applied. Raises TimeoutError."""
        with anyio.fail_after(STALLED_S):
            while self._applied < next_offset:
                self._progress = anyio.Event()
                await self._progress.wait()

    @property
    def applied_offset(self) -> int:
        """Every offset below this one is applied."""
        return self._applied

    def begin(self) -> None:
        """Start the observation; earlier calls were a warm-up."""
        self._observation = Observation()
        self._from, self._begin_at = self._applied, self.now()

    def end(self) -> Observation:
        """End the observation and return it."""
        observed = self._observation
        assert observed is not None
        observed.seconds = self.now() - self._begin_at
        observed.deltas = self._applied - self._from
        self._observation = None
        return observed

    def note_offset(self, next_offset: int) -> None:
        """Note that every offset below is assigned."""
        if next_offset > self._applied:
            self._offset_times.append((next_offset, self.now()))

    def note_applied(self, next_offset: int) -> None:
        """Note that every offset below is applied."""
        now, given, observed = self.now(), self._offset_times, self._observation
        self._applied = max(self._applied, next_offset)
        while given and given[0][0] <= next_offset:
            at = given.popleft()[1]
            if observed is not None and at >= self._begin_at:
                observed.lags_s.append(now - at)
        if self._progress is not None:
            self._progress.set()
            self._progress = None


class Source:
    """Publishes batches; `pay` is called with the number of deltas of each before it is sent."""

    def __init__(
        self,
        propagator: Propagator,
        batches: Iterator[Sequence[Delta]],
        watch: Stopwatch,
        pay: Callable[[int], None] = lambda deltas: None,
    ) -> None:
        self._propagator = propagator
        self._batches = batches
        self._watch = watch
        self._pay = pay

    def send(self) -> Receipt:
        """Send the next batch."""
        batch = next(self._batches)
        self._pay(len(batch))
        receipt = self._propagator.offer(*batch)
        receipt.add_done_callback(self._note)
        return receipt

    def _note(self, receipt: Receipt) -> None:
        self._watch.note_offset(receipt.result().next_offset)

    async def send_open_loop(self, gaps_s: Iterator[float], seconds: float) -> None:
        """Send each batch when it is due, regardless of outcomes: an open loop. `gaps_s`: between batches."""
        now = self._watch.now
        at = now()
        until = at + seconds
        while (at := at + next(gaps_s)) < until:
            if (left := at - now()) > 0:
                await anyio.sleep(left)
            self.send()

    async def send_closed_loop(self, seconds: float, unapplied_max: int) -> None:
        """Send whenever up to `unapplied_max` deltas are not applied yet."""
        until = self._watch.now() + seconds
        while self._watch.now() < until:
            done = await self.send().wait()
            await self._watch.wait_until_applied(done.next_offset - unapplied_max)
            await anyio.lowlevel.checkpoint()


class Rig:
    """A set-up that is ready to run, the real one or its model."""

    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self.source = source
        self.watch = watch


class RealRig(Rig):
    """A real set-up, which calibration uses, too."""

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice of calibration: a few calls of each size."""
        raise NotImplementedError

    async def call(self, propagator: Propagator, deltas: Sequence[Delta]) -> float:
        """Return the seconds from the deltas' offset to their application, without other work."""
        self.watch.begin()
        receipt = propagator.offer(*deltas)
        await receipt.wait()
        next_offset = receipt.result().next_offset
        self.watch.note_offset(next_offset)
        await self.watch.wait_until_applied(next_offset)
        return self.watch.end().lags_s[0]


def poisson(random: Random, rate_per_s: float) -> Iterator[float]:
    """Yield the seconds between independent arrivals."""
    while True:
        yield random.expovariate(rate_per_s)
