"""A delta gets the same result as a Delta frame, as a batch of one row, and as a row among others.

The answer (code, row, field), its effect on the connection (open or closed), the log, and the state of the
service are the same in all three forms.
"""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from delta_prop.server.permissions import Permissions
from delta_prop.server.settings import ServerSettings
from delta_prop_wire.algebra import VectorState, apply
from delta_prop_wire.codec import encode
from delta_prop_wire.delta import Delta, Kind, create, delete
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.frames import BatchFrame
from delta_prop_wire.header import DELTA_PAYLOAD_BYTES_MAX
from delta_prop_wire.spec import (
    CLOCK_ENTRIES_MAX,
    COUNTER_MAX,
    DELTA_BYTES_MAX,
    DIMENSION_MAX,
    HEADER_BYTES,
    METADATA_BYTES_MAX,
    METADATA_DEPTH_MAX,
    ErrorCode,
)
from delta_prop_wire.state_rows import StateRow, encode_states
from tests.delta_prop.server.frame_forms import (
    ORIGIN,
    SECOND,
    SEEDED,
    UNCLAIMED,
    Answer,
    DeltaFields,
    Server,
    as_batch,
    as_delta,
    valid_fields,
    with_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NEXT = SEEDED + 1
INVALID, BAD = ErrorCode.INVALID_DELTA, ErrorCode.BAD_FRAME
NAME_BYTES_MAX = 65_535
"""The maximum length of a name in a batch."""


def pack_floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def pack_indices(*indices: int) -> bytes:
    return np.array(indices, "<u4").tobytes()


def nested_lists(depth: int) -> bytes:
    """Return a map of nested lists with this depth."""
    return b"\x81\xa1a" + b"\x91" * (depth - 1) + b"\xc0"


def map_of_size(size: int) -> bytes:
    """Return a map of this many bytes."""
    return b"\x81\xa1a\xdb" + struct.pack(">I", size - 8) + b"x" * (size - 8)


def op(
    kind: int, values: bytes = b"", indices: bytes = b"", data: bytes = b"", **more: Any
) -> dict[str, Any]:
    return {"op": kind, "values": values, "indices": indices, "data": data, **more}


def metadata(packed: bytes) -> dict[str, Any]:
    return {"metadata": packed}


def on_metadata(packed: bytes) -> dict[str, Any]:
    return op(Kind.METADATA, metadata=packed)


ONE_MIB = b"x" * DELTA_BYTES_MAX
SPARSE_MAX = DELTA_BYTES_MAX // 8
NESTED_MAX = 1_024
"""The maximum depth that is parsed as msgpack."""
EXTENSION = b"\x81\xa1a\xd4\x05\x00"
WITHIN: dict[str, dict[str, Any]] = {
    "vector id of 512 bytes": {"vector_id": b"x" * 512},
    "vector id of 512 bytes in UTF-8": {"vector_id": "é".encode() * 256},
    "namespace of 255 bytes": {"namespace": b"n" * 255},
    "transform-like bytes of an unknown kind": op(63, data=b"\xff"),
    "unknown kind without bytes": op(10),
    "data of 1 MiB": op(Kind.OPAQUE, data=ONE_MIB),
    "no data": op(Kind.OPAQUE),
    "data and metadata of 1 MiB": op(Kind.OPAQUE, data=ONE_MIB[1:], metadata=b"\x80"),
    "65,536 numbers": op(0, pack_floats(*[1] * DIMENSION_MAX), namespace=b"wide"),
    "no pairs": op(Kind.SPARSE),
    "131,072 pairs": op(Kind.SPARSE_ADD, bytes(4 * SPARSE_MAX), bytes(4 * SPARSE_MAX)),
    "a scale": op(Kind.SCALE, pack_floats(2)),
    "an offset": op(Kind.OFFSET, pack_floats(-2)),
    "a deletion": op(Kind.DELETE),
    "the greatest number": op(Kind.DENSE, pack_floats(3.4028234e38, -0.0)),
    "metadata of 65,536 bytes": metadata(map_of_size(METADATA_BYTES_MAX)),
    "metadata in a non-minimal encoding": metadata(b"\xde\0\1\xd9\1a\xcf\0\0\0\0\0\0\0\1"),
    "metadata 32 deep": metadata(nested_lists(METADATA_DEPTH_MAX)),
    "empty metadata": on_metadata(b"\x80"),
    "64 parents": {"parents": ((ORIGIN, 1),) * 64},
    "a parent by dot": {"parents": ((ORIGIN, 1),)},
    "1,024 clock entries": {"clock": tuple((n, 1) for n in range(CLOCK_ENTRIES_MAX))},
    "16 topics": {"topics": (b"t",) * 16},
    "a topic of 255 bytes": {"topics": (b"t" * 255, b"u")},
    "expects absence of an existing vector": {"expect": (0, 0)},
    "expects absence": {"expect": (0, 0), "vector_id": b"new"},
    "the greatest time": {"timestamp": (1 << 64) - 1},
    "an id": {"id": bytes(16)},
}
"""Fields at a bound, by the name of the case."""
CONFLICTING = "expects absence of an existing vector"
WAITING = "1,024 clock entries"
BEYOND: dict[str, tuple[str, dict[str, Any]]] = {
    "no vector id": ("vector_id", {"vector_id": b""}),
    "vector id of 513 bytes": ("vector_id", {"vector_id": b"x" * 513}),
    "vector id of 514 bytes in UTF-8": ("vector_id", {"vector_id": "é".encode() * 257}),
    "vector id with a zero": ("vector_id", {"vector_id": b"a\0"}),
    "vector id with U+0085": ("vector_id", {"vector_id": "a\x85".encode()}),
    "empty namespace": ("namespace", {"namespace": b""}),
    "namespace of 256 bytes": ("namespace", {"namespace": b"n" * 256}),
    "namespace of the maximum length in a table": ("namespace", {"namespace": b"n" * NAME_BYTES_MAX}),
    "namespace with a tab": ("namespace", {"namespace": b"\t"}),
    "data of 1 MiB and a byte": ("data", op(Kind.OPAQUE, data=ONE_MIB + b"x")),
    "data of an unknown kind": ("data", op(40, data=ONE_MIB + b"x")),
    "data and metadata above 1 MiB": ("delta", op(Kind.OPAQUE, data=ONE_MIB, metadata=b"\x80")),
    "no numbers": ("vector", {"values": b""}),
    "65,537 numbers": ("vector", {"values": bytes(4 * DIMENSION_MAX + 4)}),
    "a number that is NaN": ("vector", {"values": pack_floats(1, float("nan"))}),
    "an infinite number": ("vector", {"op": int(Kind.DENSE), "values": pack_floats(float("inf"))}),
    "131,073 pairs": ("values", op(1, bytes(4 * SPARSE_MAX + 4), bytes(4 * SPARSE_MAX + 4))),
    "an infinite pair": ("values", op(1, pack_floats(float("-inf")), pack_indices(0))),
    "index 65,536": ("indices", op(1, pack_floats(1), pack_indices(DIMENSION_MAX))),
    "an index above the dimension": ("indices", op(7, pack_floats(1), pack_indices(2))),
    "another dimension": ("vector", {"values": pack_floats(1, 2, 3)}),
    "a scale by two numbers": ("factor", op(Kind.SCALE, pack_floats(1, 2))),
    "a scale without a number": ("factor", op(Kind.SCALE)),
    "an infinite offset": ("amount", op(Kind.OFFSET, pack_floats(float("inf")))),
    "numbers of a deletion": ("values", op(Kind.DELETE, pack_floats(1))),
    "numbers of bytes": ("values", op(Kind.OPAQUE, pack_floats(1), data=b"x")),
    "bytes of a vector": ("data", {"data": b"x"}),
    "bytes of a deletion": ("data", op(Kind.DELETE, data=b"x")),
    "no name of a transform": ("name", op(Kind.TRANSFORM)),
    "name of a transform of 256 bytes": ("name", op(Kind.TRANSFORM, data=b"t" * 256)),
    "name of a transform not in UTF-8": ("name", op(Kind.TRANSFORM, data=b"\xff")),
    "name of a transform with a zero": ("name", op(Kind.TRANSFORM, data=b"\0")),
    "unknown transform": ("op", op(Kind.TRANSFORM, data=b"t" * 255)),
    "missing metadata": ("metadata", op(Kind.METADATA)),
    "metadata of 65,537 bytes": ("metadata", metadata(map_of_size(METADATA_BYTES_MAX + 1))),
    "metadata of 1 MiB, of a million items": (
        "metadata",
        metadata(b"\x81\xa1a\xdd\0\x10\0\0" + b"\xc0" * (1 << 20)),
    ),
    "metadata 33 deep": ("metadata", metadata(nested_lists(METADATA_DEPTH_MAX + 1))),
    "metadata 70 deep": ("metadata", metadata(nested_lists(70))),
    "metadata of the maximum parsed depth": ("metadata", on_metadata(nested_lists(NESTED_MAX))),
    "an extension type": ("metadata", metadata(EXTENSION)),
    "an extension type in a long change": (
        "metadata",
        metadata(b"\x82\xa1b\xda\x04\0" + b"x" * 1024 + EXTENSION[1:]),
    ),
    "a timestamp": ("metadata", metadata(b"\x81\xa1a\xd6\xff\0\0\0\0")),
    "a timestamp of three bytes": ("metadata", metadata(b"\x81\xa1a\xc7\3\xff\0\0\0")),
    "a key that is a number": ("metadata", metadata(b"\x81\x01\xc0")),
    "a key that is a list": ("metadata", metadata(b"\x81\x90\xc0")),
    "a key that is bytes": ("metadata", metadata(b"\x81\xc4\1a\xc0")),
    "a duplicate key": ("metadata", metadata(b"\x82\xa1a\1\xa1a\2")),
    "a nested duplicate key": ("metadata", metadata(b"\x81\xa1b\x82\xa1a\1\xa1a\2")),
    "bytes in metadata": ("metadata", metadata(b"\x81\xa1a\xc4\1x")),
    "a NaN in metadata": ("metadata", metadata(msgpack.packb({"a": float("nan")}))),
    "65 parents": ("parents", {"parents": ((ORIGIN, 1),) * 65}),
    "2,000 parents": ("parents", {"parents": ((ORIGIN, 1),) * 2_000}),
    "a parent with counter 0": ("parents", {"parents": ((1, 0),)}),
    "a parent with a counter of 64 bits": ("parents", {"parents": ((1, COUNTER_MAX + 1),)}),
    "1,025 clock entries": ("clock", {"clock": tuple((n, 1) for n in range(CLOCK_ENTRIES_MAX + 1))}),
    "an unsorted clock": ("clock", {"clock": ((2, 1), (1, 1))}),
    "a duplicate origin in a clock": ("clock", {"clock": ((1, 1), (1, 2))}),
    "a clock entry with counter 0": ("clock", {"clock": ((1, 0),)}),
    "a clock entry with a counter of 64 bits": ("clock", {"clock": ((1, COUNTER_MAX + 1),)}),
    "17 topics": ("topics", {"topics": tuple(b"%d" % n for n in range(17))}),
    "2,000 topics": ("topics", {"topics": tuple(b"%d" % n for n in range(2_000))}),
    "a topic of 256 bytes": ("topics", {"topics": (b"t" * 256,)}),
    "an empty topic": ("topics", {"topics": (b"t", b"")}),
    "a topic with a zero": ("topics", {"topics": (b"\0",)}),
    "expects counter 0": ("expect", {"expect": (1, 0)}),
    "expects a counter of 64 bits": ("expect", {"expect": (1, COUNTER_MAX + 1)}),
}
"""The field that the refusal names, and fields beyond a bound; by the name of the case."""
BROKEN: dict[str, dict[str, Any]] = {
    "vector id not in UTF-8": {"vector_id": b"\xff"},
    "namespace not in UTF-8": {"namespace": b"a\xed\xa0\x80"},
    "topic not in UTF-8": {"topics": (b"\xff",)},
    "operation 64": {"op": 64},
    "an id of 15 bytes": {"id": bytes(15)},
    "numbers of three bytes": {"values": bytes(7)},
    "more numbers than indices": op(1, pack_floats(1, 2), pack_indices(0)),
    "more indices than numbers": op(7, b"", pack_indices(0)),
    "indices of a vector": {"indices": pack_indices(0, 1)},
    "metadata that is a list": metadata(b"\x91\1"),
    "metadata cut off": metadata(b"\x82\xa1a\1"),
    "metadata not in UTF-8": metadata(b"\x81\xa1a\xa1\xff"),
    "a long change cut off": metadata(b"\x81\xa1a\xda\x04\0" + b"x" * 1_023),
    "a long change not in UTF-8": metadata(b"\x81\xa1a\xda\x04\0" + b"\xff" * 1_024),
    "metadata with a byte undefined in msgpack": metadata(b"\x81\xa1a\xc1"),
    "metadata with a length beyond its end": metadata(b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    "metadata above the maximum parsed depth": metadata(nested_lists(NESTED_MAX + 1)),
}
"""Malformed fields, by the name of the case."""
EDGES = WITHIN | {name: changes for name, (_, changes) in BEYOND.items()} | BROKEN
"""All of these cases; a random delta combines several."""
UNENCODABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "namespace of 65,536 bytes": ("namespace", {"namespace": b"n" * (NAME_BYTES_MAX + 1)}),
    "topic of 65,536 bytes": ("topics", {"topics": (b"t" * (NAME_BYTES_MAX + 1),)}),
}
"""Deltas that no batch can encode."""


def check_same_answer(delta_fields: DeltaFields) -> Answer:
    """Send the delta in all forms, compare the results, and return the answer to the Delta frame."""
    frame_server, batch_server, rows_server = Server(), Server(), Server()
    answer = frame_server.handle(as_delta(delta_fields, NEXT))
    assert batch_server.handle(as_batch([delta_fields], NEXT)) == answer
    assert batch_server.state() == frame_server.state()
    if [*delta_fields.clock] == sorted(delta_fields.clock):
        assert batch_server.logged() == frame_server.logged()
    else:  # an encoder sorts the clock, so the refused body has another checksum
        assert batch_server.rows() == frame_server.rows()
    batch_rows = [
        with_id(valid_fields(0), delta_fields),
        delta_fields,
        with_id(valid_fields(1), delta_fields),
    ]
    answer_among_rows = rows_server.handle(as_batch(batch_rows, NEXT))
    assert answer_among_rows == (answer if answer.row is None else replace(answer, row=1))
    if answer == Answer():
        offset, dot, delta = rows_server.rows()[1]
        assert frame_server.rows() == [
            (offset - 1, (dot.origin, dot.counter - 1), replace(delta, dot=frame_server.rows()[0][1]))
        ]
    elif answer.open and not answer.waits:
        assert [code for _, _, code in rows_server.rows()] == [answer.code or 0] * 3
    else:
        assert rows_server.rows() == []
    for server in (frame_server, batch_server, rows_server):
        if answer.waits:
            assert server.answer_after_timeout() == Answer(ErrorCode.DEP_TIMEOUT)
        assert server.accepts_more() == answer.open
    return answer


@pytest.mark.parametrize("name", WITHIN)
def test_delta_at_its_bound_is_accepted_in_each_form(name: str) -> None:
    expected = Answer(waits=name == WAITING)
    if name == CONFLICTING:
        expected = Answer(ErrorCode.CONFLICT, "expect", 0)
    assert check_same_answer(DeltaFields(**WITHIN[name])) == expected


@pytest.mark.parametrize("name", BEYOND)
def test_delta_beyond_a_bound_is_invalid_in_each_form(name: str) -> None:
    field, changes = BEYOND[name]
    assert check_same_answer(DeltaFields(**changes)) == Answer(
        INVALID, field, None if field == "clock" else 0
    )


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_delta_ends_the_connection_in_each_form(name: str) -> None:
    assert check_same_answer(DeltaFields(**BROKEN[name])) == Answer(BAD, open=False)


@pytest.mark.parametrize(
    ("counter", "answer"),
    [
        (0, Answer(BAD, open=False)),
        (COUNTER_MAX, Answer(waits=True)),
        (COUNTER_MAX + 1, Answer(BAD, open=False)),
    ],
)
def test_counters_have_the_same_bounds_in_each_form(counter: int, answer: Answer) -> None:
    assert Server().handle(as_delta(DeltaFields(), counter, sequence=9)) == answer
    assert Server().handle(as_batch([DeltaFields()], counter, sequence=9)) == answer
    if counter:
        assert Server().handle(as_batch([DeltaFields(), DeltaFields()], counter - 1, sequence=9)) == answer


def test_log_only_batches_end_the_connection() -> None:
    sliced = encode_batch([Delta("v", delete(), "n")], origin=ORIGIN, base=NEXT, row_offsets=[NEXT])
    state = apply(VectorState(), create([1.0]), None, (1, 1, 1))
    states = encode_states([StateRow("n", "v", state, 3)])
    for batch in (sliced, states):
        assert Server().handle(encode(BatchFrame(NEXT, batch))) == Answer(BAD, open=False)


@pytest.mark.parametrize("name", UNENCODABLE)
def test_delta_that_no_batch_can_encode_is_invalid(name: str) -> None:
    field, changes = UNENCODABLE[name]
    server = Server()
    assert server.handle(as_delta(DeltaFields(**changes), NEXT)) == Answer(INVALID, field, 0)
    assert [code for _, _, code in server.rows()] == [INVALID]
    assert server.accepts_more()


@pytest.mark.parametrize("name", [name for name in (*WITHIN, *BEYOND) if name != WAITING])
def test_delta_without_a_dot_gets_the_same_answer(name: str) -> None:
    """Without a dot, the server uses an origin of its own, so it does not wait for the delta's clock."""
    delta_fields = DeltaFields(**EDGES[name])
    with_dot, without_dot = Server(), Server()
    answer = with_dot.handle(as_delta(delta_fields, NEXT))
    assert without_dot.handle(as_delta(delta_fields, NEXT, origin=None)) == answer
    if answer.code is not None:
        assert without_dot.rows() == [], "a delta without a dot should leave no no-op record"


PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "vector id": (
        ["vector id of 512 bytes", "vector id of 512 bytes in UTF-8"],
        ["vector id of 513 bytes", "vector id of 514 bytes in UTF-8", "no vector id"],
    ),
    "namespace": (
        ["namespace of 255 bytes"],
        ["namespace of 256 bytes", "namespace of the maximum length in a table", "empty namespace"],
    ),
    "name of a transform": ([], ["name of a transform of 256 bytes", "no name of a transform"]),
    "custom topic": (["a topic of 255 bytes"], ["a topic of 256 bytes", "an empty topic"]),
    "control characters": (
        [],
        [
            "vector id with a zero",
            "vector id with U+0085",
            "namespace with a tab",
            "name of a transform with a zero",
            "a topic with a zero",
        ],
    ),
    "dimension": (["65,536 numbers"], ["65,537 numbers", "no numbers", "another dimension"]),
    "numbers of a scale": (
        ["a scale", "an offset"],
        ["a scale by two numbers", "a scale without a number", "an infinite offset"],
    ),
    "pairs of a sparse": (["131,072 pairs", "no pairs"], ["131,073 pairs"]),
    "numbers of any other": (["a deletion"], ["numbers of a deletion", "numbers of bytes"]),
    "a number": (
        ["the greatest number"],
        ["a number that is NaN", "an infinite number", "an infinite pair"],
    ),
    "an index": ([], ["index 65,536", "an index above the dimension"]),
    "data of an opaque": (
        ["data of 1 MiB", "no data", "unknown kind without bytes"],
        ["data of 1 MiB and a byte", "data of an unknown kind", "bytes of a vector", "bytes of a deletion"],
    ),
    "a delta's values": (["data and metadata of 1 MiB"], ["data and metadata above 1 MiB"]),
    "metadata change": (
        ["metadata of 65,536 bytes", "metadata in a non-minimal encoding"],
        ["metadata of 65,537 bytes", "metadata of 1 MiB, of a million items"],
    ),
    "depth of metadata": (
        ["metadata 32 deep"],
        ["metadata 33 deep", "metadata 70 deep", "metadata of the maximum parsed depth"],
    ),
    "members of metadata": (
        ["empty metadata"],
        [
            "an extension type",
            "an extension type in a long change",
            "a timestamp",
            "a timestamp of three bytes",
            "a key that is a number",
            "a key that is a list",
            "a key that is bytes",
            "a duplicate key",
            "a nested duplicate key",
            "bytes in metadata",
            "a NaN in metadata",
        ],
    ),
    "counters that": (
        ["a parent by dot"],
        [
            "a parent with counter 0",
            "a parent with a counter of 64 bits",
            "a clock entry with counter 0",
            "a clock entry with a counter of 64 bits",
            "expects counter 0",
            "expects a counter of 64 bits",
        ],
    ),
    "parents of a delta": (["64 parents"], ["65 parents", "2,000 parents"]),
    "custom topics of a delta": (["16 topics"], ["17 topics", "2,000 topics"]),
    "entries of a clock": (
        ["1,024 clock entries"],
        ["1,025 clock entries", "an unsorted clock", "a duplicate origin in a clock"],
    ),
}
"""By the first words of a row in the page's table of limits: cases within the limit, and cases beyond it."""


