"""Options of the data source: their names, combinations and defaults.

Pure. The driver reads them before it connects; no message and no repr holds the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TypeVar

from delta_prop.client.partition_choice import DEFAULT_STREAM
from delta_prop.client.settings import ClientSettings
from delta_prop.directory.log_positions import EARLIEST, LATEST, LogPosition
from delta_prop.platform.ports import Tls
from delta_prop.spark import option_values as values
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import Topic, TopicKind

T = TypeVar("T")
U = TypeVar("U")

URL_VARIABLE, TOKEN_VARIABLE = "DELTA_PROP_URL", "DELTA_PROP_TOKEN"
WAIT_TIMEOUT_S = 3_600.0
"""Default of waitTimeoutSeconds."""
TLS_FILES = ("tlsCa", "tlsCertificate", "tlsKey")
"""Options that name files."""
_CONNECTION_OPTIONS = ("url", "token", "tls", "tlsName", *TLS_FILES)
_TIMEOUT_OPTIONS = {
    "openTimeoutSeconds": "open_timeout_s",
    "deliveryTimeoutSeconds": "delivery_timeout_s",
    "silenceTimeoutSeconds": "peer_timeout_s",
}
"""Options of timeouts, each with its field of `ClientSettings`."""
_READ_OPTIONS = ("stream", "partition", "start", "topics", "namespace", "partitions")
_WRITE_OPTIONS = ("stream", "producer", "namespace", "priority", "onRefused")
_OPTIONS_BY_USE = {
    "batch read": (*_READ_OPTIONS, "end", "pushdown"),
    "stream read": (*_READ_OPTIONS, "maxOffsetsPerTrigger"),
    "batch write": (*_WRITE_OPTIONS, "staged", "wait", "waitTimeoutSeconds"),
    "stream write": _WRITE_OPTIONS,
}
_SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname"})
"""Options of a stream that are meant for Spark itself."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The service to connect to, at any one of its `addresses`."""

    addresses: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    settings: ClientSettings = field(default_factory=ClientSettings)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Range to read, from `start` up to `end` (exclusive), of each partition.

    `partition`: read only this one of the stream's; None: all. `partitions`: into how many of Spark's
    partitions to split the rows; None: by their number. `offsets_max`: the maximum number of offsets in one
    micro-batch; None: all.
    """

    remote: Remote
    stream: str = DEFAULT_STREAM
    partition: int | None = None
    start: LogPosition = EARLIEST
    end: LogPosition = LATEST
    topics: tuple[str, ...] = ("*",)
    partitions: int | None = None
    offsets_max: int | None = None
    pushdown: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings of a write into `stream`.

    `producer`: the job's name; None: the id of Spark's query. `namespace`: for rows without one; None: the
    prefix of their vector ids, else `default`. `waits`: the job ends once it is published.
    `fails_on_refused`: a refused delta fails the job.
    """

    remote: Remote
    stream: str = DEFAULT_STREAM
    producer: str | None = None
    namespace: str | None = None
    priority: Priority = Priority.NORMAL
    staged: bool = True
    waits: bool = True
    wait_timeout_s: float = WAIT_TIMEOUT_S
    fails_on_refused: bool = True


def read_options(
    given: Mapping[str, str], environment: Mapping[str, str], now_us: int, *, stream: bool = False
) -> ReadOptions:
    """Read the options of a read; `now_us` is the time for relative positions. Raises UsageError."""
    options = _OptionReader(given, "stream read" if stream else "batch read")
    namespace = options.take("namespace", values.read_name, None)
    topics = options.take("topics", values.read_topics, None)
    read_position = partial(values.read_position, now_us=now_us)
    if namespace is not None and topics is not None:
        raise UsageError(f"options topics and namespace: give only topics, with ns:{namespace} among them")
    if namespace is not None:
        topics = (str(Topic(TopicKind.NAMESPACE, namespace)),)
    return ReadOptions(
        remote=_read_remote(options, environment),
        stream=options.take("stream", values.read_name, DEFAULT_STREAM),
        partition=options.take(
            "partition", partial(values.read_number, minimum=0, maximum=values.PARTITION_MAX), None
        ),
        start=options.take("start", read_position, EARLIEST),
        end=options.take("end", read_position, LATEST),
        topics=topics or ("*",),
        partitions=options.take(
            "partitions", partial(values.read_number, maximum=values.PARTITIONS_MAX), None
        ),
        offsets_max=options.take(
            "maxOffsetsPerTrigger", partial(values.read_number, maximum=values.OFFSETS_PER_TRIGGER_MAX), None
        ),
        pushdown=options.take("pushdown", values.read_flag, False),
    )


