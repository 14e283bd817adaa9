"""Strategies for everything that reaches the core, one per field of its types.

Each table has the fields of one type, or the arguments of one function, as its keys; a test compares the keys
with the type. So a new field fails that test until a strategy draws it here.
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from delta_prop.calls.receipt import Receipt
from delta_prop.partition.ingest.work import Draft, MatrixDraft, Sender, SequencedBatch
from delta_prop_wire.algebra import VectorState
from delta_prop_wire.cursor import Cursor
from delta_prop_wire.delta import (
    ABSENT,
    AckLevel,
    Delta,
    Dot,
    Kind,
    KnownIds,
    Operation,
    ParentPosition,
    Priority,
    Source,
)
from delta_prop_wire.encode import encode_batch, encode_noop
from delta_prop_wire.errors import InvalidDelta, Refused
from delta_prop_wire.frames import Ack, AckRange, BatchFrame, Credit, Fact, FactState
from delta_prop_wire.spec import ErrorCode
from delta_prop_wire.stamp import Stamp
from delta_prop_wire.state_rows import StateRow, encode_states

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hypothesis.strategies import SearchStrategy

    from delta_prop_wire.batch import Batch

Fields = dict[str, "SearchStrategy[Any]"]

ORIGINS = (0x7000_0002, 0x9000_0002)
IDS = st.sampled_from([bytes([number]) * 16 for number in range(4)])
DOTS = st.builds(Dot, st.sampled_from(ORIGINS), st.integers(1, 4))
NUMBERS = st.sampled_from([0.0, 1.0, -2.5, 1e30, float("nan"), float("inf")])
VALID_NUMBERS = st.sampled_from([0.0, 1.0, -2.5, 1e30, -3e38])
NAMES = st.sampled_from(["a", "b", "c", "key-4", "a longer name"])
ODD_NAMES = NAMES | st.sampled_from(["", "é", "x\n", "n" * 513])


def floats(count: SearchStrategy[int], numbers: SearchStrategy[float]) -> SearchStrategy[Any]:
    """Draw an array of numbers."""
    return count.flatmap(lambda n: st.lists(numbers, min_size=n, max_size=n)).map(
        lambda drawn: np.array(drawn, np.float32)
    )


OPERATION_FIELDS: Fields = {
    "kind": st.sampled_from(list(Kind)),
    "values": st.none() | floats(st.integers(0, 3), VALID_NUMBERS) | floats(st.integers(0, 3), NUMBERS),
    "indices": st.none()
    | st.lists(st.sampled_from([0, 1, 2, 65536]), max_size=3).map(lambda drawn: np.array(drawn, np.uint32)),
    "data": st.sampled_from([b"", b"", b"", b"", b"x", b"some bytes", bytes(300)]),
}


@st.composite
def fitting_operations(draw: Any) -> Operation:
    """Draw an operation with the operands that its kind takes; most are valid."""
    kind = draw(OPERATION_FIELDS["kind"])
    width = draw(st.sampled_from([2, 2, 2, 2, 3, 0]))
    values = np.array([draw(VALID_NUMBERS) for _ in range(width)], np.float32)
    if kind in (Kind.CREATE, Kind.DENSE):
        return Operation(kind, values)
    if kind in (Kind.SPARSE, Kind.SPARSE_ADD):
        indices = np.array([draw(st.sampled_from([0, 1, 1, 2])) for _ in range(width)], np.uint32)
        return Operation(kind, values, indices)
    if kind in (Kind.SCALE, Kind.OFFSET):
        return Operation(kind, np.array([draw(VALID_NUMBERS)], np.float32))
    if kind in (Kind.OPAQUE, Kind.TRANSFORM):
        return Operation(kind, data=draw(OPERATION_FIELDS["data"]))
    return Operation(kind)


LIVES = st.sampled_from(
    [
        Operation(Kind.DELETE),
        Operation(Kind.CREATE, np.ones(2, np.float32)),
        Operation(Kind.SPARSE, np.ones(1, np.float32), np.ones(1, np.uint32)),
        Operation(Kind.OFFSET, np.ones(1, np.float32)),
    ]
)
"""Operations that end a vector's life, begin it, or need it."""


