"""The ports of sinks, as structural types: a clock, a thread for calls that block, a link to another service.

This module implements none of them: the program passes in the real ones, a test passes in fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from delta_prop_wire.batch import LoggedBatch

T = TypeVar("T")


class Clock(Protocol):
    """Elapsed time for timeouts and intervals, wall time for display."""

    def now(self) -> float:
        """Return monotonic seconds."""

    def wall_us(self) -> int:
        """Return microseconds since 1970, for display only."""


class Threads(Protocol):
    """One worker thread: calls that block run there, one at a time, in order."""

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns."""


class ForwardLink(Protocol):
    """A connection that sends a log's batches, unchanged, to another service."""

    def begin(self, log_id: bytes) -> None:
        """Name the log that the batches come from. Called once, before anything else."""

    async def run(self) -> None:
        """Keep the connection up until cancelled. `forward` reports what prevents it."""

    async def wait_for_watermarks(self) -> Mapping[int, int] | None:
        """Wait for the connection. Return the other service's watermarks, which it sends on each new
        connection: for each origin the counter up to which none is missing. Return None if those of the
        present connection were returned already.

        Raises ConnectionError or Refused, as `forward` does.
        """

    async def forward(self, batches: Sequence[LoggedBatch]) -> list[Refused | None]:
        """Send batches to the other service, in order; return for each its refusal, or None if it was stored.

        Batches that the service already has are not sent. Raises ConnectionError if there is no connection or
        it broke: all batches are then redelivered. Raises Refused if the service accepts nothing from here.
        """

    def statistics(self) -> object:
        """Return a frozen snapshot of the connection's numbers."""
