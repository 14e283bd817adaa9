"""A wrong type or value of any key of a configuration is reported in one line with its key and a fix."""

from __future__ import annotations

import dataclasses
import json
import re
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.configuration import Configuration, make_sinks, read_configuration
from delta_prop.configuration.sinks import KINDS
from delta_prop_broker.log.settings import ReadLevel
from delta_prop_sinks.hnsw_builder import Hnsw
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGE = "1" + "0" * 400
"""An integer too large for a float."""
DIGITS = "9" * 5000
"""A number with more digits than Python converts."""
HEX = "0x" + "f" * 5000
"""A number with as many hexadecimal digits, which Python converts but does not print in decimal."""

WRONG_TEXTS = ["7", "true", "[]", "{a = 1}", "1979-05-27", "''"]
WRONG_BOOLEANS = ["'x'", "1", "[]", "{a = 1}"]
WRONG_NUMBERS = [
    "'5'", "true", "[]", "[1]", "{}", "{a = 1}", "07:32:00", "inf", "-inf", "nan",
    "-1", "-1.0", "1e300", "1000000000000001", HUGE, HEX,
]  # fmt: skip
WRONG_CHOICES = ["'x'", "''", "1", "[]", "{a = 1}"]
WRONG_LISTS = ["7", "[]", "[7]", "[{}]", "{a = 1}", "''", "['']"]

MAY_BE_ZERO = {
    "server.port", "server.http_port", "server.vector_rate", "settings.linger_ms", "settings.retries",
    "server.client_bytes_in_s", "server.client_bytes_out_s", "server.client_rows_in_s",
    "server.client_rows_out_s", "server.client_requests_s", "server.streams_max", "server.partitions_max",
    "log.retention_bytes", "log.free_bytes_min", "log.reserve_bytes", "log.tombstone_retention_s",
    "sinks[0].linger_ms",
    "sinks[0].image_s", "sinks[0].hnsw.drift_share_max", "sinks[0].resident_bytes_max",
}  # fmt: skip
ANY_TEXT = {"log.made_by"}
"""Keys whose value may be any text, even an empty one."""
FIXES = (
    "give ", "leave ", "write ", "at least ", "above 0", "at most ", "end at ", "is not a table",
    "is none of", "use one of ", "must rise", "is not from ", "is below ", "did you mean ",
)  # fmt: skip
"""Texts of which each message has at least one: a fix, or the bound that is broken."""
REQUIRED_KEYS = {"storage": "path = 's.db'", "jsonlines": "path = 'lines'", "forward": "to = ['a:1']"}


class Key(NamedTuple):
    """A key, its type, and the text before and after its value."""

    path: str
    hint: Any
    prefix: str
    suffix: str = ""


def keys() -> Iterator[Key]:
    for section, kind in get_type_hints(Configuration, include_extras=True).items():
        if section == "sinks":
            yield Key(section, kind, "sinks = ")
        elif dataclasses.is_dataclass(kind):
            for name, hint in get_type_hints(kind, include_extras=True).items():
                yield Key(f"{section}.{name}", hint, f"{section}.{name} = ")
        else:
            yield Key(section, kind, f"{section} = ")
    for kind, config in KINDS.items():
        for name, hint in get_type_hints(config, include_extras=True).items():
            required = REQUIRED_KEYS.get(kind, "")
            required = "" if required.startswith(f"{name} ") else required
            if name != "kind":
                yield Key(f"sinks[0].{name}", hint, f"[[sinks]]\nkind = '{kind}'\n{required}\n{name} = ")
    for name, hint in get_type_hints(Hnsw, include_extras=True).items():
        prefix = f"[[sinks]]\nkind = 'index'\nhnsw = {{{name} = "
        yield Key(f"sinks[0].hnsw.{name}", hint, prefix, "}")


