"""Bodies that are signed and hostile: each is refused, in time and memory that go with its own size."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from itertools import product

import numpy as np
import pytest

from delta_prop_wire.batch import Batch
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import Delta, Dot, Kind, create, delete, opaque, sparse
from delta_prop_wire.encode import assemble, encode_batch, encode_vectors, encode_void
from delta_prop_wire.errors import InvalidDelta, PeerError
from delta_prop_wire.layout import Column
from delta_prop_wire.soundness import parse_batch
from delta_prop_wire.spec import CLOCK_ENTRIES_MAX, ErrorCode
from delta_prop_wire.validate import validate_batch


def body(columns: dict[Column, bytes]) -> bytes:
    """One delete, and what else is to be said."""
    known = {Column.KEY_ENDS: b"\1\0\0\0", Column.KEYS: b"k", Column.NAMESPACES: b"\1\0n"}
    batch = assemble(
        {**known, **columns},
        attributes=0,
        count=1,
        origin=1,
        epoch=1,
        base=1,
        hybrid_time=0,
        kinds_mask=1 << Kind.DELETE,
    )
    return bytes(batch.body)


def metadata(packed: bytes) -> dict[Column, bytes]:
    return {Column.METADATA_ENDS: struct.pack("<I", len(packed)), Column.METADATA: packed}


def entries(count: int) -> bytes:
    return b"".join(struct.pack("<QQ", origin, 1) for origin in range(count))


def test_what_is_added_to_is_sound() -> None:
    assert parse_batch(body({})).keys == ["k"]
    assert len(parse_batch(body({Column.CLOCK: entries(CLOCK_ENTRIES_MAX)})).clock) == CLOCK_ENTRIES_MAX
    long = b"\x81\xa1a\xdc\x02\x58" + bytes(600)
    assert parse_batch(body(metadata(long))).metadata(0) == {"a": [0] * 600}


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (metadata(b"\xdc\xff\xff" * 100 + bytes(65_000)), "announces"),
        (metadata(b"\xdd\x00\x90\x00\x00" * 30 + bytes(1_000_000)), "1000150 bytes; allowed are 65536"),
        (metadata(b"\x81\xa1a" * 900 + b"\xc0"), "deep"),
        (metadata(b"\x81\x91\xc0\xc0"), "not a msgpack map"),
        ({Column.CLOCK: entries(CLOCK_ENTRIES_MAX + 1)}, "1025 clock entries"),
        ({Column.NAMESPACES: bytes(2_000_000)}, "more names"),
        ({Column.TAG_NAMES: bytes(2_000_000), Column.TAGS: bytes(8)}, "more names"),
        ({Column.TAG_NAMES: b"\1\0\xff", Column.TAGS: bytes(8)}, "UTF-8"),
        ({Column.NAMESPACES: b"\1\0\xff"}, "UTF-8"),
        ({Column.KEYS: b"\xff"}, "UTF-8"),
    ],
)
def test_a_hostile_column_is_refused_at_small_cost(columns: dict[Column, bytes], why: str) -> None:
    raw = body(columns)
    tracemalloc.start()
    try:
        with pytest.raises(PeerError, match=why) as caught:
            parse_batch(raw)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.BAD_FRAME


SPARSE = Delta("doc-1", sparse([0, 7], [0.5, -1.25]), "docs")
ALL = Delta(
    "doc-2",
    create([1.0, 2.0]),
    "other",
    parents=(Dot(1, 5), bytes(range(16))),
    metadata={"title": "Büro", "list": [1, {"deep": None}]},
    topics=("news", "more"),
    expect=Dot(1, 4),
)
SEEDS = [
    encode_batch(
        [SPARSE, ALL, Delta("ü", opaque(b"x"), "docs"), Delta("d", delete(), "docs")], origin=7, base=5
    ),
    encode_batch([SPARSE] * 3, origin=1, base=5, previous=2, counters=[5, 9, 11], row_offsets=[1, 4, 6]),
    encode_batch(
        [Delta(name, delete(), "n", id=bytes(16), timestamp=at) for at, name in enumerate("abc")],
        origin=1,
        base=1,
        clock=(Dot(2, 7), Dot(3, 9)),
    ),
    encode_vectors(
        [f"k{i}" for i in range(20)], np.ones((20, 4), np.float32), namespace="n", origin=1, base=1
    ),
    encode_void(origin=1, base=1, count=3, code=ErrorCode.INVALID_DELTA),
]


def test_mutated_and_signed_again_it_is_refused_or_can_be_read_to_the_end(full: bool) -> None:
    chance = random.Random(3)
    passed = 0
    rounds = 20_000 if full else 400
    for _, seed in product(range(rounds), SEEDS):
        raw = mutated(bytes(seed.body[:-4]), chance)
        try:
            batch = parse_batch(raw + crc32c(raw).to_bytes(4, "little"))
        except PeerError:
            continue
        passed += 1
        read(batch)
    assert passed > rounds // 4  # some bits are values, and any value is sound


def mutated(signed: bytes, chance: random.Random) -> bytes:
    raw = bytearray(signed)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(raw))
        match chance.randrange(4):
            case 0:
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                raw[at] = chance.choice((0, 1, 127, 128, 255))
            case 2:
                raw[at : at + 4] = chance.choice((bytes(4), b"\xff" * 4, b"\0\0\0\x80"))[: len(raw) - at]
            case _:
                raw[at : at + 8] = raw[(other := chance.randrange(len(raw) - 8)) : other + 8][: len(raw) - at]
    return bytes(raw)


def read(batch: Batch) -> None:
    """Everything that a batch can be asked."""
    batch.clock, batch.parents, batch.expects, batch.custom_topics, batch.last  # noqa: B018
    batch.value_bounds, batch.index_bounds, batch.blob_bounds, batch.kinds  # noqa: B018
    if batch.is_control:
        return
    for row in range(min(batch.count, 50)):
        batch.delta(row)
    with contextlib.suppress(InvalidDelta):
        validate_batch(batch)
