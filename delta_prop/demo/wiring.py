"""The demo's service: a propagator with a store, an index, a cache and a live listener.

All deltas are published through this module, so each is also a line of the file that sinks are verified
against.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, TextIO

import anyio
import numpy as np
from anyio.abc import TaskGroup
from numpy.typing import NDArray

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.outcomes import Delivered
from delta_prop.calls.receipt import PublishAck
from delta_prop.delivery.subscription import Subscription
from delta_prop.demo.library import DOCUMENTS_MAX, NAMESPACE
from delta_prop.demo.reference_fold import Fingerprint, create_line, fingerprint_of, line_of
from delta_prop.platform.ports import Timer
from delta_prop_sinks.cache import CacheSink
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.resident import ResidentVectors
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.delta import Delta
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop.demo.system import Workspace

SINKS = ("storage", "index", "cache", "subscriber", "audit", "replica")
"""Sinks in display order; the fault scenes attach the last two."""
MAILBOX_DELTAS_MAX = 128
"""A sink that lags by more deltas reads the log. The default, 10,000, is too high to show that here."""
DELTAS_MAX = 200_000
"""Maximum number of deltas that the listener records; the demo ends before there are more."""
_MEASURED_MAX = 10_000
_SETTLE_TIMEOUT_S = 60


@dataclass(slots=True)
class Listener:
    """A live subscriber that records each delta's offset and fingerprint, and the last delta."""

    offsets: list[int] = field(default_factory=list)
    fingerprints: list[Fingerprint] = field(default_factory=list)
    last: Delivered | None = None

    async def listen(self, subscription: Subscription) -> None:
        """Record deltas until the subscription ends."""
        async for delivered in subscription:
            self.offsets.append(delivered.offset)
            self.fingerprints.append(fingerprint_of(delivered.delta))
            self.last = delivered


@dataclass(slots=True)
class PublishedLines:
    """A file with each published delta as a line; their number, and the bytes of their numbers."""

    file: TextIO
    delta_count: int = 0
    number_bytes: int = 0

    def add(self, lines: Iterable[str], *, count: int, size: int) -> None:
        """Write the lines of `count` deltas, with `size` bytes of numbers."""
        self.file.writelines(lines)
        self.file.flush()
        self.delta_count += count
        self.number_bytes += size


@dataclass(slots=True)
class Latencies:
    """Times from publish to visible, by sink, in seconds: of the whole run, and of the present scene."""

    of_run: dict[str, list[float]] = field(default_factory=dict)
    of_scene: dict[str, list[float]] = field(default_factory=dict)

    def begin_scene(self) -> dict[str, list[float]]:
        """Begin a new record of latencies; return it."""
        self.of_scene = {}
        return self.of_scene

    def note(self, sink: str, seconds: float, of_scene: list[float]) -> None:
        """Note a latency; `of_scene`: the sink's record of the scene in which the delta was published."""
        for latencies in (of_scene, self.of_run.setdefault(sink, [])):
            if len(latencies) < _MEASURED_MAX:
                latencies.append(seconds)

    def p50_ms(self, sink: str) -> float | None:
        """Return the median latency of the sink in the whole run, in milliseconds."""
        return quantile_ms(self.of_run.get(sink, ()), 0.5)


