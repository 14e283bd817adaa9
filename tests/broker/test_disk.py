"""The contract of a disk: LocalDisk and SimDisk give the same results and errors for the same calls."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from delta_prop_broker.disk import CHUNK_BYTES_MAX, FileRange
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.subdirectory import Subdirectory
from delta_prop_simulations.disk import SimDisk

if TYPE_CHECKING:
    from collections.abc import Callable

    from delta_prop_broker.disk import Disk, File


@pytest.fixture(params=["local", "simulated", "below"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """An empty disk of each kind."""
    if request.param == "simulated":
        return SimDisk()
    if request.param == "local":
        return LocalDisk(tmp_path)
    below = Subdirectory(LocalDisk(tmp_path), "streams/orders-1")
    below.make_directory("")
    return below


def test_written_bytes_are_read_back(disk: Disk) -> None:
    file = disk.open("a", create=True)
    assert file.write(0, [b"one", bytearray(b"two"), memoryview(b"three"), b""]) == 11
    assert file.read(0, 100) == b"onetwothree"
    assert file.read(3, 3) == b"two"
    assert (file.read(11, 5), file.read(500, 5), file.read(0, 0)) == (b"", b"", b"")
    assert file.write(1, [b"NE"]) == 2
    assert disk.open("a", read_only=True).read(0, 4) == b"oNEt"


def test_write_of_many_buffers_is_complete(disk: Disk) -> None:
    parts = [b"%05d" % number for number in range(3000)]
    file = disk.open("a", create=True)
    assert file.write(7, parts) == 15_000
    assert file.read(7, 20_000) == b"".join(parts)
    assert file.write(0, []) == file.write(20_000, [b""]) == 0
    assert file.size() == 15_007


def test_file_range_is_read_in_chunks_and_must_exist(disk: Disk) -> None:
    body = bytes(range(256)) * 3000
    file = disk.open("a", create=True)
    file.write(0, [body])
    pieces = list(FileRange(file, 5, 700_000).chunks())
    assert b"".join(pieces) == body[5:700_005]
    assert max(map(len, pieces)) <= CHUNK_BYTES_MAX
    assert list(FileRange(file, 5, 100).chunks(90)) == [body[95:105]]
    with pytest.raises(OSError, match="ends at byte 768000, 4 bytes before the range does"):
        list(FileRange(file, len(body) - 1, 5).chunks())


def test_only_a_local_file_has_a_descriptor(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.write(0, [b"text"])
    number = file.descriptor()
    assert (number is None) == isinstance(disk, SimDisk)
    assert number is None or os.pread(number, 9, 0) == b"text"
    file.close()
    assert file.descriptor() is None


def test_unwritten_bytes_read_as_zeros(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.write(1000, [b"x"])
    assert file.read(0, 1001) == bytes(1000) + b"x"
    file.truncate(10)
    file.truncate(20)
    assert file.read(0, 30) == bytes(20)
    file.write(5, [b"y"])
    file.truncate(6)
    assert (file.size(), file.read(0, 30)) == (6, bytes(5) + b"y")


def test_allocated_bytes_count_until_truncated(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.write(0, [b"text"])
    file.allocate(10_000)
    file.allocate(100)
    file.sync()
    assert (file.size(), file.read(0, 20_000)) == (10_000, b"text" + bytes(9_996))
    file.truncate(2)
    assert (file.size(), file.read(0, 10)) == (2, b"te")
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.open("a", read_only=True).allocate(5)


def test_open_file_outlives_its_name(disk: Disk) -> None:
    first, second = disk.open("a", create=True), disk.open("b", create=True)
    first.write(0, [b"first"])
    second.write(0, [b"second"])
    disk.rename("a", "b")
    assert second.read(0, 10) == b"second"
    assert disk.open("b").read(0, 10) == b"first"
    disk.remove("b")
    assert first.read(0, 10) == b"first"
    assert disk.list("") == disk.list(".") == []


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda disk: disk.open("none"), errno.ENOENT),
        (lambda disk: disk.open("none/a", create=True), errno.ENOENT),
        (lambda disk: disk.open("d"), errno.EISDIR),
        (lambda disk: disk.open("d", read_only=True), errno.EISDIR),
        (lambda disk: disk.open("d", create=True), errno.EISDIR),
        (lambda disk: disk.open("f/a"), errno.ENOTDIR),
        (lambda disk: disk.list("f"), errno.ENOTDIR),
        (lambda disk: disk.make_directory("f"), errno.ENOTDIR),
        (lambda disk: disk.make_directory("f/a"), errno.ENOTDIR),
        (lambda disk: disk.remove("none"), errno.ENOENT),
        (lambda disk: disk.remove("d"), errno.EISDIR),
        (lambda disk: disk.rename("none", "f"), errno.ENOENT),
        (lambda disk: disk.rename("f", "none/f"), errno.ENOENT),
        (lambda disk: disk.rename("f", "d"), errno.EISDIR),
        (lambda disk: disk.rename("d", "e"), errno.EISDIR),
        (lambda disk: disk.sync_directory("none"), errno.ENOENT),
        (lambda disk: disk.sync_directory("f"), errno.ENOTDIR),
        (lambda disk: disk.lock("d"), errno.EISDIR),
        (lambda disk: disk.lock("none/lock"), errno.ENOENT),
        (lambda disk: disk.open("f").read(-1, 1), errno.EINVAL),
        (lambda disk: disk.open("f").write(-1, [b"x"]), errno.EINVAL),
        (lambda disk: disk.open("f").truncate(-1), errno.EINVAL),
        (lambda disk: disk.open("f", read_only=True).write(0, [b"x"]), errno.EBADF),
        (lambda disk: disk.open("f", read_only=True).truncate(0), errno.EINVAL),
    ],
)
def test_failed_call_has_the_same_errno_and_changes_nothing(
    disk: Disk, call: Callable[[Disk], object], code: int
) -> None:
    disk.make_directory("d")
    disk.open("f", create=True).write(0, [b"kept"])
    with pytest.raises(OSError) as caught:
        call(disk)
    assert caught.value.errno == code
    assert caught.value.filename
    assert (disk.list(""), disk.list("d")) == (["d", "f"], [])
    assert disk.open("f").read(0, 9) == b"kept"


@pytest.mark.parametrize("path", ["/a", "a//b", "../a", "a/../../b", "a/./b", "a/", "a\0b", "/"])
def test_path_outside_the_data_directory_is_refused(disk: Disk, path: str) -> None:
    for call in (disk.open, disk.list, disk.make_directory, disk.remove, disk.sync_directory, disk.lock):
        with pytest.raises(ValueError, match="not below the data directory"):
            call(path)
    with pytest.raises(ValueError, match="not below the data directory"):
        disk.rename("a", path)
    assert disk.list("") == []


def test_root_is_not_a_file_and_read_only_creates_nothing(disk: Disk) -> None:
    for call in (disk.open, disk.remove, disk.lock):
        with pytest.raises(ValueError, match="is the data directory itself"):
            call("")
    with pytest.raises(ValueError, match="choose one"):
        disk.open("a", create=True, read_only=True)
    assert disk.list("") == []


def test_closed_file_refuses_every_call(disk: Disk) -> None:
    file = disk.open("a", create=True)
    file.close()
    file.close()
    other = disk.open("b", create=True)  # may reuse the descriptor number of the closed file
    for call in (lambda: file.read(0, 1), lambda: file.write(0, [b"x"]), file.sync, file.size):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EBADF
    assert other.size() == 0


def test_second_lock_fails_and_names_the_holder(disk: Disk) -> None:
    lock = disk.lock("lock")
    text = disk.open("lock", read_only=True).read(0, 100)
    with pytest.raises(BlockingIOError, match=f"by process {text.decode().strip()}: stop that one"):
        disk.lock("lock")
    other = disk.lock("other")
    lock.release()
    lock.release()
    second = disk.lock("lock")
    with pytest.raises(BlockingIOError):
        disk.lock("lock")
    assert disk.list("") == ["lock", "other"]
    second.release()
    other.release()


def test_free_bytes_are_reported(disk: Disk) -> None:
    assert disk.free_bytes() > 0


# --- random calls

PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "d", "d/e", "a/b", ""])
POSITIONS = st.one_of(st.integers(0, 40), st.integers(500, 530), st.just(1024))


class DiskComparison(RuleBasedStateMachine):
    """Makes the same random calls on both disks; each pair must give the same result or the same error."""

    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.disks: tuple[Disk, Disk] = (LocalDisk(self.root), SimDisk())
        self.opened: list[tuple[File, File]] = []

    def teardown(self) -> None:
        """Close all files and remove the directory of the local disk."""
        for pair in self.opened:
            for file in pair:
                file.close()
        shutil.rmtree(self.root)

    def on_both(self, call: Callable[[Disk], object]) -> list[object]:
        """Call both disks; return their results."""
        return [result_of(call, disk) for disk in self.disks]

    def check_same(self, call: Callable[[Disk], object]) -> None:
        """Check that both disks give the same result."""
        local, simulated = self.on_both(call)
        assert local == simulated

    @rule(target=files, path=PATHS, create=st.booleans(), read_only=st.booleans())
    def open(self, path: str, create: bool, read_only: bool) -> tuple[File, File] | None:
        """Open a file on both disks; return the handles, or None if both fail with the same error."""
        local, simulated = self.on_both(lambda disk: disk.open(path, create=create, read_only=read_only))
        if isinstance(local, str) or isinstance(simulated, str):
            assert local == simulated
            return None
        self.opened.append((local, simulated))  # type: ignore[arg-type]
        return self.opened[-1]

    def on_file(self, pair: tuple[File, File] | None, call: Callable[[File], object]) -> None:
        """Check that both handles of a file give the same result."""
        if pair is not None:
            assert result_of(call, pair[0]) == result_of(call, pair[1])

    @rule(pair=files, at=POSITIONS, size=POSITIONS)
    def read(self, pair: tuple[File, File] | None, at: int, size: int) -> None:
        self.on_file(pair, lambda file: file.read(at, size))

    @rule(pair=files, at=POSITIONS, parts=st.lists(st.binary(max_size=600), max_size=3))
    def write(self, pair: tuple[File, File] | None, at: int, parts: list[bytes]) -> None:
        self.on_file(pair, lambda file: file.write(at, parts))

    @rule(pair=files, size=POSITIONS)
    def truncate(self, pair: tuple[File, File] | None, size: int) -> None:
        self.on_file(pair, lambda file: file.truncate(size))

    @rule(pair=files, close=st.booleans())
    def sync_or_close(self, pair: tuple[File, File] | None, close: bool) -> None:
        """Sync or close a file; without a crash, a sync has no visible effect."""
        self.on_file(pair, lambda file: file.close() if close else file.sync())

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: str, new: str) -> None:
        """Rename a file, also over an existing one."""
        self.check_same(lambda disk: disk.rename(old, new))

    @rule(path=PATHS)
    def remove(self, path: str) -> None:
        self.check_same(lambda disk: disk.remove(path))

    @rule(path=PATHS)
    def remove_directory(self, path: str) -> None:
        """Remove a directory, if it is empty."""
        self.check_same(lambda disk: disk.remove_directory(path))

    @rule(path=PATHS)
    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""
        self.check_same(lambda disk: disk.make_directory(path))

    @rule(path=PATHS)
    def sync_directory(self, path: str) -> None:
        """Sync a directory, which has no visible effect without a crash."""
        self.check_same(lambda disk: disk.sync_directory(path))

    @invariant()
    def same_names(self) -> None:
        """Check that both disks list the same names in every directory."""
        for path in ("", "d", "d/e"):
            self.check_same(lambda disk, path=path: disk.list(path))  # type: ignore[misc]


def result_of(call: Callable[[Disk], object] | Callable[[File], object], target: object) -> object:
    """Return a call's result, or its error as text."""
    try:
        return call(target)  # type: ignore[arg-type]
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"
    except ValueError as error:
        return f"ValueError {error}"


def test_random_calls_give_the_same_results(full: bool) -> None:
    limits = settings(max_examples=1000 if full else 40, stateful_step_count=30)
    run_state_machine_as_test(DiskComparison, settings=limits)
