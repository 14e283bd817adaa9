"""What the connections of one server share: the propagator behind them, who may do what, what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from delta_prop.server.counters import Counters
from delta_prop_wire.compression import available
from delta_prop_wire.frames import Level, OriginGrant

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop.inside import Inside
    from delta_prop.server.access import Access
    from delta_prop.server.audit import Audit
    from delta_prop.server.groups import Groups
    from delta_prop.server.jobs import Jobs
    from delta_prop.server.limits import Rates
    from delta_prop.server.room import Room
    from delta_prop.server.settings import ServerSettings
    from delta_prop_wire.compression import Compression


@dataclass(slots=True, eq=False)
class Hub:
    """`pressed`: producers get no credit back for now; `now` in monotonic seconds."""

    inside: Inside
    settings: ServerSettings
    access: Access
    rates: Rates
    audit: Audit
    groups: Groups
    room: Room
    jobs: Jobs
    now: Callable[[], float]
    codecs: tuple[Compression, ...] = field(default_factory=available)
    counters: Counters = field(default_factory=Counters)
    level: Level = Level.OK
    _numbers: int = 0

    @property
    def pressed(self) -> bool:
        """Whether the queue is so full that producers are to spend what they have first."""
        return self.level is Level.STOP

    @property
    def features(self) -> tuple[str, ...]:
        """What this server reads and writes beyond the basics."""
        return (*(codec.name.lower() for codec in self.codecs), *self.jobs.features)

    def running_number(self) -> int:
        """The next number of a frame that has none of its own."""
        self._numbers += 1
        return self._numbers

    def watermarks(self) -> list[OriginGrant]:
        """How far every origin is here, for who forwards another log. Raises Refused (LOG_FAILED)."""
        chain = self.inside.chain
        chain.check_running()
        found = []
        for origin, watermark in chain.orderer.have.items():
            if origin >= 0:  # others stand for work that has no dots yet
                state = chain.origins.get(origin)
                found.append(OriginGrant(origin, 0 if state is None else state.epoch, watermark))
        return found
