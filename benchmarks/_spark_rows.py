"""A simple Spark writer, for comparison: a data source that sends each row as a delta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage

from delta_prop.client import SyncProducer
from delta_prop_wire.delta import AckLevel, Delta, create

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class PlainRows(DataSource):
    """`df.write.format("plain_rows")`."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "plain_rows"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer of rows."""
        return _Writer(self.options["url"], self.options["producer"])


class _Writer(DataSourceWriter):
    def __init__(self, url: str, producer: str) -> None:
        self._url, self._producer = url, producer

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        part = TaskContext.get().partitionId()
        with SyncProducer(self._url, name=f"{self._producer}/{part}", ack_level=AckLevel.DURABLE) as producer:
            for row in iterator:
                producer.offer(Delta(row.vector_id, create(row.vector), "bench"))
            producer.flush()
        return WriterCommitMessage()