def test_page_names_each_limit_with_its_code_and_field() -> None:
    limits = PAGE[PAGE.index("### Of a delta") : PAGE.index("**Which of two rules wins**")]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([A-Z_]+) \| ([^|]+) \|$", limits, re.MULTILINE)
    assert len(rows) == len(EXAMPLES)
    documented = set()
    for (limit, _, code, fields), (start, (within, beyond)) in zip(rows, EXAMPLES.items(), strict=True):
        assert limit.startswith(start)
        assert {*within} <= {*WITHIN}
        for name in beyond:
            documented.add(name)
            assert code == INVALID.name
            assert fields.startswith("that of") or f"`{BEYOND[name][0]}`" in fields, name
    assert {*BEYOND} - documented == {
        "name of a transform not in UTF-8",
        "unknown transform",
        "missing metadata",
    }


# --- precedence of rules

FAULTS: dict[str, dict[str, Any]] = {
    "vector_id": {"vector_id": b""},
    "namespace": {"namespace": b""},
    "data": {"data": b"x"},
    "vector": {"values": pack_floats(float("nan"), 1)},
    "metadata": metadata(EXTENSION),
    "expect": {"expect": (1, 0)},
    "parents": {"parents": ((1, 0),)},
    "topics": {"topics": (b"",)},
    "clock": {"clock": ((2, 1), (1, 1))},
}
"""One fault per field, in the order in which a row is checked; last the clock, which all rows share."""


