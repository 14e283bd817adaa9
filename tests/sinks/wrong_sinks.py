"""Sinks that each break the contract in one way, and the expected complaints of the kit.

Each is a subclass of a correct sink, so the kit can find only the planted defect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from delta_prop_sinks import Backlog, RejectDelta, ResumePoint, TryAgain
from delta_prop_wire.delta import Dot, Head
from tests.sinks.correct_sinks import KNOWN_KINDS, Plain, Prompt, Store, Through

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta_prop_sinks import Delivery, SinkContext
    from delta_prop_wire.algebra import VectorState


# --- order


class ForgetsARow(Plain):
    def rows(self, delivery: Delivery) -> list[int]:
        return [row for row in super().rows(delivery) if row != 3]


class ReordersRows(Plain):
    def rows(self, delivery: Delivery) -> list[int]:
        return super().rows(delivery)[::-1]


class ReordersDeliveries(Plain):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries[::-1])


class IgnoresRows(Plain):
    """Applies all rows of a batch, also those for other sinks."""

    def rows(self, delivery: Delivery) -> list[int]:
        return list(range(delivery.batch.count))


class TakesTheFirstDeliveryOnly(Plain):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries[:1])


# --- duplicates


class FoldsDuplicates(Plain):
    def is_duplicate(self, state: VectorState, key: tuple[int, int, int]) -> bool:
        return False


class DetectsDuplicatesOfTheLastRowOnly(Plain):
    """Detects only duplicates of a vector's last row, and folds those of earlier rows again."""

    def is_duplicate(self, state: VectorState, key: tuple[int, int, int]) -> bool:
        return state.key == key


class RefoldsRowsAfterAFailure(Plain):
    """Detects duplicates by an offset that advances only after a fully successful call."""

    next_offset = 0

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            await anyio.lowlevel.checkpoint()
            self.take(delivery)
        self.next_offset = max(self.next_offset, *(delivery.next_offset for delivery in deliveries))

    def take_row(self, delivery: Delivery, row: int) -> None:
        if delivery.first_offset + row >= self.next_offset or delivery.redelivered:
            super().take_row(delivery, row)

    def is_duplicate(self, state: VectorState, key: tuple[int, int, int]) -> bool:
        return False


# --- resume


class DropsUnwrittenRowsWhenClosed(Store):
    async def flush(self) -> None:
        if not self.is_open:
            self.unwritten.clear()
        await super().flush()


class ResumesTooHigh(Store):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        point = await super().open(context)
        assert point is not None
        cursor = point.cursor._replace(next_offset=point.cursor.next_offset + 3)
        return ResumePoint(cursor, point.lamport)


class KeepsTheLastLamportNumber(Store):
    def note_lamport(self, lamport: int) -> None:
        self.lamport = lamport


# --- committed


class ReportsCommitsEarly(Store):
    """Reports applied rows as committed before they are written."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.context.committed(self.next_offset)


class ReportsCommitsBeyondDeliveries(Store):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.context.committed(deliveries[-1].next_offset + 1)


class WritesItsCursorFirst(Store):
    """Writes the cursor of a call at once, and the rows later."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        logged = deliveries[-1].logged
        self.target.next_offset = max(self.target.next_offset, logged.next_offset)
        self.target.lamport = max(self.target.lamport, logged.lamport + logged.count - 1)
        await super().apply(deliveries)


class CommitsItsCursorFirst(Prompt):
    """Writes the cursor, waits once, and writes the rows."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self.target.next_offset = self.cursor_after(delivery)
            self.target.lamport = max(self.target.lamport, delivery.logged.lamport + delivery.batch.count - 1)
        await super().apply(deliveries)


class CommitsPartsAsFullBatches(Prompt):
    """Moves its cursor to the end of a batch of which only a part was delivered."""

    def cursor_after(self, delivery: Delivery) -> int:
        return (
            self.next_offset if delivery.redelivered else max(self.next_offset, delivery.logged.next_offset)
        )


class TakesPartsForFullBatches(CommitsPartsAsFullBatches):
    """Moves its cursor like its base class but reports no offset, so only open() shows the wrong cursor."""

    def report(self) -> None:
        pass


class ForgetsTheRestOfABatch(Plain):
    """Detects duplicates by the end of the last batch, as if each batch were delivered in one part."""

    next_offset = 0

    def take(self, delivery: Delivery) -> None:
        if delivery.first_offset >= self.next_offset or delivery.redelivered or delivery.end is not None:
            super().take(delivery)

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.next_offset = max(self.next_offset, *(delivery.logged.next_offset for delivery in deliveries))


class ReturnsBeforeItHasWritten(Through):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await Store.apply(self, deliveries)


# --- failure


class RejectsTheNextOffset(Store):
    def reject(self, offset: int) -> None:
        raise RejectDelta(offset + 1, "of a later version")


class RejectsAnUnknownOffset(Store):
    def reject(self, offset: int) -> None:
        raise RejectDelta(offset + 1_000_000, "of a later version")


class RejectsWithoutThePrefix(Store):
    """Rejects a row before it has applied the rows before it."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            for row in self.rows(delivery):
                if delivery.batch.kinds[row] not in KNOWN_KINDS:
                    self.reject(delivery.first_offset + row)
        await super().apply(deliveries)


