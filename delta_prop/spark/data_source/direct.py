"""Writes a part directly into the log, so that each row has one effect even if it is sent again.

The part has an origin of its own, whose counters number the rows: a retried task continues where the earlier
attempt stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from delta_prop.client.sync_producer import SyncProducer, SyncReceipt
from delta_prop.spark import system
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.results import PartResult
from delta_prop.spark.data_source.sending import RowBlocks, offer_rows, producer_of
from delta_prop.spark.options import WriteOptions
from delta_prop.spark.service_checks import range_reader_of
from delta_prop_wire.delta import make_origin, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import RefusedRow
from delta_prop_wire.spec import FINAL, ErrorCode

if TYPE_CHECKING:
    from delta_prop.client.ranges import RangeReader

REASONS_MAX = 5
"""Maximum number of a part's refused rows that are reported one by one."""
_NAME_CHARS_MAX, _REASON_CHARS_MAX = 100, 300
POLL_S = 0.2
COUNTERS_PER_BATCH = 1 << 32
"""Each micro-batch of a stream has its own range of counters."""
_ROW_ERRORS = FINAL - {ErrorCode.UNAUTHORIZED}
"""Codes of refusals that are about single rows."""


class _InFlightBlock(NamedTuple):
    """A block without an outcome. `was_sent`: an earlier attempt sent it; its outcome is queried now."""

    receipt: SyncReceipt
    first_counter: int
    rows: pa.RecordBatch
    was_sent: bool


