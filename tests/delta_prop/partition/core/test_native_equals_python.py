"""The native core gives what its twin gives: the same bytes, heads, offsets and refusals.

The values are drawn field by field (`drawn.py`). A field without a strategy fails the first test.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from delta_prop.api.publishing import RecordAccumulator
from delta_prop.calls.argument_checks import check_deltas
from delta_prop.calls.receipt import Receipt
from delta_prop.partition.core.coalesced_draft import can_share_batch, draft_from_columns
from delta_prop.partition.ingest.work import Draft, MatrixDraft, Sender, SequencedBatch
from delta_prop.platform.tick_callbacks import TickCallbacks
from delta_prop_wire.batch import Batch, LoggedBatch
from delta_prop_wire.body_checks import parse_batch
from delta_prop_wire.codec import NEED_BYTES, encode
from delta_prop_wire.connection import Connection
from delta_prop_wire.control import pack_control, unpack_control
from delta_prop_wire.core import core_mode
from delta_prop_wire.crc import crc32c
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Operation, Priority
from delta_prop_wire.encode import encode_batch, encode_opaque, encode_vectors
from delta_prop_wire.errors import DeltaPropError, ProtocolError, Refused, UsageError
from delta_prop_wire.frames import Ack, BatchFrame, Credit, Hello, Subscribe, Welcome
from delta_prop_wire.header import unpack_header
from delta_prop_wire.layout import Column
from delta_prop_wire.lazy import lazy
from delta_prop_wire.message_rules import Role
from delta_prop_wire.spec import CRC_BYTES, Flag, FrameType
from delta_prop_wire.stamp import Stamp, pack_logged_head, unpack_stamp
from delta_prop_wire.validate import is_opaque_only, validate_batch, validate_delta
from tests.delta_prop.partition.core.drawn import (
    ACK_FIELDS,
    DELTA_FIELDS,
    DRAFT_FIELDS,
    DRAWN,
    FRAME_FIELDS,
    MATRIX_FIELDS,
    NAMES,
    ORIGINS,
    STAMP_FIELDS,
    WORK_FIELDS,
    batches,
    delta_lists,
    deltas,
    field_names,
    field_values,
)
from tests.delta_prop.partition.pipeline_bench import Bench
from tests.native_core import needs_native_core

pytestmark = needs_native_core
MODES = {"native": "native", "python": "python", "alone": "python"}
"""The cores that are compared; the last one with each frame and each call alone."""


@pytest.mark.parametrize("described", DRAWN, ids=lambda described: described.__name__)
def test_each_field_has_a_strategy(described: Any) -> None:
    assert field_names(described) == DRAWN[described].keys()


def test_each_column_is_drawn() -> None:
    drawn_columns = 0

    @settings(max_examples=600, phases=[Phase.generate])
    @given(batches())
    def note_columns(batch: Batch) -> None:
        nonlocal drawn_columns
        drawn_columns |= batch.columns_mask

    note_columns()
    assert [column.name for column in Column if not drawn_columns >> column & 1] == []


# --- bodies

DECODING_NAMES = {"raw", "decoded", "validated", "key_bytes_bound", "__dict__"}
"""Attributes of a batch that say how it was decoded, not what it holds."""
STATE_NAMES = {"state_keys"}


def batch_names() -> list[str]:
    """Return the names of all values of a batch: slots, decoded columns, properties, annotations."""
    names = {*Batch.__slots__, *Batch.__annotations__}
    names |= {name for name, value in vars(Batch).items() if isinstance(value, lazy | property)}
    return sorted(names - DECODING_NAMES)


def plain(value: Any) -> Any:
    """Return a value that compares by its content."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, Operation):
        return value.kind, plain(value.values), plain(value.indices), value.data
    return value


