"""Packs and reads requests and responses as maps: for each request its name, version and packers.

A Subscribe frame holds a request, and the Ack that answers it the response. A request that is unknown here is
read as an `UnknownRequest`, so that a newer client gets an answer and stays connected.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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
    StagedPart,
    Start,
    StartAt,
    StreamDescription,
    Subscribed,
    Subscription,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.packing import blob, flag, list_of, mapping, one_of, record, text, truncate, uint
from delta_prop_wire.spec import BATCH_ROWS_MAX, COUNTER_MAX, VECTOR_ID_BYTES_MAX, ErrorCode
from delta_prop_wire.topics import Topic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delta_prop_wire.frames import Request, Response
    from delta_prop_wire.packing import Fields

ORIGINS_MAX = 1024
TOPICS_MAX = 256
PARTITIONS_MAX = 1024
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


class _RequestCodec(NamedTuple):
    """The name and newest version of a request, and the packers and readers for it and its response."""

    name: str
    request_type: type
    pack: Callable[[Any], dict[str, Any]]
    unpack: Callable[[Fields], Request]
    response_type: type
    pack_response: Callable[[Any], dict[str, Any]]
    unpack_response: Callable[[Fields], Response]
    version: int = REQUEST_VERSION


def pack_request(request: Request) -> dict[str, Any]:
    """Return the fields of a request. Raises UsageError if it is unknown, or subscribes without topics."""
    if isinstance(request, UnknownRequest):
        raise UsageError(f"request {request.name!r} is unknown: send one of {', '.join(_BY_NAME)}")
    codec = _BY_REQUEST_TYPE[type(request)]
    return {"request": codec.name, "version": codec.version, **codec.pack(request)}


def unpack_request(fields: Fields) -> Request:
    """Read a request. Raises ProtocolError, naming the field."""
    name, version = (
        fields.require("request", read_name),
        fields.get("version", _read_version, REQUEST_VERSION),
    )
    codec = _BY_NAME.get(name)
    if codec is None or version > codec.version:
        return UnknownRequest(name, version)
    return codec.unpack(fields)


def pack_response(response: Response) -> tuple[str, dict[str, Any]]:
    """Return the name of the request that a response answers, and the response's fields."""
    codec = _BY_RESPONSE_TYPE[type(response)]
    return codec.name, {
        name: value for name, value in codec.pack_response(response).items() if value is not None
    }


def unpack_response(name: str, fields: Fields) -> Response | None:
    """Read the response to a request of that name; None if the name is unknown. Raises ProtocolError."""
    codec = _BY_NAME.get(name)
    return None if codec is None else codec.unpack_response(fields)


def join_pages(pages: Sequence[Response]) -> Response:
    """Join the pages of a response: arrays and bytes end to end, all other fields from the first page."""
    first = pages[0]
    names = {Welcome: ("origins",), Fact: ("values", "data", "metadata")}.get(type(first), ())
    if len(pages) == 1 or not names:
        return first
    parts = {name: [getattr(page, name) for page in pages] for name in names}
    return replace(first, **{name: reduce(add, contents) for name, contents in parts.items()})


def known_requests() -> dict[str, int]:
    """Return the newest version of each request that is known here, by its name."""
    return {codec.name: codec.version for codec in _CODECS}


# --- hello


def _hello_fields(hello: Hello) -> dict[str, Any]:
    return {
        "features": list(hello.features) or None,
        "token": hello.token,
        "origins": list(hello.origins) or None,
        "source": None if hello.source is Source.LOCAL else int(hello.source),
        "client": None if hello.client is None else truncate(hello.client, NAME_BYTES_MAX),
        "log_id": hello.log_id,
        "job": hello.job,
        "splits": hello.splits or None,
    }


def _unpack_hello(fields: Fields) -> Hello:
    return Hello(
        features=fields.get("features", _read_features, ()),
        token=fields.get("token", text(TOKEN_BYTES_MAX), None),
        origins=fields.get("origins", list_of(_read_claim, ORIGINS_MAX), ()),
        source=fields.get("source", one_of(Source), Source.LOCAL),
        client=fields.get("client", read_name, None),
        log_id=fields.get("log_id", read_log_id, None),
        job=fields.get("job", _read_job_part, None),
        splits=fields.get("splits", flag, False),
    )


def _welcome_fields(welcome: Welcome) -> dict[str, Any]:
    return {
        "features": list(welcome.features),
        "origins": list(welcome.origins),
        "log": welcome.log,
        "level": None if welcome.level is None else int(welcome.level),
    }


def _unpack_welcome(fields: Fields) -> Welcome:
    return Welcome(
        features=fields.get("features", _read_features, ()),
        origins=fields.get("origins", list_of(_read_grant, ORIGINS_MAX), ()),
        log=fields.get("log", read_cursor, None),
        level=fields.get("level", one_of(AckLevel), None),
    )


