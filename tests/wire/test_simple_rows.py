"""Simple deltas: made quickly, encoded the short way, and no different from any other for it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop_wire.delta import AckLevel, Delta, Dot, Operation, Priority, Source, opaque
from delta_prop_wire.encode import encode_batch, encode_opaque
from delta_prop_wire.validate import is_simple

SIMPLE = st.builds(
    Delta,
    st.sampled_from(["a", "key-1", "é", "a longer name"]),
    st.binary(max_size=5).map(opaque),
    st.sampled_from(["default", "orders", "über"]),
    timestamp=st.sampled_from([0, 0, 0, 7]),
    source=st.sampled_from(list(Source)),
)


@given(st.lists(SIMPLE, min_size=1, max_size=20), st.sampled_from(list(Priority)))
def test_the_short_way_makes_the_same_bytes(deltas: list[Delta], priority: Priority) -> None:
    assert all(map(is_simple, deltas))
    terms = {"origin": 48, "base": 9, "epoch": 3, "ack_level": AckLevel.DURABLE, "priority": priority}
    short, long = encode_opaque(deltas, **terms), encode_batch(deltas, **terms)  # type: ignore[arg-type]
    assert bytes(short.raw) == bytes(long.raw)


def test_a_delta_is_a_value_that_cannot_be_changed() -> None:
    delta = Delta("k", opaque(b"x"), "n", metadata={"a": 1}, dot=Dot(1, 2))
    for same in (copy.copy(delta), copy.deepcopy(delta), pickle.loads(pickle.dumps(delta)), replace(delta)):
        assert same == delta
        assert type(same) is Delta
        assert type(same.operation) is Operation
    assert replace(delta, id=bytes(16)).id == bytes(16)
    assert delta.operation == Operation(8, data=b"x")
    for one, field in ((delta, "vector_id"), (delta.operation, "data")):
        with pytest.raises(FrozenInstanceError):
            setattr(one, field, "other")
    with pytest.raises(TypeError, match="operation"):
        Delta("k")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Delta("k", opaque(b""), colour=1)  # type: ignore[call-arg]
