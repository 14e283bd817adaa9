"""`config check` and `config show`: exit statuses, one line per mistake, the settings that `serve` uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_prop.cli import main
from delta_prop.configuration import Configuration, read_configuration


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTA_PROP_SERVER__PORT", raising=False)


def test_check_accepts_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "dp.toml"
    file.write_text("[[sinks]]\nkind = 'cache'")
    assert main(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: valid; sinks: cache; memory: up to ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"server.port = 'x'", 'server.port: "x" is not a number'),
        (b"[[sinks]]\nkind = 'cache'\nbytes_max = 0", "sinks[0].bytes_max"),
        (b"\xff", "cannot be read (it is not UTF-8)"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_check_reports_a_mistake_in_one_line(
    text: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dp.toml"
    if text is not None:
        file.write_bytes(text)
    assert main(["config", "check", str(file)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err
    assert str(file) in captured.err


def test_show_prints_defaults_and_applies_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "show"]) == 0
    assert read_configuration(capsys.readouterr().out) == Configuration()
    monkeypatch.setenv("DELTA_PROP_SERVER__PORT", "99")
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["server"]["port"] == 99


def test_file_paths_resolve_from_the_configuration_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "dp.toml").write_text("data = 'facts'")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "show", "below/dp.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == str(tmp_path / "below" / "facts")


def test_check_reads_the_files_that_serve_would_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dp.toml"
    for text, message in (
        ("access.tokens = 'none'", f"access.tokens: '{tmp_path}/none' cannot be read"),
        ("access.tokens = 'dp.toml'", f"access.tokens: '{file}': access: "),
        ("tls = { certificate = 'none', key = 'none' }", "tls: "),
    ):
        file.write_text(text)
        assert main(["config", "check", str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"delta-prop: {file}: {message}"), captured.err
        assert captured.err.count("\n") == 1