def _read_grant(value: Any) -> OriginGrant:
    return OriginGrant(*record(read_u64, read_u32, read_offset)(value))


def _read_claim(value: Any) -> OriginClaim:
    return OriginClaim(*record(read_u64, read_u32, read_u32)(value))


def _read_job_part(value: Any) -> JobPart:
    return JobPart(*record(read_name, read_u32, read_u64)(value))


# --- subscribe


def _subscription_fields(subscription: Subscription) -> dict[str, Any]:
    if not subscription.topics:
        raise UsageError("a subscription without topics: name at least one, or * for all")
    return {
        "subscription": subscription.subscription,
        "topics": [topic.to_bytes() for topic in subscription.topics],
        "start": _pack_start(subscription.start),
        "credit": subscription.credit,
        "batch_deltas_max": subscription.batch_deltas_max,
        "wait_ms_max": subscription.wait_ms_max,
        "group": subscription.group,
        "member": subscription.member,
        "filter": None if subscription.filter is None else _filter_fields(subscription.filter),
        "deltas": subscription.deltas or None,
        "stream": subscription.stream or None,
        "partitions": [_pack_partition_start(entry) for entry in subscription.partitions] or None,
    }


def _unpack_subscription(fields: Fields) -> Subscription:
    topics = fields.require("topics", list_of(_read_topic, TOPICS_MAX))
    if not topics:
        fields.refuse("topics", "is empty: name at least one")
    return Subscription(
        subscription=fields.require("subscription", read_u32),
        topics=topics,
        start=fields.get("start", _read_start, Start(StartAt.LATEST)),
        credit=fields.get("credit", read_credit, None),
        batch_deltas_max=fields.get("batch_deltas_max", _read_rows, 100),
        wait_ms_max=fields.get("wait_ms_max", _read_wait, 10),
        group=fields.get("group", read_name, None),
        member=fields.get("member", read_log_id, None),
        filter=_unpack_filter(fields.require_map("filter")) if "filter" in fields else None,
        deltas=fields.get("deltas", flag, False),
        stream=fields.get("stream", read_u32, 0),
        partitions=fields.get("partitions", list_of(_read_partition_start, PARTITIONS_MAX), ()),
    )


def _filter_fields(delta_filter: Filter) -> dict[str, Any]:
    return {
        "sources": [int(source) for source in delta_filter.sources],
        "priorities": [int(priority) for priority in delta_filter.priorities],
    }


def _unpack_filter(fields: Fields) -> Filter:
    return Filter(
        sources=fields.get("sources", list_of(one_of(Source), len(Source)), ()),
        priorities=fields.get("priorities", list_of(one_of(Priority), len(Priority)), ()),
    )


def _subscribed_fields(subscribed: Subscribed) -> dict[str, Any]:
    return {
        "subscription": subscribed.subscription,
        "start": subscribed.start,
        "batch_deltas_max": subscribed.batch_deltas_max,
        "wait_ms_max": subscribed.wait_ms_max,
        "standby": subscribed.standby or None,
        "resets": subscribed.resets or None,
    }


def _unpack_subscribed(fields: Fields) -> Subscribed:
    return Subscribed(
        subscription=fields.require("subscription", read_u32),
        start=fields.require("start", read_cursor),
        batch_deltas_max=fields.require("batch_deltas_max", _read_rows),
        wait_ms_max=fields.require("wait_ms_max", _read_wait),
        standby=fields.get("standby", flag, False),
        resets=fields.get("resets", read_u32, 0),
    )


def _read_topic(value: Any) -> Topic:
    try:
        return Topic.from_bytes(_read_topic_bytes(value))
    except Refused as refused:
        raise ProtocolError(refused.code, f"Subscribe: {refused.message}") from None


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


def _decide_fields(request: Decide) -> dict[str, Any]:
    return {
        "job": truncate(request.job, NAME_BYTES_MAX),
        "decide": request.decision.value,
        "parts": list(request.parts) or None,
        "run": request.run,
    }


def _unpack_decide(fields: Fields) -> Decide:
    return Decide(
        job=fields.require("job", read_name),
        decision=fields.require("decide", _enum_reader(Decision)),
        parts=fields.get("parts", list_of(_read_staged_part, PARTS_MAX), ()),
        run=fields.get("run", read_u32, None),
    )


def _read_staged_part(value: Any) -> StagedPart:
    return StagedPart(*record(read_u32, read_u64, read_u64, read_u32)(value))


def _job_fields(status: JobStatus) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "deltas": status.deltas,
        "published": status.published,
        "duplicates": status.duplicates,
        "refused": status.refused,
        "refused_rows": [*map(_refused_fields, status.refused_rows)] or None,
    }