@pytest.mark.parametrize("first", range(len(FAULTS)))
def test_first_invalid_field_is_named(first: int) -> None:
    delta_fields = DeltaFields()
    for name in [*FAULTS][first:]:
        delta_fields = replace(delta_fields, **FAULTS[name])
    field = [*FAULTS][first]
    assert check_same_answer(delta_fields) == Answer(INVALID, field, None if field == "clock" else 0)


def test_first_invalid_row_is_named_whatever_its_field() -> None:
    server = Server()
    rows = [valid_fields(0), DeltaFields(topics=(b"",), clock=((1, 0),)), DeltaFields(vector_id=b"")]
    assert server.handle(as_batch(rows, NEXT)) == Answer(INVALID, "topics", 1)


def test_bounds_of_all_rows_precede_checks_against_the_service() -> None:
    unknown = DeltaFields(**BEYOND["unknown transform"][1])
    assert Server().handle(as_batch([unknown, DeltaFields(topics=(b"",))], NEXT)) == Answer(
        INVALID, "topics", 1
    )
    conflict = DeltaFields(vector_id=b"v", expect=(0, 0))
    assert Server().handle(as_batch([conflict, unknown], NEXT)) == Answer(INVALID, "op", 1)


SCOPED = Permissions("scoped", publish=True, namespaces=("n",), kinds_mask=1 << Kind.CREATE)
SLOW = replace(SCOPED, rate=0.001)
# both are invalid; only the second is outside the scope
INSIDE, OUTSIDE = DeltaFields(vector_id=b""), DeltaFields(vector_id=b"", namespace=b"m")