class ReportsTooMuchAsDone(Store):
    """After a failed flush, forgets the rows but reports them as done."""

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        earlier = dict(self.states)
        try:
            await super().apply(deliveries)
        except TryAgain as failure:
            self.states = earlier
            raise TryAgain(failure.reason, done_offset=deliveries[-1].next_offset) from failure


class ReportsAnUnknownDoneOffset(Store):
    async def flush_or_raise(self) -> None:
        try:
            await super().flush_or_raise()
        except TryAgain as failure:
            raise TryAgain(failure.reason, done_offset=self.next_offset + 1_000_000) from failure


class SwallowsAFailure(Store):
    async def flush(self) -> None:
        unwritten = dict(self.unwritten)
        try:
            await super().flush()
        except OSError:
            for ref in unwritten:
                self.unwritten.pop(ref, None)


class RaisesAForeignError(Store):
    async def flush_or_raise(self) -> None:
        await self.flush()


class RejectsWithAForeignError(Store):
    def reject(self, offset: int) -> None:
        raise KeyError("kind 40")


# --- cancellation


class LosesRowsOnCancellation(Store):
    async def flush(self) -> None:
        unwritten = dict(self.unwritten)
        try:
            await super().flush()
        except OSError:
            raise
        except BaseException:
            for ref in unwritten:
                self.unwritten.pop(ref, None)
            raise


class ReturnsWhenCancelled(Store):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        with anyio.CancelScope():
            try:
                await super().apply(deliveries)
            except anyio.get_cancelled_exc_class():
                return  # as if all were applied


# --- open


class StaysLockedWhenOpenFails(Store):
    """Takes a lock that only aclose releases."""

    async def open(self, context: SinkContext) -> ResumePoint | None:
        if self.target.users:
            raise RuntimeError("the target is locked")
        self.target.users += 1
        return await super().open(context)

    async def aclose(self) -> None:
        if self.is_open:
            self.target.users -= 1
        await super().aclose()

    def __del__(self) -> None:
        if self.is_open:
            self.target.users -= 1  # a killed process releases its locks


class OpensWithAForeignError(Store):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        await context.threads.run(lambda: None)
        return await super().open(context)


# --- background, backlog


class FailsInTheBackground(Store):
    async def background(self) -> None:
        while True:
            await anyio.sleep(0.5)
            await self.flush()


class HasAnUnboundedBacklog(Store):
    def backlog(self) -> Backlog:
        return Backlog(len(self.unwritten), 5)


class ReturnsItsBacklogAsACoroutine(Store):
    async def backlog(self) -> Backlog:  # type: ignore[override]
        return Backlog(0, 1)


# --- released and redelivered rows


class DropsRedeliveredRows(Plain):
    def take_row(self, delivery: Delivery, row: int) -> None:
        if not delivery.redelivered:
            super().take_row(delivery, row)


class DetectsDuplicatesByOneOffset(Store):
    def take_row(self, delivery: Delivery, row: int) -> None:
        if delivery.first_offset + row >= self.next_offset:
            super().take_row(delivery, row)


class FoldsRedeliveredDuplicates(Plain):
    def take_row(self, delivery: Delivery, row: int) -> None:
        self.is_redelivered = delivery.redelivered
        super().take_row(delivery, row)

    def is_duplicate(self, state: VectorState, key: tuple[int, int, int]) -> bool:
        return super().is_duplicate(state, key) and not self.is_redelivered


class MovesItsCursorBackForRedeliveredRows(Store):
    def advance_past(self, delivery: Delivery) -> None:
        self.next_offset = delivery.next_offset


class MovesItsCursorOnForRedeliveredRows(Prompt):
    def cursor_after(self, delivery: Delivery) -> int:
        return max(self.next_offset, delivery.next_offset)


class SkipsRowsAfterRedeliveredOnes(MovesItsCursorOnForRedeliveredRows):
    """Moves its cursor like its base class but reports no offset, so only open() shows the wrong cursor."""

    def report(self) -> None:
        pass


