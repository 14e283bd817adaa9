"""Requests that change and describe streams: fields, bounds, pages, and which side may send them."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest

from delta_prop_wire.codec import decode, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import AckLevel, Source
from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.frames import (
    Ack,
    Describe,
    Description,
    Hello,
    PartitionRange,
    Request,
    StreamDescription,
    Subscribe,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.header import CONTROL_PAYLOAD_BYTES_MAX, HEADER_BYTES
from delta_prop_wire.message_rules import MessageKind, Role, message_kind_of
from delta_prop_wire.packing import U16_MAX, U32_MAX, U64_MAX
from delta_prop_wire.requests import (
    FEATURE_BYTES_MAX,
    FEATURES_MAX,
    PARTITIONS_MAX,
    SETTING_BYTES_MAX,
    SETTINGS_MAX,
    STREAM_NAME_BYTES_MAX,
    STREAM_PARTITIONS_MAX,
    join_pages,
    known_requests,
)
from delta_prop_wire.spec import COUNTER_MAX, CRC_BYTES, VECTOR_ID_BYTES_MAX, ErrorCode, FrameType
from delta_prop_wire.stream_requests import (
    AlterStream,
    CreateStream,
    DeleteStream,
    EraseVector,
    TruncateStream,
)
from tests.wire.sealing import frame_with_checksum

CURSOR = Cursor(bytes(16), 3, 42)
NAME = "n" * STREAM_NAME_BYTES_MAX
CHANGES: dict[str, Request] = {
    "create_stream": CreateStream("events"),
    "alter_stream": AlterStream("events", {}),
    "delete_stream": DeleteStream("events"),
    "truncate_stream": TruncateStream("events", 0),
    "erase_vector": EraseVector("events", "v"),
}
REQUIRED: dict[str, dict[str, Any]] = {
    "create_stream": {"name": "events"},
    "alter_stream": {"name": "events", "settings": {}},
    "delete_stream": {"name": "events"},
    "truncate_stream": {"name": "events", "before": 0},
    "erase_vector": {"name": "events", "vector_id": "v"},
    "describe": {},
}
FULL_SETTINGS = {
    f"{number:0{SETTING_BYTES_MAX}}": f"{number:0{SETTING_BYTES_MAX}}" for number in range(SETTINGS_MAX)
}


def read_request(request: str, /, **fields: Any) -> Request:
    frame = decode(frame_with_checksum(FrameType.SUBSCRIBE, msgpack.packb({"request": request, **fields})))
    assert isinstance(frame, Subscribe)
    return frame.request


def read_streams(*streams: Any, name: str = "describe") -> tuple[StreamDescription, ...]:
    fields = {"request": name, "response": {"streams": streams}}
    frame = decode(frame_with_checksum(FrameType.ACK, msgpack.packb(fields)))
    assert isinstance(frame, Ack)
    assert isinstance(frame.response, Description)
    return frame.response.streams


def packed_fields(frame: Subscribe | Ack) -> Any:
    return msgpack.unpackb(encode(frame)[HEADER_BYTES:-CRC_BYTES])


# --- requests


@pytest.mark.parametrize("name", CHANGES)
def test_stream_request_with_only_required_fields_has_the_defaults(name: str) -> None:
    assert known_requests()[name] == 1
    assert read_request(name, **REQUIRED[name]) == CHANGES[name]
    assert read_request(name, **REQUIRED[name], later={"a": 1}) == CHANGES[name]
    assert read_request(name, **REQUIRED[name], dry_run=None) == CHANGES[name]
    assert read_request(name, version=2, later=1) == UnknownRequest(name, 2)


@pytest.mark.parametrize(
    ("request_name", "field"),
    [(name, field) for name, fields in REQUIRED.items() for field in fields],
)
def test_missing_field_of_a_stream_request_is_named(request_name: str, field: str) -> None:
    fields = {name: value for name, value in REQUIRED[request_name].items() if name != field}
    with pytest.raises(ProtocolError, match=rf"Subscribe: field '{field}' is missing: send it"):
        read_request(request_name, **fields)


@pytest.mark.parametrize(
    "request_sent",
    [
        CreateStream(NAME, STREAM_PARTITIONS_MAX, FULL_SETTINGS, True, True),
        CreateStream("ä" * 124 + "b"),
        AlterStream(
            NAME, {"": None, "a": True, "b": False, "c": 0, "d": COUNTER_MAX, "e": 0.5, "f": ""}, True
        ),
        DeleteStream(NAME, True),
        TruncateStream(NAME, COUNTER_MAX, U16_MAX, True),
        EraseVector(NAME, "v" * VECTOR_ID_BYTES_MAX, "n" * 255, U32_MAX, True),
        Describe(NAME),
    ],
)
def test_stream_request_at_the_bounds_round_trips(request_sent: Request) -> None:
    assert decode(encode(Subscribe(1, request_sent))) == Subscribe(1, request_sent)


def test_setting_keeps_its_type() -> None:
    request = decode(encode(Subscribe(1, AlterStream("s", {"a": True, "b": 1, "c": 1.0}))))
    assert isinstance(request, Subscribe)
    assert isinstance(request.request, AlterStream)
    assert [*map(type, request.request.settings.values())] == [bool, int, float]


INVALID_NAMES = [4, b"events", "", "n" * (STREAM_NAME_BYTES_MAX + 1), "ä" * 125, ["events"]]
INVALID_SETTINGS = [
    [],
    "compact",
    dict.fromkeys(map(str, range(SETTINGS_MAX + 1)), 1),
    {"n" * (SETTING_BYTES_MAX + 1): 1},
    {"ä" * 33: 1},
    {"retention_s": -1},
    {"retention_s": COUNTER_MAX + 1},
    {"retention_s": -0.5},
    {"retention_s": math.nan},
    {"retention_s": math.inf},
    {"compress": "x" * (SETTING_BYTES_MAX + 1)},
    {"compress": b"zstd"},
    {"compress": ["zstd"]},
    {"compress": {"zstd": 1}},
]
INVALID_FLAGS = [0, 1, "yes"]


@pytest.mark.parametrize(
    ("request_name", "field", "value"),
    [
        *((name, "name", value) for name in CHANGES for value in INVALID_NAMES),
        *(("describe", "stream", value) for value in [*INVALID_NAMES, 0]),
        *(
            (name, "settings", each)
            for name in ("create_stream", "alter_stream")
            for each in INVALID_SETTINGS
        ),
        *((name, "dry_run", value) for name in CHANGES for value in INVALID_FLAGS),
        *(("create_stream", "if_not_exists", value) for value in INVALID_FLAGS),
        *(("create_stream", "partitions", value) for value in (0, -1, (1 << 16) + 1, "2", 2.0, True)),
        *(("truncate_stream", "before", value) for value in (-1, COUNTER_MAX + 1, "0", 1.0, True)),
        *(("erase_vector", "vector_id", value) for value in ("v" * (VECTOR_ID_BYTES_MAX + 1), 1, None)),
        *(("erase_vector", "timeout_ms", value) for value in (-1, U32_MAX + 1, "0")),
        *(("truncate_stream", "partition", value) for value in (-1, 1 << 16, "0")),
    ],
)
def test_invalid_field_of_a_stream_request_is_named(request_name: str, field: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=rf"Subscribe: field '{field}' .*: send ") as caught:
        read_request(request_name, **{**REQUIRED[request_name], field: value})
    assert caught.value.code is ErrorCode.BAD_FRAME
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": -1}, "has 'a', which is -1: send a whole number from 0 to 9223372036854775807"),
        ({"a": math.nan}, "has 'a', which is nan: send a finite number from 0 up"),
        ({"a": "x" * 65}, "has 'a', which has 65 bytes: send up to 64"),
        ({"a": []}, "has 'a', which is of type list: send nil, a boolean, a number or text"),
        ({"x" * 65: 1}, "has a name that has 65 bytes: send up to 64"),
        (dict.fromkeys(map(str, range(33))), "has 33 settings: send up to 32"),
    ],
)
def test_invalid_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read_request("alter_stream", name="events", settings=settings)
    assert caught.value.message == f"Subscribe: field 'settings' {message}"


def test_describe_without_a_stream_has_no_field() -> None:
    assert packed_fields(Subscribe(1, Describe())) == {"request": "describe", "version": 1}
    assert read_request("describe", stream=None) == read_request("describe") == Describe()


# --- descriptions


@pytest.mark.parametrize(
    ("stream", "packed"),
    [
        (StreamDescription("a", 1, ()), ["a", 1, []]),
        (StreamDescription("a", 1, (), 2), ["a", 1, [], 2]),
        (StreamDescription("a", 1, (), 1, {"compact": True}), ["a", 1, [], 1, {"compact": True}]),
        (StreamDescription("a", 1, (), STREAM_PARTITIONS_MAX, {}), ["a", 1, [], STREAM_PARTITIONS_MAX]),
    ],
)
def test_description_of_a_stream_omits_defaults(stream: StreamDescription, packed: list[Any]) -> None:
    assert packed_fields(Ack(response=Description((stream,), {})))["response"]["streams"] == [packed]
    assert read_streams(packed) == (stream,)


@pytest.mark.parametrize(
    "packed",
    [
        [],
        ["a", 1],
        "a",
        None,
        {"name": "a"},
        ["a", 1, [], 1, {}, 0],
        ["", 1, []],
        ["n" * 250, 1, []],
        ["a", 1 << 32, []],
        ["a", 1, [], 0],
        ["a", 1, [], (1 << 16) + 1],
        ["a", 1, [], None],
        ["a", 1, [], 1, []],
        *(["a", 1, [], 1, settings] for settings in INVALID_SETTINGS),
        ["a", 1, [[0, 0, [bytes(16), 0, 0]]] * (PARTITIONS_MAX + 1)],
        ["a", 1, [[0, 0]]],
    ],
)
def test_invalid_description_of_a_stream_is_named(packed: Any) -> None:
    with pytest.raises(ProtocolError, match=r"field 'streams' .*: send ") as caught:
        read_streams(packed)
    assert caught.value.code is ErrorCode.BAD_FRAME


@pytest.mark.parametrize("name", CHANGES)
def test_answer_to_a_change_is_a_description(name: str) -> None:
    """An answer names the request "describe", but is read under the name of the change, too."""
    ack = Ack(correlation_id=4, response=Description((StreamDescription("a", 1, (), 2),), {}))
    assert packed_fields(ack)["request"] == "describe"
    assert read_streams(["a", 1, [], 2], name=name) == (StreamDescription("a", 1, (), 2),)


def test_largest_page_of_one_stream_fits_a_control_frame() -> None:
    end = Cursor(bytes(16), COUNTER_MAX, COUNTER_MAX)
    ranges = tuple(PartitionRange(U16_MAX, COUNTER_MAX, end) for _ in range(PARTITIONS_MAX))
    stream = StreamDescription(NAME, U32_MAX, ranges, STREAM_PARTITIONS_MAX, FULL_SETTINGS)
    features = ("f" * FEATURE_BYTES_MAX,) * FEATURES_MAX
    page = Description((stream,), known_requests(), features, AckLevel.QUORUM)
    ack = Ack(0, correlation_id=U64_MAX, response=page, more=True, stream=U32_MAX, partition=U16_MAX)
    raw = encode(ack)
    assert decode(raw) == ack
    assert len(raw) - HEADER_BYTES <= CONTROL_PAYLOAD_BYTES_MAX - 2000


def test_pages_of_a_description_are_joined() -> None:
    def page(*streams: StreamDescription) -> Description:
        return Description(streams, {"hello": 1}, ("zstd",), AckLevel.LOGGED)

    ranges = [PartitionRange(partition, 0, CURSOR) for partition in range(4)]
    pages = [
        page(
            StreamDescription("a", 1, (), 2),
            StreamDescription("b", 2, tuple(ranges[:2]), 4, {"compact": True}),
        ),
        page(StreamDescription("b", 2, tuple(ranges[2:3]), 4, {"compact": True})),
        page(
            StreamDescription("b", 2, tuple(ranges[3:]), 4, {"compact": True}), StreamDescription("c", 3, ())
        ),
    ]
    assert join_pages(pages) == page(
        StreamDescription("a", 1, (), 2),
        StreamDescription("b", 2, tuple(ranges), 4, {"compact": True}),
        StreamDescription("c", 3, ()),
    )
    assert join_pages(pages[:1]) == pages[0]


# --- sides


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("source", [Source.LOCAL, Source.REPLICA])
def test_only_clients_may_change_streams(name: str, source: Source) -> None:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    frames = [Subscribe(1, Hello(source=source)), Subscribe(2, CHANGES[name])]
    server.receive(b"".join(map(client.send, frames)))
    assert [server.next_event() for _ in frames] == frames
    client.receive(server.send(Ack(correlation_id=1, response=Welcome())))
    client.next_event()
    with pytest.raises(UsageError, match="from a server is never allowed"):
        server.send(Subscribe(3, CHANGES[name]))
    client.receive(encode(Subscribe(3, CHANGES[name])))
    with pytest.raises(ProtocolError, match="from a server is never allowed"):
        client.next_event()


@pytest.mark.parametrize("name", CHANGES)
def test_change_before_a_hello_is_unauthorized(name: str) -> None:
    server = Connection(Role.SERVER)
    server.receive(encode(Subscribe(1, CHANGES[name])))
    with pytest.raises(ProtocolError) as caught:
        server.next_event()
    assert caught.value.code is ErrorCode.UNAUTHORIZED
    assert message_kind_of(Subscribe(1, CHANGES[name])) is MessageKind.QUERY
