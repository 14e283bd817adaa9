"""A recording of traffic: what is read is what was written, and of names and content nothing is in it."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_prop.recorded_traffic import (
    BLOCK_HEAD,
    BLOCK_ROWS,
    FILE_HEAD,
    SALT_BYTES,
    RecordedTraffic,
    TrafficWriter,
)
from delta_prop_wire.delta import (
    AckLevel,
    Delta,
    Priority,
    Source,
    create,
    dense,
    opaque,
    sparse,
)
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import UsageError
from delta_prop_wire.spec import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta_prop_wire.batch import Batch

SALT = bytes(range(SALT_BYTES))
SECOND_US = 1_000_000
GOLDEN = bytes.fromhex(
    "d374726166666963010000000700000000000000eba56c66"
    "3200000001000000010000001e5a26a840420f00000000002025ee2e"
    "780163646060d895142d933f598b17c804838de90a179ca40acb18813c250ea820030b90a17ab178d9a7c3edb10002930af0"
    "00000000000000000000000000000000405489000000000001dbc94e"
)
"""One row: the file's head, a block's head, its columns compressed, the last block."""


def recorded(*batches: tuple[Batch, int], salt: bytes = SALT, every: bool = False) -> bytes:
    """The bytes of a whole recording; `every` batch in a block of its own."""
    writer = TrafficWriter(salt)
    parts = [writer.begin(7)]
    for batch, time_us in batches:
        parts.append(writer.add(batch, time_us, Source.IMPORT))
        if every:
            parts.append(writer.flush())
    return b"".join([*parts, writer.end(9 * SECOND_US)])


def traffic(raw: bytes, piece: int = 1000) -> RecordedTraffic:
    def pieces() -> Iterator[bytes]:
        return (raw[at : at + piece] for at in range(0, len(raw), piece))

    return RecordedTraffic(pieces, "'some.trace'")


def one(*deltas: Delta, base: int = 1, **more: AckLevel | Priority) -> Batch:
    return encode_batch(deltas, origin=5, base=base, **more)  # type: ignore[arg-type]


A_BATCH = one(
    Delta("doc-1", create([1.0, 2.0]), namespace="docs"),
    Delta("row-9", opaque(b"twelve bytes"), namespace="rows", metadata={"a": 1}),
    Delta("doc-1", sparse([1], [4.0]), namespace="docs"),
    priority=Priority.HIGH,
    ack_level=AckLevel.DURABLE,
)


def test_a_batch_comes_back_as_it_was() -> None:
    (batch,) = traffic(recorded((A_BATCH, SECOND_US))).batches()
    assert (batch.time_us, batch.priority, batch.ack_level) == (SECOND_US, Priority.HIGH, AckLevel.DURABLE)
    assert (batch.source, batch.kinds, batch.count) == (Source.IMPORT, A_BATCH.kinds, 3)
    assert batch.numbers.tolist() == [2, 0, 1]
    assert batch.sizes.tolist() == [5 + 8, 5 + 12 + 4, 5 + 8]
    assert batch.keys[0] == batch.keys[2] != batch.keys[1]
    assert batch.namespaces[0] == batch.namespaces[2] != batch.namespaces[1]


def test_the_bytes_stay_as_they_are() -> None:
    raw = recorded((one(Delta("v", opaque(b"abc"))), SECOND_US))
    columns, heads = slice(FILE_HEAD.size + BLOCK_HEAD.size, -BLOCK_HEAD.size), FILE_HEAD.size
    assert (raw[:heads], raw[-BLOCK_HEAD.size :]) == (GOLDEN[:heads], GOLDEN[-BLOCK_HEAD.size :])
    # Compressed bytes may differ from one zlib to another; what they say does not.
    assert zlib.decompress(raw[columns]) == zlib.decompress(GOLDEN[columns])
    (batch,) = traffic(GOLDEN).batches()
    assert (batch.origin, *batch.keys.tolist()) == (8534631643105748913, 6739570814325346597)
    assert (batch.time_us, *batch.sizes.tolist()) == (SECOND_US, 4)


def test_nothing_of_names_or_content_is_in_it() -> None:
    raw = recorded((A_BATCH, 1), every=True)
    inside = b"".join(bytes(str(one), "ascii") for one in traffic(raw).batches())
    for name in (b"doc-1", b"row-9", b"docs", b"rows", b"twelve"):
        assert name not in raw
        assert name not in inside
    other = recorded((A_BATCH, 1), salt=bytes(SALT_BYTES))
    (mine,), (theirs,) = traffic(raw).batches(), traffic(other).batches()
    assert not {*mine.keys.tolist(), *mine.namespaces.tolist(), mine.origin} & {
        *theirs.keys.tolist(),
        *theirs.namespaces.tolist(),
        theirs.origin,
    }


def test_the_same_id_in_two_namespaces_is_two_vectors() -> None:
    batch = one(Delta("v", opaque(b""), namespace="a"), Delta("v", opaque(b""), namespace="b"))
    (found,) = traffic(recorded((batch, 1))).batches()
    assert found.keys[0] != found.keys[1]


def test_places_that_were_only_filled_are_left_out() -> None:
    void = encode_noop(origin=5, base=1, count=1, code=ErrorCode.INVALID_DELTA)
    assert list(traffic(recorded((void, 1))).batches()) == []


def test_a_recording_is_small() -> None:
    batches = [
        (one(*(Delta(f"some-document-{n}", dense([0.5] * 16)) for n in range(at, at + 100)), base=at + 1), at)
        for at in range(0, 20_000, 100)
    ]
    raw = recorded(*batches)
    assert len(raw) / 20_000 < 12  # a hash has eight
    assert sum(batch.count for batch in traffic(raw).batches()) == 20_000


def test_a_block_is_made_where_it_is_full() -> None:
    writer = TrafficWriter(SALT)
    batch = one(*(Delta(f"v{n}", opaque(b"")) for n in range(BLOCK_ROWS - 1)))
    assert writer.add(batch, 1, Source.LOCAL) == b""
    assert writer.add(batch, 2, Source.LOCAL)
    assert writer.pending_rows == 0


def test_a_clock_that_was_put_back_orders_nothing() -> None:
    batches = [(A_BATCH, 5 * SECOND_US), (A_BATCH, 2 * SECOND_US), (A_BATCH, 6 * SECOND_US)]
    for every in (False, True):
        found = traffic(recorded(*batches, every=every)).arrivals()
        assert [one.at_s for one in found] == [0, 0, 1]


def test_twice_as_fast_is_half_the_time() -> None:
    found = traffic(recorded((A_BATCH, SECOND_US), (A_BATCH, 3 * SECOND_US))).arrivals(speed=2)
    assert [one.at_s for one in found] == [0, 1]


@pytest.mark.parametrize("speed", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speed_is_above_zero(speed: float) -> None:
    with pytest.raises(UsageError, match="give a number above 0"):
        next(traffic(recorded()).arrivals(speed))


def test_a_whole_recording_tells_when_it_ended() -> None:
    found = traffic(recorded((A_BATCH, 1)))
    assert len(list(found.batches())) == 1
    assert (found.began_us, found.ended_us, found.fault) == (7, 9 * SECOND_US, None)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "not a traffic recording"),
        (b"something else that is longer than a head", "not a traffic recording"),
        (recorded()[:8] + b"\2" + recorded()[9:], "version 2"),
        (recorded()[:16] + b"\xff" + recorded()[17:], "corrupted in its first bytes"),
    ],
)
def test_what_is_no_recording_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        list(traffic(raw).batches())


def test_a_cut_recording_is_read_up_to_its_last_whole_block() -> None:
    whole = recorded((A_BATCH, 1), (A_BATCH, 2), every=True)
    first = len(recorded((A_BATCH, 1), every=True)) - BLOCK_HEAD.size
    for size in range(FILE_HEAD.size, len(whole)):
        found = traffic(whole[:size], piece=7)
        second = first + first - FILE_HEAD.size
        assert len(list(found.batches())) == (size >= first) + (size >= second)
        assert found.fault is not None
        assert "truncated" in found.fault


@settings(max_examples=40)
@given(st.data())
def test_damage_is_told_and_what_is_before_it_counts(data: st.DataObject) -> None:
    raw = bytearray(recorded((A_BATCH, 1), (A_BATCH, 2), every=True))
    at = data.draw(st.integers(FILE_HEAD.size, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    found = traffic(bytes(raw))
    assert [one.time_us for one in found.batches()] == [1, 2][: len(list(found.batches()))]
    assert found.fault is not None


rows = st.tuples(
    st.text("abé☃", min_size=1, max_size=5),
    st.sampled_from(["a", "b", "c"]),
    st.one_of(
        st.binary(max_size=9).map(opaque),
        st.lists(st.just(1.0), min_size=1, max_size=4).map(dense),
        st.lists(st.just(1.0), min_size=1, max_size=4).map(lambda values: sparse(range(len(values)), values)),
    ),
)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.lists(rows, min_size=1, max_size=5),
            st.integers(0, 10**15),
            st.sampled_from(Priority),
            st.sampled_from([AckLevel.LOGGED, AckLevel.DURABLE]),
        ),
        max_size=6,
    ),
    st.booleans(),
    st.integers(1, 100),
)
def test_whatever_is_recorded_comes_back(
    given_: list[tuple[list[tuple[str, str, object]], int, Priority, AckLevel]], every: bool, piece: int
) -> None:
    batches = [
        (
            one(*(Delta(key, op, namespace=space) for key, space, op in rows), priority=p, ack_level=level),
            time,
        )
        for rows, time, p, level in given_
    ]
    found = list(traffic(recorded(*batches, every=every), piece).batches())
    assert [(len(rows), p, level) for rows, _, p, level in given_] == [
        (batch.count, batch.priority, batch.ack_level) for batch in found
    ]
    named: dict[tuple[str, str], int] = {}
    for (batch, _), back in zip(batches, found, strict=True):
        for row in range(batch.count):
            delta = batch.delta(row)
            op = delta.operation
            numbers = 0 if op.values is None else len(op.values)
            indices = 0 if op.indices is None else len(op.indices)
            assert back.kinds[row] == op.kind
            assert back.numbers[row] == numbers
            assert back.sizes[row] == len(delta.vector_id.encode()) + 4 * (numbers + indices) + len(op.data)
            key = int(back.keys[row])
            assert named.setdefault((delta.namespace, delta.vector_id), key) == key
    assert len(set(named.values())) == len(named)
