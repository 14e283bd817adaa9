"""`config check` and `serve` report the same mistakes in one line, and a failed start leaves no file."""

from __future__ import annotations

import os
import socket
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from tests.delta_prop.commands.support import create_line
from tests.delta_prop.server.process import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.delta_prop.commands.support import Command

HOST = "127.0.0.1"
PORTS = "server = { port = 0, http_port = 0 }\n"
STORAGE = "[[sinks]]\nkind = 'storage'\npath = "
LINES = "[[sinks]]\nkind = 'jsonlines'\npath = "
FORWARD = "server = { port = 7001 }\ndata = 'new'\n[[sinks]]\nkind = 'forward'\nto = "
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with files, a folder, a pipe and a dangling symbolic link."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.toml").write_text("access.tokens = 'tokens.toml'")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "none" / "s.db")
    (tmp_path / "text").write_text("not a database, whatever the name says " * 100)
    return tmp_path


def all_paths(folder: Path) -> set[str]:
    """Return all paths below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


WRONG_CONFIGURATIONS = [
    ("server = { host = '0.0.0.0', port = 0 }\ndata = 'new'", 2, "server.host '0.0.0.0': others can connect"),
    ("server = { host = '127.0.0.1.example.com' }\ndata = 'new'", 2, "server.host '127.0.0.1.example.com'"),
    ("server = { host = 'no.invalid' }\ndata = 'new'", 2, "server.host 'no.invalid' is not known here"),
    (f"{FORWARD}'localhost:7001'", 2, "sinks[0].to: localhost:7001 is this server itself: name another one"),
    (f"{FORWARD}['a:1', '127.0.0.1:7001']", 2, "sinks[0].to: 127.0.0.1:7001 is this server itself"),
    ("server = { port = 7001, http_port = 7001 }\ndata = 'new'", 2, "server.http_port: 7001 is also"),
    ("server = { port = 7374 }\ndata = 'new'", 2, "server.http_port: 7374 is also server.port: give each"),
    (
        "server = { host = '192.0.2.1', port = 0, http_port = 0, allow_anonymous = true }\ndata = 'new'",
        1,
        "server.host '192.0.2.1': cannot listen on 192.0.2.1:0: Cannot assign requested address: name an",
    ),
    (
        "server = { host = 'no.invalid', port = 0, http_port = 0, allow_anonymous = true }\ndata = 'new'",
        2,
        "server.host 'no.invalid'",
    ),
    (f"{PORTS}data = 'dd'\n{STORAGE}'dd'", 2, "sinks[0].path: 'FOLDER/dd' is or holds the data directory"),
    (f"{PORTS}data = 'dd/log'\n{LINES}'./dd'", 2, "sinks[0].path: 'FOLDER/dd' is or holds the data direc"),
    (f"{PORTS}data = 'file'", 2, "data: 'FOLDER/file' is not a directory: give another path"),
    (f"{PORTS}data = 'file/below'", 2, "data: 'FOLDER/file/below' cannot be created, as 'FOLDER/file' is"),
    (f"{PORTS}data = '/proc/facts'", 2, "data: '/proc/facts': nothing can be created in '/proc' (No such"),
    (f"{PORTS}data = '/proc/a/b'", 2, "data: '/proc/a/b': nothing can be created in '/proc' (No such"),
    (f"{PORTS}data = '{'x' * 300}'", 2, "cannot be used (File name too long): give another path"),
    (f"{PORTS}data = 'outdated'", 1, "run `delta-prop log migrate FOLDER/outdated`"),
    (f"{PORTS}data = 'new'\n{STORAGE}'none/s.db'", 2, "sinks[0].path: 'FOLDER/none/s.db': folder 'FOLDER"),
    (f"{PORTS}data = 'new'\n{STORAGE}'file/s.db'", 2, "folder 'FOLDER/file' is missing: create it, or"),
    (f"{PORTS}data = 'new'\n{STORAGE}'folder'", 2, "sinks[0].path: 'FOLDER/folder' is a directory: give a"),
    (f"{PORTS}data = 'new'\n{STORAGE}'text'", 2, "sinks[0].path: FOLDER/text is not a SQLite file: name"),
    (f"{PORTS}data = 'new'\n{LINES}'text'", 2, "sinks[0].path: FOLDER/text holds lines that this sink did"),
    (f"{PORTS}data = 'new'\n{LINES}'/proc/lines'", 2, "sinks[0].path: '/proc/lines': nothing can be created"),
    (f"{PORTS}data = 'new'\n{LINES}'pipe'", 2, "sinks[0].path: 'FOLDER/pipe' is a device or pipe: give"),
    (f"{PORTS}data = 'new'\n{STORAGE}'pipe'", 2, "sinks[0].path: 'FOLDER/pipe' is a device or pipe: give a"),
    (f"{PORTS}data = 'new'\n{STORAGE}'gone'", 2, "folder 'FOLDER/none' is missing: create it, or"),
    (f"{PORTS}data = 'gone'", 2, "data: 'FOLDER/gone' is not a directory: give another path"),
    (f"{PORTS}data = 'new'\n{LINES}'a'\nbatch_deltas = 0", 2, "sinks[0].batch_deltas 0: give 1 to 1000"),
    (
        f"{PORTS}data = 'new'\n[[sinks]]\nkind = 'forward'\nto = 'a:1'\nauthorities = 'none'",
        2,
        "sinks[0].authorities: TLS cannot use FOLDER/none: No such file",
    ),
    (f"{PORTS}data = 'new'\n{LINES}'a'\nrebuild = true", 2, "sinks[0].rebuild: sink 'jsonlines' cannot be"),
    (f"{PORTS}data = 'new'\naccess.tokens = 'none'", 2, "access.tokens: 'FOLDER/none' cannot be read (No"),
    (
        f"{PORTS}data = 'new'\naccess.tokens = 'other.toml'",
        2,
        "access.tokens: 'FOLDER/other.toml': access: unknown key",
    ),
    (f"{PORTS}data = 'new'\naccess.tokens = 'folder'", 2, "access.tokens: 'FOLDER/folder' cannot be read (I"),
    (f"{PORTS}data = 'new'\ntls = {{ certificate = 'none', key = 'none' }}", 2, "tls: TLS cannot use "),
    (f"{PORTS}[data]\nx = 1", 2, "data: {'x': 1} is not a text"),
]  # fmt: skip


@pytest.mark.parametrize("verb", ["check", "serve"])
@pytest.mark.parametrize("wrong", WRONG_CONFIGURATIONS, ids=lambda wrong: wrong[2][:50])
def test_check_and_serve_refuse_a_wrong_configuration_in_one_line(
    verb: str, wrong: tuple[str, int, str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, status, message = wrong
    outdate(folder / "outdated")
    (folder / "dp.toml").write_text(text)
    before = all_paths(folder)
    arguments = {"check": ["config", "check"], "serve": ["serve", "--log-level", "error", "--config"]}
    assert main([*arguments[verb], "dp.toml"]) == status
    captured = capfd.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1), captured.err
    assert message.replace("FOLDER", str(folder)) in captured.err
    assert "server: server" not in captured.err
    assert all_paths(folder) == before


def outdate(directory: Path) -> None:
    """Give a data directory the format of an earlier version."""
    from delta_prop_broker.local_disk import LocalDisk
    from delta_prop_broker.segments.identity import Format, _pack_format

    LocalDisk(directory).make_directory("")
    (directory / "format").write_bytes(_pack_format(Format(1, "0.1.0")))


@pytest.fixture
def closed_folder() -> Iterator[Path]:
    """Yield a folder without write permission, with a file and a data directory in it."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        folder.chmod(0o755)
        (folder / "lines").write_text("")
        (folder / "lines").chmod(0o444)
        outdate(folder / "facts")
        (folder / "facts").chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        else:
            folder.chmod(0o555)
        try:
            yield folder
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
            folder.chmod(0o755)


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (
            "new",
            "",
            "data: 'FOLDER/new': nothing can be created in 'FOLDER' (Permission denied): grant this",
        ),
        ("", "", "data: 'FOLDER': nothing can be created in 'FOLDER' (Permission denied): grant this"),
        ("facts", "", "data: 'FOLDER/facts' cannot be written to: grant this process's user access, or"),
        ("/tmp", f"{STORAGE}'FOLDER/s.db'", "sinks[0].path: 'FOLDER/s.db': nothing can be created in"),
        ("/tmp", f"{LINES}'FOLDER/lines'", "sinks[0].path: 'FOLDER/lines' cannot be read and written: grant"),
    ],
)
def test_path_without_write_access_is_reported(
    data: str, more: str, message: str, closed_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = all_paths(closed_folder)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(f"data = '{closed_folder / data}'\n{more.replace('FOLDER', str(closed_folder))}")
        file.flush()
        for arguments in (["config", "check"], ["serve", "--log-level", "error", "--config"]):
            assert main([*arguments, file.name]) == 2
            captured = capfd.readouterr()
            assert (captured.out, captured.err.count("\n")) == ("", 1), captured.err
            assert message.replace("FOLDER", str(closed_folder)) in captured.err
    assert all_paths(closed_folder) == before


@pytest.mark.parametrize("name", ["folder", "none", "latin", "zeros"])
def test_configuration_that_is_not_text_is_refused(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "latin").write_bytes("data = 'é'".encode("latin-1"))
    (folder / "zeros").write_bytes(bytes(2_000_000))
    for arguments in (["config", "check"], ["config", "show"], ["serve", "--data", "facts", "--config"]):
        assert main([*arguments, name]) == 2
        captured = capfd.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1), captured.err
        assert f"the configuration '{name}' cannot be read (" in captured.err


