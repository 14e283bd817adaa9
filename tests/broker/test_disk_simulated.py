"""SimDisk: synced data survive a crash, unsynced data may be lost, and faults occur as injected."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from random import Random

import pytest

from delta_prop_simulations.disk import SimCrash, SimDisk, nth
from delta_prop_simulations.disk_media import SECTOR

NAMES = ("a", "b", "c")
DIRECTORIES = ("", "d", "e")


class History:
    """A file and its contents since its last sync; after a crash, each sector is from one of these."""

    def __init__(self, disk: SimDisk, path: str = "f") -> None:
        self.path = path
        self.disk = disk
        self.file = disk.open(path, create=True)
        disk.sync_directory("")
        self.contents = [b""]

    def write(self, at: int, data: bytes) -> None:
        self.file.write(at, [data])
        self.contents.append(self.disk.peek(self.path))

    def truncate(self, size: int) -> None:
        self.file.truncate(size)
        self.contents.append(self.disk.peek(self.path))

    def sync(self) -> None:
        """Sync the file: only its current content remains possible."""
        self.file.sync()
        self.contents = [self.disk.peek(self.path)]

    def check(self, content: bytes) -> None:
        """Check that the length, and each sector, is possible after a crash."""
        sizes = [len(content) for content in self.contents]
        assert min(sizes) <= len(content) <= max(sizes)
        longest = max(sizes) + SECTOR
        padded = [content.ljust(longest, b"\0") for content in self.contents]
        for at in range(0, len(content), SECTOR):
            end = min(at + SECTOR, len(content))
            assert content[at:end] in {possible[at:end] for possible in padded}, f"sector at {at}"


def change_at_random(history: History, rng: Random, steps: int) -> None:
    """Write (mostly at the end), truncate and sync at random."""
    for _ in range(steps):
        size = len(history.contents[-1])
        choice = rng.random()
        if choice < 0.6:
            history.write(size, rng.randbytes(rng.choice((1, 30, 512, 900, 3000))))
        elif choice < 0.75:
            history.write(rng.randint(0, size + 600), rng.randbytes(rng.randint(0, 700)))
        elif choice < 0.85:
            history.truncate(rng.randint(0, size + 600))
        else:
            history.sync()


def test_crash_keeps_synced_data_and_any_part_of_the_rest(full: bool) -> None:
    faults: Counter[str] = Counter()
    all_survived = all_lost = 0  # crashes that kept all unsynced changes, or lost them all
    runs, crashes = (2_000, 50) if full else (60, 25)
    for seed in range(runs):
        disk, rng = SimDisk(seed), Random(seed)
        history = History(disk)
        change_at_random(history, rng, rng.randint(1, 25))
        now = disk.peek("f")
        for crash_seed in range(crashes):
            content = disk.crash(crash_seed).peek("f")
            history.check(content)
            if len(history.contents) > 1 and history.contents[0] != now:
                all_survived += content == now
                all_lost += content == history.contents[0]
        assert disk.peek("f") == now  # the running process notices nothing
        faults += disk.fault_counts
    print(f"{runs * crashes} crashes: {dict(faults)}")
    assert min(all_survived, all_lost) > 20
    for fault in ("torn", "size between", "sectors lost", "sectors kept", "sectors stale"):
        assert faults[fault] > 20, fault


def test_sectors_of_an_overwrite_survive_independently() -> None:
    disk = SimDisk()
    disk.put("f", b"o" * 3 * SECTOR)
    disk.open("f").write(0, [b"n" * 3 * SECTOR])
    outcomes = {disk.crash(crash_seed).peek("f")[::SECTOR] for crash_seed in range(200)}
    assert outcomes == {b"ooo", b"oon", b"ono", b"onn", b"noo", b"non", b"nno", b"nnn"}


def test_truncated_data_does_not_return_when_the_file_grows() -> None:
    disk = SimDisk()
    disk.put("f", b"o" * 3000)
    file = disk.open("f")
    file.truncate(100)
    file.truncate(3000)
    file.sync()
    assert {disk.crash(crash_seed).peek("f") for crash_seed in range(20)} == {b"o" * 100 + bytes(2900)}
    file.truncate(50)
    lengths = [len(disk.crash(crash_seed).peek("f")) for crash_seed in range(100)]
    assert (min(lengths), max(lengths)) == (50, 3000)
    assert len(set(lengths)) > 10


def test_crash_after_sync_always_finds_the_same_data() -> None:
    for seed in range(30):
        disk, rng = SimDisk(seed), Random(seed)
        history = History(disk)
        change_at_random(history, rng, 20)
        history.sync()
        for crash_seed in range(10):
            after = disk.crash(crash_seed)
            assert after.peek("f") == after.crash(crash_seed).peek("f") == disk.peek("f")


def test_killed_process_loses_only_its_locks() -> None:
    disk = SimDisk(3)
    history = History(disk)
    change_at_random(history, Random(3), 20)
    history.write(0, b"not synced")
    disk.open("new", create=True)
    disk.lock("lock")
    after = disk.kill()
    assert after.paths() == disk.paths()
    assert after.peek("f") == disk.peek("f")
    lock = after.lock("lock")
    assert (disk.peek("lock"), after.peek("lock")) == (b"1\n", b"2\n")
    lock.release()
    with pytest.raises(BlockingIOError, match="process 1"):
        disk.lock("lock")
    outcomes = {after.crash(crash_seed).peek("f") for crash_seed in range(50)}
    assert len(outcomes) > 1  # the data is still not on the media
    for content in outcomes:
        history.check(content)
    after.open("f").write(0, [b"the successor's"])
    assert disk.peek("f").startswith(b"not synced")


def test_disk_copy_and_original_are_independent() -> None:
    disk = SimDisk()
    file = disk.open("f", create=True)
    file.write(0, [b"first"])
    file.sync()
    disk.sync_directory("")
    for successor in (disk.kill, disk.crash):
        after, before = successor(), disk.peek("f")
        file.write(0, [b"%05d" % disk.calls])
        file.sync()
        assert after.peek("f") == after.crash().peek("f") == before
        after.open("f").write(0, [b"x"])
        after.open("f").sync()
        assert disk.peek("f") == disk.crash().peek("f") != before


# --- names


def test_file_names_survive_a_crash_in_order_of_change(full: bool) -> None:
    """A directory returns to a state that it had since its last sync, and no file has two names."""
    faults: Counter[str] = Counter()
    runs, crashes = (2_000, 40) if full else (60, 20)
    for seed in range(runs):
        disk, rng = SimDisk(seed), Random(seed)
        for path in DIRECTORIES[1:]:
            disk.make_directory(path)
        disk.sync_directory("")
        states = {path: [names(disk, path)] for path in DIRECTORIES}
        for step in range(rng.randint(1, 20)):
            change_names(disk, rng, step, states)
        for crash_seed in range(crashes):
            after = disk.crash(crash_seed)
            for path in DIRECTORIES:
                assert names(after, path) in states[path]
            contents = [after.peek(path) for path in after.paths()]
            assert len(contents) == len(set(contents))
        faults += disk.fault_counts
    print(f"{runs * crashes} crashes: {dict(faults)}")
    assert min(faults["names lost"], faults["names kept"]) > 100


def names(disk: SimDisk, path: str) -> dict[str, bytes]:
    """Return each file's content by name in a directory; contents are unique."""
    prefix = path + "/" if path else ""
    return {
        file_path.removeprefix(prefix): disk.peek(file_path)
        for file_path in disk.paths()
        if file_path.rpartition("/")[0] == path
    }


