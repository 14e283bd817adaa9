"""The data source `delta_prop`, which Spark asks for readers and writers.

It loads their modules on demand, because Spark loads every data source that it finds.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from delta_prop.client.errors import Unreachable
from delta_prop.spark import system
from delta_prop.spark.arguments import check_session
from delta_prop.spark.options import (
    ReadOptions,
    WriteOptions,
    names_stream,
    read_options,
    write_options,
)
from delta_prop.spark.service_checks import check_on_driver, check_publishes
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

NAME = "delta_prop"


def register(spark: SparkSession) -> None:
    """Register `format("delta_prop")` with a session; needed if Spark does not find it by itself."""
    check_session(spark)
    spark.dataSource.register(DeltaPropSource)


class DeltaPropSource(DataSource):
    """Deltas of a service, read and written as rows."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return NAME

    def schema(self) -> StructType:
        """Return the columns of a read."""
        from delta_prop.spark.columns import READ_SCHEMA, STREAM_READ_SCHEMA

        return STREAM_READ_SCHEMA if names_stream(self.options) else READ_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the log's present content. Raises UsageError."""
        from delta_prop.spark.data_source.reading import PushingReader, Reader

        options = self._read_options()
        return PushingReader(options, schema) if options.pushdown else Reader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader of a stream. Raises UsageError."""
        from delta_prop.spark.data_source.reading import StreamReader

        return StreamReader(self._read_options(stream=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer of a job's rows. Raises UsageError, Refused, Unreachable."""
        from delta_prop.spark.data_source.writing import DirectWriter, StagedWriter

        _check_appends(overwrite)
        options = self._write_options()
        writer = StagedWriter(options, schema) if options.staged else DirectWriter(options, schema)
        # The check fails once here, not in each task after its timeout.
        check_publishes(options.remote, writer.stream.log_name(0), stages=options.staged)
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return a writer of micro-batches. Raises UsageError, Refused."""
        from delta_prop.spark.data_source.writing import StreamWriter

        _check_appends(overwrite)
        options = self._write_options(stream=True)
        writer = StreamWriter(options, schema)
        if writer.stream is not None:
            with suppress(Unreachable):  # the tasks wait for an absent service, and Spark retries them
                check_publishes(options.remote, writer.stream.log_name(0))
        return writer

    def _read_options(self, *, stream: bool = False) -> ReadOptions:
        options = read_options(self.options, system.read_environment(), system.wall_us(), stream=stream)
        check_on_driver(options.remote)
        return options

    def _write_options(self, *, stream: bool = False) -> WriteOptions:
        options = write_options(self.options, system.read_environment(), stream=stream)
        check_on_driver(options.remote)
        return options


def _check_appends(overwrite: bool) -> None:
    if overwrite:
        raise UsageError(
            'a log cannot be overwritten: write with mode("append"), streams with outputMode("append"); '
            "to bring sinks to a table's state, write the differences (delta_prop.spark.diff)"
        )
