"""Subscribers are sent rows before their producer is acknowledged, so acknowledgements delay no delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delta_prop import Delta, LogSettings, opaque
from delta_prop.api.propagator import Propagator
from delta_prop.testing import run_virtual, virtual_world
from delta_prop_simulations.disk import SimDisk
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.topics import ALL

if TYPE_CHECKING:
    from delta_prop.delivery.routing_table import Rows
    from delta_prop.partition.partition import Partition
    from delta_prop_broker.log.settings import ReadLevel
    from delta_prop_wire.batch import LoggedBatch


class Target:
    """A subscriber that sends at the end of the tick, as a connection does."""

    def __init__(self, partition: Partition, events: list[str]) -> None:
        self._call_at_end = partition.tick_callbacks.call_at_end
        self._events = events

    def offer(self, logged: LoggedBatch, rows: Rows) -> None:
        assert self._call_at_end(lambda: self._events.append("sent"))

    def note_visible(self) -> None:
        pass

    def note_recovered(self) -> None:
        pass


@pytest.mark.parametrize("read_level", [AckLevel.LOGGED, AckLevel.DURABLE])
def test_rows_are_sent_before_they_are_acknowledged(read_level: ReadLevel) -> None:
    events: list[str] = []

    async def run() -> None:
        log = LogSettings(read_level=read_level)
        async with Propagator(data="x", log=log, world=virtual_world(1, disk=SimDisk(1))) as p:
            internals = p.internals()
            internals.sinks.add_target(Target(internals.partition, events), (ALL,))
            for number in range(2):
                receipt = p.offer(Delta("a", opaque(b"%d" % number)))
                receipt.add_done_callback(lambda _: events.append("acknowledged"))
                await receipt

    run_virtual(run)
    assert events == ["sent", "acknowledged"] * 2
