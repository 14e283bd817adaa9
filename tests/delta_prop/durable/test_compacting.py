"""A service that compacts while it runs: retained rows, output of the commands, no partial files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from delta_prop.api.propagator import Propagator
from delta_prop.cli import main
from delta_prop.delivery.sink_context import read_history
from delta_prop.partition.storage import background
from delta_prop_broker.log.durable import DurableLog
from delta_prop_broker.log.settings import LogSettings
from delta_prop_broker.segments.paths import DIRECTORY
from delta_prop_wire.delta import Delta, create, delete, scale, sparse_add
from tests.delta_prop.commands.support import Command

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = LogSettings(
    segment_bytes_max=2_500,
    bytes_max=30_000,
    retention_bytes=8_000,
    free_bytes_min=0,
    reserve_bytes=0,
)
KEYS = 7


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "COMPACTION_POLL_S", 0.005)


def make_delta(number: int) -> Delta:
    if number == 8:
        return Delta("gone", delete(), "n")
    key = f"v{number % KEYS}"
    if number < KEYS:
        return Delta(key, create([1.0, float(number)]), "n", metadata={"k": number})
    return Delta(key, (scale(-1.0), sparse_add([0], [1.0]))[number // KEYS % 2], "n")


async def publish_and_compact(data: Path, count: int = 300) -> tuple[int, int]:
    """Publish `count` deltas, retrying on LOG_FULL; return the snapshot's offset and the log's end."""
    async with Propagator(data=data, log=SETTINGS) as p:
        for number in range(count):
            await p.publish(make_delta(number))
        statistics = p.statistics().log
        with anyio.fail_after(60):  # the covered segments are removed shortly after the snapshot is made
            while statistics.compacting or statistics.start_offset != statistics.snapshot_offset:  # type: ignore[union-attr]
                await anyio.sleep(0.01)
                statistics = p.statistics().log
        assert statistics.snapshots_made >= 2  # type: ignore[union-attr]
        assert statistics.bytes <= SETTINGS.bytes_max
        log = p.internals().partition.log
        assert isinstance(log, DurableLog)
        assert log.start_offset == statistics.snapshot_offset  # type: ignore[union-attr]
        history = [entry for entry in read_history(log, [("n", "v1")]) if entry is not None]
        logged, row = history[0]
        assert logged.batch.is_state
        assert logged.row_offset(row) < log.start_offset
        expected = [number for number in range(count) if make_delta(number).vector_id == "v1"]
        after_start = [number for number in expected if number >= log.start_offset]
        assert [logged.offset for logged, _ in history[1:]] == after_start
        return log.start_offset, log.next_offset


def test_commands_read_the_snapshots_of_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(tmp_path, capsys)
    start, end = anyio.run(publish_and_compact, command.data)
    assert not list(command.data.rglob("*.new"))
    for name in ("v0", "v3"):
        for offset in (start - 1, start, start + 3, end - 1):
            answer = command("get", name, "--namespace", "n", "--at", offset).lines[0]
            vector = expected_vector(name, offset)
            assert (answer["vector"], answer["snapshot_at"]) == (vector, start)
    early = command("get", "v1", "--namespace", "n", "--at", start - 2)
    assert early.status == 1
    assert f"the log holds uncompacted deltas from offset {start}" in early.err
    assert command("get", "v1", "--namespace", "n", "--at", "2020-01-01").status == 1
    earliest = command("get", "v1", "--namespace", "n", "--at", "earliest")
    assert earliest.lines[0]["vector"] == expected_vector("v1", start - 1)
    assert command("get", "gone", "--namespace", "n").status == 1
    answer = command("status", "--json").lines[0]["snapshot"]
    assert answer["offset"] == start
    assert answer["rows"] in (KEYS, KEYS + 1), "with the tombstone of `gone`, or without"
    assert f"snapshot at offset {start}: " in command("log", "show").out
    verified = command("log", "verify")
    assert verified.status == 0
    assert f"rows at offset {start}: intact" in verified.out


def expected_vector(name: str, last: int) -> list[float]:
    vector = [0.0, 0.0]
    for number in range(last + 1):
        delta = make_delta(number)
        if delta.vector_id != name:
            continue
        if number < KEYS:
            vector = [1.0, float(number)]
        elif number // KEYS % 2:
            vector[0] += 1.0
        else:
            vector = [-value for value in vector]
    return vector


def test_corrupted_snapshot_is_reported_by_every_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = Command(tmp_path, capsys)
    anyio.run(publish_and_compact, command.data)
    (path,) = (command.data / DIRECTORY).glob("*.snapshot")
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    for arguments in (["log", "verify"], ["get", "v1", "--namespace", "n"]):
        finished = command(*arguments)
        assert finished.status == 1
        assert path.name in finished.err
        assert "byte 176" in finished.err
    raw[20] ^= 1
    path.write_bytes(raw)
    finished = command("status", "--json")
    assert (finished.status, finished.lines[0]["health"]) == (1, "corrupted")


def test_close_during_compaction_leaves_no_partial_file(tmp_path: Path) -> None:
    async def publish(p: Propagator) -> None:
        for number in range(100_000):
            await p.publish(make_delta(number))

    async def close_early() -> None:
        async with Propagator(data=tmp_path / "data", log=SETTINGS) as p, anyio.create_task_group() as tasks:
            tasks.start_soon(publish, p)
            with anyio.fail_after(60):
                while not p.statistics().log.compacting:  # type: ignore[union-attr]
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    anyio.run(close_early)
    assert not list(tmp_path.rglob("*.new"))
    assert main(["log", "verify", "--data", str(tmp_path / "data")]) == 0