def change_names(disk: SimDisk, rng: Random, step: int, states: dict[str, list[dict[str, bytes]]]) -> None:
    """Change the names in the directories, or sync a directory."""

    def random_path() -> str:
        return "/".join(filter(None, (rng.choice(DIRECTORIES), rng.choice(NAMES))))

    choice = rng.random()
    with suppress(FileNotFoundError):
        if choice < 0.4:
            path = random_path()
            if path not in disk.paths():
                new_file = disk.open(path, create=True)
                new_file.write(0, [f"file {step}".encode()])
                new_file.sync()
        elif choice < 0.75:
            disk.rename(random_path(), random_path())
        elif choice < 0.85:
            disk.remove(random_path())
        else:
            path = rng.choice(DIRECTORIES)
            disk.sync_directory(path)
            states[path].clear()
    for path in DIRECTORIES:
        states[path].append(names(disk, path))


def test_synced_file_may_be_lost_until_its_name_is_synced() -> None:
    disk = SimDisk()
    disk.make_directory("d/e")
    file = disk.open("d/e/f", create=True)
    file.write(0, [b"synced"])
    file.sync()
    disk.sync_directory("d/e")
    assert {len(disk.crash(crash_seed).paths()) for crash_seed in range(30)} == {
        0,
        1,
    }  # the name of 'd' is not synced yet
    disk.sync_directory("d")
    disk.sync_directory("")
    assert {tuple(disk.crash(crash_seed).paths()) for crash_seed in range(30)} == {("d/e/f",)}


