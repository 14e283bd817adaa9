"""What a server gets of an open propagator beyond its public calls: the parts that connections talk to.

Values only. The chain stays the same object when the log fails and is recovered; what is in it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.attachments import Attachments
    from delta_prop.config import Settings
    from delta_prop.fullness import RoomWatch
    from delta_prop.operating import Operating
    from delta_prop.pipeline import Chain
    from delta_prop.ports import World
    from delta_prop.turns import Turn
    from delta_prop_broker.disk import Disk
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog


@dataclass(frozen=True, slots=True)
class Inside:
    """The parts. `disk` is the data directory, None beside a log in memory; `now` in monotonic seconds.

    `turn`: begun by who takes what comes, so that what follows of all of it is done once, at its end.
    `operating`: carries out what operators ask, None beside a log in memory.
    """

    chain: Chain
    log: MemoryLog | DurableLog
    sinks: Attachments
    world: World
    settings: Settings
    disk: Disk | None
    now: Callable[[], float]
    turn: Turn
    room: RoomWatch
    operating: Operating | None = None