@st.composite
def any_operations(draw: Any) -> Operation:
    """Draw an operation field by field; its sparse numbers have as many indices, so that it encodes."""
    drawn = {name: draw(strategy) for name, strategy in OPERATION_FIELDS.items()}
    if drawn["kind"] in (Kind.SPARSE, Kind.SPARSE_ADD):
        count = 0 if drawn["values"] is None else len(drawn["values"])
        drawn["indices"] = np.arange(count, dtype=np.uint32)
    else:
        drawn["indices"] = None
    return Operation(**drawn)


DELTA_FIELDS: Fields = {
    "vector_id": ODD_NAMES,
    "operation": st.one_of(fitting_operations(), fitting_operations(), any_operations()),
    "namespace": st.sampled_from(["default", "default", "other", "é", "", "n\t"]),
    "id": st.none() | IDS,
    "dot": st.none() | DOTS,
    "parents": st.lists(DOTS | IDS, max_size=2).map(tuple),
    "clock": st.just(()) | st.tuples(DOTS),
    "timestamp": st.sampled_from([0, 0, 1, 1 << 40]),
    "priority": st.sampled_from(list(Priority)),
    "source": st.sampled_from(list(Source)),
    "metadata": st.none() | st.sampled_from([{}, {"a": 1}, {"b": [None, "text", 1.5]}]),
    "topics": st.lists(st.sampled_from(["news", "é", ""]), max_size=2).map(tuple),
    "expect": st.none() | DOTS | st.just(ABSENT),
}
PLAIN_FIELDS = ("vector_id", "operation", "namespace")
"""The fields of a delta that most deltas have, and all deltas of the fast paths."""


@st.composite
def deltas(draw: Any, *, rare: int = 1, plain: Mapping[str, Any] | None = None) -> Delta:
    """Draw a delta: the plain fields, and up to `rare` of the others."""
    rare_names = sorted(DELTA_FIELDS.keys() - set(PLAIN_FIELDS))
    names = draw(st.lists(st.sampled_from(rare_names), min_size=min(rare, 1), max_size=rare))
    drawn = {name: draw(DELTA_FIELDS[name]) for name in dict.fromkeys((*PLAIN_FIELDS, *names))}
    return Delta(**{**drawn, **(plain or {})})


@st.composite
def delta_lists(draw: Any, rare: int = 1) -> list[Delta]:
    """Draw the rows of a batch: often of one kind and namespace, as in most batches."""
    count = draw(st.sampled_from([1, 1, 2, 3, 4]))
    form = draw(st.sampled_from(["uniform", "uniform", "life", "common", "odd", "any"]))
    if form == "any":
        rows = [draw(deltas(rare=rare)) for _ in range(count)]
        ids = draw(st.sampled_from([None, None, st.lists(IDS, min_size=count, max_size=count)]))
        ids = [None] * count if ids is None else draw(ids)  # all rows have an id, or none has
        return [Delta(**{**field_values(row), "id": id_}) for row, id_ in zip(rows, ids, strict=True)]
    if form in ("life", "uniform"):
        operation = draw(LIVES if form == "life" else fitting_operations())
        namespace = draw(st.sampled_from(["default", "default", "other"]))
        odd = draw(st.sampled_from([NAMES] * 5 + [ODD_NAMES]))
        return [Delta(draw(odd), operation, namespace) for _ in range(count)]
    operations = any_operations() if form == "odd" else fitting_operations()
    common = st.builds(Delta, NAMES, operations, st.sampled_from(["default", "other"]))
    return [draw(common) for _ in range(count)]