def view(batch: Batch) -> dict[str, Any]:
    """Return all that a batch holds."""
    names = [name for name in batch_names() if name not in STATE_NAMES or batch.is_state]
    held = {name: plain(getattr(batch, name)) for name in names}
    if not batch.is_control and not batch.is_state:
        held["operations"] = [plain(batch.operation(row)) for row in range(batch.count)]
    return held | {"raw": bytes(batch.raw), "content": batch.content_crc()}


def outcome_of(refusal: DeltaPropError) -> tuple[Any, ...]:
    """Return all that an error says."""
    if isinstance(refusal, ProtocolError):
        return type(refusal).__name__, refusal.code, refusal.message
    if isinstance(refusal, Refused):
        facts = {
            name: getattr(refusal, name) for name in ("code", "message", "row", "field", "retry_after_ms")
        }
        return type(refusal).__name__, facts, refusal.details
    return type(refusal).__name__, str(refusal)


def read(body: bytes) -> list[Any]:
    try:
        batch = parse_batch(body)
    except ProtocolError as error:
        return [outcome_of(error)]
    try:
        validate_batch(batch)
    except Refused as refusal:
        return [outcome_of(refusal), view(batch)]
    return [None, view(batch)]


WORDS = st.sampled_from([0, 1, 2, 65_536, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF])
"""Words that are wrong in some columns: an index, a number, an end, a size."""


@st.composite
def bodies(draw: Any) -> tuple[bytes, bytes]:
    """Draw the body of a batch, and the same with some bytes changed under a valid checksum."""
    intact = bytes(draw(batches()).raw)
    body = bytearray(intact)
    for place, byte in draw(
        st.just([]) | st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=1)
    ):
        body[int(place * (len(body) - CRC_BYTES))] = byte
    bounds = [*Batch(intact).column_bounds.values()]
    for place, word in draw(st.lists(st.tuples(st.floats(0, 0.999), WORDS), max_size=2)):
        first, end = draw(st.sampled_from(bounds))
        start = first + 4 * int(place * (end - first) / 4)
        body[start : start + 4] = word.to_bytes(4, "little")
    body[-CRC_BYTES:] = crc32c(bytes(body[:-CRC_BYTES])).to_bytes(CRC_BYTES, "little")
    return intact, bytes(body)


def body_of(*rows: Delta) -> bytes:
    return bytes(encode_batch(rows, origin=ORIGINS[0], base=1).raw)


def sparse_row(index: int) -> Delta:
    return Delta("a", Operation(Kind.SPARSE, np.ones(1, np.float32), np.array([index], np.uint32)))


FACT, TWO_FACTORS = Operation(Kind.OPAQUE, data=b"x"), Operation(Kind.SCALE, np.ones(2, np.float32))


@settings(max_examples=100)
@given(bodies())
@example((body_of(sparse_row(1)), body_of(sparse_row(65_536))))
@example((body_of(sparse_row(1)), body_of(Delta("a", TWO_FACTORS), Delta("b", FACT))))
def test_bodies_are_read_equally(drawn: tuple[bytes, bytes]) -> None:
    with core_mode.switched("python"):
        intact, changed = map(read, drawn)
    for _ in range(3):  # a template is learned from the second body
        assert read(drawn[0]) == intact
    assert read(drawn[1]) == changed


@given(deltas(rare=2))
def test_deltas_are_validated_equally(delta: Delta) -> None:
    def check() -> Any:
        try:
            validate_delta(delta)
        except Refused as refusal:
            return outcome_of(refusal)
        return None

    with core_mode.switched("python"):
        expected = check()
    assert check() == expected


# --- encoders

HEADER = st.fixed_dictionaries(
    {
        "origin": st.sampled_from(ORIGINS),
        "base": st.integers(1, 1 << 40),
        "epoch": st.sampled_from([1, 3]),
        "ack_level": st.sampled_from(list(AckLevel)),
        "priority": st.sampled_from(list(Priority)),
    }
)


OPAQUE_DELTAS = st.builds(
    Delta,
    NAMES,
    st.just(Operation(Kind.OPAQUE, data=b"x")),
    timestamp=DELTA_FIELDS["timestamp"],
    source=DELTA_FIELDS["source"],
)


