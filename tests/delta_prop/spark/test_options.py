"""The driver reads options with names in any case, checks their bounds, and never shows the token."""

from __future__ import annotations

import pickle

import pytest

from delta_prop.client.settings import ClientSettings
from delta_prop.directory.log_positions import LogPosition
from delta_prop.platform.ports import Tls
from delta_prop.spark.options import ReadOptions, WriteOptions, read_options, write_options
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import UsageError

NOW_US = 1_900_000_000_000_000
"""A time after all times in the tests."""

URL = {"url": "delta://one:7373"}


def read(**options: str) -> ReadOptions:
    return read_options(URL | options, {}, NOW_US)


def write(**options: str) -> WriteOptions:
    return write_options(URL | options, {})


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("one:7000", ("one:7000",)),
        ("delta://one", ("one:7373",)),
        ("delta://one:1/, delta://two:2,[::1]:3", ("one:1", "two:2", "[::1]:3")),
    ],
)
def test_url_is_parsed_into_addresses(url: str, addresses: tuple[str, ...]) -> None:
    assert read(url=url).remote.addresses == addresses


def test_options_override_the_environment() -> None:
    environment = {"DELTA_PROP_URL": "delta://there:1", "DELTA_PROP_TOKEN": "hush"}
    options = read_options({}, environment, NOW_US).remote
    assert (options.addresses, options.token) == (("there:1",), "hush")
    overridden = read_options({"URL": "here:2", "Token": "mine"}, environment, NOW_US).remote
    assert (overridden.addresses, overridden.token) == (("here:2",), "mine")


def test_batch_read_takes_all_its_options() -> None:
    options = read(
        start="17",
        end="2026-01-31T12:00:00Z",
        topics="ns:docs, c:news",
        partitions="3",
        pushDown="TRUE",
        tlsCa="ca.pem",
        tlsName="one",
        openTimeoutSeconds="2",
    )
    assert options.start == LogPosition(offset=17)
    assert options.end == LogPosition(time_us=1_769_860_800_000_000)
    assert options.topics == ("ns:docs", "c:news")
    assert (options.partitions, options.pushdown) == (3, True)
    assert options.remote.tls == Tls(authorities="ca.pem", server_name="one")
    assert options.remote.settings == ClientSettings(open_timeout_s=2)


def test_stream_options_and_batch_options_are_not_mixed() -> None:
    assert read_options(URL | {"maxoffsetspertrigger": "100"}, {}, NOW_US, stream=True).offsets_max == 100
    with pytest.raises(
        UsageError, match="option end belongs to a batch read: leave it out of this stream read"
    ):
        read_options(URL | {"end": "9"}, {}, NOW_US, stream=True)
    with pytest.raises(
        UsageError, match="option maxOffsetsPerTrigger belongs to a stream read: leave it out"
    ):
        read(maxoffsetspertrigger="9")  # in lower case, as Spark passes it
    with pytest.raises(
        UsageError, match="option staged belongs to a batch write: leave it out of this stream wr"
    ):
        write_options(URL | {"staged": "true"}, {}, stream=True)


def test_options_have_their_defaults() -> None:
    options = read()
    assert (options.start, options.end) == (LogPosition(earliest=True), LogPosition())
    assert (options.topics, options.partitions, options.offsets_max, options.pushdown) == (
        ("*",),
        None,
        None,
        False,
    )
    assert options.remote.tls is None
    expected = WriteOptions(options.remote)
    assert write() == expected
    assert (expected.staged, expected.waits, expected.fails_on_refused) == (True, True, True)


def test_topics_are_read_from_a_json_list_or_namespace() -> None:
    assert read(topics='["v:a,b", "ns:docs"]').topics == ("v:a,b", "ns:docs")
    assert read(namespace="docs").topics == ("ns:docs",)


def test_batch_write_takes_all_its_options() -> None:
    options = write(
        producer="nightly",
        namespace="docs",
        priority="low",
        staged="false",
        wait="False",
        waitTimeoutSeconds="9.5",
        onRefused="skip",
        tls="true",
    )
    assert (options.producer, options.namespace, options.priority) == ("nightly", "docs", Priority.LOW)
    assert (options.staged, options.waits, options.wait_timeout_s, options.fails_on_refused) == (
        False,
        False,
        9.5,
        False,
    )
    assert options.remote.tls == Tls()