def wrong_values(key: Key, hint: Any) -> list[str]:
    """Return values that are wrong for a type."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return wrong_values(key, kinds[0]) if len(kinds) == 1 else ["'x'", "1", "[]", "{metrik = 1}"]
    if hint == ReadLevel:
        return WRONG_CHOICES
    if get_origin(hint) is Annotated or hint is str:
        return [text for text in WRONG_TEXTS if text != "''" or key.path not in ANY_TEXT]
    if get_origin(hint) is Literal:
        return WRONG_CHOICES
    if get_origin(hint) is tuple:
        return WRONG_LISTS
    if hint is bool:
        return WRONG_BOOLEANS
    zero = [] if key.path in MAY_BE_ZERO else ["0"]
    return WRONG_NUMBERS + zero + (["1.5"] if hint is int else [])


KEYS = list(keys())


def refusal_of(text: str) -> str | None:
    """Return the error message for a configuration, or None if it is accepted."""
    try:
        make_sinks(read_configuration(text).sinks)
    except UsageError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.path} {key.prefix[18:26].strip()}")
def test_wrong_value_is_reported_with_its_key_and_bound(key: Key) -> None:
    for value in wrong_values(key, key.hint):
        text = f"{key.prefix}{value}{key.suffix}"
        message = refusal_of(text)
        assert message, f"{text[:200]} must be refused"
        assert "\n" not in message
        assert len(message) < 400, message
        assert message.startswith(key.path), f"{value[:40]}: {message}"
        assert any(fix in message for fix in FIXES), message


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.hint in (int, float, bool)], ids=lambda key: key.path
)
def test_wrong_environment_value_names_its_variable(key: Key) -> None:
    name = "DELTA_PROP_" + re.sub(r"\W+", "__", key.path).upper()
    kind = re.search(r"kind = '(\w+)'", key.prefix)
    sink = {"DELTA_PROP_SINKS__0__KIND": kind[1]} if kind else {}
    for value in ("", "x", "1 2", DIGITS if key.hint is not bool else "1", "nan"):
        with pytest.raises(UsageError) as error:
            read_configuration(environment=sink | {name: value})
        assert str(error.value).startswith(f"{key.path} ({name}): "), str(error.value)[:200]
        assert len(str(error.value)) < 300


LEAVES = st.one_of(
    st.booleans().map(lambda truth: str(truth).lower()),
    st.integers().map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_categories=["Cs"])).map(lambda text: json.dumps(text).replace("\x7f", "")),
    st.sampled_from(["1979-05-27T07:32:00Z", "0o17", "0xff", "1_000", "''", DIGITS, HEX, HUGE]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(["a", "kind", "path", "metric"]), inner, max_size=3).map(
            lambda table: "{" + ", ".join(f"{name} = {value}" for name, value in table.items()) + "}"
        )
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(KEYS), VALUES)
def test_any_value_is_accepted_or_refused_in_one_line(key: Key, value: str) -> None:
    message = refusal_of(f"{key.prefix}{value}{key.suffix}")
    assert message is None or ("\n" not in message and len(message) < 400), message


def test_every_key_is_tried() -> None:
    assert len(KEYS) > 140
    assert {key.path for key in KEYS} >= MAY_BE_ZERO


@pytest.mark.parametrize("path", sorted(MAY_BE_ZERO))
def test_zero_is_accepted_where_it_is_meaningful(path: str) -> None:
    key = next(key for key in KEYS if key.path == path)
    make_sinks(read_configuration(f"{key.prefix}0{key.suffix}").sinks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]", 'data: {} is not a text: write data = "…" instead of [data]'),
        ("[data]\npath = 'x'", "data: {'path': 'x'} is not a text"),
        ("data = 'a'\ndata = 'b'", "this is not TOML: "),
        ("[server]\nport = 1\n[server]\nhost = 'x'", "this is not TOML: "),
        ("[server]\nport = 1\nport = 2", "this is not TOML: "),
        ("server.port.x = 1", "server.port: {'x': 1} is not a number"),
        ("server = [{port = 1}]", "server: [{'port': 1}] is not a table"),
        ("[[server]]\nport = 1", "server: [{'port': 1}] is not a table"),
        ("[[data]]", "data: [{}] is not a text"),
        ("[sinks.storage]\npath = 'x'", "sinks: "),
        (f"server.port = {DIGITS}", "this is not TOML: a number in it has more digits than can be read"),
        (f"x = {'[' * 20_000}", "this is not TOML: "),
        (f"x = {'[' * 20_000}{']' * 20_000}", "this is not TOML: "),
        (f"{'k' * 5000} = 1", "kkkk"),
        ("'a\\nb' = 1\n", "'a\\\\nb': unknown key"),
        ("server.host = 'a\0b'", "this is not TOML: "),
        ('server.host = "a\\u0000b"', "server.host = "),
        ('data = "a\\u0000b"', "data: "),
        ("sinks = [{kind = 'cache'}, {kind = 'cache', name = ''}]", "sinks[1].name: "),
        ('[[sinks]]\nkind = "cache"\nname = "a\\nb"', "sinks[0].name: "),
        ("[[sinks]]\nkind = 'forward'\nto = 'a:1'\ntoken = 'ä'", "sinks[0].token: "),
        ("[[sinks]]\nkind = 'cache'\nbatch_deltas = 1001", "sinks[0].batch_deltas 1001: give 1 to 1000"),
    ],
    ids=lambda text: text[:30].replace("\n", " "),
)
def test_hostile_text_is_refused_in_one_short_line(text: str, message: str) -> None:
    refused = refusal_of(text)
    assert refused
    assert refused.startswith(message)
    assert "\n" not in refused
    assert len(refused) < 400