def as_single_batch(
    delta_fields: DeltaFields, counter: int, *, origin: int = ORIGIN, sequence: int | None = None
) -> bytes:
    return as_batch([delta_fields], counter, origin=origin, sequence=sequence)


@pytest.mark.parametrize("form", [as_delta, as_single_batch])
def test_check_order_is_structure_rate_permission_clock_bounds(
    form: Callable[[DeltaFields, int], bytes],
) -> None:
    unauthorized = Answer(ErrorCode.UNAUTHORIZED, open=False)
    rate_limited = Server(SLOW)
    assert rate_limited.handle(form(DeltaFields(), NEXT)) == Answer()
    assert rate_limited.handle(form(OUTSIDE, NEXT + 1)) == Answer(ErrorCode.RATE_LIMITED)
    assert rate_limited.handle(form(replace(OUTSIDE, metadata=b"\x81"), NEXT + 2)) == Answer(BAD, open=False)
    assert Server(SCOPED).handle(form(OUTSIDE, NEXT)) == unauthorized
    assert Server(SCOPED).handle(form(replace(INSIDE, op=int(Kind.DENSE)), NEXT)) == unauthorized
    assert Server(SCOPED).handle(form(INSIDE, NEXT)) == Answer(INVALID, "vector_id", 0)
    one_entry = ServerSettings(clock_entries_max=1)
    two_entries = replace(INSIDE, clock=((ORIGIN, 1), (SECOND, 1)))
    assert Server(settings=one_entry).handle(form(two_entries, NEXT)) == Answer(INVALID, "clock")
    waiting = replace(
        INSIDE, clock=((ORIGIN, 9), (SECOND, 9))
    )  # refused before the service waits for the clock
    assert Server(settings=one_entry).handle(form(waiting, NEXT)) == Answer(INVALID, "clock")
    assert Server(SCOPED, one_entry).handle(form(replace(two_entries, namespace=b"m"), NEXT)) == unauthorized


