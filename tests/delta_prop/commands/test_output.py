"""Output to a file appears only when it is complete; other output goes to the current standard output."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from delta_prop.platform import system
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path


class WriteFailure(Exception):
    """Raised while output is written."""


def test_unfinished_atomic_output_is_removed(tmp_path: Path) -> None:
    name = tmp_path / "out.jsonl"

    def fail() -> None:
        with system.open_atomic_output(str(name)) as out:
            out.write(b"one\n")
            out.flush()
            assert not name.exists()
            raise WriteFailure

    with pytest.raises(WriteFailure):
        fail()
    assert not list(tmp_path.iterdir())
    with system.open_atomic_output(str(name)) as out:
        out.write(b"one\n")
        out.flush()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("out.jsonl", b"one\n")]


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    name = tmp_path / "out.jsonl"
    expected = "out.jsonl' exists and is not overwritten: name a new file"
    with pytest.raises(UsageError, match=expected), system.open_atomic_output(str(name)):
        name.write_text("of somebody else")
    for open_output in (system.open_output, system.open_atomic_output):
        with pytest.raises(UsageError, match=expected), open_output(str(name)):
            pass
        with (
            pytest.raises(UsageError, match=r"a/b' cannot be created \(No such file"),
            open_output(f"{tmp_path}/a/b"),
        ):
            pass
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("out.jsonl", "of somebody else")]


@pytest.mark.parametrize("open_output", [system.open_output, system.open_atomic_output])
def test_output_goes_to_the_stream_that_replaced_standard_output(
    open_output: Callable[[str | None], AbstractContextManager[system.Output]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    for stream, read_written in (
        (io.TextIOWrapper(raw), raw.getvalue),
        (text := io.StringIO(), text.getvalue),
    ):
        monkeypatch.setattr("sys.stdout", stream)
        for name in (None, "-"):
            with open_output(name) as out:
                out.write("ü\n".encode())
                out.sync()
        assert read_written() in ("ü\nü\n", "ü\nü\n".encode())
