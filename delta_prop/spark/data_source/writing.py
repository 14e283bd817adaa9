"""Writers of the data source: tasks send rows; the driver commits or aborts a staged job.

A writer holds no connection: Spark sends it to executors, and only they load the modules that send rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from delta_prop.client.errors import Unreachable
from delta_prop.spark import system
from delta_prop.spark.columns import check_write_schema
from delta_prop.spark.data_source.results import (
    PartResult,
    RowsRefused,
    format_direct_refused,
    format_job_refused,
    format_job_waits,
    format_partly_committed,
    format_stream_refused,
    format_written,
)
from delta_prop.spark.job_statuses import join_statuses
from delta_prop.spark.served_streams import find_served_stream
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    import pyarrow as pa

    from delta_prop.spark.options import WriteOptions
    from delta_prop.spark.served_streams import ServedStream
    from delta_prop_wire.frames import Decision, JobStatus, StagedPart

PARTS_MAX = 2_500
"""Maximum number of parts of one decision."""
REPORTED_WAIT_S = 1.0
"""A micro-batch whose tasks waited for the service for this long in total is reported."""
PROGRESS_INTERVAL_S = 5.0
_POLL_S, _POLL_S_MAX = 0.02, 1.0
_QUERY_PROPERTY, _BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass
class PartReport(WriterCommitMessage):
    """A task's report to the driver."""

    part: int
    attempt: int = 0
    result: PartResult = field(default_factory=PartResult)

    def to_staged_part(self, partition: int) -> StagedPart:
        """Return the part as a decision about its rows in a partition names it."""
        from delta_prop.client.jobs import StagedPart

        rows = self.result.staged[partition]
        return StagedPart(self.part, self.attempt, rows.deltas, rows.checksum)


class _BaseWriter:
    """Base of the writers."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        check_write_schema(schema)
        self._options = options
        self._started_at = system.now()

    def _report_written(self, subject: str, parts: Sequence[PartResult]) -> None:
        report(format_written(subject, parts, system.now() - self._started_at))

    def _report_refused(self, text: str) -> None:
        """Raise RowsRefused, or report the text if refusals are skipped."""
        if self._options.fails_on_refused:
            raise RowsRefused(text)
        report(text)


class StagedWriter(_BaseWriter, DataSourceArrowWriter):
    """Stages parts in tasks; the driver has all of them published, or none.

    There is a job of one name in each of the stream's partitions. The driver decides all of them, one by one;
    if it stops in between, the job that runs again decides the others.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.stream = find_served_stream(options.remote, options.stream)
        if "id" in schema.names:
            raise UsageError(
                "column id: staged rows are identified by their job and have no ids: leave it out with "
                'df.drop("id"), or give option staged=false'
            )
        self._job = job_name_of(options)
        # Random, so that attempts of two runs of a job have different numbers.
        self._run = system.draw_bits(32)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        """Stage a part, on an executor."""
        from delta_prop.client.jobs import attempt_of
        from delta_prop.spark.data_source.sending import stage_part

        part, attempt = _task_numbers()
        if part >= PARTS_MAX:
            raise UsageError(
                f"partition {part}: a staged job has up to {PARTS_MAX:,} parts: merge them with "
                f"df.coalesce({PARTS_MAX}), or give option staged=false"
            )
        number = attempt_of(self._run, attempt)
        result = stage_part(iterator, self._options, self._job, part, number, stream=self.stream)
        return PartReport(part, number, result)

    def commit(self, messages: list[PartReport | None]) -> None:
        """Publish all parts. Raises Refused, RowsRefused, Unreachable, UsageError."""
        from delta_prop.client.jobs import Decision

        written = [one for one in messages if one is not None]
        statuses: dict[int, JobStatus] = {}
        for partition in self._decision_order(written):
            parts = [one.to_staged_part(partition) for one in written if partition in one.result.staged]
            try:
                statuses[partition] = self._decide(Decision.COMMIT, partition, parts)
            except BaseException:
                committed = [number for number, one in sorted(statuses.items()) if one.deltas]
                if committed:
                    report(format_partly_committed(self._job, committed, self.stream.count))
                raise
        if self._options.waits:
            self._wait_published(statuses)
        status = join_statuses(statuses)
        self._report_written(f"job {self._job}", [one.result for one in written])
        if status.refused:
            self._report_refused(format_job_refused(self._job, status))

    def _decision_order(self, written: Sequence[PartReport]) -> list[int]:
        """Return the partitions, those first where a job of other rows would refuse a decision.

        These are the ones without rows of this run, where a decision changes nothing, and then those where
        an earlier run has committed the job.
        """
        decided: dict[int, bool] = {}
        for report_ in written:
            for partition, rows in report_.result.staged.items():
                decided[partition] = decided.get(partition, False) or rows.was_decided
        return sorted(range(self.stream.count), key=lambda one: (one in decided, not decided.get(one), one))

    def abort(self, messages: list[PartReport | None]) -> None:
        """Drop all parts of this run, except where the job is committed and so takes effect."""
        from delta_prop.client.jobs import Decision

        for partition in range(self.stream.count):
            try:
                self._decide(Decision.ABORT, partition, run=self._run)
            except Refused as refused:
                if refused.code is not ErrorCode.JOB_DECIDED:
                    raise

    def _wait_published(self, statuses: dict[int, JobStatus]) -> None:
        """Wait until the job is published in every partition; update its statuses. Raises UsageError."""
        from delta_prop.client.jobs import Decision, JobState

        started_at = reported_at = system.now()
        pause_s = _POLL_S
        while (status := join_statuses(statuses)).state is not JobState.PUBLISHED:
            waited_s = system.now() - started_at
            if waited_s >= self._options.wait_timeout_s:
                raise UsageError(format_job_waits(self._job, status, self._options.wait_timeout_s))
            if system.now() - reported_at >= PROGRESS_INTERVAL_S:
                reported_at = system.now()
                report(f"job {self._job}: {status.published:,} of {status.deltas:,} deltas are published")
            system.pause(pause_s)
            pause_s = min(pause_s * 2, _POLL_S_MAX)
            for partition, one in list(statuses.items()):
                if one.state is not JobState.PUBLISHED:
                    statuses[partition] = self._decide(Decision.QUERY, partition)

    def _decide(
        self,
        decision: Decision,
        partition: int,
        parts: Sequence[StagedPart] = (),
        run: int | None = None,
    ) -> JobStatus:
        from delta_prop.client.jobs import decide

        remote = self._options.remote
        return decide(
            remote.addresses,
            self._job,
            decision,
            parts,
            run=run,
            stream=self.stream.stream_id,
            partition=partition,
            token=remote.token,
            tls=remote.tls,
            timeout_s=remote.settings.delivery_timeout_s,
        )