def test_rate_is_checked_before_the_claim_and_permission_after_it() -> None:
    for form in (as_delta, as_single_batch):
        rate_limited = Server(SLOW)
        assert rate_limited.handle(form(DeltaFields(), NEXT)) == Answer()
        unclaimed = form(OUTSIDE, NEXT, origin=UNCLAIMED, sequence=NEXT + 1)
        assert rate_limited.handle(unclaimed) == Answer(ErrorCode.RATE_LIMITED)
        unclaimed = form(OUTSIDE, NEXT, origin=UNCLAIMED)
        assert Server(SCOPED).handle(unclaimed) == Answer(ErrorCode.UNKNOWN_ORIGIN)


def test_used_dot_is_refused_before_bounds() -> None:
    for raw in (as_delta(INSIDE, 1), as_batch([INSIDE], 1)):
        assert Server().handle(raw) == Answer(ErrorCode.DOT_REUSED)


@pytest.mark.parametrize("name", [name for name in BEYOND if name != "an unsorted clock"])
def test_duplicate_in_the_other_form_gets_the_first_answer(name: str) -> None:
    delta_fields = DeltaFields(**BEYOND[name][1])
    for first, second in ((as_delta, as_single_batch), (as_single_batch, as_delta)):
        server = Server()
        assert server.handle(first(delta_fields, NEXT)).code is INVALID
        assert server.handle(second(delta_fields, NEXT, sequence=NEXT + 1)).code is INVALID
        assert server.accepts_more()


