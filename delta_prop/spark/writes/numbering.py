"""A part that goes into the log at once, under numbers of its own: sent again, each row still has one effect.

The numbers count the rows, so a task that comes again goes on where the one before it has stopped.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from delta_prop.spark import edge
from delta_prop.spark.reach import asker_of
from delta_prop.spark.writes.blocks import to_block
from delta_prop.spark.writes.sending import Rows, offer, producer_of
from delta_prop.spark.writes.told import Sent
from delta_prop_wire.delta import make_origin, producer_id_of
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.frames import RefusedRow
from delta_prop_wire.spec import VOIDING, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa

    from delta_prop.client.blocking import SyncProducer, SyncReceipt
    from delta_prop.client.ranges import Asker
    from delta_prop.spark.options import WriteOptions

REASONS_MAX = 5
"""Refused rows of a part that are told one by one."""
_NAME_CHARS_MAX, _WHY_CHARS_MAX = 100, 300
LOOK_S = 0.2
COUNTERS_OF_A_BATCH = 1 << 32
"""Each micro-batch of a stream has counters of its own."""
_OF_ROWS = VOIDING - {ErrorCode.UNAUTHORIZED}


class _Open(NamedTuple):
    """A block without an outcome. `known`: it asks what became of it when it was sent before."""

    receipt: SyncReceipt
    first: int
    rows: pa.RecordBatch
    known: bool


class Numbered:
    """A part, sent any number of times, also by two tasks at once. `name`: the job's, and the part's number.
    `base`: the counter before its first row.

    The last row goes alone, once all others have their outcome: so a watermark that covers it says that the
    part is done. What the service refuses is told, and fails nothing here: a task that failed for it would
    be tried again, and the driver would hear of the last try alone.
    """

    def __init__(self, options: WriteOptions, name: str, base: int = 0) -> None:
        self._options = options
        self._name = name
        self._part = int(name.rpartition("/")[2])
        self._base = base
        self._sent = Sent()
        self._open: deque[_Open] = deque()
        self._again: SyncProducer | None = None

    def send(self, batches: Iterable[pa.RecordBatch]) -> Sent:
        """Send what is missing. Raises Refused, Unreachable, UsageError."""
        rows = Rows(batches)
        blocks = iter(rows)
        first = next(blocks, None)
        if first is None:
            return self._sent
        try:
            with producer_of(self._options, self._name) as producer:
                self._send(producer, self._last_row_apart(first, blocks))
        except Refused as refused:
            if refused.code is not ErrorCode.FENCED:
                raise
            self._wait_for_other(rows)
        finally:
            self._close_again()
        return self._sent

    def _send(self, producer: SyncProducer, pieces: Iterator[tuple[pa.RecordBatch, bool]]) -> None:
        watermark = producer.watermark(self._options.priority)
        check_batch(self._name, watermark, self._base)
        if self._base and not self._base - COUNTERS_OF_A_BATCH < watermark <= self._base:
            self._check_stream()
        for rows, last in pieces:
            if last:
                self._settle(waits=True)
            self._offer(producer, rows, watermark)
            self._settle(waits=last)
        end = self._base + self._sent.deltas
        if watermark > end:
            raise UsageError(
                f"{self._name} has {self._sent.deltas} rows, and {watermark - self._base} were written as it "
                "before: the same part has to have the same rows when it runs again; make what comes before "
                "deterministic (sort, repartition by a key), or take another producer"
            )
        self._sent.waited_s += producer.waited_s

    def _check_stream(self) -> None:
        """Ask how far the stream's first part is. A part that wrote the micro-batch before need not ask."""
        stream, _, part = self._name.rpartition("/")
        if part != "0":
            first = f"{stream}/0"
            watermark, _ = _looked(asker_of(self._options.remote), self._origin_of(first), 1)
            check_batch(first, watermark, self._base)

    def _origin_of(self, name: str) -> int:
        return make_origin(producer_id_of(name), self._options.priority)

    def _offer(self, producer: SyncProducer, rows: pa.RecordBatch, watermark: int) -> None:
        """Send a block. One that was dealt with before is compared there with what was sent then."""
        before = self._sent.deltas
        first = self._base + before + 1
        known = first + rows.num_rows - 1 <= watermark
        receipt = offer(producer, rows, self._options, first, before)
        self._open.append(_Open(receipt, first, rows, known))
        self._sent.before += min(max(watermark + 1 - first, 0), rows.num_rows)
        self._sent.deltas += rows.num_rows

    def _settle(self, *, waits: bool) -> None:
        """Take in outcomes, in order."""
        while self._open and (waits or self._open[0].receipt.done):
            one = self._open.popleft()
            try:
                one.receipt.result()
            except Refused as refused:
                if one.known and refused.code is ErrorCode.DOT_REUSED:
                    raise self._other_rows(one) from None
                if refused.code not in _OF_ROWS:
                    raise
                if one.rows.num_rows == 1:
                    self._note_refused(one, refused)
                else:
                    self._send_again(one.first, one.rows)

    def _other_rows(self, one: _Open) -> UsageError:
        row = one.first - self._base - 1
        return UsageError(
            f"{self._name}: rows {row} to {row + one.rows.num_rows - 1} are others than were written as it "
            "before: the same part has to have the same rows when it runs again; make what comes before "
            "deterministic (sort, repartition by a key), or take another producer"
        )

    def _send_again(self, first: int, rows: pa.RecordBatch) -> None:
        """Of a block that was refused each row by itself: what is sound has its effect, what is not is told.

        The block's dots are used up, so they go under those of another origin, with the same counters.
        """
        if self._again is None:
            self._again = producer_of(self._options, f"{self._name}/again").__enter__()
        again, watermark = self._again, self._again.watermark(self._options.priority)
        sent = []
        for row in range(rows.num_rows):
            one, counter = rows.slice(row, 1), first + row
            receipt = offer(again, one, self._options, counter)
            sent.append(_Open(receipt, counter, one, counter <= watermark))
        for each in sent:
            try:
                each.receipt.result()
            except Refused as refused:
                if refused.code not in _OF_ROWS:
                    raise
                self._note_refused(each, refused)

    def _note_refused(self, one: _Open, refused: Refused) -> None:
        sent = self._sent
        sent.refused += 1
        if len(sent.refused_rows) < REASONS_MAX:
            vector_id = str(one.rows.column("vector_id")[0].as_py())[:_NAME_CHARS_MAX]
            why = refused.message.removeprefix("row 0: ")[:_WHY_CHARS_MAX]
            if one.known:  # the service remembers the code alone
                why = "as when it was sent before, which was when the reason was told"
            row = one.first - self._base - 1
            sent.refused_rows.append(RefusedRow(self._part, row, vector_id, refused.code, why))

    def _close_again(self) -> None:
        again, self._again = self._again, None
        if again is not None:
            self._sent.waited_s += again.waited_s
            again.__exit__(None, None, None)

    def _last_row_apart(
        self, first: pa.RecordBatch, others: Iterator[pa.RecordBatch]
    ) -> Iterator[tuple[pa.RecordBatch, bool]]:
        """The same rows, the last one in a block of its own."""
        held = first
        for rows in others:
            yield held, False
            held = rows
        if held.num_rows > 1:
            # Looked at as a whole, before a part is sent.
            to_block(held, namespace=self._options.namespace, before=self._sent.deltas)
            yield held.slice(0, held.num_rows - 1), False
        yield held.slice(held.num_rows - 1), True

    # --- another task has the part

    def _wait_for_other(self, rows: Rows) -> None:
        """Another attempt of this part writes it: wait until it is done. Raises UsageError if it stands."""
        self._open.clear()
        total, began = rows.count(), edge.now()
        end = self._base + total
        remote, origin = self._options.remote, self._origin_of(self._name)
        asker = asker_of(remote)
        seen, epoch, since = -1, 1, began
        while seen < end:
            now, epoch = _looked(asker, origin, epoch)
            seen, since = now, edge.now() if now > seen else since
            if edge.now() - since >= remote.settings.delivery_s_max:
                raise UsageError(
                    f"another attempt took over {self._name}, and stands at row {max(seen - self._base, 0)} "
                    f"of {total}: this one ends, so that Spark can try again"
                )
            edge.pause(LOOK_S)
        self._sent = Sent(total, waited_s=edge.now() - began)
        if self._options.refused_raises:
            self._check_other(rows)

    def _check_other(self, rows: Rows) -> None:
        """Raise UsageError where rows were refused that another attempt sent: which, is not known here."""
        assert rows.last is not None
        last = rows.last.slice(rows.last.num_rows - 1)
        firsts = sorted({*rows.firsts, rows.taken - 1})  # of each block, as they were cut by the other one
        with producer_of(self._options, self._name) as producer:
            asked = [offer(producer, last, self._options, self._base + 1 + first) for first in firsts]
            for receipt in asked:
                try:
                    receipt.result()
                except Refused as refused:
                    if refused.code is ErrorCode.DOT_REUSED:  # another row has the number, so it was taken
                        continue
                    if refused.code not in _OF_ROWS:
                        raise
                    raise UsageError(
                        f"another attempt took over {self._name}, and had rows refused: this one ends, so "
                        "that Spark tries again and is told which"
                    ) from None


def check_batch(name: str, watermark: int, base: int) -> None:
    """Raise UsageError where a later micro-batch was written than this one."""
    if not base or watermark < base + COUNTERS_OF_A_BATCH:
        return
    raise UsageError(
        f"{name} has written micro-batch {watermark // COUNTERS_OF_A_BATCH - 1}, and this is micro-batch "
        f"{base // COUNTERS_OF_A_BATCH - 1}: the checkpoint was lost or reset, or two streams have one "
        "producer; go on with the checkpoint that the stream had, or give a new one a producer of its own"
    )


def _looked(asker: Asker, origin: int, epoch: int) -> tuple[int, int]:
    """How far the present holder of an origin is, and its epoch. `epoch`: not above that."""
    while True:
        try:
            return asker.watermark(origin, epoch), epoch
        except Refused as refused:
            if refused.code is not ErrorCode.FENCED:
                raise
            epoch = int(refused.details["epoch"])