def test_crash_after_rename_leaves_the_old_or_the_new_file() -> None:
    disk = SimDisk()
    disk.put("mark", b"old")
    new = disk.open("mark.new", create=True)
    new.write(0, [b"new"])
    new.sync()
    disk.rename("mark.new", "mark")
    outcomes = Counter((disk.crash(crash_seed).peek("mark")) for crash_seed in range(60))
    assert set(outcomes) == {b"old", b"new"}
    disk.sync_directory("")
    assert {disk.crash(crash_seed).peek("mark") for crash_seed in range(30)} == {b"new"}


def test_file_renamed_before_its_sync_may_be_empty_after_a_crash() -> None:
    disk = SimDisk()
    disk.put("mark", b"old")
    disk.open("mark.new", create=True).write(0, [b"new"])
    disk.rename("mark.new", "mark")
    disk.sync_directory("")
    outcomes = {disk.crash(crash_seed).peek("mark") for crash_seed in range(60)}
    assert b"new" in outcomes
    assert outcomes & {b"", b"\0\0\0"}


def test_failed_directory_sync_may_lose_names_for_good() -> None:
    outcomes = set()
    for seed in range(30):
        disk = SimDisk(seed)
        disk.open("a", create=True)
        disk.open("b", create=True)
        disk.fail(nth("sync_directory", 1))
        with pytest.raises(OSError, match="Input/output error"):
            disk.sync_directory("")
        disk.sync_directory("")
        outcomes.add(tuple(disk.crash().paths()))
    assert outcomes == {(), ("a",), ("a", "b")}


# --- failures


def test_sync_after_a_failed_sync_succeeds_but_data_is_lost() -> None:
    lost = arrived = dropped_from_cache = 0  # numbers of seeds
    for seed in range(50):
        disk = SimDisk(seed)
        history = History(disk)
        history.write(0, b"a" * 2000)
        history.sync()
        history.write(2000, b"b" * 2000)
        disk.fail(nth("sync", 1))
        with pytest.raises(OSError, match="Input/output error") as caught:
            history.file.sync()
        assert caught.value.errno == errno.EIO
        dropped_from_cache += history.file.read(0, 4000) != history.contents[-1]
        history.file.sync()
        after = disk.crash().peek("f")
        assert after[: 2000 // SECTOR * SECTOR] == b"a" * (2000 // SECTOR * SECTOR)
        lost += after != history.contents[-1]
        arrived += after.count(b"b") > 0
        assert disk.fault_counts["sectors lost by sync"] > 0
    assert lost == 50
    assert 0 < arrived < 50
    assert 0 < dropped_from_cache < 50


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("open", lambda disk: disk.open("f")),
        ("list", lambda disk: disk.list("")),
        ("make_directory", lambda disk: disk.make_directory("d")),
        ("rename", lambda disk: disk.rename("f", "g")),
        ("remove", lambda disk: disk.remove("f")),
        ("sync_directory", lambda disk: disk.sync_directory("")),
        ("lock", lambda disk: disk.lock("lock")),
        ("free_bytes", lambda disk: disk.free_bytes()),
        ("read", lambda disk: disk.open("f").read(0, 1)),
        ("write", lambda disk: disk.open("f").write(0, [b"x"])),
        ("sync", lambda disk: disk.open("f").sync()),
        ("size", lambda disk: disk.open("f").size()),
        ("truncate", lambda disk: disk.open("f").truncate(1)),
    ],
)
def test_error_or_crash_can_be_injected_into_any_call(name: str, call) -> None:  # type: ignore[no-untyped-def]
    disk = SimDisk()
    disk.put("f", b"text")
    disk.fail(nth(name, 1), errno.EROFS)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        call(disk)
    assert caught.value.errno == errno.EROFS
    assert (disk.trace[-1].name, disk.trace[-1].number) == (name, disk.calls)
    assert disk.paths() == ["f"]
    assert disk.fault_counts[f"{name} failed"] == 1
    call(disk)  # the error was injected once

    for moment in ("before", "after"):
        disk = SimDisk()
        disk.put("f", b"text")
        disk.crash_at(nth(name, 1), moment)
        with pytest.raises(
            SimCrash, match=f"went off {moment} call {disk.calls + 1}|went off {moment} call 2"
        ):
            call(disk)
        assert disk.is_off
        with pytest.raises(SimCrash, match="has no disk"):
            disk.list("")
        if name in ("rename", "remove", "make_directory"):
            changed = disk.paths() != ["f"] or "d" in disk.kill().list("")
            assert changed == (moment == "after")


