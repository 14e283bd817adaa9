"""LocalDisk stays within its root, keeps files private to their owner, and changes nothing on reads."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from delta_prop_broker.local_disk import LocalDisk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from typing_extensions import Buffer

HOLDER_SCRIPT = """
import sys
from delta_prop_broker.local_disk import LocalDisk
lock = LocalDisk(sys.argv[1]).lock("lock")
print("held", flush=True)
sys.stdin.read()
"""


def test_files_and_directories_are_private_to_their_owner(tmp_path: Path) -> None:
    root = tmp_path / "parent" / "data"
    disk = LocalDisk(root)
    assert not root.exists()
    disk.make_directory("d/e")
    disk.open("d/e/f", create=True).close()
    disk.lock("lock").release()
    modes = {path.name: path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}
    assert modes == {"data": 0o700, "d": 0o700, "e": 0o700, "f": 0o600, "lock": 0o600}
    assert root.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "call",
    [
        lambda disk: disk.open("link"),
        lambda disk: disk.open("link", read_only=True),
        lambda disk: disk.open("link", create=True),
        lambda disk: disk.open("dangling", create=True),
        lambda disk: disk.lock("dangling"),
        lambda disk: disk.open("outside/secret"),
        lambda disk: disk.open("outside/new", create=True),
        lambda disk: disk.list("outside"),
        lambda disk: disk.make_directory("outside/new"),
        lambda disk: disk.rename("mine", "outside/new"),
        lambda disk: disk.rename("outside/secret", "mine"),
        lambda disk: disk.rename("link", "mine"),
        lambda disk: disk.remove("link"),
        lambda disk: disk.remove("outside/secret"),
        lambda disk: disk.sync_directory("outside"),
    ],
)
def test_symbolic_link_is_not_followed(tmp_path: Path, call: Callable[[LocalDisk], object]) -> None:
    outside, root = tmp_path / "elsewhere", tmp_path / "data"
    outside.mkdir()
    root.mkdir()
    (outside / "secret").write_text("secret")
    (root / "mine").write_text("mine")
    (root / "outside").symlink_to(outside)
    (root / "link").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "none")
    with pytest.raises(OSError) as caught:
        call(LocalDisk(root))
    assert caught.value.errno == errno.ELOOP
    assert [path.name for path in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert sorted(os.listdir(root)) == ["dangling", "link", "mine", "outside"]


def test_root_directory_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to("real")
    LocalDisk(tmp_path / "data").open("f", create=True).close()
    assert os.listdir(tmp_path / "real") == ["f"]


def test_pipe_instead_of_a_file_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for read_only in (True, False):
        with pytest.raises(OSError, match="is not a regular file"):
            LocalDisk(tmp_path).open("pipe", read_only=read_only)


def test_missing_root_has_no_files_and_cannot_be_locked(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path / "none")
    assert disk.list("") == []
    for call in (disk.open, disk.lock, disk.sync_directory, disk.remove):
        with pytest.raises(FileNotFoundError):
            call("a")
    assert os.listdir(tmp_path) == []


def test_reading_changes_nothing_on_disk(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("d")
    disk.open("d/f", create=True).write(0, [b"text"])
    (tmp_path / "d" / "f").chmod(0o400)
    (tmp_path / "d").chmod(0o500)
    before = [(path, path.stat()) for path in [tmp_path, *sorted(tmp_path.rglob("*"))]]
    file = disk.open("d/f", read_only=True)
    assert (file.read(0, 9), file.size(), disk.list("d")) == (b"text", 4, ["f"])
    file.sync()
    file.close()
    with pytest.raises(FileNotFoundError):
        disk.open("d/none", read_only=True)
    for path, old in before:
        new = path.stat()
        assert (new.st_mtime_ns, new.st_ctime_ns, new.st_mode) == (
            old.st_mtime_ns,
            old.st_ctime_ns,
            old.st_mode,
        )
    (tmp_path / "d").chmod(0o700)


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER_SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=f"process {holder.pid}: stop that one"):
            disk.lock("lock")
        holder.kill()
    assert (tmp_path / "lock").read_text() == f"{holder.pid}\n"
    lock = disk.lock("lock")
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    lock.release()


def test_lock_with_a_replaced_file_is_taken_on_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = LocalDisk(tmp_path)
    real_flock = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real_flock)
        real_flock(descriptor, operation)
        (tmp_path / "lock").unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = disk.lock("lock")
    with pytest.raises(BlockingIOError):
        disk.lock("lock")
    lock.release()


def test_short_write_is_returned_and_short_read_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LocalDisk(tmp_path).open("f", create=True)
    real_write, real_read = os.pwritev, os.pread

    def pwritev(descriptor: int, parts: Sequence[Buffer], position: int) -> int:
        return real_write(descriptor, [b"".join(parts)[:1500]], position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    assert (
        file.write(0, [b"x"] * 3000) == 1024 + 1024 + 952
    )  # groups of 1,024 buffers, each below 1,500 bytes
    assert (
        file.write(0, [b"yy"] * 3000) == 1500
    )  # the first group is larger, and nothing is written after a gap
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real_read(fd, min(size, 7), at))
    assert file.read(1490, 20) == b"y" * 10 + b"x" * 10
    assert len(file.read(0, 10_000)) == 3000


def test_failed_sync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDisk(tmp_path)
    file = disk.open("f", create=True)
    synced: list[str] = []

    def fail(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    monkeypatch.setattr(os, "fsync", fail)
    for call, path in ((file.sync, tmp_path / "f"), (lambda: disk.sync_directory(""), tmp_path)):
        with pytest.raises(OSError, match="Input/output error") as caught:
            call()
        assert caught.value.filename == str(path)
    assert synced == [str(tmp_path / "f"), str(tmp_path)]


def test_no_file_descriptor_is_leaked(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    disk.make_directory("d/e")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        disk.open("d/e/f", create=True).close()
        disk.rename("d/e/f", "d/f")
        disk.list("d/e")
        disk.sync_directory("d/e")
        disk.make_directory("d/e/g")
        lock = disk.lock("d/lock")
        for call in (disk.lock, disk.open, disk.list, disk.remove):
            with pytest.raises(OSError):
                call("d/lock" if call == disk.lock else "d/f/none")
        lock.release()
        disk.remove("d/f")
    assert len(os.listdir("/proc/self/fd")) == before
