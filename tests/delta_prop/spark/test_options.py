"""Options are read on the driver: each by its name in any case, with its bounds; the token is never told."""

from __future__ import annotations

import pickle

import pytest

from delta_prop.client.settings import ClientSettings
from delta_prop.commands.places import At
from delta_prop.ports import Tls
from delta_prop.spark.options import ReadOptions, WriteOptions, read_options, write_options
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import UsageError

NOW_US = 1_900_000_000_000_000
"""Behind every time that the tests name."""

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
def test_addresses(url: str, addresses: tuple[str, ...]) -> None:
    assert read(url=url).remote.addresses == addresses


def test_what_the_environment_says_where_the_options_do_not() -> None:
    environment = {"DELTA_PROP_URL": "delta://there:1", "DELTA_PROP_TOKEN": "hush"}
    found = read_options({}, environment, NOW_US).remote
    assert (found.addresses, found.token) == (("there:1",), "hush")
    given = read_options({"URL": "here:2", "Token": "mine"}, environment, NOW_US).remote
    assert (given.addresses, given.token) == (("here:2",), "mine")


def test_all_that_a_read_can_say() -> None:
    found = read(
        since="17",
        until="2026-01-31T12:00:00Z",
        topics="ns:docs, c:news",
        partitions="3",
        pushDown="TRUE",
        tlsCa="ca.pem",
        tlsName="one",
        openSecondsMax="2",
    )
    assert found.since == At(offset=17)
    assert found.until == At(time_us=1_769_860_800_000_000)
    assert found.topics == ("ns:docs", "c:news")
    assert (found.partitions, found.pushdown) == (3, True)
    assert found.remote.tls == Tls(authorities="ca.pem", server_name="one")
    assert found.remote.settings == ClientSettings(open_s_max=2)


def test_what_a_stream_can_say_more() -> None:
    assert read_options(URL | {"maxrowspertrigger": "100"}, {}, NOW_US, stream=True).rows_max == 100
    with pytest.raises(
        UsageError, match="option until is one of a batch read: leave it out of this stream read"
    ):
        read_options(URL | {"until": "9"}, {}, NOW_US, stream=True)
    with pytest.raises(UsageError, match="option maxRowsPerTrigger is one of a stream read: leave it out"):
        read(maxrowspertrigger="9")  # as Spark hands it over
    with pytest.raises(
        UsageError, match="option staged is one of a batch write: leave it out of this stream wr"
    ):
        write_options(URL | {"staged": "true"}, {}, stream=True)


def test_what_is_so_where_nothing_is_said() -> None:
    found = read()
    assert (found.since, found.until) == (At(earliest=True), At())
    assert (found.topics, found.partitions, found.rows_max, found.pushdown) == (("*",), None, None, False)
    assert found.remote.tls is None
    wanted = WriteOptions(found.remote)
    assert write() == wanted
    assert (wanted.staged, wanted.waits, wanted.refused_raises) == (True, True, True)


def test_topics_with_commas_and_a_namespace() -> None:
    assert read(topics='["v:a,b", "ns:docs"]').topics == ("v:a,b", "ns:docs")
    assert read(namespace="docs").topics == ("ns:docs",)


def test_all_that_a_write_can_say() -> None:
    found = write(
        producer="nightly",
        namespace="docs",
        priority="low",
        staged="false",
        wait="False",
        waitSecondsMax="9.5",
        refused="allow",
        tls="true",
    )
    assert (found.producer, found.namespace, found.priority) == ("nightly", "docs", Priority.LOW)
    assert (found.staged, found.waits, found.wait_s_max, found.refused_raises) == (False, False, 9.5, False)
    assert found.remote.tls == Tls()


