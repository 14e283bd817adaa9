"""Receipts: what a caller holds from the moment a delta is offered until its outcome is known.

A receipt is settled once; nothing here decides, it only tells.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import anyio

from delta_prop.published import Published, State
from delta_prop.refusals import first_copy_gone
from delta_prop_wire.errors import Refused, UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

__all__ = ["Published", "Receipt", "State"]

_OPEN = (
    State.QUEUED,
    State.PENDING,
    State.PLACED,
    State.IN_DOUBT,
)  # looked through quicker than an enum is hashed
_KEEP_S_MAX = 30.0
"""How long a cancelled caller waits for a commit that is under way."""


class Receipt:
    """Awaitable: gives `Published` or raises `Refused`. A cancelled wait withdraws what still can be.

    `state` says afterwards which happened: `WITHDRAWN` means that the delta never takes effect, `PLACED` and
    `IN_DOUBT` that it may.
    """

    __slots__ = ("_event", "_outcome", "_place", "_then", "_withdraw", "cut_off", "item", "state")

    def __init__(self) -> None:
        self.state = State.QUEUED
        self.item: object = None  # what waits in the queue or in pending, for `after=`
        self.cut_off: tuple[int | None, ...] = ()
        """Of a frame whose first rows the log had before: their places. The outcome is of the other rows."""
        self._outcome: Published | Refused | None = None
        self._event: anyio.Event | None = None
        self._then: list[Callable[[Receipt], None]] | None = None
        self._withdraw: Callable[[], bool] | None = None
        self._place: Published | None = None

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.state not in _OPEN

    @property
    def acknowledged(self) -> bool:
        """Whether it has happened."""
        return self.state is State.ACKNOWLEDGED

    def result(self) -> Published:
        """The outcome. Raises Refused; UsageError while it is not known, or where it was withdrawn."""
        if isinstance(self._outcome, Published):
            return self._outcome
        if isinstance(self._outcome, Refused):
            raise self._outcome
        raise UsageError(f"the receipt is {self.state.value}: it has no result; await it first")

    @property
    def place(self) -> Published | None:
        """The place that it was given in the log, before it is known to be kept; None: it has none."""
        return self._place

    def refusal(self) -> Refused | None:
        """The refusal, None where there is none."""
        return self._outcome if isinstance(self._outcome, Refused) else None

    async def wait(self) -> Published:
        """Wait for the outcome. Raises Refused. Cancelled: see the class."""
        while not self.done:  # an event may tell of a doubt only
            if self._event is None:
                self._event = anyio.Event()
            await self.wait_for(self._event.wait())
        return self.result()

    async def wait_for(self, told: Awaitable[object]) -> None:
        """Wait for what comes with the outcome, or before it. Cancelled: see the class."""
        try:
            await told
        except anyio.get_cancelled_exc_class():
            if self.state is State.PLACED:  # it can no longer be taken back; a moment tells how it ends
                self._event = self._event or anyio.Event()
                with anyio.CancelScope(shield=True), anyio.move_on_after(_KEEP_S_MAX):
                    await self._event.wait()
            # Acknowledged in the very tick of the cancellation: it has happened, so that is said. A
            # cancelled scope asks again at the next await; a task cancelled past anyio would not.
            if self.withdraw() or not (self.done and anyio.current_effective_deadline() == -math.inf):
                raise

    def __await__(self) -> Generator[object, None, Published]:
        return self.wait().__await__()

    def withdraw(self) -> bool:
        """Take the delta back if it has not been given its place yet; whether that worked."""
        if self.done or self._withdraw is None:
            return False
        waited = self.state
        self.state = State.WITHDRAWN  # the pipeline, called next, finds nobody left to tell
        if not self._withdraw():
            self.state = waited
            return False
        self._finish()
        return True

    def when_done(self, then: Callable[[Receipt], None]) -> None:
        """Call `then` once the outcome is known; at once if it is. It must not block."""
        if self.done:
            then(self)
        else:
            self._then = [*(self._then or ()), then]

    # --- for the pipeline

    def placed(self, place: Published | None = None) -> None:
        """It is in the log: nobody can take it back any more, and nothing needs to wait behind it."""
        if self.state in _OPEN:
            self.state = State.PLACED
            self._place = place
            self.item = self._withdraw = None

    def doubt(self) -> None:
        """Note that the log failed before this was kept. Ends the shielded waits of who was cancelled."""
        if self.state is State.PLACED:
            self.state = State.IN_DOUBT
            if self._event is not None:
                self._event.set()
                self._event = None

    def waits(self, state: State, withdraw: Callable[[], bool]) -> None:
        """Note where the delta waits and how it can be taken back."""
        self.state = state
        self._withdraw = withdraw

    def split(self, counts: Sequence[int]) -> Sequence[Receipt]:
        """Give each of the batches that this is about a receipt of its own. `counts`: of rows of each."""
        assert len(counts) == 1, "a receipt of several batches says how they are split"
        return [self]

    def acknowledge(self, published: Published) -> None:
        """Settle with an acknowledgement; with a refusal if a row cannot be compared with its first copy."""
        if None in published.duplicates.values():
            self.refuse(first_copy_gone(published))
        else:
            self._acknowledge(published)

    def _acknowledge(self, published: Published) -> None:
        assert self.state in _OPEN, f"settled twice: {self.state}, then acknowledged"
        self.state, self._outcome = State.ACKNOWLEDGED, published
        self._finish()

    def refuse(self, refusal: Refused) -> None:
        """Settle with a refusal."""
        assert self.state in _OPEN, f"settled twice: {self.state}, then refused"
        self.state, self._outcome = State.REFUSED, refusal
        self._finish()

    def _finish(self) -> None:
        self._withdraw = None
        self.item = None
        if self._event is not None:
            self._event.set()
        if self._then is not None:
            waiting, self._then = self._then, None
            for then in waiting:
                then(self)