def test_outcome_query_with_unreadable_metadata_is_answered() -> None:
    server = Server()
    assert server.handle(as_batch([DeltaFields(metadata=b"\x80")], NEXT)) == Answer()
    outcome_query = as_batch([DeltaFields(metadata=b"\x81\x01\xc0")], NEXT, epoch=0, sequence=NEXT + 1)
    assert server.handle(outcome_query) == Answer(ErrorCode.DOT_REUSED)
    assert server.accepts_more()


# --- successive rows

OPERATIONS = [
    op(12, data=b"x"),
    op(63),
    op(Kind.CREATE, pack_floats(1, 2)),
    op(Kind.DENSE, pack_floats(1, 2)),
    op(Kind.OPAQUE, data=b"x"),
    op(Kind.DELETE),
    op(Kind.SPARSE, pack_floats(1), pack_indices(1)),
    op(Kind.SPARSE_ADD, pack_floats(1), pack_indices(1)),
    op(Kind.SCALE, pack_floats(2)),
    op(Kind.OFFSET, pack_floats(2)),
    on_metadata(b"\x80"),
]
"""Operations that need a vector, create one, delete one, or only make its id known."""
SUCCESSIVE_ROWS = st.lists(
    st.tuples(
        st.sampled_from(OPERATIONS),
        st.sampled_from([b"new", b"new", b"v"]),
        st.sampled_from([b"n", b"m"]),
        st.none() | st.just((0, 0)) | st.integers(1, 3),
    ),
    min_size=1,
    max_size=5,
)


