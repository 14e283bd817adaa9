"""Unusual names, numbers and directories as arguments: each works, or fails with one line of error."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.delta_prop.commands.support import create_line, create_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.delta_prop.commands.support import Command

HUGE = "9" * 5000
"""More digits than Python converts."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("get", "v1", "--at", HUGE),
        ("log", "show", "--start", HUGE),
        ("log", "show", "--count", "-1"),
        ("log", "export", "--count", "0"),
        ("log", "export", "--count", HUGE),
        ("log", "export", "--to", ""),
        ("quarantine", "replay", "odd\udcff", "1"),
    ],
)
def test_wrong_argument_is_reported_in_one_line(arguments: tuple[str, ...], command: Command) -> None:
    command.publish(create_lines(3))
    result = command(*arguments)
    assert result.status == 2
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["status", "publish", "sinks", "log verify", "sinks forget audit"])
def test_empty_name_is_not_the_current_directory(
    verb: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = tmp_path / "lines"
    lines.write_text(create_line("v1"))
    command.data = ""  # type: ignore[assignment]  # a variable of a script that is not set
    result = command(*verb.split(), *([lines] if verb == "publish" else []))
    assert result.status == 2
    assert "the name is empty" in result.err
    assert [one.name for one in tmp_path.iterdir()] == ["lines"]


def test_backup_path_may_end_with_a_slash(command: Command, tmp_path: Path) -> None:
    command.publish(create_lines(3))
    result = command("log", "export", "--to", f"{tmp_path}/backup/")
    assert (result.status, result.err) == (0, "")
    command.data = tmp_path / "backup"
    assert len(command("log", "show", "--json").lines) == 3
    assert not list(tmp_path.glob("**/*.partial"))


def test_output_is_utf8_in_any_locale(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.data = tmp_path / "odd\udcff"  # bytes that are not UTF-8
    command.publish([create_line("smile-\U0001f600")])
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    for arguments in (("status",), ("get", "smile-\U0001f600"), ("get", "v", "--namespace", "n\udcff")):
        command(*arguments)
    text = raw.getvalue().decode()
    assert "odd\\udcff" in text
    assert '"smile-\U0001f600"' in text
    assert '"n\\udcff"' in text


def run_with_closed_streams(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command with standard input and standard output closed."""
    verb = [sys.executable, "-m", "delta_prop", *map(str, arguments)]
    shell = ["sh", "-c", 'exec "$@" <&- >&-', "sh"]
    return subprocess.run([*shell, *verb], timeout=60, check=False, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "verb",
    [
        "log export",
        "log show --json",
        "subscribe --start earliest",
        "token new a --publish --namespace docs",
        "status",
    ],
)
def test_printing_verb_fails_if_standard_output_is_closed(verb: str, command: Command) -> None:
    command.publish(create_lines(3))
    result = run_with_closed_streams(
        *verb.split(), *([] if verb.startswith("token") else ["--data", command.data])
    )
    assert (result.returncode, result.stderr) == (
        1,
        "delta-prop: standard output is closed, so nothing was written: open it, or redirect it to a file\n",
    )


def test_silent_verb_works_if_standard_streams_are_closed(command: Command, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text(create_line("v1"))
    for verb in (("publish",), ("publish", lines), ("log", "export", "--to", tmp_path / "backup")):
        result = run_with_closed_streams(*verb, "--data", command.data)
        assert (result.returncode, result.stderr) == (0, "")
    assert len(command("log", "show", "--json").lines) == 1
    assert command("log", "verify").status == 0
