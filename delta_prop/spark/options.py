"""The options of the data source: their names, which of them go together, what is so without them.

Pure. They are read on the driver, before anything is connected to; no message and no repr holds the token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

from delta_prop.client.settings import ClientSettings
from delta_prop.commands.places import EARLIEST, LATEST, At
from delta_prop.ports import Tls
from delta_prop.spark import option_values as values
from delta_prop_wire.delta import Priority
from delta_prop_wire.errors import UsageError
from delta_prop_wire.topics import Topic, TopicKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
U = TypeVar("U")

URL_VARIABLE, TOKEN_VARIABLE = "DELTA_PROP_URL", "DELTA_PROP_TOKEN"
WAIT_S = 3_600.0
TLS_FILES = ("tlsCa", "tlsCertificate", "tlsKey")
"""Options that name files."""
_CONNECTING = ("url", "token", "tls", "tlsName", *TLS_FILES)
_TIMES = {
    "openSecondsMax": "open_s_max",
    "deliverySecondsMax": "delivery_s_max",
    "silenceSecondsMax": "silence_s_max",
}
_USES = {
    "batch read": ("since", "until", "topics", "namespace", "partitions", "pushdown"),
    "stream read": ("since", "topics", "namespace", "partitions", "maxRowsPerTrigger"),
    "batch write": ("producer", "namespace", "priority", "refused", "staged", "wait", "waitSecondsMax"),
    "stream write": ("producer", "namespace", "priority", "refused"),
}
_SPARKS_OWN = frozenset({"checkpointlocation", "queryname"})
"""What Spark hands over with the options of a stream, for itself."""


@dataclass(frozen=True, slots=True)
class Remote:
    """The service to talk to. `addresses`: several ways to the same one."""

    addresses: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    settings: ClientSettings = field(default_factory=ClientSettings)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read, from `since` up to `until`, which is left out. `partitions`: None: by size.

    `rows_max`: offsets of one micro-batch.
    """

    remote: Remote
    since: At = EARLIEST
    until: At = LATEST
    topics: tuple[str, ...] = ("*",)
    partitions: int | None = None
    rows_max: int | None = None
    pushdown: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write. `producer`: None: what Spark calls the query. `namespace`: of rows that name none; None:
    what their vector ids begin with. `refused_raises`: a delta that is refused fails the job.
    """

    remote: Remote
    producer: str | None = None
    namespace: str | None = None
    priority: Priority = Priority.NORMAL
    staged: bool = True
    waits: bool = True
    wait_s_max: float = WAIT_S
    refused_raises: bool = True


def read_options(
    given: Mapping[str, str], environment: Mapping[str, str], now_us: int, *, stream: bool = False
) -> ReadOptions:
    """Options of a read, at a time. Raises UsageError."""
    options = _Given(given, "stream read" if stream else "batch read")
    namespace = options.take("namespace", values.namespace, None)
    topics = options.take("topics", values.topics, None)
    if namespace is not None and topics is not None:
        raise UsageError(f"option topics beside namespace: give topics alone, ns:{namespace} among them")
    if namespace is not None:
        topics = (str(Topic(TopicKind.NAMESPACE, namespace)),)
    return ReadOptions(
        remote=_remote(options, environment),
        since=options.take("since", values.place("since", now_us), EARLIEST),
        until=options.take("until", values.place("until", now_us), LATEST),
        topics=topics or ("*",),
        partitions=options.take("partitions", values.number("partitions", values.PARTITIONS_MAX), None),
        rows_max=options.take("maxRowsPerTrigger", values.number("maxRowsPerTrigger", values.ROWS_MAX), None),
        pushdown=options.take("pushdown", values.flag("pushdown"), False),
    )


def write_options(
    given: Mapping[str, str], environment: Mapping[str, str], *, stream: bool = False
) -> WriteOptions:
    """Options of a write. Raises UsageError."""
    options = _Given(given, "stream write" if stream else "batch write")
    return WriteOptions(
        remote=_remote(options, environment),
        producer=options.take("producer", values.producer, None),
        namespace=options.take("namespace", values.namespace, None),
        priority=options.take("priority", values.priority, Priority.NORMAL),
        staged=options.take("staged", values.flag("staged"), True),
        waits=options.take("wait", values.flag("wait"), True),
        wait_s_max=options.take("waitSecondsMax", values.seconds("waitSecondsMax"), WAIT_S),
        refused_raises=options.take("refused", values.refused, True),
    )


class _Given:
    """Options as Spark hands them over: their names are the same in any case."""

    def __init__(self, given: Mapping[str, str], use: str) -> None:
        known = {name.lower(): name for name in (*_CONNECTING, *_TIMES, *_USES[use])}
        self._values: dict[str, str] = {}
        for name, value in given.items():
            if name.lower() in _SPARKS_OWN:
                continue
            if name.lower() not in known:
                raise UsageError(_unknown(name, known, use))
            self._values[known[name.lower()]] = value

    def take(self, name: str, read: Callable[[str], T], absent: U) -> T | U:
        """The value of an option."""
        value = self._values.get(name)
        return absent if value is None else read(value.strip())


def _unknown(name: str, known: Mapping[str, str], use: str) -> str:
    if name.lower() == "path":
        return "a path is given, and a service has none: give load() and save() no argument, and option url"
    spelt = {one.lower(): one for names in _USES.values() for one in names}.get(name.lower())
    others = [other for other, names in _USES.items() if spelt in names]
    if others:
        return f"option {spelt} is one of a {' and a '.join(others)}: leave it out of this {use}"
    near = get_close_matches(name.lower(), known, 1)
    told = f"did you mean {known[near[0]]}?" if near else f"there are {', '.join(known.values())}"
    return f"option {name:.40} is none of a {use}: {told}"


# --- where to, and how


def _remote(options: _Given, environment: Mapping[str, str]) -> Remote:
    named, url = "option url", options.take("url", str, None)
    if not url:
        named, url = f"variable {URL_VARIABLE}", environment.get(URL_VARIABLE, "").strip()
    if not url:
        raise UsageError(
            f"option url is missing, and so is {URL_VARIABLE} in the environment: give the service's "
            "address, such as delta://localhost:7373, or several of one service with commas between"
        )
    token = options.take("token", values.token, None) or environment.get(TOKEN_VARIABLE) or None
    times = {
        setting: options.take(name, values.seconds(name), getattr(ClientSettings(), setting))
        for name, setting in _TIMES.items()
    }
    return Remote(values.addresses(named, url), token, _tls(options), ClientSettings(**times))


def _tls(options: _Given) -> Tls | None:
    authorities, certificate, key = (options.take(option, str, None) for option in TLS_FILES)
    name = options.take("tlsName", values.host, None)
    if (certificate is None) != (key is None):
        raise UsageError("options tlsCertificate and tlsKey: give both, or neither")
    wanted = options.take("tls", values.flag("tls"), None)
    named = any(one is not None for one in (authorities, name, certificate))
    if wanted is False and named:
        raise UsageError("option tls is false beside others of TLS: leave those out, or this one")
    return Tls(certificate, key, authorities, name) if wanted or named else None