@given(st.lists(OPAQUE_DELTAS, min_size=1, max_size=4), HEADER)
def test_opaque_deltas_are_encoded_equally(rows: list[Delta], header: Any) -> None:
    assert all(map(is_opaque_only, rows))
    expected, batch = encode_batch(rows, **header), encode_opaque(rows, **header)
    assert (batch is None) == any(row.timestamp for row in rows)
    assert batch is None or view(batch) == view(expected)


@given(delta_lists(), HEADER, st.sampled_from([(), (Dot(7, 3),)]))
def test_deltas_are_encoded_equally(rows: list[Delta], header: Any, clock: Any) -> None:
    with core_mode.switched("python"):
        expected = view(encode_batch(rows, clock=clock, **header))
    batch = encode_batch(rows, clock=clock, **header)
    assert view(batch) == expected
    assert not batch.validated or parse_batch(batch.raw).validated or batch.dimension == 0


@given(st.fixed_dictionaries(MATRIX_FIELDS), HEADER)
def test_columns_are_encoded_equally(fields: Any, header: Any) -> None:
    draft = matrix_draft(fields)

    def encode_draft() -> dict[str, Any]:
        return view(
            encode_vectors(
                draft.keys,
                draft.matrix,
                indices=draft.indices,
                namespace=draft.namespace,
                kind=draft.kind,
                **header,
            )
        )

    with core_mode.switched("python"):
        expected = encode_draft()
    assert encode_draft() == expected


def unpack_head(raw: memoryview) -> tuple[int, int, Stamp] | None:
    """Read the head of a logged frame by its parts; None if it is invalid or of a compressed frame."""
    try:
        header, stamp = unpack_header(raw[:16]), unpack_stamp(raw[16:], raw[:16])
    except ProtocolError:
        return None
    is_uncompressed = header.type is FrameType.BATCH and not header.flags & Flag.COMPRESSED
    return (header.sequence, header.length, stamp) if is_uncompressed else None


