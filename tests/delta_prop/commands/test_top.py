"""`status`, `sinks` and `top` of a server, and connections of verbs: tokens, TLS, error messages."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

import pytest

from delta_prop.cli import main
from delta_prop.commands import top
from delta_prop.commands.http_client import NoAnswer
from delta_prop.commands.top import _poll
from delta_prop.platform.ports import Tls
from tests.delta_prop.commands.server_thread import ServerAddresses, served
from tests.delta_prop.commands.support import create_line
from tests.delta_prop.platform.networks import files
from tests.delta_prop.server.tokens import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop.commands.http_client import HttpClient
    from delta_prop.commands.screen import StatusSample


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddresses]:
    with served(tmp_path_factory.mktemp("served") / "facts") as addresses:
        lines = tmp_path_factory.mktemp("lines") / "lines"
        lines.write_text("\n".join(create_line(f"v{n}") for n in range(7)))
        assert main(["publish", str(lines), "--to", addresses.protocol_address]) == 0
        yield addresses


def test_status_of_a_server_is_printed(
    addresses: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--http", addresses.http_address, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["version"], status["ready"], status["log"]["next_offset"]) == ("1.2.3", True, 7)
    assert main(["status", "--http", addresses.http_address]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["lags.sinks.cache.deltas"], shown["lags.sinks.cache.seconds"]) == ("0", "0.0")
    assert (shown["ready"], shown["reason"], shown["log.next_offset"], shown["connections"]) == (
        "yes",
        "none",
        "7",
        "0",
    )


def test_sinks_of_a_server_are_printed(
    addresses: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sinks", "--http", addresses.http_address, "--json"]) == 0
    (sink,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (sink["name"], sink["applied_offset"], sink["lag"]) == ("cache", 7, 0)
    assert main(["sinks", "--http", addresses.http_address]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["cache", sink["state"], "7", "0", "0", "s", "0"]
    assert header.split()[:2] == ["name", "state"]


@pytest.mark.parametrize("once", [[], ["--once"]])
def test_top_draws_once_without_a_terminal(
    once: list[str], addresses: ServerAddresses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--http", addresses.http_address, *once]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"delta-prop 1.2.3 at {addresses.http_address}, up ")
    assert lines[1].startswith("log      default: offsets 0 to 7, high watermark 7; ")
    (cache,) = [line.split() for line in lines if line.startswith("cache ")]
    assert cache[4] == "0", cache  # deltas per second
    assert lines[2].startswith("in               0 deltas/s")
    assert "\x1b" not in "".join(lines)


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_top_redraws_on_a_terminal_and_restores_it(
    addresses: ServerAddresses, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, polls = Terminal(), 0

    async def poll(http_client: HttpClient) -> StatusSample:
        nonlocal polls
        polls += 1
        if polls == 3:
            raise NoAnswer("it went away")
        if polls == 4:
            raise KeyboardInterrupt
        return await _poll(http_client)

    monkeypatch.setattr(top, "_poll", poll)
    monkeypatch.setattr(top, "DRAW_S", 0.01)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["top", "--http", addresses.http_address]) == 130
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    assert shown.endswith("\x1b[?25h\x1b[?1049l")
    first, second = shown.split("\x1b[H")[1:]
    assert ["- deltas/s" in one for one in (first, second)] == [True, False]
    assert "it went away" in second.partition("\x1b[J")[2]  # the screen overwrites all but the last line


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["top", "--http", "127.0.0.1:1"], 1, "127.0.0.1:1 cannot be queried"),
        (["status", "--http", "TO"], 2, "name the HTTP port, which `serve` prints as http=…"),
        (["sinks", "--http", "a b:1"], 2, "give host:port"),
        (["status"], 2, "one of the arguments --data --http is required"),
        (["sinks"], 2, "nothing to read: give --data DIR or --http HOST:PORT"),
        (["sinks", "--http", "x:1", "pause", "audit"], 2, "nothing to read: give --data DIR"),
        (["publish", "--to", "x:1", "--data", "d"], 2, "not allowed with argument"),
        (
            ["top", "--http", "HTTP", "--token-file", "/nowhere"],
            2,
            "token file '/nowhere': it cannot be read",
        ),
        (
            ["top", "--http", "HTTP", "--token-file", "/dev/null"],
            2,
            "token file '/dev/null': it holds no token",
        ),
        (["top", "--http", "HTTP", "--tls-key", "k"], 2, "--tls-certificate and --tls-key: give both"),
        (["top", "--http", "HTTP", "--tls-ca", "/nowhere"], 2, "/nowhere"),
    ],
)
def test_mistake_is_reported_in_one_line(
    arguments: list[str],
    status: int,
    message: str,
    addresses: ServerAddresses,
    capsys: pytest.CaptureFixture[str],
) -> None:
    actual_arguments = [
        {"TO": addresses.protocol_address, "HTTP": addresses.http_address}.get(one, one) for one in arguments
    ]
    assert main(actual_arguments) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1), captured
    assert message in captured.err


def test_token_file_with_extra_text_is_refused_in_one_line(
    addresses: ServerAddresses, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "new", "reader", "--admin"]) == 0
    (tmp_path / "token").write_text(capsys.readouterr().err)
    assert (
        main(["top", "--once", "--http", addresses.http_address, "--token-file", str(tmp_path / "token")])
        == 2
    )
    assert "holds more than a token: put only the token there" in capsys.readouterr().err


def test_verbs_connect_with_tokens_and_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_files = files()
    tokens = table("all", "t-all", publish=True, subscribe=True, admin=True, namespaces='["*"]')
    token_file, lines = tmp_path / "token", tmp_path / "lines"
    token_file.write_text("t-all\n")
    lines.write_text(create_line("v"))
    shown = ["--tls-certificate", made_files.client, "--tls-key", made_files.client_key]
    tls = Tls(made_files.server, made_files.server_key, made_files.authority)
    with served(tmp_path / "facts", tokens=tokens.encode(), tls=tls) as addresses:
        secure = ["--tls-ca", made_files.authority, *shown]
        publish = ["publish", str(lines), "--to", addresses.protocol_address, *secure]
        status = ["status", "--http", addresses.http_address, *secure]
        for verb in (publish, status):
            monkeypatch.delenv("DELTA_PROP_TOKEN", raising=False)
            assert main(verb) == 1
            assert "token" in capsys.readouterr().err
            assert main([*verb, "--token-file", str(token_file)]) == 0
            monkeypatch.setenv("DELTA_PROP_TOKEN", "t-all")
            assert main(verb) == 0
        assert main([*status, "--tls-name", "server.example"]) == 0
        capsys.readouterr()
        assert main([*status, "--tls-name", "elsewhere.example"]) == 2
        assert "elsewhere.example" in capsys.readouterr().err
