"""Packs and reads requests and responses as maps: for each request its name, version and packers.

A Subscribe frame holds a request, and the Ack that answers it the response. A request that is unknown here is
read as an `UnknownRequest`, so that a newer client gets an answer and stays connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeVar

from delta_prop_wire.control_values import (
    NAME_BYTES_MAX,
    read_credit,
    read_cursor,
    read_log_id,
    read_name,
    read_offset,
    read_u16,
    read_u32,
    read_u64,
)
from delta_prop_wire.delta import AckLevel, Dot, Priority, Source
from delta_prop_wire.errors import ProtocolError, Refused, UsageError
from delta_prop_wire.frames import (
    Decide,
    Decision,
    Describe,
    Description,
    Fact,
    FactState,
    Filter,
    FindOffsets,
    FoundOffsets,
    Get,
    Hello,
    JobPart,
    JobState,
    JobStatus,
    OriginClaim,
    OriginGrant,
    PartitionRange,
    PartitionStart,
    RefusedRow,
    Request,
    Response,
    StagedPart,
    Start,
    StartAt,
    StreamDescription,
    Subscribed,
    Subscription,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.packing import (
    Fields,
    blob,
    flag,
    list_of,
    mapping,
    number,
    one_of,
    record,
    text,
    truncate,
    uint,
)
from delta_prop_wire.spec import BATCH_ROWS_MAX, COUNTER_MAX, VECTOR_ID_BYTES_MAX, ErrorCode
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)
from delta_prop_wire.topics import Topic

ORIGINS_MAX = 1024
TOPICS_MAX = 256
PARTITIONS_MAX = 1024
"""The maximum number of streams, and of a stream's ranges, in one page; a page of one stream always fits."""
STREAM_PARTITIONS_MAX = 1 << 16
STREAM_NAME_BYTES_MAX = 249
SETTINGS_MAX = 32
SETTING_BYTES_MAX = 64
"""The maximum size of a setting's name, and of a text that is its value."""
STARTS_MAX = 64
FEATURES_MAX = 32
PARTS_MAX = 2_500
FEATURE_BYTES_MAX = 64
TOKEN_BYTES_MAX = 4096
WAIT_MS_MAX = 60_000
REFUSED_ROWS_MAX = 10
"""The maximum number of a job's refused deltas to report one by one; the first ones are reported."""
REFUSED_ID_BYTES_MAX = 128
REFUSED_TEXT_BYTES_MAX = 300
PAGE_BYTES_MAX = 28 * 1024
"""The maximum size of a fact's values, data and metadata in one page."""
REQUEST_VERSION = 1

W = TypeVar("W", bound=Enum)

_read_rows = uint(BATCH_ROWS_MAX, minimum=1)
_read_wait = uint(WAIT_MS_MAX)
_read_features = list_of(text(FEATURE_BYTES_MAX), FEATURES_MAX)
_read_topic_bytes = blob(1, 1 + VECTOR_ID_BYTES_MAX)
_read_page = blob(0, PAGE_BYTES_MAX)
_read_version = uint(255, minimum=1)
_read_partition_count = uint(STREAM_PARTITIONS_MAX, minimum=1)
_read_name_of_stream = text(STREAM_NAME_BYTES_MAX)
_read_setting_text = text(SETTING_BYTES_MAX)


class _Member(NamedTuple):
    """A field of a map, and the attribute of the same name, unless `attribute` names another.

    `default`: the value of an absent field; without it, the field is required. `pack`: converts a value that
    is not None. `is_sparse`: a value that packs to 0, False or nothing is left out.
    """

    name: str
    read: Callable[[Any], Any]
    default: Any = ...
    pack: Callable[[Any], Any] | None = None
    is_sparse: bool = False
    attribute: str | None = None