@given(SUCCESSIVE_ROWS)
def test_rows_of_a_batch_are_checked_like_successive_deltas(rows: list[Any]) -> None:
    delta_fields = [
        DeltaFields(
            **operation,
            vector_id=name,
            namespace=namespace,
            expect=(ORIGIN, max(NEXT + index - expect, 1)) if isinstance(expect, int) else expect,
        )
        for index, (operation, name, namespace, expect) in enumerate(rows)
    ]
    one_by_one, together = Server(), Server()
    for index, fields in enumerate(delta_fields):
        answer = one_by_one.handle(as_delta(fields, NEXT + index))
        if answer != Answer():
            assert together.handle(as_batch(delta_fields, NEXT)) == replace(answer, row=index)
            return
    assert together.handle(as_batch(delta_fields, NEXT)) == Answer()
    assert together.state() == one_by_one.state()
    assert together.rows() == one_by_one.rows()


# --- random deltas

NUMBERS = st.lists(st.sampled_from([0.0, 1.0, -2.5, 3e38, float("nan")]), max_size=4).map(
    lambda n: pack_floats(*n)
)
INDICES = st.lists(st.sampled_from([0, 1, 2, 70_000]), max_size=4).map(lambda n: pack_indices(*n))
NAMES = st.sampled_from([b"v", b"seed-0", b"new", b"n", b"", b"\n", "é".encode(), b"\xff", b"x" * 300])
DOTS = st.tuples(st.sampled_from([1, ORIGIN, SECOND]), st.sampled_from([0, 1, 2, 9, COUNTER_MAX + 1]))
IDS = st.sampled_from([b"i" * 16, bytes(16)])
KEYS = st.text("ab", max_size=2) | st.integers(0, 1)
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=True) | st.text(max_size=3)
    | st.binary(max_size=3) | st.just(msgpack.ExtType(5, b"x")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=5,
)  # fmt: skip
PACKED = (st.dictionaries(st.text(max_size=2), JSONS, max_size=3) | JSONS).map(msgpack.packb)
CORRUPTED = st.tuples(PACKED, st.integers(0, 20), st.binary(max_size=2)).map(
    lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] + 1 :]
)
PATCHES = (PACKED | CORRUPTED).filter(lambda packed: packed not in (b"", b"\xc0"))
"""Metadata, without the two values that mean "no patch" in one form: nil in a map, no bytes in a column."""
RANDOM_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "vector_id": NAMES,
        "namespace": NAMES,
        "op": st.integers(0, 11) | st.sampled_from([63, 64]),
        "values": NUMBERS,
        "indices": INDICES,
        "data": st.sampled_from([b"", b"x", b"\xff"]),
        "id": st.none() | IDS,
        "parents": st.lists(DOTS | IDS, max_size=3).map(tuple),
        "clock": st.lists(DOTS, max_size=3).map(tuple),
        "timestamp": st.sampled_from([0, 5, (1 << 64) - 1]),
        "metadata": st.none() | PATCHES,
        "topics": st.lists(NAMES, max_size=3).map(tuple),
        "expect": st.none() | DOTS | st.just((0, 0)),
    },
)


PROFILE_EXAMPLES = settings().max_examples
FORMS_EXAMPLES = PROFILE_EXAMPLES * (10 if PROFILE_EXAMPLES >= 1_000 else 4)
"""Number of examples: 10 times that of the profile `full`, 4 times that of a normal run."""


@settings(max_examples=FORMS_EXAMPLES)
@given(st.lists(st.sampled_from([*EDGES]) | RANDOM_FIELDS, min_size=1, max_size=4))
def test_any_delta_gets_the_same_answer_in_all_forms(changes: list[str | dict[str, Any]]) -> None:
    delta_fields = DeltaFields()
    for change in changes:
        delta_fields = replace(delta_fields, **(EDGES[change] if isinstance(change, str) else change))
    assume(len(as_delta(delta_fields, NEXT)) <= HEADER_BYTES + DELTA_PAYLOAD_BYTES_MAX)
    check_same_answer(delta_fields)