ENCODE_ARGUMENTS: Fields = {
    "deltas": delta_lists(rare=3),
    "origin": st.sampled_from(ORIGINS),
    "base": st.sampled_from([1, 2, 7, (1 << 63) - 3]),
    "epoch": st.sampled_from([1, 1, 2, 0]),
    "clock": st.just(()) | st.lists(DOTS, max_size=2, unique_by=lambda dot: dot.origin),
    "previous": st.integers(0, 3),
    "counters": st.just([5, 7, 8, 11]),  # cut to the number of rows
    "row_offsets": st.just([3, 4, 6, 9]),
    "ack_level": st.sampled_from(list(AckLevel)),
    "priority": st.sampled_from(list(Priority)),
    "hybrid_time": st.sampled_from([0, 1, 1 << 40]),
    "parent_positions": st.just([(0, 0, ParentPosition(1, 2, 3))]),
}
USUAL_ARGUMENTS = ("deltas", "origin", "base")


@st.composite
def batches(draw: Any) -> Batch:
    """Draw an encoded batch: of deltas, of states, or a no-op."""
    form = draw(st.sampled_from(["changes"] * 8 + ["states", "noop"]))
    if form == "states":
        return encode_states(
            draw(st.lists(STATE_ROWS, min_size=1, max_size=3)), hybrid_time=draw(st.integers(0, 2))
        )
    if form == "noop":
        count = draw(st.integers(1, 3))
        return encode_noop(
            origin=ORIGINS[0], base=1, count=count, code=draw(st.sampled_from(list(ErrorCode)))
        )
    rare = [*ENCODE_ARGUMENTS.keys() - set(USUAL_ARGUMENTS)]
    names = draw(st.lists(st.sampled_from(sorted(rare)), max_size=2))
    drawn = {name: draw(ENCODE_ARGUMENTS[name]) for name in dict.fromkeys((*USUAL_ARGUMENTS, *names))}
    count = len(drawn["deltas"])
    for name in ("counters", "row_offsets"):
        if name in drawn:
            drawn[name] = drawn[name][:count]
    if "counters" in drawn:
        drawn["base"] = drawn["counters"][0]
    return encode_batch(**drawn)


STATE_FIELDS: Fields = {
    "alive": st.booleans(),
    "vector": st.none() | floats(st.just(2), VALID_NUMBERS),
    "data": st.none() | st.binary(max_size=3),
    "metadata": st.sampled_from([{}, {"a": 1}]),
    "ignored": st.integers(0, 2),
    "key": st.tuples(st.integers(1, 9), st.sampled_from(ORIGINS), st.integers(1, 9)),
}
STATE_ROW_FIELDS: Fields = {
    "namespace": st.sampled_from(["default", "other"]),
    "vector_id": NAMES,
    "state": st.fixed_dictionaries(STATE_FIELDS).map(
        lambda drawn: VectorState(
            **{
                **drawn,
                "alive": drawn["alive"] and (drawn["vector"] is not None or drawn["data"] is not None),
            }
        )
    ),
    "offset": st.integers(0, 99),
}
STATE_ROWS = st.builds(StateRow, **STATE_ROW_FIELDS)

STAMP_FIELDS: Fields = {
    "lamport": st.sampled_from([0, 1, 1 << 40]),
    "source": st.sampled_from(list(Source)),
    "append_time": st.sampled_from([0, 1, 1 << 50]),
    "previous_crc": st.integers(0, (1 << 32) - 1),
    "body_crc": st.integers(0, (1 << 32) - 1),
    "synced_offset": st.sampled_from([0, 5, 1 << 40]),
    "leader_epoch": st.sampled_from([0, 0, 3]),
    "stream": st.sampled_from([0, 0, 2]),
    "partition": st.sampled_from([0, 0, 1]),
    "known_ids": st.sampled_from(list(KnownIds)),
    "crc": st.just(0),
}

FRAME_FIELDS: Fields = {
    "sequence": st.sampled_from([1] * 16 + [0, 4]),  # the distance from the last frame's last row
    "batch": batches(),
    "stamp": st.sampled_from([None] * 9 + [Stamp(), Stamp(stream=1), Stamp(partition=1)]),
    "ack_wanted": st.sampled_from([True] * 7 + [False]),
}

