"""Writers of the data source: what a task does with its rows, what the driver decides of them.

A writer holds no connection: it travels to the executors. What sends the rows is loaded there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from delta_prop.spark import edge
from delta_prop.spark.columns import check_written
from delta_prop.spark.writes.told import (
    RowsRefused,
    Sent,
    direct_refused_text,
    job_refused_text,
    job_waits_text,
    stream_refused_text,
    written_text,
)
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from delta_prop.spark.options import WriteOptions
    from delta_prop_wire.frames import Decision, JobStatus, StagedPart

PARTS_MAX = 2_500
"""Parts of one decision."""
SHOWN_WAIT_S = 1.0
"""From so long a wait on a micro-batch is worth a line."""
PROGRESS_S = 5.0
_LOOK_S, _LOOK_S_MAX = 0.02, 1.0
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class PartWritten(WriterCommitMessage):
    """What a task tells the driver."""

    part: int
    attempt: int = 0
    sent: Sent = field(default_factory=Sent)

    def staged(self) -> StagedPart:
        """As the decision names it."""
        from delta_prop.client.jobs import StagedPart

        return StagedPart(self.part, self.attempt, self.sent.deltas, self.sent.checksum)


class StagedWriter(DataSourceArrowWriter):
    """Tasks have their parts kept aside, the driver has all of them published or none."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema)
        if "id" in schema.names:
            raise UsageError(
                "column id: rows that are staged are told apart by their job, and have none: "
                'df.drop("id"), or option staged=false'
            )
        self._options = options
        self._job = named(options)
        self._run = edge.drawn(32)  # attempts of two runs of a job have different numbers
        self._began = edge.now()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartWritten:
        """Have a part kept aside, on an executor."""
        from delta_prop.client.jobs import attempt_of
        from delta_prop.spark.writes.sending import stage

        part, attempt = _task()
        if part >= PARTS_MAX:
            raise UsageError(
                f"partition {part}: a staged job has up to {PARTS_MAX:,} parts: df.coalesce({PARTS_MAX}), or "
                "option staged=false"
            )
        number = attempt_of(self._run, attempt)
        return PartWritten(part, number, stage(iterator, self._options, self._job, part, number))

    def commit(self, messages: list[PartWritten | None]) -> None:
        """Have all parts published. Raises Refused, RowsRefused, Unreachable, UsageError."""
        from delta_prop.client.jobs import Decision

        written = [one for one in messages if one is not None]
        parts = [one.staged() for one in written if one.sent.deltas]
        status = self._decide(Decision.COMMIT, parts)
        if self._options.waits:
            status = self._published(status)
        tell(written_text(f"job {self._job}", [one.sent for one in written], edge.now() - self._began))
        if status.refused:
            _tell_refused(self._options, job_refused_text(self._job, status))

    def abort(self, messages: list[PartWritten | None]) -> None:
        """Have all parts of this run dropped, unless the job is committed: then it has had its effect."""
        from delta_prop.client.jobs import Decision

        try:
            self._decide(Decision.ABORT, run=self._run)
        except Refused as refused:
            if refused.code is not ErrorCode.JOB_DECIDED:
                raise

    def _published(self, status: JobStatus) -> JobStatus:
        """Wait until the job is published."""
        from delta_prop.client.jobs import Decision, JobState

        began = shown = edge.now()
        pause_s = _LOOK_S
        while status.state is not JobState.PUBLISHED:
            waited_s = edge.now() - began
            if waited_s >= self._options.wait_s_max:
                raise UsageError(job_waits_text(self._job, status, self._options.wait_s_max))
            if edge.now() - shown >= PROGRESS_S:
                shown = edge.now()
                tell(f"job {self._job}: {status.published:,} of {status.deltas:,} deltas are published")
            edge.pause(pause_s)
            pause_s = min(pause_s * 2, _LOOK_S_MAX)
            status = self._decide(Decision.QUERY)
        return status

    def _decide(
        self, decision: Decision, parts: Sequence[StagedPart] = (), run: int | None = None
    ) -> JobStatus:
        from delta_prop.client.jobs import decide

        remote = self._options.remote
        return decide(
            remote.addresses,
            self._job,
            decision,
            parts,
            run=run,
            token=remote.token,
            tls=remote.tls,
            timeout_s=remote.settings.delivery_s_max,
        )


