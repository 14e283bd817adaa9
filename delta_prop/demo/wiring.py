"""The demo's service: a propagator with a store, an index, a cache and a live listener.

What is published goes through here, so that each delta is also a line of the file it is checked against.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

import anyio

from delta_prop.config import Settings
from delta_prop.demo.library import DOCUMENTS_MAX, NAMESPACE
from delta_prop.demo.published import create_line, line_of, mark_of
from delta_prop.embedded import Propagator
from delta_prop_sinks.cache import CacheSink
from delta_prop_sinks.index import IndexSink
from delta_prop_sinks.resident import Resident
from delta_prop_sinks.storage import StorageSink
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence
    from typing import TextIO

    import numpy as np
    from anyio.abc import TaskGroup
    from numpy.typing import NDArray

    from delta_prop.demo.edge import Place
    from delta_prop.demo.published import Mark
    from delta_prop.published import Delivered
    from delta_prop.receipt import Published
    from delta_prop.route.subscription import Subscription
    from delta_prop_wire.delta import Delta

SINKS = ("storage", "index", "cache", "subscriber", "audit", "replica")
"""In the order they are shown; the last two are attached by the scenes that mistreat them."""
MAILBOX_DELTAS_MAX = 128
"""A sink that is behind by more reads the log; the usual bound is 10,000, too many to be seen here."""
DELTAS_MAX = 200_000
"""As many as the listener writes down; the demo ends before there are more."""
_MEASURED_MAX = 10_000
_SETTLED_S_MAX = 60


@dataclass(slots=True)
class Listener:
    """A live subscriber that notes each delta's place and mark, and the last one whole."""

    offsets: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    last: Delivered | None = None

    async def listen(self, subscription: Subscription) -> None:
        """Note what comes, until the subscription ends."""
        async for delivered in subscription:
            self.offsets.append(delivered.offset)
            self.marks.append(mark_of(delivered.delta))
            self.last = delivered


@dataclass(slots=True)
class Wiring:
    """The running service, and what was measured on it."""

    propagator: Propagator
    storage: StorageSink
    index: IndexSink
    cache: CacheSink
    listener: Listener
    now: Callable[[], float]
    audit_from: int = 0
    replica: StorageSink | None = None
    deltas: int = 0
    number_bytes: int = 0
    latencies: dict[str, list[float]] = field(default_factory=dict)
    scene_latencies: dict[str, list[float]] = field(default_factory=dict)
    _lines: TextIO = field(kw_only=True)
    _tasks: TaskGroup = field(kw_only=True)

    async def create(self, ids: Sequence[str], matrix: NDArray[np.float32]) -> Published:
        """Publish whole vectors, a row an id."""
        started = self.now()
        published = await self.propagator.publish_many(ids, matrix, namespace=NAMESPACE)
        self._measure(published, started)
        self._note(map(create_line, [NAMESPACE] * len(ids), ids, matrix), count=len(ids), size=matrix.nbytes)
        return published

    async def publish(self, deltas: Sequence[Delta]) -> Published:
        """Publish changes, in one call."""
        started = self.now()
        published = await self.propagator.publish(*deltas)
        self._measure(published, started)
        self._note(map(line_of, deltas), count=len(deltas), size=sum(map(number_bytes, deltas)))
        return published

    def sinks(self) -> list[str]:
        """Which sinks are attached."""
        attached = self.propagator.statistics().sinks
        return [name for name in SINKS if name in attached]

    async def settled(self) -> None:
        """Wait until every sink has everything, the stores on disk."""
        try:
            await self.propagator.wait_visible(self.deltas, sinks=self.sinks(), timeout_s=_SETTLED_S_MAX)
        except TimeoutError:
            sinks = self.propagator.statistics().sinks.values()
            late = [f"{one.name} lacks {one.lag:,} ({one.reason or one.state})" for one in sinks if one.lag]
            raise TimeoutError(f"after {_SETTLED_S_MAX} s {', '.join(late)}") from None
        await self.storage.flush()
        if self.replica is not None:
            await self.replica.flush()

    def lags(self) -> dict[str, int]:
        """How many deltas each sink is behind."""
        return {name: one.lag for name, one in self.propagator.statistics().sinks.items()}

    def measure_anew(self) -> dict[str, list[float]]:
        """Where seconds from publish to visible, sink by sink, go from now on as well."""
        self.scene_latencies = {}
        return self.scene_latencies

    def p50_ms(self, sink: str) -> float | None:
        """Half of the publishes were visible in the sink within so many milliseconds."""
        return quantile_ms(self.latencies.get(sink, ()), 0.5)

    def _note(self, lines: Iterable[str], *, count: int, size: int) -> None:
        self._lines.writelines(lines)
        self._lines.flush()
        self.deltas += count
        self.number_bytes += size

    def _measure(self, published: Published, started: float) -> None:
        for name in self.sinks():
            scene = self.scene_latencies.setdefault(name, [])
            self._tasks.start_soon(self._measure_one, published, started, name, scene)

    async def _measure_one(self, published: Published, started: float, name: str, scene: list[float]) -> None:
        try:
            await self.propagator.wait_visible(published, sinks=[name], timeout_s=60)
        except Refused:  # the sink has died: how long it took will never be known
            return
        took_s = self.now() - started
        for measured in (scene, self.latencies.setdefault(name, [])):
            if len(measured) < _MEASURED_MAX:
                measured.append(took_s)


@asynccontextmanager
async def wired(place: Place, now: Callable[[], float]) -> AsyncIterator[Wiring]:
    """The service, from its start to its end."""
    resident = Resident()
    with place.append_lines() as lines:
        settings = Settings(mailbox_deltas_max=MAILBOX_DELTAS_MAX)
        async with Propagator(settings) as propagator, anyio.create_task_group() as tasks:
            storage = await propagator.attach(StorageSink(place.store, resident=resident))
            index = await propagator.attach(IndexSink(resident=resident))
            cache = await propagator.attach(CacheSink(entries_max=2 * DOCUMENTS_MAX))
            listener = Listener()
            async with propagator.subscribe("*", name="subscriber") as subscription:
                tasks.start_soon(listener.listen, subscription)
                yield Wiring(propagator, storage, index, cache, listener, now, _lines=lines, _tasks=tasks)
                tasks.cancel_scope.cancel()


def quantile_ms(measured: Sequence[float], part: float) -> float | None:
    """That part of what was measured, in s, took no more than so many ms; None where nothing was."""
    ranked = sorted(measured)
    return ranked[ceil(part * len(ranked)) - 1] * 1000 if ranked else None


def number_bytes(delta: Delta) -> int:
    """The bytes of a delta's indices and values."""
    operation = delta.operation
    return sum(0 if part is None else part.nbytes for part in (operation.values, operation.indices))
