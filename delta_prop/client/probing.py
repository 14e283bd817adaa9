"""What a producer does while its service has no room: it asks with one batch, and keeps the others back.

Pure. Each try of all that is open would be refused as often as there are batches, for one cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from delta_prop.client.lane import Lane, OpenFrame
    from delta_prop_wire.errors import Refused

NO_ROOM = frozenset({ErrorCode.QUEUE_FULL, ErrorCode.LOG_FULL, ErrorCode.LOG_FAILED})
"""Refusals that are not about the batch: the next one would be refused as well."""
PROBE_S_MAX = 5.0
"""A batch without an answer for so long is held for something else: a cause that may stand behind it here."""


class Probing:
    """`refusal`: why the service takes nothing; None while it does, as far as is known."""

    __slots__ = ("_frame", "_until", "refusal")

    def __init__(self) -> None:
        self.refusal: Refused | None = None
        self._frame: OpenFrame | None = None
        self._until = 0.0

    def wait_s(self, now: float) -> float:
        """Return how long nothing goes, as the batch that asks is under way; 0: one may go."""
        if self._frame is None:
            return 0.0
        if now >= self._until:
            self.end()
            return 0.0
        return self._until - now

    def choose(self, lanes: Iterable[Lane]) -> Iterable[Lane]:
        """The lane whose batch is to ask: the one that was sent first, as the others may wait for it."""
        if self.refusal is None:
            return lanes
        lanes = list(lanes)
        refused = [lane for lane in lanes if lane.again]
        return [min(refused, key=_first_sent)] if refused else lanes

    def sent(self, frame: OpenFrame, now: float) -> None:
        """A batch goes."""
        if self.refusal is not None:
            self._frame, self._until = frame, now + PROBE_S_MAX

    def refused(self, frame: OpenFrame, refusal: Refused) -> None:
        """A batch was refused: for want of room, or for a cause of its own."""
        if refusal.code in NO_ROOM and (self.refusal is None or self._frame is frame):
            self.refusal = refusal
        if self._frame is frame:
            self._frame = None

    def answered(self, frame: OpenFrame) -> None:
        """A batch has its outcome: the others may go, if it is the one that asked."""
        if self._frame is frame:
            self.end()

    def disconnected(self) -> None:
        """Nothing is under way any more."""
        self._frame = None

    def end(self) -> None:
        """All may go."""
        self.refusal = self._frame = None


def _first_sent(lane: Lane) -> int:
    return lane.again[0].number
