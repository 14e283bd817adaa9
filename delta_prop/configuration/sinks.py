"""What a configuration may say of each kind of sink: `[[sinks]]` with a `kind`, and these keys.

The defaults are the sinks' own; a test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from delta_prop.attachments import OnLogFull
from delta_prop.checks import parse_topics
from delta_prop.client.addresses import parse_addresses
from delta_prop.configuration.values import File, fault, shown
from delta_prop_sinks.linking import Linked
from delta_prop_wire.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTerms:
    """What every kind has: which deltas it gets, what the log and producers do for it.

    `name`: under which it is remembered; one of its own where there are several of a kind. `start`: where
    one that is not remembered yet begins: at offset 0, or, where the log no longer has that, by a rebuild
    (`resume`); at what the log still has; at its end. `rebuild`: at each start what it holds is replaced by
    what the log has. See `Propagator.attach` for the rest.
    """

    kind: ClassVar[str]
    name: str
    topics: tuple[str, ...] = ("*",)
    start: Literal["resume", "earliest", "latest"] = "resume"
    required: bool = True
    pacing: bool = False
    on_log_full: OnLogFull | None = None
    batch_deltas: int | None = None
    linger_ms_max: float | None = None
    rebuild: bool = False

    @classmethod
    def chosen(cls, table: Mapping[str, Any], path: str) -> tuple[type[SinkTerms], dict[str, Any]]:
        """The terms of the kind that a table names, and the rest of the table. Raises UsageError."""
        kinds = ", ".join(KINDS)
        if "kind" not in table:
            raise UsageError(f"{path}.kind: it is missing: give one of {kinds}")
        kind = table["kind"]
        if not isinstance(kind, str) or kind not in KINDS:
            raise fault(f"{path}.kind", kind, f"{shown(kind)}: give one of {kinds}")
        return KINDS[kind], {name: value for name, value in table.items() if name != "kind"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTerms(SinkTerms):
    """Vectors in an SQLite file. `resident_bytes_max`: memory for vectors, shared with the indexes that name
    this sink as `vectors`.
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
class IndexTerms(SinkTerms):
    """A search index. `vectors`: the name of the storage sink, further up, whose vectors it reads; without
    it it holds its own within `resident_bytes_max`. `linked`: true, or a table of settings, for a graph;
    `path`: the graph's file.
    """

    kind: ClassVar[str] = "index"
    name: str = "index"
    vectors: str | None = None
    linked: bool | Linked = False
    path: File | None = None
    resident_bytes_max: int = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTerms(SinkTerms):
    """Vectors in memory, the least recently used go first."""

    kind: ClassVar[str] = "cache"
    name: str = "cache"
    entries_max: int = 100_000
    bytes_max: int = 256 * MIB
    mode: Literal["refresh", "invalidate"] = "refresh"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLinesTerms(SinkTerms):
    """Each delta as a line of a file. `fsync`: after each delivery."""

    kind: ClassVar[str] = "jsonlines"
    name: str = "jsonlines"
    path: File
    fsync: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTerms(SinkTerms):
    """Another delta-prop, which gets the whole log. `to`: its addresses. `token`: better in the environment
    than in a file. `authorities`: who signed its certificate; without it, no TLS; `server_name`: the name in
    that, if not the address's.
    """

    kind: ClassVar[str] = "forward"
    name: str = "forward"
    to: tuple[str, ...]
    token: str | None = None
    authorities: File | None = None
    server_name: str | None = None


KINDS: dict[str, type[SinkTerms]] = {
    one.kind: one for one in (StorageTerms, IndexTerms, CacheTerms, JsonLinesTerms, ForwardTerms)
}


def check_together(sinks: tuple[SinkTerms, ...]) -> None:
    """The relations between sinks: names, files, shared vectors. Raises UsageError."""
    names: dict[str, int] = {}
    files: dict[str, int] = {}
    for place, one in enumerate(sinks):
        path = f"sinks[{place}]"
        if one.name in names:
            raise UsageError(
                f"{path}.name: sinks[{names[one.name]}] is named {one.name!r} too: give each its own"
            )
        if not one.name.isprintable():
            raise UsageError(f"{path}.name: {shown(one.name)} cannot be printed: give letters, digits, '-'")
        if not one.name:
            raise UsageError(f'{path}.name: "" names no sink: give a name, or leave the key out')
        try:
            parse_topics(one.topics)
        except UsageError as error:
            raise UsageError(f"{path}.topics: {error}") from None
        if isinstance(one, ForwardTerms):
            _check_forward(one, path)
        file = getattr(one, "path", None)
        if file in files and file is not None:
            raise UsageError(f"{path}.path: sinks[{files[file]}] writes {file!r} too: name another file")
        if isinstance(one, IndexTerms):
            _check_index(sinks[:place], one, path)
        names[one.name] = place
        files |= {} if file is None else {file: place}


def _check_index(before: tuple[SinkTerms, ...], index: IndexTerms, path: str) -> None:
    if index.vectors is None and index.path is not None:
        raise UsageError(
            f"{path}.path: {shown(index.path)} is read at the start, where an index without vectors has "
            "nothing yet that it could stand for: give vectors, the name of a storage sink above it"
        )
    if index.path is not None and index.linked is False:
        raise UsageError(
            f"{path}.path: {shown(index.path)}: only a graph has a file: give linked = true, or leave it out"
        )
    if index.vectors is not None:
        _check_shared(before, index, path)


def _check_shared(before: tuple[SinkTerms, ...], index: IndexTerms, path: str) -> None:
    stores = {one.name: one for one in before if isinstance(one, StorageTerms)}
    store = stores.get(index.vectors or "")
    if store is None:
        known = ", ".join(stores) or "none"
        raise UsageError(
            f"{path}.vectors: no storage sink above it is named {index.vectors!r}; those that are: {known}"
        )
    if set(store.topics) != set(index.topics):
        raise UsageError(
            f"{path}.topics: it shares the vectors of {store.name!r}, whose topics are others: give both the "
            "same"
        )


def _check_forward(forward: ForwardTerms, path: str) -> None:
    try:
        parse_addresses(forward.to)
    except UsageError as error:
        raise UsageError(f"{path}.to: {error}") from None
    if tuple(forward.topics) != ("*",):
        raise UsageError(f"{path}.topics: a log is forwarded whole: leave topics out")
    if forward.token is not None and not (forward.token.isascii() and forward.token.strip()):
        raise UsageError(f"{path}.token: this is no token: give one as it was made, or leave the key out")
    if forward.server_name == "":
        raise UsageError(f'{path}.server_name: "" is no name: give that in the certificate, or leave it out')
