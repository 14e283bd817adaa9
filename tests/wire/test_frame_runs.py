"""Frames received together are decoded as runs: same frames, credit and errors as one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire import frame_runs
from delta_prop_wire.batch import Batch
from delta_prop_wire.body_checks import homogeneous_body_is_valid
from delta_prop_wire.codec import NEED_BYTES, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.delta import AckLevel, Delta, Dot, Priority, create, delete, opaque, sparse
from delta_prop_wire.encode import encode_batch
from delta_prop_wire.errors import ProtocolError
from delta_prop_wire.frame_runs import FRAMES_MAX, FrameRun
from delta_prop_wire.frames import Ack, BatchFrame, Credit, DeltaFrame, Heartbeat, Hello, Subscribe, Welcome
from delta_prop_wire.message_rules import Role
from delta_prop_wire.spec import HEADER_BYTES
from delta_prop_wire.stamp import Stamp

OPERATIONS = (opaque(b"x"), opaque(bytes(300)), create([1.0, 2.0]), sparse([1], [2.0]), delete())
KINDS = (
    "plain",
    "plain",
    "plain",
    "plain",
    "gap",
    "other origin",
    "epoch",
    "level",
    "clock",
    "delta",
    "beat",
    "no id",
    "letters",
    "mixed",
    "mixed",
    "mixed",
    "unsound",
)
NAMES = {"no id": "", "letters": "é"}
"""Vector ids, by kind, whose batches are in no run."""
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
    found, counter, sequence = [], 1, 1
    for kind, operation, rows, fault, wanted in pieces:
        counter += 3 if kind == "gap" else 0
        sequence = {2: sequence + 5, 3: max(1, sequence - 1)}.get(fault, sequence)
        if kind in ("stamped", "delta", "beat"):
            found.append(
                encode(DeltaFrame(sequence, Delta("v", operation)) if kind == "delta" else Heartbeat(1))
            )
            sequence += kind == "delta"
            continue
        deltas = [Delta(NAMES.get(kind, f"key-{row}"), operation) for row in range(rows)]
        if kind in ("mixed", "unsound"):
            deltas[-1] = Delta("other", create([1.0, math.nan if kind == "unsound" else 2.0]), "other")
        batch = encode_batch(
            deltas,
            origin=9 if kind == "other origin" else 7,
            base=counter,
            epoch=2 if kind == "epoch" else 1,
            clock=(Dot(9, 1),) if kind == "clock" else (),
            ack_level=AckLevel.LOGGED if kind == "level" else AckLevel.MEMORY,
            priority=Priority.NORMAL,
        )
        raw = bytearray(
            encode(
                BatchFrame(
                    sequence, batch, Stamp(9, body_crc=batch.crc) if kind == "stamped" else None, wanted
                )
            )
        )
        if fault == 1:
            raw[HEADER_BYTES + 60 + rows] ^= 4
        found.append(bytes(raw))
        counter += rows
        sequence += rows
    return b"".join(found)


def receive_all(connection: Connection, raw: bytes, cuts: list[int], *, together: bool) -> list[object]:
    """Return each batch and frame received, the error that ended the connection, and the credit left."""
    found: list[object] = []
    try:
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            connection.receive(raw[begin:end])
            while True:
                run = connection.next_run() if together else None
                if run is not None:
                    found += flatten(run)
                    continue
                frame = connection.next_event()
                if frame is NEED_BYTES:
                    break
                if isinstance(frame, BatchFrame):
                    found.append((frame.sequence, bytes(frame.batch.raw), frame.ack_wanted))
                else:
                    found.append(frame)
    except ProtocolError as error:
        found += [error.code, error.message, connection.nack_of(error)]
    return [*found, connection.receive_window.remaining, connection.buffered_bytes]


def flatten(run: FrameRun) -> list[object]:
    found: list[object] = []
    sequence = run.sequence
    for batch in run.batches:
        found.append((sequence, bytes(batch.raw), run.ack_wanted))
        sequence += batch.count
    assert run.rows == sequence - run.sequence
    assert run.size == sum(batch.size for batch in run.batches)
    return found


@given(st.lists(PIECES, max_size=12), st.data())
def test_runs_equal_single_frames(pieces: list[Any], data: st.DataObject) -> None:
    raw = bytes_of(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=4)))
    credit = data.draw(st.sampled_from([Credit(1_000, 1_000_000), Credit(6, 1_000_000), Credit(1_000, 900)]))
    assert receive_all(open_connection(credit), raw, cuts, together=True) == receive_all(
        open_connection(credit), raw, cuts, together=False
    )


def test_run_ends_where_a_frame_does_not_continue_it() -> None:
    def pieces_of(*kinds: str) -> list[Any]:
        return [(kind, opaque(b"x"), 2, 0, True) for kind in kinds]

    def lengths(*kinds: str) -> list[int]:
        connection = open_connection(Credit(10_000, 10_000_000))
        connection.receive(bytes_of(pieces_of(*kinds)))
        found = []
        while (run := connection.next_run()) is not None:
            found.append(len(run.batches))
        return found

    assert lengths("plain", "plain", "plain") == [3]
    assert lengths("plain", "gap", "plain") == [1, 2]
    assert lengths("plain", "other origin", "plain") == [1, 1, 1]
    assert lengths("plain", "level", "level") == [1, 2]
    assert lengths("plain", "plain", "clock", "plain") == [2]
    assert lengths("beat", "plain") == []
    assert lengths("plain", "mixed", "mixed", "plain", "mixed") == [5]
    assert lengths("mixed", "mixed", "unsound", "mixed") == [2]
    assert lengths(*["plain"] * (FRAMES_MAX + 3)) == [FRAMES_MAX, 3]


@pytest.mark.parametrize("split", [False, True])
def test_run_whose_sequence_does_not_rise_is_refused(split: bool) -> None:
    connection = open_connection(Credit(10_000, 10_000_000))
    raw = bytes_of([("plain", opaque(b"x"), 2, fault, True) for fault in (0, 0, 3)])
    one = len(raw) // 3
    if split:  # a run then begins with the frame whose sequence falls
        connection.receive(raw[: 2 * one])
        raw = raw[2 * one :]
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


def test_frames_outside_runs_are_not_checked_repeatedly() -> None:
    frames = 40
    raw = bytes_of([("no id", opaque(b"x"), 1, 0, True)] * frames)
    connection, checked = open_connection(Credit(10_000, 10_000_000)), 0

    def counting_check(batch: Batch) -> bool:
        nonlocal checked
        checked += 1
        return homogeneous_body_is_valid(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_runs, "homogeneous_body_is_valid", counting_check)
        connection.receive(raw)
        for _ in range(frames):
            assert connection.next_run() is None
            assert isinstance(connection.next_event(), BatchFrame)
    assert checked <= 2 * frames + 1


def test_batch_of_a_run_owns_only_its_bytes() -> None:
    connection = open_connection(Credit(10_000, 10_000_000))
    connection.receive(bytes_of([("plain", opaque(b"x"), 2, 0, True)] * 3))
    run = connection.next_run()
    assert run is not None
    assert all(type(batch.raw) is bytes and batch.raw == Batch(batch.raw).raw for batch in run.batches)


def test_client_or_unopened_connection_takes_no_runs() -> None:
    raw = bytes_of([("plain", opaque(b"x"), 2, 0, True)])
    for connection in (Connection(Role.SERVER), Connection(Role.CLIENT)):
        connection.receive(raw)
        assert connection.next_run() is None


def test_flipped_bit_of_header_or_stamp_ends_a_run() -> None:
    delta, frames = Delta("a", delete()), 2
    intact = b"".join(
        encode(BatchFrame(at, encode_batch([delta], origin=7, base=at))) for at in range(1, 1 + frames)
    )
    size = len(intact) // frames
    assert len(batches_in_runs(intact)) == frames
    for bit in range(8 * 64):
        raw = bytearray(intact)
        raw[size + bit // 8] ^= 1 << bit % 8
        assert len(batches_in_runs(bytes(raw))) == 1, bit


def batches_in_runs(raw: bytes) -> list[Batch]:
    connection = open_connection(Credit(100, 100_000))
    connection.receive(raw)
    found: list[Batch] = []
    while (run := connection.next_run()) is not None:
        found += run.batches
    return found