def test_what_spark_adds_for_itself_is_passed_over() -> None:
    assert write(checkpointLocation="/x", queryName="q") == write()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"url": ""}, "option url is missing, and so is DELTA_PROP_URL"),
        ({"url": "http://one:80"}, "option url: 'http://one:80' is no address: give host:port with a port"),
        (
            {"url": "nonsense"},
            "option url: 'nonsense' is no address: give host:port with a port from 1 to 65",
        ),
        ({"url": "delta://"}, "option url: 'delta://' is no address"),
        ({"url": "delta://one:99999"}, "option url: 'delta://one:99999' is no address: .* from 1 to 65535"),
        ({"url": "one:0x1"}, "option url: 'one:0x1' is no address"),
        ({"url": "one:1,,two:2"}, "option url: '' is no address: .* commas between"),
        ({"url": ",".join(f"one:{at}" for at in range(1, 66))}, "option url: 65 addresses: give 1 to 64"),
        ({"token": "x" * 4097}, "option token: 4,097 bytes; a token has up to 4,096"),
        ({"tlsName": "one:7373"}, "option tlsName 'one:7373': give the name of a host"),
        ({"tlsName": ""}, "option tlsName '': give the name of a host"),
        ({"partitons": "1"}, r"option partitons is none of a batch read: did you mean partitions\?"),
        ({"zzz": "1"}, "option zzz is none of a batch read: there are url, token, tls"),
        (
            {"producer": "p"},
            "option producer is one of a batch write and a stream write: leave it out of this bat",
        ),
        ({"path": "/x"}, r"a path is given, and a service has none: give load\(\) and save\(\) no argument"),
        ({"since": "soon"}, "option since 'soon': give earliest, latest, an offset, a time like 2026"),
        ({"until": "-1"}, "option until '-1': give"),
        ({"partitions": "0"}, "option partitions '0': give a whole number from 1 to 10,000"),
        ({"partitions": "many"}, "option partitions 'many': give a whole number from 1"),
        ({"pushdown": "yes"}, "option pushdown 'yes': give true or false"),
        ({"topics": "docs"}, "option topics: topic 'docs' is none of"),
        ({"topics": "ns:" + "x" * 300}, "option topics: topic 'ns:x*"),
        ({"topics": "[1]"}, "option topics .*: give 1 to 256 topics"),
        ({"topics": "["}, r"option topics '\[' is no list in JSON"),
        ({"topics": "*", "namespace": "docs"}, "option topics beside namespace: give topics alone, ns:docs"),
        ({"namespace": "a\nb"}, r"option namespace 'a\\nb': character 1 is U"),
        ({"namespace": "x" * 300}, "option namespace 'x*: 300 bytes of UTF-8; allowed are 1 to 255: shorten"),
        ({"tlsKey": "k"}, "options tlsCertificate and tlsKey: give both, or neither"),
        ({"tls": "false", "tlsCa": "a"}, "option tls is false beside others of TLS"),
        ({"openSecondsMax": "0"}, "option openSecondsMax '0': give a number of seconds above 0"),
        ({"openSecondsMax": "1e9"}, "option openSecondsMax '1e9': give .* above 0, up to 31,536,000"),
        (
            {"silenceSecondsMax": "1"},
            "option silenceSecondsMax '1': give a number of seconds above 5, up to ",
        ),
    ],
)
def test_what_a_read_refuses(options: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"since": "earliest"}, "option since is one of a batch read and a stream read: leave it out"),
        ({"priority": "urgent"}, "option priority 'urgent': give critical, high, normal, low"),
        ({"refused": "ignore"}, "option refused 'ignore': give raise or allow"),
        (
            {"producer": "x" * 241},
            "option producer 'x*: 241 bytes of UTF-8; allowed are 1 to 240: shorten it",
        ),
        ({"producer": ""}, "option producer '': 0 bytes of UTF-8; allowed are 1 to 240: give one"),
        ({"waitSecondsMax": "nan"}, "option waitSecondsMax 'nan': give a number of seconds"),
        ({"stagd": "true"}, r"option stagd is none of a batch write: did you mean staged\?"),
    ],
)
def test_what_a_write_refuses(options: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        write(**options)


def test_a_variable_that_names_no_address_is_named() -> None:
    with pytest.raises(UsageError, match="variable DELTA_PROP_URL: 'nonsense' is no address: give host:port"):
        read_options({}, {"DELTA_PROP_URL": "nonsense"}, NOW_US)


def test_a_time_before_all_is_the_first_one() -> None:
    assert read(since="1960-01-01").since == At(time_us=0)


def test_the_token_is_never_told() -> None:
    found = write(token="hush-hush")
    assert "hush" not in repr(found)
    assert pickle.loads(pickle.dumps(found)).remote.token == "hush-hush"
    with pytest.raises(UsageError) as refused:
        write(token="hush-hush", nonsense="1")
    assert "hush" not in str(refused.value)
    with pytest.raises(UsageError, match="no user and no password: give a token by option token") as refused:
        write(url="delta://me:hush@one:7373")
    assert "hush" not in str(refused.value)
