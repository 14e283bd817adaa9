"""The configuration of each kind of sink: a table `[[sinks]]` with the key `kind` and the keys of that kind.

The defaults are the sinks' own; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from delta_prop.calls.argument_checks import parse_topics
from delta_prop.client.addresses import parse_addresses
from delta_prop.configuration.values import File, format_value, value_error
from delta_prop.delivery.sink_manager import OnLogFull
from delta_prop_broker.catalogue.stream import DEFAULT_STREAM, check_stream_name
from delta_prop_sinks.hnsw_builder import Hnsw
from delta_prop_wire.errors import UsageError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig:
    """Keys of every kind of sink: the deltas that it gets, and how its lag affects the log and producers.

    `name`: the service remembers the sink by this name; each sink needs its own. `start`: where a sink that
    is not remembered begins: `resume`: at offset 0, or with a rebuild if the log no longer has offset 0;
    `earliest`: at the log's start; `latest`: at the log's end. `rebuild`: rebuild the sink from the log at
    each start. `stream`: the stream that it gets; if that has several partitions, there is a sink for each,
    with a file of its own. The other keys are arguments of `Propagator.attach`.
    """

    kind: ClassVar[str]
    name: str
    stream: str = DEFAULT_STREAM
    topics: tuple[str, ...] = ("*",)
    start: Literal["resume", "earliest", "latest"] = "resume"
    required: bool = True
    pacing: bool = False
    on_log_full: OnLogFull | None = None
    batch_deltas: int | None = None
    linger_ms: float | None = None
    rebuild: bool = False

    @classmethod
    def choose(cls, table: Mapping[str, Any], path: str) -> tuple[type[SinkConfig], dict[str, Any]]:
        """Return the class of the kind that a table names, and the rest of the table. Raises UsageError."""
        kinds = ", ".join(KINDS)
        if "kind" not in table:
            raise UsageError(f"{path}.kind: it is missing: give one of {kinds}")
        kind = table["kind"]
        if not isinstance(kind, str) or kind not in KINDS:
            raise value_error(f"{path}.kind", kind, f"{format_value(kind)}: give one of {kinds}")
        return KINDS[kind], {name: value for name, value in table.items() if name != "kind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig(SinkConfig):
    """Vectors in an SQLite file. `resident_bytes_max`: memory for vectors, shared with the indexes that name
    this sink as `vectors`. The other keys are arguments of `StorageSink`.
    """

    kind: ClassVar[str] = "storage"
    name: str = "storage"
    path: File
    mode: Literal["behind", "through"] = "behind"
    flush_s: float = 0.1
    rows_unflushed_max: int = 20_000
    wal_bytes_max: int = 64 * MIB
    close_s: float = 10.0
    image_rows_min: int = 100_000
    image_s: float = 300.0
    resident_bytes_max: int = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig(SinkConfig):
    """A search index. `vectors`: the name of an earlier storage sink, whose vectors it reads; without this
    key, the index holds vectors of its own within `resident_bytes_max`. `hnsw`: true, or a table of settings,
    for an HNSW graph; `path`: the graph's file.
    """

    kind: ClassVar[str] = "index"
    name: str = "index"
    vectors: str | None = None
    hnsw: bool | Hnsw = False
    path: File | None = None
    resident_bytes_max: int = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(SinkConfig):
    """Vectors in memory; the least recently used are evicted first."""

    kind: ClassVar[str] = "cache"
    name: str = "cache"
    entries_max: int = 100_000
    bytes_max: int = 256 * MIB
    mode: Literal["refresh", "invalidate"] = "refresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesConfig(SinkConfig):
    """Each delta as a line of a file. `fsync`: True to sync after each delivery."""

    kind: ClassVar[str] = "jsonlines"
    name: str = "jsonlines"
    path: File
    fsync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(SinkConfig):
    """Another delta-prop service, which gets the full log. `to`: its addresses. `token`: set it in the
    environment rather than in a file. `authorities`: the signers of that service's certificate; without them,
    TLS is not used. `server_name`: the name in the certificate, if it differs from the address.
    """

    kind: ClassVar[str] = "forward"
    name: str = "forward"
    to: tuple[str, ...]
    token: str | None = None
    authorities: File | None = None
    server_name: str | None = None


KINDS: dict[str, type[SinkConfig]] = {
    config.kind: config
    for config in (StorageConfig, IndexConfig, CacheConfig, JsonLinesConfig, ForwardConfig)
}


def configs_of_partition(
    sinks: tuple[SinkConfig, ...], stream: str, partition: int, count: int
) -> tuple[SinkConfig, ...]:
    """Return the sinks of one of `count` partitions of a stream; of several, each with files of its own."""
    own = [config for config in sinks if config.stream == stream]
    return tuple([config if count == 1 else _with_file_of(config, partition) for config in own])


def _with_file_of(config: SinkConfig, partition: int) -> SinkConfig:
    file = getattr(config, "path", None)
    if file is None:
        return config
    path = PurePath(file)
    fields: dict[str, Any] = {"path": str(path.with_name(f"{path.stem}-{partition}{path.suffix}"))}
    return replace(config, **fields)


def check_sinks(sinks: tuple[SinkConfig, ...]) -> None:
    """Check each sink, and that their names, files and vectors fit together. Raises UsageError."""
    names: dict[str, int] = {}
    files: dict[str, int] = {}
    for index, config in enumerate(sinks):
        path = f"sinks[{index}]"
        if config.name in names:
            raise UsageError(
                f"{path}.name: sinks[{names[config.name]}] is named {config.name!r} too: give each its "
                "own name"
            )
        if not config.name.isprintable():
            raise UsageError(
                f"{path}.name: {format_value(config.name)} is not printable: use letters, digits, '-'"
            )
        if not config.name:
            raise UsageError(f'{path}.name: "" names no sink: give a name, or leave the key out')
        try:
            parse_topics(config.topics)
        except UsageError as error:
            raise UsageError(f"{path}.topics: {error}") from None
        if isinstance(config, ForwardConfig):
            _check_forward(config, path)
        file = getattr(config, "path", None)
        if file in files and file is not None:
            raise UsageError(f"{path}.path: sinks[{files[file]}] writes {file!r} too: name another file")
        if isinstance(config, IndexConfig):
            _check_index(sinks[:index], config, path)
        try:
            check_stream_name(config.stream)
        except UsageError as error:
            raise UsageError(f"{path}.stream: {error}") from None
        names[config.name] = index
        files |= {} if file is None else {file: index}


def _check_index(before: tuple[SinkConfig, ...], index: IndexConfig, path: str) -> None:
    if index.vectors is None and index.path is not None:
        raise UsageError(
            f"{path}.path: {format_value(index.path)} is read at the start, but an index without vectors "
            "is empty then: give vectors, the name of a storage sink above it"
        )
    if index.path is not None and index.hnsw is False:
        raise UsageError(
            f"{path}.path: {format_value(index.path)}: only a graph has a file: give hnsw = true, or leave "
            "the key out"
        )
    if index.vectors is not None:
        _check_shared(before, index, path)


def _check_shared(before: tuple[SinkConfig, ...], index: IndexConfig, path: str) -> None:
    storages = {sink.name: sink for sink in before if isinstance(sink, StorageConfig)}
    storage = storages.get(index.vectors or "")
    if storage is None:
        known = ", ".join(storages) or "none"
        raise UsageError(
            f"{path}.vectors: {index.vectors!r} names no storage sink above it: give one of these: {known}"
        )
    if storage.stream != index.stream:
        raise UsageError(
            f"{path}.stream: the index shares the vectors of {storage.name!r}, which gets stream "
            f"{storage.stream!r}: give both the same stream"
        )
    if set(storage.topics) != set(index.topics):
        raise UsageError(
            f"{path}.topics: the index shares the vectors of {storage.name!r}, which has other topics: give "
            "both the same topics"
        )


def _check_forward(forward: ForwardConfig, path: str) -> None:
    try:
        parse_addresses(forward.to)
    except UsageError as error:
        raise UsageError(f"{path}.to: {error}") from None
    if tuple(forward.topics) != ("*",):
        raise UsageError(f"{path}.topics: a log is always forwarded in full: leave topics out")
    if forward.token is not None and not (forward.token.isascii() and forward.token.strip()):
        raise UsageError(f"{path}.token: not a valid token: give it as created, or leave the key out")
    if forward.server_name == "":
        raise UsageError(f'{path}.server_name: "" is not a name: give the certificate\'s, or leave it out')
