"""Frames received together are taken as runs; frames, credit and errors are as for each one alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.codec import NEED_BYTES, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, create, delete, opaque, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frame_runs import FRAMES_MAX, FrameRun
from delta_prop_wire.frames import Ack, BatchFrame, Credit, DeltaFrame, Heartbeat, Hello, Subscribe, Welcome
from delta_prop_wire.message_rules import Role
from delta_prop_wire.spec import HEADER_BYTES
from tests.native_core import needs_native_core


@pytest.fixture(
    autouse=True, scope="module", params=[pytest.param("native", marks=needs_native_core), "python"]
)
def core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run all tests with each core."""
    with core_mode.switched(request.param):
        yield


OPERATIONS = (opaque(b"x"), opaque(bytes(300)), create([1.0, 2.0]), sparse([1], [2.0]), delete())
KINDS = (
    "homogeneous",
    "homogeneous",
    "homogeneous",
    "homogeneous",
    "gap",
    "other origin",
    "epoch",
    "level",
    "clock",
    "delta",
    "heartbeat",
    "no id",
    "not ASCII",
    "heterogeneous",
    "heterogeneous",
    "heterogeneous",
    "invalid",
)
NAMES = {"no id": "", "not ASCII": "é"}
"""The vector ids of batches of some kinds."""
PIECES = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(OPERATIONS),
    st.integers(1, 4),  # rows
    st.sampled_from(
        [0] * 9 + [1, 2, 3]
    ),  # 1: a bit of the body is flipped; 2: the sequence skips; 3: it falls
    st.booleans(),  # true: an Ack with offsets is requested
)


def open_connection(credit: Credit) -> Connection:
    """Return the server's end of a connection whose hello was answered."""
    connection = Connection(Role.SERVER)
    connection.receive(encode(Subscribe(1, Hello())))
    assert connection.next_event() is not NEED_BYTES
    connection.send(Ack(correlation_id=1, response=Welcome(), credit=credit))
    return connection


def bytes_of(pieces: list[Any]) -> bytes:
    frames, counter, sequence = [], 1, 1
    for kind, operation, row_count, fault, ack_wanted in pieces:
        counter += 3 if kind == "gap" else 0
        sequence = {2: sequence + 5, 3: max(1, sequence - 1)}.get(fault, sequence)
        if kind in ("delta", "heartbeat"):
            frames.append(
                encode(DeltaFrame(sequence, Delta("v", operation)) if kind == "delta" else Heartbeat(1))
            )
            sequence += kind == "delta"
            continue
        deltas = [Delta(NAMES.get(kind, f"key-{row}"), operation) for row in range(row_count)]
        if kind in ("heterogeneous", "invalid"):
            deltas[-1] = Delta("other", create([1.0, math.nan if kind == "invalid" else 2.0]), "other")
        batch = encode_batch(
            deltas,
            origin=9 if kind == "other origin" else 7,
            base=counter,
            epoch=2 if kind == "epoch" else 1,
            clock=(Dot(9, 1),) if kind == "clock" else (),
            ack_level=AckLevel.LOGGED if kind == "level" else AckLevel.MEMORY,
            priority=Priority.NORMAL,
        )
        raw = bytearray(encode(BatchFrame(sequence, batch, ack_wanted=ack_wanted)))
        if fault == 1:
            raw[HEADER_BYTES + 60 + row_count] ^= 4
        frames.append(bytes(raw))
        counter += row_count
        sequence += row_count
    return b"".join(frames)


def receive_all(connection: Connection, raw: bytes, cuts: list[int], *, with_runs: bool) -> list[object]:
    """Return each batch and frame received, the error that ended the connection, and the credit left."""
    received: list[object] = []
    try:
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            connection.receive(raw[start:end])
            while True:
                run = connection.next_run() if with_runs else None
                if run is not None:
                    received += flatten(run)
                    continue
                frame = connection.next_event()
                if frame is NEED_BYTES:
                    break
                if isinstance(frame, BatchFrame):
                    received.append((frame.sequence, bytes(frame.batch.raw), frame.ack_wanted))
                else:
                    received.append(frame)
    except ProtocolError as error:
        received += [error.code, error.message, connection.nack_of(error)]
    return [*received, connection.receive_window.remaining, connection.buffered_bytes]


def flatten(run: FrameRun) -> list[object]:
    frames: list[object] = []
    sequence = run.sequence
    for batch in run.batches:
        frames.append((sequence, bytes(batch.raw), run.ack_wanted))
        sequence += batch.count
    assert run.rows == sequence - run.sequence
    assert run.size == sum(batch.size for batch in run.batches)
    return frames