def test_forward_to_another_server_is_accepted(folder: Path) -> None:
    for to in ("127.0.0.1:7002", "127.0.0.2:7001", "another.invalid:7001"):
        (folder / "dp.toml").write_text(f"{FORWARD}'{to}'")
        assert main(["config", "check", "dp.toml"]) == 0, to


def test_endless_configuration_is_refused_by_size(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "/dev/zero"]) == 2
    assert "it is larger than 1,048,576 bytes" in capfd.readouterr().err


def test_byte_order_mark_is_skipped(folder: Path) -> None:
    (folder / "dp.toml").write_bytes(b"\xef\xbb\xbfdata = 'facts'\n")
    assert main(["config", "check", "dp.toml"]) == 0


# --- files after a failed start


@pytest.mark.parametrize("data", ["new", "a/b/new", "folder"])
@pytest.mark.parametrize("broken", ["port", "sink"])
def test_failed_start_leaves_no_file(
    broken: str, data: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = all_paths(folder)
    arguments = ["serve", "--data", data, "--port", "0", "--http-port", "0", "--log-level", "error"]
    with socket.create_server((HOST, 0)) as used_port:
        if broken == "port":
            arguments += ["--port", str(used_port.getsockname()[1])]
        else:  # the fault is found only when the sink opens its file
            sqlite3.connect(folder / "other").execute("CREATE TABLE one (two)")
            (folder / "dp.toml").write_text(f"{STORAGE}'other'")
            before |= {"other", "other-lock"}
            before.add("dp.toml")
            arguments += ["--config", "dp.toml"]
        assert main(arguments) != 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1), captured.err
    assert all_paths(folder) == before


