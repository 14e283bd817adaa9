"""Record accumulator: the calls of `publish` and `offer` in one event loop tick become one draft.

A draft costs the pipeline some ten µs whatever its size, and the log a frame; deltas published one by one
would mostly pay for that. A single caller does not wait for others. Each call has its own receipt and
outcome: a coalesced draft that exceeds the capacity or is refused is halved, down to single calls.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from delta_prop.calls.receipt import OfferState
from delta_prop.partition.coalesced_draft import ROWS_MAX, check_call, coalesce, group_calls
from delta_prop.platform.one_shot import one_shot_factory
from delta_prop.platform.tick_callbacks import Wakeup
from delta_prop_wire.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop.partition.coalesced_draft import Call
    from delta_prop.partition.ingest.work import Draft
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.one_shot import OneShot


SINGLE_CALLER_S = 0.002
"""Seconds for which calls are sent at once after a tick with a single caller, however close together."""


class RecordAccumulator:
    """Collects the calls of this tick, and sends them at its end; `run` does if the world cannot."""

    def __init__(self, partition: Partition) -> None:
        self._pipeline = partition.pipeline
        self._tick_callbacks = partition.tick_callbacks
        self._now = partition.world.clock.now
        self._call_soon = partition.world.call_soon
        # Calls to send at the end of the tick, each with the one-shot that wakes its caller, if it waits.
        self._calls: dict[Call, OneShot | None] = {}
        self._make_one_shot = one_shot_factory()
        self._wakeup = Wakeup()
        self.caller_count = 0
        """Number of callers whose call has not returned; each counts itself."""
        self._has_sent = False  # True once a call was sent at once in this tick
        self._is_scheduled = False  # True if `_end_tick` is due at the end of this tick
        self.tick_began = -math.inf
        """Time of the first call in the latest tick with calls; other tasks have run since its end."""
        self._single_until = -math.inf  # until then, calls are sent at once

    def should_wait(self, now: float) -> bool:
        """True if a call is to be coalesced, since others wait or have called in this tick."""
        return self.caller_count > 1 or (self._has_sent and now >= self._single_until)

    def add(self, call: Call) -> OneShot:
        """Add a call to the draft; the returned one-shot wakes its caller once it has been sent."""
        one_shot = self._make_one_shot()
        self._add(call, one_shot, self._now())
        return one_shot

    def offer(self, call: Draft) -> None:
        """Send a call whose caller does not wait: the first of a tick at once, the others together."""
        now = self._now()
        if not self._has_sent:
            self.send_now(call, now)
            return
        self._add(call, None, now)
        if len(self._calls) >= ROWS_MAX:
            self.send()

    def _add(self, call: Call, one_shot: OneShot | None, now: float) -> None:
        if not self._calls:
            self._schedule_end_of_tick(now)
        self._calls[call] = one_shot
        call.receipt.mark_waiting(OfferState.QUEUED, partial(self._withdraw, call))

    async def run(self) -> None:
        """Send at each tick, until cancelled."""
        while True:
            await self._wakeup.wait()
            self._end_tick()

    def _schedule_end_of_tick(self, now: float) -> None:
        if not self._is_scheduled:
            self._is_scheduled, self.tick_began = True, now
            if self._call_soon is None:
                self._wakeup.notify()
            else:
                self._call_soon(self._end_tick)

    def _end_tick(self) -> None:
        self._is_scheduled = self._has_sent = False
        if len(self._calls) == 1 and self.caller_count == 1:
            self._single_until = self._now() + SINGLE_CALLER_S
        self.send()

    def send_now(self, call: Call, now: float) -> None:
        """Send a call that need not wait for others."""
        self.send()
        self._has_sent = True
        self._schedule_end_of_tick(now)
        with self._tick_callbacks:
            self._send_coalesced([call], now)
            self._tick_callbacks.flush_now()

    def send(self) -> None:
        """Send the coalesced calls, in order. Work that must come after them calls this first."""
        calls, self._calls = self._calls, {}
        if not calls:
            return
        now = self._now()
        with self._tick_callbacks:
            for group in group_calls(calls):
                self._send_coalesced(group, now)
            self._tick_callbacks.flush_now()
        for one_shot in calls.values():
            if one_shot is not None and not one_shot.done():
                one_shot.set_result(None)

    def _send_coalesced(self, calls: Sequence[Call], now: float) -> None:
        """Send calls as one draft; if refused, halve it, so that an invalid call separates few others."""
        pipeline = self._pipeline
        if pipeline.offer_coalesced(coalesce(calls), now):
            return
        if len(calls) > 1 and pipeline.can_take_coalesced:
            middle = len(calls) // 2
            self._send_coalesced(calls[:middle], now)
            self._send_coalesced(calls[middle:], now)
        else:
            for call in calls:
                self._send_single(call, now)

    def _send_single(self, call: Call, now: float) -> None:
        try:
            check_call(call)
        except Refused as refusal:
            call.receipt.refuse(refusal)
            return
        self._pipeline.offer(call, now)

    def _withdraw(self, call: Call) -> bool:
        """Remove a call that was not sent yet, which then has no effect."""
        if call not in self._calls:
            return False
        del self._calls[call]
        return True
