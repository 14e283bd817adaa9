"""Calls go down the chain as one draft, once in a turn of the event loop: those of several callers, and the
offers of a loop.

A draft costs the chain some ten µs whatever is in it, and the log a frame, so that deltas which come one by
one would mostly pay for that. Who calls alone is not kept waiting. Each call keeps its receipt and its fate:
where the whole finds no room, or is refused, each goes by itself, as if it had come alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.merged import ROWS_MAX, check_call, groups, merge
from delta_prop.receipt import State
from delta_prop.turns import Bell
from delta_prop.waking import waker_maker
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop.ingest.work import Draft
    from delta_prop.merged import Call
    from delta_prop.pipeline import Chain
    from delta_prop.turns import Turn
    from delta_prop.waking import Waker


ALONE_S = 0.002
"""Where nobody else called in a turn, calls go at once for so long, however close upon each other."""


class Gathering:
    """What callers have published in this turn. `run` sends it, at the next one."""

    def __init__(
        self,
        chain: Chain,
        *,
        turn: Turn,
        now: Callable[[], float],
        soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`soon`: has a call made behind all that the event loop has to do already; None: `run` does it."""
        self._chain = chain
        self._turn = turn
        self._now = now
        self._soon = soon
        self._calls: dict[Call, Waker | None] = {}
        self._waker = waker_maker()
        self._bell = Bell()
        self.callers = 0
        """Whose call has not returned; each counts itself."""
        self._went = False  # a call has gone at once in this turn
        self._due = False  # at the end of this turn
        self.turn_began = -math.inf
        """When the first call of this turn came; behind its end others have had their turn too."""
        self._alone_until = -math.inf

    def wants(self, now: float) -> bool:
        """Whether a call is to be gathered: others wait, or have called in this turn. Else it goes."""
        return self.callers > 1 or (self._went and now >= self._alone_until)

    def add(self, call: Call) -> Waker:
        """Gather a call; what is given wakes its caller when it has been sent."""
        waker = self._waker()
        self._add(call, waker, self._now())
        return waker

    def offer(self, call: Draft) -> None:
        """Send a call whose caller does not wait: the first of a turn at once, the others together."""
        now = self._now()
        if not self._went:
            self.send_now(call, now)
            return
        self._add(call, None, now)
        if len(self._calls) >= ROWS_MAX:
            self.send()

    def _add(self, call: Call, waker: Waker | None, now: float) -> None:
        if not self._calls:
            self._see_to_end_of_turn(now)
        self._calls[call] = waker
        call.receipt.waits(State.QUEUED, partial(self._withdraw, call))

    async def run(self) -> None:
        """Send, turn after turn, until cancelled."""
        while True:
            await self._bell.wait()
            self._end_turn()

    def _see_to_end_of_turn(self, now: float) -> None:
        if not self._due:
            self._due, self.turn_began = True, now
            if self._soon is None:
                self._bell.ring()
            else:
                self._soon(self._end_turn)

    def _end_turn(self) -> None:
        self._due = self._went = False
        if len(self._calls) == 1 and self.callers == 1:
            self._alone_until = self._now() + ALONE_S
        self.send()

    def send_now(self, call: Call, now: float) -> None:
        """Send a call that need not wait for others."""
        self.send()
        self._went = True
        self._see_to_end_of_turn(now)
        with self._turn:
            self._send_together([call], now)
            self._turn.press()

    def send(self) -> None:
        """Send what was gathered, in order. Who comes after it calls this first."""
        calls, self._calls = self._calls, {}
        if not calls:
            return
        now = self._now()
        with self._turn:
            for group in groups(calls):
                self._send_together(group, now)
            self._turn.press()
        for waker in calls.values():
            if waker is not None and not waker.done():
                waker.set_result(None)

    def _send_together(self, calls: Sequence[Call], now: float) -> None:
        """Send them as one draft; what is refused by halves, so that it keeps few of its neighbours apart."""
        chain = self._chain
        if chain.offer_merged(merge(calls), now):
            return
        if len(calls) > 1 and chain.takes_merged:
            half = len(calls) // 2
            self._send_together(calls[:half], now)
            self._send_together(calls[half:], now)
        else:
            for call in calls:
                self._send_alone(call, now)

    def _send_alone(self, call: Call, now: float) -> None:
        try:
            check_call(call)
        except Refused as refusal:
            call.receipt.refuse(refusal)
            return
        self._chain.offer(call, now)

    def _withdraw(self, call: Call) -> bool:
        """It was not sent yet: it never happened."""
        if call not in self._calls:
            return False
        del self._calls[call]
        return True
