"""Named groups of subscribers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from delta_prop.ports import World
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.contract import Log


class Groups:
    """How far each has come."""

    def __init__(self, disk: Disk | None, log: Log, world: World) -> None:
        self._disk = disk

    async def run(self) -> None:
        """Keep them."""
        await anyio.sleep_forever()
