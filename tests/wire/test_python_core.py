"""The twin is complete: without the native core it encodes, reads, validates and frames the same."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from delta_prop_wire.core import core_mode
from delta_prop_wire.delta import Delta, create, delete, opaque, sparse

PROGRAM = """
import sys
sys.modules["delta_prop_core"] = None  # an import of it fails
from tests.wire.test_python_core import digest
from delta_prop_wire.core import core_mode
assert not core_mode.is_native
print(digest())
"""
ROWS = [
    [Delta("a", create([1, 2]))],
    [Delta(f"key-{row}", sparse([row], [1.5])) for row in range(100)],
    [Delta("a", opaque(b"x"), "other"), Delta("é", delete())],
    [Delta("a", opaque(b"x"), topics=("t",), metadata={"a": 1})],
]


def digest() -> str:
    """Return a digest of frames, and of what is read from them."""
    import numpy as np

    from delta_prop_wire.body_checks import parse_batch
    from delta_prop_wire.codec import NEED_BYTES, encode
    from delta_prop_wire.connection import Connection
    from delta_prop_wire.cursor import Cursor
    from delta_prop_wire.delta import Source
    from delta_prop_wire.encode import encode_batch, encode_vectors
    from delta_prop_wire.frames import Ack, AckRange, BatchFrame, Credit, Hello, Subscribe, Welcome
    from delta_prop_wire.message_rules import Role
    from delta_prop_wire.slicing import deltas_of
    from delta_prop_wire.stamp import pack_logged_head
    from delta_prop_wire.validate import validate_batch, validate_delta

    connection = Connection(Role.SERVER)
    connection.receive(encode(Subscribe(1, Hello())))
    parts: list[object] = [connection.next_event()]
    parts.append(connection.send(Ack(correlation_id=1, response=Welcome(), credit=Credit(1_000, 1_000_000))))
    sequence = 1
    for rows in ROWS:
        batch = encode_batch(rows, origin=1 << 20, base=sequence)
        connection.receive(encode(BatchFrame(sequence, batch, ack_wanted=True)))
        run = connection.next_run()
        if run is None:
            frame = connection.next_event()
            assert isinstance(frame, BatchFrame)
            received = [frame.batch]
        else:
            received = run.batches
        assert connection.next_event() is NEED_BYTES
        for body in (batch.raw, *(each.raw for each in received)):
            parsed = parse_batch(body)
            validate_batch(parsed)
            for delta in deltas_of(parsed):
                validate_delta(delta)
                parts.append((delta.vector_id, delta.namespace, delta.operation.kind, delta.topics))
            head = {"lamport": 3, "source": Source.LOCAL, "time": 4, "previous_crc": 5, "synced_offset": 6}
            parts += [bytes(parsed.raw), pack_logged_head(parsed, 9, **head)]  # type: ignore[arg-type]
        sequence += len(rows)
    vectors = encode_vectors(["a", "b"], np.ones((2, 3), np.float32), namespace="n", origin=1, base=1)
    acks = [Ack(2, (AckRange(1, 2, 3),), credit=Credit(1, 2)), Ack(2, cursor=Cursor(bytes(16), 1, 2))]
    parts += [bytes(vectors.raw), *map(connection.send, acks)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def test_general_modules_work_without_the_native_core() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == digest(), done.stderr
    with core_mode.switched("python"):
        assert digest() == done.stdout.strip()
