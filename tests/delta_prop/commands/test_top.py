"""`status`, `sinks` and `top` of a server, and how verbs connect: tokens, TLS, mistakes."""

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
from delta_prop.ports import Tls
from tests.delta_prop.commands.served import Places, served
from tests.delta_prop.commands.support import created
from tests.delta_prop.networks import files
from tests.delta_prop.server.tokens import table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from delta_prop.commands.http_client import HttpClient
    from delta_prop.commands.screen import StatusSample


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    with served(tmp_path_factory.mktemp("served") / "facts") as places:
        lines = tmp_path_factory.mktemp("lines") / "lines"
        lines.write_text("\n".join(created(f"v{n}") for n in range(7)))
        assert main(["publish", str(lines), "--to", places.to]) == 0
        yield places


def test_the_status(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--http", places.told_at, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], told["ready"], told["log"]["next_offset"]) == ("1.2.3", True, 7)
    assert main(["status", "--http", places.told_at]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (shown["lags.sinks.cache.deltas"], shown["lags.sinks.cache.seconds"]) == ("0", "0.0")
    assert (shown["ready"], shown["reason"], shown["log.next_offset"], shown["connections"]) == (
        "yes",
        "none",
        "7",
        "0",
    )


def test_the_sinks(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sinks", "--http", places.told_at, "--json"]) == 0
    (told,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told["name"], told["applied_offset"], told["lag"]) == ("cache", 7, 0)
    assert main(["sinks", "--http", places.told_at]) == 0
    heads, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["cache", told["state"], "7", "0", "0", "s", "0"]
    assert heads.split()[:2] == ["name", "state"]


@pytest.mark.parametrize("once", [[], ["--once"]])
def test_top_draws_once_where_there_is_no_terminal(
    once: list[str], places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--http", places.told_at, *once]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"delta-prop 1.2.3 at {places.told_at}, up ")
    assert lines[1].startswith("log      offsets 0 to 7, high watermark 7; ")
    (cache,) = [line.split() for line in lines if line.startswith("cache ")]
    assert cache[4] == "0", cache  # deltas a second
    assert lines[2].startswith("in               0 deltas/s")
    assert "\x1b" not in "".join(lines)


class Terminal(io.StringIO):
    """Standard output as a terminal has it."""

    def isatty(self) -> bool:
        return True


def test_top_draws_again_and_again_on_a_terminal_and_leaves_it_as_it_was(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, looks = Terminal(), 0

    async def look(web: HttpClient) -> StatusSample:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise NoAnswer("it went away")
        if looks == 4:
            raise KeyboardInterrupt
        return await _poll(web)

    monkeypatch.setattr(top, "_poll", look)
    monkeypatch.setattr(top, "DRAW_S", 0.01)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["top", "--http", places.told_at]) == 130
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    assert shown.endswith("\x1b[?25h\x1b[?1049l")
    first, second = shown.split("\x1b[H")[1:]
    assert ["- deltas/s" in one for one in (first, second)] == [True, False]
    assert "it went away" in second.partition("\x1b[J")[2]  # over the last line, and it stays there


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["top", "--http", "127.0.0.1:1"], 1, "127.0.0.1:1 cannot be asked"),
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
def test_a_mistake_gets_one_line(
    arguments: list[str], status: int, said: str, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"TO": places.to, "HTTP": places.told_at}.get(one, one) for one in arguments]
    assert main(given) == status
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1), shown
    assert said in shown.err


def test_a_token_file_that_says_more_than_a_token_gets_one_line(
    places: Places, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "new", "reader", "--admin"]) == 0
    (tmp_path / "token").write_text(capsys.readouterr().err)
    assert main(["top", "--once", "--http", places.told_at, "--token-file", str(tmp_path / "token")]) == 2
    assert "holds more than a token: put only the token there" in capsys.readouterr().err


def test_tokens_and_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = files()
    tokens = table("all", "t-all", publish=True, subscribe=True, admin=True, namespaces='["*"]')
    secret, lines = tmp_path / "token", tmp_path / "lines"
    secret.write_text("t-all\n")
    lines.write_text(created("v"))
    shown = ["--tls-certificate", made.client, "--tls-key", made.client_key]
    tls = Tls(made.server, made.server_key, made.authority)
    with served(tmp_path / "facts", tokens=tokens.encode(), tls=tls) as places:
        secure = ["--tls-ca", made.authority, *shown]
        publish = ["publish", str(lines), "--to", places.to, *secure]
        status = ["status", "--http", places.told_at, *secure]
        for verb in (publish, status):
            monkeypatch.delenv("DELTA_PROP_TOKEN", raising=False)
            assert main(verb) == 1
            assert "token" in capsys.readouterr().err
            assert main([*verb, "--token-file", str(secret)]) == 0
            monkeypatch.setenv("DELTA_PROP_TOKEN", "t-all")
            assert main(verb) == 0
        assert main([*status, "--tls-name", "server.example"]) == 0
        capsys.readouterr()
        assert main([*status, "--tls-name", "elsewhere.example"]) == 2
        assert "elsewhere.example" in capsys.readouterr().err
