"""The data source `delta_prop`: what Spark asks for readers and writers.

It loads what they need when it is asked for them: Spark looks at every data source that it finds.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from delta_prop.client.errors import Unreachable
from delta_prop.spark import edge
from delta_prop.spark.arguments import check_session
from delta_prop.spark.options import read_options, write_options
from delta_prop.spark.reach import check_on_driver, check_publishes
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from delta_prop.spark.options import ReadOptions, WriteOptions

NAME = "delta_prop"


def register(spark: SparkSession) -> None:
    """Make `format("delta_prop")` known to a session; needed where Spark does not find it by itself."""
    check_session(spark)
    spark.dataSource.register(DeltaPropSource)


class DeltaPropSource(DataSource):
    """Deltas of a service, read and written as rows."""

    @classmethod
    def name(cls) -> str:
        """What `format` calls it."""
        return NAME

    def schema(self) -> StructType:
        """The columns of a read."""
        from delta_prop.spark.columns import READ

        return READ

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of what is in the log now. Raises UsageError."""
        from delta_prop.spark.reads.reading import PushingReader, Reader

        options = self._to_read()
        return PushingReader(options, schema) if options.pushdown else Reader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A reader that goes on. Raises UsageError."""
        from delta_prop.spark.reads.reading import StreamReader

        return StreamReader(self._to_read(stream=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer of a job's rows. Raises UsageError, Refused, Unreachable."""
        from delta_prop.spark.writes.writing import DirectWriter, StagedWriter

        _check_appends(overwrite)
        options = self._to_write()
        writer = StagedWriter(options, schema) if options.staged else DirectWriter(options, schema)
        check_publishes(options.remote, stages=options.staged)  # else each task would try for as long
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """A writer of micro-batches. Raises UsageError, Refused."""
        from delta_prop.spark.writes.writing import StreamWriter

        _check_appends(overwrite)
        options = self._to_write(stream=True)
        writer = StreamWriter(options, schema)
        with suppress(Unreachable):  # its tasks wait for a service that is away, and are tried again
            check_publishes(options.remote)
        return writer

    def _to_read(self, *, stream: bool = False) -> ReadOptions:
        options = read_options(self.options, edge.environment(), edge.wall_us(), stream=stream)
        check_on_driver(options.remote)
        return options

    def _to_write(self, *, stream: bool = False) -> WriteOptions:
        options = write_options(self.options, edge.environment(), stream=stream)
        check_on_driver(options.remote)
        return options


def _check_appends(overwrite: bool) -> None:
    if overwrite:
        raise UsageError(
            'a log is added to, never replaced: write with mode("append"), streams with'
            ' outputMode("append"); '
            "to make a state that of a table, write what differs (delta_prop.spark.diff)"
        )
