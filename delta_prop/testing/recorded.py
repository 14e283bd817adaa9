"""A propagator for tests: it records all deliveries, and a test can wait until all deltas are applied.

It changes nothing in the service, which behaves as in production.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import anyio.lowlevel

from delta_prop.api.propagator import Propagator
from delta_prop.api.settings import Settings
from delta_prop.calls.outcomes import Delivered
from delta_prop.calls.receipt import PublishAck
from delta_prop.platform.ports import World
from delta_prop.testing.loop import HORIZON_S, run_virtual
from delta_prop.testing.world import virtual_world
from delta_prop_sinks.sink import Delivery, SinkContext, StopSink
from delta_prop_wire.delta import Delta
from delta_prop_wire.jsonlines import delta_from_line


class RecordedPropagator(Propagator):
    """A `Propagator` with a sink of its own, `recorder`, which records every delivered delta."""

    def __init__(self, settings: Settings | None = None, *, world: World | None = None) -> None:
        super().__init__(settings, world=world)
        self.recorder = RecordingSink()

    async def __aenter__(self) -> RecordedPropagator:
        await super().__aenter__()
        await self.attach(self.recorder)
        return self

    async def publish_lines(self, lines: str | Iterable[str]) -> list[PublishAck]:
        """Publish deltas written as JSON lines, one after the other; blank lines are skipped."""
        texts = lines.splitlines() if isinstance(lines, str) else lines
        return [await self.publish(delta_from_line(text)) for text in texts if text.strip()]

    async def settle(self, timeout_s: float | None = None) -> None:
        """Wait until every sink has applied all deltas, including those that sinks publish meanwhile.

        Deltas that wait for a parent stay pending. Raises TimeoutError; Refused if a sink has stopped.
        """
        reached = -1
        while reached < (end := self.statistics().log.next_offset):
            await self.wait_visible(end, timeout_s=timeout_s)
            await anyio.lowlevel.checkpoint()
            reached = end


class RecordingSink:
    """Records every delta delivered to it, in order, each once. Stops at `deltas_max`."""

    def __init__(self, *, name: str = "recorder", deltas_max: int = 1_000_000) -> None:
        self.name = name
        self.deltas_max = deltas_max
        self.received: list[Delivered] = []
        self._next_offset = 0

    @property
    def deltas(self) -> list[Delta]:
        """Delivered deltas, in order."""
        return [record.delta for record in self.received]

    @property
    def vector_ids(self) -> list[str]:
        """Vector ids of the delivered deltas, in order."""
        return [record.delta.vector_id for record in self.received]

    async def open(self, context: SinkContext) -> None:
        """Do nothing: the service stores the cursor."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Record new rows. Raises StopSink when full."""
        for delivery in deliveries:
            logged = delivery.logged
            rows = range(logged.count) if delivery.rows is None else delivery.rows.tolist()
            for row in rows:
                self._record(
                    Delivered(
                        logged.offset + row, logged.lamport + row, logged.batch.delta(row, logged.source)
                    )
                )

    async def aclose(self) -> None:
        """Do nothing: the records stay."""

    def statistics(self) -> int:
        """Return the number of recorded deltas."""
        return len(self.received)

    def _record(self, delivered: Delivered) -> None:
        if delivered.offset < self._next_offset:
            return
        if len(self.received) >= self.deltas_max:
            raise StopSink(f"{self.deltas_max} deltas are recorded: raise deltas_max, or record fewer topics")
        self.received.append(delivered)
        self._next_offset = delivered.offset + 1


T = TypeVar("T")


def run_propagator(
    main: Callable[[RecordedPropagator], Awaitable[T]],
    settings: Settings | None = None,
    *,
    seed: int = 0,
    horizon_s: float = HORIZON_S,
) -> T:
    """Run `main(propagator)` in virtual time: an hour takes milliseconds, a hang is an error.

    Randomness, and the order of tasks that could run at the same time, are drawn from `seed`.
    """

    async def run() -> T:
        async with RecordedPropagator(settings, world=virtual_world(seed)) as propagator:
            result = await main(propagator)
        return result  # noqa: RET504 - an `async with` may suppress an exception

    return run_virtual(run, seed=seed, horizon_s=horizon_s)
