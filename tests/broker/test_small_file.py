"""Small files: replaced as a whole, and checked when they are read."""

from pathlib import Path

import pytest

from delta_prop_broker.corruption import LogCorrupted
from delta_prop_broker.local_disk import LocalDisk
from delta_prop_broker.segments.small_file import Checksum, read_checked, replace_checked
from delta_prop_simulations.disk import SimDisk

CONTENT = b"123456789"  # its CRC32C is e3069283


@pytest.mark.parametrize(
    ("checksum", "raw"),
    [
        (Checksum.FIRST_LINE, b"e3069283\n123456789"),
        (Checksum.TRAILER, b"123456789\x83\x92\x06\xe3"),
    ],
)
def test_checked_file_has_documented_bytes(tmp_path: Path, checksum: Checksum, raw: bytes) -> None:
    disk = LocalDisk(tmp_path)
    replace_checked(disk, "file", b"before", checksum)
    replace_checked(disk, "file", CONTENT, checksum)
    assert (tmp_path / "file").read_bytes() == raw
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert read_checked(disk, "file", checksum) == CONTENT


@pytest.mark.parametrize("checksum", Checksum)
def test_flipped_or_missing_byte_is_corruption(tmp_path: Path, checksum: Checksum) -> None:
    disk, path = LocalDisk(tmp_path), tmp_path / "file"
    replace_checked(disk, "file", CONTENT, checksum)
    raw = path.read_bytes()
    flipped = [raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :] for at in range(len(raw))]
    for wrong in (*flipped, *(raw[:size] for size in range(len(raw))), bytes(4)):
        path.write_bytes(wrong)
        with pytest.raises(LogCorrupted, match=f"its {len(wrong)} bytes do not fit their checksum"):
            read_checked(disk, "file", checksum)


def test_missing_file_has_no_content(tmp_path: Path) -> None:
    assert read_checked(LocalDisk(tmp_path), "file", Checksum.TRAILER) is None


def test_file_above_its_bound_is_corruption(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    replace_checked(disk, "file", CONTENT, Checksum.TRAILER)
    size = len(CONTENT) + 4
    assert read_checked(disk, "file", Checksum.TRAILER, bytes_max=size) == CONTENT
    with pytest.raises(LogCorrupted, match=f"larger than the maximum of {size - 1} bytes"):
        read_checked(disk, "file", Checksum.TRAILER, bytes_max=size - 1)


@pytest.mark.parametrize("seed", range(5))
def test_replaced_content_survives_a_power_cut(seed: int) -> None:
    content = b"after" * 3000
    disk = SimDisk(seed)
    disk.make_directory("folder")
    disk.sync_directory("")
    replace_checked(disk, "folder/file", b"before", Checksum.TRAILER)
    replace_checked(disk, "folder/file", content, Checksum.TRAILER)
    assert read_checked(disk.crash(), "folder/file", Checksum.TRAILER) == content