class GoesBackToRedeliveredRows(Prompt):
    """Moves its cursor back to the end of redelivered rows; reports no offset."""

    def cursor_after(self, delivery: Delivery) -> int:
        return (
            min(self.next_offset, delivery.next_offset)
            if delivery.redelivered
            else super().cursor_after(delivery)
        )

    def report(self) -> None:
        pass


class WritesRedeliveredRowsWithLaterOnes(Prompt):
    """Writes redelivered rows only together with the next rows that are not redelivered."""

    def write(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries[-1].redelivered:
            self.target.lamport = self.lamport
        else:
            super().write(deliveries)


# --- closing


class HangsWhenClosed(Store):
    async def aclose(self) -> None:
        await super().aclose()
        await anyio.sleep_forever()


class HangsWhenTheThreadFails(Store):
    async def aclose(self) -> None:
        while self.is_open:
            try:
                await super().aclose()
            except TryAgain:
                await anyio.sleep_forever()


class ClosesOnce(Plain):
    closed = False

    async def aclose(self) -> None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class FailsWhenTheThreadFails(Store):
    async def aclose(self) -> None:
        if self.is_open:
            await self.flush()
            self.is_open = False


class LeavesAFileOpen(Plain):
    async def open(self, context: SinkContext) -> ResumePoint | None:
        self.file = open(__file__, "rb")  # noqa: ASYNC230, SIM115 - left open on purpose
        return await super().open(context)

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()


# --- name, statistics, waits


class Nameless(Plain):
    name = ""


class CountsInADictionary(Plain):
    def statistics(self) -> Any:
        return {"calls": self.calls}


@dataclass
class _Mutable:
    calls: int = 0


class CountsInMutableNumbers(Plain):
    def statistics(self) -> Any:
        return _Mutable(self.calls)


@dataclass(frozen=True)
class _Shared:
    calls: list[int]


class CountsInSharedNumbers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shared = _Shared([0])

    def statistics(self) -> Any:
        self.shared.calls[0] = self.calls
        return self.shared

    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        await super().apply(deliveries)
        self.shared.calls[0] = self.calls


class FailsInStatistics(Plain):
    def statistics(self) -> Any:
        return self.missing_attribute  # type: ignore[attr-defined]


class CannotBeClosed(Plain):
    aclose = None  # type: ignore[assignment]


class HangsInsideAShield(Plain):
    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.Event().wait()


class HangsOnDeletes(Plain):
    async def apply(self, deliveries: Sequence[Delivery]) -> None:
        if any(delivery.batch.kinds_mask & 1 << 7 for delivery in deliveries):
            await anyio.sleep_forever()
        await super().apply(deliveries)


class MistakesAHead(Store):
    def head(self, namespace: str, vector_id: str) -> Head | None:
        head = super().head(namespace, vector_id)
        return None if head is None else Head(Dot(head.dot.origin, head.dot.counter - 1), head.alive)


class MissesADelete(Store):
    def head(self, namespace: str, vector_id: str) -> Head | None:
        head = super().head(namespace, vector_id)
        return None if head is None else Head(head.dot, alive=True)


WRONG: tuple[tuple[type[Plain], str, str], ...] = (
    (
        ForgetsARow,
        "order",
        "get('default', 'row-3') returned None, and the fold of its deltas is the vector [3.0, ",
    ),
    (ReordersRows, "order", "get('default', 'row-0') returned the vector [0.0, 3.0, 2.0, 3.0]"),
    (
        ReordersDeliveries,
        "order",
        "after the first two deliveries, get('default', 'row-0') returned a tombstone",
    ),
    (
        IgnoresRows,
        "order",
        "after deliveries of which some rows were for other sinks, get('default', 'part-",
    ),
    (TakesTheFirstDeliveryOnly, "order", "after the first two deliveries, get('default', 'row-"),
    (FoldsDuplicates, "redelivery", "was redelivered"),
    (
        DetectsDuplicatesOfTheLastRowOnly,
        "redelivery",
        "after the last delivery was redelivered, get('default', 'row-",
    ),
    (
        RefoldsRowsAfterAFailure,
        "cancellation",
        "after an apply() that was cancelled at its wait 3 was repeated",
    ),
    (
        DropsUnwrittenRowsWhenClosed,
        "resume",
        "after a restart from the sink's cursor 51, get(",
    ),
    (ResumesTooHigh, "resume", ":1:3, but only rows below 0 were delivered"),
    (
        KeepsTheLastLamportNumber,
        "resume",
        "returned the Lamport number 30, but below its cursor, 51, is a row",
    ),
    (ReportsCommitsEarly, "committed", ", after committed("),
    (
        ReportsCommitsBeyondDeliveries,
        "committed",
        "the sink reported committed(15), but only rows below 14 were delivered",
    ),
    (
        WritesItsCursorFirst,
        "committed",
        "after a crash after background work and apply(), from the sink's cursor ",
    ),
    (CommitsItsCursorFirst, "committed", "after a crash at wait 1 of apply(), from the sink's cursor "),
    (CommitsPartsAsFullBatches, "committed", " but only rows below "),
    (
        TakesPartsForFullBatches,
        "resume",
        "open() after the first part of a batch and a restart returned the cursor ",
    ),
    (
        ForgetsTheRestOfABatch,
        "order",
        "after the first part of a batch, after the rest was delivered, get('default', 'cut-",
    ),
    (ReturnsBeforeItHasWritten, "resume", "failed in aclose(), and a restart, get("),
    (
        RejectsTheNextOffset,
        "failure",
        "a scale, of which it had applied others; the delta that may not fit is next to it",
    ),
    (RejectsAnUnknownOffset, "failure", "which is not a delivered row"),
    (RejectsWithoutThePrefix, "failure", "after deltas of a wrong dimension and of an unknown kind, get("),
    (
        ReportsTooMuchAsDone,
        "failure",
        "after call 1 of the thread port failed and apply() was repeated, get(",
    ),
    (ReportsAnUnknownDoneOffset, "failure", "apply() raised TryAgain with done_offset 1000"),
    (SwallowsAFailure, "failure", "after failures of the thread port and a restart, get("),
    (RaisesAForeignError, "failure", "apply() raised OSError(5, "),
    (RejectsWithAForeignError, "failure", "apply() raised KeyError('kind 40')"),
    (LosesRowsOnCancellation, "cancellation", "and a restart, get('default', 'behind-2-"),
    (ReturnsWhenCancelled, "cancellation", "after an apply() that was cancelled at its wait 0 was repeated"),
    (StaysLockedWhenOpenFails, "open", "cancelled at wait 1, raised RuntimeError('the target is locked')"),
    (OpensWithAForeignError, "open", "open(), while the thread port failed, raised OSError(5, "),
    (FailsInTheBackground, "background", "background() raised OSError(5, "),
    (HasAnUnboundedBacklog, "backlog", "rows of at most 5"),
    (ReturnsItsBacklogAsACoroutine, "backlog", "backlog() returned <coroutine object"),
    (
        DropsRedeliveredRows,
        "released",
        "after one row was released from quarantine, get('default', 'late-0') returned the vector [0.0",
    ),
    (DetectsDuplicatesByOneOffset, "released", "released from quarantine, get('default', 'fit-2')"),
    (
        FoldsRedeliveredDuplicates,
        "released",
        "after released rows were redelivered, get('default', 'late-",
    ),
    (
        MovesItsCursorBackForRedeliveredRows,
        "committed",
        "open() directly after released rows returned the cursor",
    ),
    (MovesItsCursorOnForRedeliveredRows, "committed", " but only rows below "),
    (
        SkipsRowsAfterRedeliveredOnes,
        "resume",
        "open() after the first part of a batch and a redelivered row of it and a ",
    ),
    (
        GoesBackToRedeliveredRows,
        "resume",
        "open() after a crash after the other redelivered rows returned the cursor ",
    ),
    (
        WritesRedeliveredRowsWithLaterOnes,
        "released",
        "after released rows and a restart, get('default', 'block-",
    ),
    (HangsWhenClosed, "close", "aclose() had not ended after 5 s"),
    (
        HangsWhenTheThreadFails,
        "close",
        "aclose(), while call 1 of the thread port failed, had not ended after",
    ),
    (ClosesOnce, "close", "aclose() for a second time raised RuntimeError('closed twice')"),
    (
        FailsWhenTheThreadFails,
        "close",
        "aclose(), while call 1 of the thread port failed, raised OSError(5, ",
    ),
    (LeavesAFileOpen, "close", "aclose() left the open file "),
    (Nameless, "name", "name is ''"),
    (CountsInADictionary, "name", "statistics() returned a dict, which is not a frozen dataclass"),
    (CountsInMutableNumbers, "name", "statistics() can be changed: make the dataclass frozen"),
    (CountsInSharedNumbers, "name", "a statistics() snapshot from before the first delivery has changed"),
    (FailsInStatistics, "name", "statistics() raised AttributeError("),
    (CannotBeClosed, "close", "make() gave a CannotBeClosed, which has no aclose()"),
    (HangsOnDeletes, "deadline", "apply() had not ended after 5 s"),
    (MistakesAHead, "vectors", "but the last dot is 9000000000000012:14"),
    (MissesADelete, "vectors", ", which deletes it"),
)
"""Each wrong sink, the rule that it breaks, and a part of the expected complaint."""
