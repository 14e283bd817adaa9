"""A service on a simulated disk, and a sink that rejects chosen values and whose data survive every crash."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from delta_prop import LogSettings, Propagator, Settings
from delta_prop.testing import virtual_world
from delta_prop_sinks.sink import RejectDelta, ResumePoint
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Delta, create, sparse_add

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delta_prop_simulations.disk import SimDisk
    from delta_prop_sinks.sink import Delivery, SinkContext


@dataclass
class Store:
    """The storage of a sink, which survives every crash: sums by vector, and the cursor if `keeps_cursor`."""

    keeps_cursor: bool
    sums: dict[str, float] = field(default_factory=dict)
    last_offsets: dict[str, int] = field(default_factory=dict)  # offset of the last_offsets delta by vector
    applied_offsets: list[int] = field(default_factory=list)  # every offset that had an effect
    duplicates: int = 0
    next_offset: int = 0


class RejectingSink:
    """Sums the values of each vector; rejects a delta whose value is in `bad`."""

    name = "totals"

    def __init__(self, store: Store, bad: set[float]) -> None:
        self.store = store
        self.bad = bad

    async def open(self, context: SinkContext) -> ResumePoint | None:
        self._context = context
        if not self.store.keeps_cursor:
            return None
        return ResumePoint(Cursor(context.log_id, context.epoch, self.store.next_offset), 0)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            for offset, row in rows_of(delivery):
                value = float(delivery.batch.operation(row).values[0])  # type: ignore[index]
                if offset <= self.store.last_offsets.get(delivery.batch.keys[row], -1):
                    self.store.duplicates += 1
                elif value in self.bad:
                    raise RejectDelta(offset, f"{value:g} is bad")
                else:
                    self._add(delivery.batch.keys[row], offset, value)
            if not delivery.redelivered:
                self.store.next_offset = max(self.store.next_offset, delivery.next_offset)
        if self.store.keeps_cursor:
            self._context.committed(self.store.next_offset)

    def _add(self, key: str, offset: int, value: float) -> None:
        self.store.last_offsets[key] = offset
        self.store.sums[key] = self.store.sums.get(key, 0) + value
        self.store.applied_offsets.append(offset)

    async def aclose(self) -> None:
        """Nothing to close."""

    def statistics(self) -> None:
        """Nothing to report."""


def rows_of(delivery: Delivery) -> Iterator[tuple[int, int]]:
    rows = np.arange(delivery.logged.count) if delivery.rows is None else delivery.rows
    return ((delivery.first_offset + row, row) for row in rows.tolist())


def service(disk: SimDisk, seed: int = 0, log: LogSettings | None = None, **settings: object) -> Propagator:
    service_settings = replace(Settings(close_timeout_s=5), **settings)  # type: ignore[arg-type]
    return Propagator(service_settings, data="x", log=log, world=virtual_world(seed, disk=disk))


def make_delta(key: str, value: float = 1.0) -> Delta:
    return Delta(key, create([value]))


def make_addition(key: str, value: float) -> Delta:
    return Delta(key, sparse_add([0], [value]))


def quarantined_rows(p: Propagator, sink: str = "totals") -> list[tuple[int, int, str | None]]:
    """Return (offset, `blocked_by`, reason) of each quarantined row."""
    return [(record.offset, record.blocked_by, record.reason) for record in p.quarantine(sink)]