def write_options(
    given: Mapping[str, str], environment: Mapping[str, str], *, stream: bool = False
) -> WriteOptions:
    """Read the options of a write. Raises UsageError."""
    options = _OptionReader(given, "stream write" if stream else "batch write")
    return WriteOptions(
        remote=_read_remote(options, environment),
        stream=options.take("stream", values.read_name, DEFAULT_STREAM),
        producer=options.take("producer", values.read_name, None),
        namespace=options.take("namespace", values.read_name, None),
        priority=options.take("priority", values.read_priority, Priority.NORMAL),
        staged=options.take("staged", values.read_flag, True),
        waits=options.take("wait", values.read_flag, True),
        wait_timeout_s=options.take("waitTimeoutSeconds", values.read_seconds, WAIT_TIMEOUT_S),
        fails_on_refused=options.take("onRefused", values.read_on_refused, True),
    )


def names_stream(given: Mapping[str, str]) -> bool:
    """True if the option `stream` is given, so that a read has the column `partition`."""
    return any(name.lower() == "stream" for name in given)


class _OptionReader:
    """Options as Spark passes them, with case-insensitive names."""

    def __init__(self, given: Mapping[str, str], use: str) -> None:
        known = {
            name.lower(): name for name in (*_CONNECTION_OPTIONS, *_TIMEOUT_OPTIONS, *_OPTIONS_BY_USE[use])
        }
        self._values: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() in _SPARK_OPTIONS:
                continue
            if name.lower() not in known:
                raise UsageError(_unknown_option_text(name, known, use))
            self._values[known[name.lower()]] = value

    def take(self, name: str, read: Callable[[str, str], T], default: U) -> T | U:
        """Return the value of an option as `read` parses it, `default` if it is not given."""
        text = self.text(name)
        return default if text is None else read(name, text)

    def text(self, name: str) -> str | None:
        """Return the text of an option, None if it is not given."""
        value = self._values.get(name)
        return None if value is None else value.strip()


def _unknown_option_text(name: str, known: Mapping[str, str], use: str) -> str:
    if name.lower() == "path":
        return "path: a service has no path: give load() and save() no argument, and give option url"
    spelt = {one.lower(): one for names in _OPTIONS_BY_USE.values() for one in names}.get(name.lower())
    others = [other for other, names in _OPTIONS_BY_USE.items() if spelt in names]
    if others:
        return f"option {spelt} belongs to a {' and a '.join(others)}: leave it out of this {use}"
    near = get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {known[near[0]]}?" if near else f"name one of {', '.join(known.values())}"
    return f"option {name:.40} is not an option of a {use}: {hint}"


# --- the service


def _read_remote(options: _OptionReader, environment: Mapping[str, str]) -> Remote:
    name, url = "option url", options.text("url")
    if not url:
        name, url = f"variable {URL_VARIABLE}", environment.get(URL_VARIABLE, "").strip()
    if not url:
        raise UsageError(
            f"option url and variable {URL_VARIABLE} are missing: give the service's "
            "address, such as delta://localhost:7373, or several of one service separated by commas"
        )
    token = options.take("token", values.read_token, None) or environment.get(TOKEN_VARIABLE) or None
    times = {
        setting: options.take(option, values.read_seconds, getattr(ClientSettings(), setting))
        for option, setting in _TIMEOUT_OPTIONS.items()
    }
    return Remote(values.read_addresses(name, url), token, _read_tls(options), ClientSettings(**times))


def _read_tls(options: _OptionReader) -> Tls | None:
    authorities, certificate, key = map(options.text, TLS_FILES)
    name = options.take("tlsName", values.read_host, None)
    if (certificate is None) != (key is None):
        raise UsageError("options tlsCertificate and tlsKey: give both, or neither")
    is_enabled = options.take("tls", values.read_flag, None)
    has_details = any(one is not None for one in (authorities, name, certificate))
    if is_enabled is False and has_details:
        raise UsageError("option tls is false, but other TLS options are given: leave out those, or tls")
    return Tls(certificate, key, authorities, name) if is_enabled or has_details else None
