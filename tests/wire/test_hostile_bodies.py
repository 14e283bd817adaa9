"""Hostile bodies with a valid checksum: each is refused in time and memory proportional to its size."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.codec import decode, encode
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, Dot, Kind, ParentPosition, create, delete, opaque, sparse
from delta_prop_wire.encode import assemble, encode_batch, encode_noop, encode_vectors
from delta_prop_wire.errors import InvalidDelta, ProtocolError, Refused
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.layout import CLOCK_ENTRY, PARENT, POSITION, Column
from delta_prop_wire.spec import BATCH_ROWS_MAX, CLOCK_ENTRIES_MAX, ErrorCode
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.validate import validate_batch
from tests.native_core import NativeCore, needs_native_core


def body(columns: dict[Column, bytes]) -> bytes:
    """Return a body of one delete with further columns."""
    base_columns = {Column.KEY_ENDS: b"\1\0\0\0", Column.KEYS: b"k", Column.NAMESPACES: b"\1\0n"}
    batch = assemble(
        {**base_columns, **columns},
        attributes=0,
        count=1,
        origin=1,
        epoch=1,
        base=1,
        hybrid_time=0,
        kinds_mask=1 << Kind.DELETE,
    )
    return bytes(batch.body)


def metadata_columns(packed: bytes) -> dict[Column, bytes]:
    return {Column.METADATA_ENDS: struct.pack("<I", len(packed)), Column.METADATA: packed}


def clock_column(origin_count: int) -> bytes:
    return b"".join(struct.pack("<QQ", origin, 1) for origin in range(origin_count))


def test_unchanged_bodies_are_valid() -> None:
    assert parse_batch(body({})).keys == ["k"]
    assert len(parse_batch(body({Column.CLOCK: clock_column(CLOCK_ENTRIES_MAX)})).clock) == CLOCK_ENTRIES_MAX
    long = b"\x81\xa1a\xdc\x02\x58" + bytes(600)
    assert parse_batch(body(metadata_columns(long))).metadata(0) == {"a": [0] * 600}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (metadata_columns(b"\x81\xa1a" + b"\xdc\xff\xff" * 100 + bytes(65_000)), "ends too early"),
        (metadata_columns(b"\x81\xa1a" + b"\xdd\x00\x90\x00\x00" * 30 + bytes(1_000_000)), "ends too early"),
        (metadata_columns(b"\x81\xa1a" * 1025 + b"\xc0"), "deep"),
        (metadata_columns(b"\xc0"), "not a msgpack map"),
        ({Column.NAMESPACES: bytes(2_000_000)}, "more names"),
        ({Column.TAG_NAMES: bytes(2_000_000), Column.TAGS: bytes(8)}, "more names"),
        ({Column.TAG_NAMES: b"\1\0\xff", Column.TAGS: bytes(8)}, "UTF-8"),
        ({Column.NAMESPACES: b"\1\0\xff"}, "UTF-8"),
        ({Column.KEYS: b"\xff"}, "UTF-8"),
    ],
)
def test_hostile_column_is_refused_at_small_cost(columns: dict[Column, bytes], message: str) -> None:
    raw = body(columns)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=message) as caught:
            parse_batch(raw)
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 2 * len(raw)
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.BAD_FRAME


@pytest.mark.parametrize(
    "packed",
    [
        b"\x81\xa1a\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
        b"\x81\xa1a" * 1024 + b"\xc0",
        b"\x81\xa1a" * 64 + b"\xda\x01\x80" + b"x" * 384,
        b"\x81\x91\xc0\xc0",
        b"\x81\x01\xc0",
    ],
)
def test_metadata_beyond_log_bounds_are_refused_as_a_delta_or_as_a_logged_frame(packed: bytes) -> None:
    raw = body(metadata_columns(packed))
    tracemalloc.start()
    try:
        batch = parse_batch(raw)
        assert tracemalloc.get_traced_memory()[1] < 200_000 + 2 * len(raw)
    finally:
        tracemalloc.stop()
    assert batch.unreadable_row == 0
    with pytest.raises(InvalidDelta):
        validate_batch(batch)
    stamped = encode(BatchFrame(1, batch, Stamp(100)))
    with pytest.raises(ProtocolError, match="breaks the bounds of a log"):
        decode(stamped)


@pytest.mark.parametrize(
    "clock",
    [
        clock_column(CLOCK_ENTRIES_MAX + 1),
        clock_column(50_000),
        struct.pack("<4Q", 2, 1, 1, 1),
        struct.pack("<4Q", 1, 1, 1, 2),
    ],
)
def test_clock_beyond_its_bound_is_refused_as_a_delta_or_as_a_logged_frame(clock: bytes) -> None:
    batch = parse_batch(body({Column.CLOCK: clock}))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidDelta, match="clock"):
            validate_batch(batch)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    with pytest.raises(ProtocolError, match="sorted by origin"):
        decode(encode(BatchFrame(1, batch, Stamp(100))))
    valid_batch = parse_batch(body({Column.CLOCK: clock_column(CLOCK_ENTRIES_MAX)}))
    decode(encode(BatchFrame(1, valid_batch, Stamp(100))))


SPARSE = Delta("doc-1", sparse([0, 7], [0.5, -1.25]), "docs")
RICH = Delta(
    "doc-2",
    create([1.0, 2.0]),
    "other",
    parents=(Dot(1, 5), bytes(range(16))),
    metadata={"title": "Büro", "list": [1, {"deep": None}]},
    topics=("news", "more"),
    expect=Dot(1, 4),
)
OPAQUE = encode_batch(
    [Delta(f"k{i % 7}", opaque(b"bytes" + bytes(i % 3))) for i in range(9)], origin=1, base=1
)
ORIGINALS = [
    encode_batch(
        [SPARSE, RICH, Delta("ü", opaque(b"x"), "docs"), Delta("d", delete(), "docs")], origin=7, base=5
    ),
    encode_batch([SPARSE] * 3, origin=1, base=5, previous=2, counters=[5, 9, 11], row_offsets=[1, 4, 6]),
    encode_batch(
        [Delta(name, delete(), "n", id=bytes(16), timestamp=time) for time, name in enumerate("abc")],
        origin=1,
        base=1,
        clock=(Dot(2, 7), Dot(3, 9)),
    ),
    encode_vectors(
        [f"k{i}" for i in range(20)], np.ones((20, 4), np.float32), namespace="n", origin=1, base=1
    ),
    encode_noop(origin=1, base=1, count=3, code=ErrorCode.INVALID_DELTA),
    OPAQUE,
    encode_batch([SPARSE] * 3, origin=1, base=5),
]


def test_mutated_body_is_refused_or_fully_readable(full: bool) -> None:
    rng = random.Random(3)
    accepted_count = 0
    rounds = 20_000 if full else 400
    for _, original in product(range(rounds), ORIGINALS):
        raw = mutate(bytes(original.body[:-4]), rng)
        try:
            batch = parse_batch(raw + crc32c(raw).to_bytes(4, "little"))
        except ProtocolError:
            continue
        accepted_count += 1
        read_everything(batch)
    assert accepted_count > rounds // 4  # some bits are values, and any value is valid


@needs_native_core
def test_native_core_accepts_only_what_python_does(full: bool) -> None:
    rng, outcomes = random.Random(4), Counter[str]()
    for _, original in product(range(20_000 if full else 600), ORIGINALS):
        raw = mutate(bytes(original.body[:-4]), rng)
        raw += crc32c(raw).to_bytes(4, "little")
        native = NativeCore().parse_batch(raw)
        assert (NativeCore().parse_batch(memoryview(raw)) is None) == (native is None)
        try:
            with core_mode.switched("python"):
                validate_batch(twin := parse_batch(raw))
        except (ProtocolError, Refused):
            outcomes["refused" if native is None else "wrongly accepted"] += 1
        else:
            outcomes["general" if native is None else "native"] += 1
            if native is not None:
                read_everything(native)
                assert (native.keys, native.namespaces) == (twin.keys, twin.namespaces)
    assert "wrongly accepted" not in outcomes
    assert min(outcomes["refused"], outcomes["native"], outcomes["general"]) > 10, outcomes


TWO_KEYS = {Column.KEY_ENDS: struct.pack("<II", 1, 2), Column.KEYS: b"kl", Column.NAMESPACES: b"\1\0n"}
ENDS, BLOBS = Column.BLOB_ENDS, Column.BLOBS


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({Column.VALUES: bytes(10)}, Kind.DENSE),
        ({Column.VALUES: bytes(12)}, Kind.DENSE),
        ({Column.VALUES: bytes(8), Column.INDICES: bytes(4)}, Kind.SPARSE),
        ({Column.VALUES: bytes(8), Column.INDICES: bytes(8)}, Kind.DENSE),
        ({ENDS: struct.pack("<I", 2), BLOBS: b"xy"}, Kind.OPAQUE),
        ({ENDS: struct.pack("<III", 1, 2, 3), BLOBS: b"xyz"}, Kind.OPAQUE),
        ({ENDS: struct.pack("<II", 3, 2), BLOBS: b"xy"}, Kind.OPAQUE),
        ({ENDS: struct.pack("<II", 1, 1), BLOBS: b"xy"}, Kind.OPAQUE),
        ({Column.NAMESPACES: b"\2\0n"}, Kind.OPAQUE),
        ({Column.NAMESPACES: b"\1\0n\1\0m"}, Kind.OPAQUE),
        ({Column.NAMESPACES: b"\1\0\xff"}, Kind.OPAQUE),
        ({Column.KEYS: b""}, Kind.OPAQUE),
    ],
)
def test_homogeneous_batch_with_conflicting_columns_is_refused(
    columns: dict[Column, bytes], kind: Kind
) -> None:
    header = {"attributes": 0, "origin": 1, "epoch": 1, "base": 1, "hybrid_time": 0}
    batch = assemble({**TWO_KEYS, **columns}, count=2, kinds_mask=1 << kind, **header)
    assert batch.homogeneous
    with pytest.raises(ProtocolError):
        parse_batch(bytes(batch.body))


def with_checksum(raw: bytes) -> bytes:
    return raw + crc32c(raw).to_bytes(4, "little")


def test_homogeneous_batch_of_wrong_length_or_checksum_is_refused() -> None:
    raw = bytes(OPAQUE.body[:-4])
    assert parse_batch(with_checksum(raw)).homogeneous
    for invalid in (raw + bytes(8), raw + bytes(1), raw + bytes(4), raw[:-8]):
        with pytest.raises(ProtocolError):
            parse_batch(with_checksum(invalid))
    with pytest.raises(ProtocolError, match="checksum") as caught:
        parse_batch(with_checksum(raw)[:-1] + b"?")
    assert caught.value.code is ErrorCode.CHECKSUM


def test_homogeneous_batch_of_too_many_rows_is_refused() -> None:
    count = BATCH_ROWS_MAX + 1
    ends = np.arange(1, count + 1, dtype="<u4").tobytes()
    columns = {Column.KEY_ENDS: ends, Column.KEYS: b"k" * count, Column.NAMESPACES: b"\1\0n"}
    header = {"attributes": 0, "origin": 1, "epoch": 1, "base": 1, "hybrid_time": 0}
    batch = assemble(columns, count=count, kinds_mask=1 << Kind.DELETE, **header)
    with pytest.raises(ProtocolError, match="65537 rows"):
        parse_batch(bytes(batch.body))


@pytest.mark.parametrize("size", [0, 4, 68, 71, 72, 76, 80, 88])
def test_truncated_body_is_refused(size: int) -> None:
    raw = bytes(OPAQUE.body[:size])
    with pytest.raises(ProtocolError):
        parse_batch(with_checksum(raw))


def mutate(original: bytes, rng: random.Random) -> bytes:
    raw = bytearray(original)
    for _ in range(rng.choice((1, 1, 2, 5))):
        position = rng.randrange(len(raw))
        match rng.randrange(4):
            case 0:
                raw[position] ^= 1 << rng.randrange(8)
            case 1:
                raw[position] = rng.choice((0, 1, 127, 128, 255))
            case 2:
                raw[position : position + 4] = rng.choice((bytes(4), b"\xff" * 4, b"\0\0\0\x80"))[
                    : len(raw) - position
                ]
            case _:
                raw[position : position + 8] = raw[(source := rng.randrange(len(raw) - 8)) : source + 8][
                    : len(raw) - position
                ]
    return bytes(raw)


def read_everything(batch: Batch) -> None:
    """Read every property of a batch."""
    batch.clock, batch.parents, batch.expects, batch.custom_topics, batch.last  # noqa: B018
    batch.value_bounds, batch.index_bounds, batch.blob_bounds, batch.kinds  # noqa: B018
    if batch.is_control:
        return
    for row in range(min(batch.count, 50) if batch.unreadable_row is None else 0):
        batch.delta(row)
    with contextlib.suppress(InvalidDelta):
        validate_batch(batch)


# --- positions of parents


def with_parents(*entries: tuple[int, int, bytes]) -> bytes:
    """Return a body of two rows with these parents, valid or not: (row, form, 16 bytes)."""
    delta = replace(PAIR[0], parents=(Dot(7, 1),) * len(entries))
    batch = encode_batch([delta, PAIR[1]], origin=3, base=1)
    column = batch.column(Column.PARENTS)
    assert column is not None
    packed = b"".join(PARENT.pack(*entry) for entry in entries)
    raw = bytes(batch.body).replace(bytes(column), packed)[:-4]
    return raw + crc32c(raw).to_bytes(4, "little")


DOT, ID, POSITIONED = CLOCK_ENTRY.pack(7, 1), bytes(range(16)), POSITION.pack(3, 1, 4711)
PAIR = [Delta("a", delete()), Delta("b", delete())]


def test_parent_position_follows_its_dot() -> None:
    batch = parse_batch(with_parents((0, 1, ID), (0, 0, DOT), (0, 2, POSITIONED), (1, 0, DOT)))
    assert batch.parents == ((0, ID), (0, Dot(7, 1)), (1, Dot(7, 1)))
    assert batch.parent_positions == ((0, 1, ParentPosition(3, 1, 4711)),)
    with pytest.raises(InvalidDelta, match="partition 3") as caught:
        validate_batch(batch)
    assert (caught.value.row, caught.value.field) == (0, "parents")


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 2, POSITIONED)],
        [(0, 1, ID), (0, 2, POSITIONED)],
        [(0, 0, DOT), (1, 2, POSITIONED)],
        [(0, 0, DOT), (0, 2, POSITIONED), (0, 2, POSITIONED)],
        [(0, 3, DOT)],
    ],
    ids=["first", "of an id", "of another row", "duplicate", "unknown form"],
)
def test_parent_position_without_its_dot_is_refused(entries: list[tuple[int, int, bytes]]) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse_batch(with_parents(*entries))
    assert caught.value.code is ErrorCode.BAD_FRAME
