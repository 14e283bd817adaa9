"""Opaque deltas and columns encode to the same bytes as with `encode_batch`."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.batch import Batch
from delta_prop_wire.delta import AckLevel, Delta, Dot, Kind, Operation, Priority, Source, opaque
from delta_prop_wire.encode import encode_batch, encode_opaque, encode_vectors
from delta_prop_wire.validate import is_opaque_only

OPAQUE_DELTAS = st.builds(
    Delta,
    st.sampled_from(["a", "key-1", "a longer name"]),
    st.binary(max_size=5).map(opaque),
    st.sampled_from(["default", "orders"]),
    timestamp=st.sampled_from([0, 0, 0, 7]),
    source=st.sampled_from(list(Source)),
)


@given(st.lists(OPAQUE_DELTAS, min_size=1, max_size=20), st.sampled_from(list(Priority)))
def test_opaque_encoder_makes_the_same_bytes(deltas: list[Delta], priority: Priority) -> None:
    assert all(map(is_opaque_only, deltas))
    header_fields = {"origin": 48, "base": 9, "epoch": 3, "ack_level": AckLevel.DURABLE, "priority": priority}
    fast = encode_opaque(deltas, **header_fields)  # type: ignore[arg-type]
    has_time = any(delta.timestamp for delta in deltas)
    assert (fast is None) == has_time
    general = encode_batch(deltas, **header_fields)  # type: ignore[arg-type]
    assert fast is None or bytes(fast.raw) == bytes(general.raw)


@given(
    st.lists(st.sampled_from(["a", "key-1", "a longer name", "é", "näme"]), min_size=1, max_size=20),
    st.integers(0, 5),
    st.sampled_from([Kind.CREATE, Kind.DENSE, Kind.SPARSE, Kind.SPARSE_ADD]),
    st.lists(st.builds(Dot, st.integers(1, 9), st.integers(1, 9)), max_size=2),
)
def test_column_encoder_makes_the_bytes_of_rows(ids: list[str], width: int, kind: Kind, clock: Any) -> None:
    numbers = np.arange(len(ids) * width, dtype=np.float32).reshape(len(ids), width)
    indices = numbers.astype(np.uint32) if kind in (Kind.SPARSE, Kind.SPARSE_ADD) else None
    operations = [
        Operation(kind, values, None if indices is None else indices[row])
        for row, values in enumerate(numbers)
    ]
    deltas = [Delta(name, operation, "n") for name, operation in zip(ids, operations, strict=True)]
    header_fields: Any = {
        "origin": 48,
        "base": 9,
        "epoch": 3,
        "ack_level": AckLevel.DURABLE,
        "hybrid_time": 7,
    }
    fast = encode_vectors(
        ids, numbers, indices=indices, namespace="n", kind=kind, clock=clock, **header_fields
    )
    general = encode_batch(deltas, clock=clock, **header_fields)
    assert bytes(fast.raw) == bytes(general.raw)
    reread = Batch(fast.raw)
    names = (
        "keys",
        "namespace",
        "namespace_names",
        "values_per_row",
        "highest_index",
        "clock",
        "crc",
        "last",
    )
    assert [getattr(fast, name) for name in names] == [getattr(reread, name) for name in names]
    for name in ("values", "indices"):
        preset, decoded = getattr(fast, name), getattr(reread, name)
        assert preset.dtype == decoded.dtype
        assert preset.tolist() == decoded.tolist()
        assert not len(preset) or not preset.flags.writeable


def test_delta_is_a_value() -> None:
    delta = Delta("k", opaque(b"x"), "n", metadata={"a": 1}, dot=Dot(1, 2))
    for copied in (copy.copy(delta), copy.deepcopy(delta), pickle.loads(pickle.dumps(delta)), replace(delta)):
        assert copied == delta
        assert type(copied) is Delta
        assert type(copied.operation) is Operation
    assert replace(delta, id=bytes(16)).id == bytes(16)
    assert delta.operation == Operation(8, data=b"x")
    assert hash(replace(delta)) == hash(delta)
    with pytest.raises(TypeError, match="operation"):
        Delta("k")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Delta("k", opaque(b""), colour=1)  # type: ignore[call-arg]
