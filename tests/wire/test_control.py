"""Control frames: each missing, mistyped or out-of-bounds field is named."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.codec import decode, encode
from delta_prop_wire.control import TEXT_BYTES_MAX
from delta_prop_wire.crc import crc32c
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import Dot
from delta_prop_wire.errors import ProtocolError, UsageError
from delta_prop_wire.frames import (
    Ack,
    Describe,
    Fact,
    FactState,
    Frame,
    Heartbeat,
    Hello,
    Nack,
    OriginGrant,
    Start,
    StartAt,
    Subscribe,
    Subscribed,
    Subscription,
    UnknownRequest,
    Welcome,
)
from delta_prop_wire.packing import U64_MAX
from delta_prop_wire.requests import join_pages
from delta_prop_wire.spec import ErrorCode, FrameType
from delta_prop_wire.topics import ALL
from tests.wire.sealing import frame_with_checksum

REFUSED_ROW = [0, 249, "doc-1", 14, "why"]


def decode_error(raw: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(raw)
    return caught.value


# --- control frames


def control_frame(kind: FrameType, **fields: Any) -> bytes:
    if kind is FrameType.SUBSCRIBE and "request" not in fields:
        name = "subscribe" if "topics" in fields else "decide" if "decide" in fields else "hello"
        fields = {"request": name, **fields}
    return frame_with_checksum(kind, msgpack.packb(fields))


def response_to(request: str, **fields: Any) -> dict[str, Any]:
    return {"request": request, "response": fields}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (FrameType.ACK, "ranges", [[2, 1, 0, False]]),
        (FrameType.ACK, "ranges", [[1, 2, 0]]),
        (FrameType.ACK, "ranges", [[1, 2, 0, 1]]),
        (FrameType.ACK, "ranges", [[1, 2, 0, False]] * 1025),
        (FrameType.ACK, "processed", -1),
        (FrameType.ACK, "cursor", [bytes(15), 1, 1]),
        (FrameType.ACK, "credit", [1]),
        (FrameType.ACK, "response", {"request": "hello", "response": [1]}),
        (FrameType.ACK, "response", {"response": [1]}),
        (FrameType.ACK, "request", {"request": 4}),
        (FrameType.ACK, "request", {"request": "x" * 256, "credit": [1, 1]}),
        (FrameType.ACK, "request", {"request": 4, "response": {}}),
        (FrameType.ACK, "start", response_to("subscribe", subscription=1)),
        (FrameType.ACK, "state", response_to("get", state="gone", offset=1)),
        (FrameType.ACK, "offsets", response_to("offsets", offsets=[-1])),
        (FrameType.ACK, "streams", response_to("describe", streams=[["default"]])),
        (FrameType.NACK, "code", 0),
        (FrameType.NACK, "code", 1 << 16),
        (FrameType.ACK, "state", response_to("decide", state="gone")),
        (
            FrameType.ACK,
            "refused_rows",
            response_to("decide", state="published", refused_rows=[[0, 0, "a", 14]]),
        ),
        (
            FrameType.ACK,
            "refused_rows",
            response_to("decide", state="published", refused_rows=[REFUSED_ROW] * 11),
        ),
        (
            FrameType.ACK,
            "refused_rows",
            response_to("decide", state="published", refused_rows=[[*REFUSED_ROW[:3], 0, ""]]),
        ),
        (FrameType.SUBSCRIBE, "job", ["nightly", 1]),
        (FrameType.SUBSCRIBE, "decide", {"job": "nightly", "decide": "perhaps"}),
        (FrameType.SUBSCRIBE, "run", {"job": "nightly", "decide": "abort", "run": 1 << 32}),
        (FrameType.SUBSCRIBE, "parts", {"job": "nightly", "decide": "commit", "parts": [[1, 2]]}),
        (FrameType.NACK, "correlation_id", {"code": 6, "correlation_id": -1}),
        (FrameType.HEARTBEAT, "processed", 1 << 63),
        (FrameType.SUBSCRIBE, "client", "x" * 256),
        (FrameType.SUBSCRIBE, "log_id", bytes(15)),
        (FrameType.ACK, "more", 1),
        (FrameType.ACK, "log", {"request": "hello", "response": {"log": [bytes(16), 1]}}),
        (FrameType.ACK, "level", {"request": "hello", "response": {"level": 4}}),
        (FrameType.BACKPRESSURE, "rate", float("nan")),
        (FrameType.BACKPRESSURE, "rate", -1.0),
        (FrameType.HEARTBEAT, "sent_us", "now"),
        (FrameType.SUBSCRIBE, "version", 0),
        (FrameType.SUBSCRIBE, "features", ["x" * 65]),
        (FrameType.SUBSCRIBE, "token", "x" * 4097),
        (FrameType.SUBSCRIBE, "origins", [[1]]),
        (FrameType.SUBSCRIBE, "topics", []),
        (FrameType.SUBSCRIBE, "topics", ["*"]),
        (FrameType.UNSUBSCRIBE, "subscription", None),
        (FrameType.UNSUBSCRIBE, "subscription", 1 << 32),
    ],
)
def test_invalid_control_field_is_named(kind: FrameType, field: str, value: Any) -> None:
    fields = value if isinstance(value, dict) else {field: value}
    if kind is FrameType.BACKPRESSURE:
        fields = {"level": 0, **fields}
    error = decode_error(control_frame(kind, **fields))
    assert error.code is ErrorCode.BAD_FRAME
    assert field in error.message


@pytest.mark.parametrize(
    "start",
    [[], ["noon"], ["offset"], ["offset", -1], ["latest", 1], ["cursor", [b"", 0, 0]], "latest", [[1]], [7]],
)
def test_invalid_start_is_named(start: Any) -> None:
    error = decode_error(control_frame(FrameType.SUBSCRIBE, subscription=1, topics=[b"\0"], start=start))
    assert error.code is ErrorCode.BAD_FRAME
    assert "start" in error.message


@pytest.mark.parametrize(
    "start",
    [
        Start(StartAt.EARLIEST),
        Start(StartAt.LATEST),
        Start(StartAt.GROUP),
        Start(StartAt.OFFSET, 17),
        Start(StartAt.TIME, 1_700_000_000_000_000),
        Start(StartAt.CURSOR, Cursor(bytes(16), 3, 42)),
    ],
)
def test_every_start_round_trips(start: Start) -> None:
    frame = Subscribe(1, Subscription(1, (ALL,), start))
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize(
    "topic", [b"\x05x", b"\x01", b"\x03\x40", b"\x03", b"\x00x", b"\x02\xff", b"\x04" + b"x" * 256]
)
def test_unknown_topic_has_its_own_code(topic: bytes) -> None:
    error = decode_error(control_frame(FrameType.SUBSCRIBE, subscription=1, topics=[topic]))
    assert error.code is ErrorCode.UNKNOWN_TOPIC


def test_encoding_a_subscription_without_topics_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="at least one"):
        encode(Subscribe(1, Subscription(1, ())))


def test_encoding_an_oversized_control_frame_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="the maximum is 65532"):
        encode(Nack(1, ErrorCode.DEP_TIMEOUT, "", details={"missing": ["x" * 70_000]}))


def test_long_text_is_truncated_when_encoded() -> None:
    frame: Frame = decode(encode(Subscribe(1, Hello(client="n" * 300))))
    assert isinstance(frame, Subscribe)
    assert frame.request == Hello(client="n" * 255)
    frame = decode(encode(Nack(1, ErrorCode.INVALID_DELTA, "ä" * 5000 + "\ud800", field="f" * 300)))
    assert isinstance(frame, Nack)
    assert frame.text == "ä" * (TEXT_BYTES_MAX // 2)
    assert frame.field == "f" * 255


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x82\xa5level\x00\xa5level\x01", "twice"),
        (b"\x81\x01\x02", "str"),
        (b"\x81\xa5level\xd4\x01\x00", "extension"),
        (b"\x81\xa5level\xc1", "0xc1"),
        (b"\x81\xa5level", "early"),
        (b"\x81\xa5level\x00\x00", "1 bytes follow"),
        (b"\x91\x00", "list"),
        (b"\x81\xa5l\xffvel\x00", "utf-8"),
    ],
)
def test_invalid_msgpack_is_refused(payload: bytes, message: str) -> None:
    error = decode_error(frame_with_checksum(FrameType.BACKPRESSURE, payload))
    assert error.code is ErrorCode.BAD_FRAME
    assert message in error.message


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), U64_MAX)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    "vector_id namespace op values indices data id origin counter parents clock timestamp priority source "
    "metadata topics expect ack_level lamport ranges processed cursor credit correlation_id welcome "
    "subscribed code text retry_after_ms row field details level depth capacity rate sent_us echo_us "
    "delivered received version more log features token origins subscription start batch_deltas_max "
    "wait_ms_max group filter drain sources client log_id deltas"
)


@given(
    kind=st.sampled_from([kind for kind in FrameType if kind is not FrameType.BATCH]),
    fields=st.dictionaries(st.sampled_from(KEYS.split()), JSON_LIKE, max_size=6),
)
def test_random_maps_raise_only_protocol_errors(kind: FrameType, fields: dict[str, Any]) -> None:
    payload = msgpack.packb(fields)
    if kind is FrameType.DELTA:
        payload += crc32c(payload).to_bytes(4, "little")
    raw = frame_with_checksum(kind, payload)
    with contextlib.suppress(ProtocolError):
        decode(raw)


CURSORS = st.tuples(
    st.binary(min_size=15, max_size=17), st.integers(-1, U64_MAX) | st.none(), st.integers(-1, U64_MAX)
)


# --- frames of later versions


def test_unknown_error_code_round_trips() -> None:
    nack = Nack(3, ErrorCode(999), "later", retry_after_ms=5)
    assert decode(encode(nack)) == nack
    assert (nack.code, nack.code.name) == (999, "CODE_999")
    assert nack.code is not ErrorCode.BAD_FRAME
    assert not nack.refusal().retryable


def test_unknown_request_is_decoded() -> None:
    for fields in ({"request": "compact"}, {"request": "hello", "version": 2}):
        frame = decode(control_frame(FrameType.SUBSCRIBE, later=[1], **fields))
        assert frame == Subscribe(1, UnknownRequest(fields["request"], fields.get("version", 1)))
    with pytest.raises(UsageError, match="compact"):
        encode(Subscribe(1, UnknownRequest("compact", 1)))


@pytest.mark.parametrize(
    "fields", [{"response": {}}, {"response": {"features": 4}}, {"request": "hello"}, {"request": "x" * 255}]
)
def test_incomplete_response_is_ignored(fields: dict[str, Any]) -> None:
    assert decode(control_frame(FrameType.ACK, processed=3, **fields)) == Ack(1, processed=3)


def test_unknown_keys_and_flags_are_ignored() -> None:
    assert decode(control_frame(FrameType.SUBSCRIBE, request="describe", later={"a": 1})) == Subscribe(
        1, Describe()
    )
    for bit in (4, 5, 6, 7):
        raw = frame_with_checksum(FrameType.HEARTBEAT, msgpack.packb({"sent_us": 1}), flags=1 << bit)
        assert decode(raw) == Heartbeat(1, sent_us=1)
    assert decode(control_frame(FrameType.ACK, request="later", response={"a": 1})) == Ack(1)


def test_response_pages_are_joined() -> None:
    pages = [Welcome(origins=(OriginGrant(origin, 1, 1),)) for origin in (1, 2)]
    assert join_pages(pages) == Welcome(origins=(*pages[0].origins, *pages[1].origins))
    facts = [Fact(FactState.OPAQUE, 3, Dot(1, 1), 7, data=part) for part in (b"ab", b"c")]
    assert join_pages(facts) == replace(facts[0], data=b"abc")
    assert join_pages([Subscribed(1, Cursor(bytes(16), 1, 1), 1, 1)]).subscription == 1
