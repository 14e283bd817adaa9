"""The way in: what a program calls to publish, with the waiting for room around it.

One half of the propagator; `embedded.py` is the other one, and owns what this half uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

from delta_prop.checks import (
    Cause,
    check_timeout,
    is_transform,
    with_parents,
)
from delta_prop.ingest.work import Draft, MatrixDraft
from delta_prop.line import Line, waits
from delta_prop.merged import columns_draft, draft_in_shape, may_be_joined, may_be_merged
from delta_prop.orphans import checked
from delta_prop.producer import Producer
from delta_prop.receipt import Published, Receipt, State
from delta_prop.refusals import late
from delta_prop.transforms import Transforms
from delta_prop.world import this_thread
from delta_prop_wire.bounds import check_level
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from delta_prop.config import Settings
    from delta_prop.gathering import Gathering
    from delta_prop.merged import Call
    from delta_prop.pipeline import Chain
    from delta_prop.ports import World
    from delta_prop.turns import Turn
    from delta_prop_broker.log.durable import DurableLog
    from delta_prop_broker.log.memory import MemoryLog
    from delta_prop_sinks.sink import Sink

Named: TypeAlias = Receipt | Cause
"""What `after=` takes: a receipt, an acknowledgement, a dot, a 16-byte id."""

_PASSING_CODES = {ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
"""Refusals that `publish` waits out, beside those for which it stands in line."""
_GIVE_WAY_S = 0.0005
_NO_RECEIPT = Receipt()


class Publishing:
    """What publishes. `Propagator` sets the attributes and has the methods named here."""

    settings: Settings
    _world: World
    _log: MemoryLog | DurableLog
    _chain: Chain
    _turn: Turn
    _gathering: Gathering

    def __init__(self) -> None:
        self._transforms = Transforms()
        self._line = Line()
        self._yielded_at = 0.0
        self._open_on = 0
        """The thread of the event loop, for as long as it is open; else 0."""
        self._closing = False

    async def wait_visible(
        self,
        published: Published | Receipt | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks have applied a delta."""
        raise NotImplementedError

    def sink(self, name: str) -> Sink:
        """The attached sink of that name."""
        raise NotImplementedError

    # --- what programs call

    def offer(
        self, *deltas: Delta, after: Sequence[Named] = (), ack_level: AckLevel | str | None = None
    ) -> Receipt:
        """Send deltas down the chain; never waits. The receipt tells what became of them.

        All deltas of one call have one priority and share one fate. What one turn of the event loop offers
        one by one goes as one batch, as far as nothing stands in its way. Raises InvalidDelta.
        """
        draft = self._draft(deltas, after, ack_level)
        if len(deltas) == 1 and not after and may_be_joined(deltas[0]):
            self._gathering.offer(draft)
            return draft.receipt
        return self._send(draft)

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[Named] = (),
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Send deltas and wait for the acknowledgement, through a full queue or log too, in order.

        Raises Refused; where the cause might have passed, after `timeout_s`. What raises has not happened,
        unless the code is OUTCOME_UNKNOWN: `timeout_s` passed while the delta had its place in a log that had
        failed, and `outcome` tells of the dot in `details` once the log is recovered.
        Cancelled by a scope of anyio's, it never happens unseen while the log works: either it has not
        happened, or the acknowledgement is returned. Who cancels past anyio (`asyncio.wait_for`,
        `task.cancel()`) once the delta has its place gets the cancellation although it has happened, or will.
        Use `timeout_s`, or `offer`, whose receipt tells always.
        """
        self._check_open()
        if timeout_s is not None:
            check_timeout(timeout_s)
        if len(deltas) == 1 and not after and may_be_merged(deltas[0]):
            call = Draft(deltas, Receipt(), deltas[0].priority, self._level(ack_level))
            return await self._call(call, lambda: self._draft(deltas, (), ack_level), timeout_s)
        if any(map(is_transform, deltas)):
            return await self._publish_transform(deltas, after, ack_level, timeout_s)
        priority = deltas[0].priority if deltas else Priority.NORMAL
        return await self._put(lambda: self._draft(deltas, after, ack_level), priority, timeout_s)

    async def publish_many(
        self,
        ids: Sequence[str],
        matrix: ArrayLike,
        *,
        indices: ArrayLike | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        kind: Kind | None = None,
        priority: Priority = Priority.NORMAL,
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> Published:
        """Publish as columns: row i of `matrix` (n × dimension) is the vector `ids[i]`, or with `indices`
        (n × as many) what elements `indices[i]` of that vector become.

        `kind` is CREATE (as where it is not given) or DENSE; with indices SPARSE (likewise) or SPARSE_ADD.
        Raises as `publish` does.
        """
        self._check_open()
        if timeout_s is not None:
            check_timeout(timeout_s)
        level = self._level(ack_level)
        if kind is None:
            kind = Kind.CREATE if indices is None else Kind.SPARSE

        def make() -> MatrixDraft:
            return columns_draft(
                ids, matrix, indices, namespace=namespace, kind=kind, priority=priority, ack_level=level
            )

        call = draft_in_shape(
            ids, matrix, indices, namespace=namespace, kind=kind, priority=priority, ack_level=level
        )
        return await self._call(call or make(), make, timeout_s)

    def producer(
        self, name: str, *, ack_level: AckLevel | str | None = None, source: Source = Source.LOCAL
    ) -> Producer:
        """A handle with dots of its own; whoever held the name before is fenced. Raises Refused."""
        self._check_open()
        level = self._level(ack_level)
        return Producer(
            name,
            self._chain,
            now=self._now,
            ack_level=level,
            source=source,
            send_before=self._gathering.send,
        )

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Let deltas apply `function` to a vector, as `transform(name)`; it is read from the sink `reads`.

        It is called in a thread, one call at a time; with `nonblocking`, by the event loop.
        """
        self._transforms.register(name, function, reads, nonblocking=nonblocking)

    # --- inside

    def _now(self) -> float:
        return self._world.clock.now()

    def _level(self, asked: AckLevel | str | None) -> AckLevel:
        if type(asked) is AckLevel:
            return asked
        return self._log.level if asked is None else check_level(asked)

    def _check_open(self) -> None:
        if this_thread() == self._open_on:  # one comparison, as every call asks
            return
        if self._closing:
            raise Refused(
                ErrorCode.SHUTTING_DOWN,
                "the propagator is closing: publish before the `async with` ends, or in the next one",
                retry_after_ms=1000,
            )
        if not self._open_on:
            raise UsageError("the propagator is not open: use it inside `async with Propagator() as p:`")
        raise UsageError(
            "the propagator was called from another thread than that of its event loop: use SyncPropagator, "
            "or anyio.from_thread.run(p.publish, delta) in a thread that anyio started"
        )

    def _draft(
        self, deltas: Sequence[Delta], after: Sequence[Named], ack_level: AckLevel | str | None
    ) -> Draft:
        self._check_open()
        checked(deltas, self._chain.note_refused)
        deltas = with_parents(deltas, [one for one in after if not isinstance(one, Receipt)])
        return Draft(
            deltas=deltas,
            receipt=Receipt(),
            priority=deltas[0].priority,
            ack_level=self._level(ack_level),
            source=deltas[0].source,
            after=tuple(one for one in after if isinstance(one, Receipt)),
        )

    def _send(self, draft: Draft | MatrixDraft) -> Receipt:
        self._check_open()
        self._gathering.send()
        return self._chain.offer(draft, self._now())

    async def _call(self, call: Call, make: Callable[[], Call], timeout_s: float | None) -> Published:
        """Publish what says no more than numbers: together with others' calls, or at once; then as `_put`."""
        if self._line.waited_for(call.priority):
            return await self._put(make, call.priority, timeout_s)
        receipt, gathering, now = call.receipt, self._gathering, self._now()
        gathering.callers += 1
        try:
            if gathering.wants(now):
                await receipt.wait_for(gathering.add(call))
            else:
                gathering.send_now(call, now)
                if now - gathering.turn_began >= _GIVE_WAY_S:
                    await anyio.lowlevel.cancel_shielded_checkpoint()  # see `_give_way`
            if receipt.state is State.ACKNOWLEDGED:
                return receipt.result()
            return await self._put(make, call.priority, timeout_s, receipt)
        finally:
            gathering.callers -= 1

    async def _put(
        self,
        make: Callable[[], Draft | MatrixDraft],
        priority: Priority,
        timeout_s: float | None,
        receipt: Receipt = _NO_RECEIPT,
    ) -> Published:
        """Offer; while there is no room, or the log has failed, wait in line and offer again.

        `receipt`: of the first offer, where that was made.
        """

        def send() -> Receipt:
            nonlocal receipt
            receipt = self._send(make())
            return receipt

        if receipt is _NO_RECEIPT and not self._line.waited_for(priority):
            with self._turn:
                send()
                self._turn.press()
            await self._give_way()
        if receipt.done and not _may_pass(receipt):
            return receipt.result()
        limit = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        with anyio.move_on_after(limit):
            while True:
                if receipt is _NO_RECEIPT or waits(receipt.refusal()):
                    await self._line.until_room(send, priority)
                try:
                    return await receipt.wait()
                except Refused as refused:
                    if refused.code in (ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED):
                        await anyio.sleep((refused.retry_after_ms or 10) / 1000)
                        send()
                    elif not waits(refused):
                        raise
        if not receipt.done:
            raise late(limit, receipt.place)
        raise receipt.refusal() or self._log.full(1, 0) or late(limit, None)

    async def _give_way(self) -> None:
        """Let the sinks' tasks run now and then, or a busy publisher would starve them.

        Shielded: a cancelled caller must not take what has happened for what has not.
        """
        now = self._now()
        if now - self._yielded_at >= _GIVE_WAY_S:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._yielded_at = self._now()

    async def _publish_transform(
        self,
        deltas: Sequence[Delta],
        after: Sequence[Named],
        ack_level: AckLevel | str | None,
        timeout_s: float | None,
    ) -> Published:
        if len(deltas) != 1:
            raise UsageError("a transform reads before it writes: publish it alone")

        async def publish(resolved: Delta) -> Published:
            return await self._put(
                lambda: self._draft([resolved], after, ack_level), resolved.priority, timeout_s
            )

        async def catch_up(name: str) -> None:
            await self.wait_visible(self._log.visible, sinks=[name], timeout_s=timeout_s)

        return await self._transforms.publish(
            deltas[0],
            reader=self.sink,
            catch_up=catch_up,
            publish=publish,
            threads=self._world.new_threads(),
        )


def _may_pass(receipt: Receipt) -> bool:
    refusal = receipt.refusal()
    return refusal is not None and (refusal.code in _PASSING_CODES or waits(refusal))
