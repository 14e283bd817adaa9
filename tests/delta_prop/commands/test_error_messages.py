"""Error messages of the command: each names the mistake and a fix that works."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import FAILED, _report_error, main
from delta_prop.client import Subscriber, jobs
from delta_prop.client.addresses import Address
from delta_prop.client.settings import ClientSettings
from delta_prop.commands import wait_reporter
from delta_prop.commands.http_client import HttpClient
from delta_prop.directory.log_positions import parse_position
from delta_prop.platform import path_checks
from delta_prop_wire.errors import InvalidDelta, UsageError
from tests.delta_prop.commands.server_thread import served
from tests.delta_prop.commands.support import Command, create_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2026-13-41", "is not a time, month must be in 1..12: give earliest"),
        ("2026-02-30", "is not a time, day is out of range for month: give "),
        ("9999999999d", "is too long, or too precise"),
        ("99999999999999d", "is too long, or too precise"),
        ("monday", "'monday': give earliest"),
    ],
)
def test_wrong_time_is_reported_with_its_problem(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_position("--start", text, 0)
    assert message in str(caught.value)


@contextmanager
def silent_port() -> Iterator[str]:
    """Yield the address of a port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("verb", ["subscribe", "record", "jobs", "status", "jobs list", "groups"])
def test_connecting_verb_soon_reports_what_it_waits_for(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wait_reporter, "REPORT_AFTER_S", 0.3)
    short_timeouts = ClientSettings(
        open_timeout_s=1.0, peer_timeout_s=1.0, handshake_timeout_s=1.0, heartbeat_interval_s=0.3
    )
    for module in ("subscribe", "trace_record"):
        monkeypatch.setattr(
            f"delta_prop.commands.{module}.Subscriber", partial(Subscriber, settings=short_timeouts)
        )
    real = jobs.decide
    monkeypatch.setattr("delta_prop.commands.jobs.decide", lambda *a, **k: real(*a, **k, timeout_s=1.0))
    monkeypatch.setattr("delta_prop.commands.top.HttpClient", partial(HttpClient, timeout_s=1.0))
    with silent_port() as address:
        arguments = {
            "subscribe": ["subscribe", "--from", address],
            "record": ["trace", "record", "--from", address, "--to", str(tmp_path / "out")],
            "jobs": ["jobs", "show", "nightly", "--to", address],
            "status": ["status", "--http", address],
            "jobs list": ["jobs", "list", "--http", address],
            "groups": ["groups", "list", "--http", address],
        }[verb]
        assert main(arguments) == FAILED
    first, *_ = capsys.readouterr().err.splitlines()
    port = "http=" if "--http" in arguments else "port="
    assert first.startswith("delta-prop: waiting, no answer for ")
    assert ": no answer has come yet: check that HOST:PORT " in first
    assert f"`serve` prints as {port}" in first