CURSORS = st.builds(Cursor, st.just(bytes(16)), st.integers(1, 3), st.integers(0, 99))
ACK_FIELDS: Fields = {
    "sequence": st.integers(0, 9),
    "ranges": st.lists(
        st.builds(AckRange, st.just(1), st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=2
    ).map(tuple),
    "processed": st.none() | st.integers(0, 9),
    "cursor": st.none() | CURSORS,
    "credit": st.none() | st.builds(Credit, st.integers(0, 9), st.integers(0, 1 << 40)),
    "correlation_id": st.none() | st.integers(0, 9),
    "response": st.none() | st.just(Fact(FactState.ABSENT, 4)),
    "more": st.booleans(),
    "stream": st.sampled_from([0, 0, 3]),
    "partition": st.sampled_from([0, 0, 3]),
}

SENDER_FIELDS: Fields = {
    "owner": st.sampled_from(["p", "p", "p", "q"]),
    "source": st.sampled_from([Source.LOCAL, Source.LOCAL, Source.IMPORT, Source.REPLICA]),
    "can_split": st.booleans(),
}
WORK_FIELDS: Fields = {
    "batch": batches(),
    "sender": st.builds(Sender, **SENDER_FIELDS),
    "receipt": st.builds(Receipt),
    "lamport": st.none(),  # set for forwarded batches
    "final_refusal": st.none()
    | st.just(Refused(ErrorCode.TOO_LARGE, "too large: send less"))
    | st.builds(InvalidDelta, st.just("id"), st.just("invalid")),
    "duplicates": st.just(0),
    "claims": st.none(),
}

DRAFT_FIELDS: Fields = {
    "deltas": delta_lists(),
    "receipt": st.builds(Receipt),
    "priority": st.sampled_from([Priority.NORMAL] * 6 + list(Priority)),
    "ack_level": st.sampled_from([AckLevel.MEMORY] * 6 + [AckLevel.LOGGED, AckLevel.DURABLE]),
    "source": st.just(Source.LOCAL),
    "after": st.just(()),
    "packed": st.none(),  # the core packs a call before it is offered
}
MATRIX_FIELDS: Fields = {
    "keys": st.lists(NAMES, min_size=1, max_size=4) | st.lists(ODD_NAMES, min_size=1, max_size=4),
    "matrix": floats(st.just(4 * 3), VALID_NUMBERS)
    | floats(st.just(4 * 3), VALID_NUMBERS)
    | floats(st.just(4 * 3), NUMBERS),  # reshaped to the rows
    "namespace": st.sampled_from(["default", "default", "other", "é", ""]),
    "kind": st.sampled_from([Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD]),
    "receipt": st.builds(Receipt),
    "priority": DRAFT_FIELDS["priority"],
    "ack_level": DRAFT_FIELDS["ack_level"],
    "source": st.just(Source.LOCAL),
    "after": st.just(()),
    "ids": st.none(),  # only a job has ids; it offers its columns as frames
    "indices": st.lists(st.sampled_from([0, 1, 1, 2, 65536]), min_size=12, max_size=12),  # for sparse kinds
    "packed": st.none(),
}

DRAWN: dict[Any, Fields] = {
    Operation: OPERATION_FIELDS,
    Delta: DELTA_FIELDS,
    encode_batch: ENCODE_ARGUMENTS,
    VectorState: STATE_FIELDS,
    StateRow: STATE_ROW_FIELDS,
    Stamp: STAMP_FIELDS,
    BatchFrame: FRAME_FIELDS,
    Ack: ACK_FIELDS,
    Sender: SENDER_FIELDS,
    SequencedBatch: WORK_FIELDS,
    Draft: DRAFT_FIELDS,
    MatrixDraft: MATRIX_FIELDS,
}
"""Each type or function whose values reach the core, with one strategy per field or argument."""


def field_names(described: Any) -> set[str]:
    """Return the names of the fields of a dataclass or named tuple, or of a function's arguments."""
    if is_dataclass(described):
        return {field.name for field in fields(described)}
    if hasattr(described, "_fields"):
        return set(described._fields)
    return set(inspect.signature(described).parameters)


def field_values(value: Any) -> dict[str, Any]:
    """Return the fields of a value by name."""
    return {name: getattr(value, name) for name in field_names(type(value))}