class DirectWriter(DataSourceArrowWriter):
    """Tasks write into the log. Each row has one effect, but a job that fails leaves what it wrote."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema)
        self._options = options
        self._job = named(options)
        self._began = edge.now()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartWritten:
        """Write a part, on an executor."""
        from delta_prop.spark.writes.numbering import Numbered

        part, attempt = _task()
        return PartWritten(part, attempt, Numbered(self._options, f"{self._job}/{part}").send(iterator))

    def commit(self, messages: list[PartWritten | None]) -> None:
        """Tell what was written. Raises RowsRefused where some of it has no effect."""
        parts = [one.sent for one in messages if one is not None]
        tell(written_text(f"job {self._job}, written directly", parts, edge.now() - self._began))
        if any(one.refused for one in parts):
            _tell_refused(self._options, direct_refused_text(self._job, parts))

    def abort(self, messages: list[PartWritten | None]) -> None:
        """Tell what stays."""
        deltas = sum(one.sent.deltas - one.sent.refused for one in messages if one is not None)
        tell(
            f"job {self._job}, written directly, has failed: {deltas:,} deltas of the parts that were done "
            "stay in the log, and what other parts had written; run it again under its name, so that each "
            "has one effect"
        )


class StreamWriter(DataSourceStreamArrowWriter):
    """Tasks write into the log, under numbers made of the micro-batch's: one that comes again is a repeat."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_written(schema)
        self._options = options
        self._began = edge.now()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartWritten:
        """Write a part of a micro-batch, on an executor."""
        from delta_prop.spark.writes.numbering import COUNTERS_OF_A_BATCH, Numbered

        part, attempt = _task()
        context = TaskContext.get()
        assert context is not None
        batch, query = (context.getLocalProperty(name) for name in (_BATCH, _QUERY))
        name = self._options.producer or query
        if batch is None or name is None:
            raise UsageError(
                "Spark does not tell the micro-batch: write streams with writeStream, or batches"
            )
        base = (int(batch) + 1) * COUNTERS_OF_A_BATCH
        return PartWritten(part, attempt, Numbered(self._options, f"{name}/{part}", base).send(iterator))

    def commit(self, messages: list[PartWritten | None], batchId: int) -> None:
        """Tell of a micro-batch for which the service was waited. Raises RowsRefused where some of it has no
        effect: Spark does not note it as done then, and its stream stops.
        """
        parts = [one.sent for one in messages if one is not None]
        refused = any(one.refused for one in parts)
        if sum(one.waited_s for one in parts) >= SHOWN_WAIT_S or refused:
            tell(written_text(f"micro-batch {batchId}", parts, edge.now() - self._began))
        if refused:
            _tell_refused(self._options, stream_refused_text(batchId, parts))

    def abort(self, messages: list[PartWritten | None], batchId: int) -> None:
        """Nothing: the micro-batch comes again, and goes on where it stopped."""


def named(options: WriteOptions) -> str:
    """The name of a job. Raises UsageError where it has none."""
    if options.producer is None:
        raise UsageError(
            "option producer is missing: name the job, and name it the same when it is run again after a "
            'failure, such as option("producer", "nightly-2026-11-21")'
        )
    return options.producer


def tell(line: str) -> None:
    """Have the user see a line: in the log that there is, else on the driver's standard error."""
    edge.logger().info(line)


def _tell_refused(options: WriteOptions, text: str) -> None:
    """Raise RowsRefused, or say so where that is allowed."""
    if options.refused_raises:
        raise RowsRefused(text)
    tell(text)


def _task() -> tuple[int, int]:
    """The partition, and the number of this attempt at it."""
    context = TaskContext.get()
    assert context is not None, "on an executor there is one"
    return context.partitionId(), context.taskAttemptId()
