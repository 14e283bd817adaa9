"""Jobs on a data directory read all partitions of a stream, or one."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")

from delta_prop.cli import main  # noqa: E402
from delta_prop.client import SyncProducer  # noqa: E402
from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition  # noqa: E402
from delta_prop.directory.readonly_log import PartitionName  # noqa: E402
from delta_prop.spark import deltas_of  # noqa: E402
from delta_prop.spark.data_source.segments import log_of, partitions_in, states_of  # noqa: E402
from delta_prop.spark.jobs.counting import open_logs_for_counting  # noqa: E402
from delta_prop.spark.jobs.replaying import logs_at  # noqa: E402
from delta_prop_sinks.storage_file import StorageFile  # noqa: E402
from delta_prop_wire.delta import Delta, create  # noqa: E402
from delta_prop_wire.errors import Refused, UsageError  # noqa: E402
from delta_prop_wire.murmur import partition_of  # noqa: E402
from tests.delta_prop.commands.support import VerbResult  # noqa: E402
from tests.delta_prop.spark.stream_services import STREAM, keys_of_partitions, serving  # noqa: E402
from tests.delta_prop.spark.test_commands import on_spark  # noqa: E402, F401

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

FIRST_OFFSET = LogPosition(offset=0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a stream whose partitions 0 and 2 of 3 have 40 and 4 deltas."""
    path = tmp_path_factory.mktemp("log") / "data"
    with serving(path) as address:
        for partition, count in ((0, 40), (2, 4)):
            with SyncProducer(address, name="test", stream=STREAM, partition=partition) as p:
                for number in range(count):
                    p.publish(Delta(f"p{partition}-{number % 30}", create([float(number)]), "n"))
    return str(path)


def keys_of(log_parts: object) -> list[str]:
    return [key for part in log_parts for one in part.batches() for key in one.batch.keys]  # type: ignore[attr-defined]


def test_used_partitions_are_read(data: str) -> None:
    names = partitions_in(data, PartitionName(STREAM))
    assert [name.partition for name in names] == [0, 2]
    logs = [log_of(data, name) for name in names]
    assert [(log.partition, log.start, log.end) for log in logs] == [(0, 0, 40), (2, 0, 4)]
    assert [len(keys_of(log.parts)) for log in logs] == [40, 4]
    assert keys_of(states_of(data, PartitionName(STREAM, 2), at=LogPosition(offset=1)).parts)[:2] == [
        "p2-0",
        "p2-1",
    ]
    counted, sinks = open_logs_for_counting(data, EARLIEST, LATEST, PartitionName(STREAM))
    assert (counted, sinks) == (logs, [])
    assert partitions_in(data, PartitionName()) == [PartitionName()]
    assert log_of(data).end == 0


def test_unknown_partitions_and_offsets_of_several_are_refused(data: str) -> None:
    with pytest.raises(Refused, match="stream 'ordres': unknown: give one of default, orders"):
        partitions_in(data, PartitionName("ordres"))
    with pytest.raises(Refused, match="partition 3: stream 'orders' has 3"):
        partitions_in(data, PartitionName(STREAM, 3))
    with pytest.raises(UsageError, match="partition 1 of stream 'orders' was never used"):
        partitions_in(data, PartitionName(STREAM, 1))
    expected = "0 is an offset, but each of the 2 partitions has its own: give a time"
    with pytest.raises(UsageError, match=f"at {expected}"):
        logs_at(data, FIRST_OFFSET, PartitionName(STREAM))
    with pytest.raises(UsageError, match=f"start {expected}"):
        open_logs_for_counting(data, FIRST_OFFSET, FIRST_OFFSET, PartitionName(STREAM))


@pytest.mark.spark
def test_deltas_of_a_directory_have_their_partition(spark: SparkSession, data: str) -> None:
    rows = deltas_of(spark, data, stream=STREAM).select("partition", "offset").collect()
    assert sorted(map(tuple, rows)) == [*((0, one) for one in range(40)), *((2, one) for one in range(4))]
    rows = deltas_of(spark, data, stream=STREAM, partition=2, start=1, end=3).collect()
    assert [(row.partition, row.offset, row.vector_id) for row in rows] == [(2, 1, "p2-1"), (2, 2, "p2-2")]


@pytest.mark.spark
def test_verbs_write_and_read_a_stream(
    on_spark: SparkSession,  # noqa: F811
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def command(*arguments: object) -> VerbResult:
        capfd.readouterr()
        status = main(["spark", *map(str, arguments)])
        return VerbResult(status, *capfd.readouterr())

    keys = [f"v{number}" for number in range(30)]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps({"vector_id": key, "vector": [1.0]}) + "\n" for key in keys))
    to_stream = ("--stream", STREAM)
    of_directory = ("--data", tmp_path / "data", *to_stream)
    with serving(tmp_path / "data") as address:
        sends = ("import", table, "--namespace", "n", "--to", address, "--producer", "first")
        unknown = command(*sends, "--stream", "ordres")
        assert unknown.status == 2
        assert "stream 'ordres': unknown: give one of default, orders" in unknown.err
        (job,) = command(*sends, *to_stream, "--json").lines
        assert (job["state"], job["deltas"], job["published"]) == ("published", 30, 30)
        by_partition = [[key for key in keys if partition_of("n", key, 3) == number] for number in range(3)]
        assert keys_of_partitions(address) == by_partition
        served = command("replay", "--from", address, *to_stream, "--json", "--partition", "1")
        assert sorted(row["vector_id"] for row in served.lines) == sorted(by_partition[1])
    file = tmp_path / "vectors.db"
    rebuild = ("rebuild", *of_directory, "--storage", file)
    assert "stream 'orders' has 3 partitions: name one with --partition" in command(*rebuild).err
    assert command(*rebuild, "--partition", "2").status == 0
    with closing(StorageFile(str(file), wal_bytes_max=1 << 20)) as stored:
        log = log_of(str(tmp_path / "data"), PartitionName(STREAM, 2))
        cursor = stored.connect(log.log_id).cursor
        assert cursor is not None
        assert cursor.next_offset == len(by_partition[2])
    assert "--stream 'orders': nothing is sent or read there" in command("diff", table, table, *to_stream).err
