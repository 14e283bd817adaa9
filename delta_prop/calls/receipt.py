"""Receipts, which a caller holds from the offer of a delta until its outcome is known.

A receipt is settled once; it decides nothing, it only reports.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Sequence

import anyio

from delta_prop.calls.outcomes import OfferState, PublishAck
from delta_prop.calls.refusals import first_copy_removed
from delta_prop_wire.errors import Refused, UsageError

__all__ = ["OfferState", "PublishAck", "Receipt", "ReceiptGroup"]

_OPEN = (
    OfferState.QUEUED,
    OfferState.PENDING,
    OfferState.APPENDED,
    OfferState.IN_DOUBT,
)  # a tuple is searched faster than an enum is hashed
_COMMIT_WAIT_S_MAX = 30.0
"""Maximum seconds that a cancelled caller waits for a commit under way."""


class Receipt:
    """Awaitable outcome: a `PublishAck`, or `Refused` is raised. A cancelled wait tries to withdraw the
    delta.

    `state` shows afterwards what happened: `WITHDRAWN` means that the delta never takes effect, `APPENDED`
    and `IN_DOUBT` that it may.
    """

    __slots__ = ("_callbacks", "_event", "_outcome", "_place", "_withdraw", "item", "sliced_offsets", "state")

    def __init__(self) -> None:
        self.state = OfferState.QUEUED
        self.item: object = None  # the entry that waits in the queue or in pending, for `after=`
        self.sliced_offsets: tuple[int | None, ...] = ()
        """Offsets of the first rows of a frame, if the log had them before; the outcome is of the others."""
        self._outcome: PublishAck | Refused | None = None
        self._event: anyio.Event | None = None
        self._callbacks: list[Callable[[Receipt], None]] | None = None
        self._withdraw: Callable[[], bool] | None = None
        self._place: PublishAck | None = None

    @property
    def done(self) -> bool:
        """True if the outcome is known."""
        return self.state not in _OPEN

    @property
    def acknowledged(self) -> bool:
        """True if the delta was acknowledged."""
        return self.state is OfferState.ACKNOWLEDGED

    def result(self) -> PublishAck:
        """Return the outcome. Raises Refused; UsageError while it is unknown, or after a withdrawal."""
        if isinstance(self._outcome, PublishAck):
            return self._outcome
        if isinstance(self._outcome, Refused):
            raise self._outcome
        raise UsageError(f"the receipt is {self.state.value}, without a result: await it first")

    @property
    def place(self) -> PublishAck | None:
        """Offset and dot in the log, before they are durable; None: the delta is not appended."""
        return self._place

    def refusal(self) -> Refused | None:
        """Return the refusal, None if there is none."""
        return self._outcome if isinstance(self._outcome, Refused) else None

    async def wait(self) -> PublishAck:
        """Wait for the outcome. Raises Refused. If cancelled: see the class."""
        while not self.done:  # the event may signal only a doubt
            if self._event is None:
                self._event = anyio.Event()
            await self.wait_for(self._event.wait())
        return self.result()

    async def wait_for(self, awaitable: Awaitable[object]) -> None:
        """Wait for `awaitable`, which ends with the outcome or before it. If cancelled: see the class."""
        try:
            await awaitable
        except anyio.get_cancelled_exc_class():
            if await self.is_cancelled():
                raise

    async def is_cancelled(self) -> bool:
        """Return True if a cancelled caller is to end by its cancellation, and not by the outcome."""
        # An appended delta cannot be withdrawn, but its outcome is known in a moment.
        if self.state is OfferState.APPENDED:
            self._event = self._event or anyio.Event()
            with anyio.CancelScope(shield=True), anyio.move_on_after(_COMMIT_WAIT_S_MAX):
                await self._event.wait()
        # If it was acknowledged in the very tick of the cancellation, the acknowledgement is returned: a
        # cancelled scope cancels again at the next await. A task cancelled past anyio would not, so it ends.
        return self.withdraw() or not (self.done and anyio.current_effective_deadline() == -math.inf)

    def __await__(self) -> Generator[object, None, PublishAck]:
        return self.wait().__await__()

    def withdraw(self) -> bool:
        """Withdraw the delta unless it is appended already; return True if that worked."""
        if self.done or self._withdraw is None:
            return False
        waiting_state = self.state
        self.state = OfferState.WITHDRAWN  # the pipeline, called next, finds no open receipt to settle
        if not self._withdraw():
            self.state = waiting_state
            return False
        self._finish()
        return True

    def add_done_callback(self, then: Callable[[Receipt], None]) -> None:
        """Call `then` once the outcome is known; at once if it is. It must not block."""
        if self.done:
            then(self)
        else:
            self._callbacks = [*(self._callbacks or ()), then]

    # --- for the pipeline

    def mark_appended(self, place: PublishAck | None = None) -> None:
        """Note that the delta is in the log: it cannot be withdrawn, and nothing needs to wait for it."""
        if self.state in _OPEN:
            self.state = OfferState.APPENDED
            self._place = place
            self.item = self._withdraw = None

    def mark_in_doubt(self) -> None:
        """Note that the log failed before the delta was durable; ends the waits of cancelled callers."""
        if self.state is OfferState.APPENDED:
            self.state = OfferState.IN_DOUBT
            if self._event is not None:
                self._event.set()
                self._event = None

    def mark_waiting(self, state: OfferState, withdraw: Callable[[], bool]) -> None:
        """Note where the delta waits and how to withdraw it."""
        self.state = state
        self._withdraw = withdraw

    def split(self, counts: Sequence[int]) -> Sequence[Receipt]:
        """Return a receipt for each of the batches of this one; `counts`: the rows of each batch."""
        assert len(counts) == 1, "a receipt of several batches overrides split"
        return [self]

    def acknowledge(self, published: PublishAck) -> None:
        """Settle with an acknowledgement; with a refusal if a row cannot be compared with its first copy."""
        if None in published.duplicates.values():
            self.refuse(first_copy_removed(published))
        else:
            self._acknowledge(published)

    def _acknowledge(self, published: PublishAck) -> None:
        assert self.state in _OPEN, f"settled twice: {self.state}, then acknowledged"
        self.state, self._outcome = OfferState.ACKNOWLEDGED, published
        self._finish()

    def refuse(self, refusal: Refused) -> None:
        """Settle with a refusal."""
        assert self.state in _OPEN, f"settled twice: {self.state}, then refused"
        self.state, self._outcome = OfferState.REFUSED, refusal
        self._finish()

    def _finish(self) -> None:
        self._withdraw = None
        self.item = None
        if self._event is not None:
            self._event.set()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for then in callbacks:
                then(self)


class ReceiptGroup(Receipt):
    """Receipt of a batch of several calls, which passes each outcome on to the receipts of its calls."""

    __slots__ = ("_acks", "_counts", "_receipts")

    def __init__(self, receipts: Sequence[Receipt], counts: Sequence[int]) -> None:
        """`counts`: the number of rows of each call."""
        super().__init__()
        self._receipts, self._counts = receipts, counts
        self._acks: list[PublishAck] | None = None

    def mark_appended(self, place: PublishAck | None = None) -> None:
        super().mark_appended(place)
        if place is not None:
            self._acks = place.split(self._counts)
            for receipt, ack in zip(self._receipts, self._acks, strict=True):
                if receipt.state in _OPEN:
                    receipt.state, receipt._place = OfferState.APPENDED, ack
                    receipt.item = receipt._withdraw = None

    def mark_in_doubt(self) -> None:
        super().mark_in_doubt()
        for receipt in self._receipts:
            receipt.mark_in_doubt()

    def _acknowledge(self, published: PublishAck) -> None:
        super()._acknowledge(published)
        acks = self._acks or published.split(self._counts)
        for receipt, ack in zip(self._receipts, acks, strict=True):
            if receipt.state in _OPEN:
                receipt.state, receipt._outcome = OfferState.ACKNOWLEDGED, ack
                receipt.item = receipt._withdraw = None
                if receipt._event is not None or receipt._callbacks is not None:
                    receipt._finish()

    def refuse(self, refusal: Refused) -> None:
        """Refuse each call, if it is appended; otherwise report nothing, since each call is retried alone."""
        super().refuse(refusal)
        for receipt in self._receipts if self._acks is not None else ():
            if receipt.state in _OPEN:
                receipt.refuse(refusal)
