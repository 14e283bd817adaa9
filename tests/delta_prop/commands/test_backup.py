"""`log export --to` copies a served directory; `log restore` makes a directory to serve from the copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from delta_prop import LogSettings, Propagator
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.segments.paths import LOCK_PATH
from delta_prop_sinks import CallbackSink, StorageSink
from delta_prop_wire.delta import Delta, create
from delta_prop_wire.errors import Refused
from tests.delta_prop.commands.support import create_line, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.support import Command

SMALL = LogSettings(segment_bytes_max=4096, bytes_max=1 << 20, retention_bytes=1 << 19)


def test_served_directory_is_exported_restored_and_served(command: Command, tmp_path: Path) -> None:
    delivered_offsets: list[int] = []

    async def publish(propagator: Propagator, count: int) -> None:
        for number in range(count):
            await propagator.publish(Delta(f"v{number}", create([float(number)])))

    async def serve() -> None:
        async with Propagator(data=str(command.data), log=SMALL) as p:
            await p.attach(CallbackSink(lambda offset, _: delivered_offsets.append(offset), name="audit"))
            await p.attach(StorageSink(tmp_path / "store.db"))
            await publish(p, 50)
            await p.wait_visible(50)
            await anyio.sleep(1.2)  # the service writes the sink's cursor within a second
            result = command("log", "export", "--to", tmp_path / "backup")
            assert (result.status, result.err) == (0, "")
            assert "offsets 0 to 50," in result.out
            await publish(p, 5)
            await p.wait_visible(55)

    async def serve_restored() -> None:
        async with Propagator(data=str(command.data), log=SMALL) as p:
            assert p.recovery is not None
            assert (p.recovery.clean, p.recovery.next_offset) == (True, 50)
            # The sink's cursor is beyond the end of the backup.
            with pytest.raises(Refused, match="up to 50"):
                await p.attach(StorageSink(tmp_path / "store.db"))
            await p.attach(CallbackSink(lambda offset, _: delivered_offsets.append(offset), name="audit"))
            await publish(p, 2)
            await p.wait_visible(52)

    anyio.run(serve)
    assert command("log", "restore", "--from", tmp_path / "backup").status == 2, (
        "restore accepted a data directory that is not empty"
    )
    command.data = tmp_path / "restored"
    result = command("log", "restore", "--from", tmp_path / "backup")
    assert (result.status, result.err) == (0, "")
    assert command("log", "verify").status == 0
    assert command("get", "v7", "--namespace", "default").lines[0]["vector"] == [7.0]
    anyio.run(serve_restored)
    assert delivered_offsets == [*range(55), 50, 51], "the backup did not contain the cursor"


def read_files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_export_changes_no_file_of_the_directory(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(5))
    (command.data / LOCK_PATH).unlink()
    before = read_files(command.data)
    assert command("log", "export", "--to", tmp_path / "backup").status == 0
    assert read_files(command.data) == before, "the export changed a file"
    assert not list(tmp_path.glob("*.partial"))


def test_export_takes_no_lock(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(5))
    lock = LocalDisk(command.data).lock(LOCK_PATH)
    (command.data / LOCK_PATH).write_text("1\n")  # as if another process held the lock
    before = read_files(command.data)
    try:
        assert command.publish(create_lines(1)).status == 1, (
            "a publish succeeded while another process held the lock"
        )
        assert command("log", "export", "--to", tmp_path / "backup").status == 0
        assert read_files(command.data) == before
    finally:
        lock.release()
    assert command.publish(create_lines(1)).status == 0, "the lock is still held"


@pytest.mark.parametrize("source", ["nosuch", "."])
def test_restore_from_a_non_backup_is_refused(
    source: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("log", "restore", "--from", source)
    assert result.status == 2
    assert "name the copy that `log export --to DIR` made" in result.err
    assert "publish" not in result.err


def test_mistake_is_reported_in_one_line_with_its_fix(command: Command, tmp_path: Path) -> None:
    backup, occupied = tmp_path / "backup", tmp_path / "full"
    occupied.mkdir()
    (occupied / "mine").write_text("x")
    missing = command("log", "export", "--to", backup)
    assert (missing.status, missing.err.count("\n")) == (2, 1)
    command.publish([create_line("a")])
    for to, why in ((occupied, "not empty: name a new directory"), (command.data, "not empty")):
        result = command("log", "export", "--to", to)
        assert (result.status, result.err.count("\n")) == (2, 1)
        assert why in result.err
    for other_option in (
        ["--stream", "default"],
        ["--partition", "0"],
        ["--count", "1"],
        ["--format", "frames"],
        ["--output", tmp_path / "f"],
        ["--skip-corrupt"],
    ):
        result = command("log", "export", "--to", backup, *other_option)
        assert (result.status, "leave the other options out" in result.err) == (2, True)
    (tmp_path / "backup.partial").mkdir()
    result = command("log", "export", "--to", backup)
    assert (result.status, "interrupted copy: remove it first" in result.err) == (2, True)
    (tmp_path / "backup.partial").rmdir()
    backup.mkdir()  # an empty directory is accepted
    assert command("log", "export", "--to", backup).status == 0


def test_export_of_a_corrupted_log_leaves_no_copy(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(5))
    path = command.segment()
    raw = bytearray(path.read_bytes())
    raw[200] ^= 1
    path.write_bytes(raw)
    result = command("log", "export", "--to", tmp_path / "backup")
    assert result.status == 1
    assert "corruption in" in result.err
    assert not list(tmp_path.glob("backup*"))
