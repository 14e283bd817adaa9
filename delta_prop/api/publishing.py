"""Publishing calls of the propagator, with the waiting for capacity around them.

One half of the propagator; `propagator.py` is the other, and owns what this half uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

from delta_prop.api.producer import Producer
from delta_prop.api.transforms import Transforms
from delta_prop.calls.argument_checks import (
    Dependency,
    check_timeout,
    is_transform,
    with_parents,
)
from delta_prop.calls.receipt import OfferState, PublishAck, Receipt
from delta_prop.calls.refusals import timed_out
from delta_prop.partition.admission_queue import can_wait_out
from delta_prop.partition.coalesced_draft import (
    can_coalesce,
    can_share_batch,
    draft_from_arrays,
    draft_from_columns,
)
from delta_prop.partition.ingest.work import Draft, MatrixDraft
from delta_prop.partition.order.orphans import check_and_note
from delta_prop.platform.world import this_thread
from delta_prop_wire.bounds import check_ack_level
from delta_prop_wire.delta import DEFAULT_NAMESPACE, AckLevel, Delta, Kind, Priority, Source
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from delta_prop.api.record_accumulator import RecordAccumulator
    from delta_prop.api.settings import Settings
    from delta_prop.partition.coalesced_draft import Call
    from delta_prop.partition.partition import Partition
    from delta_prop.platform.ports import World
    from delta_prop_sinks.sink import Sink

AfterItem: TypeAlias = Receipt | Dependency
"""Item of `after=`: a receipt, an acknowledgement, a dot, a 16-byte id."""

_RETRYABLE_CODES = {ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED}
"""Codes of refusals after which `publish` sleeps and retries, without a turn in the admission queue."""
_YIELD_S = 0.0005
"""Time after which a busy publisher yields to the sinks' tasks."""
_NO_RECEIPT = Receipt()


