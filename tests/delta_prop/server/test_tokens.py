"""The token file: its permissions, and errors that name the key of each mistake."""

from __future__ import annotations

from math import inf

import pytest

from delta_prop.server.permissions import ALL_KINDS, Permissions
from delta_prop.server.quotas import Limits
from delta_prop.server.tokens import TOKENS_MAX, TokenDefaults, digest_of, make_token, parse_tokens
from delta_prop_wire.delta import Kind
from delta_prop_wire.errors import UsageError
from tests.delta_prop.server.tokens import table

DEFAULTS = TokenDefaults(rate=1000.0, burst=100)


def parse_permissions(text: str) -> Permissions:
    (token,) = parse_tokens(text, DEFAULTS)
    return token.permissions


def test_token_table_becomes_permissions() -> None:
    text = table(
        "ci",
        "secret",
        publish=True,
        subscribe=True,
        namespaces='["docs", "img-*"]',
        streams='["orders", "web-*", "_of.service"]',
        operations='["create", "sparse_add", "17"]',
        rate=50,
        burst=7,
        vector_rate=2.5,
        bytes_in_s=5_000_000,
        rows_out_s=7.5,
        requests_s="inf",
        connections=3,
        expires="2027-01-01T00:00:00Z",
    )
    (token,) = parse_tokens(text, DEFAULTS)
    assert token.digest == digest_of("secret")
    assert token.permissions == Permissions(
        "ci",
        publish=True,
        subscribe=True,
        namespaces=("docs", "img-*"),
        kinds_mask=1 << Kind.CREATE | 1 << Kind.SPARSE_ADD | 1 << 17,
        rate=50.0,
        burst=7,
        vector_rate=2.5,
        expires_at=1_798_761_600_000_000,
        streams=("orders", "web-*", "_of.service"),
        limits=Limits(bytes_in_s=5_000_000.0, rows_out_s=7.5),
        connections=3,
    )
    assert "secret" not in repr(token)
    assert token.digest.hex() not in repr(token)


def test_missing_keys_deny_permission_and_take_defaults() -> None:
    assert parse_permissions(table("a", "t", admin=True)) == Permissions(
        "a", admin=True, rate=1000.0, burst=100
    )
    assert parse_permissions(table("a", "t", admin=True)).kinds_mask == ALL_KINDS
    assert parse_permissions(table("a", "t", publish=True, namespaces='["docs", "*"]')).namespaces is None
    assert parse_permissions(table("a", "t", admin=True)).streams is None
    assert parse_permissions(table("a", "t", admin=True, streams='["orders", "*"]')).streams is None
    assert parse_permissions(table("a", "t", publish=True, forward=True, namespaces='["*"]')).forward


