"""Topics round-trip as text and as bytes, and an error for an invalid topic names the fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.delta import Delta, Kind, create, delete
from delta_prop_wire.errors import Refused, UsageError
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.topics import ALL, Topic, TopicKind, kind_name, kind_number

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
TOPICS = st.one_of(
    st.just(ALL),
    st.builds(Topic, st.sampled_from([TopicKind.VECTOR_ID, TopicKind.NAMESPACE, TopicKind.CUSTOM]), TEXTS),
    st.builds(Topic, st.just(TopicKind.DELTA_TYPE), st.integers(0, 63)),
)


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("*", b"\x00"),
        ("v:doc:1", b"\x01doc:1"),
        ("ns:docs", b"\x02docs"),
        ("op:create", b"\x03\x00"),
        ("op:sparse_add", b"\x03\x07"),
        ("op:12", b"\x03\x0c"),
        ("c:grün", b"\x04gr\xc3\xbcn"),
    ],
)
def test_topic_has_its_golden_bytes(text: str, data: bytes) -> None:
    topic = Topic.parse(text)
    assert topic.to_bytes() == data
    assert Topic.from_bytes(data) == topic
    assert str(topic) == text


@given(TOPICS)
def test_topic_round_trips_as_text_and_bytes(topic: Topic) -> None:
    assert Topic.parse(str(topic)) == topic
    assert Topic.from_bytes(topic.to_bytes()) == topic


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("", "ns:NAMESPACE"),
        ("docs", "v:VECTOR_ID"),
        ("**", "is unknown"),
        ("v:", "0 bytes: give 1 to 512"),
        ("ns:" + "x" * 256, "256 bytes: give 1 to 255"),
        ("c:" + "é" * 128, "256 bytes"),
        ("c:\ud800", "lone surrogate"),
        ("op:replace", "create, sparse, dense"),
        ("op:5", "one of"),
        ("op:64", "number up to 63"),
        ("op:²²", "one of"),
    ],
)
def test_invalid_text_error_names_the_fix(text: str, fix: str) -> None:
    with pytest.raises(UsageError, match="topic") as caught:
        Topic.parse(text)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        b"\x00x",
        b"\x01",
        b"\x03",
        b"\x03\x40",
        b"\x03\x00\x00",
        b"\x04\xff",
        b"\x02" + b"x" * 256,
    ],
)
def test_invalid_bytes_are_an_unknown_topic(data: bytes) -> None:
    with pytest.raises(Refused, match="topic") as caught:
        Topic.from_bytes(data)
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC


@given(st.binary(max_size=8))
def test_garbage_raises_only_refusals(data: bytes) -> None:
    try:
        topic = Topic.from_bytes(data)
    except Refused:
        return
    assert topic.to_bytes() == data


def test_topic_matches_its_deltas() -> None:
    delta = Delta("doc-1", create([1]), namespace="docs", topics=("red", "blue"))
    other = Delta("doc-2", delete())
    for text in ("*", "v:doc-1", "ns:docs", "op:create", "c:red", "c:blue"):
        assert Topic.parse(text).matches(delta)
        assert Topic.parse(text).matches(other) == (text == "*")


def test_kind_names_and_numbers_are_inverse() -> None:
    assert [kind_number(kind_name(kind)) for kind in range(64)] == list(range(64))
    assert kind_name(Kind.SPARSE_ADD) == "sparse_add"
    assert kind_number("9") == kind_number("64") == kind_number("") == -1
