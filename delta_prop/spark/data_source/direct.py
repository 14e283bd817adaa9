"""Writes a part directly into the logs of a stream, so that each row has one effect even if it is sent again.

The part has an origin of its own in each partition, whose counters number its rows there: a retried task
continues where the earlier attempt stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.client.sync_producer import SyncProducer, SyncReceipt
from delta_prop.spark import system
from delta_prop.spark.data_source.blocks import to_block
from delta_prop.spark.data_source.results import PartResult
from delta_prop.spark.data_source.routing import PartitionRows, divide
from delta_prop.spark.data_source.sending import offer_rows, producer_of, with_shared_close_timeout
from delta_prop.spark.options import WriteOptions
from delta_prop.spark.served_streams import DEFAULT_SERVED, ServedStream
from delta_prop.spark.service_checks import range_reader_of
from delta_prop_wire.delta import make_origin, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import RefusedRow
from delta_prop_wire.spec import FINAL, ErrorCode

if TYPE_CHECKING:
    import pyarrow as pa

    from delta_prop.client.ranges import RangeReader
    from delta_prop_wire.stamp import LogName

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
    piece: PartitionRows
    was_sent: bool


class NumberedPart:
    """Sends one part; several attempts, even two tasks at once, have one effect.

    `name`: the job's name, a slash, and the part's number. `base`: the counter before the part's first row
    in each partition. A refusal by the service is reported and fails nothing here: Spark would retry a failed
    task, and the driver would get only the last attempt's report.
    """

    def __init__(
        self, options: WriteOptions, name: str, base: int = 0, stream: ServedStream = DEFAULT_SERVED
    ) -> None:
        self._options = with_shared_close_timeout(options, stream)
        self._name = name
        self._base = base
        self._stream = stream

    def send(self, batches: Iterable[pa.RecordBatch]) -> PartResult:
        """Send the rows that are not in the logs yet. Raises Refused, Unreachable, UsageError."""
        writers: dict[int, PartitionWriter] = {}
        with ExitStack() as stack:
            for piece in divide(batches, self._stream.count, self._options.namespace):
                writer = writers.get(piece.partition)
                if writer is None:
                    writer = stack.enter_context(self._new_writer(piece.partition))
                    writers[piece.partition] = writer
                writer.add(piece)
            # The steps alternate between the partitions, so that the service works on all at once.
            for writer in writers.values():
                writer.send_held_rows()
            for writer in writers.values():
                writer.send_last_row()
            for writer in writers.values():
                writer.finish()
            for writer in writers.values():  # other tasks may wait for the rows above
                writer.wait_if_overtaken()
        return merge_results([writer.result for writer in writers.values()])

    def _new_writer(self, partition: int) -> PartitionWriter:
        label = self._name if self._stream.count == 1 else f"{self._name} in partition {partition}"
        log = self._stream.log_name(partition)
        return PartitionWriter(_Target(self._options, self._name, label, self._base, log))


def merge_results(results: Sequence[PartResult]) -> PartResult:
    """Return the result of a part from those of its rows in each partition."""
    rows = sorted((row for one in results for row in one.refused_rows), key=lambda one: one.row)
    return PartResult(
        sum(one.deltas for one in results),
        sum(one.refused for one in results),
        rows[:REASONS_MAX],
        waited_s=sum(one.waited_s for one in results),
        processed_before=sum(one.processed_before for one in results),
    )


class _Target(NamedTuple):
    """A part and the partition for which its rows are; `base`: the counter before the first one.

    `name`: of the producer; `label`: of the part, in messages.
    """

    options: WriteOptions
    name: str
    label: str
    base: int
    log: LogName

    def new_producer(self, name: str | None = None) -> SyncProducer:
        """Return a producer of the rows. Raises UsageError."""
        return producer_of(self.options, name or self.name, self.log)

    def offer(self, producer: SyncProducer, piece: PartitionRows, counter: int) -> SyncReceipt:
        """Check rows and send them. Raises InvalidDelta, Refused."""
        return offer_rows(producer, piece.rows, self.options, counter, int(piece.numbers[0]))

    def read_watermark(self, name: str, epoch: int = 1) -> tuple[int, int]:
        """Return the watermark of a producer in the partition, and its epoch, at least `epoch`."""
        producer_id = producer_id_of(name, self.log.stream)
        origin = make_origin(producer_id, self.options.priority, self.log.partition)
        return _read_watermark(range_reader_of(self.options.remote, self.log), origin, epoch)


class PartitionWriter:
    """Sends the rows of a part that belong to one partition: `add` for each piece, then all other steps.

    The last row is sent alone, after the outcomes of all others, so that a watermark that covers it means
    that the part is complete. Once another attempt has taken over, this one only counts the rows, and waits
    at the end until that attempt has written them.

    *Resources*: connections, which the end of the context closes.
    """

    def __init__(self, target: _Target) -> None:
        self._target = target
        self._in_flight: deque[_InFlightBlock] = deque()
        self._producer: SyncProducer | None = None
        self._retry_producer: SyncProducer | None = None
        self._watermark = 0  # at the opening
        self._taken = 0
        self._starts: list[int] = []  # the first row of each piece
        self._last: PartitionRows | None = None  # the last piece so far; at the end, the last row
        self._is_overtaken = False
        self.result = PartResult()

    def __enter__(self) -> PartitionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                producer.__exit__(kind, error, trace)
        finally:
            producer, self._retry_producer = self._retry_producer, None
            if producer is not None:
                self.result.waited_s += producer.waited_s
                producer.__exit__(None, None, None)

    # --- steps

    def add(self, piece: PartitionRows) -> None:
        """Take the next rows, and send those before them. Raises Refused, Unreachable, UsageError."""
        self._starts.append(self._taken)
        self._taken += piece.row_count
        before, self._last = self._last, piece
        self._unless_overtaken(self._send_next, before)

    def send_held_rows(self) -> None:
        """Send the last piece but for its last row."""
        held = self._last
        assert held is not None
        self._last = held.slice(held.row_count - 1, 1)
        if held.row_count > 1:
            self._unless_overtaken(self._send_all_but_last, held)

    def send_last_row(self) -> None:
        """Send the last row once the others have their outcomes."""
        assert self._last is not None
        self._unless_overtaken(self._send_last, self._last)

    def finish(self) -> None:
        """Wait for the last outcome. Raises UsageError if an earlier attempt had more rows."""
        self._unless_overtaken(self._finish)

    def wait_if_overtaken(self) -> None:
        """Wait until the attempt that took over has written the rows. Raises UsageError if it stops."""
        if self._is_overtaken:
            self._wait_for_other_attempt()

    def _unless_overtaken(self, step: Callable[..., None], *rows: PartitionRows | None) -> None:
        if self._is_overtaken:
            return
        try:
            step(*rows)
        except Refused as refused:
            if refused.code is not ErrorCode.FENCED:
                raise
            self._is_overtaken = True
            self._in_flight.clear()
            self.__exit__(type(refused), refused, None)

    def _send_next(self, held: PartitionRows | None) -> None:
        self._open()
        if held is not None:
            self._offer(held)
            self._take_outcomes(waits=False)

    def _send_all_but_last(self, held: PartitionRows) -> None:
        # The full block is checked before its first rows are sent.
        to_block(held.rows, namespace=self._target.options.namespace, before=int(held.numbers[0]))
        self._offer(held.slice(0, held.row_count - 1))
        self._take_outcomes(waits=False)

    def _send_last(self, last: PartitionRows) -> None:
        self._take_outcomes(waits=True)
        self._offer(last)

    def _finish(self) -> None:
        self._take_outcomes(waits=True)
        target, deltas = self._target, self.result.deltas
        if self._watermark > target.base + deltas:
            raise UsageError(
                f"{target.label} has {deltas} rows, but {self._watermark - target.base} were written "
                "under its name before: make the job deterministic (sort, repartition by a key), so that a "
                "part has the same rows when it runs again, or name another producer"
            )
        assert self._producer is not None
        self.result.waited_s += self._producer.waited_s

    # --- sending

    def _open(self) -> None:
        """Open the producer, unless it is open. Raises UsageError if a later micro-batch was written."""
        if self._producer is not None:
            return
        target, base = self._target, self._target.base
        self._producer = target.new_producer().__enter__()
        self._watermark = watermark = self._producer.watermark(target.options.priority)
        check_batch(target.label, watermark, base)
        if base and not base - COUNTERS_PER_BATCH < watermark <= base:
            self._check_first_part()

    def _check_first_part(self) -> None:
        """Check that part 0 of the stream has written no later micro-batch here. Raises UsageError."""
        stream, _, part = self._target.name.rpartition("/")
        if part != "0":
            first = f"{stream}/0"
            watermark, _ = self._target.read_watermark(first)
            check_batch(first, watermark, self._target.base)

    def _offer(self, piece: PartitionRows) -> None:
        """Send a block; if its dots are not new, the service compares its rows with their first copies."""
        assert self._producer is not None
        first_counter, count = self._target.base + self.result.deltas + 1, piece.row_count
        was_sent = first_counter + count - 1 <= self._watermark
        receipt = self._target.offer(self._producer, piece, first_counter)
        self._in_flight.append(_InFlightBlock(receipt, first_counter, piece, was_sent))
        self.result.processed_before += min(max(self._watermark + 1 - first_counter, 0), count)
        self.result.deltas += count

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
                if block.piece.row_count == 1:
                    self._note_refused(block, refused)
                else:
                    self._retry_rows(block)

    def _changed_rows_error(self, block: _InFlightBlock) -> UsageError:
        numbers = block.piece.numbers
        return UsageError(
            f"{self._target.label}: rows {numbers[0]} to {numbers[-1]} differ from those written under "
            "its name before: make the job deterministic (sort, repartition by a key), so that a part has "
            "the same rows when it runs again, or name another producer"
        )

    def _retry_rows(self, refused_block: _InFlightBlock) -> None:
        """Send each row of a refused block by itself: valid rows take effect, the others are reported.

        The block's dots are used up, so the rows go under another origin, with the same counters.
        """
        target = self._target
        if self._retry_producer is None:
            self._retry_producer = target.new_producer(f"{target.name}/again").__enter__()
        producer, watermark = self._retry_producer, self._retry_producer.watermark(target.options.priority)
        sent = []
        for row in range(refused_block.piece.row_count):
            single_row, counter = refused_block.piece.slice(row, 1), refused_block.first_counter + row
            receipt = target.offer(producer, single_row, counter)
            sent.append(_InFlightBlock(receipt, counter, single_row, counter <= watermark))
        for block in sent:
            try:
                block.receipt.result()
            except Refused as refused:
                if refused.code not in _ROW_ERRORS:
                    raise
                self._note_refused(block, refused)

    def _note_refused(self, block: _InFlightBlock, refused: Refused) -> None:
        result = self.result
        result.refused += 1
        if len(result.refused_rows) < REASONS_MAX:
            vector_id = str(block.piece.rows.column("vector_id")[0].as_py())[:_NAME_CHARS_MAX]
            reason = refused.message.removeprefix("row 0: ")[:_REASON_CHARS_MAX]
            if block.was_sent:  # the service stores only the code
                reason = "refused when it was sent before; the reason was reported then"
            part, row = int(self._target.name.rpartition("/")[2]), int(block.piece.numbers[0])
            result.refused_rows.append(RefusedRow(part, row, vector_id, refused.code, reason))

    # --- another task has the part

    def _wait_for_other_attempt(self) -> None:
        """Wait until another attempt has written this part. Raises UsageError if it makes no progress."""
        target, total, began = self._target, self._taken, system.now()
        limit_s = target.options.remote.settings.delivery_timeout_s
        written, epoch, since = -1, 1, began
        while written < target.base + total:
            watermark, epoch = target.read_watermark(target.name, epoch)
            written, since = watermark, system.now() if watermark > written else since
            if system.now() - since >= limit_s:
                raise UsageError(
                    f"another attempt took over {target.label} and stopped at row "
                    f"{max(written - target.base, 0)} of {total}: this one ends, so that Spark can retry"
                )
            system.pause(POLL_S)
        self.result = PartResult(total, waited_s=system.now() - began)
        if target.options.fails_on_refused:
            self._check_other_attempt()

    def _check_other_attempt(self) -> None:
        """Raise UsageError if rows that another attempt sent were refused, whose reasons are unknown here."""
        last, target = self._last, self._target
        assert last is not None
        # The first row of each block, as the other attempt sliced them.
        first_rows = sorted({*self._starts, self._taken - 1})
        with target.new_producer() as producer:
            receipts = [target.offer(producer, last, target.base + 1 + first) for first in first_rows]
            for receipt in receipts:
                try:
                    receipt.result()
                except Refused as refused:
                    if refused.code is ErrorCode.DOT_REUSED:  # another row has the counter: it was accepted
                        continue
                    if refused.code not in _ROW_ERRORS:
                        raise
                    raise UsageError(
                        f"another attempt took over {target.label}, and rows of it were refused: this one "
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
