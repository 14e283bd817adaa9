"""How a set-up is driven, the same way measured and predicted: when deltas come, and how long each took.

It knows no clock but the one it is given, so the same lines run in real and in virtual time.
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
    from delta_prop_simulations.calibration.laws import Samples
    from delta_prop_simulations.chance import Random
    from delta_prop_wire.delta import Delta

STALLED_S = 60.0
"""A run whose sink does nothing for so long has failed."""


@dataclass
class Observed:
    """What runs have shown, added up. `lags_s`: of each publish, from its offset to its application."""

    lags_s: list[float] = field(default_factory=list)
    deltas: int = 0
    seconds: float = 0.0

    def add(self, other: Observed) -> None:
        """Count another run in."""
        self.lags_s += other.lags_s
        self.deltas += other.deltas
        self.seconds += other.seconds

    @property
    def rate(self) -> float:
        """Deltas applied a second."""
        return self.deltas / self.seconds if self.seconds else 0.0

    def lag_s(self, share: float) -> float:
        """The lag that this share of publishes stays below."""
        ordered = sorted(self.lags_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Stopwatch:
    """Knows when each offset was given, and so how long it took when it is applied."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._given: deque[tuple[int, float]] = deque()
        self._observed: Observed | None = None
        self._applied = self._from = 0
        self._begin_at = 0.0
        self._progress: anyio.Event | None = None

    async def until(self, next_offset: int) -> None:
        """Wait until everything below is applied. Raises TimeoutError."""
        with anyio.fail_after(STALLED_S):
            while self._applied < next_offset:
                self._progress = anyio.Event()
                await self._progress.wait()

    @property
    def reached(self) -> int:
        """Everything below this offset is applied."""
        return self._applied

    def begin(self) -> None:
        """From here on it counts: what came before was to warm up."""
        self._observed = Observed()
        self._from, self._begin_at = self._applied, self.now()

    def end(self) -> Observed:
        """What was seen since."""
        observed = self._observed
        assert observed is not None
        observed.seconds = self.now() - self._begin_at
        observed.deltas = self._applied - self._from
        self._observed = None
        return observed

    def given(self, next_offset: int) -> None:
        """Everything below has its offset now."""
        if next_offset > self._applied:
            self._given.append((next_offset, self.now()))

    def applied(self, next_offset: int) -> None:
        """Everything below is applied now."""
        now, given, observed = self.now(), self._given, self._observed
        self._applied = max(self._applied, next_offset)
        while given and given[0][0] <= next_offset:
            at = given.popleft()[1]
            if observed is not None and at >= self._begin_at:
                observed.lags_s.append(now - at)
        if self._progress is not None:
            self._progress.set()
            self._progress = None


class Source:
    """Publishes batches; `pay` is told how many deltas each has, before it goes."""

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
        """The next batch."""
        batch = next(self._batches)
        self._pay(len(batch))
        receipt = self._propagator.offer(*batch)
        receipt.when_done(self._note)
        return receipt

    def _note(self, receipt: Receipt) -> None:
        self._watch.given(receipt.result().next_offset)

    async def steadily(self, gaps_s: Iterator[float], seconds: float) -> None:
        """Send when it is due, whatever becomes of it: an open loop. `gaps_s`: between batches."""
        now = self._watch.now
        at = now()
        until = at + seconds
        while (at := at + next(gaps_s)) < until:
            if (left := at - now()) > 0:
                await anyio.sleep(left)
            self.send()

    async def as_fast_as_it_goes(self, seconds: float, ahead_max: int) -> None:
        """Send whenever no more deltas than that are not applied yet."""
        until = self._watch.now() + seconds
        while self._watch.now() < until:
            done = await self.send().wait()
            await self._watch.until(done.next_offset - ahead_max)
            await anyio.lowlevel.checkpoint()


class Rig:
    """A set-up that stands ready, the real one or its model."""

    def __init__(self, source: Source, watch: Stopwatch) -> None:
        self.source = source
        self.watch = watch


class RealRig(Rig):
    """A real one, which is also what calibration is made with."""

    async def calibrate(self, samples: Samples, random: Random) -> None:
        """One slice of calibration: a few calls of each size."""
        raise NotImplementedError

    async def call(self, propagator: Propagator, deltas: Sequence[Delta]) -> float:
        """Seconds from their offset to their application, with nothing else to do."""
        self.watch.begin()
        receipt = propagator.offer(*deltas)
        await receipt.wait()
        next_offset = receipt.result().next_offset
        self.watch.given(next_offset)
        await self.watch.until(next_offset)
        return self.watch.end().lags_s[0]


def poisson(random: Random, rate_per_s: float) -> Iterator[float]:
    """Seconds between arrivals that know nothing of each other."""
    while True:
        yield random.expovariate(rate_per_s)