class DirectWriter(_BaseWriter, DataSourceArrowWriter):
    """Writes into the log from tasks. Each row has one effect, but a failed job's rows stay."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._job = job_name_of(options)
        self.stream = find_served_stream(options.remote, options.stream)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        """Write a part, on an executor."""
        from delta_prop.spark.data_source.direct import NumberedPart

        part, attempt = _task_numbers()
        numbered = NumberedPart(self._options, f"{self._job}/{part}", stream=self.stream)
        return PartReport(part, attempt, numbered.send(iterator))

    def commit(self, messages: list[PartReport | None]) -> None:
        """Report what was written. Raises RowsRefused if rows were refused."""
        parts = [one.result for one in messages if one is not None]
        self._report_written(f"job {self._job}, written directly", parts)
        if any(one.refused for one in parts):
            self._report_refused(format_direct_refused(self._job, parts))

    def abort(self, messages: list[PartReport | None]) -> None:
        """Report what stays in the log."""
        deltas = sum(one.result.deltas - one.result.refused for one in messages if one is not None)
        report(
            f"job {self._job}, written directly, has failed: {deltas:,} deltas of complete parts stay in the "
            "log, and those that other parts wrote: run it again under its name, so that each has one effect"
        )


class StreamWriter(_BaseWriter, DataSourceStreamArrowWriter):
    """Writes into the log from tasks, under counters of the micro-batch: a retried one is a duplicate."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.stream: ServedStream | None = None
        with suppress(Unreachable):  # the tasks find it when the service is back
            self.stream = find_served_stream(options.remote, options.stream)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        """Write a part of a micro-batch, on an executor."""
        from delta_prop.spark.data_source.direct import COUNTERS_PER_BATCH, NumberedPart

        part, attempt = _task_numbers()
        context = TaskContext.get()
        assert context is not None
        batch, query = (context.getLocalProperty(name) for name in (_BATCH_PROPERTY, _QUERY_PROPERTY))
        name = self._options.producer or query
        if batch is None or name is None:
            raise UsageError(
                "Spark gives no micro-batch: write streams with writeStream, or batches with write"
            )
        base = (int(batch) + 1) * COUNTERS_PER_BATCH
        stream = self.stream or find_served_stream(self._options.remote, self._options.stream)
        numbered = NumberedPart(self._options, f"{name}/{part}", base, stream)
        return PartReport(part, attempt, numbered.send(iterator))

    def commit(self, messages: list[PartReport | None], batchId: int) -> None:
        """Report a micro-batch that waited for the service.

        Raises RowsRefused if rows were refused: Spark then does not commit it, and the stream stops.
        """
        parts = [one.result for one in messages if one is not None]
        refused = any(one.refused for one in parts)
        if sum(one.waited_s for one in parts) >= REPORTED_WAIT_S or refused:
            self._report_written(f"micro-batch {batchId}", parts)
        if refused:
            self._report_refused(format_stream_refused(batchId, parts))

    def abort(self, messages: list[PartReport | None], batchId: int) -> None:
        """Do nothing: Spark retries the micro-batch, which goes on where it stopped."""


def job_name_of(options: WriteOptions) -> str:
    """Return the job's name. Raises UsageError if it has none."""
    if options.producer is None:
        raise UsageError(
            "option producer is missing: name the job, with the same name when it runs again after a "
            'failure, such as option("producer", "nightly-2026-11-21")'
        )
    return options.producer


def report(line: str) -> None:
    """Log a line for the user: in the configured log, else on the driver's standard error."""
    system.get_logger().info(line)


def _task_numbers() -> tuple[int, int]:
    """Return the partition, and the number of this attempt at it."""
    context = TaskContext.get()
    assert context is not None, "on an executor there is one"
    return context.partitionId(), context.taskAttemptId()