def test_failed_write_leaves_any_part_of_the_data() -> None:
    outcomes = set()
    for seed in range(60):
        disk = SimDisk(seed)
        file = disk.open("f", create=True)
        disk.fail(2, errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            file.write(0, [b"ab", b"cd"])
        outcomes.add(disk.peek("f"))
        assert file.write(0, [b"abcd"]) == 4
    assert outcomes == {b"", b"a", b"ab", b"abc", b"abcd"}


def test_crash_within_a_write_leaves_any_part_of_it() -> None:
    outcomes = set()
    for seed in range(60):
        disk = SimDisk(seed)
        file = disk.open("f", create=True)
        disk.crash_at(2, "within")
        with pytest.raises(SimCrash):
            file.write(0, [b"ab", b"cd"])
        file.close()  # the close on the way out must not hide the crash
        outcomes.add(disk.kill().peek("f"))
    assert outcomes == {b"", b"a", b"ab", b"abc", b"abcd"}


def test_short_write_returns_the_bytes_written() -> None:
    disk = SimDisk()
    file = disk.open("f", create=True)
    disk.shorten(nth("write", 1))
    disk.shorten(nth("write", 2), 7)
    written = file.write(0, [b"x" * 1000])
    assert 0 < written < 1000
    assert disk.peek("f") == b"x" * written
    assert file.write(written, [b"y" * 1000]) == 7
    assert file.write(written + 7, [b"z" * 1000]) == 1000
    assert disk.fault_counts["short writes"] == 2


def test_full_disk_writes_what_fits_until_space_is_freed() -> None:
    disk = SimDisk(capacity_bytes=1000)
    disk.put("old", bytes(400))
    file = disk.open("f", create=True)
    assert (disk.free_bytes(), disk.used_bytes) == (600, 400)
    assert file.write(0, [b"x" * 500]) == 500
    assert file.write(500, [b"x" * 500]) == 100
    for call in (lambda: file.write(600, [b"x"]), lambda: file.truncate(601)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.ENOSPC
    assert file.write(100, [b"over"]) == 4  # an overwrite in place needs no space
    assert file.read(0, 1000) == b"x" * 100 + b"over" + b"x" * 496
    held = disk.open("old")
    disk.remove("old")
    assert disk.free_bytes() == 0  # its space is freed when the file is closed
    held.close()
    assert disk.free_bytes() == 400
    replaced = disk.open("other", create=True)
    replaced.write(0, [bytes(100)])
    replaced.close()
    disk.rename("f", "other")
    assert (disk.used_bytes, disk.kill().used_bytes) == (600, 600)
    assert (disk.fault_counts["no room"], disk.fault_counts["short for want of room"]) == (2, 1)


def test_flipped_bit_is_read_and_persists() -> None:
    disk = SimDisk(5)
    content = Random(5).randbytes(3000)
    disk.put("f", content)
    at, bit = disk.flip("f")
    expected = bytearray(content)
    expected[at] ^= 1 << bit
    assert disk.open("f").read(0, 3000) == disk.crash().peek("f") == expected
    assert disk.flip("f", 17, 3) == (17, 3)
    assert disk.peek("f")[17] == expected[17] ^ 8
    disk.put("empty", b"")
    with pytest.raises(ValueError, match="at least one byte"):
        disk.flip("empty")


def test_lost_write_shows_after_cache_eviction() -> None:
    for seed in range(20):
        disk = SimDisk(seed)
        disk.put("f", b"o" * 4096)
        file = disk.open("f")
        file.write(0, [b"n" * 4096])
        disk.lose(nth("sync", 1))
        file.sync()
        assert file.read(0, 4096) == b"n" * 4096
        after = disk.crash().peek("f")
        stale = {after[at : at + SECTOR] for at in range(0, 4096, SECTOR)}
        assert b"o" * SECTOR in stale <= {b"o" * SECTOR, b"n" * SECTOR}
        disk.evict("f")
        assert file.read(0, 4096) == after
        assert disk.fault_counts["writes lost"] == 1


def test_misdirected_write_corrupts_another_sector() -> None:
    for seed in range(20):
        disk = SimDisk(seed)
        old = b"".join(bytes([number]) * SECTOR for number in range(8))
        disk.put("f", old)
        file = disk.open("f")
        file.write(3 * SECTOR, [b"n" * SECTOR])
        disk.misdirect(nth("sync", 1))
        file.sync()
        after = disk.crash().peek("f")
        assert len(after) == len(old)
        changed = [number for number in range(8) if after[number * SECTOR] != number]
        assert len(changed) == 1
        assert changed != [3]
        assert after[changed[0] * SECTOR :][:SECTOR] == b"n" * SECTOR
        assert disk.fault_counts["writes misdirected"] == 1


# --- determinism


FAULTS = {
    *("crash", "off before", "off within", "off after", "write failed", "sync failed"),
    *("sync_directory failed", "sectors lost by sync", "names lost by sync", "short writes", "no room"),
    *("short for want of room", "writes lost", "writes misdirected", "torn", "size between"),
    *("sectors kept", "sectors lost", "sectors stale", "names kept", "names lost"),
}


def run_all_faults(seed: int, faults: Counter[str]) -> str:
    """Run all operations with all faults over three crashes; return a digest of the files that are left."""
    rng, disk, digest = Random(seed), SimDisk(seed, capacity_bytes=15_000), hashlib.sha256()
    for _ in range(3):
        for name in ("write", "sync", "sync_directory"):
            disk.fail(lambda call, name=name: call.name == name and rng.random() < 0.03, times=None)  # type: ignore[misc]
        disk.shorten(lambda call: rng.random() < 0.1, times=None)
        disk.lose(lambda call: rng.random() < 0.1, times=None)
        disk.misdirect(lambda call: rng.random() < 0.1, times=None)
        disk.crash_at(disk.calls + rng.randint(40, 200))
        with suppress(SimCrash):
            while True:
                with suppress(OSError):
                    disk.make_directory(rng.choice(DIRECTORIES))
                    history = History(disk, f"{rng.choice(NAMES)}{rng.randrange(3)}")
                    disk.open(f"{rng.choice(NAMES)}.new", create=True)
                    change_at_random(history, rng, 5)
                    disk.rename(history.path, "/".join(filter(None, (rng.choice(DIRECTORIES), "z"))))
        disk = disk.crash()
        for path in disk.paths():
            digest.update(path.encode() + b"\0" + disk.peek(path))
    digest.update(repr(sorted(disk.fault_counts.items())).encode())
    faults.update(disk.fault_counts)
    return digest.hexdigest()


def run_seeds() -> tuple[str, Counter[str]]:
    """Run 12 seeds; return a line per seed, and the number of faults by kind."""
    faults: Counter[str] = Counter()
    return "\n".join(run_all_faults(seed, faults) for seed in range(12)), faults


def test_seed_gives_the_same_run_in_every_process_with_every_fault() -> None:
    this_process, faults = run_seeds()
    assert len(set(this_process.split("\n"))) == 12
    print(f"12 runs: {dict(faults)}")
    assert {fault for fault in FAULTS if not faults[fault]} == set()
    for hash_seed in ("0", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        other_process = subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
        )
        assert other_process.stdout.strip() == this_process


if __name__ == "__main__":
    print(run_seeds()[0])