class PublishMixin:
    """The publishing half of `Propagator`, which sets the attributes and overrides the methods named here."""

    settings: Settings
    _world: World
    _partition: Partition
    _accumulator: RecordAccumulator

    def __init__(self) -> None:
        self._transforms = Transforms()
        self._yielded_at = 0.0
        self._open_on = 0
        """Thread id of the event loop while the propagator is open; else 0."""
        self._is_closing = False

    async def wait_visible(
        self,
        published: PublishAck | Receipt | int,
        *,
        sinks: Iterable[str] | None = None,
        committed: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Wait until these sinks have applied a delta."""
        raise NotImplementedError

    def sink(self, name: str) -> Sink:
        """Return the attached sink of that name."""
        raise NotImplementedError

    # --- public calls

    def offer(
        self, *deltas: Delta, after: Sequence[AfterItem] = (), ack_level: AckLevel | str | None = None
    ) -> Receipt:
        """Send deltas into the pipeline; never waits. The receipt gets the outcome.

        All deltas of one call have one priority and one outcome. Single offers within one tick of the event
        loop go as one batch, if nothing prevents it. Raises InvalidDelta, UsageError, and Refused
        (SHUTTING_DOWN) while closing; the receipt gets any other refusal.
        """
        draft = self._make_draft(deltas, after, ack_level)
        if len(deltas) == 1 and not after and can_share_batch(deltas[0]):
            self._accumulator.offer(draft)
            return draft.receipt
        return self._send(draft)

    async def publish(
        self,
        *deltas: Delta,
        after: Sequence[AfterItem] = (),
        ack_level: AckLevel | str | None = None,
        timeout_s: float | None = None,
    ) -> PublishAck:
        """Send deltas and wait for the acknowledgement.

        While the queue or the log is full, calls of one priority wait in their order. Raises Refused; for a
        retryable cause, after `timeout_s`. A publish that raises had no effect, unless the code is
        OUTCOME_UNKNOWN. Then `timeout_s` passed while the delta was in a log that had failed; `outcome`
        returns the result of the dot in `details` once the log is recovered. If an anyio scope cancels it and
        the log has not failed, either it had no effect, or the acknowledgement is returned. A cancellation
        without a scope (`asyncio.wait_for`, `task.cancel()`) is raised even if the delta was appended and
        takes effect. Use `timeout_s`, or `offer`, whose receipt always gets the outcome.
        """
        self._check_open()
        if timeout_s is not None:
            check_timeout(timeout_s)
        if len(deltas) == 1 and not after and can_coalesce(deltas[0]):
            call = Draft(deltas, Receipt(), deltas[0].priority, self._resolve_level(ack_level))
            return await self._publish_call(call, lambda: self._make_draft(deltas, (), ack_level), timeout_s)
        if any(map(is_transform, deltas)):
            return await self._publish_transform(deltas, after, ack_level, timeout_s)
        priority = deltas[0].priority if deltas else Priority.NORMAL
        return await self._offer_until_done(
            lambda: self._make_draft(deltas, after, ack_level), priority, timeout_s
        )

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
    ) -> PublishAck:
        """Publish columns: row i of `matrix` is the vector `ids[i]`; with `indices`, which has the shape of
        `matrix`, row i holds new values for the elements `indices[i]` of that vector.

        `kind` is CREATE (default) or DENSE; with indices SPARSE (default) or SPARSE_ADD. Raises as `publish`
        does.
        """
        self._check_open()
        if timeout_s is not None:
            check_timeout(timeout_s)
        level = self._resolve_level(ack_level)
        if kind is None:
            kind = Kind.CREATE if indices is None else Kind.SPARSE

        def make_draft() -> MatrixDraft:
            return draft_from_columns(
                ids, matrix, indices, namespace=namespace, kind=kind, priority=priority, ack_level=level
            )

        call = draft_from_arrays(
            ids, matrix, indices, namespace=namespace, kind=kind, priority=priority, ack_level=level
        )
        return await self._publish_call(call or make_draft(), make_draft, timeout_s)

    def producer(
        self, name: str, *, ack_level: AckLevel | str | None = None, source: Source = Source.LOCAL
    ) -> Producer:
        """Return a handle with dots of its own; the former holder of the name is fenced. Raises Refused."""
        self._check_open()
        level, pipeline = self._resolve_level(ack_level), self._partition.pipeline

        def check_open() -> None:
            self._check_open()
            if self._partition.pipeline is not pipeline:
                raise UsageError(
                    f"producer {name!r} is of an earlier `async with` of this propagator: create it again"
                )

        return Producer(
            name,
            pipeline,
            now=self._now,
            ack_level=level,
            source=source,
            check_open=check_open,
            flush_earlier=self._accumulator.send,
        )

    def register_transform(
        self,
        name: str,
        function: Callable[[NDArray[np.float32]], ArrayLike],
        *,
        reads: str,
        nonblocking: bool = False,
    ) -> None:
        """Register `function` as `transform(name)` of a vector, which is read from the sink `reads`.

        The function is called in a thread, one call at a time; with `nonblocking`, by the event loop.
        """
        self._transforms.register(name, function, reads, nonblocking=nonblocking)

    # --- internals

    def _now(self) -> float:
        return self._world.clock.now()

    def _resolve_level(self, requested: AckLevel | str | None) -> AckLevel:
        if type(requested) is AckLevel:
            return requested
        return self._partition.log.ack_level if requested is None else check_ack_level(requested)

    def _check_open(self) -> None:
        if this_thread() == self._open_on:  # one comparison, since every call makes this check
            return
        if self._is_closing:
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

    def _make_draft(
        self, deltas: Sequence[Delta], after: Sequence[AfterItem], ack_level: AckLevel | str | None
    ) -> Draft:
        self._check_open()
        check_and_note(deltas, self._partition.pipeline.note_refused)
        deltas = with_parents(deltas, [parent for parent in after if not isinstance(parent, Receipt)])
        return Draft(
            deltas=deltas,
            receipt=Receipt(),
            priority=deltas[0].priority,
            ack_level=self._resolve_level(ack_level),
            source=deltas[0].source,
            after=tuple(parent for parent in after if isinstance(parent, Receipt)),
        )

    def _send(self, draft: Draft | MatrixDraft) -> Receipt:
        self._check_open()
        self._accumulator.send()
        return self._partition.pipeline.offer(draft, self._now())

    async def _publish_call(
        self, call: Call, make_draft: Callable[[], Call], timeout_s: float | None
    ) -> PublishAck:
        """Publish a call of numbers only, coalesced or at once; then wait as `_offer_until_done` does."""
        if self._partition.admission_queue.has_waiters(call.priority):
            return await self._offer_until_done(make_draft, call.priority, timeout_s)
        receipt, accumulator, now = call.receipt, self._accumulator, self._now()
        accumulator.caller_count += 1
        try:
            if accumulator.should_wait(now):
                await receipt.wait_for(accumulator.add(call))
            else:
                accumulator.send_now(call, now)
                if now - accumulator.tick_began >= _YIELD_S:
                    await anyio.lowlevel.cancel_shielded_checkpoint()  # see `_yield_to_sinks`
            if receipt.state is OfferState.ACKNOWLEDGED:
                return receipt.result()
            return await self._offer_until_done(make_draft, call.priority, timeout_s, receipt)
        finally:
            accumulator.caller_count -= 1

    async def _offer_until_done(
        self,
        make_draft: Callable[[], Draft | MatrixDraft],
        priority: Priority,
        timeout_s: float | None,
        receipt: Receipt = _NO_RECEIPT,
    ) -> PublishAck:
        """Offer; while there is no capacity, or the log has failed, queue and offer again.

        `receipt`: the receipt of the first offer, if that was made.
        """

        def send() -> Receipt:
            nonlocal receipt
            receipt = self._send(make_draft())
            return receipt

        if receipt is _NO_RECEIPT and not self._partition.admission_queue.has_waiters(priority):
            with self._partition.tick_callbacks:
                send()
                self._partition.tick_callbacks.flush_now()
            await self._yield_to_sinks()
        if receipt.done and not _can_retry(receipt):
            return receipt.result()
        limit_s = self.settings.publish_timeout_s if timeout_s is None else timeout_s
        with anyio.move_on_after(limit_s):
            while True:
                if receipt is _NO_RECEIPT or can_wait_out(receipt.refusal()):
                    await self._partition.admission_queue.send_when_admitted(send, priority)
                try:
                    return await receipt.wait()
                except Refused as refused:
                    if refused.code in (ErrorCode.PENDING_FULL, ErrorCode.RATE_LIMITED):
                        await anyio.sleep((refused.retry_after_ms or 10) / 1000)
                        send()
                    elif not can_wait_out(refused):
                        raise
        if not receipt.done:
            raise timed_out(limit_s, receipt.place)
        raise receipt.refusal() or self._partition.log.capacity_refusal(1, 0) or timed_out(limit_s, None)

    async def _yield_to_sinks(self) -> None:
        """Yield to the sinks' tasks now and then, or a busy publisher would starve them.

        Shielded: a cancelled caller must not mistake an appended delta for one that is not.
        """
        now = self._now()
        if now - self._yielded_at >= _YIELD_S:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            self._yielded_at = self._now()

    async def _publish_transform(
        self,
        deltas: Sequence[Delta],
        after: Sequence[AfterItem],
        ack_level: AckLevel | str | None,
        timeout_s: float | None,
    ) -> PublishAck:
        if len(deltas) != 1:
            raise UsageError("a transform reads before it writes: publish it alone")

        async def publish(resolved: Delta) -> PublishAck:
            return await self._offer_until_done(
                lambda: self._make_draft([resolved], after, ack_level), resolved.priority, timeout_s
            )

        async def catch_up(name: str) -> None:
            await self.wait_visible(self._partition.log.high_watermark, sinks=[name], timeout_s=timeout_s)

        return await self._transforms.publish(
            deltas[0],
            find_sink=self.sink,
            catch_up=catch_up,
            publish=publish,
            threads=self._world.new_threads(),
        )


def _can_retry(receipt: Receipt) -> bool:
    refusal = receipt.refusal()
    return refusal is not None and (refusal.code in _RETRYABLE_CODES or can_wait_out(refusal))
