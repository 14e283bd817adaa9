"""A sink made of one function: for users whose target is a call away.

It keeps no cursor; the broker does. So after a failure or restart the function may see a delta again.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Literal

from delta_prop_sinks.sink import SinkFailure, TryAgain
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_sinks.sink import Delivery, ResumePoint, SinkContext


@dataclass(frozen=True, slots=True)
class CallbackStatistics:
    """How often the function was called, and how far it is."""

    calls: int
    failures: int
    applied_offset: int


class CallbackSink:
    """Calls `function`, plain or async, in log order.

    `per="delta"` calls it with (offset, Delta); `per="delivery"` with a Delivery, many rows at once.
    Returning means applied. It may raise the contract's failures; any other exception is a TryAgain.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "callback",
        per: Literal["delta", "delivery"] = "delta",
    ) -> None:
        if not callable(function):
            raise UsageError(f"{function!r:.80} cannot be called: give a function")
        if per not in ("delta", "delivery"):
            raise UsageError(f'per {per!r} is not "delta" or "delivery"')
        self.name = name
        self.per = per
        self._function = function
        self._calls = self._failures = self._applied = 0

    async def open(self, context: SinkContext) -> ResumePoint | None:
        """Nothing to get ready; the broker keeps the cursor."""
        return None

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        """Call the function for every delivery, or every delta of it, in order."""
        for delivery in deliveries:
            if not delivery.batch.is_control:
                if self.per == "delivery":
                    await self._call(delivery.first_offset, delivery)
                else:
                    await self._call_rows(delivery)
            if not delivery.late:
                self._applied = max(self._applied, delivery.next_offset)

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def statistics(self) -> CallbackStatistics:
        """A snapshot of the sink's numbers."""
        return CallbackStatistics(self._calls, self._failures, self._applied)

    async def _call_rows(self, delivery: Delivery) -> None:
        logged = delivery.logged
        for row in range(logged.count) if delivery.rows is None else delivery.rows.tolist():
            offset = logged.offset + row
            await self._call(offset, offset, logged.batch.delta(row, logged.source))

    async def _call(self, offset: int, *arguments: object) -> None:
        self._calls += 1
        try:
            answer = self._function(*arguments)
            if isawaitable(answer):
                await answer
        except SinkFailure:
            self._failures += 1
            raise
        except Exception as error:
            self._failures += 1
            raise TryAgain(f"{type(error).__name__}: {error}", done_offset=offset) from error
