"""The columns of a table of states: one row per vector."""

from __future__ import annotations

import pyarrow as pa

STATES = pa.schema(
    [
        pa.field("namespace", pa.string(), nullable=False),
        pa.field("vector_id", pa.string(), nullable=False),
        pa.field("alive", pa.bool_(), nullable=False),
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("data", pa.binary()),
        pa.field("metadata", pa.string()),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("lamport", pa.int64(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("counter", pa.int64(), nullable=False),
        pa.field("ignored", pa.int64(), nullable=False),
    ]
)
"""One row per vector: its state, and the delta that last changed it. `ignored`: deltas without effect."""
STATES_DDL = (
    "namespace string not null, vector_id string not null, alive boolean not null, vector array<float>, "
    "data binary, metadata string, offset long not null, lamport long not null, origin string not null, "
    "counter long not null, ignored long not null"
)