@given(
    batches(),
    st.integers(0, 1 << 40),
    st.fixed_dictionaries(STAMP_FIELDS),
    st.lists(st.integers(0, 511), max_size=1),
)
def test_heads_of_the_log_are_packed_and_read_equally(
    batch: Batch, offset: int, fields: Any, flips: list[int]
) -> None:
    def pack() -> tuple[bytes, int]:
        return pack_logged_head(
            batch,
            offset,
            lamport=fields["lamport"],
            source=fields["source"],
            time=fields["append_time"],
            previous_crc=fields["previous_crc"],
            synced_offset=fields["synced_offset"],
            known_ids=fields["known_ids"],
        )

    with core_mode.switched("python"):
        expected = pack()
    assert pack() == expected
    raws = [bytearray(expected[0]), bytearray(encode(BatchFrame(offset, batch, Stamp(**fields)))[:64])]
    for raw in raws:
        for bit in flips:
            raw[bit // 8] ^= 1 << bit % 8
        assert core_mode.core.unpack_logged_head(bytes(raw)) == unpack_head(memoryview(raw))


@given(st.builds(Ack, **ACK_FIELDS))
def test_acks_are_packed_and_read_equally(ack: Ack) -> None:
    def send() -> bytes | str:
        connection = open_connection(Credit(10, 10_000))
        try:
            return connection.send(ack)
        except UsageError as error:
            return str(error)

    with core_mode.switched("python"):
        expected, sent = pack_control(ack), send()
        received = unpack_control(expected[0], ack.sequence, expected[1])
    assert (pack_control(ack), send()) == (expected, sent)
    assert unpack_control(expected[0], ack.sequence, expected[1]) == received


# --- from the bytes of a producer to the log


def open_connection(credit: Credit) -> Connection:
    """Return the server's end of a connection whose hello was answered."""
    connection = Connection(Role.SERVER)
    connection.receive(encode(Subscribe(1, Hello())))
    assert connection.next_event() is not NEED_BYTES
    connection.send(Ack(correlation_id=1, response=Welcome(), credit=credit))
    return connection


def new_bench(mode: str, log_deltas_max: int = 10_000) -> Bench:
    """Return a pipeline that knows two producers and a few vectors."""
    bench = Bench(pending_deltas_max=20, log_deltas_max=log_deltas_max)
    if mode == "alone":
        pipeline: Any = bench.pipeline
        pipeline.offer_run = pipeline.offer_coalesced = pipeline._try_fast_path = lambda *_: 0
    for origin, owner in zip(ORIGINS, "pq", strict=True):
        bench.pipeline.hello(origin >> 20, owner, bench.now)
        bench.owners[origin] = owner
    for namespace in ("default", "other"):
        for key in ("a", "b", "c", "key-4"):
            bench.publish(Delta(key, Operation(Kind.CREATE, np.ones(2, np.float32)), namespace))
    return bench


def state_of(bench: Bench) -> list[Any]:
    """Return the log and all state that moves with it."""
    vectors, pipeline = bench.vectors, bench.pipeline
    saved = vectors.save()
    heads = {name: [*vectors.copy_heads(name, 1_000)] for name in sorted(saved.namespaces)}
    heads = {name: sorted(zip(*chunks[0], strict=True)) if chunks else [] for name, chunks in heads.items()}
    outcomes = [pipeline.outcome(origin, counter) for origin in ORIGINS for counter in range(1, 12)]
    return [
        saved,
        heads,
        vectors.concurrent_updates,
        vectors.head_count,
        pipeline.appender.counters,
        pipeline.appender.lamport,
        pipeline.orderer.watermarks,
        pipeline.orderer.statistics(),
        pipeline.refused,
        bench.log.statistics().refused,
        outcomes,
    ]


def log_of(bench: Bench) -> list[Any]:
    """Return each batch of the log."""
    names = field_names(LoggedBatch) - {"batch"}
    return [
        ({name: getattr(logged, name) for name in names}, bytes(logged.batch.raw)) for logged in bench.routed
    ]


def report(receipt: Receipt) -> Any:
    """Return the outcome of a receipt."""
    refusal = receipt.refusal()
    if refusal is not None:
        return outcome_of(refusal)
    return receipt.state, receipt.result() if receipt.acknowledged else None


def report_rows(receipt: Receipt) -> list[Any]:
    """Return the outcome of each row, or the one refusal."""
    if not receipt.acknowledged:
        return [report(receipt)]
    ack = receipt.result()
    return [(*row, ack.level) for row in ack.row_acks()]


def receive(bench: Bench, connection: Connection, raw: bytes, cuts: list[int]) -> list[Any]:
    """Take what a producer sent, as the server does: runs as far as they go, then single frames."""
    outcomes: list[tuple[int, Receipt]] = []
    errors: list[Any] = []
    pipeline = bench.pipeline
    try:
        for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            connection.receive(raw[start:end])
            while True:
                run = connection.next_run()
                if run is not None:
                    receipt = Receipt()
                    sender = Sender(bench.owners.get(run.batches[0].origin, "x"))
                    taken = pipeline.offer_run(run, sender, partial(_give, receipt), bench.now)
                    outcomes += [(run.sequence, receipt)] if taken else []
                    sequence = run.sequence + sum(batch.count for batch in run.batches[:taken])
                    for batch in run.batches[taken:]:
                        outcomes.append((sequence, bench.send(batch)))
                        sequence += batch.count
                    continue
                frame = connection.next_event()
                if frame is NEED_BYTES:
                    break
                assert isinstance(frame, BatchFrame)
                outcomes.append((frame.sequence, bench.send(frame.batch)))
    except ProtocolError as error:
        errors = [outcome_of(error), connection.nack_of(error)]
    rows: dict[int, Any] = {}
    for sequence, receipt in outcomes:
        rows |= {sequence + row: outcome for row, outcome in enumerate(report_rows(receipt))}
    return [rows, errors, connection.receive_window.remaining, connection.buffered_bytes]


def _give(receipt: Receipt, _: int) -> Receipt:
    return receipt


@st.composite
def frames(draw: Any) -> bytes:
    """Draw the frames of two producers: mostly each continues the last one of its origin."""
    counters, sequence, raw = dict.fromkeys(ORIGINS, 1), 1, b""
    for _ in range(draw(st.integers(1, 8))):
        fields = {name: draw(strategy) for name, strategy in FRAME_FIELDS.items() if name != "batch"}
        if draw(st.sampled_from([True] * 9 + [False])):
            origin = draw(st.sampled_from([ORIGINS[0]] * 3 + [ORIGINS[1]]))
            rows = draw(delta_lists(rare=draw(st.sampled_from([0, 0, 0, 1]))))
            base = max(counters[origin] + draw(st.sampled_from([0] * 7 + [1, -1])), 1)
            batch = encode_batch(rows, origin=origin, base=base, epoch=draw(st.sampled_from([1] * 5 + [2])))
            counters[origin] = base + len(rows)
        else:
            batch = draw(FRAME_FIELDS["batch"])
        sequence += 0 if fields["sequence"] == 1 else fields["sequence"] or -1
        frame = bytearray(encode(BatchFrame(max(sequence, 0), batch, fields["stamp"], fields["ack_wanted"])))
        if draw(st.sampled_from([False] * 31 + [True])):
            frame[draw(st.integers(0, len(frame) - 1))] ^= 4
        raw += bytes(frame)
        sequence += batch.count
    return raw


@settings(max_examples=150)
@given(frames(), st.data())
def test_frames_end_equally_in_log_and_state(raw: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=3)))
    credit = data.draw(st.sampled_from([Credit(1_000, 1_000_000), Credit(1_000, 1_000_000), Credit(5, 900)]))
    log_deltas_max = data.draw(st.sampled_from([10_000, 10_000, 14]))
    assert_frames_end_equally(raw, cuts, credit, log_deltas_max)