@given(st.lists(PIECES, max_size=12), st.data())
def test_runs_equal_single_frames(pieces: list[Any], data: st.DataObject) -> None:
    raw = bytes_of(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    credit = data.draw(st.sampled_from([Credit(1_000, 1_000_000), Credit(6, 1_000_000), Credit(1_000, 900)]))
    assert receive_all(open_connection(credit), raw, cuts, with_runs=True) == receive_all(
        open_connection(credit), raw, cuts, with_runs=False
    )


def test_run_ends_where_a_frame_does_not_continue_it() -> None:
    def pieces_of(*kinds: str) -> list[Any]:
        return [(kind, opaque(b"x"), 2, 0, True) for kind in kinds]

    def run_lengths(*kinds: str) -> list[int]:
        connection = open_connection(Credit(10_000, 10_000_000))
        connection.receive(bytes_of(pieces_of(*kinds)))
        batch_counts = []
        while (run := connection.next_run()) is not None:
            batch_counts.append(len(run.batches))
        return batch_counts

    assert run_lengths("homogeneous", "homogeneous", "homogeneous") == [3]
    assert run_lengths("homogeneous", "gap", "homogeneous") == [1, 2]
    assert run_lengths("homogeneous", "other origin", "homogeneous") == [1, 1, 1]
    assert run_lengths("homogeneous", "level", "level") == [1, 2]
    assert run_lengths("homogeneous", "homogeneous", "clock", "homogeneous") == [2]
    assert run_lengths("heartbeat", "homogeneous") == []
    assert run_lengths("homogeneous", "heterogeneous", "heterogeneous", "homogeneous", "heterogeneous") == [5]
    assert run_lengths("heterogeneous", "heterogeneous", "invalid", "heterogeneous") == [2]
    assert run_lengths(*["homogeneous"] * (FRAMES_MAX + 3)) == [FRAMES_MAX, 3]


@pytest.mark.parametrize("is_split", [False, True])
def test_run_whose_sequence_does_not_rise_is_refused(is_split: bool) -> None:
    connection = open_connection(Credit(10_000, 10_000_000))
    raw = bytes_of([("homogeneous", opaque(b"x"), 2, fault, True) for fault in (0, 0, 3)])
    frame_size = len(raw) // 3
    if is_split:  # a run then begins with the frame whose sequence falls
        connection.receive(raw[: 2 * frame_size])
        raw = raw[2 * frame_size :]
    else:
        connection.receive(raw)
        raw = b""
    run = connection.next_run()
    assert run is not None
    assert (run.sequence, run.rows) == (1, 4)
    connection.receive(raw)
    assert connection.next_run() is None
    with pytest.raises(ProtocolError, match="sequence 4 is not above 4,"):
        connection.next_event()


def test_batch_of_a_run_owns_only_its_bytes() -> None:
    connection = open_connection(Credit(10_000, 10_000_000))
    connection.receive(bytes_of([("homogeneous", opaque(b"x"), 2, 0, True)] * 3))
    run = connection.next_run()
    assert run is not None
    assert all(type(batch.raw) is bytes and batch.raw == Batch(batch.raw).raw for batch in run.batches)


def test_client_or_unopened_connection_takes_no_runs() -> None:
    raw = bytes_of([("homogeneous", opaque(b"x"), 2, 0, True)])
    for connection in (Connection(Role.SERVER), Connection(Role.CLIENT)):
        connection.receive(raw)
        assert connection.next_run() is None


def test_flipped_bit_of_header_or_stamp_ends_a_run() -> None:
    delta, frame_count = Delta("a", delete()), 2
    intact = b"".join(
        encode(BatchFrame(number, encode_batch([delta], origin=7, base=number)))
        for number in range(1, 1 + frame_count)
    )
    size = len(intact) // frame_count
    assert len(batches_in_runs(intact)) == frame_count
    for bit in range(8 * 64):
        raw = bytearray(intact)
        raw[size + bit // 8] ^= 1 << bit % 8
        assert len(batches_in_runs(bytes(raw))) == 1, bit


def batches_in_runs(raw: bytes) -> list[Batch]:
    connection = open_connection(Credit(100, 100_000))
    connection.receive(raw)
    batches: list[Batch] = []
    while (run := connection.next_run()) is not None:
        batches += run.batches
    return batches