@pytest.mark.parametrize(
    ("text", "message"),
    [("h:99999", "a port from 1 to 65535"), ("http://h:1/", "such as 127.0.0.1:7374")],
)
def test_wrong_address_is_reported_with_bound_or_example(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Address.parse(text, 7374)
    assert message in str(caught.value)


@pytest.mark.parametrize("verb", [["publish", "--to"], ["subscribe", "--from"]])
def test_connecting_to_the_http_port_is_reported_once(command: Command, verb: list[str]) -> None:
    with served(command.data) as addresses:
        result = subprocess.run(
            [sys.executable, "-m", "delta_prop", *verb, addresses.http_address],
            input="",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (result.returncode, result.stderr.count("is an HTTP port")) == (2, 1), result.stderr


def test_full_standard_output_is_reported(command: Command) -> None:
    assert command.publish(create_lines(3)).status == 0
    for verb in (["log", "show"], ["log", "export"], ["status"], ["subscribe", "--start", "earliest"]):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [sys.executable, "-m", "delta_prop", *verb, "--data", str(command.data)],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
                check=False,
            )
        message = (
            "standard output cannot be written (No space left on device): free disk space, or write elsewhere"
        )
        assert (result.returncode, result.stderr) == (FAILED, f"delta-prop: {message}\n"), verb


def test_permission_error_is_reported_with_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    _report_error(PermissionError(13, "Permission denied", "d1"))
    assert capsys.readouterr().err == (
        "delta-prop: 'd1' cannot be used (Permission denied): grant this process's user access, or "
        "give another path\n"
    )


def test_publish_beside_a_server_suggests_the_to_option(command: Command) -> None:
    with served(command.data):
        assert "publish to that server with --to HOST:PORT" in command.publish(create_lines(1)).err


def test_abort_of_an_unknown_job_suggests_listing_jobs(command: Command) -> None:
    assert command.publish(create_lines(1)).status == 0
    assert "see `delta-prop jobs list`, or rerun it" in command("jobs", "abort", "nosuch").err


def test_unreadable_directory_is_reported_with_a_fix(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.publish(create_lines(1)).status == 0
    monkeypatch.setattr(path_checks, "_has_access", lambda path, access: False)
    for verb in (["status"], ["log", "verify"], ["get", "a"], ["sinks", "pause", "s"]):
        result = command(*verb)
        assert (result.status, result.err) == (
            2,
            f"delta-prop: {str(command.data)!r} cannot be read: grant this process's user "
            "access, or give another path\n",
        ), verb


@pytest.mark.parametrize("name", ["x" * 300, "loop", "/dev/null", "/proc"])
def test_invalid_data_directory_is_reported_with_a_fix(command: Command, name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    command.data = tmp_path / name
    for verb in (["status"], ["log", "show"]):
        result = command(*verb)
        assert (result.status, result.err.count("\n")) == (2, 1)
        assert "give " in result.err
        assert "Errno" not in result.err


def test_copy_inside_its_source_is_refused(command: Command, tmp_path: Path) -> None:
    assert command.publish(create_lines(1)).status == 0
    (tmp_path / "link").symlink_to(command.data)
    for to in (command.data / "sub", tmp_path / "link" / "sub"):
        result = command("log", "export", "--to", to)
        assert (result.status, "is inside the data directory" in result.err) == (2, True)
        assert main(["log", "restore", "--from", str(command.data), "--data", str(to)]) == 2
    assert not list(command.data.glob("sub*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sinks", "pause", "s", "--http", "localhost:1"], "pause works on a directory"),
        (["trace", "record", "--data", "d", "--to", "t", "--for", "-5s"], "begins with - as OPTION=VALUE"),
        (["publish", "--data", "d", "--tls"], "--tls: --data connects to nothing"),
        (["status", "--data", "d", "--token-file", "t"], "leave them out, or give --http"),
        (
            ["trace", "record", "--data", "d", "--to", "t", "--start", "latest", "--until", "earliest"],
            "nothing",
        ),
        (
            ["trace", "record", "--data", "d", "--to", "t", "--start", "9", "--until", "9"],
            "nothing lies between",
        ),
        (["trace", "record", "--data", "d", "--to", "t", "--start", "1h", "--until", "2h"], "nothing lies"),
    ],
)
def test_option_without_effect_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_refusal_names_the_bound(command: Command) -> None:
    line = '{"op":"sparse","vector_id":"a","indices":[99999999999999],"values":[1.0]}'
    assert "to 4294967295" in command.publish([line]).err
    for length in (65, 300):
        with pytest.raises(InvalidDelta, match="must be 1 to 64"):
            Subscriber("h:1", "*", group="g" * length)


@pytest.mark.parametrize(("vector_id", "message"), [("", "0 bytes"), ("v" * 513, "513 bytes")])
def test_get_of_an_invalid_id_is_refused_with_the_bound(
    vector_id: str, message: str, command: Command
) -> None:
    command.publish(create_lines(1))
    result = command("get", vector_id)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert "vector_id" in result.err
    assert message in result.err
    assert "must be 1 to 512" in result.err