@dataclass(slots=True)
class Wiring:
    """The running service, and its measurements.

    `audit_start_offset`: where the audit sink starts.
    """

    propagator: Propagator
    storage: StorageSink
    index: IndexSink
    cache: CacheSink
    listener: Listener
    timer: Timer
    audit_start_offset: int = 0
    replica: StorageSink | None = None
    latencies: Latencies = field(default_factory=Latencies)
    _published: PublishedLines = field(kw_only=True)
    _tasks: TaskGroup = field(kw_only=True)

    @property
    def delta_count(self) -> int:
        """The number of deltas published so far."""
        return self._published.delta_count

    @property
    def number_bytes(self) -> int:
        """Bytes of the numbers of all deltas published so far."""
        return self._published.number_bytes

    async def create(self, ids: Sequence[str], matrix: NDArray[np.float32]) -> PublishAck:
        """Publish full vectors, one row for each id."""
        started = self.timer.now()
        ack = await self.propagator.publish_many(ids, matrix, namespace=NAMESPACE)
        self._measure(ack, started)
        self._published.add(
            map(create_line, [NAMESPACE] * len(ids), ids, matrix), count=len(ids), size=matrix.nbytes
        )
        return ack

    async def publish(self, deltas: Sequence[Delta]) -> PublishAck:
        """Publish changes, in one call."""
        started = self.timer.now()
        ack = await self.propagator.publish(*deltas)
        self._measure(ack, started)
        self._published.add(map(line_of, deltas), count=len(deltas), size=sum(map(number_bytes, deltas)))
        return ack

    def sinks(self) -> list[str]:
        """Return the names of the attached sinks."""
        attached = self.propagator.statistics().sinks
        return [name for name in SINKS if name in attached]

    async def wait_settled(self) -> None:
        """Wait until every sink has applied all deltas, and the stores have written them to disk."""
        try:
            await self.propagator.wait_visible(
                self.delta_count, sinks=self.sinks(), timeout_s=_SETTLE_TIMEOUT_S
            )
        except TimeoutError:
            feeds = self.propagator.statistics().sinks.values()
            lagging = [
                f"{feed.name} lacks {feed.lag:,} ({feed.reason or feed.state})" for feed in feeds if feed.lag
            ]
            raise TimeoutError(f"after {_SETTLE_TIMEOUT_S} s {', '.join(lagging)}") from None
        await self.storage.flush()
        if self.replica is not None:
            await self.replica.flush()

    def lags(self) -> dict[str, int]:
        """Return the lag of each sink."""
        return {name: feed.lag for name, feed in self.propagator.statistics().sinks.items()}

    def _measure(self, ack: PublishAck, started: float) -> None:
        for name in self.sinks():
            scene_latencies = self.latencies.of_scene.setdefault(name, [])
            self._tasks.start_soon(self._measure_one, ack, started, name, scene_latencies)

    async def _measure_one(
        self, ack: PublishAck, started: float, name: str, scene_latencies: list[float]
    ) -> None:
        try:
            await self.propagator.wait_visible(ack, sinks=[name], timeout_s=60)
        except Refused:  # the sink was killed, so its latency remains unknown
            return
        self.latencies.note(name, self.timer.now() - started, scene_latencies)


@asynccontextmanager
async def open_wiring(workspace: Workspace, timer: Timer) -> AsyncIterator[Wiring]:
    """Run the service, with its sinks attached, for the duration of the scope."""
    resident = ResidentVectors()
    with workspace.open_published() as lines:
        settings = Settings(mailbox_deltas_max=MAILBOX_DELTAS_MAX)
        async with Propagator(settings) as propagator, anyio.create_task_group() as tasks:
            storage = await propagator.attach(StorageSink(workspace.store, resident=resident))
            index = await propagator.attach(IndexSink(resident=resident))
            cache = await propagator.attach(CacheSink(entries_max=2 * DOCUMENTS_MAX))
            listener = Listener()
            async with propagator.subscribe("*", name="subscriber") as subscription:
                tasks.start_soon(listener.listen, subscription)
                yield Wiring(
                    propagator,
                    storage,
                    index,
                    cache,
                    listener,
                    timer,
                    _published=PublishedLines(lines),
                    _tasks=tasks,
                )
                tasks.cancel_scope.cancel()


def quantile_ms(latencies_s: Sequence[float], share: float) -> float | None:
    """Return a quantile of latencies in milliseconds; None if there are none."""
    ranked = sorted(latencies_s)
    return ranked[ceil(share * len(ranked)) - 1] * 1000 if ranked else None


def number_bytes(delta: Delta) -> int:
    """Return the bytes of a delta's indices and values."""
    operation = delta.operation
    return sum(0 if part is None else part.nbytes for part in (operation.values, operation.indices))
