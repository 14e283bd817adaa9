"""A directory below another one, as a disk of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_prop_broker.local_disk import file_parts

if TYPE_CHECKING:
    from delta_prop_broker.disk import Disk, File, Lock


class Subdirectory:
    """The directory `path` of a disk; each call is one call of that disk, with a longer path."""

    def __init__(self, disk: Disk, path: str) -> None:
        """Touches nothing; `make_directory("")` creates the directory. `path`: not the root."""
        self._disk = disk
        self._path = path

    @property
    def name(self) -> str:
        """The path of the directory."""
        return f"{self._disk.name}/{self._path}"

    def open(self, path: str, *, create: bool = False, read_only: bool = False) -> File:
        return self._disk.open(self._join_file(path), create=create, read_only=read_only)

    def list(self, path: str) -> list[str]:
        return self._disk.list(self._join(path))

    def make_directory(self, path: str) -> None:
        self._disk.make_directory(self._join(path))

    def rename(self, old: str, new: str) -> None:
        self._disk.rename(self._join_file(old), self._join_file(new))

    def remove(self, path: str) -> None:
        self._disk.remove(self._join_file(path))

    def remove_directory(self, path: str) -> None:
        self._disk.remove_directory(self._join_file(path))

    def sync_directory(self, path: str) -> None:
        self._disk.sync_directory(self._join(path))

    def lock(self, path: str) -> Lock:
        return self._disk.lock(self._join_file(path))

    def free_bytes(self) -> int:
        return self._disk.free_bytes()

    def _join(self, path: str) -> str:
        return f"{self._path}/{path}" if path not in ("", ".") else self._path

    def _join_file(self, path: str) -> str:
        file_parts(path)  # raises ValueError for the directory itself
        return self._join(path)