@pytest.mark.parametrize(
    ("rate", "burst"), [("20000", 2000), ("500", 100), ("inf", 100), ("1000.5", 100), ("0.01", 100)]
)
def test_default_burst_is_a_tenth_of_a_second(rate: str, burst: int) -> None:
    permissions = parse_permissions(table("a", "t", admin=True, rate=rate))
    assert (permissions.rate, permissions.burst) == (float(rate), burst)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 tables"),
        ("[[token]", "not TOML"),
        (f"x = {'9' * 5000}", "not TOML: a number in it has more digits than can be read"),
        (f"x = {'[' * 20_000}", "not TOML: its lists or tables are nested too deeply"),
        ("token = 3", "begin each token with a line"),
        ("token = [1]", "begin each token with a line"),
        ("tokens = 1", "tokens: unknown key: did you mean token?"),
        (table("a", "t", admin=True) * 2, "token[1].name: the same as token[0].name"),
        (table("a", "t", admin=True) + table("b", "t", admin=True), "token[1].sha256: the same as token[0]"),
        (table("a", "t", admin=True, namespace='["x"]'), "token[0].namespace: unknown key: did you mean nam"),
        (table("a", "t", admin=True, colour=1), "token[0].colour: unknown key: use one of name, sha256"),
        (table("a b", "t", admin=True), "token[0].name: 'a b': give 1 to 64"),
        (table("anonymous", "t", admin=True), "token[0].name: 'anonymous'"),
        ('[[token]]\nsha256 = "00"', "token[0].name: missing"),
        ('[[token]]\nname = "a"\nadmin = true', "token[0].sha256: nothing instead of 64 hexadecimal digits"),
        ('[[token]]\nname = "a"\nadmin = true\nsha256 = "hunter2"', "token[0].sha256: something else"),
        ('[[token]]\nname = "a"\nadmin = true\nsha256 = []', "token[0].sha256: 0 hashes: give 1 to 10"),
        (f'[[token]]\nname = "a"\nadmin = true\nsha256 = ["{"0" * 64}", 7]', "token[0].sha256[1]: something"),
        (
            f'[[token]]\nname = "a"\nadmin = true\nsha256 = ["{"0" * 64}", "{"0" * 64}"]',
            "token[0].sha256[1]: the same as token[0].sha256[0]",
        ),
        (table("a", "t"), "'a' has no right"),
        (table("a", "t", admin=1), "token[0].admin: 1: give true or false"),
        (table("a", "t", forward=True), "token[0].forward: 'a' would forward complete logs"),
        (table("a", "t", forward=True, publish=True, namespaces='["docs"]'), "token[0].forward: 'a'"),
        (table("a", "t", forward=True, namespaces='["*"]'), "token[0].forward: 'a'"),
        (
            table("a", "t", forward=True, publish=True, namespaces='["*"]', operations='["create"]'),
            "token[0].forward: 'a' would forward complete logs",
        ),
        (table("a", "t", publish=True), "token[0].namespaces: missing: give the names"),
        (table("a", "t", admin=True, namespaces='"docs"'), "token[0].namespaces: 'docs': give a list"),
        (table("a", "t", admin=True, namespaces='["a*b"]'), "token[0].namespaces[0]: 'a*b': put a * only"),
        (table("a", "t", admin=True, namespaces='["ok", ""]'), "token[0].namespaces[1]: ''"),
        (table("a", "t", admin=True, namespaces=f'["{"x" * 257}"]'), "token[0].namespaces[0]"),
        (table("a", "t", admin=True, operations='["create", "drop"]'), "token[0].operations[1]: 'drop'"),
        (table("a", "t", admin=True, streams='"orders"'), "token[0].streams: 'orders': give a list"),
        (table("a", "t", admin=True, streams='["ok", 7]'), "token[0].streams[1]: 7: give a name"),
        (table("a", "t", admin=True, streams='["a*b"]'), "token[0].streams[0]: 'a*b': put a * only"),
        (table("a", "t", admin=True, streams='["a/b"]'), "token[0].streams[0]: stream 'a/b': give 1 to 249"),
        (table("a", "t", admin=True, streams='[""]'), "token[0].streams[0]: stream '': give 1 to 249"),
        (table("a", "t", admin=True, operations=3), "token[0].operations: 3: give a list"),
        (table("a", "t", admin=True, rate=0), "token[0].rate: 0: give deltas per second, above 0"),
        (table("a", "t", admin=True, rate="nan"), "token[0].rate: nan"),
        (table("a", "t", admin=True, rate=True), "token[0].rate: True"),
        (table("a", "t", admin=True, vector_rate=-1), "token[0].vector_rate: -1"),
        (
            table("a", "t", admin=True, bytes_in_s=0),
            "token[0].bytes_in_s: 0: give an amount per second, above",
        ),
        (table("a", "t", admin=True, rows_out_s="nan"), "token[0].rows_out_s: nan"),
        (table("a", "t", admin=True, requests_s=True), "token[0].requests_s: True"),
        (table("a", "t", admin=True, connections=0), "token[0].connections: 0: give a whole number"),
        (table("a", "t", admin=True, connections=1.5), "token[0].connections: 1.5"),
        (table("a", "t", admin=True, burst=0), "token[0].burst: 0: give a whole number"),
        (table("a", "t", admin=True, burst=1.5), "token[0].burst: 1.5"),
        (table("a", "t", admin=True, expires="2027-01-01T00:00:00"), "token[0].expires: datetime"),
        (table("a", "t", admin=True, expires='"soon"'), "token[0].expires: 'soon': give a time with"),
        (table("a", "t", admin=True, expires="2027-01-01"), "token[0].expires: datetime.date"),
    ],
)
def test_error_names_the_key_and_reveals_no_secret(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_tokens(text, DEFAULTS)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_number_of_tokens_is_bounded() -> None:
    text = "".join(table(f"t{i}", f"secret-{i}", admin=True) for i in range(TOKENS_MAX + 1))
    with pytest.raises(UsageError, match=f"{TOKENS_MAX + 1} tables"):
        parse_tokens(text, DEFAULTS)
    assert parse_permissions(table("a", "t", admin=True, vector_rate=0, rate="inf")).rate == inf


def test_token_may_have_two_secrets_during_rotation() -> None:
    hashes = ", ".join(f'"{digest_of(secret).hex()}"' for secret in ("old", "new"))
    old, new = parse_tokens(f'[[token]]\nname = "a"\nadmin = true\nsha256 = [{hashes}]', DEFAULTS)
    assert (old.digest, new.digest) == (digest_of("old"), digest_of("new"))
    assert old.permissions == new.permissions
    assert old.permissions is not new.permissions, "each connection should end with the secret that it used"


def test_make_token_uses_all_random_bytes() -> None:
    token = make_token(bytes(range(32)))
    assert token.startswith("dp_")
    assert token.isascii()
    assert len(token) == 46
    assert make_token(bytes(31) + b"\1") != make_token(bytes(32)) != token