def test_options_that_spark_adds_are_ignored() -> None:
    assert write(checkpointLocation="/x", queryName="q") == write()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"url": ""}, "option url and variable DELTA_PROP_URL are missing"),
        (
            {"url": "http://one:80"},
            "option url 'http://one:80' is not an address: give host:port with a port",
        ),
        (
            {"url": "nonsense"},
            "option url 'nonsense' is not an address: give host:port with a port from 1 to 65",
        ),
        ({"url": "delta://"}, "option url 'delta://' is not an address"),
        (
            {"url": "delta://one:99999"},
            "option url 'delta://one:99999' is not an address: .* from 1 to 65535",
        ),
        ({"url": "one:0x1"}, "option url 'one:0x1' is not an address"),
        ({"url": "one:1,,two:2"}, "option url '' is not an address: .* separated by commas"),
        ({"url": ",".join(f"one:{port}" for port in range(1, 66))}, "option url: 65 addresses: give 1 to 64"),
        ({"token": "x" * 4097}, "option token: 4,097 bytes, more than the limit of 4,096"),
        ({"tlsName": "one:7373"}, "option tlsName 'one:7373': give the name of a host"),
        ({"tlsName": ""}, "option tlsName '': give the name of a host"),
        ({"partitons": "1"}, r"option partitons is not an option of a batch read: did you mean partitions\?"),
        ({"zzz": "1"}, "option zzz is not an option of a batch read: name one of url, token, tls"),
        (
            {"producer": "p"},
            "option producer belongs to a batch write and a stream write: leave it out of this bat",
        ),
        ({"path": "/x"}, r"path: a service has no path: give load\(\) and save\(\) no argument"),
        ({"start": "soon"}, "option start 'soon': give earliest, latest, an offset, a time like 2026"),
        ({"end": "-1"}, "option end '-1': give"),
        ({"partitions": "0"}, "option partitions '0': give a whole number from 1 to 10,000"),
        ({"partitions": "many"}, "option partitions 'many': give a whole number from 1"),
        ({"pushdown": "yes"}, "option pushdown 'yes': give true or false"),
        ({"topics": "docs"}, "option topics: topic 'docs' is unknown"),
        ({"topics": "ns:" + "x" * 300}, "option topics: topic 'ns:x*"),
        ({"topics": "[1]"}, "option topics .*: give 1 to 256 topics"),
        ({"topics": "["}, r"option topics '\[' is not a JSON list"),
        (
            {"topics": "*", "namespace": "docs"},
            "options topics and namespace: give only topics, with ns:docs",
        ),
        ({"namespace": "a\nb"}, r"option namespace 'a\\nb': character 1 is U"),
        ({"namespace": "x" * 300}, "option namespace 'x*: 300 bytes of UTF-8; must be 1 to 255: shorten"),
        ({"tlsKey": "k"}, "options tlsCertificate and tlsKey: give both, or neither"),
        ({"tls": "false", "tlsCa": "a"}, "option tls is false, but other TLS options"),
        ({"openTimeoutSeconds": "0"}, "option openTimeoutSeconds '0': give a number of seconds above 0"),
        ({"openTimeoutSeconds": "1e9"}, "option openTimeoutSeconds '1e9': give .* above 0, up to 31,536,000"),
        (
            {"silenceTimeoutSeconds": "1"},
            "option silenceTimeoutSeconds '1': give a number of seconds above 5, since a peer",
        ),
    ],
)
def test_wrong_option_of_a_read_is_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"start": "earliest"}, "option start belongs to a batch read and a stream read: leave it out"),
        ({"priority": "urgent"}, "option priority 'urgent': give critical, high, normal, low"),
        ({"onRefused": "ignore"}, "option onRefused 'ignore': give fail or skip"),
        (
            {"producer": "x" * 241},
            "option producer 'x*: 241 bytes of UTF-8; must be 1 to 240: shorten it",
        ),
        ({"producer": ""}, "option producer '': 0 bytes of UTF-8; must be 1 to 240: give one"),
        ({"waitTimeoutSeconds": "nan"}, "option waitTimeoutSeconds 'nan': give a number of seconds"),
        ({"stagd": "true"}, r"option stagd is not an option of a batch write: did you mean staged\?"),
    ],
)
def test_wrong_option_of_a_write_is_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        write(**options)


def test_wrong_address_in_the_environment_names_its_variable() -> None:
    with pytest.raises(
        UsageError, match="variable DELTA_PROP_URL 'nonsense' is not an address: give host:port"
    ):
        read_options({}, {"DELTA_PROP_URL": "nonsense"}, NOW_US)


def test_time_before_the_epoch_is_the_epoch() -> None:
    assert read(start="1960-01-01").start == LogPosition(time_us=0)


def test_token_is_never_shown() -> None:
    options = write(token="hush-hush")
    assert "hush" not in repr(options)
    assert pickle.loads(pickle.dumps(options)).remote.token == "hush-hush"
    with pytest.raises(UsageError) as refused:
        write(token="hush-hush", nonsense="1")
    assert "hush" not in str(refused.value)
    with pytest.raises(
        UsageError, match="no user and no password: give a token with option token"
    ) as refused:
        write(url="delta://me:hush@one:7373")
    assert "hush" not in str(refused.value)