def assert_frames_end_equally(raw: bytes, cuts: list[int], credit: Credit, log_deltas_max: int) -> None:
    results = []
    for mode, core in MODES.items():
        with core_mode.switched(core):
            bench = new_bench(mode, log_deltas_max)
            received = receive(bench, open_connection(credit), raw, cuts)
            results.append([received, log_of(bench), state_of(bench)])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "sent",
    [
        [(0, 1, 1), (0, 2, 2)],  # the epoch changes within what would be one run
        [(0, 1, 1), (1, 1, 1), (1, 2, 1), (0, 2, 1), (0, 3, 1), (1, 3, 1)],  # two producers change a vector
    ],
)
def test_runs_of_two_epochs_or_producers_end_equally(sent: list[tuple[int, int, int]]) -> None:
    raw = b"".join(
        encode(
            BatchFrame(
                number,
                encode_batch([sparse_row(1)], origin=ORIGINS[sender], base=counter, epoch=epoch),
                ack_wanted=True,
            )
        )
        for number, (sender, counter, epoch) in enumerate(sent, start=2)
    )
    assert_frames_end_equally(raw, [], Credit(100, 100_000), 10_000)


@given(st.lists(st.tuples(st.fixed_dictionaries(WORK_FIELDS), st.integers(0, 2)), max_size=6))
def test_single_batches_end_equally(works: list[Any]) -> None:
    results = []
    for mode, core in MODES.items():
        with core_mode.switched(core):
            bench = new_bench(mode)
            receipts = []
            for fields, lamport in works:
                work = SequencedBatch(**{**fields, "receipt": Receipt()})
                if work.is_forwarded:
                    work.lamport = 100 + lamport
                receipts.append(bench.pipeline.offer(work, bench.now))
            results.append([[*map(report, receipts)], log_of(bench), state_of(bench)])
    assert results[0] == results[1] == results[2]


