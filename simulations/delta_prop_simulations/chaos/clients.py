"""Client processes: a producer or a subscriber, each on its own machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_simulations.chaos.host import Host
from delta_prop_simulations.chaos.node import PORT

if TYPE_CHECKING:
    from delta_prop.platform.ports import World
    from delta_prop_simulations.chaos.readers import Reader
    from delta_prop_simulations.chaos.workload import Writer
    from delta_prop_simulations.machine import Machine, Process


class WriterHost(Host):
    """A producer, which runs until each of its deltas has an outcome."""

    def __init__(self, machine: Machine, writer: Writer, node: str) -> None:
        super().__init__(machine)
        self.writer = writer
        self._address = f"{node}:{PORT}"

    async def run_process(self, world: World, process: Process) -> None:
        """Run the producer in one process."""
        await self.writer.run_remote(world, [self._address])


class ReaderHost(Host):
    """A subscriber, which reads until the chaos run ends."""

    def __init__(self, machine: Machine, reader: Reader, node: str) -> None:
        super().__init__(machine)
        self.reader = reader
        self._address = f"{node}:{PORT}"

    async def run_process(self, world: World, process: Process) -> None:
        """Run the subscriber in one process."""
        await self.reader.run(world, [self._address])