class NumberedPart:
    """Sends one part; several attempts, even two tasks at once, have one effect.

    `name`: the job's name, a slash, and the part's number. `base`: the counter before the part's first row.
    The last row is sent alone, after the outcomes of all others, so that a watermark that covers it means
    that the part is complete. A refusal by the service is reported and fails nothing here: Spark would retry
    a failed task, and the driver would get only the last attempt's report.
    """

    def __init__(self, options: WriteOptions, name: str, base: int = 0) -> None:
        self._options = options
        self._name = name
        self._part = int(name.rpartition("/")[2])
        self._base = base
        self._result = PartResult()
        self._in_flight: deque[_InFlightBlock] = deque()
        self._retry_producer: SyncProducer | None = None

    def send(self, batches: Iterable[pa.RecordBatch]) -> PartResult:
        """Send the rows that are not in the log yet. Raises Refused, Unreachable, UsageError."""
        row_blocks = RowBlocks(batches)
        blocks = iter(row_blocks)
        first = next(blocks, None)
        if first is None:
            return self._result
        try:
            with producer_of(self._options, self._name) as producer:
                self._send(producer, self._split_last_row(first, blocks))
        except Refused as refused:
            if refused.code is not ErrorCode.FENCED:
                raise
            self._wait_for_other_attempt(row_blocks)
        finally:
            self._close_retry_producer()
        return self._result

    def _send(self, producer: SyncProducer, slices: Iterator[tuple[pa.RecordBatch, bool]]) -> None:
        watermark = producer.watermark(self._options.priority)
        check_batch(self._name, watermark, self._base)
        if self._base and not self._base - COUNTERS_PER_BATCH < watermark <= self._base:
            self._check_first_part()
        for rows, is_last in slices:
            if is_last:
                self._take_outcomes(waits=True)
            self._offer(producer, rows, watermark)
            self._take_outcomes(waits=is_last)
        end = self._base + self._result.deltas
        if watermark > end:
            raise UsageError(
                f"{self._name} has {self._result.deltas} rows, but {watermark - self._base} were written "
                "under its name before: make the job deterministic (sort, repartition by a key), so that a "
                "part has the same rows when it runs again, or name another producer"
            )
        self._result.waited_s += producer.waited_s

    def _check_first_part(self) -> None:
        """Check that part 0 of the stream has written no later micro-batch. Raises UsageError."""
        stream, _, part = self._name.rpartition("/")
        if part != "0":
            first = f"{stream}/0"
            watermark, _ = _read_watermark(range_reader_of(self._options.remote), self._origin_of(first), 1)
            check_batch(first, watermark, self._base)

    def _origin_of(self, name: str) -> int:
        return make_origin(producer_id_of(name), self._options.priority)

    def _offer(self, producer: SyncProducer, rows: pa.RecordBatch, watermark: int) -> None:
        """Send a block; if its dots are not new, the service compares its rows with their first copies."""
        before = self._result.deltas
        first_counter = self._base + before + 1
        was_sent = first_counter + rows.num_rows - 1 <= watermark
        receipt = offer_rows(producer, rows, self._options, first_counter, before)
        self._in_flight.append(_InFlightBlock(receipt, first_counter, rows, was_sent))
        self._result.processed_before += min(max(watermark + 1 - first_counter, 0), rows.num_rows)
        self._result.deltas += rows.num_rows

    def _take_outcomes(self, *, waits: bool) -> None:
        while self._in_flight and (waits or self._in_flight[0].receipt.done):
            block = self._in_flight.popleft()
            try:
                block.receipt.result()
            except Refused as refused:
                if block.was_sent and refused.code is ErrorCode.DOT_REUSED:
                    raise self._changed_rows_error(block) from None
                if refused.code not in _ROW_ERRORS:
                    raise
                if block.rows.num_rows == 1:
                    self._note_refused(block, refused)
                else:
                    self._retry_rows(block.first_counter, block.rows)

    def _changed_rows_error(self, block: _InFlightBlock) -> UsageError:
        row = block.first_counter - self._base - 1
        return UsageError(
            f"{self._name}: rows {row} to {row + block.rows.num_rows - 1} differ from those written under "
            "its name before: make the job deterministic (sort, repartition by a key), so that a part has "
            "the same rows when it runs again, or name another producer"
        )

    def _retry_rows(self, first_counter: int, rows: pa.RecordBatch) -> None:
        """Send each row of a refused block by itself: valid rows take effect, the others are reported.

        The block's dots are used up, so the rows go under another origin, with the same counters.
        """
        if self._retry_producer is None:
            self._retry_producer = producer_of(self._options, f"{self._name}/again").__enter__()
        producer, watermark = self._retry_producer, self._retry_producer.watermark(self._options.priority)
        sent = []
        for row in range(rows.num_rows):
            single_row, counter = rows.slice(row, 1), first_counter + row
            receipt = offer_rows(producer, single_row, self._options, counter)
            sent.append(_InFlightBlock(receipt, counter, single_row, counter <= watermark))
        for block in sent:
            try:
                block.receipt.result()
            except Refused as refused:
                if refused.code not in _ROW_ERRORS:
                    raise
                self._note_refused(block, refused)

    def _note_refused(self, block: _InFlightBlock, refused: Refused) -> None:
        result = self._result
        result.refused += 1
        if len(result.refused_rows) < REASONS_MAX:
            vector_id = str(block.rows.column("vector_id")[0].as_py())[:_NAME_CHARS_MAX]
            reason = refused.message.removeprefix("row 0: ")[:_REASON_CHARS_MAX]
            if block.was_sent:  # the service stores only the code
                reason = "refused when it was sent before; the reason was reported then"
            row = block.first_counter - self._base - 1
            result.refused_rows.append(RefusedRow(self._part, row, vector_id, refused.code, reason))

    def _close_retry_producer(self) -> None:
        producer, self._retry_producer = self._retry_producer, None
        if producer is not None:
            self._result.waited_s += producer.waited_s
            producer.__exit__(None, None, None)

    def _split_last_row(
        self, first: pa.RecordBatch, others: Iterator[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """Yield the same rows, the last one in a block of its own."""
        held = first
        for rows in others:
            yield held, False
            held = rows
        if held.num_rows > 1:
            # The full block is checked before its first rows are sent.
            to_block(held, namespace=self._options.namespace, before=self._result.deltas)
            yield held.slice(0, held.num_rows - 1), False
        yield held.slice(held.num_rows - 1), True

    # --- another task has the part

    def _wait_for_other_attempt(self, row_blocks: RowBlocks) -> None:
        """Wait until another attempt has written this part. Raises UsageError if it makes no progress."""
        self._in_flight.clear()
        total, began = row_blocks.count(), system.now()
        end = self._base + total
        remote, origin = self._options.remote, self._origin_of(self._name)
        range_reader = range_reader_of(remote)
        written, epoch, since = -1, 1, began
        while written < end:
            watermark, epoch = _read_watermark(range_reader, origin, epoch)
            written, since = watermark, system.now() if watermark > written else since
            if system.now() - since >= remote.settings.delivery_timeout_s:
                raise UsageError(
                    f"another attempt took over {self._name} and stopped at row "
                    f"{max(written - self._base, 0)} of {total}: this one ends, so that Spark can retry"
                )
            system.pause(POLL_S)
        self._result = PartResult(total, waited_s=system.now() - began)
        if self._options.fails_on_refused:
            self._check_other_attempt(row_blocks)

    def _check_other_attempt(self, row_blocks: RowBlocks) -> None:
        """Raise UsageError if rows that another attempt sent were refused, whose reasons are unknown here."""
        assert row_blocks.last is not None
        last_row = row_blocks.last.slice(row_blocks.last.num_rows - 1)
        # The first row of each block, as the other attempt sliced them.
        first_rows = sorted({*row_blocks.starts, row_blocks.taken - 1})
        with producer_of(self._options, self._name) as producer:
            receipts = [
                offer_rows(producer, last_row, self._options, self._base + 1 + first) for first in first_rows
            ]
            for receipt in receipts:
                try:
                    receipt.result()
                except Refused as refused:
                    if refused.code is ErrorCode.DOT_REUSED:  # another row has the counter: it was accepted
                        continue
                    if refused.code not in _ROW_ERRORS:
                        raise
                    raise UsageError(
                        f"another attempt took over {self._name}, and rows of it were refused: this one "
                        "ends, so that Spark retries and reports them"
                    ) from None


def check_batch(name: str, watermark: int, base: int) -> None:
    """Raise UsageError if a later micro-batch was written already."""
    if not base or watermark < base + COUNTERS_PER_BATCH:
        return
    raise UsageError(
        f"{name} has written micro-batch {watermark // COUNTERS_PER_BATCH - 1}, but this is micro-batch "
        f"{base // COUNTERS_PER_BATCH - 1}, so the checkpoint was lost or reset, or two streams share a "
        "producer: go on with the stream's own checkpoint, or give a new stream its own producer"
    )


def _read_watermark(range_reader: RangeReader, origin: int, epoch: int) -> tuple[int, int]:
    """Return the watermark of an origin's present holder, and its epoch, at least `epoch`."""
    while True:
        try:
            return range_reader.watermark(origin, epoch), epoch
        except Refused as refused:
            if refused.code is not ErrorCode.FENCED:
                raise
            epoch = int(refused.details["epoch"])
