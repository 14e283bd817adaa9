"""Converts rows of a storage sink's file to states in Arrow's columns. Needs pyarrow, not Spark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa

from delta_prop.auditing.sink_file import Row, SinkRows, kind_of
from delta_prop.spark.states.changes import CHANGES, STATE
from delta_prop_wire.delta import Kind

UNREADABLE, UNKNOWN_METADATA = b"\xc1", b"\xc1\x00"
"""Markers for metadata that are not a JSON object, and for unknown metadata; no msgpack begins like this."""
_NO_INDICES = pa.array([], pa.uint32())


def read_states(rows: SinkRows) -> Iterator[pa.Table]:
    """Yield all rows. Raises UsageError if the file is corrupted."""
    return map(_to_table, rows.read_pages())


def _to_table(page: list[Row]) -> pa.Table:
    columns: list[tuple[Any, ...]] = list(zip(*page, strict=True))
    namespaces, ids, formats, values, metadata, ignored, lamports, origins, counters, offsets = columns
    kinds = np.array(
        [kind_of(format_, value) for format_, value in zip(formats, values, strict=True)], np.uint8
    )
    vectors = [value if kind == Kind.CREATE else b"" for kind, value in zip(kinds, values, strict=True)]
    pairs = zip(kinds, values, strict=True)
    data = [bytes(value or b"") if kind == Kind.OPAQUE else b"" for kind, value in pairs]
    sizes = np.array([len(one) // 4 for one in vectors])
    bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    numbers = np.frombuffer(b"".join(vectors), "<f4").astype(np.float32)
    count = len(page)
    arrays = {
        "key": [f"{namespace}\0{one}" for namespace, one in zip(namespaces, ids, strict=True)],
        "kind": kinds | np.uint8(STATE),
        "values": pa.ListArray.from_arrays(pa.array(bounds), pa.array(numbers)),
        "indices": pa.ListArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), _NO_INDICES),
        "data": pa.array(data, pa.binary()),
        "patch": pa.array(list(map(pack_metadata, metadata)), pa.binary()),
        "id": pa.nulls(count, pa.binary()),
        "known": np.zeros(count, np.uint8),
        "offset": np.array(offsets, np.int64),
        "lamport": np.array(lamports, np.int64).view(np.uint64),
        "origin": np.array(origins, np.int64).view(np.uint64),
        "counter": np.array(counters, np.int64).view(np.uint64),
        "ignored": np.array(ignored, np.int64),
    }
    return pa.table([arrays[name] for name in CHANGES.names], schema=CHANGES)


def pack_metadata(text: object) -> bytes | None:
    """Return metadata in msgpack: None if there are none, `UNREADABLE` if they are not a JSON object."""
    if text is None:
        return None
    try:
        metadata = json.loads(text)  # type: ignore[arg-type]
        return bytes(msgpack.packb(metadata)) if isinstance(metadata, dict) else UNREADABLE
    except (ValueError, TypeError, OverflowError):
        return UNREADABLE
