"""Data sources whose tasks or driver are killed before they report; Spark's own processes import them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext

from delta_prop.spark.data_source.source import DeltaPropSource
from delta_prop.spark.data_source.writing import DirectWriter, PartReport, StagedWriter, StreamWriter
from delta_prop.spark.options import write_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType


def kill_first_attempt() -> None:
    """Kill the Python process of the first attempt of each task."""
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledStagedWriter(StagedWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        report = super().write(iterator)
        kill_first_attempt()
        return report


class KilledDirectWriter(DirectWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        report = super().write(iterator)
        kill_first_attempt()
        return report


class KilledStreamWriter(StreamWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartReport:
        report = super().write(iterator)
        kill_first_attempt()
        return report


class KilledTaskSource(DeltaPropSource):
    """A data source whose tasks are killed after they have sent all rows, before they report."""

    @classmethod
    def name(cls) -> str:
        return "tasks_die"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = write_options(self.options, {})
        return KilledStagedWriter(options, schema) if options.staged else KilledDirectWriter(options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return KilledStreamWriter(write_options(self.options, {}, stream=True), schema)


class KilledDriverSource(DeltaPropSource):
    """A data source whose driver is killed, with all its processes, just before it commits."""

    @classmethod
    def name(cls) -> str:
        return "driver_dies"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _KilledDriverWriter(write_options(self.options, {}), schema)


class _KilledDriverWriter(StagedWriter):
    def commit(self, messages: list[PartReport | None]) -> None:
        assert all(one is not None and one.result.deltas for one in messages)
        for process in driver_processes():
            os.kill(process, signal.SIGKILL)


def driver_processes() -> list[int]:
    """Return the ids of all processes from the driver, through its Java process, down to this one."""
    process_ids, leader = [os.getpid()], os.getsid(0)
    while process_ids[0] != leader:
        fields = Path(f"/proc/{process_ids[0]}/stat").read_text().rpartition(")")[2].split()
        process_ids.insert(0, int(fields[1]))  # the parent
    return process_ids
