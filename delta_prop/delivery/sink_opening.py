"""Opens a sink: compares what it holds with the log, and finds where it continues, or that it is rebuilt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Literal, TypeAlias

from delta_prop.calls.refusals import ForeignSinkData
from delta_prop.delivery.reasons import cannot_be_rebuilt
from delta_prop.delivery.rebuild import has_snapshot
from delta_prop.delivery.status import SavedCursor
from delta_prop_broker.log.contract import Log
from delta_prop_sinks.sink import ResumePoint, Sink, SinkContext
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import DeltaPropError, Refused, UsageError
from delta_prop_wire.spec import ErrorCode

Start: TypeAlias = Literal["resume", "earliest", "latest"] | int
"""Position at which a sink starts: its cursor, the log start offset, the high watermark, or an offset."""

logger = logging.getLogger("delta_prop")


@dataclass(frozen=True, slots=True)
class OpenedSink:
    """An open sink: the offset at which it continues, and what it holds.

    `has_own_cursor`: True if it stores its cursor with its data; `reported`: the offset that it reported as
    durable. `lamport`: the highest Lamport number that it holds. `has_foreign_data`: True if it holds deltas
    of an earlier log. `rebuild_reason`: why it must be rebuilt before any delivery; None if it need not.
    """

    start: int
    has_own_cursor: bool
    reported: int = 0
    lamport: int = 0
    has_foreign_data: bool = False
    rebuild_reason: str | None = None


class SinkOpening:
    """Opens one sink. `can_rebuild`: True if it can be rebuilt, should its data be incomplete."""

    def __init__(self, name: str, sink: Sink, context: SinkContext, log: Log, *, can_rebuild: bool) -> None:
        self._name = name
        self._sink = sink
        self._context = context
        self._log = log
        self._can_rebuild = can_rebuild

    async def open(self, start: Start, saved: SavedCursor, *, forced: bool = False) -> OpenedSink:
        """Open the sink; return what it holds, and where it continues.

        `saved` is the stored cursor of this name. A sink that can be rebuilt is rebuilt if its data is
        incomplete, or if the log has removed its next deltas. `forced`: True if it is rebuilt whatever it
        holds. Raises Refused, what the sink raises.
        """
        opening = self._sink.open(self._context)
        if not isawaitable(opening):
            raise UsageError(f"sink {self._name!r}: open() is a plain function: define it as async")
        resume = await opening
        try:
            if resume is not None and not isinstance(resume, ResumePoint):
                raise UsageError(
                    f"sink {self._name!r}: open() gave {resume!r:.80}, not a ResumePoint or None"
                )
            reason = await self._find_rebuild_reason(saved, resume, forced=forced)
            if reason is not None:
                await self._check_rebuildable(reason)
                return OpenedSink(self._log.start_offset, resume is not None, rebuild_reason=reason)
            return await self._resume(start, saved, resume)
        except (DeltaPropError, OSError):  # reading the snapshot may raise OSError
            await self._sink.aclose()
            raise

    async def _find_rebuild_reason(
        self, saved: SavedCursor, resume: ResumePoint | None, *, forced: bool
    ) -> str | None:
        """Return why the sink must be rebuilt, whatever its cursor; None if it need not."""
        if forced:
            return "its owner asked for it"
        if saved.rebuilding or (resume is not None and resume.rebuilding):
            return "an earlier rebuild was interrupted"
        if saved.rebuild_asked and await self._is_rebuildable():
            return "an operator asked for it"
        return None

    async def _resume(self, start: Start, saved: SavedCursor, resume: ResumePoint | None) -> OpenedSink:
        """Find where a sink continues that holds complete data."""
        log = self._log
        reached, reported, lamport, is_foreign = saved.processed, 0, 0, False
        if resume is not None:
            cursor, lamport = resume.cursor, resume.lamport
            is_foreign = resume.lamport > 0 and cursor.log_id != log.log_id
            reached = cursor.next_offset if cursor.log_id == log.log_id else 0
            if cursor.log_id == log.log_id:
                self._check_not_ahead(cursor.epoch, max(cursor.next_offset, resume.reach))
                reported = reached
                if reached >= saved.reported:  # else it lost data that it had reported: its own cursor counts
                    reached = max(reached, saved.processed)
            if is_foreign and log.ack_level > AckLevel.MEMORY:
                raise self._foreign_log_refusal(cursor)
            # With an in-memory log a cursor of another log is normal: the sink keeps its data and starts at
            # the new log's beginning, with Lamport numbers above those that it holds.
        offset, reason = self._resolve_start(start, reached), None
        is_below = start in ("resume", "earliest") and reached < log.start_offset
        if is_below and self._can_rebuild and await self._has_snapshot():
            reason = f"its cursor is at offset {reached}, but the log starts at {log.start_offset}"
            offset = log.start_offset
        else:
            self._check_start(offset)
        return OpenedSink(offset, resume is not None, reported, lamport, is_foreign, reason)

    async def _has_snapshot(self) -> bool:
        return await self._context.threads.run(partial(has_snapshot, self._log))

    async def _is_rebuildable(self) -> bool:
        """True if it can be rebuilt; else the request is logged and ignored."""
        try:
            await self._check_rebuildable("an operator asked for it")
        except (UsageError, Refused) as error:
            logger.warning("the requested rebuild of sink %r was refused: %s", self._name, error)
            return False
        return True

    async def _check_rebuildable(self, reason: str) -> None:
        if not self._can_rebuild:
            raise UsageError(
                f"sink {self._name!r} must be rebuilt ({reason}), but cannot be: it stores deltas, or its "
                "topics do not match complete vectors: give it data and a name of its own"
            )
        if self._log.start_offset and not await self._has_snapshot():
            raise cannot_be_rebuilt(self._name, self._log.start_offset)

    def _resolve_start(self, start: Start, reached: int) -> int:
        log = self._log
        offset_of_name: dict[Start, int] = {
            "resume": reached,
            "earliest": log.start_offset,
            "latest": log.high_watermark,
        }
        offset = offset_of_name.get(start, start) if isinstance(start, str | int) else -1
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= log.high_watermark:
            raise UsageError(
                f"start {start!r}: give resume, earliest, latest or an offset from 0 to {log.high_watermark}"
            )
        return offset

    def _check_start(self, start: int) -> None:
        log = self._log
        if start < log.start_offset:
            rebuild_fix = (
                "let the log compact, so that it can be rebuilt from a snapshot, "
                if self._can_rebuild
                else ""
            )
            raise Refused(
                ErrorCode.CURSOR_TOO_OLD,
                f"sink {self._name!r} needs offset {start}, but the log starts at {log.start_offset}: "
                f'attach it with start="earliest" to take what is left, {rebuild_fix}or raise the bounds of '
                "the log",
                details={"offset": start, "start_offset": log.start_offset},
            )

    def _foreign_log_refusal(self, cursor: Cursor) -> Refused:
        empty_note = "" if self._log.next_offset else ", which is empty"
        return ForeignSinkData(
            f"sink {self._name!r} holds data of another log ({cursor.log_id.hex()}, up to offset "
            f"{cursor.next_offset}), this one is {self._log.log_id.hex()}{empty_note}",
            can_rebuild=self._can_rebuild,
            details={"offset": cursor.next_offset},
        )

    def _check_not_ahead(self, epoch: int, next_offset: int) -> None:
        end = self._log.epoch_end(epoch)  # the epoch's tail from there on was lost
        end = self._log.next_offset if end is None else end
        if epoch > self._log.epoch or next_offset > end:
            raise ForeignSinkData(
                f"sink {self._name!r} is ahead: it holds epoch {epoch} up to offset {next_offset}, the log "
                f"epoch {self._log.epoch} up to {end}",
                can_rebuild=self._can_rebuild,
                details={"offset": next_offset, "next_offset": end},
            )
