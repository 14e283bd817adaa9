"""Client processes: a producer or a subscriber, each on its own machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.host import Host
from delta_prop_simulations.chaos.node import PORT

if TYPE_CHECKING:
    from delta_prop.ports import World
    from delta_prop_simulations.chaos.readers import Reader
    from delta_prop_simulations.chaos.workload import Writer
    from delta_prop_simulations.machine import Life, Machine


class WriterHost(Host):
    """Runs until everything that it writes has an outcome."""

    def __init__(self, machine: Machine, writer: Writer, node: str) -> None:
        super().__init__(machine)
        self.writer = writer
        self._address = f"{node}:{PORT}"

    async def process(self, world: World, life: Life) -> None:
        """Run one life of the producer."""
        await self.writer.run_remote(world, [self._address])


class ReaderHost(Host):
    """Runs until the run ends."""

    def __init__(self, machine: Machine, reader: Reader, node: str) -> None:
        super().__init__(machine)
        self.reader = reader
        self._address = f"{node}:{PORT}"

    async def process(self, world: World, life: Life) -> None:
        """Run one life of the subscriber."""
        await self.reader.run_life(world, [self._address])
