"""A producer's checks before sending: the fast path accepts nothing that the full check refuses.

The fast path is `has_only_opaque`, the full check `check_deltas`; `validate` tries one, then the other.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_prop.calls.argument_checks import check_deltas, has_only_opaque, validate
from delta_prop_wire.delta import Delta, Dot, Kind, Operation, Priority, Source, create, opaque
from delta_prop_wire.errors import DeltaPropError
from delta_prop_wire.spec import BATCH_ROWS_MAX

FIELD_VALUES: dict[str, list[Any]] = {
    "vector_id": ["", "a\nb", "x" * 2_000, 7, None],
    "operation": [create([1.0]), Operation(Kind.OPAQUE, data="text"), None, "opaque"],  # type: ignore[arg-type]
    "namespace": ["", 7, "n" * 300],
    "id": [bytes(16), b"short"],
    "parents": [None, [], (Dot(1, 1),)],
    "topics": [None, ("t",), []],
    "clock": [(Dot(1, 1),)],
    "timestamp": [-1, 1 << 64, True, 7],
    "priority": [Priority.HIGH, 2, 9],
    "source": [Source.REPLICA, 0],
    "metadata": [{"a": 1}, {}],
    "expect": [Dot(1, 1)],
}
FIELDS = st.sampled_from(sorted(FIELD_VALUES)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(FIELD_VALUES[name]))
)


def check_result(deltas: list[Any]) -> object:
    try:
        return check_deltas(deltas)
    except DeltaPropError as error:
        return type(error)


def make_delta(**fields: Any) -> Delta:
    return Delta(**{"vector_id": "k", "operation": opaque(b"x"), **fields})


@given(st.lists(st.none() | FIELDS, min_size=1, max_size=3))
def test_opaque_only_offer_passes_the_full_check(fields: list[tuple[str, Any] | None]) -> None:
    deltas = [make_delta() if one is None else make_delta(**dict([one])) for one in fields]
    is_opaque_only = has_only_opaque(deltas)
    if is_opaque_only:
        assert check_result(deltas) == deltas[0].priority
        assert validate(deltas) == (deltas[0].priority, True)
    if all(one is None for one in fields):
        assert is_opaque_only


@pytest.mark.parametrize("deltas", [[], [None], ["delta"], [make_delta()] * (BATCH_ROWS_MAX + 1)])
def test_invalid_call_is_left_to_the_full_check(deltas: list[Any]) -> None:
    assert not has_only_opaque(deltas)
    with pytest.raises(DeltaPropError):
        validate(deltas)
