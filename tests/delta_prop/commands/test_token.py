"""`token new` prints a token, and the lines by which a token file accepts it."""

from __future__ import annotations

import json

import pytest

from delta_prop.cli import OK, USAGE_ERROR, main
from delta_prop.server.permissions import Permissions
from delta_prop.server.tokens import TokenDefaults, digest_of, parse_tokens


def test_printed_lines_match_the_printed_token(capsys: pytest.CaptureFixture[str]) -> None:
    rights = [
        "--publish",
        "--namespace",
        "docs",
        "--namespace",
        'a"b\u00e9\U0001f600*',
        "--operation",
        "create",
    ]
    rights += ["--stream", "orders", "--stream", "web-*"]
    more = ["--rate", "2500", "--burst", "7", "--expires", "2027-01-01T00:00:00Z"]
    assert main(["token", "new", "importer", *rights, *more]) == OK
    captured = capsys.readouterr()
    token = captured.err.split()[-1]
    assert token not in captured.out
    assert captured.err.count("\n") == 1
    (token_entry,) = parse_tokens(captured.out, TokenDefaults())
    assert token_entry.digest == digest_of(token)
    assert token_entry.permissions == Permissions(
        "importer",
        publish=True,
        namespaces=("docs", 'a"b\u00e9\U0001f600*'),
        kinds_mask=1,
        rate=2500.0,
        burst=7,
        expires_at=1_798_761_600_000_000,
        streams=("orders", "web-*"),
    )
    assert main(["token", "new", "ops", "--admin"]) == OK
    both_tables = captured.out + capsys.readouterr().out
    assert [one.permissions.name for one in parse_tokens(both_tables, TokenDefaults())] == [
        "importer",
        "ops",
    ], "one file does not hold the lines of both tokens"


def test_json_holds_lines_and_a_unique_token(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = set()
    for _ in range(2):
        assert main(["token", "new", "west", "--publish", "--forward", "--namespace", "*", "--json"]) == OK
        captured = capsys.readouterr()
        fields = json.loads(captured.out)
        (token_entry,) = parse_tokens(fields["toml"], TokenDefaults())
        assert token_entry.digest == digest_of(fields["token"])
        assert token_entry.permissions.forward
        assert captured.err == ""
        tokens.add(fields["token"])
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["importer"],
            "'importer': it may do nothing: give --publish, --subscribe, --forward, --admin or --manage",
        ),
        (["importer", "--publish"], "--namespace: give the namespaces that it may use, like --namespace d"),
        (
            ["west", "--forward"],
            "--forward: 'west' would forward full logs: give --publish and --namespace '*",
        ),
        (["a b", "--admin"], "NAME: 'a b': give 1 to 64 letters"),
        (["a", "--admin", "--burst", "0"], "--burst: 0: give a whole number of deltas from 1"),
        (["a", "--publish", "--namespace", "b*c"], "--namespace: 'b*c': put a * only at the end"),
        (["a", "--admin", "--stream", "b*c"], "--stream: 'b*c': put a * only at the end"),
        (["a", "--admin", "--stream", "b c"], "--stream: stream 'b c': give 1 to 249"),
        (["a", "--admin", "--rate", "fast"], "--rate 'fast' is not a number"),
        (["a", "--publish", "--namespace", "*", "--rate", "1\nadmin = true"], "is not a number"),
        (["a", "--publish", "--namespace", "*", "--burst", "1\nadmin = true"], "is not a number"),
        (
            ["a", "--publish", "--namespace", "*", "--expires", "2127-01-01T00:00:00Z\nadmin = true"],
            "give a time",
        ),
        (["a", "--admin", "--expires", "5parsecs"], "--expires '5parsecs': give a time like 2027-"),
        (["a", "--admin", "--expires", "9999999999d"], "--expires '9999999999d': "),
        (["a", "--publish", "--namespace", "x", "--operation", "drop"], "--operation: 'drop': give one"),
    ],
)
def test_mistake_prints_no_token(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "new", *arguments]) == USAGE_ERROR
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert "dp_" not in captured.err
