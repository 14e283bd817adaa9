"""Subscribers as users write them: they keep what they got with the cursor behind it, and go on from there.

What outlives a reader's process is what it has kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from delta_prop.client import ClientSettings, Subscriber
from delta_prop.client.incoming import CREDIT
from delta_prop_wire.errors import PeerError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.client.subscriber import Place
    from delta_prop.ports import World
    from delta_prop.published import Delivered
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import Dot

AGAIN_S = 0.2
KEEP_EVERY = 5
_GONE = frozenset({ErrorCode.CURSOR_TOO_OLD, ErrorCode.BAD_REQUEST})
"""Why a cursor is of no use: the log has let go of what comes next, or is another one."""
CLIENT = ClientSettings(
    heartbeat_s=1.0, silence_s_max=4.0, open_s_max=20.0, offline_s_max=30.0, close_s_max=1.0
)


@dataclass(slots=True)
class Reading:
    """What came over one subscriber object. `begin`: the cursor that it was to begin at, None where the group
    or an end of the log said where; `first`: where it began; `kept`: all below was taken and kept.
    `anew`: it did not go on from anywhere, as nothing was kept, or what came next is gone.
    """

    begin: Cursor | None
    anew: bool
    log_id: bytes = b""
    first: int | None = None
    kept: int = 0
    rows: list[tuple[int, Dot | None]] = field(default_factory=list)


class Reader:
    """One subscriber over all its lives."""

    def __init__(
        self,
        name: str,
        *,
        node: str,
        topics: str = "*",
        group: bool = False,
        batches: bool = True,
        credit: int = CREDIT.deltas,
    ) -> None:
        self.name = name
        self.node = node
        self.topics = topics
        self.group = group
        self.stalled = False
        self.readings: list[Reading] = []
        self._batches = batches
        self._credit = (credit, CREDIT.bytes)
        self._kept: Cursor | None = None
        self._anew = True

    @property
    def reached(self) -> int:
        """Everything below was taken, of the log that was read last."""
        return self.readings[-1].kept if self.readings else 0

    async def live(self, world: World, addresses: str | Sequence[str]) -> None:
        """One life: read until cancelled."""
        while True:
            try:
                await self._read(world, addresses)
            except Refused as refusal:
                if refusal.code in _GONE:  # what there is no more, it cannot get
                    self._kept, self._anew = None, True
            except UsageError:  # it is another log, as the one before was in memory
                self._kept, self._anew = None, True
            except (PeerError, OSError):
                pass
            await anyio.sleep(AGAIN_S)

    async def _read(self, world: World, addresses: str | Sequence[str]) -> None:
        start: Place | None = self._kept or "earliest"
        if self.group and not self._anew:
            start = None
        async with Subscriber(
            addresses,
            self.topics,
            start=start,
            group=f"group of {self.name}" if self.group else None,
            deltas=not self._batches,
            credit=self._credit,
            name=self.name,
            settings=CLIENT,
            world=world,
        ) as subscriber:
            reading = Reading(None if self.group else self._kept, self._anew)
            self.readings.append(reading)
            self._keep(reading, subscriber)
            while True:
                await anyio.sleep(AGAIN_S if self.stalled else 0)
                if not self.stalled:
                    with anyio.move_on_after(AGAIN_S):
                        await self._take(reading, subscriber)
                    self._keep(reading, subscriber)

    async def _take(self, reading: Reading, subscriber: Subscriber) -> None:
        """What comes next, or some of it."""
        if self._batches:
            for one in await subscriber.next_batch():
                _add(reading, one)
            return
        for _ in range(KEEP_EVERY):
            _add(reading, await anext(subscriber))

    def _keep(self, reading: Reading, subscriber: Subscriber) -> None:
        """Keep the cursor with what came before it."""
        cursor = subscriber.cursor
        if cursor is not None:
            self._anew = False
            if reading.first is None:
                reading.first, reading.log_id = cursor.next_offset, cursor.log_id
            reading.kept = max(reading.kept, cursor.next_offset)
            if not self.group:
                self._kept = cursor


def _add(reading: Reading, one: Delivered) -> None:
    reading.rows.append((one.offset, one.delta.dot))