def test_start_works_after_the_mistake_is_corrected(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sqlite3.connect(folder / "other").execute("CREATE TABLE one (two)")
    common = ["--config", "dp.toml", "--http-port", "0", "--log-level", "error"]
    first = f"{STORAGE}'first.db'\nname = 'first'\n"
    (folder / "dp.toml").write_text(f"{first}{STORAGE}'other'")
    assert main(["serve", "--data", "facts", "--port", "0", *common]) == 2
    assert "other is a SQLite file of another program" in capfd.readouterr().err
    (folder / "dp.toml").write_text(f"{first}{STORAGE}'second.db'")
    with served(folder / "facts", "--config", str(folder / "dp.toml")):
        assert (folder / "facts" / "format").exists()


def test_failed_start_keeps_the_existing_log(folder: Path, command: Command) -> None:
    command.publish([create_line("a")])
    sqlite3.connect(folder / "other").execute("CREATE TABLE one (two)")
    (folder / "dp.toml").write_text(f"{STORAGE}'other'")
    failed = command("serve", "--config", "dp.toml", "--port", "0", "--http-port", "0")
    assert failed.status == 2
    assert "is a SQLite file of another program: name another file" in failed.err
    assert command("log", "verify").status == 0
    assert command("status").status == 0
    assert len(command("log", "show", "--json").lines) == 1
