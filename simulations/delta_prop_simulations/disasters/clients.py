"""Processes of clients: a producer, or a subscriber, each on a machine of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.disasters.host import Host
from delta_prop_simulations.disasters.node import PORT

if TYPE_CHECKING:
    from delta_prop.ports import World
    from delta_prop_simulations.disasters.readers import Reader
    from delta_prop_simulations.disasters.workload import Writer
    from delta_prop_simulations.machine import Life, Machine


class WriterHost(Host):
    """Runs until all that it writes has an outcome."""

    def __init__(self, machine: Machine, writer: Writer, node: str) -> None:
        super().__init__(machine)
        self.writer = writer
        self._address = f"{node}:{PORT}"

    async def process(self, world: World, life: Life) -> None:
        """One life."""
        await self.writer.remote(world, [self._address])


class ReaderHost(Host):
    """Runs until the end."""

    def __init__(self, machine: Machine, reader: Reader, node: str) -> None:
        super().__init__(machine)
        self.reader = reader
        self._address = f"{node}:{PORT}"

    async def process(self, world: World, life: Life) -> None:
        """One life."""
        await self.reader.live(world, [self._address])