def _unpack_job(fields: Fields) -> JobStatus:
    return JobStatus(
        state=fields.require("state", _enum_reader(JobState)),
        deltas=fields.get("deltas", read_u64, 0),
        published=fields.get("published", read_u64, 0),
        duplicates=fields.get("duplicates", read_u64, 0),
        refused=fields.get("refused", read_u64, 0),
        refused_rows=fields.get("refused_rows", list_of(_read_refused_row, REFUSED_ROWS_MAX), ()),
    )


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


# --- get


def _get_fields(get: Get) -> dict[str, Any]:
    return {"vector_id": get.vector_id, "namespace": get.namespace}


def _unpack_get(fields: Fields) -> Get:
    return Get(
        vector_id=fields.require("vector_id", text(VECTOR_ID_BYTES_MAX)),
        namespace=fields.get("namespace", read_name, None),
    )


def _fact_fields(fact: Fact) -> dict[str, Any]:
    return {
        "state": fact.state.value,
        "offset": fact.offset,
        "dot": fact.dot,
        "lamport": fact.lamport,
        "values": fact.values or None,
        "data": fact.data or None,
        "metadata": fact.metadata or None,
    }


def _unpack_fact(fields: Fields) -> Fact:
    return Fact(
        state=fields.require("state", _enum_reader(FactState)),
        offset=fields.require("offset", read_offset),
        dot=fields.get("dot", _read_dot, None),
        lamport=fields.get("lamport", read_offset, None),
        values=fields.get("values", _read_page, b""),
        data=fields.get("data", _read_page, b""),
        metadata=fields.get("metadata", _read_page, b""),
    )


def _read_dot(value: Any) -> Dot:
    return Dot(*record(read_u64, uint(COUNTER_MAX, minimum=1))(value))


# --- offsets


def _find_offsets_fields(request: FindOffsets) -> dict[str, Any]:
    return {
        "starts": [_pack_start(start) for start in request.starts],
        "stream": request.stream or None,
        "partition": request.partition or None,
    }


def _unpack_find_offsets(fields: Fields) -> FindOffsets:
    return FindOffsets(
        starts=fields.require("starts", list_of(_read_start, STARTS_MAX)),
        stream=fields.get("stream", read_u32, 0),
        partition=fields.get("partition", read_u16, 0),
    )


def _found_offsets_fields(response: FoundOffsets) -> dict[str, Any]:
    return {"offsets": list(response.offsets), "log": response.log}


def _unpack_found_offsets(fields: Fields) -> FoundOffsets:
    return FoundOffsets(
        offsets=fields.require("offsets", list_of(read_offset, STARTS_MAX)),
        log=fields.require("log", read_cursor),
    )


# --- describe


def _no_fields(_: Describe) -> dict[str, Any]:
    return {}


def _unpack_describe(_: Fields) -> Describe:
    return Describe()


def _description_fields(description: Description) -> dict[str, Any]:
    return {
        "streams": [[stream.name, stream.stream, list(stream.partitions)] for stream in description.streams],
        "requests": dict(description.requests),
        "features": list(description.features),
        "level": None if description.level is None else int(description.level),
    }


def _unpack_description(fields: Fields) -> Description:
    return Description(
        streams=fields.require("streams", list_of(_read_stream, PARTITIONS_MAX)),
        requests=fields.get("requests", _read_versions, {}),
        features=fields.get("features", _read_features, ()),
        level=fields.get("level", one_of(AckLevel), None),
    )


def _read_stream(value: Any) -> StreamDescription:
    return StreamDescription(*record(read_name, read_u32, list_of(_read_range, PARTITIONS_MAX))(value))


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


_CODECS = (
    _RequestCodec("hello", Hello, _hello_fields, _unpack_hello, Welcome, _welcome_fields, _unpack_welcome),
    _RequestCodec(
        "subscribe",
        Subscription,
        _subscription_fields,
        _unpack_subscription,
        Subscribed,
        _subscribed_fields,
        _unpack_subscribed,
    ),
    _RequestCodec("decide", Decide, _decide_fields, _unpack_decide, JobStatus, _job_fields, _unpack_job),
    _RequestCodec("get", Get, _get_fields, _unpack_get, Fact, _fact_fields, _unpack_fact),
    _RequestCodec(
        "offsets",
        FindOffsets,
        _find_offsets_fields,
        _unpack_find_offsets,
        FoundOffsets,
        _found_offsets_fields,
        _unpack_found_offsets,
    ),
    _RequestCodec(
        "describe",
        Describe,
        _no_fields,
        _unpack_describe,
        Description,
        _description_fields,
        _unpack_description,
    ),
)
_BY_NAME = {codec.name: codec for codec in _CODECS}
_BY_REQUEST_TYPE = {codec.request_type: codec for codec in _CODECS}
_BY_RESPONSE_TYPE = {codec.response_type: codec for codec in _CODECS}
