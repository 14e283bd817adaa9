"""Changes of a folder between two scans."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from delta_prop.demo import system
from delta_prop.demo.runner import Changes, compare_scans

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_changed_new_and_removed_files_are_distinguished() -> None:
    before = {"same": (1, 1), "later": (1, 1), "longer": (1, 1), "gone": (1, 1)}
    after = {"same": (1, 1), "later": (2, 1), "longer": (1, 2), "new": (1, 1)}
    assert compare_scans(before, after) == Changes(["later", "longer", "new"], ["gone"])
    assert compare_scans(after, after) == Changes([], [])


def test_scan_finds_only_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.md", "sub/c.TXT", "d.png", ".hidden.md", ".git/x.md", "venv/y.py", "e.rst"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("text")
    (tmp_path / "large.md").write_bytes(bytes(system.FILE_BYTES_MAX + 1))
    (tmp_path / "broken.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "endless.md").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.md")
    for name in (b"new\nline.md", b"\xff.md"):
        with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
            file.write("text")
    assert list(system.scan(tmp_path, system.USER_FILTER)) == ["a.py", "b.md", "e.rst", "sub/c.TXT"]
    monkeypatch.setattr(system, "FILES_MAX", 2)
    assert len(system.scan(tmp_path, system.USER_FILTER)) == 2


def test_non_text_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\xff\xfe")
    assert system.read(tmp_path, "a.md") is None
    assert system.read(tmp_path, "gone.md") is None