# --- from the calls of a program to the log


def matrix_draft(fields: Any) -> MatrixDraft:
    """Return the draft of drawn columns."""
    count = len(fields["keys"])
    is_sparse = fields["kind"] in (Kind.SPARSE, Kind.SPARSE_ADD)
    indices = np.array(fields["indices"], np.uint32).reshape(4, 3)[:count] if is_sparse else None
    matrix = fields["matrix"].reshape(4, 3)[:count, : fields["indices"][0] % 3 + 1]
    if indices is not None:
        indices = np.ascontiguousarray(indices[:, : matrix.shape[1]])
    return MatrixDraft(
        **{**fields, "matrix": np.ascontiguousarray(matrix), "indices": indices, "receipt": Receipt()}
    )


def call_of(fields: dict[str, Any]) -> Draft | MatrixDraft | None:
    """Return the call of drawn fields, as a propagator makes it; None if it refuses it or sends it alone."""
    try:
        if "keys" in fields:
            draft = matrix_draft(fields)
            return draft_from_columns(
                draft.keys,
                draft.matrix,
                draft.indices,
                namespace=draft.namespace,
                kind=draft.kind,
                priority=draft.priority,
                ack_level=draft.ack_level,
            )
        delta = fields["deltas"][0]
        packed = core_mode.core.pack_delta(delta)
        if packed is None:
            check_deltas([delta])
    except (Refused, UsageError):
        return None
    call = {**fields, "deltas": (delta,), "receipt": Receipt(), "priority": delta.priority, "packed": packed}
    return Draft(**call) if can_share_batch(delta) else None


def run_calls(mode: str, ticks: list[list[dict[str, Any]]]) -> tuple[list[Any], Bench]:
    bench = new_bench(mode)
    partition = SimpleNamespace(
        pipeline=bench.pipeline,
        tick_callbacks=TickCallbacks(lambda: bench.now),
        world=SimpleNamespace(clock=SimpleNamespace(now=lambda: bench.now), call_soon=None),
    )
    accumulator, receipts = RecordAccumulator(partition), []  # type: ignore[arg-type]
    for calls in ticks:
        for fields in calls:
            call = call_of(fields)
            if call is not None:
                accumulator.offer(call)
                receipts.append(call.receipt)
        accumulator.send()
    return [*map(report, receipts)], bench


CALLS = st.fixed_dictionaries(DRAFT_FIELDS) | st.fixed_dictionaries(MATRIX_FIELDS)


@given(st.lists(st.tuples(CALLS).map(list), min_size=1, max_size=5))
def test_single_calls_end_equally(ticks: list[list[dict[str, Any]]]) -> None:
    results = []
    for mode, core in MODES.items():
        with core_mode.switched(core):
            outcomes, bench = run_calls(mode, ticks)
            results.append([outcomes, log_of(bench), state_of(bench)])
    assert results[0] == results[1] == results[2]


def rows_of(bench: Bench) -> list[Any]:
    """Return each row of the log, whichever batch holds it; rows of a batch share its time."""
    names = field_names(Delta) - {"timestamp", "operation", "clock"}
    return [
        (
            logged.offset + row,
            logged.key(row),
            logged.batch.ack_level,
            plain(logged.batch.operation(row)),
            {name: field_values(logged.batch.delta(row, logged.source))[name] for name in names},
        )
        for logged in bench.routed
        for row in range(logged.count)
    ]


@given(st.lists(st.lists(CALLS, min_size=1, max_size=5), min_size=1, max_size=3))
def test_calls_of_a_tick_end_equally(ticks: list[list[dict[str, Any]]]) -> None:
    results = []
    for mode, core in MODES.items():
        with core_mode.switched(core):
            outcomes, bench = run_calls(mode, ticks)
            results.append([outcomes, rows_of(bench), state_of(bench)])
    assert results[0] == results[1] == results[2]
