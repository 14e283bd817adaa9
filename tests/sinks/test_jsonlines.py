"""JsonLinesSink writes each delta as one line, once, despite restarts, redelivery, torn lines, full disks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

from delta_prop_sinks import Delivery, JsonLinesSink, StopSink, TryAgain
from delta_prop_wire.delta import (
    Delta,
    Dot,
    Operation,
    create,
    delete,
    offset,
    opaque,
    scale,
    sparse,
    transform,
)
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import UsageError
from tests.sinks.support import FakeLog

if TYPE_CHECKING:
    from pathlib import Path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_kind_is_written_with_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        log.append(
            Delta(
                "é", create([0.1, 2]), metadata={"t": "x"}, parents=(Dot(1, 2), b"p" * 16), topics=("news",)
            ),
            Delta("a", sparse([1], [0.5]), namespace="docs", timestamp=5),
            Delta("a", scale(2)),
            Delta("a", offset(-1)),
            Delta("r", opaque(b"\x00\x01")),
            Delta("r", transform("norm")),
            Delta("r", Operation(40, data=b"?")),
            Delta("r", delete()),
        )
        sink = JsonLinesSink(path)
        point = await sink.open(log)
        assert point.cursor == (log.log_id, 1, 0)
        await sink.apply(log.deliveries())
        await sink.aclose()

    anyio.run(main)
    written = lines(path)
    assert [line["offset"] for line in written] == list(range(8))
    assert written[0] == {
        "offset": 0,
        "vector_id": "é",
        "namespace": "default",
        "op": "create",
        "vector": [0.1, 2.0],
        "parents": [f"{1:016x}:2", (b"p" * 16).hex()],
        "metadata": {"t": "x"},
        "topics": ["news"],
        "dot": "8000000000000010:1",
        "lamport": 1,
        "cursor": f"{bytes(range(16)).hex()}:1:1",
    }
    assert (written[1]["indices"], written[1]["timestamp"]) == ([1], 5)
    assert written[1]["values"] == [0.5]
    assert written[2]["factor"] == 2
    assert written[3]["amount"] == -1
    assert written[4]["data"] == "AAE="
    assert written[5]["name"] == "norm"
    assert (written[6]["op"], written[6]["data"]) == (40, "Pw==")
    assert written[7]["op"] == "delete"


@pytest.mark.parametrize("cut_bytes", [1, 7, 150])
def test_torn_line_is_truncated_and_written_once(tmp_path: Path, cut_bytes: int) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        for number in range(5):
            log.append(Delta("a", create([number])), Delta("b", create([number])))
        sink = JsonLinesSink(path, fsync=True)
        await sink.open(log)
        await sink.apply(log.deliveries())
        assert log.commits == [10]
        await sink.aclose()
        with path.open("r+b") as file:
            file.truncate(file.seek(0, 2) - cut_bytes)
        reopened = JsonLinesSink(path)
        point = await reopened.open(log)
        assert point.cursor.next_offset == point.lamport == 9
        await reopened.apply(log.deliveries())
        await reopened.apply([Delivery(log.batches[-1], np.array([1], np.intp))])
        await reopened.aclose()

    anyio.run(main)
    assert [line["offset"] for line in lines(path)] == list(range(10))


def test_lines_of_another_log_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        for log_id in (b"1" * 16, b"2" * 16):
            log = FakeLog(log_id)
            log.append(Delta("a", create([1])))
            sink = JsonLinesSink(path)
            point = await sink.open(log)
            assert point.cursor == (b"1" * 16, 1, 0 if log_id == b"1" * 16 else 1)
            await sink.apply(log.deliveries())
            await sink.aclose()

    anyio.run(main)
    assert [line["offset"] for line in lines(path)] == [0, 0]


def test_failing_disk_leaves_no_partial_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    class FullFile:
        def __init__(self, real: Any) -> None:
            self.real, self.truncate, self.fileno = real, real.truncate, real.fileno

        def write(self, data: bytes) -> int:
            self.real.write(data[:10])
            raise OSError(28, "No space left on device")

    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = JsonLinesSink(path)
        await sink.open(log)
        real = sink._file
        sink._file = FullFile(real)  # type: ignore[assignment]
        with pytest.raises(TryAgain, match=r"out\.jsonl cannot be written: No space left"):
            await sink.apply(log.deliveries())
        sink._file = real
        await sink.apply(log.deliveries())
        await sink.aclose()

    anyio.run(main)
    assert [line["offset"] for line in lines(path)] == [0]


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("hello\n")
    with pytest.raises(UsageError, match="lines that this sink did not write"):
        anyio.run(JsonLinesSink(path).open, FakeLog())
    with pytest.raises(UsageError, match="cannot be opened for appending"):
        anyio.run(JsonLinesSink(tmp_path / "no" / "folder").open, FakeLog())
    assert path.read_text() == "hello\n"


def redelivery(logged: Any, *rows: int) -> Delivery:
    return Delivery(logged, np.array(rows, np.intp), redelivered=True)


def test_redelivered_rows_are_written_once_where_they_arrive(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        first = log.append(Delta("a", create([1])), Delta("b", create([1])), Delta("a", scale(2)))
        log.append(Delta("c", create([1])))
        sink = JsonLinesSink(path)
        await sink.open(log)
        await sink.apply([Delivery(first, np.array([1], np.intp)), Delivery(log.batches[1])])
        await sink.apply([redelivery(first, 0)])
        await sink.apply([redelivery(first, 0)])
        await sink.aclose()

        reopened = JsonLinesSink(path)
        assert (await reopened.open(log)).cursor.next_offset == 4
        await reopened.apply([redelivery(first, 0, 2)])
        await reopened.apply(log.deliveries())
        log.append(Delta("c", scale(3)))
        await reopened.apply(log.deliveries(3))
        assert reopened.statistics().duplicates == 6
        assert log.commits[-1] == 5
        await reopened.aclose()

    anyio.run(main)
    written = [(line["offset"], line.get("redelivered"), line["cursor"][-1]) for line in lines(path)]
    assert written == [(1, None, "2"), (3, None, "4"), (0, True, "4"), (2, True, "4"), (4, None, "5")]


def test_rows_below_a_line_redelivered_early_are_still_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        for number in range(4):
            log.append(Delta("abcd"[number], create([number])))
        sink = JsonLinesSink(path)
        await sink.open(log)
        await sink.apply([Delivery(log.batches[0])])
        await sink.apply([redelivery(log.batches[2], 0)])
        await sink.aclose()
        reopened = JsonLinesSink(path)
        assert (await reopened.open(log)).cursor.next_offset == 1
        await reopened.apply(log.deliveries()[:2])
        await reopened.apply(log.deliveries())
        await reopened.aclose()

    anyio.run(main)
    written = [(line["offset"], line.get("ahead")) for line in lines(path)]
    assert written == [(0, None), (2, [2]), (1, [2]), (3, None)]


def test_line_of_another_log_is_not_a_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        for log_id in (b"1" * 16, b"2" * 16):
            log = FakeLog(log_id)
            first = log.append(Delta("a", create([1])), Delta("b", create([1])))
            sink = JsonLinesSink(path)
            await sink.open(log)
            await sink.apply([Delivery(first, np.array([1], np.intp))])
            await sink.apply([redelivery(first, 0)])
            await sink.aclose()

    anyio.run(main)
    assert [line["offset"] for line in lines(path)] == [1, 0, 1, 0]


def test_highest_lamport_number_survives_lower_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        for number, lamport in enumerate((900, 20)):
            log.forward(encode_batch([Delta("ab"[number], create([1]))], origin=7, base=number + 1), lamport)
        sink = JsonLinesSink(path)
        await sink.open(log)
        await sink.apply(log.deliveries())
        await sink.aclose()
        reopened = JsonLinesSink(path)
        assert (await reopened.open(log)).lamport == 900
        await reopened.aclose()

    anyio.run(main)
    assert [(line["lamport"], line.get("lamport_max")) for line in lines(path)] == [(900, None), (20, 900)]


def test_committed_offset_never_exceeds_last_line(tmp_path: Path) -> None:
    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])), Delta("other", create([1])))
        sink = JsonLinesSink(tmp_path / "out.jsonl")
        await sink.open(log)
        await sink.apply([Delivery(log.batches[0], np.array([0], np.intp))])
        assert log.commits == [
            1
        ]  # no line shows that row 1, for other sinks, was passed: a restart resumes there
        await sink.aclose()

    anyio.run(main)


def test_deleted_file_stops_the_sink(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    async def main() -> None:
        log = FakeLog()
        log.append(Delta("a", create([1])))
        sink = JsonLinesSink(path)
        await sink.open(log)
        path.unlink()
        with pytest.raises(
            StopSink, match=r"out\.jsonl was deleted while in use: detach the sink and attach"
        ):
            await sink.apply(log.deliveries())
        await sink.aclose()
        assert not path.exists()

    anyio.run(main)