class _MapCodec(NamedTuple):
    """The members of one class of requests or responses, in the order in which they are packed."""

    made: Callable[..., Any]
    members: tuple[_Member, ...]

    def pack(self, value: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, _, _, pack, is_sparse, attribute in self.members:
            content = getattr(value, attribute or name)
            if pack is not None and content is not None:
                content = pack(content)
            if content is not None and (content or not is_sparse):
                fields[name] = content
        return fields

    def unpack(self, fields: Fields) -> Any:
        return self.made(
            **{
                attribute or name: fields.require(name, read)
                if default is ...
                else fields.get(name, read, default)
                for name, read, default, _, _, attribute in self.members
            }
        )


class _RequestCodec(NamedTuple):
    """The name and newest version of a request, and the codecs of it and of its response."""

    name: str
    request: _MapCodec
    response: _MapCodec
    version: int = REQUEST_VERSION


def pack_request(request: Request) -> dict[str, Any]:
    """Return the fields of a request. Raises UsageError if it is unknown, or subscribes without topics."""
    if isinstance(request, UnknownRequest):
        raise UsageError(f"request {request.name!r} is unknown: send one of {', '.join(_BY_NAME)}")
    codec = _BY_REQUEST_TYPE[type(request)]
    if isinstance(request, Subscription) and not request.topics:
        raise UsageError("a subscription without topics: name at least one, or * for all")
    return {"request": codec.name, "version": codec.version, **codec.request.pack(request)}


def unpack_request(fields: Fields) -> Request:
    """Read a request. Raises ProtocolError, naming the field."""
    name, version = (
        fields.require("request", read_name),
        fields.get("version", _read_version, REQUEST_VERSION),
    )
    codec = _BY_NAME.get(name)
    if codec is None or version > codec.version:
        return UnknownRequest(name, version)
    if codec.request.made is Subscription:
        fields.require("topics", _read_topics)  # so that an error names them before any other field
    request: Request = codec.request.unpack(fields)
    return request


def pack_response(response: Response) -> tuple[str, dict[str, Any]]:
    """Return the name of the request that a response answers, and the response's fields."""
    codec = _BY_RESPONSE_TYPE[type(response)]
    return codec.name, codec.response.pack(response)


def unpack_response(name: str, fields: Fields) -> Response | None:
    """Read the response to a request of that name; None if the name is unknown. Raises ProtocolError."""
    codec = _BY_NAME.get(name)
    return None if codec is None else codec.response.unpack(fields)


def join_pages(pages: Sequence[Response]) -> Response:
    """Join the pages of a response: arrays and bytes end to end, all other fields from the first page.

    A stream that continues on the next page becomes one with the ranges of all its pages.
    """
    first = pages[0]
    if isinstance(first, Description):
        streams = [each for page in pages if isinstance(page, Description) for each in page.streams]
        return replace(first, streams=_join_ranges(streams))
    names = {Welcome: ("origins",), Fact: ("values", "data", "metadata")}.get(type(first), ())
    if len(pages) == 1 or not names:
        return first
    parts = {name: [getattr(page, name) for page in pages] for name in names}
    return replace(first, **{name: reduce(add, contents) for name, contents in parts.items()})


def _join_ranges(streams: Sequence[StreamDescription]) -> tuple[StreamDescription, ...]:
    joined: dict[int, StreamDescription] = {}
    for each in streams:
        known = joined.get(each.stream)
        ranges = each.partitions if known is None else known.partitions + each.partitions
        joined[each.stream] = replace(known or each, partitions=ranges)
    return tuple(joined.values())


def known_requests() -> dict[str, int]:
    """Return the newest version of each request that is known here, by its name."""
    return {codec.name: codec.version for codec in _CODECS}


# --- hello


def _read_grant(value: Any) -> OriginGrant:
    return OriginGrant(*record(read_u64, read_u32, read_offset)(value))


def _read_claim(value: Any) -> OriginClaim:
    return OriginClaim(*record(read_u64, read_u32, read_u32)(value))


def _read_job_part(value: Any) -> JobPart:
    return JobPart(*record(read_name, read_u32, read_u64)(value))


# --- subscribe


def _read_topic(value: Any) -> Topic:
    try:
        return Topic.from_bytes(_read_topic_bytes(value))
    except Refused as refused:
        raise ProtocolError(refused.code, f"Subscribe: {refused.message}") from None


def _read_topics(value: Any) -> tuple[Topic, ...]:
    topics = list_of(_read_topic, TOPICS_MAX)(value)
    if not topics:
        raise ValueError("is empty: name at least one")
    return topics


def _pack_start(start: Start) -> list[Any]:
    return [start.kind.value] + ([] if start.value is None else [start.value])


def _read_start(value: Any) -> Start:
    parts: list[Any] = value if isinstance(value, list) else []
    kind = next((kind for kind in StartAt if parts and parts[0] == kind.value), None)
    if kind is None:
        raise ValueError(f"has an unknown start: send one of {', '.join(kind.value for kind in StartAt)}")
    if kind in (StartAt.OFFSET, StartAt.TIME):
        return Start(kind, record(text(NAME_BYTES_MAX), read_offset)(value)[1])
    if kind is StartAt.CURSOR:
        return Start(kind, record(text(NAME_BYTES_MAX), read_cursor)(value)[1])
    if len(parts) != 1:
        raise ValueError(f"has a value after {kind.value!r}: send none")
    return Start(kind)


def _pack_partition_start(entry: PartitionStart) -> list[Any]:
    return [entry.partition, None if entry.start is None else _pack_start(entry.start), entry.credit]


def _read_partition_start(value: Any) -> PartitionStart:
    partition, start, credit = record(read_u16, lambda part: part, lambda part: part)(value)
    return PartitionStart(
        partition,
        None if start is None else _read_start(start),
        None if credit is None else read_credit(credit),
    )


# --- decide


def _read_staged_part(value: Any) -> StagedPart:
    return StagedPart(*record(read_u32, read_u64, read_u64, read_u32)(value))


def _refused_fields(row: RefusedRow) -> list[Any]:
    return [
        row.part,
        row.row,
        truncate(row.vector_id, REFUSED_ID_BYTES_MAX),
        int(row.code),
        truncate(row.text, REFUSED_TEXT_BYTES_MAX),
    ]


def _read_refused_row(value: Any) -> RefusedRow:
    read = record(read_u32, read_u64, text(REFUSED_ID_BYTES_MAX), read_code, text(REFUSED_TEXT_BYTES_MAX))
    return RefusedRow(*read(value))


def read_code(value: Any) -> ErrorCode:
    """Read an error code; an unknown code gets a name with its number."""
    return ErrorCode(read_u16(value))


# --- streams


def _read_stream_name(value: Any) -> str:
    if value == "":
        raise ValueError(f"is empty: send 1 to {STREAM_NAME_BYTES_MAX} bytes")
    return _read_name_of_stream(value)


def _read_settings(value: Any) -> dict[str, Any]:
    settings = mapping(value)
    if len(settings) > SETTINGS_MAX:
        raise ValueError(f"has {len(settings)} settings: send up to {SETTINGS_MAX}")
    for name, setting in settings.items():
        try:
            _read_setting_text(name)
        except ValueError as error:
            raise ValueError(f"has a name that {error}") from None
        try:
            _check_setting(setting)
        except ValueError as error:
            raise ValueError(f"has {name!r}, which {error}") from None
    return settings


def _check_setting(value: Any) -> None:
    match value:
        case None | bool():
            return
        case int():
            read_offset(value)
        case float():
            number(value)
        case str():
            _read_setting_text(value)
        case _:
            raise ValueError(f"is of type {type(value).__name__}: send nil, a boolean, a number or text")


# --- get, describe


def _read_dot(value: Any) -> Dot:
    return Dot(*record(read_u64, uint(COUNTER_MAX, minimum=1))(value))


def _pack_stream(stream: StreamDescription) -> list[Any]:
    packed = [stream.name, stream.stream, list(stream.partitions), stream.count, dict(stream.settings)]
    return packed if stream.settings else packed[:4] if stream.count != 1 else packed[:3]


def _read_stream(value: Any) -> StreamDescription:
    if not isinstance(value, list) or not 3 <= len(value) <= 5:
        raise ValueError("has a stream that is not an array of 3 to 5 items: send name, id and partitions")
    readers = (
        _read_stream_name,
        read_u32,
        list_of(_read_range, PARTITIONS_MAX),
        _read_partition_count,
        _read_settings,
    )
    return StreamDescription(*record(*readers[: len(value)])(value))


def _read_range(value: Any) -> PartitionRange:
    return PartitionRange(*record(read_u16, read_offset, read_cursor)(value))


def _read_versions(value: Any) -> dict[str, int]:
    return {name: _read_version(version) for name, version in mapping(value).items()}


def _enum_reader(members: type[W]) -> Callable[[Any], W]:
    """Return a reader of the values of an enumeration."""

    def read(value: Any) -> W:
        for member in members:
            if member.value == value:
                return member
        known = ", ".join(str(member.value) for member in members)
        raise ValueError(f"is {value!r:.60}: send one of {known}")

    return read


def _truncate_name(name: str) -> str:
    return truncate(name, NAME_BYTES_MAX)


def _pack_numbers(members: Sequence[int]) -> list[int]:
    return [int(member) for member in members]


def _pack_state(state: Enum) -> Any:
    return state.value


_FILTER = _MapCodec(
    Filter,
    (
        _Member("sources", list_of(one_of(Source), len(Source)), (), _pack_numbers),
        _Member("priorities", list_of(one_of(Priority), len(Priority)), (), _pack_numbers),
    ),
)


def _read_filter(value: Any) -> Filter:
    delta_filter: Filter = _FILTER.unpack(Fields("Subscribe.filter", mapping(value)))
    return delta_filter


_HELLO = (
    _Member("features", _read_features, (), list, is_sparse=True),
    _Member("token", text(TOKEN_BYTES_MAX), None),
    _Member("origins", list_of(_read_claim, ORIGINS_MAX), (), list, is_sparse=True),
    _Member("source", one_of(Source), Source.LOCAL, int, is_sparse=True),
    _Member("client", read_name, None, _truncate_name),
    _Member("log_id", read_log_id, None),
    _Member("job", _read_job_part, None),
    _Member("splits", flag, False, is_sparse=True),
    _Member("stream", read_u32, 0, is_sparse=True),
    _Member("partition", read_u16, 0, is_sparse=True),
)
_WELCOME = (
    _Member("features", _read_features, (), list),
    _Member("origins", list_of(_read_grant, ORIGINS_MAX), (), list),
    _Member("log", read_cursor, None),
    _Member("level", one_of(AckLevel), None, int),
    _Member("address", read_name, None),
    _Member("default_level", one_of(AckLevel), None, int),
)
_SUBSCRIPTION = (
    _Member("subscription", read_u32),
    _Member("topics", _read_topics, ..., lambda topics: [t.to_bytes() for t in topics]),
    _Member("start", _read_start, Start(StartAt.LATEST), _pack_start),
    _Member("credit", read_credit, None),
    _Member("batch_deltas_max", _read_rows, 100),
    _Member("wait_ms_max", _read_wait, 10),
    _Member("group", read_name, None),
    _Member("member", read_log_id, None),
    _Member("filter", _read_filter, None, _FILTER.pack),
    _Member("deltas", flag, False, is_sparse=True),
    _Member("stream", read_u32, 0, is_sparse=True),
    _Member(
        "partitions",
        list_of(_read_partition_start, PARTITIONS_MAX),
        (),
        lambda entries: [*map(_pack_partition_start, entries)],
        is_sparse=True,
    ),
)
_SUBSCRIBED = (
    _Member("subscription", read_u32),
    _Member("start", read_cursor),
    _Member("batch_deltas_max", _read_rows),
    _Member("wait_ms_max", _read_wait),
    _Member("standby", flag, False, is_sparse=True),
    _Member("resets", read_u32, 0, is_sparse=True),
)
_DECIDE = (
    _Member("job", read_name, ..., _truncate_name),
    _Member("decide", _enum_reader(Decision), ..., _pack_state, attribute="decision"),
    _Member("parts", list_of(_read_staged_part, PARTS_MAX), (), list, is_sparse=True),
    _Member("run", read_u32, None),
)
_JOB_STATUS = (
    _Member("state", _enum_reader(JobState), ..., _pack_state),
    *(_Member(name, read_u64, 0) for name in ("deltas", "published", "duplicates", "refused")),
    _Member(
        "refused_rows",
        list_of(_read_refused_row, REFUSED_ROWS_MAX),
        (),
        lambda rows: [*map(_refused_fields, rows)],
        is_sparse=True,
    ),
)
_GET = (_Member("vector_id", text(VECTOR_ID_BYTES_MAX)), _Member("namespace", read_name, None))
_FACT = (
    _Member("state", _enum_reader(FactState), ..., _pack_state),
    _Member("offset", read_offset),
    _Member("dot", _read_dot, None),
    _Member("lamport", read_offset, None),
    *(_Member(name, _read_page, b"", is_sparse=True) for name in ("values", "data", "metadata")),
)
_FIND_OFFSETS = (
    _Member("starts", list_of(_read_start, STARTS_MAX), ..., lambda starts: [*map(_pack_start, starts)]),
    _Member("stream", read_u32, 0, is_sparse=True),
    _Member("partition", read_u16, 0, is_sparse=True),
)
_FOUND_OFFSETS = (
    _Member("offsets", list_of(read_offset, STARTS_MAX), ..., list),
    _Member("log", read_cursor),
)
_STREAM_NAME = _Member("name", _read_stream_name)
_DRY_RUN = _Member("dry_run", flag, False, is_sparse=True)
_CREATE_STREAM = (
    _STREAM_NAME,
    _Member("partitions", _read_partition_count, 1),
    _Member("settings", _read_settings, {}, dict, is_sparse=True),
    _Member("if_not_exists", flag, False, is_sparse=True),
    _DRY_RUN,
)
_ALTER_STREAM = (_STREAM_NAME, _Member("settings", _read_settings, ..., dict), _DRY_RUN)
_DELETE_STREAM = (_STREAM_NAME, _DRY_RUN)
_TRUNCATE_STREAM = (
    _STREAM_NAME,
    _Member("before", read_offset),
    _Member("partition", read_u16, 0, is_sparse=True),
    _DRY_RUN,
)
_ERASE_VECTOR = (
    _STREAM_NAME,
    *_GET,
    _Member("timeout_ms", read_u32, 30_000),
    _DRY_RUN,
)
_DESCRIBE = (
    _Member("stream", _read_stream_name, None),
    _Member("ranges", flag, False, is_sparse=True),
)
_DESCRIPTION = (
    _Member(
        "streams",
        list_of(_read_stream, PARTITIONS_MAX),
        ...,
        lambda streams: [*map(_pack_stream, streams)],
    ),
    _Member("requests", _read_versions, {}, dict),
    _Member("features", _read_features, (), list),
    _Member("level", one_of(AckLevel), None, int),
    _Member("address", read_name, None),
)
_CODECS = (
    _RequestCodec("hello", _MapCodec(Hello, _HELLO), _MapCodec(Welcome, _WELCOME)),
    _RequestCodec("subscribe", _MapCodec(Subscription, _SUBSCRIPTION), _MapCodec(Subscribed, _SUBSCRIBED)),
    _RequestCodec("decide", _MapCodec(Decide, _DECIDE), _MapCodec(JobStatus, _JOB_STATUS)),
    _RequestCodec("get", _MapCodec(Get, _GET), _MapCodec(Fact, _FACT)),
    _RequestCodec("offsets", _MapCodec(FindOffsets, _FIND_OFFSETS), _MapCodec(FoundOffsets, _FOUND_OFFSETS)),
    _RequestCodec(
        "create_stream", _MapCodec(CreateStream, _CREATE_STREAM), _MapCodec(Description, _DESCRIPTION)
    ),
    _RequestCodec(
        "alter_stream", _MapCodec(AlterStream, _ALTER_STREAM), _MapCodec(Description, _DESCRIPTION)
    ),
    _RequestCodec(
        "delete_stream", _MapCodec(DeleteStream, _DELETE_STREAM), _MapCodec(Description, _DESCRIPTION)
    ),
    _RequestCodec(
        "truncate_stream", _MapCodec(TruncateStream, _TRUNCATE_STREAM), _MapCodec(Description, _DESCRIPTION)
    ),
    _RequestCodec(
        "erase_vector", _MapCodec(EraseVector, _ERASE_VECTOR), _MapCodec(Description, _DESCRIPTION)
    ),
    # The last codec of a response gives its name: a description is always one of "describe".
    _RequestCodec("describe", _MapCodec(Describe, _DESCRIBE), _MapCodec(Description, _DESCRIPTION)),
)
_BY_NAME = {codec.name: codec for codec in _CODECS}
_BY_REQUEST_TYPE = {codec.request.made: codec for codec in _CODECS}
_BY_RESPONSE_TYPE = {codec.response.made: codec for codec in _CODECS}
