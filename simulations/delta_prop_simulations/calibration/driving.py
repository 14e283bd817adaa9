"""Drives a set-up, in real or virtual time: sends deltas, and notes their lags."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from delta_prop.api.propagator import Propagator
    from delta_prop.calls.receipt import Receipt
    from delta_prop.platform.ports import Timer
    from delta_prop_simulations.calibration.distributions import Samples
    from delta_prop_simulations.calibration.models import Draws
    from delta_prop_simulations.rng import Random
    from delta_prop_wire.delta import Delta

STALLED_S = 60.0
"""A run fails if its sink makes no progress for this time."""


@dataclass
class Observation:
    """The sum of runs. `lags_s`: from append to application, per publish; `deltas`: how many were applied."""

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
        """Return the lag that this share of publishes does not exceed."""
        ordered = sorted(self.lags_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Stopwatch:
    """Stores the time at which each offset was assigned, and computes the lag once the offset is applied."""

    def __init__(self, timer: Timer) -> None:
        self.now = timer.now
        self._offset_times: deque[tuple[int, float]] = deque()
        self._observation: Observation | None = None
        self._applied = self._start_offset = 0
        self._started_at = 0.0
        self._progress: anyio.Event | None = None

    async def wait_until_applied(self, next_offset: int) -> None:
        """Wait until every offset below `next_offset` is applied. Raises TimeoutError."""
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
        self._start_offset, self._started_at = self._applied, self.now()

    def end(self) -> Observation:
        """End the observation and return it."""
        observation = self._observation
        assert observation is not None
        observation.seconds = self.now() - self._started_at
        observation.deltas = self._applied - self._start_offset
        self._observation = None
        return observation

    def note_offset(self, next_offset: int) -> None:
        """Note that every offset below `next_offset` is assigned."""
        if next_offset > self._applied:
            self._offset_times.append((next_offset, self.now()))

    def note_applied(self, next_offset: int) -> None:
        """Note that every offset below `next_offset` is applied."""
        now, unapplied, observation = self.now(), self._offset_times, self._observation
        self._applied = max(self._applied, next_offset)
        while unapplied and unapplied[0][0] <= next_offset:
            assigned_at = unapplied.popleft()[1]
            if observation is not None and assigned_at >= self._started_at:
                observation.lags_s.append(now - assigned_at)
        if self._progress is not None:
            self._progress.set()
            self._progress = None


class Source:
    """Publishes batches. `draws`: those of a model, in which each publish takes the time that it draws."""

    def __init__(
        self,
        propagator: Propagator,
        batches: Iterator[Sequence[Delta]],
        watch: Stopwatch,
        draws: Draws | None = None,
    ) -> None:
        self._propagator = propagator
        self._batches = batches
        self._watch = watch
        self._draws = draws

    def send(self) -> Receipt:
        """Send the next batch, and return its receipt."""
        batch = next(self._batches)
        if self._draws is not None:
            self._draws.compute_publish(len(batch))
        receipt = self._propagator.offer(*batch)
        receipt.add_done_callback(self._note)
        return receipt

    def _note(self, receipt: Receipt) -> None:
        self._watch.note_offset(receipt.result().next_offset)

    async def send_open_loop(self, gaps_s: Iterator[float], seconds: float) -> None:
        """Send each batch when it is due, regardless of outcomes. `gaps_s`: the times between batches."""
        now = self._watch.now
        due_at = now()
        until = due_at + seconds
        while (due_at := due_at + next(gaps_s)) < until:
            if (wait_s := due_at - now()) > 0:
                await anyio.sleep(wait_s)
            self.send()

    async def send_closed_loop(self, seconds: float, unapplied_max: int) -> None:
        """Send the next batch whenever at most `unapplied_max` deltas are not applied yet: a closed loop."""
        until = self._watch.now() + seconds
        while self._watch.now() < until:
            ack = await self.send().wait()
            await self._watch.wait_until_applied(ack.next_offset - unapplied_max)
            await anyio.lowlevel.checkpoint()


class Rig:
    """A set-up that is ready to run: the real one, or its model."""

    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self.source = source
        self.watch = watch


class RealRig(Rig):
    """A real set-up, which is also used for calibration."""

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """Run one slice of calibration: a few calls of each size."""
        raise NotImplementedError

    async def call(self, propagator: Propagator, deltas: Sequence[Delta]) -> float:
        """Publish deltas while the service is idle; return the seconds from append to application."""
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
