"""A configuration is read with every key, mistakes name the path of their key, and output reads back."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.api.settings import Settings
from delta_prop.configuration import (
    Configuration,
    IndexConfig,
    JsonLinesConfig,
    StorageConfig,
    read_configuration,
    to_json,
    to_toml,
)
from delta_prop.configuration.reading import _PATH_KEYS, _SINK_PATH_KEYS
from delta_prop.configuration.sinks import KINDS
from delta_prop.configuration.values import File
from delta_prop.platform.ports import Tls
from delta_prop.server.settings import ServerSettings
from delta_prop_broker.log.settings import LogSettings
from delta_prop_sinks.hnsw_builder import Hnsw
from delta_prop_wire.delta import AckLevel
from delta_prop_wire.errors import UsageError

FULL_TEXT = """
data = "facts"
[server]
port = 0
heartbeat_interval_s = 3
[settings]
batch_deltas = 50
[log]
read_level = "logged"
min_compaction_lag_s = 60
[tls]
certificate = "/etc/cert.pem"
key = "key.pem"
[access]
tokens = "tokens.toml"
[logging]
format = "json"
[[sinks]]
kind = "storage"
path = "facts.db"
topics = ["ns:docs", "ns:rows"]
[[sinks]]
kind = "index"
topics = ["ns:rows", "ns:docs"]
vectors = "storage"
hnsw = { metric = "l2" }
[[sinks]]
kind = "jsonlines"
path = "audit.jsonl"
topics = "op:delete"
pacing = true
"""


def test_empty_configuration_has_all_defaults() -> None:
    assert read_configuration() == Configuration()


def test_every_section_is_read() -> None:
    assert read_configuration(FULL_TEXT, folder="/etc/dp") == Configuration(
        data="/etc/dp/facts",
        server=ServerSettings(port=0, heartbeat_interval_s=3.0),
        settings=Settings(batch_deltas=50),
        log=LogSettings(read_level=AckLevel.LOGGED, min_compaction_lag_s=60.0),
        tls=dataclasses.replace(Configuration().tls, certificate="/etc/cert.pem", key="/etc/dp/key.pem"),
        access=dataclasses.replace(Configuration().access, tokens="/etc/dp/tokens.toml"),
        logging=dataclasses.replace(Configuration().logging, format="json"),
        sinks=(
            StorageConfig(path="/etc/dp/facts.db", topics=("ns:docs", "ns:rows")),
            IndexConfig(topics=("ns:rows", "ns:docs"), vectors="storage", hnsw=Hnsw(metric="l2")),
            JsonLinesConfig(path="/etc/dp/audit.jsonl", topics=("op:delete",), pacing=True),
        ),
    )


def test_certificate_enables_tls() -> None:
    assert read_configuration(FULL_TEXT).served_tls == Tls("/etc/cert.pem", "key.pem")
    assert read_configuration().served_tls is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('server.heartbeat_interval_s = "x"', 'server.heartbeat_interval_s: "x" is not a number'),
        ("server.heartbeat_interval_s = true", "server.heartbeat_interval_s: true is not a number"),
        ("server.heartbeat_interval_s = 30", "server.heartbeat_interval_s 30.0: not below peer_timeout_s 15"),
        ("server.port = 99999", "server.port = 99999: not a port: give up to 65535"),
        ("server.connections_max = 1.5", "server.connections_max: 1.5 is not an integer"),
        ("server.hartbeat_s = 3", "server.hartbeat_s: unknown key: did you mean heartbeat_interval_s?"),
        ("server = 1", "server: 1 is not a table"),
        ("[servr]", "servr: unknown key: did you mean server?"),
        ("qqq = 1", "qqq: unknown key: use one of access, data,"),
        ('data = ""', 'data: "" is not a file name'),
        ("data = 7", "data: 7 is not a text"),
        ('settings.queue_bytes_max = "256 MiB"', 'settings.queue_bytes_max: "256 MiB" is not a number'),
        ("settings.retry_backoff_s = 9", "settings.retry_backoff_s 9.0: above retry_backoff_max_s 5.0"),
        ('settings.rate_law = "x"', 'settings.rate_law: "x": give one of drain, depth'),
        ("log.compact = 1", "log.compact: 1: give true or false"),
        ("log.retention_s = inf", "log.retention_s: inf is not finite"),
        ('log.read_level = "sync"', 'log.read_level: "sync": give one of logged, durable'),
        ('log.read_level = "memory"', 'log.read_level: "memory": give one of logged, durable'),
        ('tls.key = "k"', "tls.certificate: it is missing"),
        ('tls.authorities = "a"', "tls.authorities: without tls.certificate"),
        ('logging.level = "all"', 'logging.level: "all": give one of debug, info'),
        ("sinks = 1", "sinks: 1: write [[sinks]] above the keys of each"),
        ("[sinks]\nkind = 'cache'", "sinks: {'kind': 'cache'}: write [[sinks]] above the keys of each"),
        ("sinks = [1]", "sinks: [1]: write [[sinks]] above the keys of each"),
        ('sinks = "cache"', 'sinks: "cache": write [[sinks]] above the keys of each, and kind = "cache"'),
        ('sinks = ["cache"]', "sinks: ['cache']: write [[sinks]] above the keys of each, and kind = "),
        ("log.segment_bytes_max = 1", "log.segment_bytes_max 1: each segment is a file: give at least 65536"),
        ("[[sinks]]", "sinks[0].kind: it is missing: give one of storage"),
        ("[[sinks]]\nkind = 'sql'", 'sinks[0].kind: "sql": give one of storage'),
        ("[[sinks]]\nkind = ['sql']", "sinks[0].kind: ['sql']: give one of storage"),
        ("[[sinks]]\nkind = 'storage'", "sinks[0].path: it is missing"),
        ("[[sinks]]\nkind = 'cache'\npath = 'x'", "sinks[0].path: unknown key"),
        ("[[sinks]]\nkind = 'cache'\ntopics = 'docs'", "sinks[0].topics: topic 'docs' is unknown"),
        ("[[sinks]]\nkind = 'cache'\ntopics = []", "sinks[0].topics: []: give a list of at least one"),
        ("[[sinks]]\nkind = 'cache'\ntopics = ['*', 1]", "sinks[0].topics[1]: 1 is not a text"),
        ("[[sinks]]\nkind = 'cache'\n[[sinks]]\nkind = 'cache'", "sinks[1].name: sinks[0] is named 'cache'"),
        ("[[sinks]]\nkind = 'index'\nhnsw = 1", "sinks[0].hnsw: 1: give true or false"),
        ("[[sinks]]\nkind = 'index'\nhnsw = {metrik = 1}", "sinks[0].hnsw.metrik: unknown key"),
        ("[[sinks]]\nkind = 'index'\nhnsw = {threads = 0}", "sinks[0].hnsw.threads"),
        ("[[sinks]]\nkind = 'index'\nvectors = 's'", "sinks[0].vectors: 's' names no storage sink above it"),
        (
            "[[sinks]]\nkind = 'storage'\npath = 'x'\n[[sinks]]\nkind = 'jsonlines'\npath = 'x'",
            "sinks[1].path: sinks[0] writes 'x' too",
        ),
        (
            "[[sinks]]\nkind = 'storage'\npath = 'x'\n"
            "[[sinks]]\nkind = 'index'\nvectors = 'storage'\ntopics = 'v:a'",
            "sinks[1].topics: the index shares the vectors of 'storage'",
        ),
        ("settings.queue_bytes_max = 2000000", "settings.queue_bytes_max 2000000 is below server."),
        ("server.producer_bytes_credit = 999999999", "server.producer_bytes_credit 999999999 is above"),
        ("[server", "this is not TOML: "),
        ("'a.b' = 1", "'a.b': unknown key"),
    ],
)  # fmt: skip
def test_mistake_is_reported_with_the_path_of_its_key(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_configuration(text)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_memory_bound_counts_every_part() -> None:
    defaults = Configuration()
    for text, more_bytes in (
        ("server.receiving_bytes_max = 1_268_435_456", 1_000_000_000),
        ("settings.queue_bytes_max = 1_268_435_456", 1_000_000_000),
        ("log.tail_bytes_max = 167_108_864", 100_000_000),
        ("log.unwritten_bytes_max = 167_108_864", 100_000_000),
        ("log.compact_memory_bytes_max = 167_108_864", 100_000_000),
    ):
        assert read_configuration(text).memory_bytes_max() - defaults.memory_bytes_max() == more_bytes, text


# --- the environment


def test_environment_overrides_the_file() -> None:
    environment = {
        "DELTA_PROP_DATA": "not looked at",
        "DELTA_PROP_TOKEN": "not looked at",
        "OTHER__KEY": "not looked at",
        "DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S": "4.5",
        "DELTA_PROP_SERVER__PORT": "0",
        "DELTA_PROP_LOG__COMPACT": "False",
        "DELTA_PROP_LOG__READ_LEVEL": "logged",
        "DELTA_PROP_ACCESS__TOKENS": "7",
        "DELTA_PROP_SINKS__0__TOPICS": "ns:a, v:b",
        "DELTA_PROP_SINKS__0__PATH": "here.db",
        "DELTA_PROP_SINKS__1__KIND": "cache",
        "DELTA_PROP_SINKS__1__TOPICS": '["ns:c"]',
        "DELTA_PROP_SINKS__2__KIND": "index",
        "DELTA_PROP_SINKS__2__HNSW": "false",
    }
    text = 'server.heartbeat_interval_s = 3\n[[sinks]]\nkind = "storage"\npath = "there.db"'
    configuration = read_configuration(text, folder="/etc", environment=environment)
    assert (configuration.data, configuration.server.heartbeat_interval_s, configuration.server.port) == (
        None,
        4.5,
        0,
    )
    assert (configuration.log.compact, configuration.log.read_level, configuration.access.tokens) == (
        False,
        AckLevel.LOGGED,
        "7",
    )
    storage, cache, index = configuration.sinks
    assert isinstance(storage, StorageConfig)
    assert isinstance(index, IndexConfig)
    assert (storage.topics, storage.path) == (("ns:a", "v:b"), "here.db")
    assert (cache.topics, index.hnsw) == (("ns:c",), False)


def test_environment_sinks_are_ordered_by_number() -> None:
    environment = {f"DELTA_PROP_SINKS__{n}__KIND": "cache" for n in range(11)}
    environment |= {f"DELTA_PROP_SINKS__{n}__NAME": f"c{n}" for n in range(11)}
    assert [sink.name for sink in read_configuration(environment=environment).sinks] == [
        f"c{n}" for n in range(11)
    ]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SERVER__PORT", "x", 'server.port (DELTA_PROP_SERVER__PORT): "x" is not a number'),
        ("SERVER__PORT", "0.5", "server.port (DELTA_PROP_SERVER__PORT)"),
        (
            "SERVER__HEARTBEAT_INTERVAL_S",
            "nan",
            'server.heartbeat_interval_s (DELTA_PROP_SERVER__HEARTBEAT_INTERVAL_S): "nan" is not',
        ),
        ("SERVER__PROT", "1", "server.prot (DELTA_PROP_SERVER__PROT): unknown key"),
        ("SERVER__PORT__X", "1", "DELTA_PROP_SERVER__PORT__X: server.port is a single value"),
        ("LOG__COMPACT", "yes", 'log.compact (DELTA_PROP_LOG__COMPACT): "yes": give true or false'),
        ("SINKS__1__PATH", "x", "DELTA_PROP_SINKS__1__PATH: '1' is not an index of the list"),
        ("SINKS__X__PATH", "x", "sinks (DELTA_PROP_SINKS__X__PATH): {"),
        ("SINKS__0", "x", "DELTA_PROP_SINKS__0: sinks[0] has keys of its own"),
        ("SINKS__0__KIND", "x", 'sinks[0].kind (DELTA_PROP_SINKS__0__KIND): "x": give one of'),
        ("TLS__", "x", "'' (DELTA_PROP_TLS__)"),
        ("SRVER__PORT", "1", "srver (DELTA_PROP_SRVER__PORT): unknown key: did you mean server?"),
        ("SINK__0__PATH", "x", "sink (DELTA_PROP_SINK__0__PATH): unknown key: did you mean sinks?"),
        ("_DATA", "facts", "DELTA_PROP__DATA: two underscores separate a section and its key, as in"),
        ("_SERVER__PORT", "1", "DELTA_PROP__SERVER__PORT: two underscores separate a section and"),
        ("__", "x", ""),
    ],
)
def test_mistake_in_environment_names_its_variable(variable: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_configuration("server.port = 1", environment={f"DELTA_PROP_{variable}": value})
    assert message in str(error.value)


# --- output


def test_shown_configuration_reads_back_unchanged() -> None:
    for configuration in (Configuration(), read_configuration(FULL_TEXT, folder="/etc/dp")):
        shown = to_toml(configuration)
        assert read_configuration(shown) == configuration
        in_json = json.loads(to_json(configuration))["server"]
        in_toml = tomllib.loads(shown)["server"]
        assert {name: value for name, value in in_json.items() if value is not None} == in_toml


@settings(max_examples=40)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_data_path_reads_back_unchanged(text: str) -> None:
    configuration = Configuration(data=text)
    assert read_configuration(to_toml(configuration)) == configuration


def test_every_key_is_shown() -> None:
    shown = re.sub(r"# (\w+) is not set", r"\1 = unset", to_toml(Configuration()))
    for section in ServerSettings, Settings, LogSettings:
        names = [field.name for field in dataclasses.fields(section)]
        assert [name for name in names if f"\n{name} = " not in shown] == []


# --- keys of files


def _has_file_type(kind: Any) -> bool:
    return kind == File or any(map(_has_file_type, get_args(kind)))


def test_every_file_key_is_resolved_from_the_folder() -> None:
    for section, kind in {"": Configuration, **get_type_hints(Configuration)}.items():
        if dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            assert tuple(name for name, hint in hints.items() if _has_file_type(hint)) == _PATH_KEYS.get(
                section, ()
            )
    for config in KINDS.values():
        hints = get_type_hints(config, include_extras=True)
        assert {name for name, hint in hints.items() if _has_file_type(hint)} <= set(_SINK_PATH_KEYS)
