"""When a consumer session sends next: the states of its sending, lingering, and retries of a failing disk."""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from delta_prop.platform.ports import Clock
    from delta_prop.server.send_queue import SendQueue
    from delta_prop_wire.frames import Subscription

READ_RETRY_S = 0.5
"""Seconds after which the log is read again after a disk failure."""
BATCH_DELTAS_MAX = 10_000
"""Maximum of a subscription's `batch_deltas_max`; a higher one is reduced to it."""


class SendState(Enum):
    """The result of the last `take`, which decides the events that notify the writer."""

    ACTIVE = "active"  # there may be more to send
    IDLE = "idle"  # everything is sent
    LINGERING = "lingering"
    NO_CREDIT = "no credit"
    DISK_FAILING = "disk failing"


_RESUMED = frozenset({SendState.ACTIVE, SendState.IDLE})
MOVES: Final = {
    SendState.ACTIVE: frozenset(SendState),
    SendState.IDLE: _RESUMED,
    SendState.LINGERING: _RESUMED | {SendState.LINGERING},
    SendState.NO_CREDIT: _RESUMED | {SendState.NO_CREDIT},
    SendState.DISK_FAILING: _RESUMED | {SendState.DISK_FAILING},
}
"""The states that may follow each state. A wait begins only while a session is active."""


class SendTiming:
    """The state of one session's sending.

    `state` may be set to ACTIVE or IDLE directly, since these may follow every state, and batches set them;
    the other states are entered by `enter`.
    """

    def __init__(self, clock: Clock, *, batch_bytes_max: int) -> None:
        self.now = clock.now
        self.state = SendState.ACTIVE
        self.has_just_sent = False
        """True if the next batches may linger."""
        self.oldest_at = 0.0
        """When the oldest queued batch was queued."""
        self.batch_deltas_max = 1
        self.linger_s = 0.0
        self._batch_bytes_max = batch_bytes_max
        self._retry_at = -inf  # when the log is read again after a disk failure

    def start(self, request: Subscription) -> None:
        """Begin with the first subscription, which sets the size of batches."""
        self.batch_deltas_max = min(max(request.batch_deltas_max, 1), BATCH_DELTAS_MAX)
        self.linger_s = request.wait_ms_max / 1000
        self.state, self.has_just_sent = SendState.ACTIVE, False

    def enter(self, state: SendState) -> None:
        """Move to a state; an error if it cannot follow the present one."""
        assert state in MOVES[self.state], f"{state.value} cannot follow {self.state.value}"
        self.state = state

    def note_sent(self, now: float) -> None:
        """Note that a chunk was taken: the next batches may linger from now on."""
        self.has_just_sent, self.state, self.oldest_at = True, SendState.ACTIVE, now

    def note_drained(self) -> None:
        """Note that nothing is left: the next batch is sent at once."""
        self.state, self.has_just_sent = SendState.IDLE, False

    def note_disk_failed(self, now: float) -> bool:
        """Wait before the next read; return True if this is the first failure in a row."""
        is_first = self._retry_at == -inf
        self.enter(SendState.DISK_FAILING)
        self._retry_at = now + READ_RETRY_S
        return is_first

    def note_read(self) -> None:
        """Note that the log was read: an earlier disk failure has passed."""
        self._retry_at = -inf

    def is_full(self, queue: SendQueue) -> bool:
        """Return True if the queued batches need not linger for more."""
        return queue.delta_count >= self.batch_deltas_max or queue.bytes >= self._batch_bytes_max

    def may_linger(self, now: float) -> bool:
        """Return True if the time for which queued batches may linger has not passed."""
        return self.linger_s > 0 and now < self.oldest_at + self.linger_s

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until there may be something to send; None if the writer is notified of it."""
        if self.state is SendState.ACTIVE:
            return 0.0
        if self.state is SendState.LINGERING:
            return max(0.0, self.oldest_at + self.linger_s - now)
        return max(0.0, self._retry_at - now) if self.state is SendState.DISK_FAILING else None
