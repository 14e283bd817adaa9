"""Queues of publishers that wait for capacity: one per priority, each in arrival order.

The first caller of each queue retries when a sink progresses, when a commit ends, and at the latest after its
refusal's time to retry; the pipeline decides if there is capacity. A caller that is refused with PENDING_FULL
does not wait here: its delta may be the very one that the pending deltas wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import Refused
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from delta_prop.calls.receipt import Receipt

CAPACITY_CODES = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.LOG_FULL})
"""Codes of refusals for which a caller waits until a sink or a commit frees capacity."""

YIELDS_MAX = 8
"""Maximum times in a row that a caller yields to more urgent ones, so that it never starves."""


def can_wait_out(refusal: Refused | None) -> bool:
    """True if a caller waits out the refusal in the queue: for capacity, or for a failed log to recover."""
    if refusal is None:
        return False
    will_recover = refusal.code is ErrorCode.LOG_FAILED and refusal.retry_after_ms is not None
    return will_recover or refusal.code in CAPACITY_CODES


class AdmissionQueue:
    """Serves callers in arrival order within a priority. The delta of a cancelled caller is not sent."""

    def __init__(self) -> None:
        self.waiter_count = 0
        """Number of callers that wait."""
        self._locks = tuple(anyio.Lock() for _ in Priority)
        self._progress_event = anyio.Event()

    def has_waiters(self, priority: Priority) -> bool:
        """True if a caller at least as urgent is queued, so that a new one has to queue after it."""
        return self.waiter_count > 0 and any(lock.locked() for lock in self._locks[: priority + 1])

    async def send_when_admitted(self, send: Callable[[], Receipt], priority: Priority) -> Receipt:
        """Wait for this caller's turn, then call `send` until it is not refused for lack of capacity."""
        self.waiter_count += 1
        try:
            async with self._locks[priority]:
                return await self._send_until_admitted(send, priority)
        finally:
            self.waiter_count -= 1

    async def _send_until_admitted(self, send: Callable[[], Receipt], priority: Priority) -> Receipt:
        yield_count = 0
        while True:
            wait_s = 0.01
            if yield_count < YIELDS_MAX and priority and self.has_waiters(Priority(priority - 1)):
                yield_count += 1
            else:
                yield_count = 0
                receipt = send()
                refusal = receipt.refusal()
                if refusal is None or not can_wait_out(refusal):
                    return receipt
                wait_s = (refusal.retry_after_ms or 10) / 1000
            if self._progress_event.is_set():
                self._progress_event = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._progress_event.wait()

    def notify(self) -> None:
        """Wake the first callers, which then retry: capacity may have been freed."""
        if self.waiter_count:
            self._progress_event.set()
